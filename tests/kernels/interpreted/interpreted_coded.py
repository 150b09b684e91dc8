"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 PYTHONPATH=tests/helpers python tests/kernels/interpreted/interpreted_coded.py GROUP

The kernel for coded tokens on small shapes against float64, and against the CPU's bits where products are whole numbers; output memory
is poisoned.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import quick_interpreter  # noqa: F401 - kernels run under it
import torch

import coded_cases as cases
from inputs import on_cpu as make
from maxsim_kernels import BitTokens, Packed, maxsim, maxsim_pairs
from maxsim_kernels.checks import Options, validate_coded
from maxsim_kernels.gpu.coded import choice as coded_choice
from maxsim_kernels.gpu.coded import coded
from maxsim_kernels.gpu.forward import combine

CHECKED: list[str] = []
coded.hardware = lambda device: ((9, 0), 1)  # the tiles of a GPU with room for the largest
KINDS = ("bits", "unit", "free")
HALF = torch.float16
plain = torch.empty


def half(*shape: int) -> torch.Tensor:
    """FP16 queries; `make` gives FP32 ones, whose products are exact."""
    return make.gauss(*shape, dtype=HALF)


def poisoned(*size: Any, **options: Any) -> torch.Tensor:
    """Memory nobody has written shows as NaN."""
    tensor = plain(*size, **options)
    return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 99)


def check(queries: Any, documents: Any, *, pairs: bool = False, quantize_queries: bool = True, **valid: torch.Tensor) -> None:
    options = Options(pairs=pairs, quantize_queries=quantize_queries, **valid)
    call = validate_coded(queries, documents, options)
    torch.empty = poisoned
    try:
        scores = coded.forward(call, documents)
    finally:
        torch.empty = plain
    scores = scores[0] if call.single_query else scores
    how = {"pairs": pairs, "quantize_queries": quantize_queries, **valid}
    cases.check(scores, *cases.truth(queries, documents, rounded=queries.dtype, **how))
    if quantize_queries and isinstance(documents, BitTokens):
        need = (maxsim_pairs if pairs else maxsim)(queries, documents.as_int8(), **valid)
        assert make.same_bits(scores, need), (scores, need)
    CHECKED.append(type(documents).__name__)


def check_sizes() -> None:
    """Every kind and number of bits, odd widths, one and more slices of d, queries of both dtypes."""
    for kind in KINDS:
        for bits, dim in ((1, 128), (2, 96), (4, 128), (1, 31), (2, 7), (4, 1), (2, 100), (4, 384)):
            documents = cases.coded(kind, bits, dim, (3, 0, 31, 1, 40))
            for queries in (half(2, 7, dim), make.gauss(2, 7, dim), half(31, dim), half(3, 31, dim)):
                for quantize_queries in (True, False) if kind == "bits" else (False,):
                    check(queries, documents, quantize_queries=quantize_queries)


def check_layouts() -> None:
    """Masks, packed queries, views, pairs, any strides, several launches, NaN."""
    for kind in KINDS:
        documents = cases.coded(kind, 2, 31, (3, 0, 31, 1, 7, 63))
        asked = make.masks("both", "query", 6, 9)
        queries = make.dirty(make.gauss(6, 9, 31), asked["query_mask"], asked["query_lengths"])
        rows = make.packed([4, 0, 31, 1, 2, 100], 31)
        for pairs in (False, True):
            check(queries, documents, pairs=pairs, **asked)
            check(rows, documents, pairs=pairs)
            check(half(6, 40, 31), documents, pairs=pairs, quantize_queries=False)
            check(make.strided(make.gauss(6, 9, 31), "transposed"), documents, pairs=pairs)
        check(make.scattered(rows), documents, pairs=True)
        check(make.gauss(6, 0, 31), documents)
        view = documents.select([5, 3, 3, 0])
        check(queries, view, **asked)
        wide = torch.stack([documents.codes.values, torch.full_like(documents.codes.values, 255)], -1)[..., 0]
        check(queries, replace(documents, codes=documents.codes.with_values(wide)), **asked)
        before, combine.ROWS_BYTES = combine.ROWS_BYTES, 4 * 54 * 4  # four documents a launch
        check(make.gauss(6, 9, 31), documents)
        combine.ROWS_BYTES = 4 * 90 * 4
        check(half(6, 15, 31), documents, quantize_queries=False)
        combine.ROWS_BYTES = before


def check_broken() -> None:
    """NaN scales and queries, ids that name no centroid, offsets beyond the buffer: nothing outside is read."""
    documents = cases.coded("bits", 2, 31, (3, 0, 31))
    documents.scales[20] = torch.nan
    queries = make.gauss(3, 7, 31)
    for quantize_queries in (True, False):
        check(queries, documents, quantize_queries=quantize_queries)
    queries[1, 2, 3] = torch.nan
    check(queries, cases.coded("bits", 2, 31, (3, 0, 31)))
    for kind in ("unit", "free"):
        residuals = cases.coded(kind, 2, 31, (3, 0, 31))
        check(queries, residuals)
        ids = residuals.ids.to(torch.int64)
        for bad in (9, -1):
            ids[20] = bad
            object.__setattr__(residuals, "ids", ids)  # as on a GPU, where values are not looked at
            found = coded.forward(validate_coded(queries[0], residuals, Options()), residuals)
            assert found.isnan().tolist() == [[False, False, True]]
            CHECKED.append("ids")
    starts, lengths = torch.tensor([0, -5, 30, 33]), torch.tensor([3, 5, 1000, 4])
    beyond = replace(documents, codes=Packed.view(documents.codes.values, starts, lengths))
    found = coded.forward(validate_coded(queries[:1], beyond, Options()), beyond)
    clamped = [
        documents.codes.values[0:3],
        documents.codes.values[0:5],
        documents.codes.values[30:34],
        documents.codes.values[33:34],
    ]
    assert found.shape == (1, len(clamped))
    assert not bool(found.isnan().any())
    CHECKED.append("offsets")


def check_once() -> None:
    """Residual tokens decoded once for many query rows: several tiles, blocks of rows, documents and programs of one; NaN in any tile."""
    row = next(one for one in coded_choice.ROWS if (one.name, one.architecture) == ("residual once", "sm_90"))
    small = replace(row, config=replace(row.config, rows=32, tokens=32, programs=2))
    before = coded_choice.TABLE
    coded_choice.TABLE = before | {(row.keys[0], row.architecture): small}
    for kind, bits, dim in (("unit", 2, 31), ("free", 4, 128), ("unit", 1, 40)):
        documents = cases.coded(kind, bits, dim, (3, 0, 31, 1, 65))
        for queries in (half(3, 31, dim), half(5, 13, dim), make.packed([4, 0, 70, 1], dim, dtype=HALF)):
            assert coded_choice.choose(validate_coded(queries, documents, Options()), documents, (9, 0)) == (
                "coded once",
                small.config,
            )
            check(queries, documents)
        check(half(3, 31, dim), documents.select([4]))  # two programs share the document
        check(half(3, 31, dim).transpose(0, 1).contiguous().transpose(0, 1), documents)
        for token in (36, 67, 99):  # in the last document's first tile, its second, its last
            broken = cases.coded(kind, bits, dim, (3, 0, 31, 1, 65))
            ids = broken.ids.to(torch.int64)
            ids[token] = -1
            object.__setattr__(broken, "ids", ids)  # as on a GPU, where values are not looked at
            found = coded.forward(validate_coded(half(3, 31, dim), broken, Options()), broken)
            assert found.isnan().tolist() == [[False] * 4 + [True]] * 3
            CHECKED.append("ids")
    coded_choice.TABLE = before


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    {"sizes": check_sizes, "layouts": check_layouts, "broken": check_broken, "once": check_once}[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
