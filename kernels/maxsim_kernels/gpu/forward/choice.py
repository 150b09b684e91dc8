"""Which kernel takes a call, in which configuration: a function of shapes, dtypes, strides, the hardware, and torch's setting of TF32,
and of what `tune` found on this GPU (`tuned.py`), which changes no bit.

`choose` decides in this order: few query rows -> "stream" (bound by reading documents); documents that a tensor descriptor can
describe -> "dense", "ragged" or "wide"; everything else -> "general". The number of documents never decides the kernel. It does
decide the tile of "stream" (`_stream_tile`), whether a program takes one document or several, and whether floats are compared by
their bits. None of these changes a bit of a score: products are the same in the same order, maxima are exact, sums are in FP64
(whose order could show only where maxima of one query are 2^23 apart and cancel). So a document gets the same bits however a
corpus is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

import torch

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward.tuned import answers, question
from maxsim_kernels.gpu.forward.tuning import Config, Key, Row, row_of
from maxsim_kernels.gpu.geometry import (
    MANY,
    SHORT_TOKENS,
    Hardware,
    allows_tf32,
    flat_rows,
    has_descriptors,
    many_short,
    padded,
    pitch,
)

STREAM_ROWS = 64  # up to here a call is bound by reading documents
_NARROW_ROWS = 128  # up to here two tiles of 64 rows hold them all
_LONG_TOKENS = 512  # documents from here on are read in larger pieces
_FEW, _SOME = 4, MANY  # documents a multiprocessor: up to here its programs are too few to hide each other's waits
_FEW_TOKENS = 2000  # tokens of ragged documents a multiprocessor: up to here too
_BRIEF_TOKENS = 704  # documents up to here spend much of their time on sums, stores and the rest of their last tile
_SMALL_TILE = 64  # tokens; the other tiles of codes have twice as many
_LONG_RAGGED = 384  # mean tokens of ragged documents from which on few of their tiles are last ones
_TILE_BYTES = 256  # most bytes of a token in the kernels that hold whole tokens
_MEANS = (1, SHORT_TOKENS, 96, 160, 256, _LONG_TOKENS)  # mean tokens from which on "stream" may be launched otherwise
_BITS_PAY = 1 << 27  # cells of a call from which integer maxima of floats save more than their second launch takes
_VIEW_TOKENS = 1 << 15  # most tokens of a buffer whose views get a tile table: each view may be as long as the buffer


class Launch(NamedTuple):
    """A kernel ("stream", "general", "dense", "ragged" or "wide"; of few bits "coded", "coded once") and its configuration."""

    kernel: str
    config: Config


class Asked(NamedTuple):
    """Keys of a call, most special first, its documents, and their mean tokens."""

    keys: tuple[Key, ...]
    documents: int
    mean: int


def choose(call: Call, hardware: Hardware) -> Launch:
    """The launch that scores a call on a GPU."""
    return _choose(call, hardware, call.document_count, _mean_tokens(call))


def every_choice(call: Call, hardware: Hardware) -> list[Launch]:
    """All that `choose` gives such calls, by number and (packed) mean length of documents; empty where neither counts."""
    kernel, processors, packed = choose(call, hardware).kernel, hardware[1], call.document_starts is not None
    numbers: tuple[int, ...] = ()
    means: tuple[int, ...] = (_mean_tokens(call),)
    if kernel in ("dense", "ragged"):
        numbers = (1, _BITS_PAY)
        means = (1, _LONG_RAGGED) if packed else means
    if kernel == "stream":
        numbers = (1, *(times * processors + 1 for times in (_FEW, 2 * _FEW, _SOME)))
        means = _MEANS if packed else means
    return list(dict.fromkeys(_choose(call, hardware, number, mean) for number in numbers for mean in means))


def _choose(call: Call, hardware: Hardware, documents: int, mean: int) -> Launch:
    """The launch as if there were `documents` of `mean` tokens in the mean: by what was tuned on this GPU, else by the table."""
    tuned = answers(call.queries.device)
    for key in _keys(call, hardware, documents, mean):
        row = (tuned.get(question(call, key, mean)) if tuned else None) or row_of(key, hardware[0])
        if row is not None:
            return as_launched(call, row, hardware[1], documents, mean)
    raise AssertionError("the last key has a safe row")


def asked(call: Call, hardware: Hardware) -> Asked:
    """What `tune` needs to try other configurations of a call: its keys, and the number and mean length of its documents."""
    documents, mean = call.document_count, _mean_tokens(call)
    return Asked(_keys(call, hardware, documents, mean), documents, mean)


def as_launched(call: Call, row: Row, processors: int, documents: int, mean: int) -> Launch:
    """The launch that a row of the table becomes for a call of `documents` documents of `mean` tokens in the mean."""
    if row.kernel != "stream":
        cells = call.queries.numel() // call.queries.shape[-1] * documents * mean
        bits = row.kernel in ("dense", "ragged") and cells >= _BITS_PAY
        return Launch(row.kernel, replace(row.config, bits=True) if bits else row.config)
    # A program for every document: a kernel without the loop over documents takes half the registers. Many documents that are
    # short, or meet more than 32 rows, are dealt to fewer programs, which read the query once for all of theirs.
    dealt = many_short(documents, mean, processors) or (_query_rows(call) > 32 and documents > _SOME * processors)
    return Launch("stream", row.config if dealt else replace(row.config, programs=0))


def _keys(call: Call, hardware: Hardware, documents: int, mean: int) -> tuple[Key, ...]:
    """Keys of a call; the first that has a row takes it."""
    capability, processors = hardware
    codes = call.granularity != "none" and call.quantize_queries
    exact = call.queries.dtype == torch.float32 and not codes and not allows_tf32(call)
    plain = not exact and call.query_starts is None and call.layout == "shared" and not call.winners
    if plain and _query_rows(call) <= STREAM_ROWS:
        return (Key("stream", size=_stream_tile(call, processors, documents, mean)),)
    operands, any_layout = _operands(call), Key("exact" if exact else "general")
    if operands and not exact and has_descriptors(capability) and not _unbounded(call):
        return _tile_key(call, operands, mean), any_layout
    return (any_layout,)


def _tile_key(call: Call, operands: str, tokens: int) -> Key:
    """The key of a call that a descriptor kernel can take; `tokens` of a document (or mean). Every tile gives the same bits.

    Dense documents are "tiny" below a small tile, "short" below two (codes: other tiles are twice as large); of a few more tiles
    they are "odd" where the number of small ones is, so that the last large one would be half empty, else "brief". Ragged
    documents are "long" by their mean. Narrow: few query rows.
    """
    narrow = call.queries.shape[0] * (1 if call.query_starts is not None else call.queries.shape[1]) <= _NARROW_ROWS
    if operands == "tf32" or call.documents.shape[-1] * call.documents.element_size() > _TILE_BYTES:
        kernel, size = "wide", ""
    elif call.document_starts is not None or call.document_lengths is not None or call.document_mask is not None:
        kernel, size = "ragged", "long" if tokens >= _LONG_RAGGED else ""
    elif tokens > _BRIEF_TOKENS:
        kernel, size = "dense", ""
    elif tokens < 2 * _SMALL_TILE:
        kernel, size = "dense", "tiny" if tokens < _SMALL_TILE else "short"
    else:
        kernel, size = "dense", "odd" if -(-tokens // _SMALL_TILE) % 2 else "brief"
    return Key(kernel, operands, size, narrow, call.winners)


def _stream_tile(call: Call, processors: int, count: int, mean: int) -> str:
    """Tokens x warps for few query rows, from swept H200 times: fewer documents want more warps on each.

    Many documents hide each other's waits in small programs ("" and "ragged": 16 tokens, one warp); of few, the longest decides. FP8
    keeps one tile for every number of documents: its products have other bits in tiles of other warps.
    """
    ragged = call.document_starts is not None
    few, some = count <= _FEW * processors, count <= _SOME * processors
    many = "ragged" if ragged else ""
    rows, width = _query_rows(call), call.queries.shape[-1]
    if call.documents.dtype == torch.int8 and call.quantize_queries:
        wider = mean >= _LONG_TOKENS or rows > 32 or (some if ragged else call.granularity == "token")
        return "64 x 4" if few or width > 512 else "32 x 1" if wider else many
    if call.granularity != "none":
        return "64 x 4" if mean >= _LONG_TOKENS and not ragged else many
    if few or width > 256:  # beyond 256, tokens come in slices
        return "64 x 4"
    if width > 128:
        return many if ragged and rows <= 32 and not some else "32 x 4"
    if rows > 32:
        return "64 x 4" if mean >= 160 else "32 x 4"
    if not ragged:
        return "64 x 4" if mean >= _LONG_TOKENS else many
    if count <= 2 * _FEW * processors and count * mean <= _FEW_TOKENS * processors:
        return "64 x 4"
    if mean >= 256 or (mean >= 96 and not some):
        return "32 x 1"
    return "32 x 2" if some else many


def stream_class(documents: int, mean: int, processors: int) -> tuple[int, ...]:
    """What the choice for few query rows sees of the number of documents and their mean length: calls equal here are launched alike.

    It holds how both compare with the numbers in `_stream_tile` and `as_launched`, and the power of two of a tuned answer
    (`question`).
    """
    few = _FEW * processors
    number = (documents > few) + (documents > 2 * few) + (documents > _SOME * processors)
    return number, documents * mean <= _FEW_TOKENS * processors, bisect_right(_MEANS, mean), (mean - 1).bit_length()


def _query_rows(call: Call) -> int:
    """Rows of all queries, each padded to a power of two."""
    return call.queries.shape[0] * padded(call.queries.shape[1])


def _mean_tokens(call: Call) -> int:
    """Tokens a document; 0 of views into a buffer, whose lengths the host does not know."""
    if call.document_starts is None:
        return call.documents.shape[1]
    return call.documents.shape[0] // max(1, call.document_count) if call.end_to_end else 0


def _unbounded(call: Call) -> bool:
    """Whether documents are views into a buffer too large to bound their tiles by, however many documents there are."""
    return call.document_starts is not None and not call.end_to_end and call.documents.shape[0] > _VIEW_TOKENS


def _operands(call: Call) -> str:
    """What a descriptor kernel would multiply ("float", "tf32", "int8", ...); empty where it cannot describe the documents."""
    documents = call.documents
    if call.layout != "shared" or call.offset is not None:
        return ""
    if call.granularity != "none" and not call.quantize_queries:
        return ""
    if (documents.dtype == torch.float32 and not allows_tf32(call)) or documents.numel() == 0 or call.queries.numel() == 0:
        return ""
    size, stride = documents.element_size(), documents.stride(-2)
    aligned = stride * size % 16 == 0 and documents.data_ptr() % 16 == 0 and stride >= documents.shape[-1]
    rows = flat_rows(call)
    if call.document_mask is not None:  # as places in the list of tokens that count
        rows = max(rows, call.document_count * (documents.shape[1] + 2 * _SMALL_TILE))
    if documents.stride(-1) != 1 or not aligned or rows >= 2**31 - 2**16:
        return ""
    if documents.dim() == 3 and (
        documents.stride(0) % stride or (call.granularity == "token" and pitch(call) != documents.shape[1])
    ):
        return ""
    if call.query_starts is not None and call.queries.shape[0] > 4096 + 256 * call.query_count:
        return ""  # a view of few queries into a large buffer: rows of the whole buffer would be scored
    if call.granularity == "token" and call.scales is not None and call.scales.dtype.itemsize > 2:
        return ""  # the one-FMA form needs scales of few bits (dense.py)
    codes = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float32: "tf32"}
    return codes.get(documents.dtype, "float") + (" token" if call.granularity == "token" else "")
