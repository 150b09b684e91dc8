"""Paths that read a quantised copy from the cache give what they give without one, to the last byte of the run file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures import one_thread  # noqa: F401 - for every test here
from maxsim_eval.api import evaluate
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.copy_shards import KINDS, Kind, Tokens
from maxsim_eval.cache.entries import open_entry
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import CacheError
from maxsim_eval.scoring import units
from maxsim_eval.types import Result, Task

PATHS = ("fp32", "int8", "int8-document", "int8-corpus", "fp8")
COPIES = {"int8": "int8-token", "int8-document": "int8-document", "int8-corpus": "int8-corpus", "fp8": "fp8-document"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, evaluated without copies; some documents of it by candidates and by a limit too."""
    folder = tmp_path_factory.mktemp("converted")
    for name, options in WAYS.items():
        run(folder, f"before-{name}", **options(folder))
    return folder


def demo(folder: Path) -> Task:
    return load_task("demo", "small", data_dir=folder / "datasets", quiet=True)


def candidates(folder: Path) -> Path:
    task, path = demo(folder), folder / "candidates.trec"
    if not path.exists():
        rows = [
            f"{query} Q0 {task.document_ids[(7 * n + 3 * r) % 290]} {r + 1} {-r} x\n"
            for n, query in enumerate(task.query_ids)
            for r in range(20)
        ]
        path.write_text("".join(rows))
    return path


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "all": lambda folder: {},
    "candidates": lambda folder: {"candidates": candidates(folder)},
    "limited": lambda folder: {"limit_documents": 150, "limit_queries": 10},
}


def run(folder: Path, out: str, paths: tuple[str, ...] = PATHS, **options: Any) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "LEAST_BYTES", 1 << 20)  # some eight units
        return evaluate(
            demo(folder), "lexical", paths, k=20, cache_dir=folder / "cache", out_dir=folder / out, quiet=True, **options
        )


def runs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "runs").iterdir())}


def copies(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    entry = next((target / "cache").glob("demo/small/lexical-documents-*"))
    for name in COPIES.values():
        convert_entry(open_entry(entry), name, quiet=True)
    return entry


@pytest.mark.parametrize("way", WAYS)
def test_runs_are_the_same_bytes_and_the_result_says_what_was_read(home: Path, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "home"
    copies(home, folder)
    quantised: list[str] = []
    real = Kind.quantise
    with pytest.MonkeyPatch.context() as patch:

        def noted(self: Kind, *given: Any) -> Tokens:
            quantised.append(self.name)
            return real(self, *given)

        patch.setattr(Kind, "quantise", noted)
        result = run(folder, "after", **WAYS[way](folder))
    assert runs(folder / "after") == runs(folder / f"before-{way}")
    before = json.loads((folder / f"before-{way}" / "result.json").read_text())["paths"]
    # A corpus's scale is that of all documents: a part of them has another one.
    read = {path: kind for path, kind in COPIES.items() if way == "all" or path != "int8-corpus"}
    assert set(quantised) == set(COPIES.values()) - set(read.values())
    for path in PATHS:
        assert result.paths[path].metrics == before[path]["metrics"]
        suffix = f"; documents read from the {read[path]} copy in the cache" if path in read else ""
        assert result.paths[path].description == before[path]["description"] + suffix


def test_the_copy_decides_the_scores(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    entry = copies(home, folder)
    copy = entry / "00000.int8-token.h5"
    content = bytearray(copy.read_bytes())
    content[-(1 << 20) :] = bytes(1 << 20)  # codes of the last documents
    copy.write_bytes(content)
    with pytest.raises(CacheError, match=r"00000\.int8-token\.h5: damaged: tokens .* do not have the CRC-32"):
        run(folder, "after", ("int8",))
    result = run(folder, "after", ("int8",), verify=False)
    assert runs(folder / "after")["int8.trec"] != runs(folder / "before-all")["int8.trec"]
    assert any(line.startswith("values not verified") for line in result.task["warnings"])


def test_damaged_copy_is_refused_and_a_partial_one_is_not_used(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    entry = copies(home, folder)
    copy = entry / "00000.int8-document.h5"
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(CacheError, match=r"00000\.int8-document\.h5: truncated"):
        run(folder, "after", ("int8-document",))
    copy.unlink()
    result = run(folder, "after", ("int8-document",))
    assert "copy" not in result.paths["int8-document"].description
    assert runs(folder / "after")["int8-document.trec"] == runs(folder / "before-all")["int8-document.trec"]


def test_finished_parts_are_not_mixed_with_those_of_a_copy(home: Path, tmp_path: Path) -> None:
    """What was kept before the conversion is scored again: on a GPU the last bit of a scale may differ."""
    folder = tmp_path / "home"
    shutil.copytree(home, folder)
    from maxsim_eval.scoring import records

    kept: list[str] = []
    real = records.Records.__init__

    def note(self: records.Records, place: Path, fingerprint: dict) -> None:
        real(self, place, fingerprint)
        kept.append(self.fingerprint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records.Records, "__init__", note)
        run(folder, "one", ("int8",))
        run(folder, "two", ("int8",))
        entry = next((folder / "cache").glob("demo/small/lexical-documents-*"))
        convert_entry(open_entry(entry), "int8-token", quiet=True)
        run(folder, "three", ("int8",))
    assert len(kept) == 3
    assert kept[0] == kept[1] != kept[2]


def test_every_path_that_quantises_has_a_copy() -> None:
    from maxsim_eval.scoring.paths import PATHS as ALL

    assert {name: path.copy for name, path in ALL.items() if path.copy} == COPIES
    assert set(COPIES.values()) <= set(KINDS)
