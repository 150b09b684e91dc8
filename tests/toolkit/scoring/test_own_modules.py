"""Naming users' functions, importing their modules, and that nothing finished is kept for another state of their code."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.scoring import units
from maxsim_eval.scoring.own_functions import ScorerError, check_paths, find_paths, run_file
from maxsim_eval.types import Task
from scorer_cases import NAIVE, Write, naive, run

pytestmark = pytest.mark.slow

# Names and modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "python:",
        "python:x",
        "python:x:",
        "python::f",
        "python:x.py:f",
        "python:a/b:f",
        "python:x:f:g",
        "python:x:f()",
        "python:1:f",
    ],
)
def test_names_that_cannot_be_one(name: str) -> None:
    if name == "python:x.py:f":  # a module `py` of a package `x`, as far as its name says
        with pytest.raises(UsageError, match=r"no module 'x\.py'"):
            check_paths([name])
        return
    with pytest.raises(UsageError, match="need python:<module>:<function>"):
        check_paths([name])


def test_near_names_are_offered(write: Write, here: Path) -> None:
    module = write(
        "def score(q, d): ...\ndef _score(q, d): ...\nWIDTH = 3\nclass Scorers:\n    @staticmethod\n    def exact(q, d): ...\n"
    )
    with pytest.raises(
        UnknownNameError, match=rf"unknown function of {module} 'scores'\. Did you mean 'score'.*Known: Scorers, score\."
    ):
        check_paths([f"python:{module}:scores"])
    with pytest.raises(UnknownNameError, match=r"'exat'\. Did you mean 'exact'"):
        check_paths([f"python:{module}:Scorers.exat"])
    assert check_paths([f"python:{module}:Scorers.exact"]) == (f"python:{module}:Scorers.exact",)
    with pytest.raises(UsageError, match="WIDTH is a int, need a function"):
        check_paths([f"python:{module}:WIDTH"])
    with pytest.raises(
        UsageError, match=rf"no module '{module[:-1]}x' in the current folder or on PYTHONPATH\. Did you mean '{module}'\?$"
    ):
        check_paths([f"python:{module[:-1]}x:score"])
    with pytest.raises(UnknownNameError, match=r"unknown path 'pyton:a:b'.*python:<module>:<function>"):
        check_paths(["pyton:a:b"])


@pytest.mark.parametrize(
    ("chosen", "what"),
    [
        ([("fp16", naive)], "'fp16' of a function cannot be used: one of our own"),
        ([("a b", naive)], "'a b' of a function cannot be used: letters"),
        ([("../x", naive)], "cannot be used"),
        ([("x", naive), ("x", len)], "two functions under the name 'x'"),
        ([("x-y", naive), ("X-y", naive)], "would share python-X-y.trec"),
        ([("x", 3)], "need a name, or"),
        ([3], "need a name, or"),
    ],
)
def test_names_of_functions_that_cannot_be_used(chosen: Any, what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        find_paths(chosen)


def test_order_and_repeats() -> None:
    assert list(find_paths([("x", naive), "int8", "fp32", ("x", naive), "int8"])) == ["fp32", "x", "int8"]
    assert run_file("fp16") == "fp16.trec"
    assert run_file("python:a.b:C.f") == "python-a.b-C.f.trec"


def test_a_module_that_cannot_be_imported(write: Write) -> None:
    broken = write("import json\n\nvalue = json.loads('{')\n")
    with pytest.raises(ScorerError, match=rf"importing {broken} failed\n  File .*{broken}.py.*line 3") as caught:
        check_paths([f"python:{broken}:f"])
    assert "_bootstrap" not in str(caught.value)
    assert "scorers.py" not in str(caught.value).replace(broken, "")
    with pytest.raises(ScorerError, match="SyntaxError"):
        check_paths([f"python:{write('def f(:')}:f"])
    missing = write("import a_package_that_nobody_has\n")
    with pytest.raises(ScorerError, match="No module named 'a_package_that_nobody_has'"):
        check_paths([f"python:{missing}:f"])


def test_a_name_that_an_installed_package_has(write: Write, here: Path) -> None:
    write("def f(q, d): ...\n", name="filelock")
    with pytest.raises(UsageError, match=r"'filelock' is also the name of .*filelock.*rename yours"):
        check_paths(["python:filelock:f"])  # imported already
    write("def f(q, d): ...\n", name="tabnanny")
    with pytest.raises(UsageError, match=r"'tabnanny' is also the name of .*tabnanny\.py"):
        check_paths(["python:tabnanny:f"])


def test_modules_beside_it_can_be_imported_late(demo_home: Path, demo_task: Task, write: Write, here: Path) -> None:
    write(NAIVE, name="helper_of_scorers")
    module = write("def score(q, d):\n    import helper_of_scorers\n    return helper_of_scorers.score(q, d)\n")
    assert str(here) not in sys.path
    result = run(demo_home, demo_task, f"python:{module}:score")
    assert result.paths[f"python:{module}:score"].metrics == result.paths["fp32"].metrics
    assert str(here) not in sys.path


# What was finished is used again only for the same code ------------------------------------------------------------------


def forget(*names: str) -> None:
    """As in a new process."""
    for name in names:
        sys.modules.pop(name, None)


def source_of(module: str) -> str | None:
    return find_paths([f"python:{module}:score"])[f"python:{module}:score"].source


def test_the_source_is_that_of_the_module_and_what_it_imports(write: Write, here: Path) -> None:
    write("FACTOR = 1\n", name="helper_of_scorers")
    module = write("import helper_of_scorers\nimport torch\ndef score(q, d): ...\n")
    first = source_of(module)
    assert first is not None
    assert source_of(module) == first
    forget(module, "helper_of_scorers")
    assert source_of(module) == first, "another process finds the same"
    (here / "other.py").write_text("x = 1")
    (here / "helper_of_scorers.py").write_text("FACTOR = 2\n")
    assert source_of(module) == first, "what runs is what was imported"
    forget(module, "helper_of_scorers")
    second = source_of(module)
    assert second not in (None, first)
    forget(module, "helper_of_scorers")
    __import__("importlib").invalidate_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        __import__(module)
        assert source_of(module) is None, "imported by somebody else, perhaps before it was edited"


SLOW = """
from pathlib import Path
{helper}
def score(queries, documents):
    if Path("fails").exists() and len(documents) and Path("calls").exists() and len(Path("calls").read_text()) >= 4:
        raise RuntimeError("the machine was lost")
    with open("calls", "a") as handle:
        handle.write("x")
    return {scores}
"""
SCORES = "(queries.values.sum() + documents.lengths[None] * 0.01).expand(len(queries), -1)"


def interrupted_and_again(
    home: Path, task: Task, here: Path, again: Callable[[], Any], path: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Blocks scored by a first run that fails, and by the second, of the path that `again` gives."""
    monkeypatch.setattr(units, "LEAST_BYTES", 400_000)
    (here / "fails").touch()
    with pytest.raises(ScorerError, match="the machine was lost"):
        run(home, task, path, out_dir=here / "out")
    first = len((here / "calls").read_text())
    for name in ("fails", "calls"):
        (here / name).unlink()
    run(home, task, again(), out_dir=here / "out")
    return first, len((here / "calls").read_text())


def test_a_resumed_function_goes_on(
    demo_home: Path, demo_task: Task, here: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"python:{write(SLOW.format(helper='', scores=SCORES))}:score"

    def same() -> str:
        forget(name.split(":")[1])
        return name

    first, second = interrupted_and_again(demo_home, demo_task, here, same, name, monkeypatch)
    (here / "calls").unlink()
    run(demo_home, demo_task, same(), out_dir=here / "whole")
    assert first == 4
    assert 0 < second <= len((here / "calls").read_text()) - 3


def test_a_changed_function_begins_anew(
    demo_home: Path, demo_task: Task, here: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write(SLOW.format(helper="", scores=SCORES))
    name = f"python:{module}:score"

    def edited() -> str:
        forget(module)
        write(SLOW.format(helper="", scores=f"-{SCORES}"), name=module)
        return name

    _, second = interrupted_and_again(demo_home, demo_task, here, edited, name, monkeypatch)
    (here / "calls").unlink()
    run(demo_home, demo_task, name, out_dir=here / "whole")
    assert second == len((here / "calls").read_text())
    assert (here / "out" / "runs" / run_file(name)).read_bytes() == (here / "whole" / "runs" / run_file(name)).read_bytes()


def test_nobody_knows_what_a_function_given_in_python_does(
    demo_home: Path, demo_task: Task, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict[str, Any] = {}
    exec(SLOW.format(helper="", scores=SCORES), space)
    pair = ("mine", space["score"])
    _, second = interrupted_and_again(demo_home, demo_task, here, lambda: pair, pair, monkeypatch)
    (here / "calls").unlink()
    run(demo_home, demo_task, pair, out_dir=here / "whole")
    assert second == len((here / "calls").read_text())


# What scored is recorded -------------------------------------------------------------------------------------------------


def scorers_of(home: Path, task: Task, *paths: Any, **options: Any) -> dict[str, Any]:
    return dict(run(home, task, *paths, **options).environment["scorers"])


def test_the_environment_of_a_function_is_recorded(demo_home: Path, demo_task: Task, write: Write) -> None:
    write("import h5py\nWIDTH = 1\n", "helper_of_scorers")
    module = write("import json\nimport numpy as np\nfrom helper_of_scorers import h5py\n__version__ = '1.2'\n" + NAIVE)
    path = f"python:{module}:score"
    found = scorers_of(demo_home, demo_task, path)
    digest = find_paths([path])[path].source
    versions = {name: importlib.metadata.version(name) for name in ("h5py", "numpy", "torch")}
    assert found == {path: {"function": f"{module}.score", "version": "1.2", "sha256": digest, "packages": versions}}
    assert "scorers" not in run(demo_home, demo_task).environment


def test_packages_installed_elsewhere_are_no_code_of_the_user(
    demo_home: Path, demo_task: Task, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target`, and modules that name a file which never was, as torch's `_classes.py`."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "beside-1.0.dist-info").mkdir(parents=True)
    package = elsewhere / "beside_of_scorers.py"
    package.write_text("import types\nnowhere = types.ModuleType('nowhere')\nnowhere.__file__ = 'nowhere.py'\nWIDTH = 1\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    module = write(
        "import types\nimport beside_of_scorers\nlost = types.ModuleType('lost')\nlost.__file__ = 'lost.py'\n" + NAIVE
    )
    path = f"python:{module}:score"
    before = find_paths([path])[path].source
    assert scorers_of(demo_home, demo_task, path)[path]["sha256"] == before
    package.write_text("WIDTH = 2\n")
    for name in (module, "beside_of_scorers"):
        sys.modules.pop(name)
    assert find_paths([path])[path].source == before


def test_a_function_given_in_python_has_no_known_source(demo_home: Path, demo_task: Task) -> None:
    found = scorers_of(demo_home, demo_task, ("mine", naive), ("part", functools.partial(naive)))
    assert list(found) == ["mine", "part"]
    for one in found.values():
        assert (one["function"], one["version"], one["sha256"]) == ("scorer_cases.naive", None, None)
        assert {"torch", "pytest"} <= set(one["packages"])
        assert one["packages"]["torch"] == importlib.metadata.version("torch")


def test_an_object_that_is_called_and_a_method(demo_home: Path, demo_task: Task, write: Write) -> None:
    text = "\nclass Kept:\n    __call__ = staticmethod(score)\n    def exact(self, queries, documents):\n        return score(queries, documents)\n"
    module = write(NAIVE + text + "kept = Kept()\n")
    found = scorers_of(demo_home, demo_task, f"python:{module}:kept", f"python:{module}:kept.exact")
    assert [one["function"] for one in found.values()] == [f"{module}.Kept", f"{module}.Kept.exact"]
    assert {one["sha256"] for one in found.values()} != {None}


def test_what_is_recorded_follows_the_schema(demo_home: Path, demo_task: Task, write: Write, here: Path) -> None:
    text = importlib.resources.files("maxsim_eval").joinpath("schemas", "result.json").read_text(encoding="utf-8")
    run(demo_home, demo_task, f"python:{write(NAIVE)}:score", ("mine", naive), out_dir=here / "out")
    document = json.loads((here / "out" / "result.json").read_text(encoding="utf-8"))
    validator = Draft202012Validator(json.loads(text))
    assert not list(validator.iter_errors(document))
    document["environment"]["scorers"]["mine"]["sha256"] = "none"
    assert [error.json_path for error in validator.iter_errors(document)] == ["$.environment.scorers.mine.sha256"]


def test_a_module_whose_file_is_none_is_no_source(write: Write) -> None:
    """torch.classes says `_classes.py`, wherever it is: so it is where packages lie outside the interpreter's own folder."""
    name = write("import types\n\nodd = types.ModuleType('odd')\nodd.__file__ = '_odd.py'\n\ndef score(q, d): ...\n")
    (found,) = find_paths((f"python:{name}:score",)).values()
    assert found.source
