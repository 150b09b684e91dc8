"""What every family of kernels compiles to for every architecture, without a GPU: registers, shared memory, spills. Written anew by

    python tests/helpers/record_architectures.py

after a kernel, a configuration or the pinned Triton has changed, and read in the diff. `tests/kernels/test_architectures.py` compares
`tests/kernels/architectures.json` with what would be launched now, and compiles a few of the kernels. sm_80 and sm_90 have records of
their own for most families (`record_resources.py`, `record_gradients.py`); here they stand with the others for the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import coded_cases
import record_gradients as gradients
import record_resources as recorder
from inputs import on_cpu as make
from maxsim_kernels import Packed, quantize_int8
from maxsim_kernels.checks import Options, validate_coded
from maxsim_kernels.gpu import keys
from maxsim_kernels.gpu.coded import coded, once
from maxsim_kernels.gpu.forward import choice, combine, query_codes, tuning
from maxsim_kernels.gpu.geometry import Hardware
from maxsim_kernels.gpu.search import bounds, fetching, survivors
from places import TESTS

RECORD = TESTS / "kernels" / "architectures.json"
PROCESSORS = 132
HALF, BRIEF, SINGLE = torch.float16, torch.bfloat16, torch.float32
# kind, bits, d, (queries, tokens), dtype, INT8 queries, pairs: every row of `gpu/coded/choice.py`, and slices of wide tokens.
CODED = (
    ("bits", 1, 128, (1, 32), HALF, True, False),
    ("bits", 4, 128, (4, 32), HALF, True, False),
    ("bits", 4, 96, (64, 32), HALF, False, False),
    ("bits", 2, 256, (64, 32), HALF, True, False),
    ("bits", 2, 128, (4, 32), SINGLE, False, False),
    ("unit", 1, 128, (1, 32), HALF, False, False),
    ("unit", 2, 384, (64, 32), HALF, False, True),
    ("unit", 2, 128, (64, 32), HALF, False, False),
    ("unit", 4, 384, (64, 32), HALF, False, False),
    ("free", 4, 128, (64, 32), BRIEF, False, False),
    ("unit", 4, 128, (4, 32), SINGLE, False, False),
)  # fmt: skip
SEARCHES = ((HALF, 128, 32), (BRIEF, 128, 300), (HALF, 128, 1024), (HALF, 256, 64))  # dtype, d, tokens of the longest query
CLOUDS = ((3, SINGLE), (8, BRIEF), (16, BRIEF), (24, HALF), (40, SINGLE), (128, SINGLE), (256, HALF))  # every row of `FILTERS`
TILE = ("ROWS", "TOKENS", "TILE", "WIDTH", "STAGES")  # constants that a configuration gives


def forward_launches(architecture: int | str) -> Iterator[tuple[str, list[Any]]]:
    """Float and quantised documents, masks, winners, wide tokens, FP32 products, pieces; and on sm_100 and sm_120 FP8."""
    cases = [*recorder.float_cases(architecture), *recorder.code_cases(architecture)]
    if isinstance(architecture, int) and architecture >= 89:
        few, short = (1, 32), (8, 180)
        cases += [
            recorder.Case(architecture, "stream", "fp8 document", few, short, codes="fp8 document"),
            recorder.Case(architecture, "general", "fp8 document", (64, 32), short, codes="fp8 document"),
            recorder.Case(architecture, "general", "fp8 token, winners", (4, 32), short, codes="fp8 token",
                          options=frozenset({"winners"})),
        ]  # fmt: skip
    wide = recorder.Case(architecture, "stream", "64 rows, width 256", (1, 64), (8, 180), 256)
    for case in (*cases, wide):
        yield f"{case.row}: {case.name}", recorder.launches(case)[1]


def tried_launches(architecture: int | str) -> Iterator[tuple[str, list[Any]]]:
    """What `tune` would try beside the rows that calls choose."""
    everything = frozenset({"winners", "mask", "lengths", "query mask", "query lengths"})
    for row in tuning.TRIED:
        dtype = SINGLE if row.keys[0].kernel == "exact" else HALF
        case = recorder.Case(architecture, row.name, "everything", (4, 32), (8, 180), 128, dtype, options=everything)
        with mock.patch.object(choice, "row_of", return_value=row):
            yield f"tried: {row.name}", recorder.launches(case)[1]


def coded_launches(
    documents: Any, queries: Any, options: Options, capability: tuple[int, int], processors: int = PROCESSORS
) -> list[Any]:
    """What a call with `BitTokens` or `ResidualTokens` would launch."""
    caught, call = gradients.Caught(), validate_coded(queries, documents, options)
    with ExitStack() as patched:
        for module in (coded, once, combine, query_codes):
            patched.enter_context(mock.patch.object(module, "launch", caught))
        patched.enter_context(mock.patch.object(coded, "hardware", return_value=(capability, processors)))
        coded.forward(call, documents)
    return caught


def search_launches(dtype: torch.dtype, d: int, longest: int, capability: tuple[int, int]) -> list[Any]:
    """Every kernel of a certified search, of queries of up to `longest` tokens."""
    count, caught = 8, gradients.Caught()
    documents = Packed(torch.zeros(160, d, dtype=dtype), torch.arange(0, 161, 16))
    values, starts = torch.zeros(count * longest, d, dtype=dtype), torch.arange(count) * longest
    lengths, asked = torch.full((count,), longest), quantize_int8(values)
    with ExitStack() as patched:
        for module in (bounds, survivors, fetching, keys):
            patched.enter_context(mock.patch.object(module, "launch", caught))
        patched.enter_context(mock.patch.object(survivors, "hardware", return_value=Hardware(capability, PROCESSORS)))
        rounding = bounds.Rounding(1e-4, 1e-6, 1e-30, 0.0)
        terms = bounds.query_terms(values, starts, lengths, longest, asked.codes, asked.scales.float(), rounding)
        bounded = bounds.Bounded(
            torch.zeros(count, 10), terms, lengths, torch.zeros(10), torch.zeros(10), documents.lengths, 0.1
        )
        tallied = bounds.Tallied.of(count, lengths.device)
        for known in (None, torch.zeros(count, 3)):
            leads = bounded.leads(2, 4, known)
            bounded.marks(leads, None, tallied)
            marks = bounded.marks(leads, bounds.kth_best(known, 2, leads), tallied)
        bounded.left(torch.zeros(count))
        for size in (16, 200):  # documents that fit in a tile, and others
            survivors.score_marked(values, starts, lengths, longest, documents, size, marks, 80, torch.zeros(count, 10))
        fetching.fetched(documents.values, documents.starts, torch.arange(0, 161, 16), 160)
        held = torch.zeros(count, 2, dtype=torch.int64)
        keys.of_keys(keys.candidates(torch.zeros(count, 70), 0, 2, 4, held))
    return caught


def coded_calls(capability: tuple[int, int]) -> Iterator[tuple[str, list[Any]]]:
    """Calls of `CODED` on a GPU."""
    for kind, bits, d, shape, dtype, quantize, pairs in CODED:
        documents, queries = coded_cases.coded(kind, bits, d, (30,) * shape[0]), make.gauss(*shape, d, dtype=dtype)
        about = ", ".join(
            [kind, f"{bits} bits", f"d = {d}", f"{shape[0]} x {shape[1]}", str(dtype).removeprefix("torch."),
             *(["INT8 queries"] if quantize else []), *(["pairs"] if pairs else [])]
        )  # fmt: skip
        yield f"coded {about}", coded_launches(documents, queries, Options(quantize_queries=quantize, pairs=pairs), capability)


def calls(architecture: int | str) -> Iterator[tuple[str, list[Any]]]:
    """Calls by name, with what each would launch: what `architecture` has no other record of."""
    capability = recorder.CAPABILITIES[architecture]
    yield from coded_calls(capability)
    yield from tried_launches(architecture)
    for dtype, d, longest in SEARCHES:
        about = f"search, {str(dtype).removeprefix('torch.')}, d = {d}, up to {longest} tokens"
        yield about, search_launches(dtype, d, longest, capability)
    if architecture in recorder.RECORDED:
        return
    yield from forward_launches(architecture)
    for case in (*gradients.BACKWARDS, *gradients.LONG_LISTS, gradients.MANY_WINNERS):
        yield case.name, gradients.backward_launches(case, architecture)
    for named in (False, True):
        yield gradients.contrast_name(named), gradients.contrast_launches(named)
    for d, cloud in CLOUDS:
        yield gradients.chamfer_name(d, cloud), gradients.chamfer_launches(d, cloud, (300, 200), architecture)


def everything(architecture: int | str) -> dict[str, Any]:
    """Every launch that the record holds of an architecture, by key."""
    found: dict[str, Any] = {}
    for name, launches in calls(architecture):
        found |= gradients.keyed(name, launches, architecture)
    return found


def tile(launch: Any) -> str:
    """What a configuration gave a launch: a record of other numbers is an old one."""
    return ", ".join(
        [*(f"{name} {launch.arguments[name]}" for name in TILE if name in launch.arguments), f"{launch.warps} warps"]
    )


def main() -> None:
    kernels: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in recorder.CAPABILITIES:
            for key, launch in everything(architecture).items():
                used = recorder.resources(recorder.compiled(launch, architecture), Path(folder))
                kernels[key] = {"tile": tile(launch), **used}
    recorder.write(RECORD, kernels)


if __name__ == "__main__":
    main()
