"""Masks of shared documents on a GPU: the bits of the same documents without what is hidden, and no wait for what a mask holds."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, quantize_int8
from truth import agree

HALF, BFLOAT = torch.float16, torch.bfloat16
SIZES = [(7, 31, 100, 63), (40, 32, 300, 180), (1, 1000, 63, 100), (3, 20, 2, 3000), (65, 17, 1000, 31), (256, 32, 9000, 20)]


def mask_of(kind: str, count: int, size: int) -> torch.Tensor:
    """`[count, size]` bool: padding, holes, both, and whole documents hidden."""
    random = torch.Generator("cuda").manual_seed(3)
    lengths = torch.randint(1, size + 1, (count,), generator=random, device="cuda")
    padding = torch.arange(size, device="cuda") < lengths[:, None]
    holes = torch.rand(count, size, generator=random, device="cuda") > 0.3
    some = torch.rand(count, 1, generator=random, device="cuda") > 0.5
    found = {"padding": padding, "holes": holes, "some": padding & (holes | some), "left": ~padding}[kind].clone()
    found[count // 2] = kind == "holes"
    return found


def kept(documents: torch.Tensor, mask: torch.Tensor) -> Packed:
    """The tokens that count, end to end."""
    offsets = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.sum(1), 0, out=offsets[1:])
    return Packed(documents[mask], offsets)


@pytest.mark.parametrize("kind", ["padding", "holes", "some", "left"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("size", SIZES)
def test_hidden_tokens_are_as_if_they_were_not_there(size, dtype, kind):
    queries, documents = make.gauss(*size[:2], 128, dtype=dtype), make.gauss(*size[2:], 128, dtype=dtype, seed=1)
    mask = mask_of(kind, *size[2:])
    hidden = documents.masked_fill(~mask[..., None], torch.nan)
    scores = maxsim(queries, hidden, document_mask=mask)
    assert torch.equal(scores, maxsim(queries, kept(documents, mask)))
    found, _ = maxsim(queries, hidden, document_mask=mask, return_argmax=True)
    assert torch.equal(found, scores)
    if size[0] * size[2] <= 20_000:
        agree(queries, hidden, document_mask=mask)


@pytest.mark.parametrize("kind", ["padding", "some"])
@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_codes_with_masks(granularity, kind):
    queries, documents = make.gauss(40, 32, 128), make.gauss(300, 180, 128, seed=1)
    mask = mask_of(kind, 300, 180)
    codes = quantize_int8(documents, granularity)
    scores = maxsim(queries, codes, document_mask=mask)
    alone = maxsim(queries[:1], codes, document_mask=mask)  # few rows: the kernel that always reads the mask
    assert torch.equal(scores[:1], alone)
    assert torch.equal(torch.isinf(scores[0]), ~mask.any(1))


@pytest.mark.parametrize("d", [320, 768])
def test_wide_tokens_with_masks(d):
    queries, documents = make.gauss(40, 32, d), make.gauss(300, 180, d, seed=1)
    mask = mask_of("some", 300, 180)
    hidden = documents.masked_fill(~mask[..., None], torch.nan)
    assert torch.equal(maxsim(queries, hidden, document_mask=mask), maxsim(queries, kept(documents, mask)))


def test_gradients_with_holes():
    queries, documents = make.gauss(8, 32, 128).requires_grad_(), make.gauss(16, 180, 128, seed=1).requires_grad_()
    mask = mask_of("some", 16, 180)
    maxsim(queries, documents, document_mask=mask).masked_fill(~mask.any(1), 0).sum().backward()
    others = queries.detach().clone().requires_grad_(), documents.detach().clone().requires_grad_()
    products = torch.einsum("qid,njd->qnij", others[0].float(), others[1].float()).masked_fill(~mask[None, :, None], -torch.inf)
    products.amax(-1).sum(-1).masked_fill(~mask.any(1), 0).sum().backward()
    for found, expected in zip((queries, documents), others, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("layout", ["dense", "packed", "mask", "winners"])
@pytest.mark.parametrize(
    "size", [(40, 32, 300, 180, 128), (1, 32, 300, 180, 128), (4, 100, 33, 70, 96), (40, 32, 100, 180, 768)]
)
def test_tf32_tokens_keep_ten_bits(size, layout):
    queries, documents = make.unit(*size[:2], size[4], dtype=torch.float32), make.unit(*size[2:], dtype=torch.float32, seed=1)
    mask = mask_of("some", *size[2:4])
    options = {"document_mask": mask} if layout == "mask" else {}
    held = kept(documents, torch.ones_like(mask)) if layout == "packed" else documents
    setting = torch.backends.cuda.matmul
    exact, before = maxsim(queries, held, **options), setting.fp32_precision
    try:
        setting.fp32_precision = "tf32"
        fast = maxsim(queries, held, return_argmax=layout == "winners", **options)
    finally:
        setting.fp32_precision = before
    fast = fast[0] if layout == "winners" else fast
    assert not torch.equal(fast, exact)
    torch.testing.assert_close(fast, exact, rtol=0, atol=2e-3 * size[1])
