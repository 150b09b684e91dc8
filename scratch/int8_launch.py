"""How the candidates of `int8_variants.py` are launched: today's `launch_tiles` from edited text, in Gluon, and by an index of tokens."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from int8_gluon import tiles_kernel
from holes_gather import compact_kernel, gather_kernel
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward import dense, tile_tables
from maxsim_kernels.gpu.forward.combine import combine, row_maxima
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import EIGHT_BITS, flat_queries, flat_rows, hardware, padded, pitch
from maxsim_kernels.gpu.launch import empty, launch

caught: list[Any] | None = None  # a list: launches are noted instead of made


def go(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
    """Launch, or note what would be launched."""
    if caught is not None:
        caught.append((kernel, dict(zip(kernel.arg_names, arguments, strict=False)) | constants, warps, registers))
        return
    if kernel is not tiles_kernel:
        launch(kernel, grid, *arguments, warps=warps, registers=registers, **constants)
        return
    options = {"maxnreg": registers} if registers else {}
    kernel[(grid,)](*arguments, **constants, num_warps=warps, **options)


def codes_of(call: Call) -> tuple[Tensor, Tensor | None]:
    if call.granularity == "none":
        return call.queries, None
    return query_codes(call.queries, call.documents.dtype)


def scores_of(call: Call) -> Tensor:
    return empty((call.query_count, call.document_count), torch.float32, call.queries.device)


# --- today's kernel from edited text ---------------------------------------------------------------------------------------------

_SCALE = '''
@triton.jit
def document_scale(owner_and_last, scale_ptr, documents, splits, STORE_ROWS: tl.constexpr):
    return tl.load(scale_ptr + tl.minimum(owner_and_last >> 1, documents - 1))


@triton.jit
def _cells('''
EDITS: dict[str, list[tuple[str, str]]] = {
    # No division, and a scale that nobody waits for before a document ends.
    "raw": [
        (" document_scale, document_start,", " document_start,"),
        ("\n@triton.jit\ndef _cells(", _SCALE),
        ("            weight = next_weight\n", "            held_weight = next_weight\n"),
        ("            if QUERY_SCALED:\n", "            if QUERY_SCALED:\n                times = weight\n"
         "                if DOCUMENT_SCALED == 1:\n                    times = held_weight.to(tl.float32)\n"),
        ("tl.where(there, weight, 1.0)", "tl.where(there, times, 1.0)"),
        ("document = owner_and_last // 2\n", "document = owner_and_last >> 1\n"),
        ("owner_and_last % 2 == 1", "(owner_and_last & 1) == 1"),
    ],
    # The scale is asked for where a document ends: three programs hide the wait.
    "atend": [
        (" document_scale, document_start,", " document_start,"),
        ("\n@triton.jit\ndef _cells(", _SCALE),
        ("        if DOCUMENT_SCALED == 1:\n            weight = next_weight\n            next_weight = document_scale(entry[1], "
         "scale_ptr, argmax_documents, splits, STORE_ROWS)\n", ""),
        ("            if QUERY_SCALED:\n", "            if QUERY_SCALED:\n                times = weight\n"
         "                if DOCUMENT_SCALED == 1:\n                    times = document_scale(owner_and_last, scale_ptr, "
         "argmax_documents, splits, STORE_ROWS).to(tl.float32)\n"),
        ("tl.where(there, weight, 1.0)", "tl.where(there, times, 1.0)"),
        ("document = owner_and_last // 2\n", "document = owner_and_last >> 1\n"),
        ("owner_and_last % 2 == 1", "(owner_and_last & 1) == 1"),
    ],
}  # fmt: skip
_edited: dict[str, Any] = {}


def edited(name: str) -> Any:
    """The module `dense` with some of its text replaced; every replacement must be found."""
    if name not in _edited:
        text = Path(dense.__file__).read_text(encoding="utf-8")
        for old, new in EDITS[name]:
            if old not in text:
                raise ValueError(f"{name}: {old!r} is not in dense.py")
            text = text.replace(old, new)
        path = Path(tempfile.mkdtemp()) / f"dense_{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"dense_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"dense_{name}"] = module
        spec.loader.exec_module(module)
        _edited[name] = module
    return _edited[name]


def by_text(call: Call, config: Config, name: str) -> Tensor:
    """A call by an edited kernel (`""`: today's)."""
    module = edited(name) if name else dense
    queries, scales = codes_of(call)
    scores = scores_of(call)
    if caught is not None:
        module.launch = go
    module.launch_tiles(call, queries, scales, config, scores, None)
    return scores


# --- Gluon -----------------------------------------------------------------------------------------------------------------------


def by_gluon(call: Call, config: Config, held: bool = False) -> Tensor:
    """A call by `int8_gluon.tiles_kernel`; short ragged documents by today's. `held`: queries in registers."""
    queries, scales = codes_of(call)
    scores = scores_of(call)
    count = call.document_count
    size = call.queries.shape[1]
    total = queries.shape[0] * size
    rows_mode = padded(size) not in (32, 64) or padded(size) * 4 > size * 5
    groups = triton.cdiv(total if rows_mode else queries.shape[0] * padded(size), 2 * config.rows)
    ragged = call.document_starts is not None or call.document_lengths is not None
    assert ragged or call.documents.shape[1] >= config.tokens
    tables: tuple[Any, ...] = tile_tables.tiles_of(call, config.tokens, config.short, 1) if ragged else (None,)
    maxima = row_maxima(total, count, 1, size, scores.device, False) if rows_mode else None
    each = maxima.documents if maxima is not None else count
    for first in range(0, count, each):
        last = min(count, first + each)
        for tiles in tables:
            if tiles is not None and tiles.short:
                if caught is None:
                    dense._launch(call, queries, scales, config, scores, None, maxima, tiles, groups, 1, first, last)
                continue
            _gluon_launch(call, queries, scales, config, scores, maxima, tiles, groups, first, last, held)
        if maxima is not None and caught is None:
            combine(call, maxima, first, last - first, scores, None)
    return scores


def _gluon_launch(
    call: Call, queries: Tensor, scales: Tensor | None, config: Config, scores: Tensor, maxima: Any, tiles: Any, groups: int,
    first: int, last: int, held: bool,
) -> None:  # fmt: skip
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    documents, unused = call.documents, scores
    size_of = documents.element_size()
    width = queries.shape[-1]
    wide = padded(width, 32 if documents.dtype in EIGHT_BITS else 16)
    rows_mode = maxima is not None
    source = flat_queries(queries) if rows_mode else queries
    out = maxima.best if rows_mode else scores
    kind = dense.KINDS[documents.dtype, call.granularity == "token"] if call.granularity != "none" else 0
    size = documents.shape[-2] if documents.dim() == 3 else documents.shape[0] // max(1, call.document_count)
    programs = dense.resident(config, config.tokens, wide * size_of)
    chunks = dense._chunks(last - first, triton.cdiv(size, config.tokens), groups, hardware(scores.device)[1] * programs, tiles)
    element = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv, torch.float16: gl.float16}[documents.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([config.tokens, wide], element)
    rows = flat_rows(call)
    described = TensorDescriptor(documents, [rows, width], [documents.stride(-2), 1], [config.tokens, wide], layout)
    described_scales = described
    if kind >= 2:
        assert call.scales is not None
        line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=1)
        described_scales = TensorDescriptor(call.scales.reshape(-1), [rows], [1], [config.tokens], line)
    go(
        tiles_kernel, groups * chunks,
        source, scales if scales is not None else unused, described, described_scales,
        tiles.table if tiles is not None else unused, tiles.bound if tiles is not None else unused,
        call.scales.contiguous() if call.scales is not None else unused, out,
        1 if rows_mode else queries.shape[0], source.shape[0] if rows_mode else queries.shape[1], first, last,
        documents.shape[-2], pitch(call) if documents.dim() == 3 else 0, width, groups, chunks, out.stride(0),
        tiles.table.shape[0] if tiles is not None else 0, 0 if rows_mode else source.stride(0), source.stride(-2),
        KIND=kind, RAGGED=tiles is not None, QUERY_SCALED=scales is not None,
        DOCUMENT_SCALED={"none": 0, "token": 0, "document": 1, "corpus": 2}[call.granularity], STORE_ROWS=rows_mode,
        PADDED=4 * config.rows if rows_mode else padded(queries.shape[1]), ROWS=config.rows, TOKENS=config.tokens, WIDTH=wide,
        BYTES=size_of, STAGES=config.stages, HELD=held, warps=config.warps, registers=config.registers,
    )  # fmt: skip


# --- holes by an index -----------------------------------------------------------------------------------------------------------


def by_index(call: Call, config: Config) -> Tensor:
    """A call with a mask: documents without holes as today, those with holes by `gather_kernel`.

    For measuring: every document with holes must keep a tile's tokens at least.
    """
    scores = scores_of(call)
    queries, count, documents = call.queries, call.document_count, call.documents
    size = queries.shape[1]
    total = queries.shape[0] * size
    rows_mode = padded(size) not in (32, 64) or padded(size) * 4 > size * 5
    usual = replace(config, rows=128, tokens=64, warps=8, stages=3, programs=3, registers=0)
    ordinary = triton.cdiv(total if rows_mode else queries.shape[0] * padded(size), 2 * usual.rows)
    groups = triton.cdiv(total if rows_mode else queries.shape[0] * padded(size), 2 * config.rows)
    tables = tile_tables.tiles_of(call, usual.tokens, usual.short, 1)
    mask, holed = tables[2].mask, tables[2].bound
    assert mask is not None
    maxima = row_maxima(total, count, 1, size, scores.device, False) if rows_mode else None
    assert maxima is None or maxima.documents == count
    if caught is None:
        for tiles in tables[:2]:
            dense._launch(call, queries, None, usual, scores, None, maxima, tiles, ordinary, 1, 0, count)
    length = documents.shape[1]
    index = empty((count, length), torch.int32, scores.device)
    kept = empty((count,), torch.int32, scores.device)
    go(compact_kernel, triton.cdiv(count, 8), mask, index, kept, count, length, pitch(call), BLOCK=min(256, padded(length)), EACH=8, warps=4)
    # Documents without holes get no tiles here: what they keep is left out by the running sums of the other table.
    if caught is None:
        kept *= (holed[1:] > holed[:-1]).to(torch.int32)
    forged = replace(call, document_mask=None, document_lengths=kept, documents=_stand_in(count, length, scores.device))
    tiles = tile_tables.tiles_of(forged, config.tokens, config.short, 1)[0]
    out = maxima.best if maxima is not None else scores
    source = flat_queries(queries) if rows_mode else queries
    width = queries.shape[-1]
    held = (2 * config.rows + config.stages * config.tokens) * width * 2
    programs = max(1, min(config.programs, dense._SHARED // (held + dense._BESIDE)))
    chunks = dense._chunks(count, triton.cdiv(length, config.tokens), groups, hardware(scores.device)[1] * programs, tiles)
    go(
        gather_kernel, groups * chunks, source, documents, index, tiles.table, tiles.bound, out,
        1 if rows_mode else queries.shape[0], source.shape[0] if rows_mode else size, count, length, width, groups, chunks,
        out.stride(0), tiles.table.shape[0], 0 if rows_mode else source.stride(0), source.stride(-2), documents.stride(-2),
        LARGE=flat_rows(call) * documents.stride(-2) >= 2**31, STORE_ROWS=rows_mode,
        PADDED=4 * config.rows if rows_mode else padded(size), ROWS=config.rows, TOKENS=config.tokens, WIDTH=padded(width),
        STAGES=config.stages, warps=config.warps, registers=config.registers,
    )  # fmt: skip
    if maxima is not None and caught is None:
        combine(call, maxima, 0, count, scores, None)
    return scores


def _stand_in(count: int, length: int, device: torch.device) -> Tensor:
    """For documents `[N, Ld]` of one number each: the index of tokens as the tile tables see it."""
    return torch.empty(count, length, 1, dtype=torch.int8, device=device)
