"""Scoring in units: the same answer for every cut, budget, number of readers, share and point of resumption, on data full of ties."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures import one_thread  # noqa: F401 - for every test here
from maxsim_eval.cache import corpus as corpora
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.processes.world import World
from maxsim_eval.scoring import job, stream, units
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.job import digest, divide
from maxsim_eval.scoring.paths import PATHS
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.scoring import score_path, to_run
from maxsim_eval.scoring.stream import PHASES, UnitScores, score_units
from maxsim_kernels import Packed, pack
from stored_cases import filled

WIDTH, COUNT, K = 8, 60, 7
NAMES = ("fp32", "fused-fp32", "fp16", "int8", "int8-corpus", "fp8")


def tokens(kind: int, count: int) -> Tensor:
    """`[count, WIDTH]` multiples of 1/4: exact in every format, so that equal texts and many others tie."""
    return torch.from_numpy(np.random.default_rng(kind).integers(-4, 5, (count, WIDTH)) / 4).float()


def entry_of(folder: Path, changed: Mapping[int, Tensor] | None = None) -> Entry:
    """60 documents of 9 different kinds, some empty, in 5 shards."""
    documents = [tokens((n * n) % 9, (n * n) % 9) for n in range(COUNT)]
    for number, document in (changed or {}).items():
        documents[number] = document
    return filled(folder, documents, ids=[f"d{n:02d}" for n in range(COUNT)], documents_per_shard=13)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    return entry_of(tmp_path_factory.mktemp("cache") / "entry")


QUERIES = pack([tokens(100 + size, size) for size in (3, 0, 5)])


def plan_of(**changes: Any) -> Asked:
    plan = Asked(
        query_ids=["q0", "q1", "q2"],
        document_ids=[f"d{n:02d}" for n in range(COUNT)],
        k=K,
        excluded=np.array([3, -1, 41]),
        kept_rows=np.array([0, 2]),
    )
    return replace(plan, **changes)


@dataclass
class Answer:
    """A run file, the kept rows' bytes, and the units that were scored."""

    run: bytes
    rows: bytes
    scored: int = 0


def answer(
    name: str, entry: Entry | Selection, folder: Path, plan: Asked | None = None, streaming: Any = None, **options: Any
) -> Answer:
    plan = plan or plan_of()
    kept = np.full((len(plan.kept_rows), entry.documents), np.nan, np.float32)
    corpus = Corpus(entry, quiet=True, **(streaming or {}))
    scored = score_path(name, QUERIES, corpus, plan, kept, **options)
    assert scored is not None
    write_trec_run(folder / "run.trec", to_run(name, scored, plan))
    return Answer((folder / "run.trec").read_bytes(), kept.tobytes())


def cut(size: int, count: int = COUNT) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_same_however_the_work_is_cut(
    name: str, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer(name, entry, tmp_path)
    scores = [line.split()[4] for line in whole.run.decode().splitlines() if line.startswith("q2")]
    assert len(set(scores)) < len(scores), "no ties among the best: their order was not tested"
    for size, block, changes in (
        (1, 1 << 20, {}),
        (7, 1, {"readers": 1}),
        (7, 700, {"readers": 3}),
        (COUNT, 64, {"readers": 2}),
        (20, 1 << 20, {"memory_budget": 64 << 20}),
        (20, 1 << 20, {"memory_budget": 12 << 20, "readers": 1}),
    ):
        monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
        assert answer(name, entry, tmp_path, streaming=changes, units=cut(size)) == whole, (size, block, changes)


def test_a_budget_that_is_too_small_is_refused_with_what_is_needed(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"memory budget: got 100000 bytes, need at least \d+ for path int8") as told:
        answer("int8", entry, tmp_path, streaming={"memory_budget": 100_000})
    need = int(re.findall(r"at least (\d+)", str(told.value))[0])
    with pytest.raises(UsageError, match=f"need at least {need} "):
        answer("int8", entry, tmp_path, streaming={"memory_budget": need - 1})
    answer("int8", entry, tmp_path, streaming={"memory_budget": need})


class Shares(World):
    """Ranks that take their turns in one process: the leader last, when the others have left what they found."""

    def __init__(self, rank: int, size: int, found: dict[str, Any]) -> None:
        self.rank, self.size, self.found = rank, size, found

    def collect(self, value: Any) -> list[Any]:
        return [*self.found.setdefault("values", []), value] if self.leader else self.found["values"].append(value) or [value]

    def reduce(self, keys: Tensor, merge: Callable[[Sequence[Tensor]], Tensor]) -> Tensor | None:
        self.found.setdefault("keys", []).append(keys)
        return merge(self.found["keys"]) if self.leader else None


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_answer_is_the_same_for_every_number_of_ranks(ranks: int, entry: Entry, tmp_path: Path) -> None:
    whole = answer("int8", entry, tmp_path)
    divided = cut(12)
    parts = units.shares(divided, [stop - start for start, stop in divided], ranks)
    found: dict[str, Any] = {"values": []}
    kept = np.full((2, COUNT), np.nan, np.float32)
    for rank in range(ranks - 1, -1, -1):
        scored = score_path(
            "int8", QUERIES, Corpus(entry, quiet=True), plan_of(), kept, units=divided, share=parts[rank],
            world=Shares(rank, ranks, found),
        )  # fmt: skip
        assert (scored is None) == (rank > 0)
    assert scored is not None
    write_trec_run(tmp_path / "run.trec", to_run("int8", scored, plan_of()))
    assert (tmp_path / "run.trec").read_bytes() == whole.run
    assert kept.tobytes() == whole.rows
    totals = [part["total"] for part in found["values"]]
    assert scored.seconds["total"] >= max(totals)
    assert scored.seconds["score"] >= max(part["score"] for part in found["values"])


def test_a_finished_unit_is_taken_from_its_record(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, divided = answer("fp16", entry, tmp_path), cut(9)
    score, scored = score_units, []

    def watched(*arguments: Any, **options: Any) -> Iterator[UnitScores]:
        for unit in score(*arguments, **options):
            scored.append(unit.start)
            yield unit

    monkeypatch.setattr("maxsim_eval.scoring.scoring.score_units", watched)
    for missing in ([], [0], [18, 27], [54], [start for start, _ in divided]):
        folder = tmp_path / f"records-{len(missing)}-{sum(missing)}"
        with Records(folder, {"a": 1}) as records:
            answer("fp16", entry, tmp_path, units=divided, records=records, keep=True)
        for start in missing:
            (path,) = folder.glob(f"{start}-*.h5")
            path.unlink()
        scored.clear()
        with Records(folder, {"a": 1}) as records:
            assert answer("fp16", entry, tmp_path, units=divided, records=records, keep=True) == whole
        assert scored == missing
        rows = Records(folder, {"a": 1}).rows(divided)
        assert rows[:].tobytes() == whole.rows
    scored.clear()
    with Records(folder, {"a": 2}) as records:  # another evaluation's are not taken
        assert answer("fp16", entry, tmp_path, units=divided, records=records, keep=True) == whole
    assert len(scored) == len(divided)


def test_a_damaged_record_is_said_and_its_unit_scored_again(entry: Entry, tmp_path: Path) -> None:
    whole, divided = answer("fp32", entry, tmp_path), cut(20)
    with Records(tmp_path / "records", {}) as records:
        answer("fp32", entry, tmp_path, units=divided, records=records, keep=True)
    path = tmp_path / "records" / "20-40.h5"
    content = path.read_bytes()
    path.write_bytes(content[:-5] + b"wrong")
    with Records(tmp_path / "records", {}) as records, pytest.warns(UserWarning, match=r"20-40\.h5"):
        assert answer("fp32", entry, tmp_path, units=divided, records=records, keep=True) == whole
    # Only the seconds may differ now.
    with warnings.catch_warnings(), Records(tmp_path / "records", {}) as records:
        warnings.simplefilter("error")
        assert answer("fp32", entry, tmp_path, units=divided, records=records, keep=True) == whole


def test_restored_seconds_count(entry: Entry, tmp_path: Path) -> None:
    keys = np.full((3, K), np.iinfo(np.int64).min)
    with Records(tmp_path, {}) as records:
        for start, stop in cut(30):
            records.put(start, stop, keys, None, {**dict.fromkeys(PHASES, 1.0), "total": 5.0})
        records.close()
        scored = score_path("fp16", QUERIES, Corpus(entry, quiet=True), plan_of(), units=cut(30), records=records)
    assert scored is not None
    assert scored.seconds == {**dict.fromkeys(PHASES, 2.0), "total": 10.0}


BAD = {
    "nan": (45, torch.full((2, WIDTH), 1e20), "fp32", r"path fp32: NaN score for query 'q2' and document 'd45'"),
    "range": (45, torch.full((2, WIDTH), 70000.0), "fp16", r"a component of 70000 does not fit FP16"),
    "scale": (45, torch.full((2, WIDTH), 1e20), "int8-document", r"path int8-document: .*"),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", BAD)
def test_nothing_is_recorded_of_a_unit_that_was_refused(
    kind: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, document, name, message = BAD[kind]
    if late:  # a GPU's results are on their way while the next unit is looked at
        monkeypatch.setattr(stream._Unit, "arrived", lambda _: False)
    entry = entry_of(tmp_path / "entry", {number: document})
    queries = QUERIES
    if kind == "nan":
        queries = Packed(QUERIES.values.clone(), QUERIES.offsets)  # type: ignore[arg-type]
        queries.values[3], queries.values[4] = 1e20, -1e20
    with Records(tmp_path / "records", {}) as records, pytest.raises(DataError, match=message):
        score_path(name, queries, Corpus(entry, quiet=True), plan_of(), units=cut(10), records=records)
    found = sorted(path.name for path in (tmp_path / "records").glob("*.h5"))
    assert found == ["0-10.h5", "10-20.h5", "20-30.h5", "30-40.h5"]


def test_a_file_that_changes_under_way_stops_the_path(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "entry")
    shard = entry.shards[3].path
    shard.write_bytes(shard.read_bytes())
    with Records(tmp_path / "records", {}) as records, pytest.raises(CacheError, match=r"00003\.h5"):
        score_path("fp16", QUERIES, Corpus(entry, quiet=True), plan_of(), units=cut(13), records=records)
    assert not (tmp_path / "records" / "39-52.h5").exists()


def test_units_of_a_selection(entry: Entry, tmp_path: Path) -> None:
    chosen = Selection(entry, np.arange(2, COUNT, 3))
    plan = plan_of(document_ids=[f"d{n:02d}" for n in chosen.rows], excluded=np.array([0, -1, 13]))
    whole = answer("int8-corpus", chosen, tmp_path, plan)
    for size in (1, 6):
        assert answer("int8-corpus", chosen, tmp_path, plan, units=cut(size, chosen.documents)) == whole


def test_score_rows_of_a_unit_are_bounded(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert divide(entry, 0, 2) == ([(0, COUNT)], [range(1), range(1, 1)])
    monkeypatch.setattr(job, "UNIT_SCORES", 4 * 10 * 16)
    found, parts = divide(entry, 10, 2)
    assert [stop - start for start, stop in found] == [15] * 4
    assert [stop for _, stop in found[:-1]] == [start for start, _ in found[1:]]
    assert [len(part) for part in parts] == [2, 2]


def test_digests_tell_arrays_apart() -> None:
    arrays = [
        np.zeros(4, np.int64),
        np.zeros(2, np.int64),
        np.zeros((2, 2), np.int64),
        np.zeros(4, np.float64),
        np.ones(4, np.int64),
    ]
    tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(0, 3), torch.zeros(3, 0)]
    found = [digest(array) for array in (*arrays, *tensors)] + [digest(arrays[1], arrays[1]), digest()]
    assert len(set(found)) == len(found)
    assert digest(torch.arange(6).reshape(2, 3).T) == digest(torch.arange(6).reshape(2, 3).T.contiguous())


def test_every_path_is_tested_here_or_is_a_cast_like_one_that_is() -> None:
    assert set(PATHS) - set(NAMES) == {"bf16", "int8-document"}
