"""Scoring paths: the exact top-k of everything at once, whatever the blocks, the shards and k; refusals that name what they refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import DataError, UnknownNameError
from maxsim_eval.scoring import scoring as scoring_module
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.own_functions import check_paths
from maxsim_eval.scoring.paths import PATHS
from maxsim_eval.scoring.scoring import Scored, score_path, to_run
from maxsim_kernels import Packed, maxsim, maxsim_reference, pack, quantize_fp8, quantize_int8
from scoring_cases import drawn
from stored_cases import filled

WIDTH = 16
numbers = partial(drawn, width=WIDTH)
BLOCKS = (1, 700, 4096, 1 << 25)  # a document each, a few, a shard, everything
Whole = Callable[[Packed, Packed], object]

# What each path means, on the whole corpus in one call of the operator, written without the path table.
WHOLE: dict[str, Whole] = {
    "fp32": maxsim_reference,
    "fused-fp32": maxsim,
    "fp16": lambda q, d: maxsim(q.to(torch.float16), d.to(torch.float16)),
    "bf16": lambda q, d: maxsim(q.to(torch.bfloat16), d.to(torch.bfloat16)),
    "int8": lambda q, d: maxsim(q, quantize_int8(d)),
    "int8-document": lambda q, d: maxsim(q, quantize_int8(d, "document")),
    "int8-corpus": lambda q, d: maxsim(q, quantize_int8(d, "corpus")),
    "fp8": lambda q, d: maxsim(q, quantize_fp8(d)),
}


def corpus_of(*, grid: bool) -> list[Tensor]:
    """30 ragged documents with empty ones, and exact duplicates near and far (across every shard and block)."""
    documents = [numbers((n * 7) % 10, n, grid=grid) for n in range(30)]
    for copy, original in ((2, 1), (12, 1), (29, 1), (4, 26), (5, 26), (17, 16)):
        documents[copy] = documents[original]
    return documents


def queries_of(*, grid: bool) -> Packed:
    return pack([numbers(size, 100 + size, grid=grid) for size in (3, 0, 1, 8)])


def store(folder: Path, documents: Sequence[Tensor], per_shard: int, dtype: torch.dtype = torch.float32) -> Entry:
    ids = [f"d{n:02d}" for n in range(len(documents))]
    return filled(folder, pack(documents).to(dtype), ids=ids, documents_per_shard=per_shard)


@dataclass(frozen=True)
class Stored:
    """Queries and one corpus, cut into shards in two ways."""

    queries: Packed
    documents: Packed
    entries: tuple[Entry, Entry]


@pytest.fixture(scope="module", params=[True, False], ids=["ties", "normal"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    documents = corpus_of(grid=request.param)
    root = tmp_path_factory.mktemp("entries")
    entries = (store(root / "one", documents, 100), store(root / "many", documents, 7))
    return Stored(queries_of(grid=request.param), pack(documents), entries)


def plan_of(queries: Packed, documents: int, k: int, excluded: Sequence[int] | None = None) -> Asked:
    return Asked(
        query_ids=[f"q{n}" for n in range(len(queries))],
        document_ids=[f"d{n:02d}" for n in range(documents)],
        k=k,
        excluded=np.full(len(queries), -1, np.int64) if excluded is None else np.array(excluded, np.int64),
        kept_rows=np.arange(len(queries)),
    )


def brute(full: Tensor, k: int, excluded: Sequence[int] | None = None) -> list[list[tuple[str, float]]]:
    """Rankings by sorting every score: descending, ties by document index; -inf and the excluded are not retrieved."""
    rankings = []
    for query, row in enumerate(full.tolist()):
        out = -1 if excluded is None else excluded[query]
        found = [n for n, score in enumerate(row) if score != -math.inf and n != out]
        best = sorted(found, key=lambda n, row=row: (-row[n], n))[:k]  # type: ignore[misc]
        rankings.append([(f"d{n:02d}", row[n]) for n in best])
    return rankings


def ranked(name: str, stored_scores: Scored, plan: Asked) -> list[list[tuple[str, float]]]:
    run = to_run(name, stored_scores, plan)
    assert run.ordered
    assert list(run.rankings) == list(plan.query_ids)
    return [list(run.rankings[query]) for query in plan.query_ids]


def whole(name: str, stored: Stored) -> Tensor:
    full = WHOLE[name](stored.queries, stored.documents)
    assert isinstance(full, Tensor)
    return full


@pytest.mark.usefixtures("every_bar")
def test_waiting_for_the_disk_is_said(
    stored: Stored, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bar, where units say that they waited most of their time; the scores are what they are."""
    queries, entry = stored.queries, stored.entries[1]
    plan, units = plan_of(queries, 30, 5), [(0, 10), (10, 20), (20, 30)]
    first = score_path("fp16", queries, Corpus(entry, quiet=True), plan, units=units)
    original = scoring_module.score_units

    def slow(*arguments: Any, **options: Any) -> Iterator[Any]:
        for unit in original(*arguments, **options):
            yield dataclasses.replace(unit, cost=unit.cost | {"read": 0.9, "total": 1.0})

    monkeypatch.setattr(scoring_module, "score_units", slow)
    again = score_path("fp16", queries, Corpus(entry, quiet=False), plan, units=units)
    assert " GB/s, waiting for the disk" in capsys.readouterr().err
    assert first is not None
    assert again is not None
    assert ranked("fp16", again, plan) == ranked("fp16", first, plan)


def test_every_path_has_a_meaning_here() -> None:
    assert set(WHOLE) == set(PATHS)


@pytest.mark.parametrize("name", WHOLE)
def test_top_k_is_that_of_sorting_everything_for_every_cut(
    name: str, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = whole(name, stored)
    assert len(full.unique()) < full.numel() - 30, "this corpus should have ties"
    whole_entry, in_shards = stored.entries
    few = [(700, in_shards), (1 << 25, whole_entry)]
    all_cuts = [*few, (1, whole_entry), (700, whole_entry), (4096, in_shards), (1 << 25, in_shards)]
    for k, cuts in ((1, few), (3, all_cuts), (30, few), (35, all_cuts)):
        need, files = brute(full, k), set()
        for block, entry in cuts:
            monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
            plan = plan_of(stored.queries, 30, k)
            kept = np.full((4, 30), np.nan, np.float32)
            scored = score_path(name, stored.queries, Corpus(entry, quiet=True), plan, kept)
            assert ranked(name, scored, plan) == need
            assert torch.equal(torch.from_numpy(kept), full), "the kept rows are not the scores of everything at once"
            write_trec_run(tmp_path / "run.trec", to_run(name, scored, plan))
            files.add((tmp_path / "run.trec").read_bytes())
        assert len(files) == 1, f"k = {k}: the run file depends on how the corpus was cut"


def test_the_reference_path_is_the_reference_bit_for_bit(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here the fused operator gives the same bits, so that it is not called has to be said.
    assert [name for name, path in PATHS.items() if path.score is maxsim_reference] == ["fp32"]
    full = maxsim_reference(stored.queries, stored.documents)
    assert isinstance(full, Tensor)
    for block in BLOCKS:
        monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
        kept = np.full((4, 30), np.nan, np.float32)
        score_path("fp32", stored.queries, Corpus(stored.entries[1], quiet=True), plan_of(stored.queries, 30, 5), kept)
        assert kept.tobytes() == full.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_paths_read_what_the_cache_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    documents = corpus_of(grid=False)
    entry = store(tmp_path / "entry", documents, 9, dtype)
    queries, rounded = queries_of(grid=False), pack(documents).to(dtype).to(torch.float32)
    for name, of_everything in WHOLE.items():
        full = of_everything(queries, rounded)
        assert isinstance(full, Tensor)
        plan = plan_of(queries, 30, 6)
        scored = score_path(name, queries.to(torch.float32), Corpus(entry, quiet=True), plan, None)
        assert ranked(name, scored, plan) == brute(full, 6), name


@pytest.mark.parametrize("exponent", [0, 12, -12, -20])
def test_the_corpus_scale_is_that_of_the_whole_corpus(exponent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The largest value stands in the last document: a scale found block by block would be another one.
    documents = [tokens * 2.0**exponent for tokens in corpus_of(grid=False)]
    documents[-1] = documents[-1] * 3
    entry, queries = store(tmp_path / "entry", documents, 8), queries_of(grid=False)
    full = maxsim(queries, quantize_int8(pack(documents), "corpus"))
    assert isinstance(full, Tensor)
    for block in (1, 1 << 20):
        monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
        kept = np.full((4, 30), np.nan, np.float32)
        score_path("int8-corpus", queries, Corpus(entry, quiet=True), plan_of(queries, 30, 4), kept)
        assert torch.equal(torch.from_numpy(kept), full)


def test_the_corpus_is_passed_over_once_for_its_scale(stored: Stored) -> None:
    corpus = Corpus(stored.entries[1], quiet=True)
    found = corpus.absmax()
    assert found == float(stored.documents.values.abs().max())
    corpus.entry = dataclasses.replace(corpus.entry, shards=())
    assert corpus.absmax() == found


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8-corpus"])
def test_excluded_documents_are_not_retrieved(name: str, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    excluded, full = [1, 0, 29, -1], whole(name, stored)
    for block in BLOCKS:
        monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
        plan = plan_of(stored.queries, 30, 30, excluded)
        kept = np.zeros((4, 30), np.float32)
        scored = score_path(name, stored.queries, Corpus(stored.entries[1], quiet=True), plan, kept)
        assert ranked(name, scored, plan) == brute(full, 30, excluded)
        assert [bool(np.isneginf(kept[query, n])) for query, n in ((0, 1), (1, 0), (2, 29))] == [True] * 3


def test_empty_documents_are_not_retrieved_and_empty_queries_take_the_first(stored: Stored) -> None:
    plan = plan_of(stored.queries, 30, 30)
    empty = {f"d{n:02d}" for n, size in enumerate(stored.documents.lengths.tolist()) if size == 0}
    assert len(empty) > 2
    for name in PATHS:
        scored = score_path(name, stored.queries, Corpus(stored.entries[0], quiet=True), plan, None)
        run = to_run(name, scored, plan)
        for query in ("q0", "q2", "q3"):
            assert {document for document, _ in run.rankings[query]} == set(plan.document_ids) - empty
        assert run.rankings["q1"] == [(document, 0.0) for document in plan.document_ids]


def test_only_the_kept_rows_are_kept(stored: Stored) -> None:
    plan = plan_of(stored.queries, 30, 3)
    some = Asked(plan.query_ids, plan.document_ids, 3, plan.excluded, np.array([0, 3]))
    kept = np.full((2, 30), np.nan, np.float32)
    scored = score_path("fp32", stored.queries, Corpus(stored.entries[1], quiet=True), some, kept)
    assert torch.equal(torch.from_numpy(kept), whole("fp32", stored)[[0, 3]])
    assert ranked("fp32", scored, some) == brute(whole("fp32", stored), 3)


def test_seconds_add_up(stored: Stored) -> None:
    scored = score_path("int8", stored.queries, Corpus(stored.entries[1], quiet=True), plan_of(stored.queries, 30, 3), None)
    parts = {name: value for name, value in scored.seconds.items() if name != "total"}
    assert set(parts) == {"read", "prepare", "score", "topk"}
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(scored.seconds["total"], abs=0.05)


@pytest.mark.usefixtures("every_bar")
def test_progress_is_on_stderr_and_quiet_is_quiet(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(stored.queries, 30, 3)
    score_path("int8-corpus", stored.queries, Corpus(stored.entries[0], quiet=True), plan, None)
    assert capsys.readouterr() == ("", "")
    score_path("int8-corpus", stored.queries, Corpus(stored.entries[0]), plan, None)
    said = capsys.readouterr()
    assert said.out == ""
    assert "int8-corpus" in said.err
    assert "corpus scale" in said.err


def large(tmp_path: Path, value: float, *, document: int = 7) -> Entry:
    documents = corpus_of(grid=True)
    documents[document] = torch.full((2, WIDTH), value)
    return store(tmp_path / "entry", documents, 8)


@pytest.mark.parametrize("side", ["documents", "queries"])
def test_what_does_not_fit_fp16_is_refused(side: str, tmp_path: Path) -> None:
    entry, queries = large(tmp_path, 70000.0 if side == "documents" else 1.0), queries_of(grid=True)
    if side == "queries":
        queries.values[2, 5] = -70000.0
    plan = plan_of(queries, 30, 4)
    with pytest.raises(DataError, match=r"a component of 70000 does not fit FP16 \(at most 65504\); use bf16"):
        score_path("fp16", queries, Corpus(entry, quiet=True), plan, None)
    for name in ("fp32", "bf16", "int8"):
        score_path(name, queries, Corpus(entry, quiet=True), plan, None)


def test_the_largest_fp16_number_is_accepted(tmp_path: Path) -> None:
    queries = queries_of(grid=True)
    plan = plan_of(queries, 30, 4)
    kept = np.zeros((4, 30), np.float32)
    score_path("fp16", queries, Corpus(large(tmp_path, 65504.0), quiet=True), plan, kept)
    assert np.isfinite(kept[:, 7]).all()


@pytest.mark.parametrize("name", ["int8-document", "int8-corpus", "fp8"])
def test_what_no_fp16_scale_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    queries = queries_of(grid=True)
    with pytest.raises(DataError, match=name):
        score_path(name, queries, Corpus(large(tmp_path, 1e20), quiet=True), plan_of(queries, 30, 4), None)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["fp32", "fused-fp32", "bf16", "int8"])
@pytest.mark.parametrize("block", [1, 1 << 25])
def test_a_nan_score_names_query_and_document(name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "BLOCK_BYTES", block)
    queries = queries_of(grid=True)
    queries.values[:4] = 0.25
    if name != "int8":  # there a token beyond FP16's scales is NaN by itself, for any query
        queries.values[4], queries.values[5] = 1e20, -1e20  # of q3: one overflows to +inf, the other to -inf
    entry = large(tmp_path, 1e20, document=21)
    query = "q0" if name == "int8" else "q3"
    with pytest.raises(DataError, match=f"path {name}: NaN score for query '{query}' and document 'd21'"):
        score_path(name, queries, Corpus(entry, quiet=True), plan_of(queries, 30, 4), None)


def test_paths_by_name() -> None:
    assert check_paths(["int8", "fp32", "fp16", "int8"]) == ("fp32", "int8", "fp16")
    assert check_paths(["fp16", "bf16"]) == ("fp16", "bf16")
    assert check_paths([]) == ()
    with pytest.raises(UnknownNameError, match=r"unknown path 'fp61'\. Did you mean 'fp16'"):
        check_paths(["fp32", "fp61"])


def test_descriptions_tell_the_paths_apart() -> None:
    assert len({path.description for path in PATHS.values()}) == len(PATHS)
