"""Certified paths: the run of full precision to the last byte, however the work is cut, interrupted and shared; what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures import interpreted, one_thread  # noqa: F401 - for every test here
from maxsim_eval.cache.copies import quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.processes.world import World
from maxsim_eval.scoring import certified
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.certified import certified_by, require_certifiable, require_copies, search_facts
from maxsim_eval.scoring.paths import CERTIFIED, PATHS
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.scoring import Scored, score_path, to_run
from maxsim_kernels import Packed, pack
from maxsim_kernels.search import exact, searching
from stored_cases import with_int8_copy

NAME, WIDTH, COUNT, K = "exact-int8", 16, 150, 6
WIDE = "exact-int8-fp32"


def tokens(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=1).to(
        dtype
    )


def entry_of(folder: Path, dtype: torch.dtype, changed: Mapping[int, Tensor] | None = None) -> Entry:
    """150 documents, some empty, every seventh equal to another, in 4 shards, with their INT8 copy."""
    documents = [tokens(n % 7 if n % 7 == 3 else n, n % 9, dtype) for n in range(COUNT)]
    for number, document in (changed or {}).items():
        documents[number] = document.to(dtype)
    return with_int8_copy(folder, [f"d{n:03d}" for n in range(COUNT)], documents, 41)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def entry(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Entry:
    return entry_of(tmp_path_factory.mktemp("cache") / "entry", request.param)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and pieces in so small a corpus, and never brute force for want of documents."""
    monkeypatch.setattr(certified, "_BLOCK_BYTES", 60 * WIDTH)
    monkeypatch.setattr(certified, "_SEARCHED_BYTES", {"cpu": 150 * WIDTH})
    monkeypatch.setattr(searching, "_LEAST_DOCUMENTS", 16)
    monkeypatch.setattr(searching, "_CELLS", 64)


def asked_of(excluded: Sequence[int] = (-1, -1, -1, -1)) -> Asked:
    names = [f"q{n}" for n in range(4)]
    return Asked(names, [f"d{n:03d}" for n in range(COUNT)], K, np.array(excluded), np.zeros(0, np.int64))


def queries(dtype: torch.dtype) -> Packed:
    return pack([tokens(1000 + size, size, dtype) for size in (3, 0, 5, 1)], dim=WIDTH)


def scored_by(name: str, documents: Any, asked: Asked, **options: Any) -> Scored:
    copy = quantised(documents, "int8-document")
    assert copy is not None
    corpus = Corpus(documents, quiet=True, copies={NAME: copy, WIDE: copy})
    found = score_path(name, queries(documents.dtype), corpus, asked, **options)
    assert found is not None
    return found


def run_of(scored: Scored, asked: Asked, path: Path) -> bytes:
    write_trec_run(path, to_run("x", scored, asked))
    return path.read_bytes()


def brute(documents: Any, asked: Asked, path: Path, certified_as: str = NAME) -> bytes:
    dtype = torch.float32 if certified_as == WIDE else documents.dtype
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fused-fp32"}[dtype]
    return run_of(scored_by(name, documents, asked), asked, path)


def cut(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, COUNT)) for start in range(0, COUNT, size)]


@pytest.mark.parametrize("excluded", [(-1, -1, -1, -1), (3, 149, -1, 77)])
@pytest.mark.parametrize("size", [1, 13, 64, COUNT])
def test_the_run_is_that_of_full_precision_however_the_work_is_cut(
    entry: Entry, size: int, excluded: Sequence[int], tmp_path: Path
) -> None:
    asked = asked_of(excluded)
    found = scored_by(NAME, entry, asked, units=cut(size))
    assert run_of(found, asked, tmp_path / "run") == brute(entry, asked, tmp_path / "brute")


@pytest.mark.parametrize("size", [13, COUNT])
def test_the_precision_may_be_fp32_whatever_is_stored(entry: Entry, size: int, tmp_path: Path) -> None:
    asked = asked_of((3, 149, -1, 77))
    found = scored_by(WIDE, entry, asked, units=cut(size))
    assert run_of(found, asked, tmp_path / "run") == brute(entry, asked, tmp_path / "brute", WIDE)
    copy = quantised(entry, "int8-document")
    assert copy is not None
    for device in ("cpu", "cuda"):
        facts, _ = search_facts(found.counts, 4, entry, copy, device, CERTIFIED[WIDE].precision)
        assert facts["certifies"] == ["fused-fp32"]
    assert facts["row_bytes"] <= facts["stored_bytes"], "what was read, not what it was widened to"


def test_a_query_may_be_denied_its_best_document(entry: Entry, tmp_path: Path) -> None:
    best = scored_by(NAME, entry, asked_of())
    asked = asked_of([int(row[0]) for row in best.indices])
    found = scored_by(NAME, entry, asked, units=cut(64))
    assert run_of(found, asked, tmp_path / "run") == brute(entry, asked, tmp_path / "brute")
    assert (found.indices[:, 0] != best.indices[:, 0]).all()


def test_most_documents_are_never_read(entry: Entry) -> None:
    counts = scored_by(NAME, entry, asked_of(), units=cut(COUNT)).counts
    facts, memory = search_facts(counts, 4, entry, quantised(entry, "int8-document"), "cpu")  # type: ignore[arg-type]
    assert K <= facts["survivors"] < COUNT / 3
    assert facts["row_bytes"] < facts["stored_bytes"] == entry.tokens * WIDTH * entry.dtype.itemsize
    assert facts["code_bytes"] == entry.tokens * WIDTH
    assert facts["pieces"] > 3
    assert memory["document_bytes"] > entry.tokens * WIDTH * (1 + entry.dtype.itemsize) / COUNT


def test_what_was_found_before_prunes_what_comes_after(entry: Entry, tmp_path: Path) -> None:
    asked, divided = asked_of(), cut(25)
    whole = brute(entry, asked, tmp_path / "brute")
    survivors = []
    for missing in ([0], [75, 100], [125]):
        with Records(tmp_path / "records", {}) as records:
            scored_by(NAME, entry, asked, units=divided, records=records)
        for start in missing:
            (tmp_path / "records" / f"{start}-{start + 25}.h5").unlink()
        with Records(tmp_path / "records", {}) as records:
            again = scored_by(NAME, entry, asked, units=divided, records=records)
        assert run_of(again, asked, tmp_path / "run") == whole
        survivors.append(again.counts["survivors"])
    assert survivors[0] < scored_by(NAME, entry, asked, units=divided).counts["survivors"], "the first unit knew nothing then"


class Ranks:
    """Processes as threads, that meet where processes do."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.held = size, threading.Barrier(size, timeout=60), [None] * size

    def rank(self, number: int) -> World:
        world, ranks = World(), self

        def all_of(value: Any) -> list[Any]:
            ranks.held[number] = value
            ranks.barrier.wait()
            found = list(ranks.held)
            ranks.barrier.wait()
            return found

        world.rank, world.size = number, self.size
        world.reduce = lambda keys, merge: merge(all_of(keys)) if number == 0 else all_of(keys) and None  # type: ignore[method-assign]
        world.share = lambda value: all_of(value)[0]  # type: ignore[method-assign]
        world.collect = all_of  # type: ignore[method-assign]
        return world


@pytest.mark.parametrize("shares", [[range(3), range(3, 6)], [range(1), range(1, 1), range(1, 6)]])
@pytest.mark.parametrize("share_of_pairs", [0.0, 0.25])
def test_ranks_prune_by_what_all_have_found(
    entry: Entry, shares: list[range], share_of_pairs: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three has no units; brute force meets the others too."""
    monkeypatch.setattr(certified, "_SEARCHED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(searching, "_CELLS", 1 << 20)
    begin = certified.begin_search

    def with_share(*given: Any, **options: Any) -> Any:
        search = begin(*given, **options)
        search.most_rescored = share_of_pairs
        return search

    asked, units, ranks = asked_of(), cut(25), Ranks(len(shares))
    one = scored_by(NAME, entry, asked, units=units)
    monkeypatch.setattr(certified, "begin_search", with_share)
    copies = {NAME: quantised(entry, "int8-document")}

    def work(number: int) -> Scored | None:
        corpus = Corpus(entry, quiet=True, copies=copies)  # type: ignore[arg-type]
        options = {"units": units, "share": shares[number], "world": ranks.rank(number)}
        return score_path(NAME, queries(entry.dtype), corpus, asked, **options)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(shares)) as pool:
        found, *others = pool.map(work, range(len(shares)))
    assert found is not None
    assert others == [None] * (len(shares) - 1)
    assert run_of(found, asked, tmp_path / "run") == brute(entry, asked, tmp_path / "brute")
    if share_of_pairs:
        assert found.counts["survivors"] <= 1.2 * one.counts["survivors"], "each alone would score its own k best"


def test_some_documents_of_an_entry(entry: Entry, tmp_path: Path) -> None:
    chosen = Selection(entry, np.arange(1, COUNT, 2, dtype=np.int64))
    asked = asked_of()
    found = scored_by(NAME, chosen, asked, units=[(0, 30), (30, 75)])
    assert run_of(found, asked, tmp_path / "run") == brute(chosen, asked, tmp_path / "brute")


def test_damaged_full_precision_is_not_scored(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "entry", torch.float16)
    best = int(scored_by(NAME, entry, asked_of()).indices[0, 0])
    shard = next(shard for shard in entry.shards if shard.spec.start <= best < shard.spec.stop)
    first = shard.position + int(shard.offsets[best - shard.spec.start]) * shard.spec.row_bytes
    content = bytearray(shard.path.read_bytes())
    content[first] ^= 1
    shard.path.write_bytes(content)
    with pytest.raises(CacheError, match=shard.path.name):
        scored_by(NAME, open_entry(entry.folder), asked_of())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [1e6, -1e6])
def test_scores_that_are_no_numbers_are_named(value: float, tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "entry", torch.float32, {45: torch.full((2, WIDTH), value)})
    corpus = Corpus(entry, quiet=True, copies={NAME: quantised(entry, "int8-document")})  # type: ignore[dict-item]
    with pytest.raises(DataError, match=f"path {NAME}: infinite score for query 'q0' and document 'd045'"):
        score_path(NAME, pack([torch.full((1, WIDTH), 1e35)] * 4), corpus, asked_of())


def test_what_cannot_be_certified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {NAME: CERTIFIED[NAME], "fp16": PATHS["fp16"]}
    require_certifiable(paths, "cpu", candidates=False)
    require_copies(paths, {NAME}, "")
    with pytest.raises(UsageError, match="path exact-int8: device mps: need the CPU or a CUDA device"):
        require_certifiable(paths, "mps", candidates=False)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "HAS_TRITON", False)
        with pytest.raises(UsageError, match="path exact-int8: device cuda:1: Triton is not installed"):
            require_certifiable(paths, "cuda:1", candidates=False)
    with pytest.raises(UsageError, match="every listed pair"):
        require_certifiable(paths, "cpu", candidates=True)
    with pytest.raises(UsageError, match=r"make it first: evaluate\.py convert x y --encoder z --to int8-document"):
        require_copies(paths, {"int8"}, "evaluate.py convert x y --encoder z")
    require_certifiable({"fp16": PATHS["fp16"]}, "cuda", candidates=True)


def test_what_is_certified_depends_on_how_a_device_multiplies() -> None:
    assert certified_by(torch.float16, "cpu") == ["fp16", "fused-fp32"]
    assert certified_by(torch.float16, "cuda:1") == ["fp16"]
    assert certified_by(torch.bfloat16, "cuda") == ["bf16"]
    assert certified_by(torch.float32, "cuda") == certified_by(torch.float32, "cpu") == ["fused-fp32"]


@pytest.mark.slow
@pytest.mark.every_change
def test_evaluations_by_the_search_of_a_gpu(interpreted: Callable[..., None]) -> None:  # noqa: F811
    """Its kernels interpreted, codes and full precision read from files as on a GPU (`interpreted_certified.py`)."""
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted("certified", "evaluation", 24, folder="toolkit/scoring")
