"""`exact_topk` on a GPU gives the bits of `stream_topk` there, wherever codes and documents lie; what it trusts the GPU with is looked at."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import search_cases
from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, pack, quantize_int8, stream_topk
from maxsim_kernels.search import Residuals, exact_topk, residuals_of, trust
from search_cases import KINDS, Awkward, Held

pytest.importorskip("triton", reason="Triton is not installed")
from maxsim_kernels.gpu.search import survivors
from maxsim_kernels.search import ahead, device, exact, scanning
from maxsim_kernels.search import fetching as fetching_module

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)
AWKWARD = Awkward(documents=60, tokens=9, kinds=9, tie=2.0**-9, least_power=-6, most_power=3, tiny=1e-7)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Every test begins as a process does."""
    ahead.pruned_before.clear()


def coded(documents: Packed, kind: str):
    if kind.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    return search_cases.coded(documents, kind)


def clustered(count: int, d: int, seed: int, dtype: torch.dtype = torch.float16, longest: int = 40, least: int = 0) -> Packed:
    """Documents whose tokens lie around a few topics; empty ones and duplicates among them."""
    draw = np.random.default_rng(seed)
    topics = draw.normal(size=(max(2, count // 8), d))
    parts = []
    for number in range(count):
        part = topics[draw.integers(len(topics))] + 0.5 * draw.normal(size=(draw.integers(least, longest), d))
        parts.append(part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-9))
        if number % 50 == 49:
            parts[-1] = parts[number // 2]
    return pack([torch.from_numpy(part).to(dtype) for part in parts]).to("cuda")


def about(documents: Packed, count: int, length: int, seed: int) -> torch.Tensor:
    """Queries `[count, length, d]` of documents' tokens and noise."""
    draw = make.random(seed)
    rows = torch.randint(0, documents.values.shape[0], (count, 1), generator=draw, device="cuda")
    rows = (rows + torch.arange(length, device="cuda")).clamp(max=documents.values.shape[0] - 1)
    tokens = documents.values[rows].float()
    noise = torch.randn(tokens.shape, generator=draw, device="cuda") / tokens.shape[-1] ** 0.5
    return (tokens + 0.3 * noise).to(documents.dtype)


def on_host(documents: Packed, pinned: bool = False) -> Packed:
    values = documents.values.cpu()
    return Packed(values.pin_memory() if pinned else values, documents.offsets.cpu())


def codes_on_host(codes):
    held = Packed(codes.codes.values.cpu(), codes.codes.offsets.cpu())
    offset = {} if codes.offset is None else {"offset": codes.offset.cpu()}  # FP8 codes have none, nor the argument
    return type(codes)(held, codes.scales.cpu(), granularity=codes.granularity, **offset)


def same(queries, documents, k, codes, whole=None, **options):
    """Compare with brute force on the GPU, bit for bit; returns the stats. `whole`: the documents where `documents` are `Rows`."""
    asked = {name: options[name] for name in ("query_mask", "query_lengths") if name in options}
    expected = stream_topk(queries, [documents if whole is None else whole], k, **asked)
    scores, indices, stats = exact_topk(queries, documents, k, codes=codes, **options)
    assert make.same_bits(scores, expected[0])
    assert torch.equal(indices, expected[1])
    assert stats.certificate.holds
    return stats


@pytest.mark.parametrize(
    ("dtype", "d"),
    [
        (torch.float16, 128),
        (torch.bfloat16, 128),
        (torch.float16, 64),
        (torch.float16, 200),
        (torch.float16, 256),
        (torch.float16, 768),
    ],
)
def test_this_gpu_is_trusted(dtype, d):
    """What the search needs of the hardware: without it every search is brute force, and no other test here says much."""
    for count, size, packed in ((1, 32, False), (40, 32, False), (40, 20, False), (1, 1024, False), (40, 30, True)):
        found = trust.looked_at(trust.form_of(torch.device("cuda", 0), dtype, count, size, d, packed), device.score_alone)
        assert found.bounded == ""
        if count * size > 64:  # of fewer rows the kernel is another one, which may multiply by other instructions
            assert found.pairs == (d <= 256), (count, size, packed)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_codes(kind, dtype):
    documents = clustered(1500, 128, 3, dtype)
    codes = coded(documents, kind)
    residuals = residuals_of(documents, codes)
    for count, length in ((1, 32), (3, 20), (40, 32)):
        queries = about(documents, count, length, 4)
        for quantised in (True, False):
            stats = same(queries, documents, 5, codes, residuals=residuals, quantize_queries=quantised)
            assert kind.startswith("fp8") or not stats.fell_back, stats.fell_back
        same(queries, documents, 5, codes, residuals=residuals, most_rescored=1.0)
        host = on_host(documents)
        same(queries, host, 5, codes, residuals=residuals)
        same(queries, host, 5, codes_on_host(codes))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [100, 129, 257, 1000])
def test_rows_that_are_not_aligned(d, dtype):
    """Kernels that read numbers one by one spill registers, and a compiler was seen to lose something there (`unaligned.py`)."""
    documents = clustered(600, d, 3, dtype)
    codes = coded(documents, "int8 document")
    residuals = residuals_of(documents, codes)
    for count, length in ((1, 32), (40, 20), (3, 300), (1, 1024)):
        queries = about(documents, count, length, 4)
        for quantised in (True, False):
            same(queries, documents, 5, codes, residuals=residuals, quantize_queries=quantised, most_rescored=1.0)


def test_residuals_are_those_of_the_cpu():
    documents = clustered(300, 64, 5)
    for kind in KINDS[:6]:
        codes = coded(documents, kind)
        there = residuals_of(documents, codes)
        here = residuals_of(on_host(documents), codes_on_host(codes))
        torch.testing.assert_close(there.errors.cpu(), here.errors, rtol=1e-6, atol=0)
        torch.testing.assert_close(there.norms.cpu(), here.norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("longest", "length"), [(40, 32), (200, 150)])  # documents and queries of one tile, and of several
def test_documents_on_the_host(dtype, pinned, longest, length, monkeypatch):
    documents = clustered(2500, 128, 6, dtype, longest)
    codes = quantize_int8(documents, "document")
    residuals = residuals_of(documents, codes)
    host, queries = on_host(documents, pinned), about(documents, 40, length, 7)
    calls = []
    monkeypatch.setattr(device, "score_marked", lambda *given: (calls.append(1), survivors.score_marked(*given)))

    def searched(held, codes, whole=None):
        """A search of documents that are fetched: marked pairs alone are scored of them, where the kernel takes the dtype."""
        calls.clear()
        stats = same(queries, held, 10, codes, whole=whole, residuals=residuals)
        assert not stats.fell_back
        assert bool(calls) == (dtype in HALVES)
        return stats

    expected = searched(host, codes)
    monkeypatch.setattr(fetching_module, "_ROOM", 1 << 16)
    assert torch.equal(searched(host, codes).survivors, expected.survivors)
    rows = Held(on_host(documents))
    assert torch.equal(searched(rows, codes, whole=host).survivors, expected.survivors)
    assert rows.reads.max() <= 2
    searched(rows, codes_on_host(codes), whole=host)


def test_blocks_and_pieces(monkeypatch):
    documents = clustered(3000, 64, 8)
    queries = about(documents, 20, 16, 9)
    expected = stream_topk(queries, [documents], 20)
    cuts = [0, 700, 701, 701, 2000, 3000]
    blocks = [documents.select(range(first, stop)).compact() for first, stop in itertools.pairwise(cuts)]
    codes = [quantize_int8(block, "document") for block in blocks]
    for least in (4096, 64):
        monkeypatch.setattr(device, "_LEAST_DOCUMENTS", least)
        monkeypatch.setattr(device, "_CELLS", 1024 if least == 64 else 1 << 27)
        scores, indices, stats = exact_topk(queries, iter(blocks), 20, codes=iter(codes))
        assert make.same_bits(scores, expected[0])
        assert torch.equal(indices, expected[1])
        assert stats.certificate.holds
        assert stats.scanned <= 3000


@pytest.mark.parametrize("first", ["scan", "sample", "brute force"])
def test_masks_lengths_packed_and_one_query(first, monkeypatch):
    monkeypatch.setattr(device, "_SAMPLED", 1 << 30 if first == "scan" else 256)
    monkeypatch.setattr(device, "_LITTLE", 0 if first == "sample" else 1 << 41)
    documents = clustered(1200, 128, 10)
    codes = quantize_int8(documents, "document")
    residuals = residuals_of(documents, codes)
    dense = about(documents, 9, 40, 11)
    lengths, mask = make.lengths(9, high=40), make.mask(9, 40)
    for options in ({}, {"query_lengths": lengths}, {"query_mask": mask}, {"query_lengths": lengths, "query_mask": mask}):
        same(dense, documents, 7, codes, residuals=residuals, **options)
    same(dense[0], documents, 7, codes, residuals=residuals)
    packed = make.packed([3, 0, 300, 64, 1, 17, 40], 128, make=make.unit)
    same(packed, documents, 7, codes, residuals=residuals, most_rescored=1.0)
    same(make.scattered(packed), documents, 7, codes, residuals=residuals, most_rescored=1.0)
    same(about(documents, 2, 1024, 12), documents, 7, codes, residuals=residuals)
    view = make.scattered(documents)
    same(dense, view, 7, codes, residuals=residuals)


def test_documents_of_one_length_take_the_dense_scan():
    tokens = clustered(64, 128, 13, longest=50, least=49)
    documents = Packed(make.unit(2048 * 32, 128), torch.arange(0, 2048 * 32 + 1, 32, device="cuda"))
    assert scanning.even(documents) == 32
    assert scanning.even(clustered(64, 128, 13)) == 0
    codes = quantize_int8(tokens, "document")
    same(about(tokens, 40, 32, 14), tokens, 3, codes, most_rescored=1.0)
    for granularity in ("token", "document"):
        codes = quantize_int8(documents, granularity)
        residuals = residuals_of(documents, codes)
        for held in (codes, codes_on_host(codes)):  # which are streamed in that form too
            same(about(documents, 40, 32, 14), documents, 3, held, residuals=residuals, most_rescored=1.0)


@pytest.mark.parametrize("part", range(8))
def test_awkward_corpora(part):
    for seed in range(part * 25, part * 25 + 25):
        draw = np.random.default_rng(seed)
        d, dtype = int(draw.choice([8, 16, 64, 128])), DTYPES[draw.integers(3) if seed % 5 == 0 else draw.integers(2)]
        documents, queries = AWKWARD.corpus(draw, d, dtype).to("cuda"), AWKWARD.corpus(draw, d, dtype).to("cuda")
        if draw.random() < 0.5 and len(documents.values):
            chosen = torch.from_numpy(draw.integers(0, len(documents.values), len(queries.values))).cuda()
            queries = queries.with_values(documents.values[chosen])
        if draw.random() < 0.5:  # the form that the dense kernels take
            queries, lengths = make.padded(queries, 16)
            options = {"query_lengths": lengths}
        else:
            options = {}
        try:
            codes = coded(documents, KINDS[draw.integers(6)])
        except ValueError:  # values that no scale of this granularity can hold
            codes = quantize_int8(documents)
        options |= {"quantize_queries": bool(draw.integers(2)), "most_rescored": float(draw.choice([0.0, 0.25, 1.0]))}
        k = int(draw.choice([1, 2, 3, 10, 70]))
        same(queries, documents, k, codes, **options)


def test_all_equal_falls_back_and_says_so(monkeypatch):
    documents = Packed(
        torch.ones(4096 * 3, 64, dtype=torch.float16, device="cuda"), torch.arange(0, 4096 * 3 + 1, 3, device="cuda")
    )
    queries = torch.ones(6, 5, 64, dtype=torch.float16, device="cuda")
    codes = quantize_int8(documents)
    for little, why in ((0, "sample of 128 documents"), (1 << 41, "last time")):
        monkeypatch.setattr(device, "_LITTLE", little)
        stats = same(queries, documents, 5, codes)
        assert why in stats.fell_back
        assert stats.survivors.tolist() == [4096] * 6
        assert stats.rescored_bytes == 4096 * 3 * 64 * 2 * 6
    same(queries, documents, 5, codes, most_rescored=1.0)
    random = Packed(make.unit(3000 * 16, 128), torch.arange(0, 3000 * 16 + 1, 16, device="cuda"))
    assert same(make.unit(40, 32, 128), random, 100, quantize_int8(random, "document")).fell_back


def test_little_work_begins_with_brute_force_and_scans_where_that_pays(monkeypatch):
    monkeypatch.setattr(device, "_SAMPLED", 1024)
    documents = clustered(3000, 128, 22)
    queries, codes = about(documents, 40, 32, 23), quantize_int8(documents, "document")
    first, second = (same(queries, documents, 10, codes) for _ in range(2))
    assert "first search of so few" in first.fell_back
    assert first.scanned == 0
    assert not second.fell_back
    assert second.scanned == 3000
    host = on_host(documents)
    assert (
        same(queries, host, 10, quantize_int8(documents, "document"), residuals=residuals_of(documents, codes)).scanned == 3000
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["queries", "documents"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_not_finite(side, value, place):
    documents = clustered(600, 64, 15, least=1)
    queries = about(documents, 6, 8, 16)
    if side == "documents":
        documents.values[documents.starts[[150, 160]], 3] = value
    else:
        queries[1, 2, 5] = value
    codes = quantize_int8(documents)
    residuals = residuals_of(documents, codes)
    held = documents if place == "device" else on_host(documents)
    answers = []
    for search in (
        lambda: stream_topk(queries, [held], 5),
        lambda: exact_topk(queries, held, 5, codes=codes, residuals=residuals),
        lambda: exact_topk(queries, held, 5, codes=codes, residuals=residuals, most_rescored=1.0),
    ):
        try:
            answers.append([one.tolist() for one in search()[:2]])
        except ValueError as error:
            answers.append([str(error)])
    assert answers[0] == answers[1] == answers[2]


def test_nothing_to_search():
    documents = clustered(50, 64, 17)
    codes = quantize_int8(documents)
    same(make.packed([0, 0], 64), documents, 3, codes)
    same(make.packed([], 64), documents, 3, codes)
    empty = make.packed([], 64)
    same(make.unit(3, 4, 64), empty, 3, quantize_int8(empty))
    hollow = make.packed([0, 0, 0], 64)
    same(make.unit(3, 4, 64), hollow, 2, quantize_int8(hollow))


def test_a_gpu_that_is_not_trusted_is_searched_by_brute_force(monkeypatch):
    documents = clustered(1000, 128, 18)
    queries, codes = about(documents, 20, 32, 19), quantize_int8(documents, "document")
    whole = trust.maxsim
    for match, broken in {
        "of what the bounds allow": lambda queries, documents: whole(queries, documents) * (1 + 2.0**-6),
        "has other bits among other documents": lambda queries, documents: (
            whole(queries, documents) * (1 + 2.0**-20 * (len(documents) < 90))
        ),
    }.items():
        monkeypatch.setattr(trust, "maxsim", broken)
        trust.looked_at.cache_clear()
        stats = same(queries, documents, 5, codes)
        assert match in stats.fell_back
        assert stats.survivors.tolist() == [1000] * 20
    monkeypatch.undo()
    trust.looked_at.cache_clear()
    monkeypatch.setattr(device, "score_alone", lambda *_: [])  # pairs alone are not trusted: unions are scored
    assert same(queries, documents, 5, codes).survivors.float().mean() < 300
    monkeypatch.undo()
    trust.looked_at.cache_clear()
    stats = same(queries, documents, 5, codes)
    assert not stats.fell_back
    assert stats.survivors.float().mean() < 300


def test_wrong_residuals_are_seen_to_matter():
    documents = clustered(1500, 128, 20)
    queries, codes = about(documents, 40, 32, 21), quantize_int8(documents, "corpus", scale=0.03)
    none = Residuals(torch.zeros(1500, device="cuda"), torch.zeros(1500, device="cuda"))
    expected = stream_topk(queries, [documents], 100)
    found = exact_topk(queries, documents, 100, codes=codes, residuals=none, most_rescored=1.0)
    assert not torch.equal(found[1], expected[1])
    same(queries, documents, 100, codes, most_rescored=1.0)


def test_reduced_float32_is_brute_force():
    documents = clustered(400, 64, 22, torch.float32)
    queries, codes = about(documents, 10, 8, 23), quantize_int8(documents)
    assert not same(queries, documents, 5, codes).fell_back
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        assert "tf32" in same(queries, documents, 5, codes).fell_back
    finally:
        setting.fp32_precision = before


def test_refusals():
    documents = clustered(40, 64, 24)
    codes, queries = quantize_int8(documents), about(documents, 2, 3, 25)
    host = on_host(documents)
    for match, call in {
        "residuals: got none with codes on cuda": lambda: exact_topk(queries, host, 1, codes=codes),
        "codes: on cuda:0, need": lambda: exact_topk(
            queries.cpu(), host, 1, codes=codes, residuals=residuals_of(documents, codes)
        ),
        "documents: got on cuda:0, need": lambda: exact_topk(queries.cpu(), documents, 1, codes=codes),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_a_search_that_comes_again_begins_with_its_scan(monkeypatch):
    begun = []

    def noted(*given):
        begun.append(ahead.scores_ahead(*given) is not None)
        return ahead.scores_ahead(*given)

    monkeypatch.setattr(exact, "scores_ahead", noted)
    documents = clustered(1200, 128, 30)
    codes = quantize_int8(documents, "document")
    residuals = residuals_of(documents, codes)
    for seed in range(3):
        same(about(documents, 9, 40, seed), documents, 7, codes, residuals=residuals)
    queries = about(documents, 9, 40, 5)
    same(queries, documents, 8, codes, residuals=residuals)
    same(queries, documents, 8, codes, residuals=residuals, query_lengths=make.lengths(9, high=40))
    assert begun == [False, True, True, False, True]
    with pytest.raises(ValueError, match="query_lengths: got"):
        exact_topk(queries, documents, 8, codes=codes, residuals=residuals, query_lengths=make.lengths(8, high=40))
    with pytest.raises(ValueError, match="residuals: got 3 documents"):
        exact_topk(queries, documents, 8, codes=codes, residuals=residuals[:3])


def test_scores_of_marked_pairs_are_those_of_all(monkeypatch):
    """The kernel of pairs has the bits of brute force's at every length around its tiles."""
    for dtype in HALVES:
        documents = make.packed([0, 1, 15, 63, 64, 65, 127, 128, 129, 200, 513], 128, dtype=dtype, make=make.gauss)
        for length in (1, 16, 17, 32, 33, 64, 128, 129, 300):
            queries = make.gauss(7, length, 128, dtype=dtype)
            together = maxsim(queries, documents)
            starts = torch.arange(7, device="cuda") * length
            lengths = torch.full((7,), length, device="cuda")
            forms = list(device.score_alone(queries.view(-1, 128), starts, lengths, documents))
            assert len(forms) == 2  # of all lengths, and of short documents, each of which is one tile
            for numbers, alone in forms:
                assert make.same_bits(alone, together[:, numbers].contiguous()), (dtype, length)
