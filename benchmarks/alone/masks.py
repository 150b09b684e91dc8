"""What masks cost beside lengths and neither, and FP32 tokens by IEEE products, by TF32, cast to FP16 and by the peers.

    python benchmarks/alone/masks.py [--json FILE] [--seconds 120]

Documents of 90 to 180 tokens (ColPali: 512 to 1024) padded to the longest, d = 128. "mask full" leaves every token in, "mask padding" says
what lengths say, "mask holes" also takes a tenth of the tokens out, "mask a tenth holed" does so in a tenth of the documents, "query mask"
takes the last quarter of each query out. Scores of 16 documents are compared with float64 first; beyond 64 query rows "mask full" must have
the bits of no mask and "mask padding" those of lengths (the stream kernel of fewer rows adds in another order: within 2e-6 of the norms).
Medians of CUDA events in ms, the L2 flushed, methods in turns. flash-maxsim and late-interaction-kernels where they can be imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script

from alone.record import Record, begun, medians, require, unit
from maxsim_kernels import maxsim, maxsim_reference
from measure import installed, score_truth, session, timing
from measure.method import EXACT, LOOSE
from measure.names import FLASH, LIK
from rivals import peers

SCHEMA = "maxsim-kernels/masks/1"
D = 128
MASKED = {
    "16 queries": (16, 32, 4096, 180),
    "256 queries": (256, 32, 4096, 180),
    "ColPali 1K": (1, 1024, 1000, 1024),
    "1 query": (1, 32, 4096, 180),
}
SINGLE = ((32, 32, 2000, 180), (1, 32, 1000, 180), (256, 32, 4096, 128))
STREAMED = 64  # query rows up to which a mask may change the order of sums
Masks = dict[str, Tensor]


def masks(queries: int, rows: int, documents: int, tokens: int, device: str = timing.DEVICE) -> dict[str, Masks]:
    """What `maxsim` is given beside queries and documents, by method."""
    random = torch.Generator(device).manual_seed(5)
    lengths = torch.randint(tokens // 2, tokens + 1, (documents,), device=device, generator=random)
    padding = torch.arange(tokens, device=device) < lengths[:, None]
    kept = torch.rand(documents, tokens, device=device, generator=random) > 0.1
    whole = torch.rand(documents, 1, device=device, generator=random) > 0.1
    asked = torch.ones(queries, rows, dtype=torch.bool, device=device)
    asked[:, rows * 3 // 4 :] = False
    return {
        "plain": {},
        "lengths": {"document_lengths": lengths},
        "mask full": {"document_mask": torch.ones_like(padding)},
        "mask padding": {"document_mask": padding},
        "mask holes": {"document_mask": padding & kept},
        "mask a tenth holed": {"document_mask": padding & (kept | whole)},
        "query mask": {"query_mask": asked},
    }


def scale(queries: Tensor, documents: Tensor) -> Tensor:
    """`sum_i |Q_i| * max_j |D_j|` of every pair."""
    return queries.double().norm(dim=-1).sum(-1)[:, None] * documents.double().norm(dim=-1).amax(-1)


def error(scores: Tensor, queries: Tensor, documents: Tensor, given: Masks) -> float:
    """The largest distance of some documents' scores from float64's, in units of the norms."""
    chosen = score_truth.numbers(len(documents))
    few = {name: (held if name.startswith("query") else held[chosen]).cpu() for name, held in given.items()}
    asked, part = queries.cpu(), documents[chosen].cpu()
    truth = maxsim_reference(asked, part, **few, dtype=torch.float64)  # type: ignore[arg-type]
    assert isinstance(truth, Tensor)
    return float(((scores[:, chosen].cpu().double() - truth).abs() / scale(asked, part)).max())


def check(name: str, queries: Tensor, documents: Tensor, methods: dict[str, Masks]) -> None:
    """Ends the program where scores are not float64's, or masks that say what others say give others."""
    found = {method: maxsim(queries, documents, **given) for method, given in methods.items()}  # type: ignore[arg-type]
    for method, given in methods.items():
        far = error(found[method], queries, documents, given)
        require(far <= EXACT, f"{name}, {method}: {far:.1e} from float64, need {EXACT}")
    streamed = queries.shape[0] * queries.shape[1] <= STREAMED
    for method, other in (("mask full", "plain"), ("mask padding", "lengths")):
        if streamed:
            apart = (found[method].double() - found[other]).abs() / scale(queries, documents)
            require(float(apart.max()) <= EXACT, f"{name}: {method} is not {other} within {EXACT} of the norms")
        else:
            require(torch.equal(found[method], found[other]), f"{name}: {method} has not the bits of {other}")


def row(name: str, queries: Tensor, documents: Tensor, times: dict[str, float]) -> dict[str, Any]:
    """A row of the file."""
    shapes = {"queries": list(queries.shape), "documents": list(documents.shape)}
    return {"row": name, **shapes, "dtype": str(queries.dtype).removeprefix("torch."), "median_ms": times}


def time_masks(record: Record, flush: timing.Flush) -> None:
    """FP16 with masks and lengths."""
    for name, (count, rows, documents, tokens) in MASKED.items():
        if record.late(name):
            continue
        held, packed = unit(count, rows, D), unit(documents, tokens, D, seed=1)
        methods = masks(count, rows, documents, tokens)
        check(name, held, packed, methods)
        calls = {method: partial(maxsim, held, packed, **given) for method, given in methods.items()}  # type: ignore[arg-type]
        record.add(row(name, held, packed, medians(calls, flush)))


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """FP32 products in "ieee" or "tf32" for a block."""
    backend: Any = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before


def by_tf32(queries: Tensor, documents: Tensor) -> Tensor:
    """Ours by TF32."""
    with products("tf32"):
        return maxsim(queries, documents)


def single_methods(record: Record, name: str, queries: Tensor, documents: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Who scores FP32 tokens rightly; a peer that does not is left out, and one of ours ends the program."""
    small = queries.half(), documents.half()
    calls: dict[str, Callable[[], Tensor]] = {
        "ieee": lambda: maxsim(queries, documents),
        "tf32": lambda: by_tf32(queries, documents),
        "fp16": lambda: maxsim(*small),
        "cast + fp16": lambda: maxsim(queries.half(), documents.half()),
    }
    for method, call in calls.items():
        far, allowed = error(call(), queries, documents, {}), EXACT if method == "ieee" else LOOSE
        require(far <= allowed, f"{name}, {method}: {far:.1e} from float64, need {allowed}")
    lineup = peers.dense((FLASH, LIK), queries, documents)
    for other in lineup.methods:
        (call,) = other.entries.values()
        try:
            far = error(call(), queries, documents, {})
        except session.failures() as problem:
            lineup.skipped[other.name] = session.reason(problem)
            continue
        if far <= other.bound:
            calls[other.name] = call
        else:
            lineup.skipped[other.name] = f"{far:.1e} from float64, need {other.bound}"
    for other_name, why in lineup.skipped.items():
        record.leave_out(f"{name}, {other_name}", why)
    return calls


def time_single(record: Record, flush: timing.Flush) -> None:
    """FP32 tokens."""
    for count, rows, documents, tokens in SINGLE:
        name = f"FP32, {count} {'query' if count == 1 else 'queries'} x {documents} x {tokens}"
        if record.late(name):
            continue
        held = unit(count, rows, D, dtype=torch.float32)
        padded = unit(documents, tokens, D, seed=1, dtype=torch.float32)
        calls = single_methods(record, name, held, padded)
        record.add(row(name, held, padded, medians(calls, flush)))


def main() -> None:
    """Measure."""
    record = begun(SCHEMA, __doc__, 120)
    record.document["versions"] = {peer: held for peer, held in installed.versions().items() if peer in (FLASH, LIK)}
    flush = timing.Flush()
    time_masks(record, flush)
    with products("ieee"):
        time_single(record, flush)


if __name__ == "__main__":
    main()
