"""flash-maxsim and late-interaction-kernels through the fastest sensible public entry points of each, inputs prepared outside.

A peer that is not installed, or has no entry point for a row, is skipped with the reason. Inside the timed call is only what the entry
point itself does: its own casts, default lengths, query chunks. Queries of quantised rows are quantised inside, as ours are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import Packed
from measure import installed
from measure.method import INT8_LOOSE, LOOSE, Lineup, Method
from measure.names import FLASH, LIK
from measure.timing import Call

LIK_WIDEST = 2048  # above, its smallest tile asks for 256 KiB of shared memory after more than a minute of compiling
LIK_CELLS = 2**31  # from here on its addresses overflow: 20,000 x 1024 x 128 gave wrong scores, then an illegal memory access
LIK_OVERFLOWS = (0, 4, 5)  # the version that this was seen with: newer ones are tried
BLOCK = 128  # query rows that both peers' FP16 paths cut long queries into


def overflows(documents: Tensor) -> str:
    """Why late-interaction-kernels is not called with these documents; empty when it is."""
    found = installed.versions()[LIK]
    known = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if documents.numel() < LIK_CELLS or known > LIK_OVERFLOWS:
        return ""
    seen = ".".join(map(str, LIK_OVERFLOWS))
    return f"2^31 numbers and more: wrong scores or an illegal memory access, which ends the run (seen at 20,000 with {seen})"


def _lineup(name: str, module: Any, entries: Mapping[str, Call], bound: float = LOOSE) -> Lineup:
    return Lineup([], {name: module}) if isinstance(module, str) else Lineup([Method(name, "peer", entries, bound)], {})


def dense(peers: tuple[str, ...], queries: Tensor, documents: Tensor) -> Lineup:
    """Padded documents of one length; queries `[Lq, d]` or `[Nq, Lq, d]`, documents `[B, Ld, d]`, any d."""
    lineup = Lineup([], {})
    single, width = queries.dim() == 2, queries.shape[-1]
    for peer in peers:
        module, entries = installed.load(peer), {}
        if isinstance(module, str):
            pass
        elif peer == LIK:
            if width > LIK_WIDEST:
                module = f"d above {LIK_WIDEST}: its smallest tile needs more shared memory than an SM has"
            elif why := overflows(documents):
                module = why
            else:
                entries = {"maxsim": partial(module.maxsim, queries, documents)}
        elif single:
            entries = {"flash_maxsim": partial(module.flash_maxsim, queries, documents)}
            if queries.shape[0] <= BLOCK and width <= BLOCK:
                entries["flash_maxsim_persistent"] = partial(module.flash_maxsim_persistent, queries, documents)
        else:
            entries = {"flash_maxsim_batched": partial(module.flash_maxsim_batched, queries, documents)}
        lineup.add(_lineup(peer, module, entries))
    return lineup


def ragged(peers: tuple[str, ...], queries: Tensor, packed: Packed, padded: Tensor, lengths: Tensor) -> Lineup:
    """Ragged documents, packed and padded to the longest; queries `[Nq, Lq, d]`. Padded forms are methods of their own.

    flash-maxsim's packed entry point takes one query: with several it is called once for each.
    """
    lineup = Lineup([], {})
    if FLASH in peers:
        lineup.add(_ragged_flash(queries, packed, padded, lengths))
    if LIK in peers:
        lineup.add(_ragged_lik(queries, packed, padded, lengths))
    return lineup


def _ragged_flash(queries: Tensor, packed: Packed, padded: Tensor, lengths: Tensor) -> Lineup:
    module = installed.load(FLASH)
    if isinstance(module, str):
        return Lineup([], {FLASH: module})
    assert packed.offsets is not None
    rest, rows = (packed.values, packed.offsets.int(), int(lengths.max())), list(queries)

    def each() -> Tensor:
        return torch.stack([module.flash_maxsim_packed(row, *rest) for row in rows])

    entries: dict[str, Call] = {"flash_maxsim_packed, once a query": each}
    if len(rows) == 1:
        entries = {"flash_maxsim_packed": partial(module.flash_maxsim_packed, rows[0], *rest)}
    block: dict[str, Call] = {
        "flash_maxsim_batched": partial(module.flash_maxsim_batched, queries, padded, doc_lengths=lengths.int())
    }
    return _lineup(FLASH, module, entries).add(_lineup(f"{FLASH}, padded", module, block))


def _ragged_lik(queries: Tensor, packed: Packed, padded: Tensor, lengths: Tensor) -> Lineup:
    module = installed.load(LIK)
    if isinstance(module, str):
        return Lineup([], {LIK: module})
    assert packed.offsets is not None
    size, longest = queries.shape[1], int(lengths.max())
    flat, starts = _flat(queries)
    valid = (torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]).to(torch.int8)
    inputs = (flat, packed.values, starts, packed.offsets.int())
    entries: dict[str, Call] = {
        "maxsim_varlen": partial(module.maxsim_varlen, *inputs),
        "maxsim_varlen, lengths given": partial(module.maxsim_varlen, *inputs, size, longest),
    }
    block: dict[str, Call] = {"maxsim, masked": partial(module.maxsim, queries, padded, d_mask=valid)}
    return _lineup(LIK, module, entries).add(_lineup(f"{LIK}, padded", module, block))


def _flat(block: Tensor) -> tuple[Tensor, Tensor]:
    """`[N, L, d]` as `[N * L, d]` and int32 offsets `[N + 1]`."""
    size = block.shape[1]
    offsets = torch.arange(0, block.shape[0] * size + 1, size, dtype=torch.int32, device=block.device)
    return block.reshape(-1, block.shape[-1]), offsets


def pairs(peers: tuple[str, ...], queries: Tensor, documents: Tensor) -> Lineup:
    """Independent pairs, `[N, Lq, d]` and `[N, Ld, d]`."""
    lineup = Lineup([], {})
    for peer in peers:
        module, entries = installed.load(peer), {}
        if isinstance(module, str):
            pass
        elif peer == FLASH:
            entries = {"flash_maxsim_pairs": partial(module.flash_maxsim_pairs, queries, documents)}
        else:
            (flat_queries, starts), (flat, offsets) = _flat(queries), _flat(documents)
            numbers = torch.arange(queries.shape[0], dtype=torch.int32, device=queries.device)
            inputs = (flat_queries, flat, starts, offsets, numbers, numbers)
            listed, given = installed.load(LIK, ".score_pairs").score_pairs_packed, {"max_seqlen_q": queries.shape[1]}
            entries = {
                "maxsim_pairs": partial(module.maxsim_pairs, queries, documents),
                "score_pairs_packed": partial(listed, *inputs),
                "score_pairs_packed, lengths given": partial(listed, *inputs, max_seqlen_d=documents.shape[1], **given),
            }
        lineup.add(_lineup(peer, module, entries))
    return lineup


def int8(peers: tuple[str, ...], queries: Tensor, documents: Tensor) -> Lineup:
    """INT8 documents with one scale a token, quantised outside by the peer; queries `[Lq, d]` or `[Nq, Lq, d]`."""
    lineup, name = Lineup([], {}), f"{FLASH}, INT8"
    if LIK in peers:
        lineup.skipped[f"{LIK}, INT8"] = "has no INT8"
    if FLASH not in peers:
        return lineup
    module, entries = installed.load(FLASH), {}
    if queries.dim() != 2:
        module = "its INT8 takes one query and padded documents only"
    elif not isinstance(module, str):
        codes, scales = module.quantize_int8_symmetric(documents)
        inputs = (queries, codes, scales.squeeze(-1))
        entries = {
            "flash_maxsim_int8x8": partial(module.flash_maxsim_int8x8, *inputs),
            "flash_maxsim_int8_symmetric": partial(module.flash_maxsim_int8_symmetric, *inputs),
        }
    return lineup.add(_lineup(name, module, entries, INT8_LOOSE))


def fp8(peers: tuple[str, ...], queries: Tensor, documents: Tensor) -> Lineup:
    """FP8 documents; a long query goes in blocks of 128 rows, as in its own FP16 path (whole, it would compile for minutes)."""
    lineup, name = Lineup([], {}), f"{LIK}, FP8"
    if FLASH in peers:
        lineup.skipped[f"{FLASH}, FP8"] = "has no FP8"
    if LIK not in peers:
        return lineup
    module = installed.load(LIK, ".fp8")
    if isinstance(module, str):
        return lineup.add(_lineup(name, module, {}))
    split = queries.dim() == 2 and queries.shape[0] > BLOCK
    block = queries.reshape(-1, BLOCK, queries.shape[-1]) if split else queries

    def run(quantise: Any, codes: Tensor, scale: Tensor) -> Tensor:
        few, few_scale = quantise(block)
        scores = module.maxsim_inference_fp8(few, codes, scale_Q=few_scale, scale_D=scale)
        return scores.sum(0) if split else scores

    entries: dict[str, Call] = {
        words: partial(run, quantise, *quantise(documents))
        for words, quantise in (("one scale", module.quantize_fp8_per_tensor), ("token scales", module.quantize_fp8_per_token))
    }
    return lineup.add(_lineup(name, module, entries, INT8_LOOSE))
