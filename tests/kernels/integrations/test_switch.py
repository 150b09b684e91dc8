"""`enable`, `disable` and `status` on a library made up for the test: what is patched, what is refused, what is left behind."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from maxsim_kernels import integrations
from maxsim_kernels.integrations import IntegrationError, patching, switch
from maxsim_kernels.integrations.patching import Library, Target

NAME = "made-up"
SCORES = """
def score(a, b=None, *, scale=1):
    "What the library says of it."
    return "theirs"

def helper(x):
    return score(x)

class Scorer:
    def __call__(self, a, b=None, *, scale=1):
        return "theirs"

    @staticmethod
    def static(a):
        return "theirs"
"""
USES = """
from made_up.scores import Scorer, score
from made_up import scores as module

def loss(x, metric=score, *, other=score):
    return metric(x), other(x)

class Loss:
    def __init__(self, metric=score):
        self.metric = metric

class Own(Scorer):
    pass
"""


def written(folder: Path, scores: str = SCORES) -> None:
    package = folder / "made_up"
    package.mkdir()
    (package / "__init__.py").write_text("from made_up.scores import score\n")
    (package / "scores.py").write_text(scores)
    (package / "uses.py").write_text(USES)
    (package / "late.py").write_text("from made_up.scores import score\n")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The library, importable, known as version 1.2, with three replaced functions."""
    written(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {NAME: "1.2.3"}.get(name, "0"))
    signature = "(a, b=None, *, scale=1)"
    held = Library(
        NAME,
        "made_up",
        ("1.1", "1.2"),
        (
            Target("made_up.scores", "score", signature),
            Target("made_up.scores", "Scorer.__call__", signature.replace("(", "(self, ")),
            Target("made_up.scores", "Scorer.static", "(a)"),
            Target("made_up.scores", "helper", "(x)", replaced=False),
        ),
    )
    monkeypatch.setitem(sys.modules, "made_up_integration", module_of_ours(held))
    monkeypatch.setitem(switch._MODULES, NAME, "made_up_integration")
    yield held
    integrations.disable()
    for name in [name for name in sys.modules if name.split(".")[0] == "made_up"]:
        del sys.modules[name]


def module_of_ours(held: Library) -> ModuleType:
    """What knows the library, as the modules of the package do."""
    module = ModuleType("made_up_integration")
    module.LIBRARY = held  # type: ignore[attr-defined]
    module.REPLACEMENTS = {one.name: lambda *_, **__: "ours" for one in held.targets if one.replaced}  # type: ignore[attr-defined]
    return module


def everything(uses: Any) -> set[str]:
    """What every way to the functions answers."""
    made_up = sys.modules["made_up"]
    own, scorer = uses.Own(), uses.Scorer()
    answers = {made_up.score(1), uses.score(1), uses.module.score(1), uses.module.helper(1), uses.Loss().metric(1)}
    return answers | {*uses.loss(1), own(1), scorer(1), own.static(1), uses.Scorer.static(1)}


def snapshot() -> dict[str, Any]:
    """Every name of the library's modules and classes, and the defaults of its functions."""
    held: dict[str, Any] = {}
    for name, module in sys.modules.items():
        if name.split(".")[0] == "made_up":
            for key, value in vars(module).items():
                held[f"{name}.{key}"] = value
                if isinstance(value, type):
                    held |= {f"{name}.{key}.{inner}": one for inner, one in vars(value).items()}
                if inspect.isfunction(value):
                    held[f"{name}.{key} defaults"] = (
                        value.__defaults__,
                        value.__kwdefaults__,
                        vars(value).copy(),
                        value.__code__,
                    )
    return held


def same_objects(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        value == other[key] if key.endswith("defaults") else value is other[key] for key, value in one.items()
    )


def test_every_way_to_a_function_leads_to_ours_and_back(library: Library) -> None:
    uses = importlib.import_module("made_up.uses")
    before = snapshot()
    assert everything(uses) == {"theirs"}
    with integrations.enable(NAME) as held:
        assert everything(uses) == {"ours"}
        assert held.library == NAME
        places = integrations.status()[NAME].places
    assert everything(uses) == {"theirs"}
    assert same_objects(snapshot(), before)
    wanted = {"made_up.score", "made_up.uses.score", "made_up.scores.score", "made_up.scores.Scorer.__call__"}
    assert {*wanted, "made_up.uses.loss (a default)", "made_up.uses.loss (default of other)"} <= set(places)


def test_modules_imported_meanwhile_are_restored_too(library: Library) -> None:
    integrations.enable(NAME)
    late = importlib.import_module("made_up.late")
    uses = importlib.import_module("made_up.uses")
    kept, loss = late.score, uses.Loss()
    assert kept(1) == loss.metric(1) == "ours"
    integrations.disable(NAME)
    assert late.score is uses.score is sys.modules["made_up.scores"].score
    assert everything(uses) == {"theirs"}
    assert kept(1) == loss.metric(1) == "theirs", "what was kept from the time of enable() is the library's again"


def test_replacements_look_like_the_library(library: Library) -> None:
    scores = importlib.import_module("made_up.scores")
    theirs = scores.score
    signature = inspect.signature(theirs)
    with integrations.enable(NAME):
        assert scores.score.__name__ == "score"
        assert scores.score.__doc__ == theirs.__doc__
        assert scores.score.__code__.co_qualname == "score"
        assert inspect.signature(scores.score) == signature
        with pytest.raises(TypeError, match=r"score\(\) missing 1 required positional argument: 'a'"):
            scores.score()


def test_parameters_reach_ours_as_they_were_given(library: Library) -> None:
    scores = importlib.import_module("made_up.scores")
    seen: list[Any] = []
    sys.modules["made_up_integration"].REPLACEMENTS["score"] = lambda *given, **named: seen.append((given, named))  # type: ignore[attr-defined]
    with integrations.enable(NAME):
        scores.score(1)
        scores.score(b=2, a=1, scale=3)
    assert seen == [((1, None), {"scale": 1}), ((1, 2), {"scale": 3})]


def test_names_and_objects_taken_before_score_with_us_too(library: Library) -> None:
    uses = importlib.import_module("made_up.uses")
    kept, loss, method = uses.score, uses.Loss(), uses.Scorer().__call__
    with integrations.enable(NAME):
        assert kept(1) == loss.metric(1) == method(1) == "ours"
    assert kept(1) == loss.metric(1) == method(1) == "theirs"


def test_everything_can_be_pickled_before_in_and_after(library: Library) -> None:
    """By the library's names: who unpickles it elsewhere gets the library's functions."""
    uses = importlib.import_module("made_up.uses")
    before = [uses.score, uses.Loss(), functools.partial(uses.score, scale=2)]
    stored = [pickle.dumps(before)]
    with integrations.enable(NAME):
        meanwhile = [uses.score, uses.Loss(), functools.partial(uses.score, scale=2)]
        stored += [pickle.dumps(before), pickle.dumps(meanwhile)]
        assert pickle.loads(stored[0])[1].metric(1) == "ours"
    stored += [pickle.dumps(before), pickle.dumps(meanwhile)]
    assert len(set(stored)) == 1
    for one in map(pickle.loads, stored):
        assert one[0] is uses.score
        assert one[1].metric is one[2].func is uses.score


def test_a_call_that_is_running_ends_with_ours(library: Library) -> None:
    """A thread that has entered our code, or a function of ours, while another one disables."""
    scores = importlib.import_module("made_up.scores")
    entered, disabled, found = threading.Event(), threading.Event(), []

    def slow(*_: Any, **__: Any) -> str:
        entered.set()
        assert disabled.wait(20)
        return "ours"

    sys.modules["made_up_integration"].REPLACEMENTS["score"] = slow  # type: ignore[attr-defined]
    with integrations.enable(NAME):
        late = scores.score.__code__
        thread = threading.Thread(target=lambda: found.append(scores.score(1)))
        thread.start()
        assert entered.wait(20)
    disabled.set()
    thread.join(20)
    assert found == ["ours"]
    assert FunctionType(late, vars(scores))(1, None, scale=1) == "ours", "it needs nothing that disable() takes away"


def test_code_that_somebody_replaces_after_us_is_left_and_named(library: Library) -> None:
    scores = importlib.import_module("made_up.scores")
    integrations.enable(NAME)
    scores.score.__code__ = (lambda a, b=None, *, scale=1: "foreign").__code__
    with pytest.warns(UserWarning, match=r"not restored.*made_up\.scores\.score$"):
        integrations.disable(NAME)
    assert scores.score(1) == "foreign"


def test_blocks_may_be_nested(library: Library) -> None:
    scores = importlib.import_module("made_up.scores")
    with integrations.enable(NAME, strict=True):
        with integrations.enable(NAME, strict=True):
            assert scores.score(1) == "ours"
        assert scores.score(1) == "ours"
        with pytest.raises(ValueError, match="already enabled with other options"):
            integrations.enable(NAME)
        assert integrations.status()[NAME].strict
    assert scores.score(1) == "theirs"
    assert not integrations.status()[NAME].strict
    with pytest.raises(ZeroDivisionError), integrations.enable(NAME):
        1 / 0  # noqa: B018
    assert scores.score(1) == "theirs"
    integrations.disable(NAME)
    integrations.disable()


def test_what_somebody_replaces_after_us_is_left_and_named(library: Library) -> None:
    scores = importlib.import_module("made_up.scores")
    integrations.enable(NAME)
    scores.score = foreign = lambda a: "foreign"
    with pytest.warns(UserWarning, match=r"not restored.*made_up\.scores\.score$"):
        integrations.disable(NAME)
    assert scores.score is foreign


REFUSED = {
    "a parameter more": (
        "scale=1):\n    ",
        "scale=1, beam=2):\n    ",
        r"made_up\.scores\.score takes .*beam=2\), need \(a, b=None",
    ),
    "another default": ("b=None, *, scale=1):\n    ", "b=0, *, scale=1):\n    ", r"score takes \(a, b=0.*need \(a, b=None"),
    "not there": ("def score", "def scored", r"score is NoneType, need a function"),
    "no function": ("class Scorer", "score = 3\nclass Scorer", r"score is int, need a function"),
    "another class": ("class Scorer", "class Scores", r"Scorer\.__call__ is NoneType"),
    "wrapped": (
        "class Scorer",
        "import functools\nscore = functools.wraps(score)(lambda *a: 1)\nclass Scorer",
        "already replaced",
    ),
    "with a closure": (
        "class Scorer",
        "def made(own):\n    def score(a, b=None, *, scale=1):\n        return own\n    return score\nscore = made(1)\nclass Scorer",
        "score has a closure",
    ),
    "from elsewhere": (
        "class Scorer",
        "from textwrap import dedent as score\nclass Scorer",
        "already replaced, by code of .*textwrap",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(library: Library, tmp_path: Path, case: str) -> None:
    old, new, message = REFUSED[case]
    changed = SCORES.replace(old, new, 1)
    assert changed != SCORES
    (tmp_path / "made_up" / "scores.py").write_text(changed)
    (tmp_path / "made_up" / "__init__.py").write_text("")
    importlib.import_module("made_up.scores")
    before = snapshot()
    with pytest.raises(IntegrationError, match=message) as raised:
        integrations.enable(NAME)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("made-up 1.2.3: ")
    assert same_objects(snapshot(), before)
    assert not integrations.status()[NAME].enabled


@pytest.mark.parametrize("version", ["1.3", "1.20", "2.1.2", "0.1.2"])
def test_other_versions_are_refused_before_anything_is_imported(
    library: Library, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(IntegrationError, match=rf"^made-up: got version {version}, need 1\.1 or 1\.2"):
        integrations.enable(NAME)
    assert "made_up" not in sys.modules


def test_absent_libraries_unknown_names_and_options(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^library: got 'mteb', need one of 'sentence-transformers'"):
        integrations.enable("mteb")
    with pytest.raises(ValueError, match=r"^library: got 'mteb'"):
        integrations.disable("mteb")
    with pytest.raises(ValueError, match=r"^fp32: got 'half', need 'fast' or 'exact'"):
        integrations.enable(NAME, fp32="half")

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(IntegrationError, match=r"^made-up: not installed, need version 1\.1 or 1\.2$"):
        integrations.enable(NAME)
    assert integrations.status()[NAME].installed is None


def test_nothing_of_a_library_is_imported_until_it_is_asked_for() -> None:
    code = """if True:
        import sys
        from maxsim_kernels import integrations
        integrations.status()
        integrations.disable()
        import maxsim_kernels.integrations.sentence_transformers, maxsim_kernels.integrations.pylate
        import maxsim_kernels.integrations.colpali_engine
        print(sorted({"sentence_transformers", "pylate", "colpali_engine", "transformers"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr
    assert "maxsim_kernels.integrations" not in _after_import("maxsim_kernels")


def _after_import(name: str) -> str:
    code = f"import sys, {name}; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_front_is_what_the_docs_say() -> None:
    assert integrations.__all__ == ["Enabled", "IntegrationError", "Status", "disable", "enable", "status"]
    assert set(integrations.status()) == {"sentence-transformers", "pylate", "colpali-engine"}
    assert issubclass(patching.IntegrationError, RuntimeError)
