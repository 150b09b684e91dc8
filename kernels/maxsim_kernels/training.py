"""Training losses on the public `maxsim`: in-batch-negatives cross-entropy, distillation (KL), and a gather for several processes.

Source: paper section 'Training Step' (in-batch negatives: Nq queries against B documents, `[Nq, B]` scores in one step) and the
textbook losses on top of it; gradients reach queries and documents through `maxsim`, so nothing of size `[Nq, B, Lq, Ld]` exists.
The functions are not exported at the top level: `from maxsim_kernels.training import contrastive_loss`.

Scores, temperatures and losses are float32 whatever the tokens' dtype and whatever autocast says. Nothing here waits for a GPU,
except `gather_documents(check=True)`. Degenerate input has one rule, which keeps micro-batches and processes additive: a query
without a usable target (its positive is an empty document, or no candidate is left) adds 0 to the loss, has no gradient, and stays
in the mean's divisor B. A NaN in a valid token stays a NaN in the loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maxsim_kernels.api import maxsim, node_of
from maxsim_kernels.autograd import contrastive
from maxsim_kernels.checks import MASK_DTYPES, Options, is_plain
from maxsim_kernels.needs import describe
from maxsim_kernels.tokens import Packed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def contrastive_loss(
    queries: Tensor | Packed,
    documents: Tensor | Packed,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    positives: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    backward: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """In-batch-negatives cross-entropy: every document but its positive is a negative of a query (paper section 'Training Step').

    `mean_i -log softmax(scores[i] / temperature)[positives[i]]` with `scores = maxsim(queries, documents)`, `[B, N]` float32.

    Args:
        queries: `[B, Lq, d]` or `Packed` of B queries; fp16, bf16 or fp32, B >= 1.
        documents: `[N, Ld, d]` or `Packed` of N documents, of the queries' dtype. Documents beyond the first B are further (hard)
            negatives, or come from other processes (`gather_documents`).
        query_mask, document_mask, query_lengths, document_lengths: as in `maxsim`; `[B, Lq]`, `[N, Ld]`, `[B]`, `[N]`.
        positives: int64 `[B]`, the number of each query's positive document; None: document i is query i's positive, N >= B.
            A number outside 0..N-1 raises on a CPU; on a GPU, which is not waited for, the loss is NaN or torch's gather asserts.
        temperature: above 0; a 0-dimensional float tensor may be learned (its value is not checked).
        backward, impl: as in `maxsim`.

    Returns:
        float32 scalar. Empty documents are no negatives (probability 0); a query whose positive is empty adds 0 and no gradient, the
        mean still divides by B. A query without valid tokens scores 0 everywhere: a constant log N, without gradient.

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """
    batch, device = _queries(queries), queries.device
    if not isinstance(documents, Tensor | Packed) or (isinstance(documents, Tensor) and documents.dim() != 3):
        raise ValueError(f"documents: got {describe(documents)}, need [N, Ld, d] or Packed")
    _check_positives(positives, batch, len(documents), device)
    _check_temperature(temperature, device)
    if not isinstance(temperature, Tensor) and is_plain(positives):
        masks = (query_mask, document_mask, query_lengths, document_lengths)
        node = node_of(queries, documents, Options(*masks, backward=backward, impl=impl))
        if node is not None:
            return contrastive(node, None if positives is None else positives.contiguous(), temperature)
    targets = torch.arange(batch, device=device) if positives is None else positives
    scores = maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        query_lengths=query_lengths,
        document_lengths=document_lengths,
        backward=backward,
        impl=impl,
    )
    assert isinstance(scores, Tensor)
    with torch.autocast(device.type, enabled=False):
        empty = scores == -math.inf
        usable = ~empty.gather(1, targets.unsqueeze(1)).squeeze(1)
        logits = _logits(scores, temperature, empty, usable)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * usable).sum() / batch


def distillation_loss(
    queries: Tensor | Packed,
    documents: Tensor,
    teacher_scores: Tensor,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    candidate_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    backward: str = "auto",
    impl: str = "auto",
) -> Tensor:
    """KL divergence of a student's scores from a teacher's; each query has its own K candidates (layout `[B, K, Ld, d]`).

    `sum_ik p log(p / q) / B` ("batchmean") with `p = softmax(teacher_scores / temperature)` and
    `q = softmax(maxsim(queries, documents) / temperature)`, both over the candidates that count; there is no factor temperature^2.
    A sum over queries: losses of equal micro-batches average to the loss of the whole batch (in-batch negatives do not; paper
    section 'Forward Latency and Memory', on training).

    Args:
        queries: `[B, Lq, d]` or `Packed` of B queries; fp16, bf16 or fp32, B >= 1.
        documents: `[B, K, Ld, d]`, K >= 1 candidates of each query, of the queries' dtype.
        teacher_scores: `[B, K]`, any floating dtype; used in float32, never differentiated. -inf is a target probability of 0: the
            candidate stays in the student's softmax and is pushed down.
        query_mask, document_mask, query_lengths, document_lengths: as in `maxsim`; `[B, Lq]`, `[B, K, Ld]`, `[B]`, `[B, K]`.
        candidate_mask: `[B, K]`, True or 1 where there is a candidate. Others are never read, NaN included.
        temperature: above 0; a 0-dimensional float tensor may be learned (its value is not checked).
        backward, impl: as in `maxsim`.

    Returns:
        float32 scalar, >= 0 up to rounding. Masked candidates and empty documents leave both softmaxes (the teacher's probabilities are
        renormalised over the rest). A query with no candidate left, or whose teacher gives all of them -inf, adds 0 and no gradient;
        the mean still divides by B.

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """
    batch, device = _queries(queries), queries.device
    if not isinstance(documents, Tensor) or documents.dim() != 4 or documents.shape[0] != batch or documents.shape[1] < 1:
        raise ValueError(f"documents: got {describe(documents)}, need [{batch}, K, Ld, d] with K >= 1 for {batch} queries")
    shape = documents.shape[:2]
    _check_candidates("teacher_scores", teacher_scores, shape, device)
    _check_temperature(temperature, device)
    if candidate_mask is not None:
        _check_candidates("candidate_mask", candidate_mask, shape, device)
        document_lengths = _without(candidate_mask, document_lengths, documents)
    scores = maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        query_lengths=query_lengths,
        document_lengths=document_lengths,
        backward=backward,
        impl=impl,
    )
    assert isinstance(scores, Tensor)
    with torch.autocast(device.type, enabled=False):
        left_out = scores == -math.inf
        if candidate_mask is not None:  # their score is not always -inf: an empty query scores 0
            left_out = left_out | (candidate_mask == 0)
        teacher = teacher_scores.detach().float()
        hopeless = left_out | (teacher == -math.inf)
        usable = ~hopeless.all(1)
        log_target = F.log_softmax(_logits(teacher, _value(temperature), hopeless, usable), 1)
        target = log_target.exp()
        log_student = F.log_softmax(_logits(scores, temperature, left_out, usable), 1)
        # 0 log 0 = 0: both logarithms of a left-out candidate are -inf, and so is the target's where the teacher says -inf.
        nothing = target == 0
        terms = target * (log_target.masked_fill(nothing, 0) - log_student.masked_fill(nothing, 0))
        return (terms.sum(1) * usable).sum() / batch


def gather_documents(documents: Tensor, group: ProcessGroup | None = None, *, check: bool = True) -> Tensor:
    """Documents of all processes, in rank order, so that other processes' documents are negatives too; differentiable.

    With `documents = gather_documents(documents)` and `positives = rank * N + arange(B)`, and the gradients of the model averaged as
    `DistributedDataParallel` does, the step is the step of one process on the whole batch: the mean over processes of
    `contrastive_loss` is the loss of the whole batch, and a document's gradient is the sum over the processes that scored it.
    Every process must call it the same number of times, forward and backward, all with documents that need a gradient or none.

    Args:
        documents: `[N, ...]`, any dtype; the same shape and dtype on every process (pad to one Ld). Masks and lengths are gathered with
            the same call.
        group: a process group; None: the default one.
        check: compare shapes and dtypes over the processes first (one small collective and a wait for it); without, unequal shapes are
            undefined.

    Returns:
        `[world * N, ...]` in the input's dtype, bit for bit; gradients are summed over processes in float32 and rounded once.

    Raises:
        ValueError: no process group is initialised, or shapes or dtypes differ (raised on every process).
    """
    import torch.distributed as dist

    if not isinstance(documents, Tensor) or documents.dim() < 1:
        raise ValueError(f"documents: got {describe(documents)}, need [N, ...], a tensor of equal shape on every process")
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: got no initialised process group, need torch.distributed.init_process_group first")
    if check:
        _check_equal_shapes(documents, group)
    gathered = _Gather.apply(documents, group)
    assert isinstance(gathered, Tensor)
    return gathered


class _Gather(torch.autograd.Function):
    """all_gather of bytes, so that every backend takes every dtype; the backward is its transpose, reduce_scatter with a sum."""

    @staticmethod
    def forward(ctx: Any, documents: Tensor, group: ProcessGroup | None) -> Tensor:
        import torch.distributed as dist

        ctx.group, ctx.shape, ctx.dtype = group, documents.shape, documents.dtype
        world = dist.get_world_size(group)
        held = documents.detach().contiguous()
        gathered = held.new_empty(world * held.shape[0], *held.shape[1:])
        if held.numel():
            parts = gathered.view(-1).view(torch.uint8).chunk(world)
            dist.all_gather(list(parts), held.view(-1).view(torch.uint8), group=group)
        if not documents.is_floating_point():
            ctx.mark_non_differentiable(gathered)
        return gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        import torch.distributed as dist

        # Always a buffer of our own: the collective may write into it.
        total = grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(-1)
        own = total.new_empty(math.prod(ctx.shape))
        if own.numel():
            dist.reduce_scatter(own, list(total.chunk(dist.get_world_size(ctx.group))), group=ctx.group)
        return own.view(ctx.shape).to(ctx.dtype), None


def _check_equal_shapes(documents: Tensor, group: ProcessGroup | None) -> None:
    import torch.distributed as dist

    mine = f"{documents.dtype} {list(documents.shape)}".encode()[:128].ljust(128)
    sent = torch.tensor(list(mine), dtype=torch.uint8).to(documents.device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    found = [bytes(row.tolist()).decode().strip() for row in received]
    if len(set(found)) > 1:
        each = ", ".join(f"{what} on rank {rank}" for rank, what in enumerate(found))
        raise ValueError(f"documents: got {each}, need one shape and dtype on every process (pad to one Ld)")


def _queries(queries: object) -> int:
    """The number of queries B; refuses a single query `[Lq, d]` and an empty batch, which `maxsim` allows and a loss does not."""
    if not isinstance(queries, Tensor | Packed) or (isinstance(queries, Tensor) and queries.dim() != 3):
        raise ValueError(f"queries: got {describe(queries)}, need [B, Lq, d] or Packed")
    count = len(queries)
    if count == 0:
        raise ValueError("queries: got 0 queries, need at least 1 (a mean over none is undefined)")
    return count


def _check_positives(positives: Tensor | None, batch: int, count: int, device: torch.device) -> None:
    if positives is None:
        if count < batch:
            raise ValueError(f"documents: got {count} for {batch} queries, need one positive a query (N >= B), or positives=")
        return
    if not isinstance(positives, Tensor) or positives.dtype != torch.int64 or tuple(positives.shape) != (batch,):
        raise ValueError(f"positives: got {describe(positives)}, need int64 [{batch}]")
    if positives.device != device:
        raise ValueError(f"positives: got a tensor on {positives.device}, need one on {device}")
    if device.type == "cpu" and is_plain(positives):  # on a GPU this would wait: the loss is NaN there, or gather asserts
        low, high = int(positives.min()), int(positives.max())
        if low < 0 or high >= count:
            raise ValueError(f"positives: got {low}..{high}, need 0..{count - 1} (the documents)")


def _check_temperature(temperature: float | Tensor, device: torch.device) -> None:
    if isinstance(temperature, Tensor):
        if (
            temperature.dim() != 0
            or not temperature.is_floating_point()
            or temperature.device not in (device, torch.device("cpu"))
        ):
            raise ValueError(f"temperature: got {describe(temperature)} on {temperature.device}, need a float [] on {device}")
    elif isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature: got {temperature!r}, need a finite number above 0")


def _check_candidates(name: str, tensor: object, shape: torch.Size, device: torch.device) -> None:
    if name == "candidate_mask":
        fits, kind = isinstance(tensor, Tensor) and tensor.dtype in MASK_DTYPES, "bool or 0/1 integers"
    else:
        fits, kind = isinstance(tensor, Tensor) and tensor.is_floating_point(), "a floating tensor"
    if not isinstance(tensor, Tensor) or not fits or tensor.shape != shape:
        raise ValueError(f"{name}: got {describe(tensor)}, need {kind} {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, need one on {device}")


def _without(candidate_mask: Tensor, lengths: Tensor | None, documents: Tensor) -> Tensor:
    """Document lengths that make masked candidates empty documents: `maxsim` then never reads them, forward or backward."""
    if lengths is None:
        lengths = torch.full(documents.shape[:2], documents.shape[2], dtype=torch.int32, device=documents.device)
    if not isinstance(lengths, Tensor) or lengths.shape != candidate_mask.shape:
        raise ValueError(f"document_lengths: got {describe(lengths)}, need {list(candidate_mask.shape)}")
    return lengths.masked_fill(candidate_mask == 0, 0)


def _value(temperature: float | Tensor) -> float | Tensor:
    return temperature.detach() if isinstance(temperature, Tensor) else temperature


def _logits(scores: Tensor, temperature: float | Tensor, left_out: Tensor, usable: Tensor) -> Tensor:
    """`scores / temperature`, -inf where left out; a row that is not usable gets 0 there, since softmax of -inf alone is NaN.

    The -inf is put in after the division: the gradient of -inf / temperature with respect to temperature is NaN.
    """
    finite = scores.masked_fill(left_out, 0) / temperature
    return finite.masked_fill(left_out & usable.unsqueeze(1), -math.inf)
