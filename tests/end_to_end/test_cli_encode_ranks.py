"""Encoding by several ranks: the same cache, byte for byte, one message when something goes wrong, and nothing encoded twice.

Most ranks here are forked with torchrun's environment (drive_encode.py); one test starts torchrun itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rank_cases import DATA, INTERRUPTED, KEPT, KILLED, UNFORESEEN, USAGE, driven, ended_as_one, torchrun

pytestmark = pytest.mark.slow

SHARDS = 23  # of documents, each of 5 calls of the encoder, but for the last; and one of queries
CALLS = 22 * 5 + 3


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same encoding by 1, 2 and 3 ranks."""
    return driven("drive_encode.py", "same", tmp_path_factory.mktemp("same"))


@pytest.fixture(scope="module")
def resumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Killed, and continued by others."""
    return driven("drive_encode.py", "resumes", tmp_path_factory.mktemp("resumes"))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three ranks, one of which fails in some way."""
    return driven("drive_encode.py", "failures", tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("encoder", ["lexical", "hf"])
def test_several_ranks_fill_the_cache_as_one(encoder: str, count: int, same: dict[str, Any]) -> None:
    one, several = same[encoder]["1"], same[encoder][str(count)]
    assert several["codes"] == [0] * count, several["err"]
    assert len(one) == SHARDS + 1 + 2, "documents, queries, two manifests"
    assert several["files"] == one
    encoded = [said.count("document") for said in several["by"]]
    assert sum(encoded) == CALLS, "every text once: also those that told the dtype"
    assert min(encoded) >= 15, f"the work was not shared: {encoded}"
    assert [said.count("query") for said in several["by"]] == [1] + [0] * (count - 1), "queries are the first rank's"


@pytest.mark.parametrize("count", [2, 3])
def test_only_the_first_rank_speaks(count: int, same: dict[str, Any]) -> None:
    found = same["lexical"][str(count)]
    assert found["out"][1:] == found["err"][1:] == [""] * (count - 1)
    assert found["err"][0] == ""
    assert found["out"][0].startswith("documents: 900 rows, 2,011 tokens, d = 128, float32; new shards: 23 of 23: ")
    assert found["out"][0].rstrip().endswith(f"s, {count} processes")


def test_memory_that_ran_out_on_another_rank_is_said(same: dict[str, Any]) -> None:
    """It changes last bits, and nobody reads the stderr of the others."""
    found = same["warned"]
    assert found["codes"] == [0, 0, 0]
    what = "x: out of memory on cuda:{} with 32 texts at once; continuing with 16"
    said = [f"warning: rank {rank} of 3: {what.format(rank)}" for rank in (1, 2)]
    assert found["err"][0].splitlines() == ["warning: a library's own", *said]
    assert found["err"][1:] == ["", ""]


def test_an_evaluation_with_an_empty_cache_encodes_by_all_ranks(same: dict[str, Any]) -> None:
    one, two = same["evaluated"]["1"], same["evaluated"]["2"]
    assert (one["codes"], two["codes"]) == ([0], [0, 0])
    assert two["files"] == one["files"]
    assert (two["runs"], two["result"]) == (one["runs"], one["result"])
    assert min(said.count("document") for said in two["by"]) >= 5
    assert one["result"]["task"]["documents"] == 333, "a subset is drawn alike by every rank"


def test_the_others_start_while_the_leader_does(same: dict[str, Any]) -> None:
    """As soon as it has found that there is something to encode; what their start warns of is said."""
    found = same["started"]
    assert found["2"]["codes"] == [0, 0], found["2"]["err"]
    assert found["2"]["files"] == found["1"]
    assert "warning: rank 1 of 2: x: out of memory on cuda:1; continuing with 16" in found["2"]["err"][0]


def test_a_full_cache_needs_no_encoding(same: dict[str, Any]) -> None:
    ready = same["there"]
    assert (ready["codes"], ready["by"], ready["err"]) == ([0, 0], [[], []], ["", ""])
    assert ready["files"] == same["lexical"]["1"]
    said = json.loads(ready["out"][0])
    assert (said["processes"], [entry["new_shards"] for entry in said["entries"]]) == (2, [0, 0])
    assert ready["out"][1] == ""


# Interrupted -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("who", "codes"), [("follower", [DATA, KILLED, DATA]), ("leader", [KILLED, DATA, DATA])])
def test_ranks_that_were_killed_are_continued_by_any_number(who: str, codes: list[int], resumes: dict[str, Any]) -> None:
    killed, again, alone = (resumes[f"{who} {what}"] for what in ("killed", "again", "alone"))
    assert killed["codes"] == codes
    assert 3 <= len(killed["shards"]) < SHARDS
    assert killed["seconds"] < 30
    assert again["codes"] == [0, 0], again["err"]
    assert again["files"] == alone["files"] == resumes["whole"]
    assert {name: again["shards"][name] for name in killed["shards"]} == killed["shards"], (
        "finished shards are not written again"
    )
    missing = SHARDS - len(killed["shards"])
    assert 5 * missing - 2 <= sum(said.count("document") for said in again["by"]) <= 5 * missing
    assert alone["codes"] == [0]


def test_a_death_is_said_once(resumes: dict[str, Any]) -> None:
    follower, leader = resumes["follower killed"]["err"], resumes["leader killed"]["err"]
    assert (
        f"error: rank 1 of 3: gave no sign of life for 2 s: its process was killed or its machine is gone; {KEPT}"
        in follower[0]
    )
    assert follower[1:] == ["", ""]
    for said in leader[1:]:
        assert said.startswith("error: rank 0 of 3: the connection to it was lost")
        assert said.count("\n") == 1


def test_the_lock_is_held_until_the_last_rank_is_done(resumes: dict[str, Any]) -> None:
    found = resumes["locked"]
    assert found["codes"] == [0, 0]
    assert found["held"] == str(SHARDS - 1), "the leader, with nothing left to encode, must hold it for the others"
    assert found["files"] == resumes["whole"]


# Failures ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("not finite", DATA, "error: rank 1 of 3: embeddings: token 3 of 'c77' holds NaN\n"),
        ("interrupted", INTERRUPTED, f"interrupted; {KEPT}\n"),
        ("other texts", DATA, ": rank 0 fills it from other texts, or with another model: its key is "),
        ("elsewhere", DATA, ": not seen by rank 2; with several processes the cache folder must lie on a file system that all"),
        ("no data", DATA, "error: rank 1 of 3: local dataset 'ties': no such folder."),
        (
            "threads",
            USAGE,
            "processes differ: threads is 2 on rank 1, 1 on rank 0; embeddings are the same to the last bit only",
        ),
        ("other library", USAGE, "processes differ: h5py is '0.1' on rank 2, "),
        ("no device", USAGE, "and this machine has 0 CUDA devices; need at most one process a device"),
        ("unknown", USAGE, "error: rank 0 of 3: unknown encoder 'lexicon'. Did you mean 'lexical'?"),
        ("usage", USAGE, "error: --batch-size: got 0, need 1 or more\n"),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_one_message(name: str, code: int, message: str, failures: dict[str, Any]) -> None:
    found = failures[name]
    ended_as_one(found, code, message)
    assert found["out"] == ["", "", ""]
    assert found["left"] == []


def test_a_bug_in_one_rank_ends_all(failures: dict[str, Any]) -> None:
    found = failures["bug"]
    assert (found["codes"][0], found["codes"][2]) == (UNFORESEEN, UNFORESEEN)
    assert found["codes"][1] != 0
    assert found["err"][0].startswith(
        "error: rank 1 of 3: unforeseen: ZeroDivisionError: a bug. Please report it with its traceback"
    )


def test_finished_shards_outlive_a_failure(failures: dict[str, Any]) -> None:
    assert failures["not finite"]["shards"] >= 1
    assert failures["other texts"]["shards"] == failures["elsewhere"]["shards"] == 0, "nothing is begun before all agree"


def test_torchrun_itself(demo: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets")
    ended = torchrun(folder, "encode", "demo", "small", "--encoder", "lexical", "--quiet")
    assert "Traceback" not in ended.stderr
    assert ended.stdout.rstrip().endswith("2 processes")
    entries = sorted(path.relative_to(folder) for path in (folder / "embeddings_cache").rglob("*") if path.is_file())
    assert entries
    for path in entries:
        assert (folder / path).read_bytes() == (demo.folder / path).read_bytes()
