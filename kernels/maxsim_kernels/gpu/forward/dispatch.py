"""Which Triton kernel takes a call, and its launch. Everything here follows from shapes, dtypes and strides: nothing waits for the GPU.

`variant` decides, in this order: few query rows -> "stream" (bound by reading documents); documents that a tensor descriptor can
describe -> "dense", "ragged" or "wide"; everything else -> "general". The kernel never depends on the number of documents. The tile of
the first one does (`stream_row`), and whether a program has one document or several (`stream_config`), which changes no bit: the same
products in the same order, maxima, sums in FP64 (whose order could show only where maxima of one query are 2^23 apart and cancel). So a
document gets the same bits however a corpus is cut.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward import dense, general, wide
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.forward.tuning import Config, configuration
from maxsim_kernels.gpu.geometry import MANY, SHORT_TOKENS, flat_rows, hardware, many_short, padded, pitch
from maxsim_kernels.gpu.launch import empty, ensure_context, unrecorded

_STREAM_ROWS = 64  # up to here a call is bound by reading documents
_NARROW_ROWS = 128  # up to here two tiles of 64 rows hold them all
_LONG_TOKENS = 512  # documents from here on are read in larger pieces
_FEW, _SOME = 4, MANY  # documents a multiprocessor: up to here its programs are too few to hide each other's waits
_FEW_TOKENS = 2000  # of ragged documents, a multiprocessor: up to here too
_BRIEF_TOKENS = 704  # documents up to here spend much of their time on sums, stores and the rest of their last tile
_SMALL_TILE = 64  # tokens; the other tiles of codes have twice as many
_LONG_RAGGED = 384  # ragged documents whose last tiles are few
_TILE_BYTES = 256  # of a token, in the kernels that hold whole tokens
_VIEW_TOKENS = 1 << 15  # of a buffer whose views get a tile table: without offsets each document may be as long as the buffer


def supported(call: Call, capability: tuple[int, int]) -> str:
    """Why no kernel can take a call, or an empty string. Shapes and dtypes only."""
    if call.documents.dtype == torch.float8_e4m3fn and capability < (8, 9):
        return f"FP8 needs compute capability 8.9 or higher, this GPU has {capability[0]}.{capability[1]}; INT8 runs everywhere"
    return ""


def variant(call: Call, capability: tuple[int, int], winners: bool = False, mean: int | None = None) -> tuple[str, Config]:
    """The kernel ("stream", "general", "dense", "ragged" or "wide") and its row of the table. `mean`: as if documents were so long."""
    exact = call.queries.dtype == torch.float32 and not (call.granularity != "none" and call.quantize_queries)
    packed = call.query_starts is not None
    plain = not exact and not packed and call.layout == "shared" and not winners
    if plain and _query_rows(call) <= _STREAM_ROWS:
        return "stream", stream_config(call, capability)
    kind = _tiled_kind(call)
    if kind and not exact and capability >= (9, 0):
        ragged = call.document_starts is not None or call.document_lengths is not None
        if call.documents.shape[-1] * call.documents.element_size() > _TILE_BYTES:
            name = "wide"
        else:
            name = "ragged" if ragged else "dense"
        sizes = tile_sizes(call, name, winners, mean)
        rows = (configuration(f"{name} {kind}{size}", capability) for size in sizes)
        found = next((row for row in rows if row is not None), None)
        if found is not None and not _unbounded(call):
            return name, found
    return "general", _row("exact" if exact else "general", capability)


def tile_sizes(call: Call, name: str, winners: bool, mean: int | None = None) -> list[str]:
    """Ends of names of rows of the table for a descriptor kernel, the most special first: the first one that there is counts.

    Every tile gives the same bits. Dense documents: "tiny" below a small tile and "short" below two (of codes, whose other tiles are
    twice as large), "masked" as tiny (of floats); "odd" of few small tiles, whose number is odd or which are short, so that large
    tiles would be half empty; "brief" of few tiles. Ragged ones: "long" in the mean. Queries: "narrow" of few rows.
    """
    rows = call.queries.shape[0] * (1 if call.query_starts is not None else call.queries.shape[1])
    tokens, found = _mean_tokens(call) if mean is None else mean, []
    brief = name == "dense" and tokens <= _BRIEF_TOKENS
    tiny, short = tokens < _SMALL_TILE, tokens < 2 * _SMALL_TILE
    if brief:
        odd = short or -(-tokens // _SMALL_TILE) % 2
        found += [end for end, holds in (("tiny", tiny), ("short", short), ("odd", odd)) if holds]
    if name == "ragged" and tokens >= _LONG_RAGGED:
        found.append("long")
    if rows <= _NARROW_ROWS:
        found.append("narrow")
    if brief:
        found += (["masked"] if tiny else []) + ["brief"]
    ends = [*(f" {size}" for size in found), ""]
    return [end + also for end in ends for also in ((" winners", "") if winners else ("",))]


def stream_row(call: Call, documents: int | None = None, mean: int | None = None) -> str:
    """The row of the table for few query rows, from swept H200 times: fewer documents want more warps on each.

    Many documents hide each other's waits in small programs; of few, the longest decides. FP8 keeps one row for every number of
    documents: its products have other bits in tiles of other warps. `documents`, `mean`: as if there were so many, so long.
    """
    processors = hardware(call.queries.device)[1]
    count, ragged = documents or call.document_count, call.document_starts is not None
    mean = _mean_tokens(call) if mean is None else mean
    few, some = count <= _FEW * processors, count <= _SOME * processors
    many = "stream ragged" if ragged else "stream"
    rows, width = _query_rows(call), call.queries.shape[-1]
    if call.documents.dtype == torch.int8 and call.quantize_queries:
        wider = mean >= _LONG_TOKENS or rows > 32 or (some if ragged else call.granularity == "token")
        return "stream 64 x 4" if few or width > 512 else "stream 32 x 1" if wider else many
    if call.granularity != "none":
        return "stream 64 x 4" if mean >= _LONG_TOKENS and not ragged else many
    if few or width > 256:  # beyond 256, tokens come in slices
        return "stream 64 x 4"
    if width > 128:
        return many if ragged and rows <= 32 and not some else "stream 32 x 4"
    if rows > 32:
        return "stream 64 x 4" if mean >= 160 else "stream 32 x 4"
    if not ragged:
        return "stream 64 x 4" if mean >= _LONG_TOKENS else many
    if count <= 2 * _FEW * processors and count * mean <= _FEW_TOKENS * processors:
        return "stream 64 x 4"
    if mean >= 256 or (mean >= 96 and not some):
        return "stream 32 x 1"
    return "stream 32 x 2" if some else many


def stream_config(call: Call, capability: tuple[int, int], documents: int | None = None, mean: int | None = None) -> Config:
    """The row of `stream_row`, with a program for every document: a kernel without the loop over documents takes half the registers.

    Many documents that are short, or meet more than 32 rows, are dealt to fewer programs, which read the query once for all of theirs.
    """
    config = configuration(stream_row(call, documents, mean), capability) or _row("stream", capability)
    count, processors = documents or call.document_count, hardware(call.queries.device)[1]
    mean = _mean_tokens(call) if mean is None else mean
    dealt = many_short(count, mean, processors) or (_query_rows(call) > 32 and count > _SOME * processors)
    return config if dealt else replace(config, programs=0)


def _query_rows(call: Call) -> int:
    """Rows of all queries, each padded to a power of two."""
    return call.queries.shape[0] * padded(call.queries.shape[1])


def _mean_tokens(call: Call) -> int:
    """Tokens a document; 0 of views into a buffer, whose lengths the host does not know."""
    if call.document_starts is None:
        return call.documents.shape[1]
    return call.documents.shape[0] // max(1, call.document_count) if call.end_to_end else 0


def every_choice(call: Call, winners: bool = False) -> list[tuple[str, Config]]:
    """What `variant` says of such calls by number of documents and (packed) mean length; nothing where neither counts."""
    capability, processors = hardware(call.queries.device)
    name = variant(call, capability, winners)[0]
    packed = call.document_starts is not None
    if name == "ragged" and packed:
        return list(dict.fromkeys(variant(call, capability, winners, mean) for mean in (1, _LONG_RAGGED)))
    if name != "stream":
        return []
    numbers = (1, *(times * processors + 1 for times in (_FEW, 2 * _FEW, _SOME)))
    means = (1, SHORT_TOKENS, 96, 160, 256, _LONG_TOKENS) if packed else (None,)
    found = dict.fromkeys(stream_config(call, capability, documents, mean) for documents in numbers for mean in means)
    return [("stream", config) for config in found]


def _row(name: str, capability: tuple[int, int]) -> Config:
    found = configuration(name, capability)
    assert found is not None  # these have a safe row
    return found


def _unbounded(call: Call) -> bool:
    """Whether documents are views into a buffer too large to bound their tiles by; says nothing about how many there are."""
    return call.document_starts is not None and not call.end_to_end and call.documents.shape[0] > _VIEW_TOKENS


def _tiled_kind(call: Call) -> str:
    """What a descriptor kernel would multiply ("float", "int8", "fp8 token", ...); empty where it cannot describe the documents."""
    documents = call.documents
    if call.layout != "shared" or call.document_mask is not None or call.offset is not None:
        return ""
    if call.granularity != "none" and not call.quantize_queries:
        return ""
    if documents.dtype == torch.float32 or documents.numel() == 0 or call.queries.numel() == 0:
        return ""
    size, stride = documents.element_size(), documents.stride(-2)
    aligned = stride * size % 16 == 0 and documents.data_ptr() % 16 == 0 and stride >= documents.shape[-1]
    if documents.stride(-1) != 1 or not aligned or flat_rows(call) >= 2**31 - 2**16:
        return ""
    if documents.dim() == 3 and (
        documents.stride(0) % stride or (call.granularity == "token" and pitch(call) != documents.shape[1])
    ):
        return ""
    if call.query_starts is not None and call.queries.shape[0] > 4096 + 256 * call.query_count:
        return ""  # a view of few queries into a large buffer: rows of the whole buffer would be scored
    if call.granularity == "token" and call.scales is not None and call.scales.dtype.itemsize > 2:
        return ""  # the one-FMA form needs scales of few bits (dense.py)
    kinds = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    return kinds.get(documents.dtype, "float") + (" token" if call.granularity == "token" else "")


def forward(call: Call, winners: bool, lean: bool = False) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` (pairs: `[N]`) float32, and winners `[..., max Lq]` or empty, of a call that `supported` accepts.

    Winners are int32, or with `lean` int16 holding the low 16 bits (read by `inverse_grid.winner_of`).
    """
    count, documents, device = call.query_count, call.document_count, call.queries.device
    refused = supported(call, hardware(device)[0])
    if refused:
        raise ValueError(f"documents: got {call.documents.dtype}, need another dtype on this GPU: {refused}")
    pairs = call.layout == "pairs"
    shape = (count, 1 if pairs else documents)
    scores = empty(shape, torch.float32, device)
    size = call.queries.shape[1] if call.query_starts is None else (_longest(call) if winners else 0)
    kept = torch.int16 if lean else torch.int32
    argmax = empty((*shape, size), kept, device) if winners else torch.empty(0, dtype=kept, device=device)
    if scores.numel():
        if device.type == "cuda":
            ensure_context(device.index or 0)
        # Triton launches on the current device, which need not be the tensors' one.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            launch(call, scores, argmax if winners else None)
    if pairs:
        scores, argmax = scores[:, 0], argmax[:, 0] if winners else argmax
    return scores, argmax


def _with_plain_rows(call: Call) -> Call:
    """Starts and lengths one after the other in memory, as the kernels read them; they rarely are not."""
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
    """The longest packed query: the shape of its winners is a value on the device, so this, alone, waits for it."""
    assert call.query_lengths is not None
    unrecorded()
    return min(int(call.query_lengths.max()), call.queries.shape[0]) if call.query_lengths.numel() else 0


def launch(call: Call, scores: Tensor, argmax: Tensor | None, chosen: tuple[str, Config] | None = None) -> None:
    """Score a call by its kernel, or by the one `chosen`, which must be able to take it."""
    call = _with_plain_rows(call)
    if call.query_starts is None and call.queries.shape[1] == 0:
        scores.zero_()
        unrecorded()
        return
    name, config = chosen or variant(call, hardware(call.queries.device)[0], argmax is not None)
    codes = call.granularity != "none" and call.quantize_queries
    queries, scales = query_codes(call.queries, call.documents.dtype) if codes else (call.queries, None)
    if name in ("dense", "ragged"):
        dense.launch_tiles(call, queries, scales, config, scores, argmax)
    elif name == "wide":
        wide.launch_wide(call, queries, scales, config, scores, argmax)
    else:
        general.launch_general(call, queries, scales, config, scores, argmax, name == "stream")
