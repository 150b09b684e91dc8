"""Several ranks: the same files as one process, one message when something goes wrong, and never a hang.

Most ranks here are forked with torchrun's environment (drive.py); one test starts torchrun itself.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rank_cases import DATA, INTERRUPTED, KEPT, KILLED, UNFORESEEN, USAGE, driven, ended_as_one, torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same evaluation by 1, 2 and 3 ranks, and more."""
    return driven("drive.py", "ranks", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three ranks, one of which fails in some way."""
    return driven("drive.py", "failures", tmp_path_factory.mktemp("failures"))


def ties(run: str) -> int:
    """Neighbours of equal score in a run file."""
    rows = [line.split() for line in run.splitlines()]
    return sum(a[0] == b[0] and a[4] == b[4] for a, b in pairwise(rows))


@pytest.mark.parametrize("count", ["2", "3", "one unit"])
def test_several_ranks_give_the_files_of_one(count: str, ranks: dict[str, Any]) -> None:
    one, several = ranks["1"], ranks[count]
    assert set(several["codes"]) == {0}, several["err"]
    assert all(ties(run) > 50 for run in one["runs"].values()), "the corpus has no ties, so their order was not tested"
    assert several["runs"] == one["runs"], "the run files of several ranks are not those of one, byte for byte"
    assert several["result"] == one["result"]
    assert several["left"] == ["metrics.csv", "per_query.csv", "report.html", "report.md", "result.json", "runs"]


def test_several_ranks_rerank_as_one(ranks: dict[str, Any]) -> None:
    one, several = ranks["reranked"], ranks["reranked by 2"]
    assert (one["codes"], several["codes"]) == ([0], [0, 0])
    assert several["runs"] == one["runs"]
    assert several["result"] == one["result"]
    assert one["result"]["task"]["candidates"]["pairs"] == one["runs"]["fp32.trec"].count("\n")
    assert one["runs"]["fp32.trec"] == ranks["1"]["runs"]["fp32.trec"], "reranking the reference's own ranking changes nothing"


@pytest.mark.parametrize("count", [2, 3])
def test_only_the_first_rank_speaks(count: int, ranks: dict[str, Any]) -> None:
    found = ranks[str(count)]
    assert "report: " in found["out"][0]
    assert found["err"][0] == "", "a short evaluation says nothing on its way, off a terminal"
    assert found["out"][1:] == found["err"][1:] == [""] * (count - 1)
    assert found["environment"]["processes"] == count
    assert found["environment"]["devices"] == ["cpu"] * count


def test_every_caller_gets_the_result(ranks: dict[str, Any]) -> None:
    first, second = ranks["called"]["out"]
    assert first == second
    metrics, processes = json.loads(first)
    assert processes == 2
    assert metrics["nDCG@5"] > 0


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("unreadable", DATA, "error: rank 1 of 3: documents/00001.h5: cannot be read: Input/output error\n"),
        ("interrupted", INTERRUPTED, f"interrupted; {KEPT}\n"),
        ("usage", USAGE, "error: --k: got 0, need 1 or more\n"),
        ("no data", DATA, "error: rank 0 of 3: datasets/local/ties/qrels/nothing.tsv: missing;"),
        (
            "elsewhere",
            DATA,
            "elsewhere/.partial: not seen by rank 2; with several processes the output folder must lie on a file",
        ),
        ("threads", USAGE, "processes differ: threads is 2 on rank 1, 1 on rank 0;"),
        ("no device", USAGE, "and this machine has 0 CUDA devices; need at most one process a device"),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_one_message(name: str, code: int, message: str, failures: dict[str, Any]) -> None:
    ended_as_one(failures[name], code, message)


def test_a_bug_in_one_rank_ends_all(failures: dict[str, Any]) -> None:
    found = failures["bug"]
    assert found["codes"][:2] == [UNFORESEEN, UNFORESEEN]
    assert found["codes"][2] != 0
    assert found["err"][0].startswith(
        "error: rank 2 of 3: unforeseen: ZeroDivisionError: a bug. Please report it with its traceback"
    )
    (log,) = re.findall(r"which is in (\S+)", found["err"][0])
    assert "Traceback" in Path(log).read_text(encoding="utf-8"), "whoever has to find the bug needs to see where it is"
    Path(log).unlink()


def test_a_rank_that_dies_without_a_word_is_missed(failures: dict[str, Any]) -> None:
    found = failures["follower killed"]
    assert found["codes"] == [DATA, KILLED, DATA]
    assert found["err"][0].startswith("error: rank 1 of 3: gave no sign of life for 2 s: its process was killed")
    assert KEPT in found["err"][0]
    assert found["err"][2] == ""
    assert found["seconds"] < 30


def test_a_leader_that_dies_is_named_by_the_others(failures: dict[str, Any]) -> None:
    found = failures["leader killed"]
    assert found["codes"] == [KILLED, DATA, DATA]
    for said in found["err"][1:]:
        assert said.startswith("error: rank 0 of 3: the connection to it was lost")
        assert said.count("\n") == 1
    assert found["seconds"] < 30


def test_a_nan_score_of_another_rank_is_named_by_its_ids(failures: dict[str, Any]) -> None:
    found = failures["nan"]
    text = (
        "path fp32: NaN score for query 'q3' and document 'c700'; the embeddings are finite, but with components up to 1e+20 "
    )
    assert found["codes"] == [DATA, DATA]
    for said, begins in zip(found["err"], (f"RankError: rank 1 of 2: {text}", f"DataError: {text}"), strict=True):
        assert said.startswith(begins)
        assert said.count("\n") == 1


def test_torchrun_itself(demo: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets", "embeddings_cache")
    ended = torchrun(folder, "demo", "--paths", "fp32,fp16,int8", "--out", "two", "--quiet")
    assert [line.partition(":")[0] for line in ended.stdout.splitlines()] == ["fp32", "fp16", "int8"], "of the first rank alone"
    assert "Traceback" not in ended.stderr
    for name in ("fp32", "fp16", "int8"):
        assert (folder / "two" / "runs" / f"{name}.trec").read_bytes() == (demo.results / "runs" / f"{name}.trec").read_bytes()
    environment = json.loads((folder / "two" / "result.json").read_text())["environment"]
    assert environment["processes"] == 2
