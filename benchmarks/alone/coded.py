"""Tokens of few bits (`BitTokens`, `ResidualTokens`) beside the same tokens stored as INT8, decoded first, and already decoded.

    python benchmarks/alone/coded.py [--json FILE] [--seconds 120]

Random codes of d = 128 and 16,384 centroids; queries of 32 tokens. Scores of 48 documents are compared with float64 of the tokens as the
kernel rounds them first, and quantised queries must give the bits of the same tokens as `Int8Tokens`. "error" is the largest distance,
in units of the norms, of the kernels of coded tokens; decoded ones and peers may be 2e-3 away. "extra_mib" is a call's peak above what it
found, its scores included. Medians of CUDA events in ms, the L2 flushed, methods in turns. late-interaction-kernels where it can be
imported (its autotuner runs first): "apart_from_ours" is the largest difference of a score.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script

from alone.record import Record, begun, medians, require, unit
from maxsim_kernels import BitTokens, Int8Tokens, Packed, ResidualTokens, maxsim, quantize_int8
from maxsim_kernels.coded import CodedTokens
from measure import installed, session, timing
from measure.method import EXACT, LOOSE
from measure.names import LIK

SCHEMA = "maxsim-kernels/coded/1"
D, ROWS, CENTROIDS = 128, 32, 16384
SHAPES = {"32 queries x 8192 x 128": (32, 8192, 128), "1 query x 10000 x 300": (1, 10000, 300)}
CHECKED = 48  # documents
AT_ONCE = 1 << 20  # tokens decoded at once
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Method:
    """What is timed, how far from float64 it may be, and what is recorded of it."""

    call: Call
    bound: float = LOOSE
    memory: bool = False
    quantised: bool = False  # queries too


def codes(bits: int, count: int, size: int, device: str, random: torch.Generator) -> Packed:
    """Random bytes of codes."""
    values = torch.randint(0, 256, (count * size, D * bits // 8), dtype=torch.uint8, device=device, generator=random)
    return Packed(values, torch.arange(count + 1, device=device) * size)


def bit_tokens(bits: int, count: int, size: int, device: str = timing.DEVICE) -> BitTokens:
    """Random levels and scales."""
    random = torch.Generator(device).manual_seed(bits)
    held = codes(bits, count, size, device, random)
    scales = (torch.rand(count * size, device=device, generator=random) * 0.1 + 0.02).half()
    return BitTokens(held, scales, bits, D)


def residual_tokens(bits: int, count: int, size: int, device: str = timing.DEVICE) -> ResidualTokens:
    """Random residuals, ids and centroids."""
    random = torch.Generator(device).manual_seed(bits)
    held = codes(bits, count, size, device, random)
    ids = torch.randint(0, CENTROIDS, (count * size,), device=device, generator=random, dtype=torch.int32)
    weights = torch.linspace(-0.05, 0.05, 2**bits, device=device)
    centroids = unit(CENTROIDS, D, seed=bits, dtype=torch.float32, device=device)
    return ResidualTokens(held, ids, centroids, weights, unit=True)


def rounded(tokens: CodedTokens, rows: Tensor, held: Packed, dtype: torch.dtype) -> Tensor:
    """Tokens `rows` in float64 as the kernel has them: a residual's sum in the queries' dtype, over its length before that."""
    part = tokens.rows(rows, held)
    if isinstance(part, BitTokens):
        return part.dequantize().values.double()
    exact = replace(part, unit=False).dequantize().values
    return exact.to(dtype).double() / exact.double().norm(dim=1, keepdim=True)


def error(queries: Tensor, tokens: CodedTokens, scores: Tensor, quantised: bool = False) -> float:
    """Largest distance of some documents' scores from float64's, in units of `sum_i |Q_i| * max_j |D_j|`."""
    size, device = tokens.codes.values.shape[0] // len(tokens), queries.device
    chosen = torch.arange(0, len(tokens), max(1, len(tokens) // CHECKED), device=device)[:CHECKED]
    rows = (chosen[:, None] * size + torch.arange(size, device=device)).flatten()
    ends = torch.arange(len(chosen) + 1, device=device) * size
    values = rounded(tokens, rows, Packed(tokens.codes.values[rows], ends), queries.dtype).view(-1, size, D)
    asked = queries.double()
    if quantised:
        given = quantize_int8(queries).dequantize()
        assert isinstance(given, Tensor)
        asked = given.double()
    truth = torch.stack([(asked @ one.T).amax(-1).sum(-1) for one in values], -1)
    norms = asked.norm(dim=-1).sum(-1)[:, None] * values.norm(dim=-1).amax(-1)
    return float(((scores[:, chosen].double() - truth).abs() / norms).max())


def decoded(tokens: CodedTokens, dtype: torch.dtype) -> Packed:
    """Decoded a million tokens at a time, as a caller with the choice would: the FP32 values need not all be there at once."""
    count = tokens.codes.values.shape[0]
    values = torch.empty(count, D, dtype=dtype, device=tokens.device)
    for first in range(0, count, AT_ONCE):
        rows = slice(first, min(first + AT_ONCE, count))
        ends = torch.tensor([0, rows.stop - rows.start], device=tokens.device)
        values[rows] = tokens.rows(rows, Packed(tokens.codes.values[rows], ends)).dequantize().values
    return tokens.codes.with_values(values)


def bit_methods(queries: Tensor, tokens: BitTokens) -> dict[str, Method]:
    """Whole numbers with a scale a token; `queries` FP16."""
    name = f"bits {tokens.bits}"
    stored: Int8Tokens = tokens.as_int8()
    found = {
        f"{name}, int8 queries": Method(lambda: maxsim(queries, tokens), EXACT, memory=True, quantised=True),
        f"{name}, fp16 queries": Method(lambda: maxsim(queries, tokens, quantize_queries=False), EXACT, memory=True),
        f"{name}, stored as INT8 token": Method(lambda: maxsim(queries, stored), quantised=True),
    }
    return found | (decoded_methods(name, queries, tokens) if tokens.bits == 4 else {})


def decoded_methods(name: str, queries: Tensor, tokens: CodedTokens) -> dict[str, Method]:
    """What decoding first costs, and what it would be without."""
    held = decoded(tokens, torch.float16)
    return {
        f"{name}, decode to FP16 + maxsim": Method(lambda: maxsim(queries, decoded(tokens, torch.float16)), memory=True),
        f"{name}, FP16 already decoded": Method(lambda: maxsim(queries, held)),
    }


def residual_methods(queries: Tensor, tokens: ResidualTokens) -> dict[str, Method]:
    """ColBERTv2's residuals with centroids of either dtype; `queries` FP16."""
    name, small = f"residual {tokens.bits}", replace(tokens, centroids=tokens.centroids.half())
    return {
        f"{name}, FP32 centroids, fp16 queries": Method(lambda: maxsim(queries, tokens), EXACT, memory=True),
        f"{name}, FP16 centroids, fp16 queries": Method(lambda: maxsim(queries, small), EXACT, memory=True),
        **decoded_methods(name, queries, tokens),
    }


def single_methods(queries: Tensor, tokens: ResidualTokens) -> dict[str, Method]:
    """The same by FP32 queries."""
    name, held = f"residual {tokens.bits}", decoded(tokens, torch.float32)
    return {
        f"{name}, fp32 queries": Method(lambda: maxsim(queries, tokens), EXACT),
        f"{name}, FP32 already decoded, fp32 queries": Method(lambda: maxsim(queries, held)),
    }


def checked(what: str, queries: Tensor, tokens: CodedTokens, methods: dict[str, Method]) -> dict[str, dict[str, Any]]:
    """Errors of the kernels of coded tokens; ends the program where a method is wrong."""
    found: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        held = tokens
        if "FP16 centroids" in name and isinstance(tokens, ResidualTokens):
            held = replace(tokens, centroids=tokens.centroids.half())
        far = error(queries, held, method.call(), method.quantised)
        require(far <= method.bound, f"{what}, {name}: {far:.1e} from float64, need {method.bound}")
        found[name] = {"error": far} if method.bound == EXACT else {}
    if isinstance(tokens, BitTokens):
        same = torch.equal(maxsim(queries, tokens), maxsim(queries, tokens.as_int8()))
        require(same, f"{what}, bits {tokens.bits}: not the bits of Int8Tokens")
    return found


def peak_mib(call: Call) -> float:
    """Peak memory of a call above what it found, its scores included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = call()
    torch.cuda.synchronize()
    del held
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def lowest_first(packed: Tensor, bits: int) -> Tensor:
    """The same codes with the first of a byte in its lowest bits, as late-interaction-kernels reads them."""
    found = torch.zeros_like(packed)
    for place in range(8 // bits):
        code = (packed >> (8 - bits * (place + 1))) & (2**bits - 1)
        found |= code << (bits * place)
    return found


def peer(queries: Tensor, tokens: ResidualTokens) -> tuple[Call | None, dict[str, Any], str]:
    """late-interaction-kernels' call, what is recorded of it, and why there is none."""
    module = installed.load(LIK, ".plaid")
    if isinstance(module, str):
        return None, {}, module
    held, size = tokens.codes, tokens.codes.values.shape[0] // len(tokens)
    assert held.offsets is not None
    theirs = (tokens.ids, lowest_first(held.values, tokens.bits), held.offsets.int(), tokens.centroids, tokens.weights)
    call = partial(module.maxsim_residual_varlen, queries, *theirs, tokens.bits, max_seqlen_d=size)
    try:
        scores = call()
    except session.failures() as problem:
        return None, {}, session.reason(problem)
    far = error(queries, tokens, scores)
    if not far <= LOOSE:
        return None, {}, f"{far:.1e} from float64, need {LOOSE}"
    return call, {"apart_from_ours": float((scores - maxsim(queries, tokens)).abs().max())}, ""


def measured(what: str, queries: Tensor, tokens: CodedTokens, record: Record, flush: timing.Flush) -> dict[str, dict[str, Any]]:
    """Every method of some tokens: right first, then memory and medians."""
    half = queries.half()
    methods = bit_methods(half, tokens) if isinstance(tokens, BitTokens) else residual_methods(half, tokens)
    found = checked(what, half, tokens, methods)
    calls = {name: method.call for name, method in methods.items()}
    if isinstance(tokens, ResidualTokens):
        if tokens.bits == 2:
            single = single_methods(queries, tokens)
            found |= checked(what, queries, tokens, single)
            calls |= {name: method.call for name, method in single.items()}
        name = f"residual {tokens.bits}, {LIK}"
        call, facts, why = peer(half, tokens)
        if call is None:
            record.leave_out(f"{what}: {name}", why)
        else:
            calls[name], found[name] = call, facts
    times = medians(calls, flush)
    peaks = {name: {"extra_mib": peak_mib(method.call)} for name, method in methods.items() if method.memory}
    return {name: {"median_ms": times[name], **peaks.get(name, {}), **found[name]} for name in calls}


def main() -> None:
    """Measure."""
    record = begun(SCHEMA, __doc__, 120)
    record.document["versions"] = {LIK: installed.versions()[LIK]}
    flush = timing.Flush()
    for name, (count, documents, size) in SHAPES.items():
        queries = unit(count, ROWS, D, dtype=torch.float32)
        for kind, make, all_bits in (("bits", bit_tokens, (1, 2, 4)), ("residual", residual_tokens, (2, 4))):
            for bits in all_bits:
                if record.late(f"{name}: {kind} {bits}"):
                    continue
                tokens = make(bits, documents, size)
                methods = measured(name, queries, tokens, record, flush)
                shapes = {"queries": list(queries.shape), "documents": [documents, size, D]}
                record.add({"row": f"{name}, {kind} {bits}", **shapes, "methods": methods})


if __name__ == "__main__":
    main()
