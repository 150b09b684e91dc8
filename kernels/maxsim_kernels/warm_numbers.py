"""Which numbers of documents need kernels of their own: what `warmup` launches so that no other number meets the compiler."""

from __future__ import annotations

from dataclasses import replace

import torch

from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward import dispatch
from maxsim_kernels.gpu.forward.tile_tables import LAID_OUT, tiles_of
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import hardware


def numbers(device: torch.device) -> tuple[int, ...]:
    """Numbers of documents that between them need every kernel but those of `other_numbers`.

    Few documents may be cut into pieces, whose maxima are merged by eight where there are as many; from half the number of
    multiprocessors on none is.
    """
    return (1, 8, hardware(device)[1] // 2 + 1)


def other_lengths(call: Call, winners: bool) -> None:
    """Launch what so many ragged documents would need where they were longer or shorter."""
    if dispatch.variant(call, hardware(call.queries.device)[0], winners)[0] == "ragged":
        _launch_all(call, winners)


def other_numbers(call: Call, winners: bool) -> None:
    """Launch what thousands of such documents would need besides: other tiles for few query rows, tables of ragged documents."""
    name, config = dispatch.variant(call, hardware(call.queries.device)[0], winners)
    if name == "stream":
        _launch_all(call, winners)
    if name == "ragged":
        for row in {config, *(row for _, row in dispatch.every_choice(call, winners))}:
            _tables(call, row)


def _launch_all(call: Call, winners: bool) -> None:
    device = call.queries.device
    scores = torch.empty(call.query_count, call.document_count, device=device)
    argmax = torch.empty(*scores.shape, call.queries.shape[1], dtype=torch.int32, device=device) if winners else None
    for choice in dispatch.every_choice(call, winners):
        dispatch.launch(call, scores, argmax, choice)


def _tables(call: Call, config: Config) -> None:
    """The tables of tiles that large numbers of documents need."""
    assert call.document_lengths is not None
    for count in LAID_OUT:
        lengths, documents, starts = call.document_lengths.new_ones(count + 1), call.documents, call.document_starts
        if starts is None:
            documents = documents[:1].expand(count + 1, -1, -1)
        else:
            starts = starts.new_zeros(count + 1)
        many = replace(call, documents=documents, document_starts=starts, document_lengths=lengths)
        tiles_of(many, config.tokens, config.short, 1)
