"""Fused MaxSim forward in Triton: every query row against every document, one pass, a running maximum in registers.

Two kernels, both exact with FP32 accumulation (paper Alg. 1):

- `_blocks_kernel`: any documents (dense or ragged, masked, any strides). A program holds a block of query rows and walks over
  documents; 64-bit addresses, loads masked by the document's length. Bound by reading documents when query rows are few.
- `_uniform_kernel`: unmasked documents of one length, many query rows. Documents arrive by tensor descriptors (TMA) in one flat loop
  over tiles, so the pipeline never drains between documents; two query tiles share each document tile. A document's last tile is
  moved back to overlap the one before it, because a maximum does not mind seeing a token twice.

Query rows: a query is padded to a power of two of rows, so a block holds several short queries, or a part of a long one, whose partial
sums are then added in one fixed order.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels.checks import Call
from maxsim_kernels.tuning import Config, configuration

_WIDEST = 256  # embedding width these kernels hold in one tile
_STREAM_ROWS = 64  # up to here the call is bound by reading documents


@triton.jit
def _keep_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _query_rows(block, query_count, query_size, blocks_per_query, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Query and token of each row of a block, and whether the row exists."""
    row = tl.arange(0, ROWS)
    if PADDED <= ROWS:
        query = block * (ROWS // PADDED) + row // PADDED
        token = row % PADDED
    else:
        query = block // blocks_per_query + row * 0
        token = (block % blocks_per_query) * ROWS + row
    return query, token, (token < query_size) & (query < query_count)


@triton.jit
def _store_sums(out_ptr, best, valid, block, document, documents, limit, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Sum the maxima of each query of the block (masked rows add 0) and store one number a query, or one for the part."""
    kept = tl.where(valid, best, 0.0)
    if PADDED <= ROWS:
        sums = tl.sum(tl.reshape(kept, [ROWS // PADDED, PADDED]), 1)
        query = block * (ROWS // PADDED) + tl.arange(0, ROWS // PADDED)
        tl.store(out_ptr + query.to(tl.int64) * documents + document, sums, mask=query < limit)
    elif block < limit:
        tl.store(out_ptr + block.to(tl.int64) * documents + document, tl.sum(kept, 0))


@triton.jit
def _blocks_kernel(
    query_ptr, query_length_ptr, query_mask_ptr, document_ptr, start_ptr, length_ptr, mask_ptr, out_ptr,
    query_count, query_size, blocks_per_query, out_limit, documents, document_size, width,
    stride_qn, stride_qt, stride_qd, stride_n, stride_t, stride_d,
    RAGGED: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr,
    HAS_QUERY_MASK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    query, token, valid = _query_rows(block, query_count, query_size, blocks_per_query, PADDED, ROWS)
    if HAS_QUERY_LENGTHS:
        valid = valid & (token < tl.load(query_length_ptr + query, mask=valid, other=0))
    if HAS_QUERY_MASK:
        valid = valid & (tl.load(query_mask_ptr + query.to(tl.int64) * query_size + token, mask=valid, other=0) != 0)
    inner = tl.arange(0, WIDTH)
    address = (
        query.to(tl.int64)[:, None] * stride_qn
        + token.to(tl.int64)[:, None] * stride_qt
        + inner.to(tl.int64)[None, :] * stride_qd
    )
    rows = tl.load(query_ptr + address, mask=valid[:, None] & (inner < width)[None, :], other=0.0)
    for document in range(tl.program_id(0), documents, tl.num_programs(0)):
        number = tl.full([], 0, tl.int64) + document
        if RAGGED:
            base = document_ptr + tl.load(start_ptr + number).to(tl.int64) * stride_t
            length = tl.maximum(tl.load(length_ptr + number).to(tl.int32), 0)
        else:
            base = document_ptr + number * stride_n
            length = document_size
            if HAS_LENGTHS:
                length = tl.minimum(tl.maximum(tl.load(length_ptr + number).to(tl.int32), 0), document_size)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        for first in tl.range(0, length, TOKENS, num_stages=STAGES):
            place = first + tl.arange(0, TOKENS)
            inside = place < length
            if HAS_MASK:
                inside = inside & (tl.load(mask_ptr + number * document_size + place, mask=inside, other=0) != 0)
            source = base + place.to(tl.int64)[None, :] * stride_t + inner.to(tl.int64)[:, None] * stride_d
            tokens = tl.load(source, mask=inside[None, :] & (inner < width)[:, None], other=0.0)
            cells = tl.dot(rows, tokens, input_precision=PRECISION)
            cells = tl.where(inside[None, :], cells, float("-inf"))
            best = _keep_nan(best, tl.reduce(cells, 1, _keep_nan))
        _store_sums(out_ptr, best, valid, block, document, documents, out_limit, PADDED, ROWS)


@triton.jit
def _uniform_kernel(
    query_ptr, query_length_ptr, query_mask_ptr, document_desc, out_ptr,
    query_count, query_size, blocks_per_query, out_limit, documents, document_size, width, pair_count, documents_a_program,
    stride_qn, stride_qt, stride_qd,
    HAS_QUERY_LENGTHS: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) % pair_count  # neighbours share documents in L2
    chunk = tl.program_id(0) // pair_count
    query0, token0, valid0 = _query_rows(pair * 2, query_count, query_size, blocks_per_query, PADDED, ROWS)
    query1, token1, valid1 = _query_rows(pair * 2 + 1, query_count, query_size, blocks_per_query, PADDED, ROWS)
    if HAS_QUERY_LENGTHS:
        valid0 = valid0 & (token0 < tl.load(query_length_ptr + query0, mask=valid0, other=0))
        valid1 = valid1 & (token1 < tl.load(query_length_ptr + query1, mask=valid1, other=0))
    if HAS_QUERY_MASK:
        valid0 = valid0 & (tl.load(query_mask_ptr + query0.to(tl.int64) * query_size + token0, mask=valid0, other=0) != 0)
        valid1 = valid1 & (tl.load(query_mask_ptr + query1.to(tl.int64) * query_size + token1, mask=valid1, other=0) != 0)
    inner = tl.arange(0, WIDTH)
    across = inner.to(tl.int64)[None, :] * stride_qd
    place0 = query0.to(tl.int64)[:, None] * stride_qn + token0.to(tl.int64)[:, None] * stride_qt + across
    place1 = query1.to(tl.int64)[:, None] * stride_qn + token1.to(tl.int64)[:, None] * stride_qt + across
    rows0 = tl.load(query_ptr + place0, mask=valid0[:, None] & (inner < width)[None, :], other=0.0)
    rows1 = tl.load(query_ptr + place1, mask=valid1[:, None] & (inner < width)[None, :], other=0.0)
    best0 = tl.full([ROWS], float("-inf"), tl.float32)
    best1 = tl.full([ROWS], float("-inf"), tl.float32)
    first = chunk * documents_a_program
    last = tl.minimum(first + documents_a_program, documents)
    tiles = tl.cdiv(document_size, TOKENS)
    for step in tl.range(0, (last - first) * tiles, num_stages=STAGES):
        document = first + step // tiles
        tile = step % tiles
        row = document * document_size + tl.minimum(tile * TOKENS, tl.maximum(document_size - TOKENS, 0))
        tokens = document_desc.load([row, 0])
        cells0 = tl.dot(rows0, tokens.T)
        if SHORT:
            cells0 = tl.where((tl.arange(0, TOKENS) < document_size)[None, :], cells0, float("-inf"))
        best0 = _keep_nan(best0, tl.reduce(cells0, 1, _keep_nan))
        cells1 = tl.dot(rows1, tokens.T)
        if SHORT:
            cells1 = tl.where((tl.arange(0, TOKENS) < document_size)[None, :], cells1, float("-inf"))
        best1 = _keep_nan(best1, tl.reduce(cells1, 1, _keep_nan))
        if tile == tiles - 1:
            _store_sums(out_ptr, best0, valid0, pair * 2, document, documents, out_limit, PADDED, ROWS)
            _store_sums(out_ptr, best1, valid1, pair * 2 + 1, document, documents, out_limit, PADDED, ROWS)
            best0 = tl.full([ROWS], float("-inf"), tl.float32)
            best1 = tl.full([ROWS], float("-inf"), tl.float32)


def supported(call: Call) -> str:
    """Why these kernels cannot take a call, or an empty string when they can. Shapes and dtypes only."""
    if call.layout != "shared":
        return f"no fused GPU kernel for the {call.layout} layout yet"
    if call.granularity != "none":
        return "no fused GPU kernel for quantised documents yet"
    if call.query_starts is not None:
        return "no fused GPU kernel for packed queries yet"
    if call.queries.shape[-1] > _WIDEST:
        return f"no fused GPU kernel for d = {call.queries.shape[-1]} yet (at most {_WIDEST})"
    return ""


def variant(call: Call, capability: tuple[int, int]) -> tuple[str, Config]:
    """Which kernel a call takes and how it is launched: "uniform", "blocks" or "stream" (blocks with few rows)."""
    few = call.query_count * _padded(call.queries.shape[1]) <= _STREAM_ROWS
    uniform = configuration("uniform", capability)
    if not few and uniform is not None and _is_uniform(call):
        return "uniform", uniform
    name = "stream" if few else "blocks"
    # FP32 tiles take twice the shared memory: the safe row, whose tiles are half as large in both directions, fits them.
    config = configuration(name, capability if call.queries.dtype != torch.float32 else (0, 0))
    assert config is not None  # these two have a safe row
    return name, config


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _is_uniform(call: Call) -> bool:
    """Whether documents are one aligned, unmasked block that a tensor descriptor can describe."""
    documents = call.documents
    if call.document_starts is not None or call.document_mask is not None or call.document_lengths is not None:
        return False
    if documents.dtype == torch.float32 or documents.shape[1] == 0 or documents.shape[0] == 0 or call.queries.shape[2] > 128:
        return False
    rows = documents.shape[0] * documents.shape[1]
    dense = documents.stride(2) == 1 and documents.stride(0) == documents.shape[1] * documents.stride(1)
    aligned = documents.stride(1) * documents.element_size() % 16 == 0 and documents.data_ptr() % 16 == 0
    return dense and aligned and rows < 2**31 - 2**16


def forward(call: Call) -> Tensor:
    """Scores `[Nq, N]` float32 of a call that `supported` accepts."""
    count, size, _ = call.queries.shape
    documents = call.document_count
    if count == 0 or documents == 0:
        return call.queries.new_empty(count, documents, dtype=torch.float32)
    if size == 0:
        return call.queries.new_zeros(count, documents, dtype=torch.float32)
    device = call.queries.device
    kind, config = variant(call, _hardware(device)[0])
    padded = _padded(size)
    rows = max(16, min(config.rows, padded * triton.next_power_of_2(count)))
    per_query = triton.cdiv(size, rows) if padded > rows else 1
    blocks = count * per_query if padded > rows else triton.cdiv(count, rows // padded)
    out = torch.empty(count * per_query, documents, dtype=torch.float32, device=device)
    launch = _launch_uniform if kind == "uniform" else _launch_blocks
    # Triton launches on the current device, which need not be the tensors' one.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch(call, config, out, rows, min(padded, 2 * rows), per_query, blocks)
    # Parts of a long query are added in one fixed order.
    return out if per_query == 1 else out.view(count, per_query, documents).sum(1)


def _query_masks(call: Call) -> tuple[Tensor, Tensor]:
    lengths = call.query_lengths if call.query_lengths is not None else call.queries
    mask = call.query_mask.contiguous() if call.query_mask is not None else call.queries
    return lengths, mask.view(torch.uint8) if mask.dtype == torch.bool else mask


@lru_cache
def _hardware(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors; asking the driver on every call would cost more than a launch."""
    if device.type != "cuda":
        return (0, 0), 1
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


def _launch_blocks(call: Call, config: Config, out: Tensor, rows: int, padded: int, per_query: int, blocks: int) -> None:
    documents, queries = call.documents, call.queries
    ragged = call.document_starts is not None
    query_lengths, query_mask = _query_masks(call)
    lengths = call.document_lengths if call.document_lengths is not None else queries
    mask = call.document_mask.contiguous() if call.document_mask is not None else queries
    programs = max(1, min(call.document_count, _hardware(out.device)[1] * config.programs))
    # torch decides whether FP32 inputs may use TF32; by default they may not.
    tf32 = queries.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    _blocks_kernel[(programs, blocks)](
        queries, query_lengths, query_mask, documents, call.document_starts if ragged else queries, lengths,
        mask.view(torch.uint8) if mask.dtype == torch.bool else mask, out,
        queries.shape[0], queries.shape[1], per_query, out.shape[0], call.document_count,
        0 if ragged else documents.shape[1], queries.shape[2],
        queries.stride(0), queries.stride(1), queries.stride(2),
        0 if ragged else documents.stride(0), documents.stride(-2), documents.stride(-1),
        RAGGED=ragged, HAS_LENGTHS=not ragged and call.document_lengths is not None, HAS_MASK=call.document_mask is not None,
        HAS_QUERY_LENGTHS=call.query_lengths is not None, HAS_QUERY_MASK=call.query_mask is not None,
        PADDED=padded, ROWS=rows, TOKENS=config.tokens, WIDTH=_padded(queries.shape[2]), STAGES=config.stages,
        PRECISION="tf32" if tf32 else "ieee", num_warps=config.warps,
    )  # fmt: skip


def _launch_uniform(call: Call, config: Config, out: Tensor, rows: int, padded: int, per_query: int, blocks: int) -> None:
    documents, queries = call.documents, call.queries
    count, size, width = documents.shape
    held = _padded(width)
    flat = documents.as_strided((count * size, width), (documents.stride(1), 1))
    desc = TensorDescriptor(flat, [count * size, width], [documents.stride(1), 1], [config.tokens, held])
    query_lengths, query_mask = _query_masks(call)
    pairs = triton.cdiv(blocks, 2)
    chunks = max(1, min(count, triton.cdiv(_hardware(out.device)[1] * config.programs, pairs)))
    each = triton.cdiv(count, chunks)
    _uniform_kernel[(pairs * triton.cdiv(count, each),)](
        queries, query_lengths, query_mask, desc, out,
        queries.shape[0], queries.shape[1], per_query, out.shape[0], count, size, width, pairs, each,
        queries.stride(0), queries.stride(1), queries.stride(2),
        HAS_QUERY_LENGTHS=call.query_lengths is not None, HAS_QUERY_MASK=call.query_mask is not None,
        PADDED=padded, ROWS=rows, TOKENS=config.tokens, WIDTH=held, STAGES=config.stages, SHORT=size < config.tokens,
        num_warps=config.warps,
    )  # fmt: skip
