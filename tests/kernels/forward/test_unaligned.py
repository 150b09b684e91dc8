"""`unaligned.py`: which calls get another tile, and what those compile to: where numbers are read one by one, no kernel spills much."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from inputs import on_cpu as make
from maxsim_kernels import api, explain, quantize_int8
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import unaligned
from maxsim_kernels.gpu.forward.choice import Launch
from maxsim_kernels.gpu.forward.tuning import ROWS

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import coded_cases  # noqa: E402
import record_architectures  # noqa: E402
import record_resources as recorder  # noqa: E402

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
GENERAL = next(row.config for row in ROWS if row.name == "general" and row.architecture == "sm_90")
STREAM = next(row.config for row in ROWS if row.name == "stream")
MOST = 64  # bytes of a thread: sixteen registers
FEW, LONG, DOCUMENTS = (1, 50), (2, 300), (31, 64)


def tile(config, queries, documents, stream=False, **options):
    """Tokens and warps of a call."""
    call, before = validate(queries, documents, Options(**options)), Launch("stream" if stream else "general", config)
    kernel, got = unaligned.spread(before, call, call.queries)
    changed = {} if got == config else unaligned.UNTUNED
    assert Launch(kernel, got) == before._replace(
        config=replace(config, rows=got.rows, tokens=got.tokens, warps=got.warps, **changed)
    )
    return got.tokens, got.warps


@pytest.mark.parametrize("d", [64, 128, 256, 768])
def test_aligned_rows_keep_their_tile(d):
    queries, documents = make.gauss(2, 300, d, dtype=HALF), make.gauss(3, 64, d, dtype=HALF, seed=1)
    assert tile(GENERAL, queries, documents) == (GENERAL.tokens, GENERAL.warps)
    assert tile(GENERAL, queries, quantize_int8(documents), quantize_queries=False) == (GENERAL.tokens, GENERAL.warps)
    assert tile(STREAM, queries[:1, :32], documents, stream=True) == (STREAM.tokens, STREAM.warps)


@pytest.mark.parametrize("d", [7, 31, 100])
def test_few_numbers_keep_their_tile(d):
    queries, documents = make.gauss(2, 300, d, dtype=HALF), make.gauss(3, 64, d, dtype=HALF, seed=1)
    assert tile(GENERAL, queries, documents) == (GENERAL.tokens, GENERAL.warps)


@pytest.mark.parametrize("d", [129, 200, 257, 1000])
def test_many_numbers_are_spread(d):
    queries, documents = make.gauss(2, 300, d, dtype=HALF), make.gauss(3, 64, d, dtype=HALF, seed=1)
    assert tile(GENERAL, queries, documents) == (32, 8)
    assert tile(GENERAL, queries, quantize_int8(documents), quantize_queries=False) == (32, 8)
    assert tile(STREAM, queries[:1], quantize_int8(documents), stream=True) == (32, 8)


@pytest.mark.parametrize(("d", "rows", "tokens"), [(200, 32, 32), (257, 32, 16)])
def test_codes_take_twice_the_columns(d, rows, tokens):
    documents = quantize_int8(make.gauss(3, 64, d, dtype=HALF, seed=1))
    call = validate(make.gauss(2, 300, d, dtype=HALF), documents, Options())
    _, got = unaligned.spread(Launch("general", GENERAL), call, call.queries.to(torch.int8))
    assert got == replace(GENERAL, rows=rows, tokens=tokens, warps=8, **unaligned.UNTUNED)


def test_other_kernels_keep_theirs():
    """Those of descriptors read queries by descriptors or copy them first."""
    call = validate(make.gauss(2, 300, 129, dtype=HALF), make.gauss(3, 64, 129, dtype=HALF, seed=1), Options())
    for kernel in ("dense", "ragged", "wide"):
        launch = Launch(kernel, GENERAL)
        assert unaligned.spread(launch, call, call.queries) is launch


@pytest.mark.parametrize(("quantize", "tokens", "rows"), [(True, 32, 32), (False, 32, 64)])
def test_explain_names_the_tile_that_runs(quantize, tokens, rows, monkeypatch):
    monkeypatch.setattr(api, "implementation", lambda call, impl: api.Implementation("triton", ""))
    monkeypatch.setattr(geometry, "hardware", lambda device: geometry.Hardware((9, 0), 132))
    documents = quantize_int8(make.gauss(3, 64, 129, dtype=HALF, seed=1), affine=True)
    said = explain(make.gauss(2, 300, 129, dtype=HALF), documents, quantize_queries=quantize)
    assert said.startswith(
        f"triton: general kernel, tiles of {rows} query rows x {tokens} document tokens, untuned: rows are read"
    )


@pytest.mark.parametrize("how", ["transposed", "every second element", "odd rows", "unaligned"])
def test_strides_and_addresses_count(how):
    queries, documents = make.gauss(2, 300, 256, dtype=HALF), make.gauss(3, 64, 256, dtype=HALF, seed=1)
    assert tile(GENERAL, queries, make.strided(documents, how)) == (32, 8)
    assert tile(GENERAL, make.strided(queries, how), documents) == (32, 8)


CASES = [
    (d, dtype, codes, options, asked)
    for d in (129, 257)
    for asked in (FEW, LONG)
    for dtype, codes, options in (
        (HALF, "", {"own"}),
        (BFLOAT, "", {"own", "winners"}),
        (BFLOAT, "int8 token", {"mask", "float queries"}),
        (HALF, "int8 token", {"affine", "float queries", "mask"}),
        (HALF, "int8 token", {"own"}),
        (SINGLE, "int8 document", {"affine", "mask"}),
    )
]


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("d", "dtype", "codes", "options", "asked"),
    [pytest.param(*one, marks=() if one[0] == 129 and one[4] == LONG else pytest.mark.slow) for one in CASES],
    ids=lambda one: ", ".join(sorted(one)) if isinstance(one, set) else str(one),
)
def test_kernels_do_not_spill(d, dtype, codes, options, asked, architecture, tmp_path):
    case = recorder.Case(architecture, "", "", asked, DOCUMENTS, d, dtype, codes, frozenset(options))
    launches = [one for one in recorder.launches(case)[1] if one.kernel.__name__ == "_general_kernel"]
    assert launches
    for launch in launches:
        assert recorder.resources(recorder.compiled(launch, architecture), tmp_path)["spill_bytes"] <= MOST


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(
    ("kind", "bits", "quantize"), [("bits", 1, True), ("bits", 4, False), ("unit", 2, False), ("free", 4, False)]
)
@pytest.mark.parametrize("d", [pytest.param(129, marks=pytest.mark.slow), 257])
def test_kernels_of_few_bits_do_not_spill(d, kind, bits, quantize, dtype, architecture, tmp_path):
    capability, options = recorder.CAPABILITIES[architecture], Options(quantize_queries=quantize)
    for asked in ((1, 32), (64, 32)):
        documents, queries = coded_cases.coded(kind, bits, d, (30,) * asked[0]), make.gauss(*asked, d, dtype=dtype)
        launches = record_architectures.coded_launches(documents, queries, options, capability)
        found = [one for one in launches if one.kernel.__name__ == "_coded_kernel"]
        assert found
        for launch in found:
            assert (launch.arguments["TOKENS"], launch.warps) == (32, 8)
            assert recorder.resources(recorder.compiled(launch, architecture), tmp_path)["spill_bytes"] <= MOST


@pytest.mark.parametrize(("d", "longest"), [(100, 1024), (129, 32), (257, 300)])
def test_norms_of_queries_do_not_spill(d, longest, tmp_path):
    launches = record_architectures.search_launches(HALF, d, longest, recorder.CAPABILITIES[90])
    found = [one for one in launches if one.kernel.__name__ == "_terms_kernel"]
    assert found
    for launch in found:
        assert recorder.resources(recorder.compiled(launch, 90), tmp_path)["spill_bytes"] <= MOST
