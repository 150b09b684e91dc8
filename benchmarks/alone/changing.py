"""Host time of calls whose shapes change every time, beside repeated ones, by us and both peers, on a GPU.

    python benchmarks/alone/changing.py [--json FILE] [--calls 200]

One query of 32 tokens, d = 128, FP16. Ragged: 1000 documents of 60 to 300 tokens, a new total each call. Dense: 800 to 1200 documents
of 180 tokens, a new number each call. Repeated: one of those shapes. Scores of some of the shapes are compared with float64, ours to
the contract, before anything is written. `us`: mean by the host's clock, calls issued one after the other, one wait at the end.
`compiled`: kernels that Triton compiled or fetched from its disk cache meanwhile; `graphs`: what torch.compile traced anew; `first` is
the first pass over the shapes, `again` a pass over other shapes of the same kind. The same calls inside `torch.compile(dynamic=True,
fullgraph=True)` are rows of their own, and naive FP16 compiled so beside them (dense).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from triton import knobs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_kernels import Packed, maxsim, warmup
from measure import installed
from measure.names import FLASH, LIK
from measure.session import about
from results.file import write

SCHEMA = "maxsim-kernels/changing/1"
COUNT, SIZE, LENGTH, WIDTH = 1000, 32, 180, 128
SHORTEST, LONGEST = 60, 300
BOUND = 1e-2  # of a score of 32 unit tokens: peers round more than we do
OWN_BOUND = 2e-6 * SIZE
OURS_COMPILED, NAIVE_COMPILED = "ours in torch.compile", "naive FP16 in torch.compile"
Way = Callable[[Any], Tensor]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of kernels that Triton compiles, or fetches from its disk cache, while the block runs."""
    found: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **about: found.append(str(about.get("repr")))
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def ragged_shapes(tokens: Tensor, calls: int, seed: int) -> list[Packed]:
    """Packed documents, a new total each."""
    drawn, made = random.Random(seed), []
    for _ in range(calls):
        lengths = torch.tensor([drawn.randint(SHORTEST, LONGEST) for _ in range(COUNT)])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        made.append(Packed(tokens[: int(offsets[-1])], offsets.cuda()))
    return made


def dense_shapes(tokens: Tensor, calls: int, seed: int) -> list[Tensor]:
    """Documents of one length, a new number each."""
    drawn = random.Random(seed)
    counts = [drawn.randint(COUNT * 4 // 5, COUNT * 6 // 5) for _ in range(calls)]
    return [tokens[: count * LENGTH].view(count, LENGTH, WIDTH) for count in counts]


def compiled_ways(query: Tensor, ragged: bool) -> dict[str, Way]:
    """Calls inside a compiled function, shapes dynamic."""

    def packed(query: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        return maxsim(query, Packed(values, offsets))  # type: ignore[return-value]

    def dense(query: Tensor, documents: Tensor) -> Tensor:
        return maxsim(query, documents)  # type: ignore[return-value]

    def naive(query: Tensor, documents: Tensor) -> Tensor:
        return torch.einsum("qd,nld->nql", query, documents).amax(2).float().sum(1)

    def of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=True, fullgraph=True)  # type: ignore[no-any-return]

    if ragged:
        run = of(packed)
        return {OURS_COMPILED: lambda held: run(query, held[0].values, held[0].offsets)}
    mine, theirs = of(dense), of(naive)
    return {OURS_COMPILED: lambda held: mine(query, held[0]), NAIVE_COMPILED: lambda held: theirs(query, held[0])}


def ways(query: Tensor, ragged: bool) -> dict[str, Way]:
    """Each method's call of one shape; what a peer needs besides (`held`) is made before the clock runs."""
    found: dict[str, Way] = {"ours": lambda held: maxsim(query, held[0])}  # type: ignore[dict-item,return-value]
    found |= compiled_ways(query, ragged)
    flash, lik = installed.load(FLASH), installed.load(LIK)
    starts = torch.tensor([0, SIZE], dtype=torch.int32, device="cuda")
    if not isinstance(flash, str):
        packed, dense = (getattr(flash, f"flash_maxsim{name}") for name in ("_packed", ""))
        found[FLASH] = (lambda held: packed(query, *held[1])) if ragged else (lambda held: dense(query, held[0]))
    if not isinstance(lik, str):
        varlen, plain = lik.maxsim_varlen, lik.maxsim
        found[LIK] = (
            (lambda held: varlen(query, held[1][0], starts, held[1][1])) if ragged else (lambda held: plain(query, held[0]))
        )
    return found


def held(shapes: list[Any]) -> list[tuple[Any, tuple[Tensor, Tensor, int] | None]]:
    """Each shape with what the peers' packed calls take."""
    return [
        (one, (one.values, one.offsets.int(), int(one.lengths.max())) if isinstance(one, Packed) else None) for one in shapes
    ]


def exact(query: Tensor, documents: Any) -> Tensor:
    """Scores in float64."""
    if isinstance(documents, Packed):
        products = documents.values.double() @ query.double().T
        bounds = documents.offsets.tolist()  # type: ignore[union-attr]
        return torch.stack([products[low:high].amax(0).sum() for low, high in itertools.pairwise(bounds)])
    return (documents.double() @ query.double().T).amax(1).sum(1)


def timed(way: Way, shapes: list[Any]) -> float:
    """Microseconds a call, by the host's clock."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for one in shapes:
        way(one)
    issued = time.perf_counter() - started
    torch.cuda.synchronize()
    return issued / len(shapes) * 1e6


def measured(way: Way, first: list[Any], again: list[Any]) -> dict[str, float]:
    """One method's times: of a first pass, which may compile, of a pass over other shapes, and of one shape again and again."""
    row: dict[str, float] = {}
    for name, shapes in (("first", first), ("again", again), ("repeated", [again[0]] * len(again))):
        traced = counters["stats"]["unique_graphs"]
        with compilations() as compiled:
            row[f"{name} us"] = round(timed(way, shapes), 1)
        row[f"{name} compiled"] = len(compiled)
        row[f"{name} graphs"] = counters["stats"]["unique_graphs"] - traced
    return row


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--warmup", action="store_true", help="maxsim_kernels.warmup() first: no call may compile then")
    options = parser.parse_args(arguments)
    if options.warmup:
        print(warmup(queries=((1, SIZE),), document_tokens=(LENGTH,)))
    report: dict[str, Any] = {"schema": SCHEMA, "warmup": options.warmup, **about(), "rows": {}}
    source = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randn(COUNT * LONGEST, WIDTH, device="cuda", generator=source)
    tokens = torch.nn.functional.normalize(tokens, dim=-1).half()
    query = torch.nn.functional.normalize(torch.randn(SIZE, WIDTH, device="cuda", generator=source), dim=-1).half()
    for name, make in (("ragged", ragged_shapes), ("dense", dense_shapes)):
        first, again = (held(make(tokens, options.calls, seed)) for seed in (1, 2))
        for method, way in ways(query, name == "ragged").items():
            row = measured(way, first, again)
            for one in again[:5]:
                apart = float((way(one).double().flatten() - exact(query, one[0])).abs().max())
                if not apart <= (OWN_BOUND if method.startswith("ours") else BOUND):
                    raise SystemExit(f"{name}, {method}: {apart:.3g} from float64; nothing written")
            report["rows"][f"{name}, {method}"] = row
            print(name, method, row, flush=True)
    write(options.json, report)


if __name__ == "__main__":
    main()
