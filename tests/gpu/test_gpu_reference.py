"""The FP32 reference on a GPU: few query tokens meet rows of any documents in one product, many those of documents of like length."""

from __future__ import annotations

import pytest
import torch

from inputs import dirty
from inputs import on_gpu as make
from maxsim_kernels import maxsim
from maxsim_kernels.reference import products
from reference_cases import check_places
from truth import check_scores, oracle

ASKED = {"few": [9, 0, 33, 4], "many": [9, 0, 33, 4, 200]}


@pytest.fixture(params=ASKED)
def counts(request):
    """Tokens of each query."""
    asked = ASKED[request.param]
    assert (sum(asked) <= products._FEW) == (request.param == "few")
    return asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["dense", "packed", "view", "one query"])
def test_every_layout(layout, dtype, counts):
    queries = make.packed(counts, 128, dtype=dtype, make=make.gauss)
    documents = make.packed([20, 0, 1, 700, 0, 300, *[5] * 400, 0], 128, dtype=dtype, seed=1, make=make.gauss)
    if layout == "view":
        documents = make.scattered(documents)
    elif layout == "dense":
        documents = make.gauss(300, 31, 128, dtype=dtype, seed=1)
    elif layout == "one query":
        queries = queries[len(counts) - 1]
    check_scores(maxsim(queries, documents, impl="reference"), oracle(queries, documents))


@pytest.mark.parametrize("kind", ["mask", "lengths", "both"])
def test_masks(kind, counts):
    """Of either side; what they hide is NaN or infinite."""
    shapes = {"query": (len(counts), max(counts)), "document": (300, 31)}
    masks = {name: make.masks(kind, name, *shape) for name, shape in shapes.items()}
    said = masks["query"] | masks["document"]
    queries, documents = (
        dirty(make.gauss(*shape, 128, seed=len(name)), masks[name].get(f"{name}_mask"), masks[name].get(f"{name}_lengths"))
        for name, shape in shapes.items()
    )
    scores = maxsim(queries, documents, impl="reference", **said)
    check_scores(scores, oracle(queries, documents, **said))
    first = masks["query"] | {name: mask[:7] for name, mask in masks["document"].items()}
    assert make.same_bits(maxsim(queries, documents[:7], impl="reference", **first), scores[:, :7])


@pytest.mark.parametrize("held", [1 << 20, 1 << 26])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_same_bits_wherever_a_document_stands(dtype, held, counts, monkeypatch):
    """Also where fewer maxima wait to be summed."""
    queries = make.packed(counts, 128, dtype=dtype, make=make.gauss)
    documents = make.packed([0, 3, 5000, 0, 0, *make.sizes(400, 300)], 128, dtype=dtype, seed=1, make=make.gauss)
    whole = maxsim(queries, documents, impl="reference")
    monkeypatch.setattr(products, "_HELD_BYTES", {"cuda": held})
    assert make.same_bits(maxsim(queries, documents, impl="reference"), whole)
    check_places(lambda documents: maxsim(queries, documents, impl="reference"), documents)
