"""`exact-int8` on a GPU: the run file of full precision there to the last byte, resident and out of core, however the work is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("h5py")
pytest.importorskip("triton", reason="Triton is not installed")

from maxsim_eval.api import evaluate
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.copies import quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.data.loading import load_task
from maxsim_eval.data.trec import write_trec_run
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.planning.costs import Sizes
from maxsim_eval.planning.plan import make_plan
from maxsim_eval.planning.rates import measure
from maxsim_eval.planning.room import read_room
from maxsim_eval.scoring import certified
from maxsim_eval.scoring.asked import Asked
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.scoring import score_path, to_run
from maxsim_eval.types import Role
from maxsim_kernels import Packed, pack
from rank_cases import torchrun
from stored_cases import with_int8_copy
from task_cases import small_task

NAME, WIDE, COUNT, DEVICE = "exact-int8", "exact-int8-fp32", 6000, "cuda"
FULL = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fused-fp32"}


def tokens(topic: int, number: int, size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Unit vectors about a topic."""
    centre = torch.randn(dim, generator=torch.Generator().manual_seed(topic))
    noise = torch.randn(size, dim, generator=torch.Generator().manual_seed(10_000 + number))
    return torch.nn.functional.normalize(centre + 0.7 * noise, dim=1).to(dtype)


def document(number: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A document about one of 600 topics; some are empty, every 50th is the one before it again."""
    number -= number % 50 == 49
    return tokens(number * 7 % 600, number, number * 13 % 40, dim, dtype)


def stored(folder: Path, dtype: torch.dtype, dim: int = 128, count: int = COUNT, odd: torch.Tensor | None = None) -> Entry:
    """An entry in several shards, with its copy; `odd`: the tokens of its document 1500."""
    made = [odd if odd is not None and n == 1500 else document(n, dim, dtype) for n in range(count)]
    entry = with_int8_copy(folder, [f"d{n}" for n in range(count)], made, 1700)
    return open_entry(entry.folder)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def entry(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Entry:
    return stored(tmp_path_factory.mktemp("cache") / "entry", request.param)


def asked_of(queries: int, k: int, documents: int = COUNT, excluded: bool = True) -> Asked:
    denied = [n * 7 if excluded and n % 3 == 0 else -1 for n in range(queries)]
    names = [f"q{n}" for n in range(queries)]
    return Asked(names, [f"d{n}" for n in range(documents)], k, np.array(denied), np.zeros(0, np.int64))


def queries_of(count: int, dim: int, dtype: torch.dtype) -> Packed:
    """Queries about documents' topics, one without tokens, of up to 37 tokens."""
    sizes = [0 if n == 1 else 1 + n * 11 % 37 for n in range(count)]
    return pack([tokens(n * 31 % 600, 90_000 + n, size, dim, dtype) for n, size in enumerate(sizes)], dim=dim)


def run_of(
    name: str, documents: Any, queries: Packed, asked: Asked, path: Path, budget: int | None = None, **options: Any
) -> tuple[bytes, Any]:
    copy = quantised(documents, "int8-document")
    assert copy is not None
    corpus = Corpus(documents, quiet=True, device=DEVICE, memory_budget=budget, copies={NAME: copy, WIDE: copy})
    found = score_path(name, queries, corpus, asked, **options)
    assert found is not None
    write_trec_run(path, to_run("x", found, asked))
    return path.read_bytes(), found.counts


def same(documents: Any, queries: Packed, asked: Asked, folder: Path, budget: int | None = None, **options: Any) -> Any:
    """Compare with full precision; returns what was counted."""
    found, counts = run_of(NAME, documents, queries, asked, folder / "run", budget, **options)
    assert found == run_of(FULL[documents.dtype], documents, queries, asked, folder / "brute")[0]
    return counts


@pytest.mark.parametrize("budget", [None, 300 << 20])
def test_the_precision_may_be_fp32(entry: Entry, budget: int | None, tmp_path: Path) -> None:
    queries, asked = queries_of(24, entry.dim, entry.dtype), asked_of(24, 10)
    found, counts = run_of(WIDE, entry, queries, asked, tmp_path / "run", budget, units=[(0, 1999), (1999, COUNT)])
    assert found == run_of("fused-fp32", entry, queries, asked, tmp_path / "brute")[0]
    assert counts["row_bytes"] < entry.tokens * entry.dim * entry.dtype.itemsize


def cut(size: int, count: int = COUNT) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


@pytest.mark.parametrize("budget", [None, 300 << 20])
@pytest.mark.parametrize(("count", "k"), [(1, 10), (3, 1), (24, 10), (70, 100)])
def test_the_run_is_that_of_full_precision(entry: Entry, count: int, k: int, budget: int | None, tmp_path: Path) -> None:
    queries = queries_of(count, entry.dim, entry.dtype)
    counts = same(entry, queries, asked_of(count, k), tmp_path, budget, units=cut(COUNT))
    if (
        count < 70
    ):  # bounds prune, and most documents stay where they are; the best 100 of 70 queries are most of so small a corpus
        assert counts["brute_pieces"] == 0
        assert counts["code_bytes"] == entry.tokens * entry.dim
        assert counts["row_bytes"] < 0.6 * entry.tokens * entry.dim * entry.dtype.itemsize


@pytest.mark.parametrize("size", [170, 1999, COUNT])
@pytest.mark.parametrize("searched", [1 << 16, 1 << 20, 8 << 30])
def test_however_the_work_is_cut(
    entry: Entry, size: int, searched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "_SEARCHED_BYTES", {DEVICE: searched, "cpu": searched})
    for name in ("_BLOCK_BYTES", "_LAZY_BYTES"):
        monkeypatch.setattr(certified, name, 1 << 16)
    queries, asked = queries_of(24, entry.dim, entry.dtype), asked_of(24, 10)
    same(entry, queries, asked, tmp_path, units=cut(size))
    same(entry, queries, asked, tmp_path, 200 << 20, units=cut(size))


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("dim", [8, 72, 320])
def test_odd_widths(dtype: torch.dtype, dim: int, tmp_path: Path) -> None:
    entry = stored(tmp_path / "entry", dtype, dim, count=2500)
    same(entry, queries_of(5, dim, dtype), asked_of(5, 7, 2500, excluded=False), tmp_path, units=cut(2500, 2500))


def test_more_than_there_are(tmp_path: Path) -> None:
    entry = stored(tmp_path / "entry", torch.float16, count=60)
    counts = same(entry, queries_of(4, 128, torch.float16), asked_of(4, 100, 60), tmp_path, units=cut(25, 60))
    assert counts["brute_pieces"] > 0


def test_interrupted_and_resumed(entry: Entry, tmp_path: Path) -> None:
    queries, asked, divided = queries_of(24, entry.dim, entry.dtype), asked_of(24, 10), cut(900)
    for _ in range(2):
        with Records(tmp_path / "records", {}) as records:
            same_records(entry, queries, asked, tmp_path, divided, records)
        for start in (900, 4500):
            (tmp_path / "records" / f"{start}-{start + 900}.h5").unlink()


def same_records(entry: Entry, queries: Packed, asked: Asked, folder: Path, divided: Any, records: Records) -> None:
    found, _ = run_of(NAME, entry, queries, asked, folder / "run", units=divided, records=records)
    assert found == run_of(FULL[entry.dtype], entry, queries, asked, folder / "brute")[0]


def test_some_documents_of_an_entry(entry: Entry, tmp_path: Path) -> None:
    chosen = Selection(entry, np.arange(3, COUNT, 2, dtype=np.int64))
    queries = queries_of(9, entry.dim, entry.dtype)
    same(chosen, queries, asked_of(9, 10, chosen.documents), tmp_path, units=cut(700, chosen.documents))


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_scores_that_are_no_numbers_are_named(value: float, tmp_path: Path) -> None:
    entry = stored(tmp_path / "entry", torch.float32, count=2500, odd=torch.full((2, 128), value))
    queries = pack([torch.full((3, 128), 1e35)] * 2)
    with pytest.raises(DataError, match=f"path {NAME}: infinite score for query 'q0' and document 'd1500'"):
        run_of(NAME, entry, queries, asked_of(2, 5, 2500, excluded=False), tmp_path / "run", units=cut(900, 2500))


def test_a_budget_that_is_too_small(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"path {NAME}: memory_budget: got 1000000 bytes, need at least"):
        same(entry, queries_of(3, entry.dim, entry.dtype), asked_of(3, 5), tmp_path, 1_000_000)


def test_memory_stays_within_the_budget(entry: Entry, tmp_path: Path) -> None:
    queries, asked = queries_of(24, entry.dim, entry.dtype), asked_of(24, 10)
    same(entry, queries, asked, tmp_path, 200 << 20)  # what libraries hold for good is held now
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_of(NAME, entry, queries, asked, tmp_path / "run", 200 << 20)
    assert torch.cuda.max_memory_allocated() - before <= 200 << 20


class Topics:
    """A text is a number: of a document, or of a query from 90,000 on."""

    name, revision, dim = "topics", "1", 128

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {"dtype": str(self.dtype)}

    def prepare(self, documents: Any) -> None: ...

    def encode(self, items: Any, role: Role) -> Packed:
        numbers = [int(text) for text in items]
        if role == "query":
            return pack([tokens(n * 31 % 600, 90_000 + n, 1 + n % 30, 128, self.dtype) for n in numbers], dim=128)
        return pack([document(n, 128, self.dtype) for n in numbers], dim=128)


@pytest.mark.parametrize("budget", [None, 300 << 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_evaluation(dtype: torch.dtype, budget: int | None, tmp_path: Path) -> None:
    """As a user asks for it: run files byte for byte, and a report that says so."""
    qrels = {f"q{n}": {f"d{n * 3}": 1} for n in range(30)}
    task = small_task([str(n) for n in range(30)], [str(n) for n in range(COUNT)], qrels=qrels)
    common: dict[str, Any] = {
        "cache_dir": tmp_path / "cache",
        "device": DEVICE,
        "quiet": True,
        "k": 20,
        "memory_budget": budget,
    }
    evaluate(task, Topics(dtype), ["fp32"], out_dir=tmp_path / "first", **common)
    (folder,) = (path for path in (tmp_path / "cache").rglob("topics-documents-*") if path.is_dir())
    convert_entry(open_entry(folder), "int8-document", quiet=True)
    full = FULL[dtype]
    evaluate(task, Topics(dtype), ["fp32", full, NAME], out_dir=tmp_path / "out", **common)
    assert len({(tmp_path / "out" / "runs" / f"{name}.trec").read_bytes() for name in (full, NAME)}) == 1
    search = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))["paths"][NAME]["search"]
    assert search["certifies"] == [full]
    assert search["identical_to"] == {full: True}
    assert 20 <= search["survivors"] < COUNT / 4


def test_scifacts_run_files(scifact_data: Path, tmp_path: Path) -> None:
    """Real queries and documents by `lexical`, whose embeddings are FP32."""
    task = load_task("beir", "scifact", data_dir=scifact_data)
    common: dict[str, Any] = {"cache_dir": tmp_path / "cache", "device": DEVICE, "quiet": True}
    full = FULL[torch.float32]
    evaluate(task, "lexical", [full], out_dir=tmp_path / "first", **common)
    (folder,) = (path for path in (tmp_path / "cache").rglob("lexical-documents-*") if path.is_dir())
    convert_entry(open_entry(folder), "int8-document", quiet=True)
    for k in (10, 100):
        found = evaluate(task, "lexical", [full, NAME], k=k, out_dir=tmp_path / f"out{k}", **common)
        runs = {(tmp_path / f"out{k}" / "runs" / f"{name}.trec").read_bytes() for name in (full, NAME)}
        assert len(runs) == 1
        assert found.paths[NAME].search["identical_to"] == {full: True}


def test_scifacts_run_files_by_two_gpus(scifact_data: Path, tmp_path: Path) -> None:
    """Each GPU searches its share with a threshold of its own; together they give the run files of one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    task, full = load_task("beir", "scifact", data_dir=scifact_data), FULL[torch.float32]
    folders = {"cache_dir": tmp_path / "cache", "out_dir": tmp_path / "one"}
    evaluate(task, "lexical", [full], device=DEVICE, quiet=True, **folders)
    (folder,) = (path for path in (tmp_path / "cache").rglob("lexical-documents-*") if path.is_dir())
    convert_entry(open_entry(folder), "int8-document", quiet=True)
    words = ["beir", "scifact", "--data-dir", scifact_data, "--cache-dir", tmp_path / "cache", "--encoder", "lexical"]
    asked = [*words, "--device", DEVICE, "--paths", f"{full},{NAME}", "--quiet", "--out", tmp_path / "two"]
    torchrun(tmp_path, *map(str, asked), seconds=280)  # others may have both GPUs busy
    found = json.loads((tmp_path / "two" / "result.json").read_text(encoding="utf-8"))
    assert found["environment"]["processes"] == 2
    assert found["paths"][NAME]["search"]["identical_to"] == {full: True}
    runs = [tmp_path / "one" / "runs" / f"{full}.trec", *(tmp_path / "two" / "runs" / f"{name}.trec" for name in (full, NAME))]
    assert len({run.read_bytes() for run in runs}) == 1


def test_its_plan(tmp_path: Path) -> None:
    sizes = Sizes(500, 500_000, 16_000, 60_000_000, 128, "float16")
    rates, _ = measure(sizes, ["fp16", NAME], entry=None, folder=tmp_path, device=DEVICE)
    made = make_plan(sizes, rates, read_room(tmp_path, tmp_path, DEVICE), ["fp16", NAME])
    assert made.total is not None
    seconds = {phase.name: phase.seconds for phase in made.phases if phase.stages}
    assert set(seconds) >= {"fp16", NAME}
    assert seconds[NAME] is not None
