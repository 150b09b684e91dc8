"""How fast the main kernels are, as shares of rates that the library reaches in the same run: a performance regression shows here.

Floors are the least that a committed run on an H200 shows (docs/results/h200: forward.json, forward_alone.json and
paper.json) less a twentieth: the same row differs by 1 to 4% from one of these runs to another, a kernel that spills or lost its pipeline
by much more. The median of three attempts counts, each one's times medians of ten calls: a lucky one passes nothing. As in those runs,
calls that read memory alone stand between: of ours and the library's products by turns the GPU reaches its power limit within a second,
its clock falls, and ours with it more than the library's (many queries: to 0.86 to 0.91). Other GPUs than those of the tuning table have
no floor.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from maxsim_kernels import Packed, maxsim, quantize_int8
from measure import timing

ATTEMPTS, RUNS, RESTS, TOLERANCE = 3, 10, 6, 0.95
DIM = 128


@dataclass(frozen=True)
class Case:
    """Queries x tokens against documents x tokens; `measured`: its share of the library's rate (`unit`) on an H200."""

    name: str
    queries: tuple[int, int]
    documents: tuple[int, int]
    unit: str
    measured: float


CASES = (
    Case("one short query", (1, 32), (10_000, 300), "read", 0.96),
    Case("one short query, long documents", (1, 32), (10_000, 1024), "read", 1.0),
    Case("one ColPali query", (1, 1024), (10_000, 1024), "fp16", 0.975),
    Case("many queries", (256, 32), (8192, 128), "fp16", 0.935),
)
RAGGED, INT8_OVER_FP16 = 0.69, 1.81  # many queries on 16 to 240 tokens, of FP16's rate; document scale over FP16 at ColPali


@pytest.fixture(scope="module")
def clock() -> Iterator[SimpleNamespace]:
    """The benchmarks' clock: the L2 flushed, methods in turns, library products and a plain read beside them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("floors are for sm_90, where the tuning table was measured")
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("times need the GPU alone: run this file without -n")
    flush = timing.Flush()
    yield SimpleNamespace(timing=timing, flush=flush, library=timing.Library(flush, RUNS))
    torch.cuda.empty_cache()


def unit(*shape: int) -> torch.Tensor:
    found = torch.empty(shape, dtype=torch.float16, device="cuda")
    for part in found.view(-1, shape[-1]).split(1 << 20):
        part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, device="cuda"), dim=-1))
    return found


def usual(clock: SimpleNamespace, call: Callable[[], torch.Tensor], unit_name: str, amount: float) -> float:
    """The median share of the library's rate over some attempts."""
    found = []
    library = clock.library.calls({unit_name} - {"read"})
    rests = {f"rest {number}": library["library read"] for number in range(RESTS)}
    for _ in range(ATTEMPTS):
        times = clock.timing.measure(library | rests | {"ours": call}, RUNS, clock.flush)
        rates = clock.library.taken(times)
        found.append(amount / times["ours"]["median_ms"] * 1e3 / rates[unit_name])
    return statistics.median(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_share_of_the_librarys_rate(clock: SimpleNamespace, case: Case) -> None:
    queries, documents = unit(*case.queries, DIM), unit(*case.documents, DIM)
    asked = queries[0] if case.queries[0] == 1 else queries
    tokens = case.documents[0] * case.documents[1]
    amount = 2.0 * DIM * tokens if case.unit == "read" else 2.0 * DIM * tokens * case.queries[0] * case.queries[1]
    floor = TOLERANCE * case.measured
    found = usual(clock, lambda: maxsim(asked, documents), case.unit, amount)  # type: ignore[arg-type,return-value]
    assert found >= floor, f"{found:.3f} of the {case.unit} rate, need {floor:.3f} ({case.measured} was measured)"


def test_share_on_ragged_documents(clock: SimpleNamespace) -> None:
    lengths = torch.randint(16, 241, (8192,), generator=torch.Generator().manual_seed(0)).cuda()
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cuda")
    offsets[1:] = lengths.cumsum(0)
    documents, queries = Packed(unit(int(offsets[-1]), DIM), offsets), unit(256, 32, DIM)
    amount = 2.0 * 256 * 32 * int(offsets[-1]) * DIM
    floor = TOLERANCE * RAGGED
    found = usual(clock, lambda: maxsim(queries, documents), "fp16", amount)  # type: ignore[arg-type,return-value]
    assert found >= floor, f"{found:.3f} of the FP16 rate on real tokens, need {floor:.3f}"


def test_int8_over_fp16(clock: SimpleNamespace) -> None:
    queries, documents = unit(1024, DIM), unit(4000, 1024, DIM)
    codes = quantize_int8(documents, "document")
    calls = {"half": lambda: maxsim(queries, documents), "int8": lambda: maxsim(queries, codes)}
    rounds = [clock.timing.measure(calls, RUNS, clock.flush) for _ in range(ATTEMPTS)]
    found = statistics.median(times["half"]["median_ms"] / times["int8"]["median_ms"] for times in rounds)
    floor = TOLERANCE * INT8_OVER_FP16
    assert found >= floor, f"INT8 with a document scale is {found:.2f} times FP16, need {floor:.2f}"
