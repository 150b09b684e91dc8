"""`enable`, `disable`, `status`: which libraries score with the operator."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from maxsim_kernels.integrations.patching import Library

# The library's name on the package registry -> the module here that knows it.
_MODULES = {
    "sentence-transformers": "maxsim_kernels.integrations.sentence_transformers",
    "pylate": "maxsim_kernels.integrations.pylate",
    "colpali-engine": "maxsim_kernels.integrations.colpali_engine",
}
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Status:
    """How one library stands.

    `installed`: its version, None where it is absent; `known`: the versions that `enable` takes. `places`: names of functions that run
    our code. `calls`: how many calls the operator has scored since `enable`, by function; `left`: how many it left to the library, by
    reason.
    """

    library: str
    installed: str | None
    known: tuple[str, ...]
    enabled: bool
    strict: bool
    fp32: str
    places: tuple[str, ...]
    calls: Mapping[str, int]
    left: Mapping[str, int]


class Enabled:
    """What `enable` returns: `with enable(...):` switches off at the end; without `with`, the library stays switched on."""

    def __init__(self, library: str, switched: bool) -> None:
        self.library, self._switched = library, switched

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        if self._switched:
            disable(self.library)


def enable(library: str, *, strict: bool = False, fp32: str = "fast") -> Enabled:
    """Let a library score and train with the operator, by its own rules, also where its functions were imported before.

    Args:
        library: "sentence-transformers" (6.0 to 6.2), "pylate" (1.6) or "colpali-engine" (0.3.18).
        strict: padding never wins: where PyLate or colpali-engine give a masked or padded token the similarity 0, which beats negative
            ones, it is left out instead. Without a mask, an all-zero row counts as padding, in lists too. A call that only the
            library can score is refused with a ValueError. sentence-transformers always leaves padding out.
        fp32: on GPUs, "fast" lets products of float32 embeddings use TF32, "exact" keeps what torch is set to.

    Returns:
        A context manager that switches off at its end; as a plain call, the library stays switched on until `disable`. Where the
        library is already on with the same options, nothing changes, and the end of the inner block leaves it on.

    Raises:
        IntegrationError: the library is not installed, its version or a signature is not one of those tested, or something else has
            already replaced a function. Nothing is patched then.
    """
    if fp32 not in ("fast", "exact"):
        raise ValueError(f"fp32: got {fp32!r}, need 'fast' or 'exact'")
    with _LOCK:
        held = _known(library)
        asked = (strict, fp32 == "exact")
        if held.enabled:
            if asked != (held.strict, held.exact):
                raise ValueError(f"{library} is already enabled with other options; call disable({library!r}) first")
            return Enabled(library, switched=False)
        held.calls.clear()
        held.left.clear()
        held.strict, held.exact = asked
        try:
            held.patch(_MODULES[library])
        finally:
            if not held.enabled:
                held.strict = held.exact = False
    return Enabled(library, switched=True)


def disable(library: str | None = None) -> None:
    """Give a library, or all of them, its own functions back; nothing happens where it is not enabled."""
    with _LOCK:
        for name in _MODULES if library is None else (library,):
            held = _known(name)
            if held.enabled:
                held.restore()
                held.strict = held.exact = False


def status() -> dict[str, Status]:
    """How every known library stands; imports none of them."""
    with _LOCK:
        return {name: _status(_known(name)) for name in _MODULES}


def _status(held: Library) -> Status:
    return Status(
        library=held.name,
        installed=held.installed(),
        known=held.versions,
        enabled=held.enabled,
        strict=held.strict,
        fp32="exact" if held.exact else "fast",
        places=tuple(held.places()) if held.enabled else (),
        calls=dict(held.calls),
        left=dict(held.left),
    )


def _known(library: str) -> Library:
    if library not in _MODULES:
        raise ValueError(f"library: got {library!r}, need one of {', '.join(map(repr, _MODULES))}")
    held: Library = importlib.import_module(_MODULES[library]).LIBRARY
    return held
