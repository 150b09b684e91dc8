"""Tokens as codecs store them (`BitTokens`, `ResidualTokens`) on a GPU: the error first, then medians with the L2 flushed, and memory.

    python benchmarks/alone/coded.py [--json FILE] [--runs 20]

Beside the kernels: decoding to FP16 and then `maxsim`, FP16 that was decoded before, INT8 codes at token scale, and
late-interaction-kernels' kernel for residual codes of 2 and 4 bits, where that is installed (its codes lie the other way round in a
byte).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_kernels import BitTokens, Packed, ResidualTokens, maxsim, quantize_int8
from maxsim_kernels.coded import BITS, unpacked
from measure import installed
from measure.names import LIK
from measure.session import about
from measure.timing import Call, Flush, extra_bytes, measure
from results.file import write

SCHEMA = "maxsim-kernels/coded/1"
D, CENTROIDS = 128, 16384
SHAPES = {"32 queries x 8192 x 128": (32, 8192, 128), "1 query x 10000 x 300": (1, 10_000, 300)}
BOUND = 2e-6  # of sum_i ||Q_i|| * max_j ||D_j||
CHECKED = 48  # documents
PEER_BITS = (2, 4)
STEP = 1 << 20  # tokens decoded at once


def offsets(count: int, size: int) -> Tensor:
    return torch.arange(count + 1, device="cuda") * size


def bit_tokens(bits: int, count: int, size: int, random: torch.Generator) -> BitTokens:
    """Random codes and scales."""
    codes = torch.randint(0, 256, (count * size, D * bits // 8), dtype=torch.uint8, device="cuda", generator=random)
    scales = (torch.rand(count * size, device="cuda", generator=random) * 0.1 + 0.02).half()
    return BitTokens(Packed(codes, offsets(count, size)), scales, bits, D)


def residual_tokens(bits: int, count: int, size: int, random: torch.Generator) -> ResidualTokens:
    """Random codes about random centroids."""
    codes = torch.randint(0, 256, (count * size, D * bits // 8), dtype=torch.uint8, device="cuda", generator=random)
    ids = torch.randint(0, CENTROIDS, (count * size,), device="cuda", generator=random, dtype=torch.int32)
    centroids = torch.nn.functional.normalize(torch.randn(CENTROIDS, D, device="cuda", generator=random), dim=1)
    weights = torch.linspace(-0.05, 0.05, 2**bits, device="cuda")
    return ResidualTokens(Packed(codes, offsets(count, size)), ids, centroids, weights, unit=True)


def error(queries: Tensor, documents: BitTokens | ResidualTokens, scores: Tensor, size: int, quantized: bool) -> float:
    """The largest error of some documents' scores against FP64, as a share of the most that a query could score."""
    some = list(range(0, len(documents), max(1, len(documents) // CHECKED)))[:CHECKED]
    index = torch.cat([torch.arange(n * size, (n + 1) * size, device="cuda") for n in some])
    codes = unpacked(documents.codes.values[index], D, documents.bits)
    asked = queries.double()
    if isinstance(documents, BitTokens):
        tokens = (2.0 * codes.double() - (2**documents.bits - 1)) * documents.scales[index].double()[:, None]
        if quantized:
            held = quantize_int8(queries).dequantize()
            assert isinstance(held, Tensor)
            asked = held.double()
    else:
        exact = documents.centroids[documents.ids[index].long()].float() + documents.weights[codes.int()]
        tokens = exact.to(queries.dtype).double() / exact.double().norm(dim=1, keepdim=True)
    tokens = tokens.view(len(some), size, D)
    need = torch.stack([(asked @ one.T).amax(-1).sum(-1) for one in tokens], -1)
    most = asked.norm(dim=-1).sum(-1)[:, None] * tokens.norm(dim=-1).amax(-1)[None]
    return float(((scores[:, some].double() - need).abs() / most).max())


def decoded(documents: BitTokens | ResidualTokens) -> Packed:
    """The documents decoded to FP16, a million tokens at a time, so that they are never all there in FP32."""
    count = documents.codes.values.shape[0]
    values = torch.empty(count, D, dtype=torch.float16, device="cuda")
    for first in range(0, count, STEP):
        rows = slice(first, min(first + STEP, count))
        ends = torch.tensor([0, rows.stop - rows.start], device="cuda")
        values[rows] = documents.rows(rows, Packed(documents.codes.values[rows], ends)).dequantize().values
    return documents.codes.with_values(values)


def turned(packed: Tensor, bits: int) -> Tensor:
    """The same codes, the first one of each byte in its lowest bits instead of its highest."""
    found = torch.zeros_like(packed)
    for place in range(8 // bits):
        found |= ((packed >> (8 - bits * (place + 1))) & (2**bits - 1)) << (bits * place)
    return found


def calls_of(queries: Tensor, documents: BitTokens | ResidualTokens, size: int) -> tuple[dict[str, Call], dict[str, float]]:
    """What is timed, and errors; ends the program where one of ours is too large."""
    ours: dict[str, tuple[bool, Call]] = {"stored codes": (False, lambda: maxsim(queries, documents, quantize_queries=False))}
    if isinstance(documents, BitTokens):
        ours["stored codes, INT8 queries"] = (True, lambda: maxsim(queries, documents))
    errors = {name: error(queries, documents, call(), size, quantized) for name, (quantized, call) in ours.items()}
    if max(errors.values()) > BOUND:
        raise SystemExit(f"errors {errors}, {BOUND:g} allowed; nothing written")
    plain = decoded(documents)
    calls: dict[str, Call] = {name: call for name, (_, call) in ours.items()}
    calls["decode to FP16, then maxsim"] = lambda: maxsim(queries, decoded(documents))
    calls["FP16 decoded before"] = lambda: maxsim(queries, plain)
    if isinstance(documents, BitTokens):
        whole = documents.as_int8()
        calls["INT8 codes at token scale"] = lambda: maxsim(queries, whole)
        return calls, errors
    peer = installed.load(LIK, ".plaid")
    if not isinstance(peer, str) and documents.bits in PEER_BITS:
        codes, ends = turned(documents.codes.values, documents.bits), offsets(len(documents), size).int()
        given = (queries, documents.ids, codes, ends, documents.centroids, documents.weights, documents.bits)
        calls[LIK] = lambda: peer.maxsim_residual_varlen(*given, max_seqlen_d=size)
        errors[LIK] = error(queries, documents, calls[LIK](), size, False)
    return calls, errors


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args(arguments)
    flush, random = Flush(), torch.Generator("cuda").manual_seed(0)
    rows: list[dict[str, Any]] = []
    for shape, (count, documents, size) in SHAPES.items():
        queries = torch.nn.functional.normalize(torch.randn(count, 32, D, device="cuda", generator=random), dim=-1).half()
        for make, name, kinds in ((bit_tokens, "bits", BITS), (residual_tokens, "residual", BITS)):
            for bits in kinds:
                calls, errors = calls_of(queries, make(bits, documents, size, random), size)
                extra = {method: extra_bytes(call) / 2**20 for method, call in calls.items()}
                found = {method: one["median_ms"] for method, one in measure(calls, options.runs, flush).items()}
                rows.append({"shape": shape, "tokens": f"{name} {bits}", "ms": found, "extra_mib": extra, "error": errors})
                print(shape, rows[-1]["tokens"], {method: round(ms, 3) for method, ms in found.items()}, flush=True)
                write(options.json, {"schema": SCHEMA, **about(), "rows": rows})


if __name__ == "__main__":
    main()
