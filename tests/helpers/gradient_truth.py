"""Gradients on a GPU against sums in float64 over the kernel's own winners, which must be as good as the best within the bound.

With winner t*(q, n, i) of query token i in document n: `dQ[q, i] = sum_n g[q, n] D[n, t*]` and `dD[n, t] = sum of g[q, n] Q[q, i]` over
the (q, i) that chose t. Shares nothing with the package but its token types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import truth
from inputs import on_gpu, same_bits, values_of
from maxsim_kernels import Packed, maxsim, maxsim_pairs

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32

# The numbers. An entry may be wrong by LIMIT times the norm of its row; the cosine is that of the whole tensors.
COSINE = {SINGLE: 0.99999, HALF: 0.9999, BFLOAT: 0.9999}
LIMIT = {SINGLE: 1e-5, HALF: 1e-2, BFLOAT: 1e-2}
WIDE_LIMIT, WIDE = 1e-3, 512  # from this d on
# FP32's own rounding where a sum cancels: times the sum of its |terms| (GRADIENT in tolerances.py).
ROUNDING = 2e-6
# Spacing of the smallest numbers of a dtype, for gradients among its subnormals.
FLOOR = {SINGLE: 2.0**-149, HALF: 2.0**-24, BFLOAT: 2.0**-133}

_CELLS = 2**25  # float64 numbers gathered at once: 256 MB

_COUNTS = [31, 0, 3, 1, 7, 100, 0, 1000, 63, 64, 65, 128, 129, 0]
_ASKED = [4, 0, 31, 1, 100, 0]


def case(layout: str, tokens: Callable[..., Tensor], dtype: torch.dtype = HALF, d: int = 128) -> Any:
    """Queries, documents and whether they are pairs, of `tokens` (a maker)."""

    def rows(counts: list[int], seed: int = 0) -> Packed:
        return on_gpu.packed(counts, d, dtype=dtype, seed=seed, make=tokens)

    def dense(*shape: int, seed: int = 0) -> Tensor:
        return tokens(*shape, d, dtype=dtype, seed=seed)

    makers: dict[str, Callable[[], Any]] = {
        "one query": lambda: (dense(32), dense(100, 63, seed=1), False),
        "few": lambda: (dense(7, 31), dense(100, 63, seed=1), False),
        "many": lambda: (dense(100, 31), dense(40, 100, seed=1), False),
        "long": lambda: (dense(3, 1000), dense(31, 300, seed=1), False),
        "packed": lambda: (dense(7, 31), rows(_COUNTS, 1), False),
        "packed one": lambda: (dense(31), rows(_COUNTS, 1), False),
        "packed queries": lambda: (rows(_ASKED), dense(40, 63, seed=1), False),
        "both packed": lambda: (rows(_ASKED), rows(_COUNTS, 1), False),
        "views": lambda: (dense(7, 31), overlapping(dense(300, seed=1)), False),
        "views of queries": lambda: (overlapping(dense(100)), rows(_COUNTS, 1), False),
        "per query": lambda: (dense(7, 31), dense(7, 5, 63, seed=1), False),
        "pairs": lambda: (dense(31, 31), dense(31, 63, seed=1), True),
        "ragged pairs": lambda: (rows(_ASKED), rows([31, 5, 0, 1, 200, 3], 1), True),
    }
    return makers[layout]()


def overlapping(values: Tensor) -> Packed:
    """Rows that share tokens, in no order, one of them empty; the first and the last tokens belong to none."""
    total = values.shape[0]
    starts = [total // 3, 5, total // 2, total // 3, 20, total // 4]
    lengths = [total // 3, 31, total // 4, 7, 0, total // 2]
    place = {"dtype": torch.int64, "device": values.device}
    return Packed.view(values, torch.tensor(starts, **place), torch.tensor(lengths, **place))  # type: ignore[arg-type]


def leaf(tokens: Any, wanted: bool = True) -> Any:
    """The same tokens (storage and strides too) without history; `wanted`: their gradient is."""
    if isinstance(tokens, Packed):
        return tokens.with_values(tokens.values.detach().requires_grad_(wanted))
    return tokens.detach().requires_grad_(wanted)


@dataclass(frozen=True)
class Step:
    """A forward and a backward pass of `sum(upstream * scores)`."""

    scores: Tensor
    argmax: Tensor | None
    upstream: Tensor
    query_grad: Tensor | None
    document_grad: Tensor | None

    @property
    def grads(self) -> list[Tensor]:
        """Those that were asked for."""
        return [grad for grad in (self.query_grad, self.document_grad) if grad is not None]


def step(
    queries: Any,
    documents: Any,
    upstream: Callable[..., Tensor] | Tensor,
    *,
    pairs: bool = False,
    need: tuple[str, ...] = ("queries", "documents"),
    return_argmax: bool = False,
    **options: Any,
) -> Step:
    """One training step through the public functions. `upstream`: a tensor, or a maker that gets the scores' shape.

    Scores of -inf get NaN upstream from a maker: the gradient of nothing is nothing, whatever a loss makes of it.
    """
    asked, held = leaf(queries, "queries" in need), leaf(documents, "documents" in need)
    result: Any = (maxsim_pairs if pairs else maxsim)(asked, held, return_argmax=return_argmax, **options)
    scores, argmax = result if return_argmax else (result, None)
    if not isinstance(upstream, Tensor):
        upstream = upstream(*scores.shape).float().masked_fill(scores.detach() == -torch.inf, torch.nan)
    wanted = [values_of(tokens) for tokens, name in ((asked, "queries"), (held, "documents")) if name in need]
    grads = dict(
        zip([name for name in ("queries", "documents") if name in need], torch.autograd.grad(scores, wanted, upstream))
    )
    return Step(scores.detach(), argmax, upstream, grads.get("queries"), grads.get("documents"))


@dataclass(frozen=True)
class Sums:
    """A gradient in float64, and the sums of its |terms|: zero where nothing is added."""

    value: Tensor
    size: Tensor


def _rows(tokens: Any, single: bool, pairs: bool) -> tuple[Tensor, Tensor]:
    """All tokens `[R, d]` in float64, and the row where each query `[Nq]` or document `[Nq or 1, n]` begins."""
    if isinstance(tokens, Packed):
        values, bases = tokens.values.detach().double(), tokens.starts.long()
    else:
        tokens = tokens.detach().unsqueeze(0) if single else tokens.detach()
        counts, size = tokens.shape[:-2], tokens.shape[-2]
        values = tokens.double().reshape(-1, tokens.shape[-1])
        bases = (torch.arange(math.prod(counts), device=tokens.device) * size).view(counts)
    return values, bases.unsqueeze(1) if pairs else bases


def true_gradients(upstream: Tensor, argmax: Tensor, queries: Any, documents: Any, *, pairs: bool = False) -> tuple[Sums, Sums]:
    """dQ and dD in the shapes of the inputs, from winners as `return_argmax` gives them."""
    single = isinstance(queries, Tensor) and queries.dim() == 2
    asked, query_bases = _rows(queries, single, False)
    held, document_bases = _rows(documents, False, pairs)
    if single or pairs:
        upstream, argmax = (x.unsqueeze(0 if single else 1) for x in (upstream, argmax))
    count, own, width = argmax.shape
    bases = document_bases.expand(count, own)
    made = [torch.zeros_like(tokens) for tokens in (asked, asked, held, held)]
    block = max(1, _CELLS // max(1, own * width * asked.shape[1]))
    for begin in range(0, count, block):
        part = argmax[begin : begin + block].long()
        q, n, i = (part >= 0).nonzero(as_tuple=True)
        document_rows, query_rows = bases[begin + q, n] + part[q, n, i], query_bases[begin + q] + i
        weight = upstream[begin + q, n].double().unsqueeze(1)
        for place, rows, others in ((0, query_rows, held[document_rows]), (2, document_rows, asked[query_rows])):
            terms = weight * others
            made[place].index_add_(0, rows, terms)
            made[place + 1].index_add_(0, rows, terms.abs_())
    shapes = [values_of(tokens).shape for tokens in (queries, queries, documents, documents)]
    dq, dq_size, dd, dd_size = (sums.view(shape) for sums, shape in zip(made, shapes, strict=True))
    return Sums(dq, dq_size), Sums(dd, dd_size)


def check(name: str, got: Tensor | None, need: Sums, tokens: Any, exact: bool = False) -> None:
    """A gradient within the limits, exactly zero where nothing is added. `exact`: the sum, rounded once to the tokens' dtype."""
    held = values_of(tokens)
    assert got is not None, f"{name}: none"
    assert (got.dtype, got.shape, got.device) == (held.dtype, held.shape, held.device), f"{name}: {got.dtype} {list(got.shape)}"
    _refuse(name, (need.size == 0) & (got != 0), got, need.value)
    wide, finite = got.double(), need.value.isfinite()
    # Which of NaN and infinity a sum of infinities becomes depends on its order.
    _refuse(name, wide.isfinite() != finite, got, need.value)
    if exact:
        _refuse(name, finite & (got != need.value.to(got.dtype)), got, need.value)
        return
    wide, true = wide.where(finite, 0.0), need.value.where(finite, 0.0)
    limit = min(LIMIT[held.dtype], WIDE_LIMIT) if held.shape[-1] >= WIDE else LIMIT[held.dtype]
    allowed = limit * true.norm(dim=-1, keepdim=True) + ROUNDING * need.size.nan_to_num(0.0, 0.0) + FLOOR[held.dtype]
    _refuse(name, ~((wide - true).abs() <= allowed), got, need.value)
    norms = wide.norm() * true.norm()
    assert norms == 0 or (wide * true).sum() / norms >= COSINE[held.dtype], (
        f"{name}: cosine {float((wide * true).sum() / norms)}"
    )


def _refuse(name: str, wrong: Tensor, got: Tensor, need: Tensor) -> None:
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} entries wrong; first at {at}: got {got[at].item()!r}, "
            f"need {need[at].item()!r}"
        )


def agree(
    queries: Any,
    documents: Any,
    *,
    pairs: bool = False,
    exact: bool = False,
    backward: str = "auto",
    upstream: Callable[..., Tensor] | Tensor | None = None,
    quick: bool = False,
    **options: Any,
) -> Step:
    """A step with winners asked for and one without (where 16 bits may hold them), both against the truth; returns the latter.

    `exact`: the tokens are integers, so winners are the first among ties and FP32 sums have no rounding. `quick`: the winners are
    taken as they are.
    """
    maker = upstream if upstream is not None else integers() if exact else normals()
    first = step(queries, documents, maker, pairs=pairs, return_argmax=True, backward=backward, **options)
    assert first.argmax is not None
    assert not first.argmax.requires_grad
    with torch.no_grad():
        if not quick:
            need = truth.oracle(leaf(queries, False), leaf(documents, False), pairs=pairs, **options)
            truth.check_scores(first.scores, need, None if exact else truth.SCORE)
            truth.check_argmax(first.argmax, need, None if exact else truth.SCORE)
        sums = true_gradients(first.upstream, first.argmax, queries, documents, pairs=pairs)
    second = step(queries, documents, first.upstream, pairs=pairs, backward=backward, **options)
    assert same_bits(second.scores, first.scores)
    for label, one in (("with winners", first), ("without winners", second)):
        for name, got, need, tokens in (
            ("dQ", one.query_grad, sums[0], queries),
            ("dD", one.document_grad, sums[1], documents),
        ):
            check(f"{name} {backward} {label}", got, need, tokens, exact)
    return second


def integers(seed: int = 9) -> Callable[..., Tensor]:
    """Maker of upstream gradients whose sums with integer tokens are exact; zero is among them."""
    return lambda *shape: on_gpu.grid(*shape, dtype=SINGLE, seed=seed)


def normals(seed: int = 9) -> Callable[..., Tensor]:
    """Maker of normal upstream gradients."""
    return lambda *shape: on_gpu.gauss(*shape, dtype=SINGLE, seed=seed)
