"""Random calls of the operator by seed, each compared with its truth in float64: what `tests/gpu/soak.py` runs for an hour.

A seed says everything: shapes (odd, empty, large), dtypes, layouts, masks, strides, codes, winners, gradients, numbers. A case that
disagrees raises AssertionError; whatever else it raises is a finding too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import coded_cases
import gradient_truth
import truth
from inputs import Makers, dirty, same_bits, scattered, strided, values_of
from maxsim_kernels import Packed, chamfer_distance, maxsim, quantize_fp8, quantize_int8

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
STRIDES = ("transposed", "batch inside", "every second element", "wider rows", "odd rows", "unaligned")
ADDED = 1 << 12  # terms of a document token, in the mean, up to which float atomics keep the bound of a gradient
CHAMFER = {SINGLE: 1e-4, HALF: 2e-2, BFLOAT: 2e-2}  # of the largest entry: the rounding of a gradient to its dtype


@dataclass(frozen=True)
class Size:
    """What a case may be at most, and what it is drawn from.

    `cells`: products of tokens. `values`: numbers in its documents. `winners`: of query tokens in documents, and `gathered` those
    times d where the truth looks at what won.
    """

    cells: int
    values: int
    winners: int
    gathered: int
    widths: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    points: tuple[int, ...]


LARGE = Size(
    1 << 29, 1 << 27, 1 << 24, 1 << 28, (1, 7, 16, 31, 64, 96, 100, 128, 128, 128, 129, 256, 384, 768, 1000, 2048),
    (1, 1, 2, 3, 7, 16, 31, 64, 130, 500, 1000, 5000, 20_000), (0, 1, 5, 16, 31, 32, 33, 63, 64, 65, 100, 128, 180, 300, 705, 1024, 4000),
    (1, 2, 31, 500, 3000, 9000),
)  # fmt: skip
SMALL = Size(
    1 << 15, 1 << 13, 1 << 10, 1 << 15, (1, 7, 16, 31, 64), (1, 2, 3, 7, 16), (0, 1, 5, 16, 31, 33, 65), (1, 2, 31, 100)
)  # fmt: skip


@dataclass
class Case:
    """One call: what it is in words, and a function that compares it with the truth."""

    seed: int
    about: list[str] = field(default_factory=list)
    check: Callable[[], None] = lambda: None

    @property
    def kind(self) -> str:
        """What it is counted under: the operator, the layout, what is stored."""
        return ", ".join(self.about[:3])

    def __str__(self) -> str:
        return f"seed {self.seed}: {', '.join(self.about)}"


class Draw:
    """Everything a case draws, on a device."""

    def __init__(self, seed: int, device: str, size: Size) -> None:
        self.seed, self.device, self.size, self.random = seed, device, size, random.Random(seed)
        self.dtype = self.random.choice((HALF, HALF, HALF, BFLOAT, SINGLE))
        self.make = Makers(device, self.dtype, levels=2, step=1, exact=False)
        self.tokens = self.random.choice((self.make.gauss, self.make.gauss, self.make.unit, self.make.grid))
        self.d = self.random.choice(size.widths)

    def likely(self, share: float) -> bool:
        return self.random.random() < share

    def shapes(self, own: bool, winners: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """(queries, tokens each) and (documents, tokens each), as large as the size lets them be; `own`: of every query."""
        choose, size = self.random.choice, self.size
        count, asked, documents, tokens = (choose(size.counts), choose(size.tokens), choose(size.counts), choose(size.tokens))
        while True:
            each = count if own else 1
            fits = (
                count * asked * documents * tokens <= size.cells
                and each * documents * tokens * self.d <= size.values
                and count * asked * self.d <= size.values
                and count * documents * asked <= size.winners
                and (not winners or count * documents * asked * self.d <= size.gathered)
            )
            if fits:
                return (count, asked), (documents, tokens)
            largest = max(count, asked, documents, tokens)
            if largest == documents:
                documents = documents * 2 // 3
            elif largest == count:
                count = count * 2 // 3
            elif largest == asked:
                asked = asked * 2 // 3
            else:
                tokens = tokens * 2 // 3

    def lengths(self, count: int, longest: int) -> list[int]:
        """Of `count` ragged rows: some empty, some the longest."""
        return [
            self.random.choice((0, longest, self.random.randint(0, longest), self.random.randint(0, longest)))
            for _ in range(count)
        ]

    def packed(self, count: int, longest: int, seed: int) -> Packed:
        index = self.random.choice((torch.int32, torch.int64))
        return self.make.packed(self.lengths(count, longest), self.d, seed=seed, index=index, make=self.tokens)


LAYOUTS = ("dense", "dense", "lengths", "padding", "holes", "mask and lengths", "packed", "packed", "views", "strided",
           "per query", "pairs", "ragged pairs", "packed queries", "both packed")  # fmt: skip


def _documents(draw: Draw, layout: str, shape: tuple[int, ...]) -> tuple[Any, dict[str, Tensor]]:
    """Documents of a layout, dirty where nothing counts, and what says so. `shape`: [N, L] or [Nq, N, L]."""
    make, seed = draw.make, draw.seed
    if layout in ("packed", "views", "ragged pairs", "both packed"):
        rows = draw.packed(shape[-2], shape[-1], seed + 1)
        return (scattered(rows, seed=seed) if layout == "views" else rows), {}
    tokens = draw.tokens(*shape, draw.d, seed=seed + 1)
    said: dict[str, Tensor] = {}
    if layout == "padding":
        ends = make.lengths(*shape[:-1], high=shape[-1], seed=seed)
        said["document_mask"] = torch.arange(shape[-1], device=draw.device) < ends.unsqueeze(-1)
    elif layout in ("holes", "mask and lengths") or (layout in ("per query", "pairs") and draw.likely(0.5)):
        kind = "mask" if layout == "holes" else "both"
        dtype = draw.random.choice((torch.bool, torch.uint8, torch.int64))
        said = make.masks(kind, "document", *shape, seed=seed, mask_dtype=dtype)
    elif layout == "lengths":
        said["document_lengths"] = make.lengths(*shape[:-1], high=shape[-1], seed=seed)
    if said:
        tokens = dirty(tokens, said.get("document_mask"), said.get("document_lengths"))
    if layout == "strided" and tokens.numel():
        tokens = strided(tokens, draw.random.choice(STRIDES))
    return tokens, said


def _queries(draw: Draw, layout: str, shape: tuple[int, int]) -> tuple[Any, dict[str, Tensor]]:
    count, size = shape
    if layout in ("packed queries", "both packed", "ragged pairs"):
        return draw.packed(count, size, draw.seed), {}
    tokens, said = draw.tokens(count, size, draw.d, seed=draw.seed), {}
    if draw.likely(0.3):
        said = draw.make.masks(draw.random.choice(("mask", "lengths", "both")), "query", count, size, seed=draw.seed + 2)
        tokens = dirty(tokens, said.get("query_mask"), said.get("query_lengths"))
    if layout == "strided" and tokens.numel():
        tokens = strided(tokens, draw.random.choice(STRIDES))
    return tokens, said


def _call(draw: Draw, case: Case, layouts: tuple[str, ...], winners: bool) -> tuple[Any, Any, bool, dict[str, Any]]:
    """Queries, documents, whether they are pairs, and the masks and lengths; `case` is told."""
    layout = draw.random.choice(layouts)
    pairs, own = layout in ("pairs", "ragged pairs"), layout == "per query"
    asked, shape = draw.shapes(own or pairs, winners)
    count = asked[0] if pairs else shape[0]
    documents, said = _documents(draw, layout, (asked[0], *shape) if own else (count, shape[1]))
    queries, more = _queries(draw, layout, asked)
    if layout in ("dense", "packed") and not more and asked[0] and draw.likely(0.2):
        queries = queries[0]  # one query, without its axis
        asked = (1, asked[1])
    case.about += [layout, f"{asked[0]} x {asked[1]} queries", f"{count} x {shape[1]} documents", f"d = {draw.d}"]
    case.about += [str(draw.dtype).removeprefix("torch."), *sorted({**said, **more})]
    return queries, documents, pairs, {**said, **more}


def float_case(draw: Draw, case: Case) -> None:
    """Scores and winners of float tokens; now and then NaN among them, and a part of the documents by itself."""
    winners = draw.likely(0.4)
    queries, documents, pairs, said = _call(draw, case, LAYOUTS, winners)
    case.about.insert(2, "float")
    values = documents.values if isinstance(documents, Packed) else documents
    if not said and values.numel() and values.is_contiguous() and draw.likely(0.05):
        values.view(-1)[draw.random.randrange(values.numel())] = torch.nan
        case.about.append("NaN")
    case.about += ["winners"] * winners
    cut = case.about[1] in ("dense", "strided", "lengths", "padding") and draw.likely(0.4) and len(documents) > 1

    def check() -> None:
        scores = truth.agree(queries, documents, pairs=pairs, return_argmax=winners, **said)
        again: Any = maxsim(queries, documents, **said) if not pairs else scores
        assert winners or pairs or same_bits(again, scores), "other bits when called again"
        if cut and not winners:
            first = draw.random.randrange(len(documents) - 1)
            last = draw.random.randint(first + 1, len(documents))
            part = {name: value[first:last] if name.startswith("document") else value for name, value in said.items()}
            some: Any = maxsim(queries, documents[first:last], **part)
            assert same_bits(some.contiguous(), scores[..., first:last].contiguous()), (
                f"documents {first} to {last} have other bits"
            )

    case.check = check


def code_case(draw: Draw, case: Case) -> None:
    """INT8 of every granularity, affine too, and FP8 where the device has it; quantised and float queries."""
    winners = draw.likely(0.3)
    layouts = ("dense", "lengths", "padding", "holes", "packed", "packed", "per query", "pairs", "both packed")
    queries, documents, pairs, said = _call(draw, case, layouts, winners)
    kinds = ["int8 token", "int8 document", "int8 corpus", "int8 token affine", "int8 document affine"]
    if draw.device == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        kinds += ["fp8 token", "fp8 document"]
    kind, granularity, *affine = draw.random.choice(kinds).split()
    more: dict[str, Any] = {"quantize_queries": False} if draw.likely(0.25) else {}
    case.about.insert(2, " ".join([kind, granularity, *affine]))
    case.about += ["float queries"] * bool(more) + ["winners"] * winners
    dense = {name.removeprefix("document_"): value for name, value in said.items() if name.startswith("document")}
    about: dict[str, Any] = {"granularity": granularity, **dense} | ({"affine": True} if affine else {})
    stored = (quantize_int8 if kind == "int8" else quantize_fp8)(documents, **about)

    def check() -> None:
        truth.agree(queries, stored, pairs=pairs, return_argmax=winners, **said, **more)

    case.check = check


def gradient_case(draw: Draw, case: Case) -> None:
    """A training step by every path, against sums in float64 over the kernel's own winners."""
    queries, documents, pairs, said = _call(draw, case, tuple(one for one in LAYOUTS if one != "strided"), True)
    path = draw.random.choice(("auto", "csr", "atomic", "unified"))
    asked, held = (values_of(one).shape[:-1].numel() for one in (queries, documents))
    each = 1 if pairs else documents.shape[1] if isinstance(documents, Tensor) and documents.dim() == 4 else len(documents)
    if asked * each > ADDED * held:  # atomics add one term after the other, rounded each time (docs/training.md)
        path = "csr"
    case.about.insert(2, path)

    def upstream(*shape: int) -> Tensor:
        return draw.make.gauss(*shape, dtype=SINGLE, seed=draw.seed + 9)

    case.check = lambda: _ignored(
        gradient_truth.agree(queries, documents, pairs=pairs, backward=path, upstream=upstream, **said)
    )


def _ignored(_: object) -> None:
    return None


def coded_case(draw: Draw, case: Case) -> None:
    """`BitTokens` and `ResidualTokens`."""
    kind, bits, pairs = draw.random.choice(("bits", "unit", "free")), draw.random.choice((1, 2, 4)), draw.likely(0.3)
    count, asked = draw.random.choice((1, 3, 9)), draw.random.choice((1, 7, 32, 65))
    lengths = draw.lengths(count if pairs else draw.random.choice((1, 5, 17)), draw.random.choice(draw.size.tokens))
    dim = min(draw.d, 768)
    documents = coded_cases.coded(kind, bits, dim, lengths, device=draw.device, seed=draw.seed)
    queries = draw.make.gauss(count, asked, dim, seed=draw.seed)
    more = {"quantize_queries": False} if kind == "bits" and draw.likely(0.5) else {}
    case.about += ["pairs" if pairs else "packed", f"{kind} {bits} bits", f"{count} x {asked} queries"]
    case.about += [
        f"{len(lengths)} documents of up to {max(lengths)}",
        f"d = {dim}",
        str(draw.dtype).removeprefix("torch."),
        *more,
    ]
    case.check = lambda: _ignored(coded_cases.agree(queries, documents, pairs=pairs, **more))


def chamfer_case(draw: Draw, case: Case) -> None:
    """The Chamfer distance and both gradients, but for points whose part in them hangs on what FP32 cannot tell: which of two is nearest."""
    points = [draw.random.choice(draw.size.points) for _ in range(2)]
    d = min(draw.d, 256)
    p, q = (draw.make.gauss(count, d, seed=draw.seed + n) for n, count in enumerate(points))
    case.about += ["clouds", str(draw.dtype).removeprefix("torch."), f"{points[0]} and {points[1]} points", f"d = {d}"]

    def check() -> None:
        leaves = [cloud.clone().requires_grad_() for cloud in (p, q)]
        found = chamfer_distance(*leaves)
        given = torch.autograd.grad(found, leaves)
        need, wanted, unsure = _chamfer_truth(p, q)
        pairs = [(found.detach(), need), *zip(given, wanted, strict=True)]
        for name, (got, value), left_out in zip(("distance", "dp", "dq"), pairs, (None, *unsure), strict=True):
            apart = (got.double() - value).abs()
            off = float((apart if left_out is None else apart.masked_fill(left_out.unsqueeze(1), 0.0)).max())
            allowed = (1e-4 if name == "distance" else CHAMFER[draw.dtype]) * float(value.abs().max()) + 1e-6
            assert off <= allowed, f"{name}: off by {off:.3g}, {allowed:.3g} allowed"

    case.check = check


def _chamfer_truth(p: Tensor, q: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The distance, both gradients, and the rows of these that depend on which of two equally near points, but for rounding, is taken."""
    clouds = [cloud.double().requires_grad_() for cloud in (p, q)]
    total = clouds[0].new_zeros(())
    unsure = [torch.zeros(len(cloud), dtype=torch.bool, device=cloud.device) for cloud in (p, q)]
    for (points, others), (own, theirs) in zip((clouds, clouds[::-1]), (unsure, unsure[::-1]), strict=True):
        with torch.no_grad():
            step = max(1, (1 << 24) // len(others))
            found = [
                torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist").topk(min(2, len(others)), largest=False)
                for some in points.split(step)
            ]
            squares, near = (torch.cat([one[part] for one in found]) for part in (0, 1))
            squares = squares.square()
            if len(others) > 1:
                tied = squares[:, 1] - squares[:, 0] <= 1e-5 * squares[:, 1]
                own[tied] = True
                theirs[near[tied].flatten()] = True
        total = total + (points - others[near[:, 0]]).square().sum(1).mean()
    return total.detach(), list(torch.autograd.grad(total, clouds)), unsure


MAKERS: dict[str, tuple[int, Callable[[Draw, Case], None]]] = {  # how often, of all
    "scores": (8, float_case),
    "codes": (5, code_case),
    "gradients": (4, gradient_case),
    "coded": (2, coded_case),
    "Chamfer": (1, chamfer_case),
}


def case_of(seed: int, device: str, size: Size) -> Case:
    """The case of a seed."""
    draw = Draw(seed, device, size)
    (name,) = draw.random.choices(list(MAKERS), [often for often, _ in MAKERS.values()])
    case = Case(seed, [name])
    MAKERS[name][1](draw, case)
    return case
