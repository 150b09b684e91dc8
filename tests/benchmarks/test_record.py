"""tests/gpu/record.py: what it keeps of pytest's report, of a sanitizer and of a soak, with stand-ins."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA, REQUIRED = "MAXSIM_TEST_DATA", "MAXSIM_REQUIRE_DATA"


@pytest.fixture(scope="module")
def record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_record", ROOT / "tests" / "gpu" / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = [*sys.path]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_counts_and_names_of_failures(record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad, gone = (tmp_path / f"test_{name}.py" for name in ("good", "bad", "gone"))
    good.write_text("import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='x')\ndef test_b(): pass\n")
    bad.write_text("def test_c(): assert False\n")
    gone.write_text("import not_there\n")
    found, well = record.tests([good, bad, gone], 1, None)
    assert not well
    assert [(found[name]["passed"], found[name]["failed"], found[name]["skipped"]) for name in ("test_good", "test_bad")] == [
        (1, 0, 1),
        (0, 1, 0),
    ]
    assert found["test_bad"]["failures"] == ["test_c"]
    assert found["test_good"]["skips"] == ["test_b"]
    assert found["test_gone"]["failed"] == 1
    assert record.tests([good], 1, None)[1]
    monkeypatch.setattr(record.os, "sched_getaffinity", lambda _: set(range(7)))
    good.write_text("import os\ndef test_d(): assert os.environ['OMP_NUM_THREADS'] == '3'\n")
    assert record.tests([good], 2, None)[1], "two processes share seven CPUs"
    good.write_text(
        f"from os import environ\ndef test_e(): assert (environ[{DATA!r}], environ[{REQUIRED!r}]) == ({str(tmp_path)!r}, '1')\n"
    )
    assert record.tests([good], 1, tmp_path / "beir" / "scifact" / "corpus.jsonl")[1]
    good.write_text("import pytest\n@pytest.mark.skip(reason='x')\ndef test_b(): pass\n")
    assert not record.tests([good], 1, None)[1], "what skipped everything shows nothing"


@pytest.mark.parametrize(("said", "code", "well"), [("0 errors", 0, True), ("3 errors", 0, False), ("0 errors", 1, False)])
def test_a_sanitizers_summary_is_read(record: ModuleType, tmp_path: Path, said: str, code: int, well: bool) -> None:
    stand_in = tmp_path / "tool.py"
    stand_in.write_text(f"import sys\nprint('7 calls, 0 wrong')\nprint('===== ERROR SUMMARY: {said}')\nsys.exit({code})\n")
    found, good = record.sanitized("memcheck", [1, 2], 8, command=[sys.executable, str(stand_in)])
    assert good is well
    assert set(found) == {"memcheck, part 1/8", "memcheck, part 2/8"}
    entry = found["memcheck, part 1/8"]
    assert (entry["errors"], entry["calls"], entry["wrong"], entry["exit"]) == (int(said[0]), 7, 0, code)
    assert ("said" in entry) is not well


@pytest.mark.slow
def test_entries_are_kept_beside_each_other(record: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tests.json"
    path.write_text(json.dumps({"files": {"of an older form": {}}}))
    record.kept(path, "tests", "files", {"test_a": {"passed": 1}})
    record.kept(path, "tests", "files", {"test_b": {"passed": 2}})
    held = json.loads(path.read_text())
    assert held["schema"] == "maxsim-eval/tests/2"
    assert {name: entry["passed"] for name, entry in held["files"].items()} == {"test_a": 1, "test_b": 2}
    assert set(held["files"]["test_a"]) >= {"revision", "families", "measured", "gpu", "torch"}


def test_shares_are_checked(record: ModuleType) -> None:
    assert record.shares("1,3/8") == ([1, 3], 8)
    with pytest.raises(Exception, match="need K/N"):
        record.shares("9/8")


def test_files_are_named_or_all_but_the_one_of_times(record: ModuleType) -> None:
    assert [path.name for path in record.asked("test_gpu_bits,test_gpu_pairs")] == ["test_gpu_bits.py", "test_gpu_pairs.py"]
    assert [path for path in record.asked("") if path.name == record.SPEED] == []
    assert len(record.asked("")) > 30
