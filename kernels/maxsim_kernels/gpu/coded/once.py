"""The kernel for residual tokens and many query rows: a tile of tokens is decoded once, and meets all query rows, from L2.

A program holds a tile of a document's tokens, decoded in registers as in `coded.py`, and walks over blocks of query rows. The maxima
of a document's first tile are written, those of later ones merged into them by the same program. Where documents are few, several
programs decode the same one, each for its share of the query rows. Decoding takes far longer than the product, so it is paid for once a
token rather than once a token and block of query rows.

Source: Santhanam et al. 2022, ColBERTv2, section 3.3; paper Alg. 1 for the maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from maxsim_kernels.coded import ResidualTokens
from maxsim_kernels.gpu.coded.unpacking import centroids_of, extent, per_length, unpack
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import padded
from maxsim_kernels.gpu.launch import launch
from maxsim_kernels.gpu.tile_ops import FLOAT, best_along, keep_nan, load_rows


@triton.jit(do_not_specialize=["query_total", "documents", "token_total", "centroids", "parts", "workers"])
def _once_kernel(
    query_ptr, byte_ptr, start_ptr, length_ptr, id_ptr, centroid_ptr, weight_ptr, out_ptr,
    query_total, documents, token_total, centroids, bytes, width, parts, workers, out_stride,
    stride_qt, stride_qd, stride_t, stride_b,
    BITS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maxima `[documents, query_total]` of every query row in every document."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    part = tl.program_id(0) % parts
    for document in range(tl.program_id(0) // parts, documents, workers):
        start, length = extent(start_ptr, length_ptr, document, token_total)
        for first in range(0, tl.maximum(length, 1), TOKENS):  # no token: -inf is written all the same
            place = first + tl.arange(0, TOKENS)
            inside = place < length
            token = start + place
            centroid, factor = centroids_of(id_ptr, token, inside, centroid_ptr, centroids, width)
            tokens, squares = unpack(
                byte_ptr, token, inside, 0, centroid, weight_ptr, bytes, width, stride_t, stride_b,
                DTYPE, BITS, True, UNIT, TOKENS, WIDTH,
            )  # fmt: skip
            if UNIT:
                factor = per_length(factor, squares)
            for block in tl.range(part * ROWS, query_total, parts * ROWS, num_stages=STAGES):
                row = block + tl.arange(0, ROWS)
                valid = row < query_total
                rows = load_rows(query_ptr, row * 0, row, valid, width, 0, stride_qt, stride_qd, WIDTH)
                cells = tl.dot(rows, tokens.T) * factor[None, :]
                best = best_along(tl.where(inside[None, :], cells, float("-inf")), 1, FLOAT)
                target = out_ptr + (tl.full([], 0, tl.int64) + document) * out_stride + row
                if first > 0:
                    best = keep_nan(best, tl.load(target, mask=valid, other=0.0))
                tl.store(target, best, mask=valid)
            tl.debug_barrier()  # what this tile has written is read by other threads at the next one


def maxima_once(
    queries: Tensor, documents: ResidualTokens, tables: tuple[Tensor, ...], starts: Tensor, lengths: Tensor, best: Tensor,
    config: Config, processors: int,
) -> None:  # fmt: skip
    """Write the maxima `[len(starts), R]` of the query rows `[R, d]` in the documents that lie at `starts`.

    `tables`: the ids, centroids and weights of `documents`, contiguous.
    """
    codes, width, rows, count = documents.codes.values, documents.dim, queries.shape[0], len(starts)
    programs = processors * config.programs
    parts = min(triton.cdiv(rows, config.rows), triton.cdiv(programs, count))
    workers = min(count, triton.cdiv(programs, parts))
    launch(
        _once_kernel, parts * workers, queries, codes, starts, lengths, *tables, best,
        rows, count, codes.shape[0], len(documents.centroids), codes.shape[1], width, parts, workers, best.stride(0),
        queries.stride(0), queries.stride(1), codes.stride(0), codes.stride(1),
        BITS=documents.bits, UNIT=documents.unit, ROWS=config.rows, TOKENS=config.tokens, WIDTH=padded(width), STAGES=config.stages,
        warps=config.warps,
    )  # fmt: skip
