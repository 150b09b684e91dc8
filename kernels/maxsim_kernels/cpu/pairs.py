"""Independent (query, document) pairs on the CPU: batched products over pairs of similar length.

Pairs are sorted by document length and cut into batches whose similarities fit in cache; a pair too large for that is scored alone
through `forward.py`. Works on every token type; INT8 products are taken in FP32 (FP64 where d is too large for exact sums).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from maxsim_kernels.checks import Call
from maxsim_kernels.cpu.batches import batched
from maxsim_kernels.cpu.forward import check_values, forward, quantized_queries, query_width
from maxsim_kernels.cpu.integers import exact_float

_CELLS = 1 << 20  # similarities of a batch of pairs: 4 MB
_TOKENS, _GATHERED = 1 << 16, 1 << 26  # query and document tokens gathered for a batch, and numbers in them: 256 MB
_WHOLE = 16  # both sides take whole runs of rows: libraries give what is left over to other kernels, which add in another order


@dataclass(frozen=True)
class _Side:
    """One side of a batch: tokens `[P, L, d]` and which are valid `[P, L]`."""

    tokens: Tensor
    valid: Tensor
    rows: Tensor | None  # row of the value buffer for each token (packed), None where dense


def forward_pairs(call: Call) -> tuple[Tensor, Tensor]:
    """Scores `[N]` float32 and argmax int32 `[N, max Lq]` (empty when not asked for)."""
    check_values(call)
    count = call.query_count
    scores = torch.empty(count, dtype=torch.float32, device="cpu")
    argmax = torch.full((count, query_width(call)) if call.winners else (0,), -1, dtype=torch.int32, device="cpu")
    query_sizes = _sizes(call.queries, call.query_starts, call.query_lengths, count)
    document_sizes = _sizes(call.documents, call.document_starts, call.document_lengths, count)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        most = min(_TOKENS, _GATHERED // call.queries.shape[-1])
        for numbers, alone in _batches(query_sizes, document_sizes, most):
            if alone:
                part, winners = _score_alone(call, int(numbers[0]))
            else:
                part, winners = _score_batch(call, numbers, query_sizes, document_sizes)
            scores[numbers] = part
            if call.winners:
                width = min(winners.shape[1], argmax.shape[1])  # a batch's rows are padded
                argmax[numbers, :width] = winners[:, :width]
    return scores, argmax


def _whole(sizes: Tensor) -> Tensor:
    """Sizes rounded up to whole runs of rows, at least one."""
    return -(-sizes.clamp(min=1) // _WHOLE) * _WHOLE


def _sizes(values: Tensor, starts: Tensor | None, lengths: Tensor | None, count: int) -> Tensor:
    """Tokens to look at on one side, `[N]`: the packed length, or the padded size."""
    if starts is not None:
        assert lengths is not None
        return lengths.long()
    return torch.full((count,), values.shape[1], dtype=torch.int64, device="cpu")


def _batches(query_sizes: Tensor, document_sizes: Tensor, most: int) -> Iterator[tuple[Tensor, bool]]:
    """Pair numbers of each batch, of at most `most` tokens, and whether it is one pair too large for batching."""
    order = torch.argsort(document_sizes, stable=True)
    begin = 0
    widest = deepest = _WHOLE
    sizes = list(zip(_whole(query_sizes[order]).tolist(), _whole(document_sizes[order]).tolist(), strict=True))
    for at, (rows, columns) in enumerate(sizes):
        if rows * columns > _CELLS or rows + columns > most:
            if at > begin:
                yield order[begin:at], False
            yield order[at : at + 1], True
            begin, widest, deepest = at + 1, _WHOLE, _WHOLE
            continue
        wide, deep = max(widest, rows), max(deepest, columns)
        pairs = at - begin + 1
        if pairs > 1 and (pairs * wide * deep > _CELLS or pairs * (wide + deep) > most):
            yield order[begin:at], False
            begin, wide, deep = at, rows, columns
        widest, deepest = wide, deep
    if begin < len(sizes):
        yield order[begin:], False


def _score_alone(call: Call, pair: int) -> tuple[Tensor, Tensor]:
    one = slice(pair, pair + 1)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[one]

    packed = call.document_starts is not None
    by_token = call.granularity == "token" and packed  # token scales of packed codes belong to the buffer, not to the pair
    keep = by_token or call.granularity == "corpus"
    shared = replace(
        call,
        layout="shared",
        queries=call.queries if call.query_starts is not None else call.queries[one],
        query_starts=cut(call.query_starts),
        query_lengths=cut(call.query_lengths),
        query_mask=cut(call.query_mask),
        documents=call.documents if packed else call.documents[one],
        document_starts=cut(call.document_starts),
        document_lengths=cut(call.document_lengths),
        document_mask=cut(call.document_mask),
        scales=call.scales if keep else cut(call.scales),
        offset=call.offset if keep else cut(call.offset),
    )
    scores, argmax = forward(shared)
    return scores[:, 0], argmax[:, 0] if call.winners else argmax.view(1, 0)


def _score_batch(call: Call, numbers: Tensor, query_sizes: Tensor, document_sizes: Tensor) -> tuple[Tensor, Tensor]:
    queries = _side(call.queries, call.query_starts, call.query_lengths, call.query_mask, numbers, query_sizes)
    documents = _side(call.documents, call.document_starts, call.document_lengths, call.document_mask, numbers, document_sizes)
    pairs, rows, width = queries.tokens.shape
    flat = queries.tokens.reshape(-1, width)
    if call.granularity != "none" and call.quantize_queries:
        flat = flat.masked_fill(~queries.valid.reshape(-1, 1), 0)  # a masked token must not reach the quantiser
    matrix, query_scales = quantized_queries(call, flat)
    work = exact_float(width) if matrix.dtype == torch.int8 else torch.float32
    left = matrix.view(pairs, rows, width).to(work)
    cells = left.new_empty(pairs, rows, documents.tokens.shape[1])
    batched(left, documents.tokens.to(work), cells)
    cells = cells.float()
    sums = left.sum(2, keepdim=True, dtype=torch.float64).float() if call.offset is not None else None
    scale, offset = (_spread(call, tensor, numbers, documents) for tensor in (call.scales, call.offset))
    if scale is not None:
        cells = cells * scale
        if offset is not None and sums is not None:
            cells = cells.addcmul_(sums, offset)
    cells.masked_fill_(~documents.valid.unsqueeze(1), -torch.inf)
    best, where = cells.max(2)
    filled = documents.valid.any(1, keepdim=True)
    first = documents.valid.int().argmax(1, keepdim=True)  # for maxima of -inf: a valid position, not a masked one
    where = torch.where(torch.isneginf(best), first, where)
    if query_scales is not None:
        best = best * query_scales.view(pairs, rows)
    best = torch.where(filled, best, torch.full_like(best, -torch.inf))
    best = torch.where(queries.valid, best, torch.zeros_like(best))
    total = torch.zeros(pairs, dtype=torch.float64, device="cpu")
    for row in range(rows):  # one fixed order of addition, whatever the batch
        total += best[:, row]
    winners = torch.where(queries.valid & filled, where, torch.full_like(where, -1))
    return total.float(), winners.to(torch.int32)


def _side(
    values: Tensor, starts: Tensor | None, lengths: Tensor | None, mask: Tensor | None, numbers: Tensor, sizes: Tensor
) -> _Side:
    if starts is None:
        tokens = values[numbers]
        valid = torch.ones(tokens.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask[numbers] != 0
        if lengths is not None:
            valid = valid & (torch.arange(tokens.shape[1], device="cpu") < lengths[numbers].unsqueeze(1))
        more = int(_whole(sizes[:1])) - tokens.shape[1]
        return _Side(pad(tokens, (0, 0, 0, more)), pad(valid, (0, more)), None)
    length = sizes[numbers].unsqueeze(1)
    places = torch.arange(int(_whole(length.max())), device="cpu")
    valid = places < length
    rows = torch.where(valid, starts[numbers].long().unsqueeze(1) + places, torch.zeros(1, dtype=torch.int64, device="cpu"))
    if values.shape[0] == 0:
        return _Side(values.new_zeros(*rows.shape, values.shape[1]), valid, rows)
    return _Side(values[rows], valid, rows)


def _spread(call: Call, values: Tensor | None, numbers: Tensor, documents: _Side) -> Tensor | None:
    """Scales or offsets of a batch, ready to broadcast over `[P, Lq, Ld]`."""
    if values is None:
        return None
    values = values.float()
    if call.granularity == "corpus":
        return values
    if call.granularity == "document":
        return values[numbers].view(-1, 1, 1)
    if documents.rows is None:
        return pad(values[numbers], (0, documents.valid.shape[1] - values.shape[1])).unsqueeze(1)
    if values.shape[0] == 0:
        return torch.ones(documents.valid.shape, dtype=torch.float32, device="cpu").unsqueeze(1)
    return values[documents.rows].unsqueeze(1)
