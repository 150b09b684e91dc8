"""The toolkit's pipeline on a GPU: the same answer for every cut, no waiting in the middle, the CPU's rankings where scores are exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsim_eval.api import evaluate
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry
from maxsim_eval.errors import DataError
from maxsim_eval.scoring import job, units
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.paths import PATHS
from maxsim_eval.scoring.scoring import score_path, to_run
from maxsim_eval.scoring.stream import PHASES, score_units
from maxsim_eval.types import Role, Task
from maxsim_kernels import Packed, pack
from stored_cases import filled
from task_cases import small_task

WIDTH, COUNT, QUERIES = 128, 3000, 24
NO_WAIT = ("fused-fp32", "fp16", "bf16", "int8")  # the others refuse values that no scale holds, for which they must look


def tokens(kind: int, most: int) -> torch.Tensor:
    """Multiples of 1/4: exact in every format, and equal for equal kinds."""
    rng = np.random.default_rng(kind)
    return torch.from_numpy(rng.integers(-4, 5, (int(rng.integers(0, most)), WIDTH)) / 4).float()


class Kinds:
    """A text is a number: the kind of its tokens."""

    name, revision, dim = "kinds", "1", WIDTH

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {}

    def prepare(self, documents: Any) -> None: ...

    def encode(self, items: Any, role: Role) -> Packed:
        return pack([tokens(int(text), 12 if role == "query" else 60) for text in items], dim=WIDTH)


def task_of() -> Task:
    return small_task(
        [str(1000 + n) for n in range(QUERIES)],
        [str((n * n) % 97) for n in range(COUNT)],
        document_ids=["q0", "q1", "q2", *(f"d{n}" for n in range(3, COUNT))],
        qrels={f"q{n}": {f"d{n * 3 + 5}": 1} for n in range(QUERIES)},
        exclude_same_id=True,
    )


def run(folder: Path, out: str, device: str = "cuda", **options: Any) -> dict[str, bytes]:
    options = {"k": 50, **options}
    evaluate(
        task_of(), Kinds(), list(PATHS), cache_dir=folder / "cache", out_dir=folder / out, device=device, quiet=True, **options
    )
    return {path.name: path.read_bytes() for path in (folder / out / "runs").iterdir()}


def test_the_files_are_the_same_for_every_cut_budget_and_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path, "whole")
    assert len(whole) == len(PATHS)
    for number, (least, options) in enumerate(
        [
            (1 << 20, {}),
            (200_000, {"readers": 1}),
            (1 << 18, {"memory_budget": 400 << 20}),
            (1 << 18, {"memory_budget": 4 << 30}),
        ]
    ):
        monkeypatch.setattr(units, "LEAST_BYTES", least)
        assert run(tmp_path, f"out{number}", **options) == whole
    put, seen = job.Records.put, [0]

    def stopping(self: Any, *arguments: Any) -> None:
        seen[0] += 1
        if seen[0] == 40:
            raise KeyboardInterrupt
        put(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(job.Records, "put", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "stopped")
    assert len(list((tmp_path / "stopped" / ".partial").glob("*/*.h5"))) > 20
    assert run(tmp_path, "stopped") == whole


def test_exact_scores_are_ranked_as_on_a_cpu(tmp_path: Path) -> None:
    on_gpu, on_cpu = run(tmp_path, "gpu"), run(tmp_path, "cpu", "cpu")
    for name in ("fp32.trec", "fused-fp32.trec", "fp16.trec", "bf16.trec"):
        assert on_gpu[name] == on_cpu[name], name


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    return stored(tmp_path_factory.mktemp("cache") / "entry")


def stored(folder: Path, changed: dict[int, torch.Tensor] | None = None) -> Entry:
    documents = [tokens((n * n) % 97, 60) for n in range(COUNT)]
    for number, document in (changed or {}).items():
        documents[number] = document
    return filled(folder, documents)


def plan_of(rows: np.ndarray) -> Asked:
    return Asked(
        query_ids=[f"q{n}" for n in range(QUERIES)],
        document_ids=[f"d{n}" for n in range(COUNT)],
        k=20,
        excluded=np.array([7, *([-1] * (QUERIES - 2)), COUNT - 1]),
        kept_rows=rows,
    )


CUTS = [(start, min(start + 170, COUNT)) for start in range(0, COUNT, 170)]


@pytest.fixture
def no_waiting() -> Iterator[Any]:
    """A `tick` that makes every wait for the GPU an error, from the first scored block on."""
    yield lambda documents, size: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("rows", [np.arange(QUERIES), np.array([0, 5, 23])], ids=["all rows", "some rows"])
@pytest.mark.parametrize("name", NO_WAIT)
def test_nothing_waits_for_the_gpu_and_the_rows_are_right(name: str, rows: np.ndarray, entry: Entry, no_waiting: Any) -> None:
    plan = plan_of(rows)
    queries = Kinds().encode([str(1000 + n) for n in range(QUERIES)], "query")
    found = list(score_units(name, queries, Corpus(entry, quiet=True, device="cuda"), plan, CUTS, keep=True, tick=no_waiting))
    torch.cuda.set_sync_debug_mode("default")
    assert [(unit.start, unit.stop) for unit in found] == CUTS
    kept = np.full((len(rows), COUNT), np.nan, np.float32)
    scored = score_path(name, queries, Corpus(entry, quiet=True, device="cuda"), plan, kept)
    assert scored is not None
    pieces = np.concatenate([unit.scores for unit in found if unit.scores is not None], axis=1)
    assert pieces.tobytes() == kept.tobytes()
    assert np.isneginf(kept[0, 7])
    assert np.isneginf(kept[-1, COUNT - 1])
    for row, query in enumerate(rows.tolist()):
        order = np.lexsort((np.arange(COUNT), -kept[row]))[:20]
        assert [f"d{n}" for n in order] == [name for name, _ in to_run(name, scored, plan).rankings[f"q{query}"]]
    for unit in found:
        assert set(unit.cost) == {*PHASES, "total"}
        assert min(unit.cost.values()) >= 0
        assert unit.cost["score"] > 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fp16", 70000.0, "a component of 70000 does not fit FP16"),
        ("int8", 1e20, "path int8: NaN score for query 'q1' and document 'd1500'"),
        ("fp8", 1e20, "path fp8"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_its_unit(name: str, value: float, message: str, tmp_path: Path) -> None:
    entry = stored(tmp_path / "entry", {1500: torch.full((3, WIDTH), value)})
    queries = pack([tokens(1, 2)[:0], *(torch.ones(2, WIDTH) for _ in range(QUERIES - 1))])
    seen = []

    def score() -> None:
        corpus = Corpus(entry, quiet=True, device="cuda")
        for unit in score_units(name, queries, corpus, plan_of(np.arange(2)), CUTS, keep=True):
            seen.append(unit.stop)

    with pytest.raises(DataError, match=message):
        score()
    assert seen == [stop for _, stop in CUTS if stop <= 1500]


def test_memory_stays_flat(entry: Entry) -> None:
    queries = Kinds().encode([str(1000 + n) for n in range(QUERIES)], "query")
    peaks = []
    for cuts in (CUTS[:4], CUTS):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in score_units(
            "fp16", queries, Corpus(entry, quiet=True, device="cuda"), plan_of(np.arange(QUERIES)), cuts, keep=True
        ):
            pass
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] * 1.05 + (1 << 20)
