"""Scoring paths by name, and a user's own function as one: `python:<module>:<function>`, or `(name, function)` in Python.

The contract of such a function is docs/scorers.md. It is the user's own code, named by the user: it runs as it is, with the current
folder importable; what it raises is reported as its own, and what it returns is checked before it is believed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.codecs.names import STEPS, names_step
from maxsim_eval.errors import MaxsimEvalError, ProgramExit, UnknownNameError, UsageError, did_you_mean
from maxsim_eval.hashing import feed
from maxsim_eval.scoring.compressed import codec_path
from maxsim_eval.scoring.paths import REFERENCE, ScoringPath, our_paths
from maxsim_kernels import Packed

PREFIX = "python:"
OTHER_RUNS = ("python-*.trec", "codec-*.trec")  # what `run_file` makes of names that are not ours
Scorer = Callable[[Packed, Packed], Tensor]
Chosen = str | tuple[str, Scorer]
"""A path as a caller names it: one of `our_paths`, `python:<module>:<function>`, or a name and a function."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WIDENED = (torch.float32, torch.float16, torch.bfloat16)  # float32 holds each exactly
_PASSED = (KeyboardInterrupt, ProgramExit)  # Ctrl-C and SIGTERM: no failures of the user's code (its own `sys.exit` is one)
# Module name -> the module and the digest of its source, both as they were when it was imported here.
_sources: dict[str, tuple[ModuleType, str]] = {}


class ScorerError(UsageError):
    """A user's function, or its module, raised something or returned what is no scores."""

    many_lines = True


def check_paths(chosen: Sequence[Chosen]) -> tuple[str, ...]:
    """Names of the chosen paths without repeats, reference first; errors as of `find_paths`."""
    return tuple(find_paths(chosen))


def find_paths(chosen: Sequence[Chosen]) -> dict[str, ScoringPath]:
    """The chosen paths by name, without repeats, reference first; modules of users' functions are imported.

    Raises:
        UnknownNameError: no such path, or no such function in its module. UsageError: a name that cannot be one, two paths of one
            name. ScorerError: a module that cannot be imported.
    """
    found: dict[str, ScoringPath] = {}
    for one in chosen:
        name = one if isinstance(one, str) else _name_of(one)
        path = _own_path(name, one[1], None) if not isinstance(one, str) else _path_of(name)
        if isinstance(found.get(name, path).score, _Call) and found.get(name, path).score != path.score:
            raise UsageError(f"paths: two functions under the name {name!r}, need one name for each")
        found[name] = path
    files: dict[str, str] = {}
    for name in found:
        if files.setdefault(run_file(name).casefold(), name) != name:
            raise UsageError(
                f"paths: {name!r} and {files[run_file(name).casefold()]!r} would share {run_file(name)}; rename one"
            )
    return {name: found[name] for name in sorted(found, key=lambda name: name != REFERENCE)}


def own_function(name: str) -> Scorer:
    """The function behind `python:<module>:<function>` itself, without the checks of a path; errors as of `find_paths`."""
    if not name.startswith(PREFIX):
        raise UsageError(f"scorer: got {name!r}, need python:<module>:<function>, as python:my_kernels:score")
    call = _path_of(name).score
    assert isinstance(call, _Call)

    def function(queries: Packed, documents: Packed) -> Tensor:
        with _importable():
            return call.function(queries, documents)

    return function


def run_file(name: str) -> str:
    """File name of a path's run: `fp16.trec`, `codec-<name>.trec`, `python-<what names a user's function>.trec`; safe everywhere."""
    if name in our_paths():
        return f"{name}.trec"
    kind = "codec" if not name.startswith(PREFIX) and names_step(name) else "python"
    return f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name.removeprefix(PREFIX)).strip('-')}.trec"


def _name_of(pair: Any) -> str:
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not callable(pair[1]):
        raise UsageError(f"paths: got {pair!r}, need a name, or (name, function)")
    ours = pair[0] in our_paths() or names_step(pair[0])
    if not _NAME.fullmatch(pair[0]) or ours:
        taken = "one of our own paths" if ours else "letters, digits, dots, dashes and underscores only are allowed"
        raise UsageError(f"paths: the name {pair[0]!r} of a function cannot be used: {taken}")
    return pair[0]


def _path_of(name: str) -> ScoringPath:
    if name in our_paths():
        return our_paths()[name]
    if not name.startswith(PREFIX):
        if names_step(name):
            return codec_path(name)
        raise UnknownNameError("path", name, [*our_paths(), "python:<module>:<function>", *STEPS])
    module, _, attribute = name.removeprefix(PREFIX).partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not attribute or not all(part.isidentifier() for part in parts):
        raise UsageError(f"path {name!r}: need python:<module>:<function>, as python:my_kernels:score")
    found, source = _imported(name, module)
    target: Any = found
    for part in attribute.split("."):
        if not hasattr(target, part):
            functions = [key for key, value in vars(target).items() if callable(value) and not key.startswith("_")]
            raise UnknownNameError(f"function of {getattr(target, '__name__', module)}", part, functions)
        target = getattr(target, part)
    if not callable(target):
        raise UsageError(f"path {name!r}: {attribute} is a {type(target).__name__}, need a function")
    return _own_path(name, target, source)


def _own_path(name: str, function: Scorer, source: str | None) -> ScoringPath:
    called = ".".join(_called(function))
    about = f", source {source[:12]}" if source else ""
    return ScoringPath(
        f"the user's own function {called}{about}, on tokens as they are in the cache",
        lambda queries: queries,
        lambda block, _: block,
        _Call(name, function),
        0,
        own=True,
        source=source,
    )


# Importing --------------------------------------------------------------------------------------------------------------


@contextmanager
def _importable() -> Iterator[None]:
    """The current folder importable, last, and only while a user's code runs: a folder `datasets` in it must not be taken for one
    of the packages that ours import."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(here)


def _imported(name: str, module: str) -> tuple[ModuleType, str | None]:
    """The module, and the digest of its source; None where somebody imported it before, perhaps from another state of its file."""
    before = sys.modules.get(module)
    if before is not None:
        _require_own(name, module)
        held = _sources.get(module)
        return before, held[1] if held is not None and held[0] is before else None
    importlib.invalidate_caches()
    try:
        with _importable():
            found = importlib.import_module(module)
    except MaxsimEvalError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise ScorerError(f"path {name}: importing {module} failed\n{_trace(error)}") from error
        hint = did_you_mean(module, [path.stem for path in Path().glob("*.py")])
        raise UsageError(
            f"path {name}: no module {module!r} in the current folder or on PYTHONPATH. {hint}".rstrip()
        ) from error
    except _PASSED:
        raise
    except BaseException as error:
        raise ScorerError(f"path {name}: importing {module} failed\n{_trace(error)}") from error
    _require_own(name, module)
    _sources[module] = found, _digest(found)
    return found, _sources[module][1]


def _require_own(name: str, module: str) -> None:
    """Refuse an installed module where the current folder holds one of the same name: the user means the latter."""
    root = module.partition(".")[0]
    here = [path for path in (Path(f"{root}.py"), Path(root) / "__init__.py") if path.is_file()]
    file = getattr(sys.modules[root], "__file__", None)
    if here and (file is None or Path(file).resolve() != here[0].resolve()):
        raise UsageError(
            f"path {name}: {root!r} is also the name of {file or 'a built-in module'}, which is imported instead of {here[0]}; "
            "rename yours"
        )


def _digest(module: ModuleType) -> str:
    """SHA-256 over the files of `_reached`."""
    found = hashlib.sha256()
    for name, path in sorted(_reached([module])[0].items()):
        feed(found, [name.encode(), path.read_bytes()])
    return found.hexdigest()


def _reached(begin: Sequence[ModuleType]) -> tuple[dict[str, Path], set[str]]:
    """Files, by module, of these modules and of everything that they have imported by name, the standard library and installed packages
    aside; and the names of those packages."""
    library, installed = (
        {Path(sysconfig.get_path(kind)).resolve() for kind in kinds}
        for kinds in (("stdlib", "platstdlib"), ("purelib", "platlib"))
    )
    installed |= {Path(place).resolve() for place in sys.path if place and any(Path(place).glob("*.dist-info"))}
    files: dict[str, Path] = {}
    packages, seen, todo = set[str](), set[str](), list(begin)
    while todo:
        one = todo.pop()
        root, place = one.__name__.partition(".")[0], getattr(one, "__file__", None)
        place = place if place and Path(place).is_file() else None  # `torch._classes` names a file that never was
        if one.__name__ in seen or root in ("maxsim_eval", "maxsim_kernels") or root in sys.builtin_module_names:
            continue
        seen.add(one.__name__)
        above = set(Path(place).resolve().parents) if place else set()
        if above & installed:  # asked first: their folder lies in that of the standard library
            packages.add(root)
        elif not above & library and (place or one in begin):  # a function typed at a prompt has no file
            files |= {one.__name__: Path(place)} if place else {}
            for value in list(vars(one).values()):
                owner = value if isinstance(value, ModuleType) else None
                if isinstance(value, FunctionType | type):
                    owner = sys.modules.get(value.__module__)
                todo += [] if owner is None else [owner]
    return files, packages


def scorer_facts(paths: Mapping[str, ScoringPath]) -> dict[str, Any]:
    """`scorers` of a Result's environment (docs/result.md): what users' functions are and use; nothing where there are none."""
    own = {name: path for name, path in paths.items() if path.own}
    known = importlib.metadata.packages_distributions() if own else {}
    found = {}
    for name, path in own.items():
        function = getattr(path.score, "function", path.score)
        while isinstance(function, partial):
            function = function.func
        called = _called(function)
        named = name.removeprefix(PREFIX).partition(":")[0] if name.startswith(PREFIX) else None
        modules = [sys.modules[one] for one in dict.fromkeys((named, called[0])) if one in sys.modules]
        files, packages = _reached(modules)
        versions = (getattr(module, "__version__", None) for module in modules)
        distributions = sorted({one for package in packages for one in known.get(package, ())})
        found[name] = {
            "function": ".".join(called),
            "version": next((str(version) for version in versions if version is not None), None),
            "sha256": path.source if files else None,
            "packages": {one: importlib.metadata.version(one) for one in distributions},
        }
    return {"scorers": found} if found else {}


def _called(function: Any) -> tuple[str, str]:
    """Module and name of a function, or of the type of what is called as one."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return str(getattr(kind, "__module__", None) or "?"), str(kind.__qualname__)


def _trace(error: BaseException) -> str:
    """The traceback of a user's code, without our frames and those of the import system."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith("<frozen") and frame.filename != __file__]
    theirs = [frame for frame in theirs if frame.filename != importlib.__file__]
    return "".join([*traceback.format_list(theirs), *traceback.format_exception_only(error)]).rstrip()


# Calling ----------------------------------------------------------------------------------------------------------------


def _copied(queries: Packed) -> Packed:
    """A copy of the queries for one call: what is written into them unseen by torch must not reach other paths."""
    if queries.offsets is None:
        return queries.compact()
    return Packed(queries.values.clone(), queries.offsets.clone())


@dataclass(frozen=True)
class _Call:
    """A user's function as a path's operator: `(queries, documents) -> [Nq, N]` float32."""

    name: str
    function: Scorer

    def __call__(self, queries: Packed, documents: Packed) -> Tensor:
        queries, documents = _copied(queries), documents.compact()  # reranking hands on views
        version = queries.values._version
        try:
            with _importable(), torch.no_grad():
                scores = self.function(queries, documents)
        except (MaxsimEvalError, torch.OutOfMemoryError, *_PASSED):
            raise  # the memory of a GPU is what the caller's budget is about
        except BaseException as error:
            got = f"{len(queries)} queries and {len(documents)} documents, {documents.dtype} on {documents.device}"
            raise ScorerError(f"path {self.name}: its function raised, given {got}\n{_trace(error)}") from error
        self._check(scores, queries, documents)
        if queries.values._version != version:
            raise ScorerError(f"path {self.name}: its function changed the queries in place; need them as they are")
        return scores.detach().to(torch.float32, copy=True)

    def _check(self, scores: Any, queries: Packed, documents: Packed) -> None:
        need = f"need a tensor [{len(queries)}, {len(documents)}] (queries, documents) of float32, float16 or bfloat16"
        if not isinstance(scores, Tensor):
            raise ScorerError(f"path {self.name}: its function returned a {type(scores).__name__}, {need}")
        if tuple(scores.shape) != (len(queries), len(documents)) or scores.dtype not in _WIDENED:
            got = f"{str(scores.dtype).removeprefix('torch.')} {list(scores.shape)}"
            raise ScorerError(f"path {self.name}: its function returned {got}, {need}")
        if scores.device != documents.device:
            raise ScorerError(
                f"path {self.name}: its function returned scores on {scores.device}, need the documents' device {documents.device}"
            )
