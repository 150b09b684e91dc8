"""One small call of every kernel and variant, through public names only, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python3 tests/gpu/sanitize.py --only int8

The tool makes every launch many times slower: `--part 1/8` to `--part 8/8` in eight processes at once take turns with the cases.
Without the caching allocator every tensor is an allocation of its own, so that a read one element past a tensor is seen. Truths
are computed on the CPU, where the tool does not look. Prints the number of calls; exits 1 where a result is wrong or a call fell
back to plain torch.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # this file is a script

import coded_cases as stored_forms
import truth
from crc_cases import sums_of
from inputs import on_gpu as make
from maxsim_kernels import (
    BitTokens,
    Fp8Tokens,
    Int8Tokens,
    Packed,
    ResidualTokens,
    chamfer_distance,
    maxsim,
    maxsim_pairs,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)  # fmt: skip
from maxsim_kernels.search import exact_topk, residuals_of
from maxsim_kernels.training import contrastive_loss
from shares import share

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
COUNTS, ASKED = [3, 0, 31, 1, 130, 65], [4, 0, 31, 1, 70, 17]
Case = tuple[str, Any, Any, dict[str, Any]]


def layouts(d: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every layout of float tokens; sizes leave a tail in every tile."""
    few, documents = make.gauss(6, 17, d, dtype=dtype), make.gauss(6, 70, d, dtype=dtype, seed=1)
    rows, asked = make.packed(COUNTS, d, dtype=dtype, seed=1), make.packed(ASKED, d, dtype=dtype)
    masks = make.masks("both", "query", 6, 17) | make.masks("both", "document", 6, 70, seed=1)
    yield "one query", few[0].clone(), documents, {}
    yield "few queries", few, documents, {}
    yield "many queries", make.gauss(40, 17, d, dtype=dtype), documents, {}
    yield "long queries", make.gauss(2, 300, d, dtype=dtype), documents, {}
    yield "masked", few, documents, masks
    yield "masked, one query", few[0].clone(), documents, {"document_lengths": masks["document_lengths"]}
    yield "lengths beyond", few, documents, {"document_lengths": torch.full_like(masks["document_lengths"], 1000)}
    yield "packed", few, rows, {}
    yield "packed, one query", few[0].clone(), rows, {}
    yield "packed, many queries", make.gauss(40, 17, d, dtype=dtype), rows, {}
    yield "view", few, make.scattered(rows), {}
    yield "packed queries", asked, documents, {}
    yield "both packed", asked, rows, {}
    yield "per query", few, make.gauss(6, 3, 70, d, dtype=dtype, seed=1), {}
    yield "pairs", few, documents, {"pairs": True}
    yield "masked pairs", few, documents, {"pairs": True, **masks}
    yield "ragged pairs", asked, rows, {"pairs": True}


def float_cases() -> Iterator[Case]:
    """fp16 everywhere, with and without winners; the other dtypes and widths where kernels may differ."""
    for name, queries, documents, options in layouts(128, HALF):
        yield f"fp16 {name}", queries, documents, options
        yield f"fp16 {name}, winners", queries, documents, {**options, "return_argmax": True}
    for label, dtype in (("bf16", BFLOAT), ("fp32", SINGLE)):
        for name, queries, documents, options in layouts(128, dtype):
            if name in ("one query", "many queries", "masked", "both packed", "pairs", "per query"):
                yield f"{label} {name}", queries, documents, options
    for d, dtype in ((100, HALF), (1, HALF), (768, HALF), (1001, HALF), (1000, SINGLE)):
        for name, queries, documents, options in layouts(d, dtype):
            if name in ("one query", "few queries", "masked", "both packed", "ragged pairs"):
                yield f"d={d} {dtype} {name}", queries, documents, options
    few, long = make.gauss(2, 17, 128), make.gauss(2, 5001, 128, seed=1)
    lengths = torch.tensor([5001, 4000], device=make.device)
    yield "split", few[0].clone(), long, {"document_lengths": lengths}
    yield "split, winners", few, long, {"return_argmax": True}
    yield "split, packed", few[0].clone(), make.packed([5001, 0, 3000], 128, seed=1), {}
    # Programs with several documents each:
    yield "many short, packed", few[0].clone(), make.packed([5, 0, 31] * 3000, 128, seed=1), {}
    yield "many short", few[0].clone(), make.gauss(9000, 7, 128, seed=1), {}
    # Floats compared by their bits, and once more where a row met only negative products:
    large, asked = make.gauss(700, 100, 128, seed=1), make.gauss(64, 32, 128)
    asked[0], large[300:310] = asked[0].abs(), -large[300:310].abs()
    yield "large", asked, large, {}
    yield "large, masked", asked, large, {"document_mask": make.mask(700, 100, keep=0.9)}
    for how in ("transposed", "odd rows", "unaligned"):
        yield f"strides, {how}", make.strided(few, how), make.strided(make.gauss(6, 70, 128, seed=1), how), {}


def quantized_cases() -> Iterator[Case]:
    """INT8 of every granularity and FP8, with quantised and float queries."""
    forms: list[tuple[str, Any, dict[str, Any]]] = [
        ("int8", quantize_int8, {"granularity": g, "affine": a}) for g in ("token", "document", "corpus") for a in (False, True)
    ]
    forms += [("fp8", quantize_fp8, {"granularity": g}) for g in ("token", "document")]
    for kind, quantize, how in forms:
        label = f"{kind} {how['granularity']}{' affine' if how.get('affine') else ''}"
        for name, queries, documents, options in layouts(128, HALF):
            stored = quantize(documents, **how)
            if name in ("one query", "many queries", "masked", "packed", "both packed", "pairs", "per query"):
                yield f"{label} {name}", queries, stored, options
            if name in ("few queries", "packed, one query") and not how.get("affine"):
                yield f"{label} {name}, floats", queries, stored, {**options, "quantize_queries": False}
                yield f"{label} {name}, winners", queries, stored, {**options, "return_argmax": True}
    for name, queries, documents, options in layouts(1000, HALF):
        if name in ("few queries", "both packed"):
            yield f"int8 d=1000 {name}", queries, quantize_int8(documents), options
            yield f"fp8 d=1000 {name}", queries, quantize_fp8(documents), options


def coded_cases() -> Iterator[Case]:
    """Stored codes of 1, 2 and 4 bits, with and without centroids, met by every number of queries."""
    asked = {
        "one query": make.gauss(17, 128),
        "few queries": make.gauss(6, 17, 128),
        "many queries": make.gauss(40, 17, 128),
        "packed queries": make.packed(ASKED, 128),
    }
    for kind, bits in itertools.product(("bits", "unit", "free"), (1, 2, 4)):
        documents = stored_forms.coded(kind, bits, 128, COUNTS, device=make.device)
        for name, queries in asked.items():
            yield f"coded {kind} {bits}, {name}", queries, documents, {}
        yield f"coded {kind} {bits}, pairs", asked["packed queries"], documents, {"pairs": True}


def coded_differs(queries: Any, documents: Any, options: dict[str, Any]) -> str:
    """Scores of stored codes against their decoded tokens in float64 on the CPU; what is wrong, or nothing."""
    found: Any = (maxsim_pairs if options.get("pairs") else maxsim)(queries, documents)
    try:
        stored_forms.check(
            found.cpu(), *stored_forms.truth(on_cpu(queries), on_cpu(documents), rounded=queries.dtype, **options)
        )
    except AssertionError as error:
        return str(error)
    return ""


def on_cpu(thing: Any) -> Any:
    """A copy on the CPU; lengths are cut to the padded size there by the truth itself."""
    if isinstance(thing, Packed | BitTokens | ResidualTokens):
        return thing.to("cpu")
    if isinstance(thing, Int8Tokens):
        offset = None if thing.offset is None else thing.offset.cpu()
        return Int8Tokens(on_cpu(thing.codes), thing.scales.cpu(), offset, thing.granularity)
    if isinstance(thing, Fp8Tokens):
        return Fp8Tokens(on_cpu(thing.codes), thing.scales.cpu(), thing.granularity)
    return thing.cpu() if isinstance(thing, torch.Tensor) else thing


def right(queries: Any, documents: Any, options: dict[str, Any]) -> str:
    """Run one call; what is wrong with its result, or nothing."""
    asked = dict(options)
    pairs, winners = asked.pop("pairs", False), asked.get("return_argmax", False)
    result: Any = (maxsim_pairs if pairs else maxsim)(queries, documents, **asked)
    asked.pop("return_argmax", None)
    need = truth.oracle(
        on_cpu(queries), on_cpu(documents), pairs=pairs, **{name: on_cpu(value) for name, value in asked.items()}
    )
    tolerance = truth.tolerance_of(documents)
    try:
        truth.check_scores((result[0] if winners else result).cpu(), need, tolerance)
        if winners:
            truth.check_argmax(result[1].cpu(), need, tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def gradient_cases() -> Iterator[Case]:
    """Float tokens of every layout; where widths, dtypes and masks change what a backward kernel reads."""
    for d, dtype in ((128, HALF), (100, SINGLE), (300, BFLOAT), (1, HALF)):
        for name, queries, documents, options in layouts(d, dtype):
            if "one query" not in name and (
                d == 128 or name in ("few queries", "both packed", "view", "ragged pairs", "per query")
            ):
                yield f"gradients d={d} {dtype} {name}", queries, documents, options


def gradients_differ(queries: Any, documents: Any, options: dict[str, Any]) -> str:
    """Run forward and backward by every path; where gradients differ from the CPU's by more than rounding, or nothing."""

    def gradients(path: str, *sides: Any) -> list[torch.Tensor]:
        leaves = []
        for side in sides:
            values = (side.values if isinstance(side, Packed) else side).detach().requires_grad_()
            leaves.append((values, side.with_values(values) if isinstance(side, Packed) else values))
        asked = {name: value if sides[0] is queries else on_cpu(value) for name, value in options.items() if name != "pairs"}
        scores = (maxsim_pairs if options.get("pairs") else maxsim)(leaves[0][1], leaves[1][1], backward=path, **asked)
        weights = torch.arange(scores.numel(), dtype=torch.float32).view(scores.shape).remainder(7).to(scores.device) - 3
        torch.where(scores > -torch.inf, scores * weights, 0.0).sum().backward()
        return [values.grad.cpu().double() for values, _ in leaves]

    if options.get("document_lengths") is not None and options["document_lengths"].max() > documents.shape[-2]:
        return ""  # refused on the CPU
    need = gradients("csr", on_cpu(queries), on_cpu(documents))
    for path in ("unified", "atomic", "csr"):
        for side, got, want in zip(("dQ", "dD"), gradients(path, queries, documents), need, strict=True):
            worst = float((got - want).abs().max()) if got.numel() else 0.0
            if not worst <= 2e-2 * float(want.abs().max()):
                return f"{path} {side}: {worst} off"
    return ""


def loss_cases() -> Iterator[Case]:
    """The contrastive loss as one node: documents beyond the queries, named positives, masks, ragged sides."""
    asked, rows = make.packed([4, 1, 31, 20], 128), make.packed([3, 40, 31, 1, 7, 0], 128, seed=1)
    for d, dtype in ((128, HALF), (100, SINGLE), (300, BFLOAT)):
        few, documents = make.gauss(6, 17, d, dtype=dtype), make.gauss(11, 70, d, dtype=dtype, seed=1)
        yield f"loss d={d} {dtype}", few, documents, {}
        yield f"loss d={d} {dtype} positives", few, documents, {"positives": torch.arange(6, device=make.device).flip(0) + 2}
        yield f"loss d={d} {dtype} masked", few, documents, {"query_mask": make.mask(6, 17), "document_mask": make.mask(11, 70)}
    yield "loss packed", asked, rows, {}


def loss_differs(queries: Any, documents: Any, options: dict[str, Any]) -> str:
    """Loss and gradients by every path against the CPU's; what is wrong, or nothing."""

    def step(path: str, *sides: Any) -> list[torch.Tensor]:
        leaves = [(side.values if isinstance(side, Packed) else side).detach().requires_grad_() for side in sides]
        held = [side.with_values(leaf) if isinstance(side, Packed) else leaf for side, leaf in zip(sides, leaves, strict=True)]
        asked = options if sides[0] is queries else {name: on_cpu(value) for name, value in options.items()}
        loss = contrastive_loss(*held, temperature=20.0, backward=path, **asked)
        loss.backward()
        return [one.detach().cpu().double() for one in (loss, *(leaf.grad for leaf in leaves))]

    need = step("csr", on_cpu(queries), on_cpu(documents))
    for path in ("unified", "atomic", "csr"):
        for name, got, want in zip(("loss", "dQ", "dD"), step(path, queries, documents), need, strict=True):
            worst = float((got - want).abs().max())
            if not worst <= 2e-2 * float(want.abs().max()):
                return f"{path} {name}: {worst} off"
    return ""


def crc_cases() -> Iterator[Case]:
    """Stored bytes in one chunk and in many."""
    for size in (4, 5000, 70_000, 3 << 20):
        yield f"crc of {size} bytes", (make.gauss(size, 1) * 50).to(torch.int8), None, {}


def crc_differs(data: Any, _: Any, options: dict[str, Any]) -> str:
    """CRC-32s of ranges that begin and end anywhere, and of rows, against zlib's; what is wrong, or nothing."""
    from maxsim_eval.crc import device_ranges, device_rows

    base, held, size = data.data_ptr(), data.cpu().numpy().tobytes(), data.numel()
    cuts = [(0, size), (1, size), (0, size - 1), (size // 2, size // 2), (size // 3, size - 3)]
    words = device_ranges.remainders([(base + first, base + last) for first, last in cuts], data.device).cpu().numpy()
    found = [device_ranges.crc_of(word, base + first, base + last) for (first, last), word in zip(cuts, words, strict=True)]
    if found != [zlib.crc32(held[first:last]) for first, last in cuts]:
        return "another CRC-32 than zlib's"
    for width in (4, 132, 1536):
        rows = data[: size // width * width].view(-1, width)
        sums = device_rows.row_sums(rows)
        if sums is None or (len(rows) and sums.cpu().numpy().view(np.uint32)[-1] != sums_of(rows[-1:].cpu(), len(rows) - 1)[0]):
            return f"other sums of rows of {width} bytes than zlib's"
    return ""


def nonzero_cases() -> Iterator[Case]:
    """Tokens of which some are zeros, with a tail in every tile and across it."""
    for rows, width, dtype in ((1, 1, SINGLE), (33, 127, HALF), (65, 129, BFLOAT), (31, 300, SINGLE)):
        tokens = make.gauss(rows * width, 1).view(rows, width).to(dtype)
        tokens[::3] = 0
        tokens[rows // 2, -1] = torch.nan
        yield f"nonzero rows {rows} x {width} {dtype}", tokens, None, {}


def nonzero_differs(tokens: Any, _: Any, options: dict[str, Any]) -> str:
    """Which rows hold anything, against the CPU's; what is wrong, or nothing."""
    from maxsim_kernels.gpu.nonzero import nonzero_rows

    return "" if torch.equal(nonzero_rows(tokens).cpu(), tokens.cpu().ne(0).any(1)) else "other rows than torch finds"


def chamfer_cases() -> Iterator[Case]:
    """Clouds that leave a tail in every tile, of every way through the kernels."""
    for d, dtype, n, m in ((3, SINGLE, 1, 1), (3, SINGLE, 700, 1301), (3, HALF, 65, 1301),
                           (128, SINGLE, 300, 517), (128, BFLOAT, 65, 70), (100, HALF, 31, 300)):  # fmt: skip
        yield f"chamfer d={d} {dtype} {n}x{m}", make.gauss(n, d, dtype=dtype), make.gauss(m, d, dtype=dtype, seed=1), {}


def chamfer_differs(p: Any, q: Any, options: dict[str, Any]) -> str:
    """Distance and gradients against plain torch in float64 on the CPU; what is wrong, or nothing."""
    leaves = [cloud.clone().requires_grad_() for cloud in (p, q)]
    found = chamfer_distance(*leaves)
    found.backward()
    truths = [cloud.cpu().double().requires_grad_() for cloud in (p, q)]
    squares = torch.cdist(*truths, compute_mode="donot_use_mm_for_euclid_dist").square()
    need = squares.amin(1).mean() + squares.amin(0).mean()
    need.backward()
    pairs = [(found.detach(), need.detach()), *((leaf.grad, truth_.grad) for leaf, truth_ in zip(leaves, truths, strict=True))]
    for name, (got, want) in zip(("distance", "dp", "dq"), pairs, strict=True):
        worst = float((got.cpu().double() - want).abs().max())
        if not worst <= (1e-4 if p.dtype == SINGLE else 2e-2) * float(want.abs().max()) + 1e-6:
            return f"{name}: {worst} off"
    return ""


def stream_cases() -> Iterator[Case]:
    """Blocks of the host, of every kind, whose sizes differ."""
    counts = [[3, 0, 31, 1], [130], [0], [65, 64, 63, 1, 2]]
    blocks = [make.packed(each, 128, seed=n + 1) for n, each in enumerate(counts)]
    dense = [make.gauss(n, 70, 128, seed=n) for n in (4, 1, 6)]
    kinds = {
        "packed": blocks,
        "int8": [quantize_int8(one) for one in blocks],
        "fp8": [quantize_fp8(one) for one in blocks],
        "dense": dense,
    }
    for queries in (1, 6, 40):
        for kind, given in kinds.items():
            yield f"stream {kind}, {queries} queries", make.gauss(queries, 17, 128), given, {}


def stream_differs(queries: Any, blocks: Any, options: dict[str, Any]) -> str:
    """The best documents of a stream, against those of the same blocks scored at once; what is wrong, or nothing."""
    scores, found = stream_topk(queries, [on_cpu(one) for one in blocks], 5, memory_budget=1 << 30)
    every = torch.cat([maxsim(queries, one) for one in blocks], 1)
    order = torch.sort(every, dim=1, descending=True, stable=True).indices[:, :5].to(found)
    best = every.gather(1, order.to(every.device).long()).to(scores)
    return "" if torch.equal(scores, best) and torch.equal(found, order) else "other documents, or other scores"


def search_cases() -> Iterator[Case]:
    """Certified searches over every kind of codes, with documents on either side; each query has a document of its own tokens."""
    near = make.gauss(6, 17, 128)
    documents = make.packed([17] * 6 + [1 + n * 7 % 66 for n in range(300)], 128, seed=1)
    documents.values[: 6 * 17] = near.flatten(0, 1)
    forms = {"int8 token": quantize_int8(documents), "int8 document": quantize_int8(documents, "document")}
    forms |= {"fp8": quantize_fp8(documents), "affine": quantize_int8(documents, "token", True)}
    for name, codes in forms.items():
        for queries in (near[0].clone(), near, near.repeat(7, 1, 1)):
            for where in ("device", "host"):
                held = documents if where == "device" else on_cpu(documents)
                stored = {"codes": codes, "residuals": residuals_of(documents, codes)}
                yield f"search {name}, {list(queries.shape)}, {where}", queries, held, stored


def search_differs(queries: Any, documents: Any, options: dict[str, Any]) -> str:
    """A certified search against brute force, bit for bit; what is wrong, or nothing."""
    scores, found, _ = exact_topk(queries, documents, 1, **options)
    best, order = stream_topk(queries, [documents], 1, memory_budget=1 << 30)
    return "" if torch.equal(scores, best) and torch.equal(found, order) else "other documents, or other scores"


def broken_offsets() -> int:
    """Offsets and starts that break their promises: what comes out is undefined, that nothing outside is touched is not."""
    values, few = make.gauss(300, 128), make.gauss(6, 17, 128)
    falling = torch.tensor([0, 300] * 30, device=make.device)
    wild = torch.tensor([-5, 0, 299, 300, 2**31 - 1, 2**40], device=make.device)
    cases = [
        Packed(values, falling),
        Packed(values, falling * 1000),
        Packed.view(values, wild, wild.abs()),
        Packed.view(values, wild, -wild),
    ]
    calls = 0
    for rows in cases:
        for queries in (few, few[0].clone(), make.packed(ASKED, 128)):
            maxsim(queries, rows)
            maxsim(queries, quantize_like(rows))
            calls += 2
        for path in ("unified", "atomic", "csr"):
            maxsim(few.clone().requires_grad_(), rows, backward=path).nan_to_num(0.0, 0.0, 0.0).sum().backward()
            maxsim(few, rows.with_values(values.clone().requires_grad_()), backward=path).nan_to_num(
                0.0, 0.0, 0.0
            ).sum().backward()
            calls += 2
            asked = rows.with_values(values.clone().requires_grad_())
            maxsim(asked, make.gauss(6, 70, 128), backward=path).nan_to_num(0.0, 0.0, 0.0).sum().backward()
            maxsim(asked, rows, backward=path).nan_to_num(0.0, 0.0, 0.0).sum().backward()
            calls += 2
        maxsim_pairs(make.gauss(len(rows), 17, 128), rows)
        maxsim_pairs(rows, rows)
        calls += 2
    torch.cuda.synchronize()
    return calls


def quantize_like(rows: Packed) -> Int8Tokens:
    """INT8 codes for the same starts and lengths, broken or not."""
    stored = quantize_int8(rows.values.unsqueeze(0))
    return Int8Tokens(rows.with_values(stored.token_values[0]), stored.scales[0], granularity="token")


def main() -> int:
    """Run all cases, or those whose names hold a word, or every N-th."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--part", type=share, default=(0, 1), metavar="K/N", help="run every N-th case, from the K-th on")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    warnings.filterwarnings("error", message="maxsim_kernels")
    part, parts = options.part
    checks: list[tuple[Iterator[Case], Any, int]] = [
        (float_cases(), right, 1),
        (quantized_cases(), right, 1),
        (gradient_cases(), gradients_differ, 3),
        (chamfer_cases(), chamfer_differs, 1),
        (stream_cases(), stream_differs, 1),
        (coded_cases(), coded_differs, 1),
        (search_cases(), search_differs, 1),
        (loss_cases(), loss_differs, 3),
        (crc_cases(), crc_differs, 1),
        (nonzero_cases(), nonzero_differs, 1),
    ]
    every = ((case, judged, each) for cases, judged, each in checks for case in cases if options.only in case[0])
    calls, wrong = 0, 0
    for (name, queries, documents, how), judged, each in tqdm(itertools.islice(every, part, None, parts), unit="case"):
        calls += each
        message = judged(queries, documents, how)
        torch.cuda.synchronize()
        if message:
            wrong += 1
            print(f"WRONG {name}: {message}", flush=True)
    print(f"{calls} calls, {wrong} wrong", flush=True)
    if not options.only and not part:
        print(f"{broken_offsets()} calls with broken offsets")
    return 1 if wrong or not calls else 0


if __name__ == "__main__":
    sys.exit(main())
