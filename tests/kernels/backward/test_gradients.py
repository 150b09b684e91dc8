"""Gradients: dQ[i,s] = sum_j g[i,j] D[j,t*] and dD[j,t] = sum g[i,j] Q[i,s] over the query tokens that chose t."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, maxsim_pairs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def leaf(tokens):
    """The tensor that gets the gradient."""
    return (tokens.values if isinstance(tokens, Packed) else tokens).requires_grad_()


def run(queries, documents, *, function=maxsim, make=None, **options):
    """Upstream gradient, dQ and dD of `sum(g * scores)`; g is zero nowhere, -inf scores included."""
    q, d = leaf(queries), leaf(documents)
    scores = function(queries, documents, **options)
    upstream = (make or cases.grid)(*scores.shape, seed=9) + 2
    dq, dd = torch.autograd.grad(scores, (q, d), upstream)
    assert (dq.dtype, dd.dtype) == (q.dtype, d.dtype)
    assert (dq.shape, dd.shape) == (q.shape, d.shape)
    return upstream, dq, dd


def expect_exact(queries, documents, *, function=maxsim, impl, backward="auto", **masks):
    """Grid inputs: FP32 sums are exact, so a gradient is the exact sum rounded once to the input's dtype."""
    truth = (oracle.maxsim if function is maxsim else oracle.pairs)(queries, documents, **masks)
    upstream, dq, dd = run(queries, documents, function=function, impl=impl, backward=backward, **masks)
    need_q, need_d, _, _ = oracle.gradients(queries, documents, truth, upstream)
    for name, got, need in (("dQ", dq, need_q), ("dD", dd, need_d)):
        rounded = torch.from_numpy(need).to(got.dtype)
        assert torch.equal(got, rounded), f"{name}: {int((got != rounded).sum())} of {got.numel()} entries differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 63, 2, 6), (31, 17, 3, 3), (20, 100, 2, 8), (130, 5, 2, 4), (2, 300, 3, 100)]
)
def test_dense(impl, dtype, shape):
    Lq, Ld, B, d = shape
    queries, documents = cases.grid(2, Lq, d, dtype=dtype), cases.grid(B, Ld, d, dtype=dtype, seed=1)
    expect_exact(queries, documents, impl=impl)


@pytest.mark.parametrize("backward", ["auto", "unified", "atomic", "csr"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_every_backward_agrees(backward, layout):
    if layout == "dense":
        queries, documents = cases.grid(3, 7, 6), cases.grid(4, 20, 6, seed=1)
    else:
        queries, documents = cases.packed([7, 0, 3], 6), cases.packed([20, 0, 5, 1], 6, seed=1)
    expect_exact(queries, documents, impl="auto", backward=backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "packed", "per query", "pairs"])
def test_real_values_within_the_bound(impl, dtype, layout):
    function = maxsim
    queries, documents = cases.gauss(3, 9, 48, dtype=dtype), cases.gauss(3, 33, 48, dtype=dtype, seed=1)
    if layout == "packed":
        queries = cases.packed([9, 2, 7], 48, dtype=dtype, make=cases.gauss)
        documents = cases.packed([33, 1, 0, 20], 48, dtype=dtype, seed=1, make=cases.gauss)
    elif layout == "per query":
        documents = cases.gauss(3, 4, 33, 48, dtype=dtype, seed=1)
    elif layout == "pairs":
        function = maxsim_pairs
    truth = (oracle.maxsim if function is maxsim else oracle.pairs)(queries, documents)
    upstream, dq, dd = run(queries, documents, function=function, make=cases.gauss, impl=impl)
    need_q, need_d, size_q, size_d = oracle.gradients(queries, documents, truth, upstream)
    for got, need, size in ((dq, need_q, size_q), (dd, need_d, size_d)):
        allowed = tol.GRADIENT * size + tol.GRADIENT_ROUNDING[dtype] * np.abs(need) + tol.GRADIENT_FLOOR[dtype]
        assert np.all(np.abs(oracle.numbers(got) - need) <= allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_rows_get_exactly_zero(impl, dtype):
    masks = {"query_mask": cases.mask(4, 9), "document_mask": cases.mask(5, 20, seed=1)}
    masks |= {"query_lengths": cases.lengths(4, high=9), "document_lengths": cases.lengths(5, high=20)}
    q_valid = cases.valid(9, masks["query_mask"], masks["query_lengths"])
    d_valid = cases.valid(20, masks["document_mask"], masks["document_lengths"])
    queries = cases.dirty(cases.grid(4, 9, 4, dtype=dtype), q_valid)
    documents = cases.dirty(cases.grid(5, 20, 4, dtype=dtype), d_valid)
    expect_exact(queries, documents, impl=impl, **masks)
    _, dq, dd = run(queries, documents, impl=impl, **masks)
    assert dq[~q_valid].eq(0).all()
    assert dd[~d_valid].eq(0).all()


def test_empty_documents_get_exactly_zero(impl):
    queries, documents = cases.grid(2, 3, 4), cases.grid(3, 5, 4, seed=1)
    lengths = torch.tensor([5, 0, 2])
    expect_exact(queries, documents, impl=impl, document_lengths=lengths)
    _, dq, dd = run(queries, documents, impl=impl, document_lengths=lengths)
    assert dd[1].eq(0).all(), "row 0 of an empty document"
    assert dq.isfinite().all()


def test_all_documents_empty(impl):
    _, dq, dd = run(cases.grid(2, 3, 4), cases.grid(3, 5, 4), impl=impl, document_lengths=torch.zeros(3, dtype=torch.int64))
    assert dq.eq(0).all()
    assert dd.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sides", ["documents", "queries", "both"])
def test_packed(impl, dtype, sides):
    queries = cases.packed([4, 0, 20], 4, dtype=dtype) if sides != "documents" else cases.grid(3, 7, 4, dtype=dtype)
    documents = (
        cases.packed([3, 0, 31, 1], 4, dtype=dtype, seed=1) if sides != "queries" else cases.grid(4, 9, 4, dtype=dtype, seed=1)
    )
    expect_exact(queries, documents, impl=impl)


def test_one_query(impl):
    expect_exact(cases.grid(7, 4), cases.grid(3, 9, 4, seed=1), impl=impl)
    expect_exact(cases.grid(7, 4), cases.packed([3, 0, 9], 4, seed=1), impl=impl)


def test_overlapping_views_add_up(impl):
    values = cases.grid(30, 4, seed=1)
    documents = Packed.view(values, torch.tensor([10, 0, 5, 5, 29]), torch.tensor([10, 12, 7, 0, 1]))
    expect_exact(cases.grid(2, 5, 4), documents, impl=impl)
    _, _, dd = run(cases.grid(2, 5, 4), documents, impl=impl)
    assert dd[20:29].eq(0).all(), "tokens of no document"


def test_view_between_poisoned_tokens(impl):
    documents = cases.scattered(cases.packed([3, 0, 9, 1], 4, seed=1))
    expect_exact(cases.grid(2, 5, 4), documents, impl=impl)


@pytest.mark.parametrize("dtype", DTYPES)
def test_per_query_documents(impl, dtype):
    masks = {"query_lengths": torch.tensor([5, 0, 3]), "document_mask": cases.mask(3, 4, 9)}
    queries = cases.grid(3, 5, 4, dtype=dtype)
    documents = cases.dirty(cases.grid(3, 4, 9, 4, dtype=dtype, seed=1), masks["document_mask"])
    expect_exact(queries, documents, impl=impl, **masks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [True, False])
def test_pairs(impl, dtype, ragged):
    queries, documents = (
        cases.packed([4, 0, 20, 2], 4, dtype=dtype),
        cases.packed([7, 5, 33, 0], 4, dtype=dtype, seed=1),
    )
    lengths = {}
    if not ragged:
        queries, lengths["query_lengths"] = cases.padded(queries)
        documents, lengths["document_lengths"] = cases.padded(documents)
    expect_exact(queries, documents, function=maxsim_pairs, impl=impl, **lengths)


@pytest.mark.parametrize("which", ["queries", "documents"])
def test_only_one_side_needs_it(impl, which):
    queries, documents = cases.grid(2, 5, 4), cases.grid(3, 9, 4, seed=1)
    chosen = leaf(queries if which == "queries" else documents)
    truth = oracle.maxsim(queries, documents)
    maxsim(queries, documents, impl=impl).sum().backward()
    need = oracle.gradients(queries, documents, truth, torch.ones(2, 3))[0 if which == "queries" else 1]
    assert torch.equal(chosen.grad, torch.from_numpy(need).float())


def test_strided_and_expanded_leaves(impl):
    base = cases.grid(9, 4, 5).requires_grad_()
    query = cases.grid(1, 4, 4, seed=1).requires_grad_()
    documents, queries = base.permute(2, 0, 1), query.expand(3, 4, 4)
    truth = oracle.maxsim(queries, documents)
    maxsim(queries, documents, impl=impl).sum().backward()
    need_q, need_d, _, _ = oracle.gradients(queries, documents, truth, torch.ones(3, 5))
    assert torch.equal(base.grad, torch.from_numpy(need_d).float().permute(1, 2, 0))
    assert torch.equal(query.grad, torch.from_numpy(need_q).float().sum(0, keepdim=True))


def test_upstream_may_be_expanded_or_strided(impl):
    queries, documents = cases.grid(2, 5, 4).requires_grad_(), cases.grid(3, 9, 4, seed=1).requires_grad_()
    truth = oracle.maxsim(queries, documents)
    for upstream in (torch.tensor(0.5).expand(2, 3), cases.grid(3, 2, seed=5).T):
        need_q, need_d, _, _ = oracle.gradients(queries, documents, truth, upstream)
        dq, dd = torch.autograd.grad(maxsim(queries, documents, impl=impl), (queries, documents), upstream)
        assert torch.equal(dq, torch.from_numpy(need_q).float())
        assert torch.equal(dd, torch.from_numpy(need_d).float())


@pytest.mark.parametrize(("Nq", "B", "Lq", "Ld"), [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_zero_sizes(impl, Nq, B, Lq, Ld):
    _, dq, dd = run(cases.grid(Nq, Lq, 8), cases.grid(B, Ld, 8, seed=1), impl=impl)
    assert dq.eq(0).all()
    assert dd.eq(0).all()


def test_with_argmax_and_a_loss(impl):
    """The contrastive loss over in-batch negatives: the same step with and without argmax."""
    queries, documents = cases.gauss(4, 5, 16).requires_grad_(), cases.gauss(4, 9, 16, seed=1).requires_grad_()
    steps = []
    for ask in (False, True):
        out = maxsim(queries, documents, return_argmax=ask, impl=impl)
        loss = torch.nn.functional.cross_entropy(out[0] if ask else out, torch.arange(4))
        steps.append(torch.autograd.grad(loss, (queries, documents)))
    for plain, asked in zip(*steps, strict=True):
        assert torch.equal(plain, asked)


@pytest.mark.filterwarnings("ignore:maxsim_kernels. autocast")
def test_autocast(impl):
    queries, documents = cases.grid(2, 5, 4), cases.grid(3, 9, 4, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect_exact(queries, documents, impl=impl)


def test_float16_sums_are_accumulated_in_float32(impl):
    """One document token chosen by 4096 query tokens of 1 + 2^-10 each: FP16 sums would stop growing at 2048."""
    queries = torch.full((4, 1024, 1), 1 + 2.0**-10, dtype=torch.float16, requires_grad=True)
    documents = torch.ones(1, 1, 1, dtype=torch.float16, requires_grad=True)
    maxsim(queries, documents, impl=impl).sum().backward()
    assert documents.grad.item() == 4100.0


def test_deterministic_mode(impl, deterministic):
    queries, documents = cases.packed([4, 0, 20], 4), cases.packed([3, 0, 31, 1], 4, seed=1)
    expect_exact(queries, documents, impl=impl)
    expect_exact(cases.grid(3, 5, 4), cases.grid(4, 9, 4, seed=1), impl=impl, backward="csr")


def test_deterministic_mode_refuses_the_atomic_path(deterministic):
    queries, documents = cases.grid(3, 5, 4).requires_grad_(), cases.grid(4, 9, 4, seed=1)
    with pytest.raises(RuntimeError, match="determin"):
        maxsim(queries, documents, backward="atomic").sum().backward()


def test_no_gradient_means_no_graph(impl):
    queries, documents = cases.grid(2, 5, 4).requires_grad_(), cases.grid(3, 9, 4, seed=1)
    with torch.no_grad():
        assert not maxsim(queries, documents, impl=impl).requires_grad
    with torch.inference_mode():
        assert maxsim(queries, documents, impl=impl).shape == (2, 3)
    assert not maxsim(queries.detach(), documents, impl=impl).requires_grad
