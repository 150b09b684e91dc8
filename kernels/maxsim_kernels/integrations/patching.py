"""What may be patched: the versions and signatures that are known; giving functions other code and taking it away again.

A function of the library stays the object that it is and gets code that calls ours. So whatever holds it already (an imported name,
an argument's default, a loss, a model) scores with us too, and can be pickled by the library's name at any time. `disable` puts the
library's code back.
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
from types import CodeType, FunctionType, ModuleType
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
        self._patched: list[_Patched] = []

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

    def patch(self, module: str) -> None:
        """Check everything first, then give the functions code that calls the `REPLACEMENTS` of a module of ours."""
        found = self._look_up()
        self._patched = [
            _Patched(target, raw, function, function.__code__, _calling_ours(target, function, module))
            for target in self.targets
            if target.replaced
            for raw, function in (found[target.name],)
        ]
        self.enabled = True
        for one in self._patched:
            one.function.__code__ = one.ours

    def restore(self) -> None:
        """Give the functions the library's own code back."""
        self.enabled = False
        taken = []
        for one in self._patched:
            if one.function.__code__ is one.ours:
                one.function.__code__ = one.own
            if one.function.__code__ is not one.own or _function(_find(one.target)) is not one.function:
                taken.append(one.target.path)
        self._patched = []
        if taken:
            warnings.warn(
                f"maxsim_kernels: not restored, since something else has replaced them: {', '.join(taken)}", stacklevel=4
            )

    def places(self) -> list[str]:
        """Every name in the library's modules that stands for a function that runs our code."""
        return sorted(_places(self.package, {id(one): one for held in self._patched for one in (held.raw, held.function)}))

    def _look_up(self) -> dict[str, tuple[object, FunctionType]]:
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
        self._originals = {
            target.name: _copy(found[target.name][1]) if target.replaced else found[target.name][1] for target in self.targets
        }
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
    if target.replaced and function.__closure__:
        raise IntegrationError(f"{library} {version}: {target.path} has a closure, need a function without one")
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


def _copy(function: FunctionType) -> FunctionType:
    """A copy of a function that keeps the code of now, whatever code the original gets later."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.cache  # one code object however often a library is enabled: torch.compile then reuses what it compiled
def _calling_ours(target: Target, function: FunctionType, module: str) -> CodeType:
    """Code that takes the function's parameters and passes them to ours; defaults belong to the function and stay.

    It imports what it calls, so that it needs nothing in the library's module, also in a thread that is still in it after `disable`.
    """
    signature = inspect.signature(function)
    kinds = inspect.Parameter
    bare = [one.replace(annotation=kinds.empty, default=kinds.empty) for one in signature.parameters.values()]
    marks: dict[object, str] = {kinds.KEYWORD_ONLY: "{0}={0}", kinds.VAR_POSITIONAL: "*{0}", kinds.VAR_KEYWORD: "**{0}"}
    passed = ", ".join(marks.get(one.kind, "{0}").format(one.name) for one in bare)
    head = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    call = f"from {module} import REPLACEMENTS\n    return REPLACEMENTS[{target.name!r}]({passed})"
    compiled = compile(f"def {function.__name__}{head}:\n    {call}\n", f"<maxsim_kernels in place of {target.path}>", "exec")
    code = next(one for one in compiled.co_consts if isinstance(one, CodeType))
    return code.replace(co_qualname=function.__qualname__)


@dataclass(frozen=True)
class _Patched:
    """A function, what stands at its place (itself, or the staticmethod that holds it), the library's code and ours."""

    target: Target
    raw: object
    function: FunctionType
    own: CodeType
    ours: CodeType


def _places(package: str, table: Mapping[int, object]) -> Iterator[str]:
    """Names in the modules of a package that stand for objects of `table` (by id); nothing is imported."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(package + ".")):
            yield from _members(name, module, package, table, seen)


def _members(name: str, owner: ModuleType | type, package: str, table: Mapping[int, object], seen: set[int]) -> Iterator[str]:
    for key, value in list(vars(owner).items()):
        if id(value) in table:
            yield f"{name}.{key}"
        function = _function(value)
        if id(function) in seen or not str(getattr(function, "__module__", "")).startswith(package):
            continue
        if isinstance(function, FunctionType):
            seen.add(id(function))
            yield from _defaults(f"{function.__module__}.{function.__qualname__}", function, table)
        elif isinstance(function, type):
            seen.add(id(function))
            yield from _members(f"{function.__module__}.{function.__qualname__}", function, package, table, seen)


def _defaults(name: str, function: FunctionType, table: Mapping[int, object]) -> Iterator[str]:
    if any(id(value) in table for value in function.__defaults__ or ()):
        yield f"{name} (a default)"
    for key, value in (function.__kwdefaults__ or {}).items():
        if id(value) in table:
            yield f"{name} (default of {key})"
