"""PyLate, colpali-engine, mteb and other versions of sentence-transformers in environments of their own, made from the package registry: our tests of them, and their own.

Their own tests come with their source distributions. That of sentence-transformers holds none of scores or losses.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import library_stand_ins
from library_environment import REQUIREMENTS, UnreachableError, environment, run, source, without_registry
from maxsim_eval.data import generated
from places import ROOT, TESTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
DEMO = "demo/small"  # a collection in BEIR layout, below the folder of the test
FOLDERS = [ROOT / "kernels", ROOT, TESTS / "helpers"]


class Own(NamedTuple):
    """A library's own tests of scores and losses: its name, files, modules whose docstrings hold examples, how many pass, what they call."""

    name: str
    files: tuple[str, ...]
    examples: tuple[str, ...]
    passed: int  # at least so many of the files' tests; the others need a GPU
    shown: int  # examples
    calls: set[str]
    shows: tuple[str, ...]  # scripts of examples/ with options that keep them small
    scorer: str  # in examples/peer_scorers.py
    bugs: set[str]  # what `conform` finds with it, as docs/scorers.md says
    prepare: Callable[[Path], None] = lambda folder: None


OWN = {
    "pylate": Own(
        "pylate",
        tuple(
            f"test_{name}.py"
            for name in ("colbert_scores", "contrastive", "cached_contrastive", "kd", "scores_flash", "scores_lik")
        ),
        ("scores.colbert", "rank.rank", "losses", "evaluation.colbert_triplet", "evaluation.colbert_distillation"),
        22,
        12,
        {"colbert_scores", "colbert_scores_pairwise", "colbert_kd_scores"},
        (f"rerank_pylate.py --folder {DEMO} --queries 3 --candidates 9",),
        "pylate",
        {"negative similarities"},
        library_stand_ins.pylate,
    ),
    "colpali_engine": Own(
        "colpali-engine",
        ("loss/test_li_losses.py", "utils/test_maxsim.py", "utils/test_processing_utils.py"),
        (),
        28,
        0,
        {"maxsim_inbatch", "maxsim_kd", "score_multi_vector"},
        # The trainer of sentence-transformers needs accelerate, which is there.
        ("score_pages_colpali.py", f"train_sentence_transformers.py --folder {DEMO} --split test --steps 3 --batch 6"),
        "colpali_engine",
        {"negative similarities"},
    ),
}


@pytest.mark.parametrize("library", OWN)
def test_in_an_environment_of_its_own(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here: test_{library}.py runs in this environment")
    try:
        python = environment(library, tmp_path / "venv")
        theirs = source(library, tmp_path / "source")
    except UnreachableError as error:
        without_registry(library, error)
    tests = Path(__file__).with_name(f"test_{library}.py")
    done = run(python, "-m", "pytest", "-p", "no:cacheprovider", str(tests), "-rs", cwd=ROOT, path=FOLDERS[:2])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert passed(done) > 0, done.stdout

    own, place = OWN[library], tmp_path / "own"
    shutil.copytree(theirs / "tests", place / "tests")
    own.prepare(place)
    done = theirs_with_us(python, own, place, *(f"tests/{name}" for name in own.files))
    assert passed(done) >= own.passed, done.stdout
    assert scored(done) >= own.calls, done.stdout
    if own.examples:
        numbers = "doctest_optionflags=NORMALIZE_WHITESPACE NUMBER"
        modules = (f"{library}.{name}" for name in own.examples)
        done = theirs_with_us(python, own, place, "--doctest-modules", "-o", numbers, "--pyargs", *modules)
        assert passed(done) >= own.shown, done.stdout
        assert scored(done) >= own.calls, done.stdout

    generated.ensure("small", place / "demo")
    for example in own.shows:
        script, *words = example.split()
        options = ("-W", "ignore", str(ROOT / "examples" / script), *words)
        done = run(python, *options, cwd=place, path=FOLDERS[:2], HF_HUB_OFFLINE="1")
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert " apart" in done.stdout
    assert bugs(python, own, place) == own.bugs
    measured(python, own, place)


def bugs(python: Path, own: Own, place: Path) -> set[str]:
    """The checks of the contract that the library's scorer fails."""
    code = f"""if True:
        import json, peer_scorers
        from maxsim_eval.conformance.conforming import conform
        print(json.dumps({{row.check: row.verdict for row in conform(peer_scorers.{own.scorer})}}))
    """
    done = run(python, "-W", "ignore", "-c", code, cwd=place, path=[*FOLDERS[:2], ROOT / "examples"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return {check for check, verdict in json.loads(done.stdout.splitlines()[-1]).items() if verdict == "bug"}


def measured(python: Path, own: Own, place: Path) -> None:
    """Every row of `benchmarks/libraries.py` is scored rightly by the library's own code and by us."""
    options = ("--tiny", "--device", "cpu", "--only", own.name, "--json", str(place / "rows.json"), "--rounds", "2")
    done = run(python, "-W", "ignore", str(ROOT / "benchmarks" / "libraries.py"), *options, cwd=place, path=FOLDERS[:2])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads((place / "rows.json").read_text())
    assert found["rows"]
    for row in found["rows"]:
        assert {"own", "ours"} <= set(row["methods"]), row


@pytest.mark.parametrize("library", [name for name in REQUIREMENTS if name.startswith("sentence-transformers ")])
def test_other_versions_of_sentence_transformers(library: str, tmp_path: Path) -> None:
    try:
        python = environment(library, tmp_path / "venv")
    except UnreachableError as error:
        without_registry(library, error)
    version = importlib.metadata.version
    found = run(python, "-c", "import sentence_transformers as s; print(s.__version__)", cwd=tmp_path, path=[])
    assert found.stdout.strip() == REQUIREMENTS[library][0].split("==")[1] != version("sentence-transformers"), found.stderr
    parts = ("", "_weights") if library.endswith("6.0") else ("",)  # the oldest is tested in full, as the newest is here
    tests = [str(Path(__file__).with_name(f"test_sentence_transformers{more}.py")) for more in parts]
    done = run(python, "-m", "pytest", "-p", "no:cacheprovider", *tests, cwd=ROOT, path=FOLDERS[:2])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert passed(done) > (100 if len(parts) > 1 else 60), done.stdout


@pytest.mark.parametrize("required", ["1", ""])
def test_an_unreachable_registry_fails_where_it_is_required(required: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from library_environment import UnreachableError, without_registry\n\n\n"
        "def test_it():\n    without_registry('pylate', UnreachableError('no route'))\n",
        encoding="utf-8",
    )
    options = ("-p", "no:cacheprovider", "-rs", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path))
    done = run(Path(sys.executable), "-m", "pytest", *options, cwd=tmp_path, path=FOLDERS, MAXSIM_REQUIRE_REGISTRY=required)
    assert done.returncode == (1 if required else 0), done.stdout
    said = "MAXSIM_REQUIRE_REGISTRY=1, but no pylate" if required else "1 skipped"
    assert said in done.stdout


def test_mteb_and_ir_datasets(tmp_path: Path) -> None:
    if all(importlib.util.find_spec(name) is not None for name in ("mteb", "ir_datasets")):
        pytest.skip("both are installed here: their tests run in this environment")
    try:
        python = environment("mteb", tmp_path / "venv")
    except UnreachableError as error:
        without_registry("mteb", error)
    tests = (str(TESTS / "toolkit" / name) for name in ("test_mteb.py", "data/test_irds.py"))
    done = run(python, "-m", "pytest", "-p", "no:cacheprovider", *tests, cwd=ROOT, path=FOLDERS[:2])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert passed(done) >= 10, done.stdout


def theirs_with_us(python: Path, own: Own, place: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """Tests of the library in a session of pytest in which it is enabled."""
    options = ("-q", "-p", "library_enabled", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(place))
    more = {"MAXSIM_ENABLE": own.name, "HF_HUB_OFFLINE": "1"}
    done = run(python, "-m", "pytest", *options, *what, cwd=place, path=FOLDERS, **more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tests passed, by pytest's last line."""
    found = re.search(r"^(\d+) passed\b", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return int(found[1])


def scored(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The functions that the operator scored for."""
    found = re.search(r"^scored here: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return set(json.loads(found[1]))
