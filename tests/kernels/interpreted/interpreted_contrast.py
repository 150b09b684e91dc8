"""Run under TRITON_INTERPRET=1 in a process of its own: the contrastive loss as one node of autograd, against float64.

    TRITON_INTERPRET=1 python interpreted_contrast.py GROUP

Scores and winners are the CPU path's; loss, its gradient and the gradients of the tokens (csr) are the GPU's kernels.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import quick_interpreter  # noqa: F401 - kernels run under it
import torch
import torch.nn.functional as F
from torch import Tensor

import tolerances as tol
from maxsim_kernels import Packed, maxsim
from maxsim_kernels.autograd import Node, Route, contrastive
from maxsim_kernels.gpu.backward import contrast

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")
CHECKED: list[str] = []
contrast._BLOCK = 16  # so that few documents, and few queries, take several turns


def drawn(*shape: int, dtype: torch.dtype = SINGLE, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def node(queries: Tensor | Packed, documents: Tensor | Packed, **masks: Any) -> Node:
    """A call as `api.node_of` gives it on a GPU."""
    sides = [one if isinstance(one, Packed) else None for one in (queries, documents)]
    values = [one.values if isinstance(one, Packed) else one for one in (queries, documents)]
    starts = [None if one is None else one.starts for one in sides]
    score = partial(maxsim, queries, documents, return_argmax=True, **masks)
    return Node(values[0], values[1], starts[0], starts[1], Route("shared", "csr", True, True), score)


def wide(*leaves: Tensor) -> list[Tensor]:
    return [one.detach().double().requires_grad_() for one in leaves]


def true_scores(queries: Tensor, documents: Tensor, asked: Tensor | None = None, held: Tensor | None = None) -> Tensor:
    products = torch.einsum("qid,njd->qnij", queries, documents)
    if held is not None:
        products = products.masked_fill(~held[None, :, None], -INF)
    best = products.amax(3)
    return (best if asked is None else best.where(asked[:, None], 0)).sum(2)


def close(what: str, got: Tensor, need: Tensor, dtype: torch.dtype = SINGLE, above: float = 1.0) -> None:
    assert got.dtype == dtype, (what, got.dtype)
    got, need = got.double() / above, need.detach()
    allowed = 50 * tol.SCORE + (tol.GRADIENT_ROUNDING[dtype] if dtype != SINGLE else 0)
    apart, scale = float((got - need).abs().max()), float(need.abs().max()) + 1e-30
    assert apart <= allowed * scale, (what, apart, scale)
    CHECKED.append(what)


def compare(what: str, loss: Tensor, need: Tensor, leaves: list[Tensor], truths: list[Tensor], above: float = 1.0) -> None:
    close(what, loss.detach(), need)
    found = torch.autograd.grad(loss * above, leaves, retain_graph=True)
    for leaf, one, other in zip(leaves, found, torch.autograd.grad(need, truths), strict=True):
        close(what, one, other, leaf.dtype, above)
    again = torch.autograd.grad(loss * above, leaves)
    assert all(map(torch.equal, found, again)), what


def check_values() -> None:
    """Dtypes, counts around a block, temperatures, named positives, loss scales that 16 bits of an unscaled gradient would lose."""
    for number, (batch, documents, dtype, temperature, above) in enumerate((
        (1, 1, SINGLE, 1.0, 1.0), (4, 4, HALF, 1.0, 1.0), (3, 17, SINGLE, 0.05, 1.0), (5, 33, HALF, 0.3, 1024.0),
        (2, 16, BFLOAT, 2.0, 0.5), (17, 18, SINGLE, 1.0, 3.0), (2, 15, HALF, 200_000, 2.0**14),
    )):  # fmt: skip
        for named in (False, True):
            q, d = drawn(batch, 3, 8, dtype=dtype, seed=number), drawn(documents, 5, 8, dtype=dtype, seed=99)
            targets = torch.arange(batch).flip(0) * (documents // batch) if named else torch.arange(batch)
            truths = wide(q, d)
            need = F.cross_entropy(true_scores(*truths) / temperature, targets)
            loss = contrastive(node(q, d), targets if named else None, temperature)
            compare(f"{batch} x {documents} {dtype} {named}", loss, need, [q, d], truths, above)


def check_masks() -> None:
    """Masks, lengths, packed sides; empty documents, empty positives, queries without tokens."""
    q, d = drawn(5, 4, 8), drawn(7, 6, 8, seed=1)
    lengths, asked = torch.tensor([6, 0, 3, 1, 6, 0, 2]), torch.arange(4) < torch.tensor([4, 2, 0, 1, 3])[:, None]
    held = torch.arange(6) < lengths[:, None]
    held[0, 2] = False
    truths = wide(q, d)
    scores = true_scores(*truths, asked, held)
    who = [0, 2, 3, 4, 6]  # documents that are not empty
    terms = F.cross_entropy(scores[:, who] / 0.7, torch.tensor([0, 0, 1, 2, 3]), reduction="none")
    # Query 1's document is empty; query 2 has no token, and scores 0 against empty documents too.
    need = (terms[[0, 3, 4]].sum() + torch.tensor(7.0).log()) / 5
    loss = contrastive(node(q, d, query_mask=asked, document_mask=held, document_lengths=lengths), None, 0.7)
    compare("masks", loss, need, [q, d], truths)
    dq, dd = torch.autograd.grad(contrastive(node(q, d, query_mask=asked, document_lengths=lengths), None, 0.7), (q, d))
    assert dq[1:3].eq(0).all()
    assert dd[[1, 5]].eq(0).all()
    nothing = contrastive(node(q, d, document_lengths=lengths * 0), None, 1.0)
    assert nothing.item() == 0
    assert all(one.eq(0).all() for one in torch.autograd.grad(nothing, (q, d)))
    rows, ends = drawn(13, 8, seed=2), torch.tensor([0, 5, 6, 10, 13])
    asked_rows, starts = drawn(6, 8, seed=3), torch.tensor([0, 1, 4, 6])
    truths = wide(asked_rows, rows)
    parts = [torch.stack([(a @ b.T).amax(1).sum() for b in truths[1].tensor_split(ends[1:-1])])
             for a in truths[0].tensor_split(starts[1:-1])]  # fmt: skip
    need = F.cross_entropy(torch.stack(parts), torch.arange(3))
    compare(
        "packed", contrastive(node(Packed(asked_rows, starts), Packed(rows, ends)), None, 1.0), need, [asked_rows, rows], truths
    )


def check_edges() -> None:
    """NaN is not hidden, no document is NaN, one side alone, gradients in batches, no second derivative."""
    q, d = drawn(3, 4, 8), drawn(4, 6, 8, seed=1)
    broken = d.detach().clone()
    broken[3, 1, 0] = torch.nan
    assert contrastive(node(q, broken), None, 1.0).isnan()
    assert contrastive(node(q, broken, document_lengths=torch.tensor([6, 0, 6, 6])), None, 1.0).isnan()
    for bad in (-1, 4):
        loss = contrastive(node(q, d), torch.tensor([0, bad, 2]), 1.0)
        assert loss.isnan()
        dq, _ = torch.autograd.grad(loss, (q, d))
        assert dq[1].isnan().any()
        assert dq[[0, 2]].isfinite().all()
    both = torch.autograd.grad(contrastive(node(q, d), None, 0.5), (q, d))
    alone = contrastive(node(q, d.detach()), None, 0.5), contrastive(node(q.detach(), d), None, 0.5)
    for loss, leaf, need in zip(alone, (q, d), both, strict=True):
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], need)
    loss = contrastive(node(q, d, document_lengths=torch.tensor([6, 6, 6, 0])), torch.tensor([2, 1, 3]), 0.5)
    need = torch.autograd.grad(loss, (q, d), retain_graph=True)
    above = torch.tensor([1.0, -2.0])
    for one, other in zip(torch.autograd.grad(loss, (q, d), above, is_grads_batched=True), need, strict=True):
        close("batched", one, (above.view(2, 1, 1, 1) * other).double())
    (dq,) = torch.autograd.grad(contrastive(node(q, d), None, 1.0), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
    CHECKED.append("second derivative")


GROUPS = {"values": check_values, "masks": check_masks, "edges": check_edges}
if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
