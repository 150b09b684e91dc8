"""Keys of a running top-k (`topk.py`) on a GPU, each step in one launch: torch takes a dozen, and the host's time for each.

The keys are those of `topk.keys_of`: a score's bits, changed so that integers compare as the scores do, above the document's
number counted backwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.gpu.launch import launch
from maxsim_kernels.gpu.tile_ops import keep_nan

_CELLS, _COLUMNS = 1024, 256  # of a program
_NUMBERS = tl.constexpr((1 << 32) - 1)  # the highest number of a document
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _none(like):
    """The key of no document, below all others."""
    return ((like & 0) + 1) << 63


@triton.jit
def _keys(scores, documents):
    """Keys of FP32 scores of documents (int64)."""
    bits = tl.where(scores == 0.0, 0, scores.to(tl.int32, bitcast=True))  # -0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(scores != scores, _NAN, ordered)
    keys = (ordered.to(tl.int64) << 32) + (_NUMBERS - documents)
    return tl.where(scores == float("-inf"), _none(keys), keys)


@triton.jit(do_not_specialize=["groups", "stride"])
def _groups_kernel(score_ptr, out_ptr, groups, stride, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """Keys `[Nq, groups]` of the best of every `SIZE` neighbours: their maximum, and the group's number."""
    blocks = tl.cdiv(groups, GROUPS)
    query = (tl.program_id(0) // blocks).to(tl.int64)
    group = (tl.program_id(0) % blocks).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = query * stride + group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    scores = tl.load(score_ptr + at, mask=(group < groups)[:, None], other=float("-inf"))
    best = tl.reduce(scores, 1, keep_nan)
    tl.store(out_ptr + query * groups + group, _keys(best, group), mask=group < groups)


@triton.jit(do_not_specialize=["held", "members", "whole", "first", "columns", "stride"])
def _candidates_kernel(
    score_ptr, group_ptr, held_ptr, out_ptr, held, members, whole, first, columns, stride,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keys `[Nq, columns]`: those held before, of all members of the chosen groups, and of scores from column `whole` on."""
    blocks = tl.cdiv(columns, COLUMNS)
    query = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    place = column - held
    known, member = place < 0, (place >= 0) & (place < members)
    group = tl.load(group_ptr + query * (members // SIZE) + place // SIZE, mask=there & member, other=0)
    at = tl.where(member, group * SIZE + place % SIZE, (whole + place - members).to(tl.int64))
    scores = tl.load(score_ptr + query * stride + at, mask=there & (known == 0), other=float("-inf"))
    before = tl.load(held_ptr + query * held + column, mask=there & known, other=0)
    keys = tl.where(known, before, _keys(scores, first + at))
    tl.store(out_ptr + query * columns + column, keys, mask=there)


@triton.jit(do_not_specialize=["count"])
def _scores_kernel(key_ptr, score_ptr, index_ptr, lost_ptr, count, LOST: tl.constexpr, CELLS: tl.constexpr):
    """Scores and indices of keys; -inf and -1 where there is no document. `LOST`: 1 is stored at `lost_ptr` if a score is NaN."""
    at = tl.program_id(0).to(tl.int64) * CELLS + tl.arange(0, CELLS)
    there = at < count
    keys = tl.load(key_ptr + at, mask=there, other=0)
    nothing = keys == _none(keys)
    ordered = (keys >> 32).to(tl.int32)
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    if LOST:
        tl.store(lost_ptr + at * 0, tl.full([CELLS], 1, tl.int64), mask=there & (scores != scores) & (nothing == 0))
    tl.store(score_ptr + at, tl.where(nothing, float("-inf"), scores), mask=there)
    tl.store(index_ptr + at, tl.where(nothing, -1, _NUMBERS - (keys & _NUMBERS)), mask=there)


def candidates(scores: Tensor, first: int, k: int, size: int, held: Tensor) -> Tensor:
    """Keys `[Nq, k + c]`: `held` `[Nq, k]`, then those of c documents, among which are the k best of `scores` `[Nq, n]`.

    The c documents are the k groups of `size` neighbours (`topk.group_size`) with the best maxima, and what is left beside whole
    groups. `first`: the number of the first document.
    """
    (queries, count), held = scores.shape, held.contiguous()
    scores = scores if scores.stride(1) == 1 or count == 1 else scores.contiguous()
    whole = count // size * size if size > 1 else 0
    chosen, members = held, 0
    if whole:
        groups, each = whole // size, max(1, _CELLS // size)
        keys = held.new_empty(queries, groups)
        launch(
            _groups_kernel, queries * triton.cdiv(groups, each), scores, keys, groups, scores.stride(0),
            SIZE=size, GROUPS=each, warps=4,
        )  # fmt: skip
        chosen = keys.topk(k, dim=1, sorted=False).indices
        members = k * size
    columns = held.shape[1] + members + count - whole
    out = held.new_empty(queries, columns)
    launch(
        _candidates_kernel, queries * triton.cdiv(columns, _COLUMNS), scores, chosen, held, out, held.shape[1], members, whole,
        first, columns, scores.stride(0), SIZE=size, COLUMNS=_COLUMNS, warps=4,
    )  # fmt: skip
    return out


def of_keys(keys: Tensor, lost: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scores and indices of keys, as `topk.of_keys` gives them. `lost` `[]` int64: set to 1 if a score is NaN."""
    keys = keys.contiguous()
    indices = keys.new_empty(keys.shape)
    scores = keys.new_empty(keys.shape, dtype=torch.float32)
    if keys.numel():
        grid = triton.cdiv(keys.numel(), _CELLS)
        flag = lost if lost is not None else indices
        launch(
            _scores_kernel, grid, keys, scores, indices, flag, keys.numel(), LOST=lost is not None, CELLS=_CELLS, warps=4
        )  # fmt: skip
    return scores, indices
