"""Launching the Triton kernel that takes a call (`choice.py`). All follows from shapes, dtypes and strides, so nothing waits for
the GPU, but for winners of packed queries: how long the longest query is, only the GPU knows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward import dense, general, wide
from maxsim_kernels.gpu.forward.choice import Launch, choose
from maxsim_kernels.gpu.forward.empties import fill_empty
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.forward.unaligned import spread
from maxsim_kernels.gpu.geometry import OTHER, hardware
from maxsim_kernels.gpu.launch import empty, unrecorded
from maxsim_kernels.gpu.plans import ensure_context
from maxsim_kernels.modes import capturing


def supported(call: Call, capability: tuple[int, int]) -> str:
    """Why no kernel can take a call, or an empty string. Shapes and dtypes only.

    Other makers' GPUs have no compute capability; Triton widens FP8 to FP16 where they do not multiply it.
    """
    if call.documents.dtype == torch.float8_e4m3fn and OTHER != capability < (8, 9):
        return f"FP8 needs compute capability 8.9 or higher, this GPU has {capability[0]}.{capability[1]}; INT8 runs everywhere"
    return ""


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` (pairs: `[N]`) of dtype `call.out`, and winners `[..., max Lq]` or empty, of a call that `supported` accepts.

    Winners are int32, or of a `lean` call int16 holding the low 16 bits (read by `inverse_grid.winner_of`).
    """
    count, documents, device, winners = call.query_count, call.document_count, call.queries.device, call.winners
    refused = supported(call, hardware(device)[0])
    if refused:
        raise ValueError(f"documents: got {call.documents.dtype}, need another dtype on this GPU: {refused}")
    pairs = call.layout == "pairs"
    shape = (count, 1 if pairs else documents)
    scores = empty(shape, call.out, device)  # a kernel's store rounds to what it stores into
    size = call.queries.shape[1] if call.query_starts is None else (_longest(call) if winners else 0)
    kept = torch.int16 if call.lean else torch.int32
    argmax = empty((*shape, size), kept, device) if winners else torch.empty(0, dtype=kept, device=device)
    if scores.numel():
        if device.type == "cuda":
            ensure_context(device.index or 0)
        # Triton launches on the current device, which need not be the tensors' one.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            launch(call, scores, argmax if winners else None, choose(call, hardware(device)))
            if call.empty_score is not None:
                fill_empty(call, scores, call.empty_score)
    if pairs:
        scores, argmax = scores[:, 0], argmax[:, 0] if winners else argmax
    return scores, argmax


def with_plain_rows(call: Call) -> Call:
    """The call with contiguous starts and lengths, as the kernels read them; nearly every call has them so."""
    held = (call.query_starts, call.query_lengths, call.document_starts, call.document_lengths)
    if all(one is None or one.is_contiguous() for one in held):
        return call
    query_starts, query_lengths, document_starts, document_lengths = (None if one is None else one.contiguous() for one in held)
    return replace(
        call,
        query_starts=query_starts,
        query_lengths=query_lengths,
        document_starts=document_starts,
        document_lengths=document_lengths,
    )


def _longest(call: Call) -> int:
    """Tokens of the longest packed query, which shape the winners: read from the device, which nothing else waits for."""
    assert call.query_lengths is not None
    if capturing():
        raise RuntimeError(
            "queries: got packed ones whose winners are wanted (return_argmax, or a gradient) while a CUDA graph is captured, which "
            "cannot read how long the longest is: need padded queries with query_lengths"
        )
    unrecorded()
    return min(int(call.query_lengths.max()), call.queries.shape[0]) if call.query_lengths.numel() else 0


def launch(call: Call, scores: Tensor, argmax: Tensor | None, chosen: Launch) -> None:
    """Score a call by a kernel that can take it."""
    call = with_plain_rows(call)
    if call.query_starts is None and call.queries.shape[1] == 0:
        scores.zero_()
        unrecorded()
        return
    codes = call.granularity != "none" and call.quantize_queries
    queries, scales = query_codes(call.queries, call.documents.dtype) if codes else (call.queries, None)
    name, config = spread(chosen, call, queries)
    if name in ("dense", "ragged"):
        dense.launch_tiles(call, queries, scales, config, scores, argmax)
    elif name == "wide":
        wide.launch_wide(call, queries, scales, config, scores, argmax)
    else:
        general.launch_general(call, queries, scales, config, scores, argmax, name == "stream")
