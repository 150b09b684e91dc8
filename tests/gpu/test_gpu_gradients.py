"""Gradients through `maxsim` and `maxsim_pairs` on a GPU: every layout, path, dtype and width against sums in float64."""

from __future__ import annotations

import pytest
import torch

import gradient_truth as gradients
from gradient_truth import agree as agree_gradients
from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, maxsim_pairs

D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
PATHS = ["auto", "unified", "atomic", "csr"]
LAYOUTS = ["one query", "few", "many", "long", "packed", "packed one", "packed queries", "both packed", "views"]
LAYOUTS += ["views of queries", "per query", "pairs", "ragged pairs"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, path):
    queries, documents, pairs = gradients.case(layout, make.gauss, dtype)
    agree_gradients(queries, documents, pairs=pairs, backward=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_maxima_go_to_the_first_index(layout, dtype, path):
    """Integers: ties abound, sums are exact in any order, and the gradient is the sum rounded once."""
    queries, documents, pairs = gradients.case(layout, make.grid, dtype, d=16)
    agree_gradients(queries, documents, pairs=pairs, exact=True, backward=path)


def test_the_second_copy_of_a_token_gets_nothing():
    documents = make.gauss(20, 50, D, seed=1)
    got = gradients.step(make.gauss(7, 31, D), torch.cat([documents, documents], 1), gradients.normals())
    assert got.document_grad[:, 50:].eq(0).all()
    assert got.document_grad[:, :50].ne(0).any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(6, 1024, 6, 1024), (64, 32, 64, 180), (128, 32, 128, 180)])
def test_shapes_of_the_paper(shape, path):
    """ColPali pages and ColBERT passages: tokens of norm 1, in-batch negatives."""
    Nq, Lq, B, Ld = shape
    agree_gradients(make.unit(Nq, Lq, D), make.unit(B, Ld, D, seed=1), backward=path)


@pytest.mark.parametrize("path", ["unified", "atomic", "csr"])
@pytest.mark.parametrize("d", [1, 7, 16, 20, 64, 96, 100, 130, 256, 300, 512, 768, 1000, 1024, 2048])
def test_widths(d, path):
    for dtype in (HALF, BFLOAT, SINGLE):
        agree_gradients(make.gauss(5, 31, d, dtype=dtype), make.gauss(9, 63, d, dtype=dtype, seed=1), backward=path)
    rows = make.packed([3, 0, 31, 1, 100], d, seed=1)
    agree_gradients(make.gauss(5, 31, d), rows, backward=path)
    agree_gradients(make.gauss(5, 31, d), make.gauss(5, 3, 20, d, seed=1), backward=path)
    agree_gradients(make.gauss(5, 31, d), make.gauss(5, 63, d, seed=1), pairs=True, backward=path)


@pytest.mark.parametrize("path", ["unified", "atomic", "csr"])
@pytest.mark.parametrize("Lq", [1, 7, 31, 63, 100, 1000])
def test_odd_sizes(Lq, path):
    for Ld in (1, 7, 31, 63, 100, 1000):
        for count in (1, 7, 31):
            agree_gradients(make.grid(3, Lq, 20), make.grid(count, Ld, 20, seed=1), exact=True, backward=path)
        agree_gradients(make.grid(2, Lq, 20), make.grid(2, 3, Ld, 20, seed=1), exact=True, backward=path)
        agree_gradients(make.grid(7, Lq, 20), make.grid(7, Ld, 20, seed=1), pairs=True, exact=True, backward=path)


@pytest.mark.parametrize("path", ["unified", "atomic", "csr"])
@pytest.mark.parametrize("counts", [(1, 63), (63, 1), (100, 100), (1, 1000), (1000, 7)])
def test_odd_counts(counts, path):
    Nq, B = counts
    agree_gradients(make.grid(Nq, 7, 20), make.grid(B, 31, 20, seed=1), exact=True, backward=path)
    rows = make.packed(make.sizes(B, 63, seed=B), 20, seed=1, make=make.grid)
    agree_gradients(make.grid(Nq, 7, 20), rows, exact=True, backward=path)


# --- what gets nothing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["mask", "lengths", "both"])
@pytest.mark.parametrize("layout", ["few", "long", "per query", "pairs"])
def test_masked_rows_get_exactly_zero(layout, kind, path):
    """What stands in masked places is NaN or infinite; it must not be read."""
    queries, documents, pairs = gradients.case(layout, make.grid, d=16)
    masks = make.masks(kind, "query", *queries.shape[:-1]) | make.masks(kind, "document", *documents.shape[:-1], seed=1)
    if "document_mask" in masks:
        masks["document_mask"][documents.shape[0] // 3] = False
    asked, held = (
        (masks.get("query_mask"), masks.get("query_lengths")),
        (masks.get("document_mask"), masks.get("document_lengths")),
    )
    queries, documents = make.dirty(queries, *asked), make.dirty(documents, *held)
    got = agree_gradients(queries, documents, pairs=pairs, exact=True, backward=path, **masks)
    assert got.query_grad[~make.valid(queries.shape[-2], *asked)].eq(0).all()
    assert got.document_grad[~make.valid(documents.shape[-2], *held)].eq(0).all()


@pytest.mark.parametrize("path", PATHS)
def test_empty_documents_get_exactly_zero(path):
    """Their scores are -inf, and the gradient a loss sends there is NaN."""
    queries, documents = make.gauss(7, 31, D), make.gauss(9, 63, D, seed=1)
    lengths = torch.tensor([63, 0, 2, 0, 0, 31, 1, 63, 0], device=make.device)
    got = agree_gradients(queries, documents, document_lengths=lengths, backward=path)
    assert got.document_grad[lengths == 0].eq(0).all(), "row 0 of an empty document"
    got = agree_gradients(queries, documents, document_lengths=torch.zeros_like(lengths), backward=path)
    assert got.query_grad.eq(0).all()
    assert got.document_grad.eq(0).all()
    for counts in ([0] * 5, []):
        agree_gradients(queries, make.packed(counts, D, seed=1), backward=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("Nq", "Lq", "B", "Ld"), [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_nothing_to_learn_from(Nq, Lq, B, Ld, path):
    agree_gradients(make.gauss(Nq, Lq, D), make.gauss(B, Ld, D, seed=1), backward=path)
    agree_gradients(make.gauss(Nq, Lq, D), make.gauss(Nq, B, Ld, D, seed=1), backward=path)
    agree_gradients(make.gauss(B, Lq, D), make.gauss(B, Ld, D, seed=1), pairs=True, backward=path)
    agree_gradients(make.packed([Lq] * Nq, D), make.packed([Ld] * B, D, seed=1), backward=path)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_of_no_document_get_exactly_zero(path):
    """Views: gaps between documents hold NaN."""
    rows = make.packed([3, 0, 31, 1, 7, 100, 63], D, seed=1)
    view, asked = make.scattered(rows), make.scattered(make.packed([4, 0, 31, 1], D))
    for queries, documents in ((make.gauss(7, 31, D), view), (asked, view), (asked, rows)):
        agree_gradients(queries, documents, backward=path)
    got = agree_gradients(make.gauss(7, 31, D), view, backward=path)
    assert got.document_grad[view.values.isnan().any(-1)].eq(0).all()


def test_lengths_beyond_the_padded_size_are_clamped():
    lengths = torch.tensor([63, 1000, 2, 64, 2**31 - 1], dtype=torch.int32, device=make.device)
    for path in PATHS:
        agree_gradients(make.gauss(7, 31, D), make.gauss(5, 63, D, seed=1), document_lengths=lengths, backward=path)


# --- what the caller may ask for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["one query", "few", "both packed", "views", "per query", "ragged pairs"])
def test_only_one_side(layout, path):
    queries, documents, pairs = gradients.case(layout, make.grid, d=16)
    upstream = gradients.integers()
    both = gradients.step(queries, documents, upstream, pairs=pairs, backward=path)
    for name, need in (("queries", both.query_grad), ("documents", both.document_grad)):
        one = gradients.step(queries, documents, upstream, pairs=pairs, backward=path, need=(name,))
        assert len(one.grads) == 1
        assert torch.equal(one.grads[0], need), name


@pytest.mark.parametrize("how", ["transposed", "batch inside", "every second element", "wider rows", "odd rows", "unaligned"])
def test_strided_leaves(how):
    queries, documents = make.strided(make.grid(7, 31, 16), how), make.strided(make.grid(20, 63, 16, seed=1), how)
    own = make.strided(make.grid(7, 3, 20, 16, seed=1), how)
    for path in PATHS:
        agree_gradients(queries, documents, exact=True, backward=path)
        agree_gradients(queries, own, exact=True, backward=path)
        agree_gradients(queries, documents[:7], pairs=True, exact=True, backward=path)
        values = documents[:, 5]
        rows = Packed(values, torch.tensor([0, 3, 3, 20], dtype=torch.int32, device=make.device))
        agree_gradients(queries, rows, exact=True, backward=path)


def test_expanded_leaves():
    """One document in 9 places, one query in 5: each place has its gradient, and autograd adds them up."""
    query, document = make.grid(1, 31, 16, dtype=SINGLE).requires_grad_(), make.grid(1, 20, 16, dtype=SINGLE).requires_grad_()
    upstream = make.grid(5, 9, dtype=SINGLE)
    for path in PATHS:
        scores = maxsim(query.expand(5, 31, 16), document.expand(9, 20, 16), backward=path)
        dq, dd = torch.autograd.grad(scores, (query, document), upstream)
        need = gradients.step(query, document, upstream.sum().view(1, 1), backward=path)
        assert torch.equal(dq, need.query_grad)
        assert torch.equal(dd, need.document_grad)


def test_upstream_may_be_expanded_or_strided():
    queries, documents = make.grid(7, 31, 16), make.grid(9, 63, 16, seed=1)
    for upstream in (torch.tensor(0.5, device=make.device).expand(7, 9), make.grid(9, 7, dtype=SINGLE).T):
        for path in PATHS:
            agree_gradients(queries, documents, exact=True, upstream=upstream, backward=path)


def test_row_numbers_may_be_strided_or_short():
    """Starts and lengths of a view as every second entry of another tensor, in 32 bits."""
    values = make.grid(200, 16, seed=1)
    table = torch.tensor([[0, 31], [150, 50], [20, 0], [10, 63]], dtype=torch.int32, device=make.device)
    for path in PATHS:
        agree_gradients(make.grid(7, 31, 16), Packed.view(values, table[:, 0], table[:, 1]), exact=True, backward=path)
        agree_gradients(Packed.view(values, table[:, 0], table[:, 1]), make.grid(3, 20, 16), exact=True, backward=path)


def test_winners_have_no_gradient_and_do_not_change_one():
    for layout in ("few", "packed", "per query", "pairs"):
        queries, documents, pairs = gradients.case(layout, make.grid, d=16)
        function = maxsim_pairs if pairs else maxsim
        scores, argmax = function(gradients.leaf(queries), gradients.leaf(documents), return_argmax=True)
        assert scores.requires_grad
        assert not argmax.requires_grad
        assert argmax.dtype == torch.int32
        plain = gradients.step(queries, documents, gradients.integers(), pairs=pairs)
        asked = gradients.step(queries, documents, gradients.integers(), pairs=pairs, return_argmax=True)
        for one, other in zip(plain.grads, asked.grads, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("path", PATHS)
def test_backward_twice(path):
    """A retained graph gives the same gradient again: what was saved is not written to."""
    queries, documents = make.grid(7, 31, 16).requires_grad_(), make.grid(9, 63, 16, seed=1).requires_grad_()
    scores, upstream = maxsim(queries, documents, backward=path), make.grid(7, 9, dtype=SINGLE)
    first = torch.autograd.grad(scores, (queries, documents), upstream, retain_graph=True)
    second = torch.autograd.grad(scores, (queries, documents), upstream)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


# --- numbers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["shared", "packed", "per query", "pairs"])
def test_hot_token(layout, path):
    """Every query token chooses the same token of a document."""
    queries = make.grid(40, 100, 16).abs() + 1
    documents = make.grid(40, 300, 16, seed=1)
    documents[:, 7] = 4
    pairs = layout == "pairs"
    if layout == "packed":
        documents = Packed(documents.view(-1, 16), torch.arange(41, device=make.device) * 300)
    elif layout == "per query":
        documents = documents.view(40, 1, 300, 16)
    got = agree_gradients(queries, documents, pairs=pairs, exact=True, backward=path)
    touched = got.document_grad.view(40, 300, 16).ne(0).any(-1)
    assert touched[:, 7].any()
    assert not touched[:, :7].any()
    assert not touched[:, 8:].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["shared", "packed", "per query", "pairs"])
def test_uniform_winners(layout, path):
    """Query token i chooses document token i mod 64, so that all of them are chosen equally often."""
    axes = torch.eye(64, device=make.device).to(HALF)
    queries, documents = axes.repeat(4, 1).expand(40, 256, 64), axes.expand(40, 64, 64)
    pairs = layout == "pairs"
    if layout == "packed":
        documents = Packed(documents.reshape(-1, 64), torch.arange(41, device=make.device) * 64)
    elif layout == "per query":
        documents = documents.view(40, 1, 64, 64)
    got = agree_gradients(queries, documents, pairs=pairs, exact=True, backward=path)
    need = got.upstream.view(40, -1).sum(0 if layout in ("shared", "packed") else 1) * 4
    assert torch.equal(got.document_grad.view(40, 64, 64).float(), torch.diag_embed(need[:, None].expand(40, 64)))


@pytest.mark.parametrize("path", PATHS)
def test_float16_sums_are_accumulated_in_float32(path):
    """One document token chosen by 4096 query tokens of 1 + 2^-10 each: FP16 sums would stop growing at 2048."""
    queries = torch.full((4, 1024, 16), 1 + 2.0**-10, dtype=HALF, device=make.device, requires_grad=True)
    documents = torch.ones(1, 1, 16, dtype=HALF, device=make.device, requires_grad=True)
    maxsim(queries, documents, backward=path).sum().backward()
    assert documents.grad.unique().tolist() == [4100.0]
    own = documents.detach().expand(4096, 1, 1, 16).contiguous().requires_grad_()
    one = torch.full((1, 1, 16), 1 + 2.0**-10, dtype=HALF, device=make.device, requires_grad=True)
    maxsim_pairs(one.expand(4096, 1, 16), own[:, 0], backward=path).sum().backward()
    assert own.grad.unique().tolist() == [1 + 2.0**-10]


@pytest.mark.parametrize("Ld", [255, 256, 32767, 32768, 40000, 65534, 65535, 65536, 70000])
def test_long_documents(Ld):
    """Winners saved in 16 bits are indices without a sign, and longer documents have 32."""
    for path in PATHS:
        agree_gradients(make.gauss(2, 100, 16), make.gauss(2, Ld, 16, seed=1), backward=path)
        agree_gradients(make.grid(2, 31, 16), make.packed([Ld, 0, 31], 16, seed=1, make=make.grid), exact=True, backward=path)
    documents = torch.zeros(1, Ld, 16, device=make.device).to(HALF)
    documents[:, -1] = 1
    got = agree_gradients(make.grid(3, 31, 16).abs() + 1, documents, exact=True)
    assert bool(got.document_grad[:, -1].ne(0).any()), "the last token won"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["few", "packed", "both packed", "per query", "pairs"])
def test_nan_and_infinity_upstream_stay_where_they_belong(layout, path):
    """They reach the rows whose winners see them and no row beside."""
    for value in (float("nan"), float("inf")):
        queries, documents, pairs = gradients.case(layout, make.gauss)

        def upstream(*shape, value=value):
            grad = make.gauss(*shape, dtype=SINGLE)
            grad.view(-1)[-1], grad.view(-1)[grad.numel() // 2] = value, value
            return grad

        got = agree_gradients(queries, documents, pairs=pairs, upstream=upstream, backward=path)
        assert got.document_grad.isfinite().any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["few", "packed", "per query", "pairs"])
def test_nan_tokens(layout, path):
    """A valid token that is NaN: scores are NaN, and the gradient is what the winners say, finite wherever they are."""
    queries, documents, pairs = gradients.case(layout, make.gauss)
    values = gradients.values_of(documents).view(-1, D)
    values[::500, 3] = float("nan")
    got = agree_gradients(queries, documents, pairs=pairs, backward=path)
    assert got.document_grad.isfinite().all(), "document gradients are sums of query tokens, all of them finite"
    if layout in ("few", "packed") or path in ("unified", "atomic"):
        # csr multiplies a query's tokens by 0 and 1 where documents have one query: a NaN among them spreads over what they chose.
        queries[0, 3, 5] = float("nan")
        agree_gradients(queries, documents, pairs=pairs, backward=path)
