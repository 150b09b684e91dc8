"""Large calls on a GPU: more than 2^31 elements of every tensor, and peak memory beyond inputs and outputs."""

from __future__ import annotations

import gc

import pytest
import torch

import truth
from inputs import on_gpu as make
from maxsim_kernels import Int8Tokens, Packed, maxsim, maxsim_pairs, quantize_fp8, quantize_int8
from truth import agree

POISON = False  # memory is measured here
D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def room():
    """These tests need up to 40 GB; smaller GPUs skip the file."""
    if torch.cuda.mem_get_info()[1] < 70e9:
        pytest.skip("needs a GPU with 70 GB of memory")


@pytest.fixture(autouse=True)
def given_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- more than 2^31 elements -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def huge():
    """One FP16 buffer of 2^31 + 2^24 elements (4.3 GB), normal values."""
    buffer = torch.empty(2**31 + 2**24, dtype=HALF, device=make.device)
    for part in buffer.split(2**28):
        part.normal_(generator=make.random(part.storage_offset() >> 20))
    yield buffer
    del buffer


def extra_memory(call):
    """Peak bytes of a call beyond its inputs and its result, and the result."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    peak = torch.cuda.max_memory_allocated()
    kept = sum(x.untyped_storage().nbytes() for x in (result if isinstance(result, tuple) else (result,)))
    return peak - before - kept, result


@pytest.mark.parametrize("Nq", [1, 4])
def test_a_corpus_of_more_elements_than_an_int32_counts(huge, Nq):
    """No copy of it, and the last documents are the right ones."""
    count = huge.numel() // (128 * D)
    documents, queries = huge[: count * 128 * D].view(count, 128, D), make.gauss(Nq, 32, D)
    extra, scores = extra_memory(lambda: maxsim(queries, documents))
    assert extra < 64 * MIB
    tail = documents[-100:].clone()
    truth.check_scores(scores[:, -100:], truth.oracle(queries, tail))
    assert make.same_bits(maxsim(queries, tail), scores[:, -100:].contiguous())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_packed_corpus_of_more_elements_than_an_int32_counts(huge, index):
    """16.9 million tokens: offsets fit int32, offsets times d do not."""
    values = huge.view(-1, D)
    offsets = torch.arange(0, values.shape[0] + 1, 128, device=make.device)
    rows, queries = Packed(values[: int(offsets[-1])], offsets.to(index)), make.gauss(4, 32, D)
    extra, scores = extra_memory(lambda: maxsim(queries, rows))
    assert extra < 64 * MIB
    chosen = torch.arange(len(rows) - 100, len(rows), device=make.device)
    last = rows.select(chosen).compact()
    truth.check_scores(scores[:, -100:], truth.oracle(queries, last))
    view = Packed.view(values, rows.starts[-100:], rows.lengths[-100:])
    assert make.same_bits(maxsim(queries, view), scores[:, -100:].contiguous())


@pytest.mark.parametrize("granularity", ["token", "document"])
def test_codes_of_more_elements_than_an_int32_counts(huge, granularity):
    codes = huge.view(torch.int8)[: 2**31 + 2**24].view(-1, 128, D)
    shape = codes.shape[:2] if granularity == "token" else codes.shape[:1]
    scales = torch.rand(shape, generator=make.random(1), device=make.device).to(HALF)
    queries = make.gauss(4, 32, D)
    extra, scores = extra_memory(lambda: maxsim(queries, Int8Tokens(codes, scales)))
    assert extra < 64 * MIB
    last = Int8Tokens(codes[-50:].clone(), scales[-50:].clone())
    truth.check_scores(scores[:, -50:], truth.oracle(queries, last))


def test_strides_beyond_an_int32(huge):
    """Few elements that lie far apart: each axis of documents, queries and packed values in turn."""
    far = 2**30
    for shape, strides in (
        ((2, 2, D), (far, far, 1)),
        ((3, 7, D), (far, D, 1)),
        ((2, 3, D), (D, far, 1)),
        ((5, 2, 3), (64, 16, far)),
        ((2, 100, 16), (2**31, 128, 1)),
    ):
        tokens = huge.as_strided(shape, strides)
        assert sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= 2**31
        queries = make.gauss(3, 31, shape[-1])
        agree(queries, tokens)
        agree(tokens, make.gauss(40, 63, shape[-1], seed=1))
        agree(tokens, tokens, pairs=True)
        agree(queries[:1], tokens[None])
        agree(queries, tokens, return_argmax=True)
        rows = Packed(tokens[:, 0], torch.tensor([0, 1, shape[0]], device=make.device))
        agree(queries, rows)
        agree(rows, queries)


def test_per_query_documents_of_more_elements_than_an_int32_counts(huge):
    documents = huge[: 4 * 4112 * 1024 * D].view(4, -1, 1024, D)[:, :4096]
    queries = make.gauss(4, 32, D)
    scores = maxsim(queries, documents)
    truth.check_scores(scores[:, -20:], truth.oracle(queries, documents[:, -20:].clone()))
    pairs = huge[: 16512 * 1024 * D].view(-1, 1024, D)
    asked = make.gauss(1, 32, D).expand(pairs.shape[0], 32, D)
    got = maxsim_pairs(asked, pairs)
    truth.check_scores(got[-20:], truth.oracle(asked[-20:], pairs[-20:].clone(), pairs=True))


def test_expanded_documents():
    """Stride 0: 20 million documents in the space of one, more than 2^31 elements when counted."""
    document = make.gauss(1, 1, D, seed=1)
    queries = make.gauss(2, 16, D)
    scores = maxsim(queries, document.expand(20_000_000, 1, D))
    need = truth.oracle(queries, document)
    truth.check_scores(scores[:, -1:], need)
    assert torch.equal(scores, scores[:, :1].expand_as(scores))


def test_more_scores_than_an_int32_counts():
    """65537 x 32769 scores (8.6 GB): the last row and the last column are where they belong."""
    queries, documents = make.gauss(65537, 1, 16), make.gauss(32769, 1, 16, seed=1)
    scores = maxsim(queries, documents)
    truth.check_scores(scores[-3:].clone(), truth.oracle(queries[-3:], documents))
    truth.check_scores(scores[:, -3:].clone(), truth.oracle(queries, documents[-3:]))


def test_more_winners_than_an_int32_counts():
    """2^21 + 5 documents x 1024 query tokens: 8.6 GB of argmax."""
    document = make.gauss(1, 3, D, seed=1)
    count = 2**21 + 5
    scores, argmax = maxsim(make.gauss(1, 1024, D), document.expand(count, 3, D), return_argmax=True)
    assert argmax.shape == (1, count, 1024)
    assert torch.equal(argmax[0, -1], argmax[0, 0])
    for part in argmax[0].split(2**18):
        assert bool((part == argmax[0, 0]).all())
    assert bool((scores == scores[0, 0]).all())


def test_more_mask_entries_than_an_int32_counts():
    """A mask of 2^31 + 2^24 bytes over expanded documents: its last rows decide the last scores."""
    document = make.gauss(1, 1024, 16, seed=1)
    count = 2**21 + 2**14
    mask = torch.zeros(count, 1024, dtype=torch.bool, device=make.device)
    mask[:, 0] = True
    mask[-7:] = make.mask(7, 1024)
    queries = make.gauss(1, 16, 16)
    scores = maxsim(queries, document.expand(count, 1024, 16), document_mask=mask)
    truth.check_scores(scores[:, -9:], truth.oracle(queries, document.expand(9, 1024, 16), document_mask=mask[-9:]))


# --- peak memory -----------------------------------------------------------------------------------------------------------


def memory_cases():
    """Calls whose similarity tensors would take up to hundreds of gigabytes, as functions that build (function, arguments, options)."""

    def documents(*shape, dtype=HALF):
        return make.gauss(*shape, dtype=HALF, seed=1).to(dtype)

    def ragged(count, d=D, dtype=HALF):
        return make.packed(make.sizes(count, 240, low=16), d, dtype=dtype, seed=1)

    return {
        "64 ColPali queries": lambda: (maxsim, (make.gauss(64, 1024, D), documents(20000, 64, D)), {}),
        "one ColPali query": lambda: (maxsim, (make.gauss(1024, D), documents(2000, 1024, D)), {}),
        "one short query": lambda: (maxsim, (make.gauss(32, D), documents(10000, 300, D)), {}),
        "many queries": lambda: (maxsim, (make.gauss(256, 32, D), documents(8192, 128, D)), {}),
        "masked": lambda: (
            maxsim,
            (make.gauss(64, 32, D), documents(8192, 128, D)),
            make.masks("both", "document", 8192, 128) | make.masks("both", "query", 64, 32),
        ),
        "integer masks": lambda: (
            maxsim,
            (make.gauss(64, 32, D), documents(20000, 300, D)),
            make.masks("mask", "document", 20000, 300, mask_dtype=torch.int64),
        ),
        "packed": lambda: (maxsim, (make.gauss(64, 32, D), ragged(16384)), {}),
        "packed bf16, d = 96": lambda: (maxsim, (make.gauss(64, 32, 96, dtype=BFLOAT), ragged(16384, 96, BFLOAT)), {}),
        "packed fp32": lambda: (maxsim, (make.gauss(8, 32, D, dtype=SINGLE), ragged(4096, D, SINGLE)), {}),
        "fp32": lambda: (maxsim, (make.gauss(8, 32, D, dtype=SINGLE), documents(4096, 128, D, dtype=SINGLE)), {}),
        "odd width": lambda: (maxsim, (make.gauss(64, 32, 100), documents(8192, 128, 100)), {}),
        "wide": lambda: (maxsim, (make.gauss(8, 1024, 1000), documents(512, 512, 1000)), {}),
        "per query": lambda: (maxsim, (make.gauss(64, 32, D), documents(64, 128, 128, D)), {}),
        "pairs": lambda: (maxsim_pairs, (make.gauss(8192, 32, D), documents(8192, 128, D)), {}),
        "ragged pairs": lambda: (maxsim_pairs, (make.packed(make.sizes(8192, 64, seed=9), D), ragged(8192)), {}),
        "winners": lambda: (maxsim, (make.gauss(64, 32, D), documents(8192, 128, D)), {"return_argmax": True}),
        "winners, packed": lambda: (maxsim, (make.gauss(64, 32, D), ragged(8192)), {"return_argmax": True}),
        "int8": lambda: (maxsim, (make.gauss(64, 128, D), quantize_int8(documents(8192, 128, D))), {}),
        "int8 packed": lambda: (maxsim, (make.gauss(64, 32, D), quantize_int8(ragged(16384), "document")), {}),
        "int8 floats": lambda: (
            maxsim,
            (make.gauss(64, 32, D), quantize_int8(documents(8192, 128, D))),
            {"quantize_queries": False},
        ),
        "fp8": lambda: (maxsim, (make.gauss(64, 128, D), quantize_fp8(documents(8192, 128, D))), {}),
        "few long documents": lambda: (maxsim, (make.gauss(1024, D), documents(3, 500000, D)), {}),
    }


MEMORY = list(memory_cases())


@pytest.mark.parametrize("name", MEMORY)
def test_peak_memory(name):
    """No copy of the corpus and nothing that grows with the similarity tensor: below 64 MB beyond inputs and outputs."""
    function, arguments, options = memory_cases()[name]()
    extra, _ = extra_memory(lambda: function(*arguments, **options))
    assert extra < 64 * MIB, f"{extra / MIB:.1f} MiB"
    again, _ = extra_memory(lambda: function(*arguments, **options))
    assert again < 64 * MIB, f"{again / MIB:.1f} MiB on the second call"
