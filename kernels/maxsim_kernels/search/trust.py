"""How exact a GPU's products are taken to be, and the test of them that every process makes before it prunes.

Tensor cores add the products of a step, and the sum so far, aligned to the largest exponent, and cut off what lies below: the error is
larger than that of FP32 additions, and its model (docs/search.md) rests on published measurements, not on a promise. So `looked_at`
scores vectors that are made to lose bits, by the kernel that the search in question calls, and compares with FP64; and it compares the
bits of a pair's score in the call shapes that the search takes. What fails is not used; `Trust` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.gpu.geometry import fp32_precision
from maxsim_kernels.search.bounds import gamma_of
from maxsim_kernels.tokens import Packed

# How much more than FP32 additions a sum may lose. Half precision: twice what the model allows at its worst (docs/search.md).
HALF, FP8 = 8.0, 4096.0
_DOCUMENTS, _LONGEST = 96, 150
_ROWS = 4096  # query tokens of a test, at most: far more than any kernel's choice depends on
_KINDS = 6  # of vectors that lose bits


@dataclass(frozen=True)
class Form:
    """Queries as a call gets them: what decides which kernel takes it."""

    device: torch.device
    dtype: torch.dtype
    count: int
    size: int  # tokens a query
    dim: int
    packed: bool
    precision: str  # of float32 products


@dataclass(frozen=True)
class Trust:
    """`bounded`: why nothing can be pruned, empty where bounds hold. `pairs`: whether marked pairs may be scored alone."""

    bounded: str
    pairs: bool


def factor_of(dtype: torch.dtype) -> float:
    """How much more than FP32 additions the exact path's sums may lose on a GPU: matrix units for half precision alone."""
    return HALF if dtype in (torch.float16, torch.bfloat16) else 1.0


def form_of(device: torch.device, dtype: torch.dtype, count: int, size: int, dim: int, packed: bool) -> Form:
    """The form to test for such queries: with fewer of them, or shorter ones, where that makes no difference to any kernel."""
    size = min(size, _ROWS if packed else size)
    return Form(device, dtype, min(count, max(1, _ROWS // size)), size, dim, packed, fp32_precision(dtype))


# Scores pairs alone, by every form of the kernel for that: yields numbers of documents, and their scores.
Alone = Callable[[Tensor, Tensor, Tensor, Packed], Iterable[tuple[Tensor, Tensor]]]


@lru_cache(maxsize=256)
def looked_at(form: Form, alone: Alone | None) -> Trust:
    """Score queries of this form by the calls of a search, once a process: waits for the GPU.

    `alone(values, starts, lengths, documents)` scores packed queries pair by pair, where it can.
    """
    if form.precision != "ieee":
        return Trust(
            f"products of float32 may be rounded to {form.precision} (torch.backends), which the bounds do not cover", False
        )
    queries, packed = _queries(form)
    documents = _documents(form)
    together = maxsim(queries, documents)
    assert isinstance(together, Tensor)
    short = documents.lengths == 1
    worst = _beyond(packed, documents, together)
    if worst[:, short].amax() > 1:
        return Trust(f"products on this GPU are off by {float(worst[:, short].amax()):.2g} of what the bounds allow", False)
    turned = torch.arange(len(documents) - 1, -1, -3, device=form.device)
    few = Packed.view(documents.values, documents.starts[turned], documents.lengths[turned]).compact()
    again = maxsim(queries, few)
    assert isinstance(again, Tensor)
    if not _same(again, together[:, turned]):
        return Trust("a document's score has other bits among other documents on this GPU", False)
    own = [] if alone is None else list(alone(packed.values, packed.starts, packed.lengths, documents))
    return Trust("", bool(own) and all(_same(scores, together[:, numbers]) for numbers, scores in own))


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def _beyond(queries: Packed, documents: Packed, scores: Tensor) -> Tensor:
    """`[Nq, N]`: errors of the scores of documents of one token, as a share of what is allowed for the sizes of their products."""
    tokens = documents.values[documents.starts]
    products = queries.values.double() @ tokens.double().T
    sizes = queries.values.double().abs() @ tokens.double().abs().T
    owner = queries.document_of_token()
    shape = (len(queries), len(documents))
    exact = torch.zeros(shape, dtype=torch.float64, device=scores.device).index_add_(0, owner, products)
    size = torch.zeros(shape, dtype=torch.float64, device=scores.device).index_add_(0, owner, sizes)
    allowed = gamma_of(queries.dim, factor_of(queries.dtype)) * size + 2.0**-100
    return (scores.double() - exact).abs() / allowed


def _hard(form: Form, count: int, seed: int) -> Tensor:
    """`[count, d]` tokens whose sums lose bits: normal ones, mixed exponents, large ones that cancel, one sign, odd mantissas."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(count, form.dim, generator=draw, dtype=torch.float32, device="cpu")
    turn = torch.arange(count, device="cpu")[:, None] % _KINDS
    exponents = torch.randint(-8, 5, values.shape, generator=draw, device="cpu")
    values = torch.where(turn == 1, torch.ldexp(values, exponents), values)
    side = 1.0 - 2.0 * (torch.arange(form.dim, dtype=torch.float32, device="cpu") % 2)
    values = torch.where(turn == 2, side * (64 + values), values)
    values = torch.where(turn == 3, values.abs() + 1, values)
    values = torch.where(
        turn == 4, 1 + torch.randint(0, 1024, values.shape, generator=draw, dtype=torch.float32, device="cpu") / 1024, values
    )
    large = torch.where(torch.arange(form.dim, device="cpu") % 16 == 0, 256.0, 2.0**-6).float()
    values = torch.where(turn == 5, large * (values.abs() + 1), values)
    return values.to(form.dtype).to(form.device)


def _queries(form: Form) -> tuple[Tensor | Packed, Packed]:
    """Queries of the form, and the same packed."""
    values = _hard(form, form.count * form.size, 1)
    offsets = torch.arange(0, form.count * form.size + 1, max(1, form.size), device=form.device)[: form.count + 1]
    packed = Packed(values, offsets)
    return (packed if form.packed else values.view(form.count, form.size, form.dim)), packed


def _documents(form: Form) -> Packed:
    """Documents of the test: half of one token, half of many lengths."""
    draw = torch.Generator().manual_seed(2)
    lengths = torch.ones(_DOCUMENTS, dtype=torch.int64, device="cpu")
    lengths[1::2] = torch.randint(1, _LONGEST, (_DOCUMENTS // 2,), generator=draw, device="cpu")
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)])
    return Packed(_hard(form, int(offsets[-1]), 3), offsets.to(form.device))
