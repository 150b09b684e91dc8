"""Fast exact MaxSim on the CPU: tiles of one fixed, padded shape, a running maximum per tile, never the similarity tensor.

Query tokens are the rows of a matrix; document tokens stream past in tiles that hold whole documents (a longer document is cut into
pieces; `tiles.py`); with many queries each thread takes the next tile when it is done with one (`turns.py`). A tile's product stays
in cache and is reduced at once, so memory beyond inputs and scores is a few tens of megabytes whatever the corpus, 5 of them a thread.
Tiles of wide tokens hold fewer, so that a tile's tokens take 66 MB at most where threads share it, else 33 MB a thread, whatever d is
(`few.py` takes up to twice as much for a moment, when it tries a shape for the first time).
FP16 and BF16 tokens are widened tile by tile (their products are exact in FP32), INT8 codes meet INT8 query codes in exact integer
products (`torch._int_mm`; as floats where a CPU gets those wrong or makes them slowly, `integers.py`), and scales are applied after the
product.

Bits: every product has the same shape for a given set of queries. Shapes are those whose cells the matrix library adds in one order
wherever they stand, and the inner dimension is cut likewise; a document's score then does not depend on its place, its neighbours, the
cut of the corpus or the other queries. Few documents take one smaller product where it was seen to have the same bits (`few.py`).

Source: paper Alg. 1 (fused forward), section 'INT8'; tile sizes measured by `benchmarks/cpu_forward.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.checks import Call, check_padded, check_rows
from maxsim_kernels.cpu.corpus import Corpus, before, spans
from maxsim_kernels.cpu.tiles import Queries, maxima, padded_rows, summed
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.tokens import distinct_rows
from maxsim_kernels.turns import in_turns

_QUERY_ROWS = 8192  # query tokens held at once
_GROUP_TOKENS = 1 << 18  # document tokens planned at once
_GROUP_CELLS = 1 << 22  # (query token, document piece) maxima held at once: 16 MB
_SHARED_SUM = 1 << 19  # maxima, from which on threads share adding them up: half a millisecond


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` float32 and argmax int32 `[Nq, N, max Lq]` (empty when not asked for); shared and per-query layouts."""
    check_values(call)
    count, total = call.query_count, call.document_count
    scores = torch.empty(count, total, dtype=torch.float32, device="cpu")
    argmax = torch.full((count, total, query_width(call)) if call.winners else (0,), -1, dtype=torch.int32, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if call.layout == "shared":
            for first, block in query_blocks(call):
                for at, corpus in corpora(call, None):
                    _score_corpus(block, corpus, first, at, scores, argmax if call.winners else None)
        else:
            for query in range(count):
                block = _queries(call, [query])
                for at, corpus in corpora(call, query):
                    _score_corpus(block, corpus, query, at, scores, argmax if call.winners else None)
    return scores, argmax


def check_values(call: Call) -> None:
    """Check the values of offsets, lengths and masks of both sides."""
    sides = (
        ("query", call.queries, call.query_starts, call.query_lengths, call.query_mask),
        ("document", call.documents, call.document_starts, call.document_lengths, call.document_mask),
    )
    for name, values, starts, lengths, mask in sides:
        if starts is not None:
            assert lengths is not None
            check_rows(name, starts, lengths, values.shape[0])
        else:
            check_padded(f"{name}_", mask, lengths, values.shape[-2])


def query_width(call: Call) -> int:
    """The padded query length: the argmax's last dimension."""
    if call.query_starts is None:
        return call.queries.shape[1]
    assert call.query_lengths is not None
    return int(call.query_lengths.max()) if call.query_lengths.numel() else 0


def _packed_tokens(call: Call, query: int) -> tuple[Tensor, Tensor]:
    """Tokens `[L, d]` of one packed query, in the dtype given, and their positions `[L]`."""
    assert call.query_starts is not None
    assert call.query_lengths is not None
    start, length = int(call.query_starts[query]), int(call.query_lengths[query])
    return call.queries[start : start + length], torch.arange(length, device="cpu")


def query_blocks(call: Call) -> Iterator[tuple[int, Queries]]:
    """Consecutive queries of about `_QUERY_ROWS` tokens; a longer query is a block of its own."""
    longest = max(1, query_width(call))
    step = max(1, _QUERY_ROWS // longest)
    for first in range(0, call.query_count, step):
        yield first, _queries(call, range(first, min(first + step, call.query_count)))


def _padded_tokens(call: Call, first: int, last: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Valid tokens `[T, d]` of padded queries one after the other, their positions `[T]`, and how many each query has."""
    block = call.queries[first:last]
    count, size, width = block.shape
    mask = None if call.query_mask is None else call.query_mask[first:last]
    length = None if call.query_lengths is None else call.query_lengths[first:last, None]
    valid = _valid(mask, length, count, size)
    if valid is None:
        return block.reshape(count * size, width), np.tile(np.arange(size), count), np.full(count, size)
    index = valid.view(-1).nonzero()[:, 0]
    return block.reshape(count * size, width)[index], (index % max(1, size)).numpy(), valid.sum(1).numpy()


def _valid(mask: Tensor | None, lengths: Tensor | None, count: int, size: int) -> Tensor | None:
    """Which tokens of padded rows count, `[N, L]`; None where all do. `lengths`: `[N, 1]`."""
    if mask is None and lengths is None:
        return None
    valid = (
        torch.ones(count, size, dtype=torch.bool, device="cpu")
        if mask is None
        else mask
        if mask.dtype == torch.bool
        else mask != 0
    )
    return (valid if lengths is None else valid & (torch.arange(size, device="cpu") < lengths)).contiguous()


def _queries(call: Call, numbers: range | list[int]) -> Queries:
    if call.query_starts is None and numbers:
        tokens, places, sizes = _padded_tokens(call, numbers[0], numbers[-1] + 1)
        ends = np.cumsum(sizes).tolist()
    else:
        parts = [_packed_tokens(call, number) for number in numbers]
        ends = np.cumsum([part.shape[0] for part, _ in parts]).tolist()
        tokens = torch.cat([part for part, _ in parts]) if parts else call.queries.new_empty(0, call.queries.shape[-1])
        places = torch.cat([place for _, place in parts]).numpy() if parts else np.empty(0, np.int64)
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    which = np.arange(len(tokens))
    if (found := distinct_rows(tokens)) is not None:
        tokens, which = found[0], found[1].numpy()
    rows = len(tokens)
    matrix, scales = quantized_queries(call, tokens)
    padded = padded_rows(rows, matrix.dtype)
    full = torch.zeros(padded, matrix.shape[1], dtype=matrix.dtype, device="cpu")
    full[:rows] = matrix
    sums = None
    if call.offset is not None:
        sums = full.sum(1, keepdim=True, dtype=torch.float64).float().numpy()
    spread = None
    if scales is not None:
        spread = np.ones((padded, 1), np.float32)
        spread[:rows, 0] = scales.numpy()
    return Queries(full, bounds, which, places, spread, sums)


def quantized_queries(call: Call, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Query tokens `[R, d]` as the products take them (int8 codes or float32), and their scales `[R]` when quantised."""
    if call.granularity == "none" or not call.quantize_queries:
        return tokens.float(), None
    if call.documents.dtype == torch.int8:
        codes = quantize_int8(tokens)
        # torch._int_mm returns garbage at d = 1; there, and only there, codes are multiplied as floats, exactly.
        return codes.token_values.float() if tokens.shape[1] == 1 else codes.token_values, codes.scales.float()
    fp8 = quantize_fp8(tokens, "token")
    return fp8.token_values.float(), fp8.scales.float()


def corpora(call: Call, query: int | None) -> Iterator[tuple[int, Corpus]]:
    """The documents (of one query, for per-query layouts) in groups whose plan fits in memory: (first document, group)."""
    values, mask, lengths = call.documents, call.document_mask, call.document_lengths
    scales, offset = call.scales, call.offset
    if query is not None:
        values = values[query]
        mask = None if mask is None else mask[query]
        lengths = None if lengths is None else lengths[query]
        if call.granularity != "corpus":
            scales = None if scales is None else scales[query]
            offset = None if offset is None else offset[query]
    if call.document_starts is not None:
        assert lengths is not None
        yield from _packed_groups(call, values, lengths, scales, offset)
        return
    size = values.shape[1]
    step = max(1, _GROUP_TOKENS // max(1, size))
    for first in range(0, values.shape[0], step):
        span = slice(first, min(first + step, values.shape[0]))
        block = values[span]
        count = block.shape[0]
        flat = block.reshape(count * size, block.shape[-1])  # a view wherever the strides allow one
        index = places = None
        sizes = np.full(count, size, np.int64)
        within = (None if mask is None else mask[span]), (None if lengths is None else lengths[span, None])
        valid = _valid(*within, count, size)
        if valid is not None:
            index = valid.view(-1).nonzero()[:, 0]
            sizes = valid.sum(1).numpy()
            places = (index % max(1, size)).numpy()
        starts = before(sizes)
        uniform = size if index is None and size else None
        yield first, _corpus(call, flat, starts, sizes, index, places, uniform, scales, offset, span)


def _packed_groups(
    call: Call, values: Tensor, lengths: Tensor, scales: Tensor | None, offset: Tensor | None
) -> Iterator[tuple[int, Corpus]]:
    assert call.document_starts is not None
    begins, sizes = call.document_starts.numpy().astype(np.int64), lengths.numpy().astype(np.int64)
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        stop = max(first + 1, int(np.searchsorted(ends, ends[first] - sizes[first] + _GROUP_TOKENS, side="right")))
        span = slice(first, stop)
        size, begin = sizes[span], begins[span]
        starts = before(size)
        if np.array_equal(begin, begin[0] + starts):
            flat, index = values[int(begin[0]) : int(begin[0] + size.sum())], None
        else:
            flat, index = values, torch.from_numpy(spans(begin, size))
        token_span = slice(int(begin[0]), int(begin[0] + size.sum())) if index is None else slice(None)
        if call.granularity == "token":
            yield first, _corpus(call, flat, starts, size, index, None, None, scales, offset, token_span)
        else:
            yield first, _corpus(call, flat, starts, size, index, None, None, scales, offset, span)
        first = stop


def _corpus(
    call: Call,
    flat: Tensor,
    starts: np.ndarray,
    sizes: np.ndarray,
    index: Tensor | None,
    places: np.ndarray | None,
    uniform: int | None,
    scales: Tensor | None,
    offset: Tensor | None,
    span: slice,
) -> Corpus:
    """A `Corpus` with the scales and offsets of its documents (or tokens), which are `span` of all."""
    token = (
        [None if t is None else t[span].reshape(-1).float() for t in (scales, offset)]
        if call.granularity == "token"
        else [None] * 2
    )
    document: list[np.ndarray | None] = [None, None]
    if call.granularity == "document":
        document = [None if t is None else t[span].float().numpy() for t in (scales, offset)]
    elif call.granularity == "corpus":
        document = [None if t is None else np.full(len(sizes), float(t), np.float32) for t in (scales, offset)]
    return Corpus(flat, starts, sizes, index, places, uniform, token[0], token[1], document[0], document[1])


def _score_corpus(
    queries: Queries,
    corpus: Corpus,
    first_query: int,
    first_document: int,
    scores: Tensor,
    argmax: Tensor | None,
) -> None:
    """Score a block of queries against a group of documents, in steps whose maxima fit in memory."""
    step = max(1, _GROUP_CELLS // queries.matrix.shape[0])
    asked = slice(first_query, first_query + len(queries.bounds))
    for begin in range(0, len(corpus.lengths), step):
        stop = min(begin + step, len(corpus.lengths))
        best, winners = maxima(queries, corpus, begin, stop, argmax is not None)
        columns = slice(first_document + begin, first_document + stop)
        add = partial(_add, queries, best, winners, corpus.lengths[begin:stop] == 0, scores[asked, columns])
        add = partial(add, None if argmax is None else argmax[asked, columns])
        if len(queries.rows) * (stop - begin) > _SHARED_SUM:
            in_turns(add, range(len(queries.bounds)))
        else:
            add(range(len(queries.bounds)))


def _add(
    queries: Queries,
    best: np.ndarray,
    winners: np.ndarray | None,
    empty: np.ndarray,
    scores: Tensor,
    argmax: Tensor | None,
    numbers: Iterable[int],
) -> None:
    """Add up the maxima `best` `[R, n]` of a block's queries `numbers`, into its `scores` `[Q, n]` and `argmax` `[Q, n, W]`.

    `empty` `[n]`: which documents have no tokens.
    """
    for number in numbers:
        low, high = queries.bounds[number]
        found = summed(best, queries.rows[low:high])
        if high > low:
            found[empty] = -np.inf  # also where a NaN query scale met the empty maximum
        scores[number] = torch.from_numpy(found)
        if argmax is not None and winners is not None:
            places = torch.from_numpy(queries.places[low:high])
            argmax[number, :, places] = torch.from_numpy(winners[queries.rows[low:high]].T)
