"""The truth: MaxSim in plain chunked torch, TF32 off, sharing no arithmetic with any fast path.

One matrix product per document (per 4096 of its tokens), maximum, sum: the paper's chunked FP32 einsum (appendix
'Benchmarking Protocol'), differentiable by autograd alone. `dtype=torch.float64` gives the truth for tests; `torch.float32` is the
toolkit's `fp32` path. A document's product has a shape that depends on the document and the set of queries only, so its score does
not depend on where the document stands or how the corpus is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels.checks import Call, Documents, Options, check_padded, check_rows, validate
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.tokens import FLOAT_DTYPES, Fp8Tokens, Int8Tokens, Packed

_DOCUMENT_ROWS = 4096
_QUERY_ROWS = 4096
# Both sides of a product take whole runs of rows: libraries give what is left over to other kernels, which add in another order.
_PADDED_ROWS = 64


@contextmanager
def true_precision() -> Iterator[None]:
    """Run matrix products in the precision of their inputs: no TF32, no BF16 shortcut, no autocast.

    Under `torch.compile` the settings cannot be switched inside the graph: those of the moment it runs hold there.
    """
    if torch.compiler.is_compiling():
        yield
        return
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def maxsim_reference(
    queries: Tensor | Packed,
    documents: Documents,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    return_argmax: bool = False,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
    pairs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """MaxSim scores in `dtype`, computed in `dtype` from the inputs as they are.

    Args: as `maxsim` (`pairs=True`: as `maxsim_pairs`); `backward` and `impl` are checked and change nothing, so that a call can
    be swapped for this one. Quantised documents are dequantised in full, and queries quantised and
    dequantised when `quantize_queries`, so the result is the truth for those codes. Differentiable in float inputs.
    """
    options = Options(
        query_mask, document_mask, query_lengths, document_lengths, return_argmax, quantize_queries, backward, impl, pairs
    )
    return score(queries, documents, options, dtype)


def score(
    queries: Tensor | Packed, documents: Documents, options: Options, dtype: torch.dtype = torch.float32
) -> Tensor | tuple[Tensor, Tensor]:
    """`maxsim_reference` of options that travel together."""
    if isinstance(documents, Int8Tokens | Fp8Tokens):
        plain: Tensor | Packed = documents.dequantize(torch.float64 if dtype == torch.float64 else torch.float32)
        if options.quantize_queries:
            queries = _requantized(queries, isinstance(documents, Fp8Tokens), options.query_mask, options.query_lengths)
        values = plain.values if isinstance(plain, Packed) else plain
        queries = queries.to(values.dtype)
    else:
        plain = documents
    call = validate(queries, plain, options, dtypes=(*FLOAT_DTYPES, torch.float64))
    with true_precision():
        scores, argmax = _scores_of(call, dtype)
    # A sum of nothing ties the scores to the inputs, so that "no valid token anywhere" has a gradient too: zero.
    scores = scores + (call.queries.flatten()[:0].sum() + call.documents.flatten()[:0].sum()).to(dtype)
    if call.single_query:
        scores, argmax = scores[0], argmax[0]
    return (scores, argmax) if call.winners else scores


def _requantized(queries: Tensor | Packed, fp8: bool, mask: Tensor | None, lengths: Tensor | None) -> Tensor | Packed:
    """Queries as the quantised paths see them: one scale a token, whatever the documents' granularity."""
    quantize = quantize_fp8 if fp8 else quantize_int8
    return quantize(queries, "token", mask=mask, lengths=lengths).dequantize()


@dataclass(frozen=True)
class _Row:
    """Valid tokens `[L, d]` of one query or document and their positions `[L]` in it (None: 0, 1, 2, ...)."""

    tokens: Tensor
    positions: Tensor | None
    size: int  # padded length


def _padded_row(tokens: Tensor, mask: Tensor | None, length: Tensor | None) -> _Row:
    size = tokens.shape[0]
    valid: Tensor | None = None
    if mask is not None:
        valid = mask != 0
    if length is not None:
        inside = torch.arange(size, device=tokens.device) < length
        valid = inside if valid is None else valid & inside
    if valid is None:
        return _Row(tokens, None, size)
    positions = valid.nonzero()[:, 0]
    return _Row(tokens[positions], positions, size)


def _rows(name: str, values: Tensor, starts: Tensor | None, lengths: Tensor | None, mask: Tensor | None) -> list[_Row]:
    if starts is not None:
        assert lengths is not None
        check_rows(name, starts, lengths, values.shape[0])
        spans = zip(starts.tolist(), lengths.tolist(), strict=True)
        return [_Row(values[start : start + length], None, length) for start, length in spans]
    check_padded(name, mask, lengths, values.shape[-2])
    return [
        _padded_row(values[n], None if mask is None else mask[n], None if lengths is None else lengths[n])
        for n in range(values.shape[0])
    ]


def _scores_of(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` (pairs: `[N]`) and argmax, int32, the same plus `[max Lq]` (meaningless when not asked for)."""
    queries = _rows("query", call.queries, call.query_starts, call.query_lengths, call.query_mask)
    width = call.queries.shape[1] if call.query_starts is None else max((row.size for row in queries), default=0)
    if call.layout == "per_query":
        parts = []
        for n, query in enumerate(queries):
            mask = None if call.document_mask is None else call.document_mask[n]
            lengths = None if call.document_lengths is None else call.document_lengths[n]
            documents = _rows("document", call.documents[n], None, lengths, mask)
            parts.append(_score_rows([query], documents, width, dtype, call.winners, call.documents.device))
        if not parts:
            count = call.document_count
            empty = torch.zeros(0, count, width, dtype=torch.int32, device=call.documents.device)
            return call.documents.new_zeros(0, count, dtype=dtype), empty
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    documents = _rows("document", call.documents, call.document_starts, call.document_lengths, call.document_mask)
    device = call.documents.device
    if call.layout == "shared":
        return _score_rows(queries, documents, width, dtype, call.winners, device)
    scored = [
        _score_rows([query], [document], width, dtype, call.winners, device)
        for query, document in zip(queries, documents, strict=True)
    ]
    if not scored:
        return call.documents.new_zeros(0, dtype=dtype), torch.zeros(0, width, dtype=torch.int32, device=device)
    return torch.cat([part[0][0] for part in scored]), torch.cat([part[1][0] for part in scored])


def _score_rows(
    queries: list[_Row],
    documents: list[_Row],
    width: int,
    dtype: torch.dtype,
    return_argmax: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Every query against every document: `[Nq, N]`, `[Nq, N, width]`."""
    count, total = len(queries), len(documents)
    argmax = torch.full((count, total, width) if return_argmax else (count, 0), -1, dtype=torch.int32, device=device)
    filled = [n for n, query in enumerate(queries) if query.tokens.shape[0]]
    if not filled or not total:
        return torch.zeros(count, total, dtype=dtype, device=device), argmax
    tokens = torch.cat([queries[n].tokens for n in filled]).to(dtype)
    owner = torch.cat([torch.full((queries[n].tokens.shape[0],), n) for n in filled]).to(device)
    place = torch.cat([_positions(queries[n]) for n in filled]).to(device)
    track = return_argmax or tokens.requires_grad or any(row.tokens.requires_grad for row in documents)
    columns = []
    for number, document in enumerate(documents):
        best, winner = _best(tokens, document.tokens, dtype, track)
        if return_argmax and document.tokens.shape[0]:
            if document.positions is not None:
                winner = document.positions[winner]
            argmax[owner, number, place] = winner.to(torch.int32)
        # One row a query, padded with zeros; summed in float64 so that the order of addition cannot show.
        spread = torch.zeros(count, width, dtype=dtype, device=device).index_put((owner, place), best)
        columns.append(spread.sum(1, dtype=torch.float64).to(dtype))
    return torch.stack(columns, 1), argmax


def _positions(row: _Row) -> Tensor:
    return torch.arange(row.tokens.shape[0]) if row.positions is None else row.positions.cpu()


def _whole(rows: Tensor) -> Tensor:
    """Rows with zero rows behind them, up to a multiple of `_PADDED_ROWS`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _PADDED_ROWS))


def _best(queries: Tensor, document: Tensor, dtype: torch.dtype, track: bool) -> tuple[Tensor, Tensor]:
    """Maximum over the document's tokens for each query token: `[R]` values and, when tracked, `[R]` indices."""
    if document.shape[0] == 0:
        return queries.new_full((queries.shape[0],), -torch.inf), queries.new_zeros(queries.shape[0], dtype=torch.int64)
    values, indices = [], []
    for begin in range(0, queries.shape[0], _QUERY_ROWS):
        block = queries[begin : begin + _QUERY_ROWS]
        columns = _whole(block).t()
        best: Tensor | None = None
        index: Tensor | None = None
        for start in range(0, document.shape[0], _DOCUMENT_ROWS):
            rows = document[start : start + _DOCUMENT_ROWS].to(dtype).contiguous()
            scores = (_whole(rows) @ columns)[: rows.shape[0], : block.shape[0]]
            if not track:  # amax needs no index and is several times faster
                here = scores.amax(0)
                best = here if best is None else torch.maximum(best, here)
                continue
            here, where = scores.max(0)  # the first of equal maxima, and NaN before any number
            where = where + start
            if best is None or index is None:
                best, index = here, where
            else:
                later = (here > best) | (torch.isnan(here) & ~torch.isnan(best))
                best, index = torch.where(later, here, best), torch.where(later, where, index)
        assert best is not None
        values.append(best)
        indices.append(index if index is not None else torch.zeros_like(best, dtype=torch.int64))
    return torch.cat(values), torch.cat(indices)
