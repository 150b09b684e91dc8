"""`BitTokens` and `ResidualTokens` on a GPU against a float64 decode of their own (`coded_cases.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import coded_cases as cases
from inputs import on_gpu as make
from maxsim_eval.codecs.codec import Fitted
from maxsim_eval.codecs.names import codec_of
from maxsim_eval.scoring.compressed import codec_path, fitted_path
from maxsim_kernels import BitTokens, Packed, ResidualTokens, api, explain, maxsim, maxsim_pairs
from maxsim_kernels.gpu import launch

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
KINDS = ["bits", "unit", "free"]
BITS = [1, 2, 4]
LENGTHS = (3, 0, 31, 1, 7, 100, 0, 1000, 63, 64, 65, 128, 129, 0)


def coded(kind, bits, dim=128, lengths=LENGTHS, **options):
    return cases.coded(kind, bits, dim, lengths, device="cuda", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
@pytest.mark.parametrize("Nq", [1, 3, 70])
def test_forms(kind, bits, dtype, Nq):
    """A few rows, 64 to 128, and many; float queries, and quantised ones where they can be."""
    documents, queries = coded(kind, bits), make.gauss(Nq, 31, 128, dtype=dtype)
    for quantize_queries in (True, False) if kind == "bits" else (False,):
        cases.agree(queries, documents, quantize_queries=quantize_queries)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("Nq", "Lq"), [(1, 32), (3, 31), (70, 17), (2, 1000)])
@pytest.mark.parametrize("dim", [96, 128, 384])
def test_whole_numbers_have_the_bits_of_int8(bits, Nq, Lq, dim):
    documents, queries = coded("bits", bits, dim), make.gauss(Nq, Lq, dim)
    assert make.same_bits(maxsim(queries, documents), maxsim(queries, documents.as_int8()))
    here, there = queries[:1].expand(len(documents), Lq, dim), documents
    assert make.same_bits(maxsim_pairs(here, there), maxsim_pairs(here, there.as_int8()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 7, 31, 63, 96, 100, 129, 200, 384, 768, 1000])
def test_widths(kind, dim):
    documents = coded(kind, 2, dim)
    for shape in ((31, dim), (9, 31, dim)):
        cases.agree(make.gauss(*shape), documents)
        cases.agree(make.gauss(*shape), documents, quantize_queries=False)
    cases.agree(make.gauss(2, 7, dim, dtype=SINGLE), documents, quantize_queries=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("Nq", "Lq"), [(1, 1), (1, 1000), (31, 17), (100, 31), (7, 63), (0, 7), (7, 0)])
def test_sizes(kind, Nq, Lq):
    documents = coded(kind, 4)
    cases.agree(make.gauss(Nq, Lq, 128), documents)
    cases.agree(make.gauss(Nq, Lq, 128), coded(kind, 4, lengths=()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_masked_and_packed_queries(kind, dtype):
    documents = coded(kind, 2)
    asked = make.masks("both", "query", 7, 31)
    cases.agree(
        make.dirty(make.gauss(7, 31, 128, dtype=dtype), asked["query_mask"], asked["query_lengths"]), documents, **asked
    )
    rows = make.packed([4, 0, 31, 1, 100, 0], 128, dtype=dtype)
    cases.agree(rows, documents)
    cases.agree(rows, documents, quantize_queries=False)
    cases.agree(make.scattered(rows), documents)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs(kind):
    documents = coded(kind, 4)
    asked = make.masks("both", "query", len(documents), 40)
    queries = make.gauss(len(documents), 40, 128)
    cases.agree(queries, documents, pairs=True)
    cases.agree(make.dirty(queries, asked["query_mask"], asked["query_lengths"]), documents, pairs=True, **asked)
    rows = make.packed([4, 0, 31, 1, 100, 0, 7, 32, 33, 2, 1, 64, 200, 5], 128)
    for quantize_queries in (True, False):
        cases.agree(rows, documents, pairs=True, quantize_queries=quantize_queries)
    cases.agree(make.scattered(rows), documents, pairs=True)


@pytest.mark.parametrize("kind", KINDS)
def test_views_and_cuts_change_no_bit(kind):
    documents = coded(kind, 2)
    for queries in (make.gauss(31, 128), make.gauss(70, 31, 128)):
        whole = maxsim(queries, documents)
        chosen = torch.tensor([7, 3, 3, 0, 13, 8], device="cuda")
        assert make.same_bits(maxsim(queries, documents.select(chosen)), whole[..., chosen])
        for part in (range(8), range(8, 14)):
            assert make.same_bits(maxsim(queries, documents.select(list(part))), whole[..., part.start : part.stop])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["transposed", "every second element", "wider rows", "odd rows", "unaligned"])
def test_strides(kind, how):
    documents, queries = coded(kind, 2), make.gauss(7, 31, 128)
    codes = documents.codes.with_values(strided(documents.codes.values, how))
    other = replace(documents, codes=codes)
    if isinstance(other, ResidualTokens):
        other = replace(other, ids=strided(other.ids.to(torch.int32)[:, None], "wider rows")[:, 0])
    else:
        other = replace(other, scales=strided(other.scales[:, None], "wider rows")[:, 0])
    cases.agree(queries, other)
    cases.agree(make.strided(queries, how), documents)


def strided(values, how):
    if how == "unaligned":
        room = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)
        return room[1:].view(values.shape).copy_(values)
    beside = torch.full_like(values, 127)
    if how == "transposed":
        return values.t().contiguous().t()
    if how == "every second element":
        return torch.stack([values, beside], -1)[..., 0]
    return torch.cat([values, beside if how == "wider rows" else beside[:, :1]], 1)[:, : values.shape[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_never_hidden(kind):
    documents = coded(kind, 2, centroids=4000)
    token = int(documents.codes.starts[7]) + 500
    if isinstance(documents, BitTokens):
        documents.scales[token] = torch.nan
    else:
        documents.centroids[int(documents.ids.long()[token]), 5] = torch.nan
    need = documents.dequantize().values.isnan().any(1)
    hit = [n for n in range(len(documents)) if bool(need[documents.codes.starts[n] :][: documents.codes.lengths[n]].any())]
    for Nq in (1, 70):
        scores = maxsim(make.gauss(Nq, 31, 128), documents)
        assert scores.isnan().all(0).nonzero().flatten().tolist() == hit
        assert scores.isnan().any(0).nonzero().flatten().tolist() == hit
    queries = make.gauss(7, 31, 128)
    queries[4, 30, 0] = torch.nan
    cases.agree(queries, coded(kind, 2))


def test_ids_that_name_no_centroid():
    """On a GPU values are not looked at: such a token scores NaN, and nothing outside is read."""
    documents = coded("unit", 2)
    for bad in (9, -1, 2**31 - 1):
        ids = documents.ids.to(torch.int64)
        ids[int(documents.codes.starts[5]) + 50] = bad
        scores = maxsim(make.gauss(7, 31, 128), replace(documents, ids=ids))
        assert scores.isnan().any(0).nonzero().flatten().tolist() == [5]


def test_offsets_that_break_their_promise():
    documents, queries = coded("bits", 2), make.gauss(3, 31, 128)
    starts = torch.tensor([0, -5, 1500, 10**6], device="cuda")
    lengths = torch.tensor([3, 5, 1000, 4], device="cuda")
    scores = maxsim(queries, replace(documents, codes=Packed.view(documents.codes.values, starts, lengths)))
    assert not bool(scores.isnan().any())
    assert bool((scores[:, 3] == -torch.inf).all())


@pytest.mark.parametrize("kind", KINDS)
def test_many_documents_and_long_ones(kind):
    """Several launches of row maxima, and programs that walk over many documents."""
    lengths = [n % 40 for n in range(3000)]
    documents, queries = coded(kind, 2, lengths=lengths), make.gauss(300, 31, 128)
    scores = maxsim(queries, documents)
    chosen = torch.arange(0, 3000, 97, device="cuda")
    cases.agree(queries[:5], documents.select(chosen))
    assert make.same_bits(maxsim(queries, documents.select(chosen)), scores[:, chosen])
    cases.agree(make.gauss(3, 31, 128), coded(kind, 1, lengths=[20000, 0, 15000]))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_replayed(kind):
    documents, queries = coded(kind, 2), make.gauss(7, 31, 128)
    launch._plans.clear()
    first = maxsim(queries, documents)
    assert len(launch._plans) == (launch.VERSION in launch.TRIED)
    assert make.same_bits(first, maxsim(queries.clone(), documents))
    cases.agree(make.gauss(7, 31, 128, seed=5), documents)
    assert len(launch._plans) <= 1
    rows = make.packed([4, 0, 31, 1], 128)
    for pairs, asked in ((False, rows), (True, make.gauss(len(documents), 31, 128))):
        for _ in range(2):
            cases.agree(asked, documents, pairs=pairs)
    assert len(launch._plans) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decoded_into_memory(kind):
    """In FP16 these documents would take 256 MB; row maxima take 40."""
    documents = coded(kind, 2, lengths=[128] * 8192)
    queries = make.gauss(32, 32, 128)
    maxsim(queries, documents)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    maxsim(queries, documents)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_decodes_block_by_block(kind, monkeypatch):
    monkeypatch.setattr(api, "CODED_TOKENS", 200)
    queries = make.gauss(7, 31, 128)
    for documents in (coded(kind, 2), coded(kind, 2).select([7, 3, 3, 0, 13, 8])):
        cases.agree(queries, documents, impl="reference")


def test_explained():
    said = explain(make.gauss(7, 31, 128), coded("unit", 2))
    assert said.startswith("triton: coded once kernel, tiles of 64 query rows x 64 document tokens")
    assert "centroids and 2-bit residuals rounded to float16 queries' dtype" in said


def test_refused():
    documents, queries = coded("unit", 2), make.gauss(7, 31, 128)
    with pytest.raises(ValueError, match="return_argmax"):
        maxsim(queries, documents, return_argmax=True)
    with pytest.raises(ValueError, match="requires_grad"):
        maxsim(queries.requires_grad_(), documents)
    with pytest.raises(ValueError, match="documents: got on cuda"):
        maxsim(make.gauss(7, 31, 128).cpu(), documents)


@pytest.mark.parametrize("name", ["sign", "int2", "int4", "sign(queries=int8)", "int4(queries=int8)", "rotate+int2", "control"])
def test_codecs_score_what_they_store(name):
    """On a GPU a codec's tokens are not decoded; scores are those of the decoded ones, FP32 products."""
    tokens = make.packed(list(LENGTHS), 128, dtype=SINGLE)
    codec = codec_of(name)
    path = fitted_path(codec_path(name), codec.fit(lambda _: tokens.to("cpu"), 128, len(tokens.values)))
    here = path.documents(tokens, None, 0)
    if name == "control":  # its decoder is not the operator's
        assert isinstance(here, Packed)
        return
    assert isinstance(here, BitTokens)
    queries = path.queries(make.packed([4, 0, 31, 7], 128, dtype=SINGLE))
    need = maxsim(queries, here.as_int8() if "int8" in name else here.dequantize())
    torch.testing.assert_close(path.score(queries, here), need, rtol=2e-5, atol=2e-5)


def test_residual_codecs_score_what_they_store():
    pytest.importorskip("faiss")
    tokens = make.packed([40] * 200, 128, dtype=SINGLE)
    unit = tokens.with_values(torch.nn.functional.normalize(tokens.values, dim=1))
    for held in (tokens, unit):
        for bits in BITS:
            codec = codec_of(f"residual-{bits}(centroids=64)")
            fitted = Fitted(codec, codec.fit(lambda _, held=held: held.to("cpu"), 128, len(held.values)))
            documents = fitted.documents(held)
            assert isinstance(documents, ResidualTokens)
            assert documents.unit == (held is unit)
            queries = make.packed([4, 0, 31, 7], 128, dtype=SINGLE)
            need = maxsim(queries, documents.dequantize())
            torch.testing.assert_close(maxsim(queries, documents), need, rtol=2e-5, atol=2e-5)
