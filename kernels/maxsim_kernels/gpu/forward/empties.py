"""Scores of empty documents, where a call names them: libraries rank such documents by a value of their own, not by -inf.

A launch after that of the scores reads lengths and mask, and writes the columns (where each query has documents of its own: the
cells) of documents without a token that counts. Torch would take three launches: to find them, to negate that, and to fill.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.geometry import byte_mask, padded
from maxsim_kernels.gpu.launch import launch

_DOCUMENTS, _CELLS = 16, 4096  # documents that a program looks at; cells of their mask that it reads at once


@triton.jit(do_not_specialize=["documents", "size", "rows", "value"])
def _empties_kernel(
    mask_ptr, length_ptr, out_ptr, documents, size, rows, value, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    inside = document < documents
    length = tl.zeros([EACH], tl.int64) + size
    if HAS_LENGTHS:
        length = tl.load(length_ptr + document, mask=inside, other=0).to(tl.int64)
    some = (length > 0).to(tl.int32)
    if HAS_MASK:
        some = tl.zeros([EACH], tl.int32)
        for first in range(0, size, BLOCK):
            place = first + tl.arange(0, BLOCK).to(tl.int64)
            there = inside[:, None] & (place[None, :] < length[:, None]) & (place < size)[None, :]
            counted = tl.load(mask_ptr + document[:, None] * size + place[None, :], mask=there, other=0) != 0
            some = tl.maximum(some, tl.max(counted.to(tl.int32), 1))
    none = inside & (some == 0)
    if tl.max(none.to(tl.int32), 0) > 0:
        for row in range(rows):
            tl.store(out_ptr + (tl.full([], 0, tl.int64) + row) * documents + document, value, mask=none)


def fill_empty(call: Call, scores: Tensor, value: float) -> None:
    """Write `value` as the scores `[Nq, N]` (pairs: `[N, 1]`; one after the other in memory) of empty documents."""
    mask, lengths = call.document_mask, call.document_lengths
    packed = call.document_starts is not None
    if packed and lengths is not None:
        lengths = lengths.contiguous()
    size = 0 if packed else call.documents.shape[-2]
    if mask is None and lengths is None and size:
        return
    shared = call.layout == "shared"
    documents = call.document_count if shared else scores.numel()
    launch(
        _empties_kernel, triton.cdiv(documents, _DOCUMENTS),
        byte_mask(mask, scores), lengths if lengths is not None else scores, scores, documents, size,
        scores.shape[0] if shared else 1, value,
        HAS_MASK=mask is not None, HAS_LENGTHS=lengths is not None, EACH=_DOCUMENTS,
        BLOCK=min(padded(max(1, size)), _CELLS // _DOCUMENTS), warps=4,
    )  # fmt: skip
