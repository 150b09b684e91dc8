"""What the integrations ask of the operator on a GPU: scores of another dtype, another score of empty documents; and the libraries."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest
import torch

import libraries
from inputs import on_gpu as make
from maxsim_kernels import integrations, maxsim, pack
from maxsim_kernels.api import run
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.ops import finished

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
LAYOUTS = ("mask", "mask, lengths", "lengths", "packed", "own", "pairs", "one query", "wide", "winners")


def call_of(layout: str, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """Queries, documents and options of a call with an empty document and a query without a token."""
    lq, ld, d = (32, 180, 320 if layout == "wide" else 128)
    queries, documents = make.gauss(6, lq, d, seed=seed), make.gauss(24, ld, d, seed=seed + 1)
    random = torch.Generator("cuda").manual_seed(seed)
    mask = torch.rand(24, ld, generator=random, device="cuda") > 0.4
    lengths = torch.randint(0, ld + 1, (24,), generator=random, device="cuda")
    mask[3 + seed], lengths[1 + seed] = False, 0
    if layout == "one query":
        return queries[:1], documents, {"document_mask": mask}
    query_mask = torch.ones(6, lq, dtype=torch.bool, device="cuda")
    query_mask[1] = False
    options: dict[str, Any] = {"query_mask": query_mask}
    if layout == "packed":
        return queries, pack([one[:length] for one, length in zip(documents, lengths.tolist(), strict=True)]), options
    if layout == "own":
        return queries, documents.view(6, 4, ld, d), options | {"document_mask": mask.view(6, 4, ld)}
    if layout == "pairs":
        return queries, documents[:6], options | {"document_mask": mask[:6], "pairs": True}
    if layout != "lengths":
        options["document_mask"] = mask
    if "lengths" in layout:
        options["document_lengths"] = lengths
    return queries, documents, options | ({"return_argmax": True} if layout == "winners" else {})


@pytest.mark.parametrize("out", [SINGLE, HALF, BFLOAT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_as_asked_have_the_bits_that_torch_gives_afterwards(layout: str, out: torch.dtype) -> None:
    for seed in (0, 1, 2):  # recorded the second time, then replayed on other values
        queries, documents, options = call_of(layout, seed)
        asked = Options(**options, out=out, empty_score=-1000.0)
        plain, found = (run(queries, documents, one) for one in (Options(**options), asked))
        if layout == "winners":
            assert torch.equal(plain[1], found[1])
            plain, found = plain[0], found[0]
        need = finished(plain, validate(queries, documents, asked))
        assert found.dtype == out
        assert bool((need == -1000).any())
        assert torch.equal(found, need)


@pytest.mark.parametrize("layout", ["mask", "own", "pairs"])
@pytest.mark.parametrize("out", [HALF, BFLOAT])
def test_gradients_of_rounded_scores_have_the_bits_of_a_cast(layout: str, out: torch.dtype) -> None:
    for seed in (0, 1, 2):
        queries, documents, options = call_of(layout, seed)
        found = []
        for inside in (True, False):
            leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
            scores = run(*leaves, Options(**options, out=out if inside else SINGLE, empty_score=-1000.0)).to(out)
            weights = torch.linspace(0.1, 1, scores.numel(), device="cuda").view_as(scores)
            found.append((scores.detach(), *torch.autograd.grad((scores.float() * weights).sum(), leaves)))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("nq", "lq", "size", "d"), [(40, 32, 180, 128), (3, 20, 256, 96), (33, 7, 31, 320)])
def test_masked_documents_of_one_tile_in_tf32(nq: int, lq: int, size: int, d: int) -> None:
    """As whole documents are taken: a document without holes gets their bits, and hidden tokens are never read into a score."""
    queries, documents = make.unit(nq, lq, d, dtype=SINGLE), make.unit(500, size, d, dtype=SINGLE, seed=1)
    mask = torch.rand(500, size, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.3
    mask[::3], mask[7] = True, False
    hidden = documents.masked_fill(~mask[..., None], torch.nan)
    lengths = torch.full((500,), size, device="cuda")
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    try:
        setting.fp32_precision = "tf32"
        found = maxsim(queries, hidden, document_mask=mask)
        assert torch.equal(found, maxsim(queries, hidden, document_mask=mask, document_lengths=lengths))  # by the tables
        assert torch.equal(found[:, ::3], maxsim(queries, documents)[:, ::3])
    finally:
        setting.fp32_precision = before
    assert torch.equal(torch.isinf(found).any(0).nonzero().flatten(), torch.tensor([7], device="cuda"))


CALLS = {
    "sentence-transformers": ("sentence_transformers.util.similarity", "maxsim"),
    "pylate": ("pylate.scores.colbert", "colbert_scores"),
    "colpali-engine": ("colpali_engine.utils.maxsim", "maxsim_inbatch"),
}


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT])
@pytest.mark.parametrize("library", CALLS)
def test_a_document_without_tokens_scores_as_in_the_library(library: str, dtype: torch.dtype, monkeypatch) -> None:
    try:
        libraries.import_library(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    queries, documents = make.unit(4, 32, 128, dtype=dtype), make.unit(9, 60, 128, dtype=dtype, seed=1)
    mask = torch.rand(9, 60, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.3
    mask[5] = False
    documents[5] = 0  # colpali-engine has no masks
    given: tuple[Any, ...] = (queries, documents)
    if library != "colpali-engine":
        given = (queries, documents, torch.ones(4, 32, dtype=torch.bool, device="cuda"), mask)
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
    place, name = CALLS[library]
    theirs = getattr(importlib.import_module(place), name)(*given)
    monkeypatch.delenv("PYLATE_SCORES_BACKEND")
    monkeypatch.delenv("COLPALI_SCORES_BACKEND")
    with integrations.enable(library):
        function = getattr(importlib.import_module(place), name)
        for _ in range(3):  # the third is a replay
            found = function(*given)
            assert found.dtype == theirs.dtype
            assert torch.equal(found[:, 5], theirs[:, 5])
            torch.testing.assert_close(found.float(), theirs.float(), rtol=3e-2, atol=3e-1)
        assert integrations.status()[library].calls == {name: 3}
