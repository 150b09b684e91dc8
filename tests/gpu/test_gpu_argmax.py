"""`return_argmax=True` on a GPU for every layout: as good as the best cell, the first one among exact ties, -1 where nothing is."""

from __future__ import annotations

import pytest
import torch

import truth
from gradient_truth import case
from inputs import on_gpu as make
from maxsim_kernels import Int8Tokens, maxsim, maxsim_pairs, quantize_fp8, quantize_int8
from truth import agree

D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
COUNTS = [3, 0, 31, 1, 7, 100, 0, 1000, 63, 64, 65, 128, 129, 0]
ASKED = [4, 0, 31, 1, 100, 0]
LAYOUTS = [
    "one query",
    "few",
    "many",
    "long",
    "packed",
    "packed one",
    "packed queries",
    "both packed",
    "per query",
    "pairs",
    "ragged pairs",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    queries, documents, pairs = case(layout, make.gauss)
    agree(queries, documents, pairs=pairs, return_argmax=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_index_among_ties(layout):
    """Small integers: every product is exact, so the truth's first index is the only right answer."""
    queries, documents, pairs = case(layout, make.grid)
    agree(queries, documents, pairs=pairs, return_argmax=True, exact=True)


@pytest.mark.parametrize("Nq", [1, 70])
def test_all_cells_equal(Nq):
    """One token repeated 1000 times, and zeros: the winner is token 0."""
    queries = make.gauss(Nq, 31, D)
    for documents in (make.gauss(40, 1, D).expand(40, 1000, D), torch.zeros(40, 1000, D, device=make.device).to(HALF)):
        assert bool((maxsim(queries, documents, return_argmax=True)[1] == 0).all())


def test_negative_zero_ties_with_zero():
    """-0.0 and 0.0 are equal: the first of them wins."""
    documents = torch.zeros(3, 70, D, device=make.device).to(HALF)
    documents[1, 0], documents[2, 69] = -0.0, 1.0
    documents[:, 40] = -0.0
    queries = -torch.ones(5, 3, D, device=make.device).to(HALF)
    assert maxsim(queries, documents, return_argmax=True)[1].unique().tolist() == [0]


@pytest.mark.parametrize("tokens", ["gauss", "grid"])
@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE])
@pytest.mark.parametrize("layout", ["one query", "many", "both packed"])
def test_dtypes(layout, dtype, tokens):
    queries, documents, pairs = case(layout, getattr(make, tokens), dtype)
    agree(queries, documents, pairs=pairs, return_argmax=True, exact=tokens == "grid")


@pytest.mark.parametrize("d", [7, 96, 384, 1000, 1024])
def test_widths(d):
    for tokens in (make.gauss, make.grid):
        queries, documents, _ = case("few", tokens, d=d)
        agree(queries, documents, return_argmax=True, exact=tokens is make.grid)
    queries, documents, _ = case("both packed", make.grid, d=d)
    agree(queries, documents, return_argmax=True, exact=True)


@pytest.mark.parametrize("kind", ["mask", "lengths", "both"])
@pytest.mark.parametrize("shape", [(1, 31, 40, 63), (7, 31, 40, 63), (70, 100, 9, 300)])
def test_masks(kind, shape):
    """-1 for masked query tokens and empty documents; otherwise a valid token, counted from the document's first position."""
    Nq, Lq, B, Ld = shape
    masks = make.masks(kind, "query", Nq, Lq) | make.masks(kind, "document", B, Ld, seed=1)
    if "document_mask" in masks:
        masks["document_mask"][B // 3] = False
        masks["document_mask"][0, : Ld // 2] = False
    queries = make.dirty(make.grid(Nq, Lq, D), masks.get("query_mask"), masks.get("query_lengths"))
    documents = make.dirty(make.grid(B, Ld, D, seed=1), masks.get("document_mask"), masks.get("document_lengths"))
    agree(queries, documents, return_argmax=True, exact=True, **masks)


@pytest.mark.parametrize("layout", ["per query", "pairs"])
def test_masks_of_candidates_and_pairs(layout):
    queries, documents, pairs = case(layout, make.grid)
    masks = make.masks("both", "query", *queries.shape[:2]) | make.masks("both", "document", *documents.shape[:-1], seed=1)
    queries = make.dirty(queries, masks["query_mask"], masks["query_lengths"])
    documents = make.dirty(documents, masks["document_mask"], masks["document_lengths"])
    agree(queries, documents, pairs=pairs, return_argmax=True, exact=True, **masks)


@pytest.mark.parametrize(("Nq", "Lq", "B", "Ld"), [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_nothing_to_score(Nq, Lq, B, Ld):
    agree(make.gauss(Nq, Lq, D), make.gauss(B, Ld, D, seed=1), return_argmax=True)
    agree(make.gauss(Nq, Lq, D), make.gauss(Nq, B, Ld, D, seed=1), return_argmax=True)
    agree(make.gauss(B, Lq, D), make.gauss(B, Ld, D, seed=1), pairs=True, return_argmax=True)
    agree(make.packed([Lq] * Nq, D), make.packed([Ld] * B, D, seed=1), return_argmax=True)


@pytest.mark.parametrize("layout", ["many", "packed", "pairs"])
def test_nan(layout):
    """NaN in a valid token: any index of the document, never -1."""
    queries, documents, pairs = case(layout, make.gauss)
    values = documents if torch.is_tensor(documents) else documents.values
    values.view(-1, D)[::500, 3] = float("nan")
    queries[0, 3, 5] = float("nan")
    agree(queries, documents, pairs=pairs, return_argmax=True)


def test_views_and_overlaps():
    rows = make.packed(COUNTS, D, seed=1, make=make.grid)
    agree(make.grid(7, 31, D), make.scattered(rows), return_argmax=True, exact=True)
    agree(make.scattered(make.packed(ASKED, D, make=make.grid)), rows, return_argmax=True, exact=True)


@pytest.mark.parametrize("Nq", [1, 3])
def test_few_long_documents(Nq):
    """Winners of the parts of a split document: the earlier part wins a tie, beyond 2^16 tokens too."""
    agree(make.grid(Nq, 32, D), make.grid(2, 70000, D, seed=1), return_argmax=True, exact=True)
    agree(make.grid(Nq, 32, D), make.packed([70000, 0, 20001], D, seed=1, make=make.grid), return_argmax=True, exact=True)
    agree(make.gauss(Nq, 32, D), make.gauss(3, 20000, D, seed=1), return_argmax=True)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        *[("int8-token", layout) for layout in ("one query", "many", "packed", "per query", "pairs")],
        *[(form, layout) for form in ("int8-document", "fp8") for layout in ("one query", "many", "packed")],
        ("int8-corpus", "many"),
        ("int8-affine", "many"),
        ("int8-affine", "packed"),
    ],
)
def test_quantized(form, layout):
    queries, documents, pairs = case(layout, make.gauss)
    if form == "fp8":
        stored = quantize_fp8(documents)
    else:
        affine = form.endswith("affine")
        stored = quantize_int8(documents, "token" if affine else form.removeprefix("int8-"), affine=affine)
    agree(queries, stored, pairs=pairs, return_argmax=True)
    if (form, layout) == ("int8-token", "many"):
        agree(queries, stored, pairs=pairs, return_argmax=True, quantize_queries=False)


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_quantized_ties(granularity):
    """Each document holds every token twice: the later copy never wins."""
    documents = quantize_int8(make.gauss(40, 50, D, seed=1), granularity)
    scales = torch.cat([documents.scales] * 2, -1) if granularity == "token" else documents.scales
    twice = Int8Tokens(torch.cat([documents.codes] * 2, 1), scales, granularity=granularity)
    for queries in (make.gauss(31, D), make.gauss(70, 31, D)):
        assert int(maxsim(queries, twice, return_argmax=True)[1].max()) < 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_with_and_without_winners(layout):
    """Asking for winners may take another kernel; both stay within the bound of one truth."""
    queries, documents, pairs = case(layout, make.gauss, d=96)
    function = maxsim_pairs if pairs else maxsim
    need = truth.oracle(queries, documents, pairs=pairs)
    scores, _ = function(queries, documents, return_argmax=True)
    truth.check_scores(scores, need)
    truth.check_scores(function(queries, documents), need)
