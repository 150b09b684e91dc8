"""What may be patched: the versions and signatures that are known; putting names in place and taking them away again.

A replaced function is found by identity in every module of the library, so names that its modules took by `from x import y`, defaults
of arguments and attributes of classes change too, and are restored from what is there at the time, modules imported meanwhile included.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any


class IntegrationError(RuntimeError):
    """A library that is not there, or that is not what was tested: nothing was patched."""


@dataclass(frozen=True)
class Target:
    """One function of a library: where it is, its parameters, and whether it is replaced or only called."""

    module: str
    name: str  # "maxsim", or "ColBERTScores.__call__"
    signature: str  # names and defaults, without annotations
    replaced: bool = True

    @property
    def path(self) -> str:
        """Its full name."""
        return f"{self.module}.{self.name}"


class Library:
    """A library that can be patched: what is known of it, its own functions once they were looked up, and how it is switched."""

    def __init__(self, name: str, package: str, versions: tuple[str, ...], targets: tuple[Target, ...]) -> None:
        self.name, self.package, self.versions, self.targets = name, package, versions, targets
        self.enabled = self.strict = self.exact = False
        self.calls: Counter[str] = Counter()  # scored by the operator, by function
        self.left: Counter[str] = Counter()  # left to the library, by reason
        self._originals: dict[str, Callable[..., Any]] = {}
        self._table: dict[int, tuple[object, object]] = {}  # id of what stood there -> (it, what stands there now)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The library's own function, whether it is replaced or not."""
        if not self._originals:
            self._look_up()
        return self._originals[name]

    def installed(self) -> str | None:
        """The installed version, without importing the library."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def patch(self, replacements: Mapping[str, Callable[..., Any]]) -> None:
        """Check everything first, then put the replacements in place."""
        found = self._look_up()
        for target in self.targets:
            if target.replaced:
                raw, function = found[target.name]
                new = _stand_in(self, function, replacements[target.name])
                self._table[id(raw)] = (raw, staticmethod(new) if isinstance(raw, staticmethod) else new)
        self.enabled = True
        _swap(self.package, self._table)

    def restore(self) -> None:
        """Put the library's own functions back wherever a replacement stands."""
        self.enabled = False
        _swap(self.package, {id(new): (new, old) for old, new in self._table.values()})
        self._table = {}
        taken = [t.path for t in self.targets if t.replaced and _function(_find(t)) is not self._originals[t.name]]
        if taken:
            warnings.warn(
                f"maxsim_kernels: not restored, since something else has replaced them: {', '.join(taken)}", stacklevel=4
            )

    def places(self) -> list[str]:
        """Every name that stands for a replacement now."""
        table = {id(new): (new, new) for _, new in self._table.values()}
        return sorted(place.name for place in _places(self.package, table))

    def _look_up(self) -> dict[str, tuple[object, Callable[..., Any]]]:
        """The library's functions as they stand, after the checks of its version and of every signature."""
        version = self.installed()
        if version is None:
            raise IntegrationError(f"{self.name}: not installed, need version {self._known()}")
        if not any(version == known or version.startswith(known + ".") for known in self.versions):
            raise IntegrationError(f"{self.name}: got version {version}, need {self._known()}, the ones this was tested with")
        found = {}
        for target in self.targets:
            raw = _find(target)
            function = _function(raw)
            _check(self.name, version, target, function)
            found[target.name] = (raw, function)
        self._originals = {name: function for name, (_, function) in found.items()}
        return found

    def _known(self) -> str:
        return " or ".join(self.versions)


def _find(target: Target) -> object:
    """What stands at a target's place, staticmethods unopened; None where there is nothing."""
    held: Any = importlib.import_module(target.module)
    for part in target.name.split("."):
        held = vars(held).get(part) if isinstance(held, ModuleType | type) else None
    return held


def _function(raw: object) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod) else raw


def _check(library: str, version: str, target: Target, function: object) -> None:
    """Refuse what is not the function that is known: another's replacement, other parameters, nothing at all."""
    if not isinstance(function, FunctionType):
        raise IntegrationError(f"{library} {version}: {target.path} is {type(function).__name__}, need a function")
    if function.__module__ != target.module or hasattr(function, "__wrapped__") or _file(function) != _file_of(target.module):
        raise IntegrationError(
            f"{library} {version}: {target.path} is already replaced, by code of {function.__code__.co_filename}"
        )
    got = _signature(function)
    if got != target.signature:
        raise IntegrationError(f"{library} {version}: {target.path} takes {got}, need {target.signature}")


def _file(function: FunctionType) -> str:
    return function.__code__.co_filename


def _file_of(module: str) -> str | None:
    return sys.modules[module].__file__


def _signature(function: Callable[..., Any]) -> str:
    """Parameters with their defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _stand_in(library: Library, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """What is put in place: the library's name and signature; whoever keeps it beyond `disable` calls the library again."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if library.enabled else original(*args, **kwargs)

    return stand_in


@dataclass(frozen=True)
class _Place:
    """Somewhere that a function is held: a module, a class, or a function's defaults."""

    name: str
    held: object
    put: Callable[[object], None]


def _swap(package: str, table: Mapping[int, tuple[object, object]]) -> None:
    for place in list(_places(package, table)):
        place.put(table[id(place.held)][1])


def _places(package: str, table: Mapping[int, tuple[object, object]]) -> Iterator[_Place]:
    """Where the keys of `table` are held in the modules of a package; nothing is imported by looking."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(package + ".")):
            yield from _members(name, module, package, table, seen)


def _members(
    name: str, owner: ModuleType | type, package: str, table: Mapping[int, tuple[object, object]], seen: set[int]
) -> Iterator[_Place]:
    for key, value in list(vars(owner).items()):
        if id(value) in table and table[id(value)][0] is value:
            yield _Place(f"{name}.{key}", value, functools.partial(setattr, owner, key))
        function = _function(value)
        if id(function) in seen or not str(getattr(function, "__module__", "")).startswith(package):
            continue
        if isinstance(function, FunctionType):
            seen.add(id(function))
            yield from _defaults(f"{function.__module__}.{function.__qualname__}", function, table)
        elif isinstance(function, type):
            seen.add(id(function))
            yield from _members(f"{function.__module__}.{function.__qualname__}", function, package, table, seen)


def _defaults(name: str, function: FunctionType, table: Mapping[int, tuple[object, object]]) -> Iterator[_Place]:
    for number, value in enumerate(function.__defaults__ or ()):
        if id(value) in table:
            yield _Place(f"{name} (a default)", value, functools.partial(_put_default, function, number))
    named = function.__kwdefaults__ or {}
    for key, value in named.items():
        if id(value) in table:
            yield _Place(f"{name} (default of {key})", value, functools.partial(named.__setitem__, key))


def _put_default(function: FunctionType, number: int, value: object) -> None:
    held = list(function.__defaults__ or ())
    held[number] = value
    function.__defaults__ = tuple(held)
