"""`maxsim_reference`: the truth for the other paths and the `fp32` path itself, checked against the brute-force loops."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import fallback, maxsim, maxsim_reference, pack, quantize_int8
from maxsim_kernels.reference import products, true_precision
from memory_cases import beyond_inputs
from reference_cases import check_places

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed", "per query", "one query"])
def test_layouts(dtype, layout):
    queries, documents = cases.gauss(3, 9, 48, dtype=dtype), cases.gauss(4, 20, 48, dtype=dtype, seed=1)
    if layout == "packed":
        queries = cases.packed([9, 0, 7], 48, dtype=dtype, make=cases.gauss)
        documents = cases.packed([20, 0, 1], 48, dtype=dtype, seed=1, make=cases.gauss)
    elif layout == "per query":
        documents = cases.gauss(3, 4, 20, 48, dtype=dtype, seed=1)
    elif layout == "one query":
        queries = queries[0]
    truth = oracle.maxsim(queries, documents)
    scores, argmax = maxsim_reference(queries, documents, return_argmax=True)
    oracle.check(scores, truth, tol.SCORE)
    oracle.check_argmax(argmax, truth, tol.SCORE)
    oracle.check(maxsim_reference(queries, documents, dtype=torch.float64), truth, tol.REFERENCE_FLOAT64, torch.float64)


def test_masks():
    masks = {"query_mask": cases.mask(3, 9), "document_mask": cases.mask(5, 20, seed=1)}
    masks |= {"query_lengths": cases.lengths(3, high=9), "document_lengths": cases.lengths(5, high=20)}
    queries = cases.dirty(cases.grid(3, 9, 4), cases.valid(9, masks["query_mask"], masks["query_lengths"]))
    documents = cases.dirty(cases.grid(5, 20, 4), cases.valid(20, masks["document_mask"], masks["document_lengths"]))
    truth = oracle.maxsim(queries, documents, **masks)
    oracle.check(maxsim_reference(queries, documents, **masks), truth)
    oracle.check(maxsim_reference(queries, documents, **masks, dtype=torch.float64), truth, None, torch.float64)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("quantize_queries", [False, True])
def test_int8(affine, quantize_queries):
    queries, documents = cases.gauss(3, 9, 24), quantize_int8(cases.gauss(4, 20, 24, seed=1), affine=affine)
    used = quantize_int8(queries).dequantize() if quantize_queries else queries
    scores = maxsim_reference(queries, documents, quantize_queries=quantize_queries)
    oracle.check(scores, oracle.maxsim(used, documents), tol.SCORE_AFFINE)


def test_more_tokens_than_one_chunk():
    """Many documents, so that the reference works in several chunks."""
    queries, documents = cases.grid(2, 3, 4), cases.grid(1000, 5, 4, seed=1)
    oracle.check(maxsim_reference(queries, documents), oracle.maxsim(queries, documents))


def test_tf32_settings_do_not_reach_it():
    queries, documents = cases.gauss(3, 9, 48), cases.gauss(4, 20, 48, seed=1)
    plain, before = maxsim_reference(queries, documents), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert cases.same_bits(maxsim_reference(queries, documents), plain)
        assert torch.get_float32_matmul_precision() == "medium", "the caller's setting must come back"
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_share_true_precision():
    """Torch's setting is one for all of them: it comes back with the last that leaves, and in a fork without those that stayed."""
    setting = torch.backends.mkldnn.matmul
    setting.fp32_precision = "bf16"
    mine, others = true_precision(), true_precision()
    with ThreadPoolExecutor(1) as thread:
        mine.__enter__()
        thread.submit(others.__enter__).result()
        mine.__exit__(None, None, None)
        assert setting.fp32_precision == "ieee"
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                os._exit(0 if setting.fp32_precision == "bf16" else 1)
            assert os.waitpid(child, 0)[1] == 0
        setting.fp32_precision = "bf16"
        with true_precision():
            assert setting.fp32_precision == "ieee", "whatever others set meanwhile"
        thread.submit(others.__exit__, None, None, None).result()
    assert setting.fp32_precision == "bf16"


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, None])
def test_dtypes_that_scores_cannot_have(dtype):
    for documents in (cases.gauss(4, 9, 8), quantize_int8(cases.gauss(4, 9, 8))):
        with pytest.raises(ValueError, match=rf"^dtype: got {dtype}, need torch\.float16, .* or torch\.float64"):
            maxsim_reference(cases.gauss(3, 5, 8), documents, dtype=dtype)


def leaves(*shape, seed):
    return cases.gauss(*shape, seed=seed).double().requires_grad_()


def test_gradcheck_dense():
    def score(queries, documents):
        return maxsim_reference(queries, documents, dtype=torch.float64)

    inputs = (leaves(2, 3, 4, seed=0), leaves(3, 5, 4, seed=1))
    assert torch.autograd.gradcheck(score, inputs)
    assert torch.autograd.gradcheck(score, (leaves(2, 3, 4, seed=0), leaves(2, 3, 5, 4, seed=1)))


def test_gradcheck_masked():
    masks = {"query_lengths": torch.tensor([3, 1]), "document_mask": cases.mask(3, 5) | (torch.arange(5) == 0)}

    def score(queries, documents):
        return maxsim_reference(queries, documents, **masks, dtype=torch.float64)

    assert torch.autograd.gradcheck(score, (leaves(2, 3, 4, seed=0), leaves(3, 5, 4, seed=1)))


def test_gradcheck_packed():
    queries, documents = cases.packed([2, 0, 3], 4), cases.packed([5, 1, 3], 4)

    def score(q, d):
        return maxsim_reference(queries.with_values(q), documents.with_values(d), dtype=torch.float64)

    assert torch.autograd.gradcheck(score, (leaves(5, 4, seed=0), leaves(9, 4, seed=1)))


def test_impl_reference_is_the_reference():
    queries, documents = cases.gauss(3, 9, 48), cases.gauss(4, 20, 48, seed=1)
    assert cases.same_bits(maxsim(queries, documents, impl="reference"), maxsim_reference(queries, documents))


@pytest.mark.parametrize("winners", [False, True], ids=["scores", "argmax"])
def test_how_many_maxima_wait_changes_no_bit(winners, monkeypatch):
    """Sums of every product alone, of slices of one document, and products of fewer documents."""
    queries = cases.packed([9, 0, 700, 33], 48, make=cases.gauss)
    documents = cases.packed([0, 0, 0, 5000, *cases.lengths(200, high=90).tolist()], 48, seed=1, make=cases.gauss)
    whole = maxsim_reference(queries, documents, return_argmax=winners)
    for held, summed in ((1 << 20, 1), (1, 1 << 20), (200_000, 30_000)):
        monkeypatch.setattr(products, "_HELD_BYTES", {"cuda": held})
        monkeypatch.setattr(products, "_SUMMED_BYTES", {"cuda": summed})
        again = maxsim_reference(queries, documents, return_argmax=winners)
        for one, other in zip(*([each] if torch.is_tensor(each) else each for each in (again, whole)), strict=True):
            assert cases.same_bits(one, other), (held, summed)


@pytest.fixture
def few(monkeypatch):
    """What a GPU does with few query tokens, on a CPU; several products, and several sums."""

    def block(asked, documents, dtype, return_argmax, together):
        return products._few(asked, documents, dtype), torch.zeros(asked.count, 0, dtype=torch.int32)

    monkeypatch.setattr(products, "_score_block", block)
    monkeypatch.setattr(products, "_FEW_ROWS", 256)
    monkeypatch.setattr(products, "_HELD_BYTES", {"cuda": 300 * 64 * 4})


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "masks", "packed", "view", "one query"])
def test_few_query_tokens(layout, dtype):
    queries, masks = cases.packed([9, 0, 7], 48, dtype=dtype, make=cases.gauss), {}
    documents = cases.packed([20, 0, 1, 700, 0, 300, *[5] * 400, 0], 48, dtype=dtype, seed=1, make=cases.gauss)
    if layout == "view":
        documents = cases.scattered(documents)
    elif layout in ("dense", "masks"):
        documents = cases.gauss(40, 20, 48, dtype=dtype, seed=1)
    if layout == "masks":
        masks = {"document_mask": cases.mask(40, 20, seed=1), "document_lengths": cases.lengths(40, high=20)}
        documents = cases.dirty(documents, *masks.values())
        masks |= {"query_mask": cases.mask(3, 9), "query_lengths": cases.lengths(3, high=9)}
        queries = cases.dirty(cases.gauss(3, 9, 48, dtype=dtype), masks["query_mask"], masks["query_lengths"])
    elif layout == "one query":
        queries = queries[0]
    oracle.check(maxsim_reference(queries, documents, **masks), oracle.maxsim(queries, documents, **masks), tol.SCORE)


@pytest.mark.parametrize("held", [1, 300 * 64 * 4, 1 << 24])
def test_few_query_tokens_have_the_same_bits_wherever_a_document_stands(held, few, monkeypatch):
    queries = cases.packed([9, 0, 33, 4], 48, make=cases.gauss)
    documents = cases.packed([0, 3, 700, 0, 0, *cases.lengths(60, high=90).tolist()], 48, seed=1, make=cases.gauss)
    whole = maxsim_reference(queries, documents)
    monkeypatch.setattr(products, "_HELD_BYTES", {"cuda": held})
    assert cases.same_bits(maxsim_reference(queries, documents), whole)
    check_places(lambda documents: maxsim_reference(queries, documents), documents)


def test_a_product_with_very_many_query_tokens_has_fewer_documents():
    """2048 documents of a GPU's product with 7,405 queries of 32 tokens would be 1.9 GB of maxima."""
    for device in ("cpu", "cuda"):
        held, rows = products._HELD_BYTES[device], 7405 * 32
        most = max(products._SLABS, products._MAXIMA * held // (rows * 4))
        for slab in (8, 64, 128):
            _, count = products._shape(slab, products._PRODUCT_ROWS[device], 10**6, most)
            assert count % products._SLABS == 0
            assert count * rows * 4 <= 128 << 20


def out_of_memory(limit, monkeypatch, error):
    """No memory for more than so many documents at once; returns how many every successful block had."""
    plain, done = products._score_block, []

    def limited(asked, documents, *others):
        if len(documents.lengths) > limit:
            raise error
        done.append(len(documents.lengths))
        return plain(asked, documents, *others)

    monkeypatch.setattr(products, "_score_block", limited)
    monkeypatch.setattr(fallback, "_SAID", set())
    return done


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
        ),
    ],
    ids=["cuda", "cpu"],
)
@pytest.mark.parametrize("limit", [37, 3, 1])
def test_out_of_memory_takes_fewer_documents_at_once(limit, error, monkeypatch):
    """Halved until it fits, said once, and not a bit of scores and winners is another."""
    queries = cases.packed([9, 0, 33, 4], 48, make=cases.gauss)
    documents = cases.packed(cases.lengths(100, high=90), 48, seed=1, make=cases.gauss)
    scores, argmax = maxsim_reference(queries, documents, return_argmax=True)
    done = out_of_memory(limit, monkeypatch, error)
    with pytest.warns(UserWarning, match="out of memory on cpu: the reference goes on with fewer documents at once") as said:
        found, where = maxsim_reference(queries, documents, return_argmax=True)
    again = maxsim_reference(queries, documents)  # warnings are errors here: it was said once
    assert len(said) == 1
    assert max(done) <= limit
    assert cases.same_bits(found, scores)
    assert cases.same_bits(again, scores)
    assert torch.equal(where, argmax)


def test_no_memory_for_one_document_is_the_allocators_error(monkeypatch):
    out_of_memory(0, monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    queries, documents = cases.gauss(2, 3, 8), cases.gauss(5, 4, 8)
    with pytest.warns(UserWarning, match="fewer documents at once"), pytest.raises(torch.OutOfMemoryError):
        maxsim_reference(queries, documents)


def test_other_errors_are_not_taken_for_it(monkeypatch):
    done = out_of_memory(0, monkeypatch, RuntimeError("quite another thing"))
    with pytest.raises(RuntimeError, match="quite another thing"):
        maxsim_reference(cases.gauss(2, 3, 8), cases.gauss(5, 4, 8))
    assert not done


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(300, 16, 4000, 60), (7405, 32, 40, 60), (7405, 32, 256, 5)], ids=str)
def test_memory_beyond_inputs_on_a_cpu(shape):
    """Below 256 MB, scores included, in a process of its own; most of it is memory that every product uses again."""
    code = """
        import torch
        from maxsim_kernels import Packed, maxsim_reference
        def unit(count, length, seed):
            values = torch.randn(count * length, 128, generator=torch.Generator().manual_seed(seed))
            return Packed(torch.nn.functional.normalize(values, dim=1), torch.arange(count + 1) * length)
        queries, length, documents, tokens = given
        queries, documents = unit(queries, length, 0), unit(documents, tokens, 1)
        maxsim_reference(queries.select([0]), documents.select([0]))
        def call():
            maxsim_reference(queries, documents)
    """
    assert beyond_inputs(code, *shape) < 256 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_device_without_float64_gives_equal_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are taken on the host, in the same order; float64 itself is refused."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(3, 33, 24, generator=generator).to(dtype)
    documents = pack([torch.randn(length, 24, generator=generator).to(dtype) for length in (1, 70, 0, 130, 5)])
    expected = maxsim_reference(queries, documents)
    for module in ("products", "reference"):
        monkeypatch.setattr(f"maxsim_kernels.reference.{module}.has_float64", lambda device: False)
    assert torch.equal(maxsim_reference(queries, documents), expected)
    with pytest.raises(ValueError, match=r"dtype: got torch\.float64, which cpu devices do not have, need torch\.float32"):
        maxsim_reference(queries, documents, dtype=torch.float64)
