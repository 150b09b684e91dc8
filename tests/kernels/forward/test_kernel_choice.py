"""What follows from shapes alone, without a GPU: the row of the table, the kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from choice_cases import HOPPER, call_of, pack_of, zeros
from maxsim_kernels import Packed, quantize_fp8, quantize_int8
from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward import choice, dispatch, tuning
from maxsim_kernels.gpu.forward.tuning import ROWS, TABLE, Config, Key, configuration

AMPERE = (8, 0)
H200 = (HOPPER, 132)
NAMED = {(row.name, row.architecture): row.config for row in ROWS}


def named(row: str, capability: tuple[int, int]) -> Config:
    """The row of that name for an architecture, or the safe one."""
    return NAMED.get((row, f"sm_{capability[0]}{capability[1]}")) or NAMED[row, "any"]


def choose(call: Call, capability: tuple[int, int]) -> choice.Launch:
    return choice.choose(call, (capability, 1))


# The table


def test_configurations_fall_back() -> None:
    assert configuration(Key("stream"), HOPPER) is NAMED["stream", "sm_90"]
    assert configuration(Key("stream"), AMPERE) is NAMED["stream", "any"]
    assert configuration(Key("exact"), HOPPER) is NAMED["exact", "any"]
    assert configuration(Key("dense", "float"), AMPERE) is None
    assert configuration(Key("nothing"), HOPPER) is None
    assert configuration(Key("stream", size="64 x 4"), AMPERE) is NAMED["stream", "any"]


def test_every_call_of_a_kernel_has_one_row() -> None:
    assert len(TABLE) == sum(len(row.keys) for row in ROWS)
    operands = ("float", "int8", "fp8", "int8 token", "fp8 token")
    for kernel, sizes in (("dense", tuning.DENSE), ("ragged", tuning.RAGGED), ("wide", ("",))):
        for key in itertools.product((kernel,), operands, sizes, tuning.BOTH, tuning.BOTH):
            assert configuration(Key(*key), HOPPER) is not None, key


def test_rows_are_sound() -> None:
    for (name, architecture), row in NAMED.items():
        assert row.measured, name
        assert row.reason, name
        for size in (row.rows, row.tokens, row.warps, row.short):
            assert size & (size - 1) == 0, (name, architecture)
        assert min(row.rows, row.tokens) >= 16
        assert row.tokens % row.short == 0 or not name.startswith("ragged")
        assert min(row.stages, row.programs) >= 1
    for name in ("stream", "general", "exact"):
        assert (name, "any") in NAMED  # every architecture has a kernel


# The kernel

PLAIN = {
    # name: (queries, documents, options, kernel on sm_90, its row)
    "one query": ((1, 32), (9, 180), {}, "stream", "stream"),
    "two queries": ((2, 32), (9, 180), {}, "stream", "stream 64 x 4"),
    "two queries, short": ((2, 32), (9, 128), {}, "stream", "stream 32 x 4"),
    "long": ((1, 32), (9, 512), {}, "stream", "stream 64 x 4"),
    "nearly long": ((1, 32), (9, 511), {}, "stream", "stream"),
    "packed": ((1, 32), (9, 180), {"packed": True}, "stream", "stream 32 x 2"),
    "65 rows, padded": ((1, 65), (9, 512), {}, "dense", "dense float narrow"),
    "narrow": ((4, 32), (9, 180), {}, "dense", "dense float narrow"),
    "dense": ((64, 32), (9, 512), {}, "dense", "dense float"),
    "one long query": ((1, 1024), (9, 180), {}, "dense", "dense float"),
    "ragged": ((64, 32), (9, 180), {"packed": True}, "ragged", "ragged float"),
    "ragged narrow": ((4, 32), (9, 180), {"packed": True}, "ragged", "ragged float narrow"),
    "lengths": ((64, 32), (9, 180), {"lengths": True}, "ragged", "ragged float"),
    "wide": ((64, 32), (9, 180), {"d": 768}, "wide", "wide float"),
    "wide, narrow": ((4, 32), (9, 180), {"d": 768}, "wide", "wide float"),
    "unaligned": ((64, 32), (9, 180), {"d": 100}, "general", "general"),
    "mask": ((64, 32), (9, 180), {"mask": True}, "ragged", "ragged float"),
    "mask, narrow": ((4, 32), (9, 512), {"mask": True}, "ragged", "ragged float narrow"),
    "mask, wide": ((64, 32), (9, 180), {"mask": True, "d": 768}, "wide", "wide float"),
    "one query, mask": ((1, 32), (9, 180), {"mask": True}, "stream", "stream"),
    "fp32": ((64, 32), (9, 180), {"dtype": torch.float32}, "general", "exact"),
    "one query, fp32": ((1, 32), (9, 180), {"dtype": torch.float32}, "general", "exact"),
    "one query, winners": ((1, 32), (9, 180), {"winners": True}, "dense", "dense float narrow"),
    "packed queries": ((1, 32), (9, 512), {"packed queries": True}, "dense", "dense float narrow"),
    "int8": ((64, 32), (9, 768), {"codes": "int8 document"}, "dense", "dense int8"),
    "int8, beyond brief": ((64, 32), (9, 705), {"codes": "int8 document"}, "dense", "dense int8"),
    "int8 winners": ((64, 32), (9, 768), {"codes": "int8 document", "winners": True}, "dense", "dense int8 winners"),
    "int8 brief": ((64, 32), (9, 256), {"codes": "int8 document"}, "dense", "dense int8 brief"),
    "int8 brief winners": ((64, 32), (9, 512), {"codes": "int8 document", "winners": True}, "dense", "dense int8 brief"),
    "int8 odd": ((64, 32), (9, 704), {"codes": "int8 document"}, "dense", "dense int8 odd"),
    "int8 short": ((64, 32), (9, 127), {"codes": "int8 document"}, "dense", "dense int8 odd"),
    "int8 two tiles": ((64, 32), (9, 128), {"codes": "int8 document"}, "dense", "dense int8 brief"),
    "int8 tiny": ((64, 32), (9, 63), {"codes": "int8 document"}, "dense", "dense int8 tiny"),
    "int8 tiny, narrow": ((4, 32), (9, 63), {"codes": "int8 document", "winners": True}, "dense", "dense int8 tiny"),
    "masked": ((64, 32), (9, 63), {}, "dense", "dense float masked"),
    "masked winners": ((64, 32), (9, 63), {"winners": True}, "dense", "dense float masked winners"),
    "masked, narrow": ((4, 32), (9, 63), {"winners": True}, "dense", "dense float narrow"),
    "int8 odd winners": ((64, 32), (9, 64), {"codes": "int8 document", "winners": True}, "dense", "dense int8 odd"),
    "int8 narrow": ((4, 32), (9, 256), {"codes": "int8 document"}, "dense", "dense int8 narrow"),
    "int8 narrow odd": ((4, 32), (9, 180), {"codes": "int8 document"}, "dense", "dense int8 odd"),
    "int8 corpus": ((64, 32), (9, 768), {"codes": "int8 corpus"}, "dense", "dense int8"),
    "int8 token, 127 tokens": ((64, 32), (9, 127), {"codes": "int8 token"}, "dense", "dense int8 token short"),
    "int8 token short": ((64, 32), (9, 64), {"codes": "int8 token"}, "dense", "dense int8 token short"),
    "int8 token odd": ((64, 32), (9, 180), {"codes": "int8 token"}, "dense", "dense int8 token"),
    "int8 token": ((64, 32), (9, 512), {"codes": "int8 token"}, "dense", "dense int8 token"),
    "int8 token narrow": ((4, 32), (9, 180), {"codes": "int8 token"}, "dense", "dense int8 token"),
    "int8 ragged": ((64, 32), (9, 180), {"codes": "int8 token", "packed": True}, "ragged", "ragged int8 token"),
    "int8 wide": ((64, 32), (9, 180), {"codes": "int8 document", "d": 272}, "wide", "wide int8"),
    "int8, 256 bytes": ((64, 32), (9, 768), {"codes": "int8 document", "d": 256}, "dense", "dense int8"),
    "int8, float queries": ((64, 32), (9, 180), {"codes": "int8 document", "quantize_queries": False}, "general", "general"),
    "int8 stream": ((1, 32), (9, 180), {"codes": "int8 token"}, "stream", "stream 32 x 1"),
    "int8 document ragged": ((64, 32), (9, 383), {"codes": "int8 document", "packed": True}, "ragged", "ragged int8"),
    "int8 long": ((64, 32), (9, 384), {"codes": "int8 document", "packed": True}, "ragged", "ragged int8 long"),
    "int8 lengths": ((64, 32), (9, 384), {"codes": "int8 document", "lengths": True}, "ragged", "ragged int8 long"),
    "fp8": ((64, 32), (9, 768), {"codes": "fp8 document"}, "dense", "dense fp8"),
    "fp8 token winners": ((64, 32), (9, 180), {"codes": "fp8 token", "winners": True}, "dense", "dense fp8 token winners"),
    "fp8 token": ((64, 32), (9, 180), {"codes": "fp8 token", "packed": True}, "ragged", "ragged fp8 token"),
}


def made(queries: tuple[int, int], documents: tuple[int, int], options: dict[str, Any]) -> Call:
    """The call of a line of `PLAIN`."""
    d, dtype = options.get("d", 128), options.get("dtype", torch.float16)
    count, size = documents
    asked: Any = pack_of(*queries, d, dtype) if "packed queries" in options else zeros(*queries, d, dtype=dtype)
    held: Any = pack_of(count, size, d, dtype) if "packed" in options else zeros(count, size, d, dtype=dtype)
    if "codes" in options:
        kind, granularity = options["codes"].split()
        held = (quantize_int8 if kind == "int8" else quantize_fp8)(held, granularity)
    return call_of(
        asked,
        held,
        quantize_queries=options.get("quantize_queries", True),
        document_mask=torch.ones(count, size, dtype=torch.bool) if "mask" in options else None,
        document_lengths=torch.full((count,), size) if "lengths" in options else None,
        return_argmax="winners" in options,
    )


@pytest.mark.parametrize("name", PLAIN)
def test_the_kernel_follows_from_shapes(name) -> None:
    queries, documents, options, kernel, row = PLAIN[name]
    call, expected = made(queries, documents, options), named(row, HOPPER)
    if kernel == "stream":
        expected = replace(expected, programs=0)  # a program for each of few documents
    assert choose(call, HOPPER) == (kernel, expected)
    found, config = choose(call, AMPERE)
    assert found == ("stream" if kernel == "stream" else "general")  # tensor descriptors are Hopper's
    safe = NAMED["exact" if row == "exact" else found, "any"]
    assert config == (replace(safe, programs=0) if kernel == "stream" else safe)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_the_number_of_documents_never_changes_the_kernel(name, capability) -> None:
    queries, (_, size), options, kernel, _ = PLAIN[name]
    found = {choose(made(queries, (count, size), options), capability) for count in (1, 2, 40)}
    if kernel == "stream" and capability == HOPPER:  # its tile may change: no bit does (tests/gpu/test_gpu_stream_rows.py)
        found = {(name, None) for name, _ in found}
    assert len(found) == 1


# (queries, tokens), (documents, tokens), options of `made`: the row, on 132 multiprocessors
SWEPT = [
    ((1, 32), (528, 64), {}, "stream 64 x 4"),
    ((1, 32), (529, 64), {}, "stream"),
    ((1, 32), (10_000, 511), {}, "stream"),
    ((1, 32), (10_000, 512), {}, "stream 64 x 4"),
    ((1, 64), (528, 64), {}, "stream 64 x 4"),
    ((2, 32), (10_000, 159), {}, "stream 32 x 4"),
    ((2, 32), (10_000, 160), {}, "stream 64 x 4"),
    ((1, 32), (528, 500), {"packed": True}, "stream 64 x 4"),
    ((1, 32), (1056, 250), {"packed": True}, "stream 64 x 4"),
    ((1, 32), (1056, 251), {"packed": True}, "stream 32 x 2"),
    ((1, 32), (1057, 70), {"packed": True}, "stream 32 x 2"),
    ((1, 32), (1057, 256), {"packed": True}, "stream 32 x 1"),
    ((1, 32), (8448, 118), {"packed": True}, "stream 32 x 2"),
    ((1, 32), (8449, 118), {"packed": True}, "stream 32 x 1"),
    ((1, 32), (8449, 70), {"packed": True}, "stream ragged"),
    ((1, 32), (8448, 118), {"packed": True, "d": 256}, "stream 32 x 4"),
    ((1, 32), (8449, 118), {"packed": True, "d": 256}, "stream ragged"),
    ((1, 32), (528, 180), {"d": 256}, "stream 64 x 4"),
    ((1, 32), (529, 600), {"d": 256}, "stream 32 x 4"),
    ((1, 64), (529, 600), {"d": 256}, "stream 32 x 4"),
    ((1, 32), (10_000, 180), {"d": 272}, "stream 64 x 4"),
    ((1, 32), (10_000, 118), {"d": 768, "packed": True}, "stream 64 x 4"),
    ((1, 64), (100_000, 70), {"packed": True}, "stream 32 x 4"),
    ((1, 32), (528, 70), {"codes": "int8 token"}, "stream 64 x 4"),
    ((1, 32), (529, 70), {"codes": "int8 token"}, "stream 32 x 1"),
    ((1, 32), (529, 70), {"codes": "int8 document"}, "stream"),
    ((1, 32), (529, 512), {"codes": "int8 document"}, "stream 32 x 1"),
    ((1, 32), (8448, 70), {"codes": "int8 token", "packed": True}, "stream 32 x 1"),
    ((1, 32), (8449, 70), {"codes": "int8 token", "packed": True}, "stream ragged"),
    ((1, 32), (8, 70), {"codes": "fp8 document"}, "stream"),
    ((1, 32), (8, 70), {"codes": "fp8 document", "packed": True}, "stream ragged"),
    ((1, 32), (8, 512), {"codes": "fp8 document"}, "stream 64 x 4"),
    ((1, 32), (8, 600), {"codes": "fp8 document", "packed": True}, "stream ragged"),
    ((1, 32), (8, 600), {"codes": "int8 token", "packed": True, "quantize_queries": False}, "stream ragged"),
    ((1, 64), (529, 70), {"codes": "int8 document"}, "stream 32 x 1"),
    ((1, 64), (8449, 70), {"codes": "int8 document", "packed": True}, "stream 32 x 1"),
    ((1, 32), (529, 70), {"codes": "int8 document", "d": 768}, "stream 64 x 4"),
    ((1, 32), (529, 70), {"codes": "int8 token", "d": 512}, "stream 32 x 1"),
    ((1, 64), (8449, 118), {"packed": True, "d": 256}, "stream 32 x 4"),
    ((1, 32), (8449, 95), {"packed": True}, "stream ragged"),
    ((1, 32), (8449, 96), {"packed": True}, "stream 32 x 1"),
    ((1, 32), (8, 70), {"codes": "int8 document", "quantize_queries": False}, "stream"),
]


def described(queries: tuple[int, int], documents: tuple[int, int], options: dict[str, Any]) -> Call:
    """`made`, with documents that have shapes only."""
    call, (count, size) = made(queries, (2, 16), options), documents
    packed = "packed" in options
    shape = (count * size, call.documents.shape[-1]) if packed else (count, size, call.documents.shape[-1])
    held = torch.empty(shape, dtype=call.documents.dtype, device="meta")
    starts = torch.empty(count, dtype=torch.int64, device="meta") if packed else None
    return replace(call, documents=held, document_starts=starts)


@pytest.mark.parametrize("line", SWEPT, ids=str)
def test_the_streaming_tile_follows_from_the_sweep(line) -> None:
    queries, documents, options, row = line
    call = described(queries, documents, options)
    chosen = choice.choose(call, H200)
    assert chosen.kernel == "stream"
    assert replace(chosen.config, programs=0) == replace(named(row, HOPPER), programs=0)
    assert chosen in choice.every_choice(call, H200)
    some = described(queries, (3, documents[1]), options)  # a small call, as `warmup` makes
    assert chosen in choice.every_choice(some, H200)
    if "packed" in options:  # of any length
        short = described(queries, (3, 20), options)
        assert chosen in choice.every_choice(short, H200)


# (queries, tokens), (documents, tokens), options of `made`: whether programs walk over several documents, on 132 multiprocessors
DEALT = [
    ((1, 32), (8448, 20), {}, False),
    ((1, 32), (8449, 20), {}, True),
    ((1, 32), (8449, 63), {}, True),
    ((1, 32), (8449, 64), {}, False),
    ((1, 33), (8449, 64), {}, True),
    ((1, 64), (8448, 20), {}, False),
    ((1, 32), (8449, 63), {"packed": True}, True),
    ((1, 32), (8449, 64), {"packed": True}, False),
    ((1, 64), (8449, 500), {"codes": "int8 token"}, True),
]


@pytest.mark.parametrize("line", DEALT, ids=str)
def test_many_short_documents_share_programs(line) -> None:
    queries, documents, options, dealt = line
    call = described(queries, documents, options)
    kernel, config = choice.choose(call, H200)
    assert kernel == "stream"
    assert config in {row.config if dealt else replace(row.config, programs=0) for row in ROWS}
    assert dealt == (config.programs > 0)
    unknown = replace(call, end_to_end=False)
    if "packed" in options:
        assert choice.choose(unknown, H200).config.programs > 0


def test_views_into_a_buffer_have_no_known_length() -> None:
    call = described((1, 64), (600, 500), {"packed": True})
    assert choice.choose(call, H200).config == replace(named("stream 64 x 4", HOPPER), programs=0)
    assert choice.choose(replace(call, end_to_end=False), H200).config == replace(named("stream 32 x 4", HOPPER), programs=0)


def test_tile_kernels_have_two_choices_and_wide_ones_none() -> None:
    dense = choice.every_choice(call_of(zeros(64, 32, 128), zeros(9, 180, 128)), H200)
    assert [(one.kernel, one.config.bits) for one in dense] == [("dense", False), ("dense", True)]
    assert choice.every_choice(call_of(zeros(64, 32, 768), zeros(9, 180, 768)), H200) == []
    assert (
        choice.every_choice(
            call_of(zeros(1, 32, 128), zeros(9, 180, 128), document_mask=torch.ones(9, 180, dtype=torch.bool)), H200
        )
        != []
    )


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("queries", [(1, 32), (4, 32), (64, 32)])
def test_a_large_corpus_has_the_kernel_of_a_small_one(kind, queries) -> None:
    """Shapes of ten million documents, without their memory."""

    def chosen(count: int) -> Any:
        if kind == "dense":
            held = torch.empty((count, 180, 128), dtype=torch.float16, device="meta")
            return choose(call_of(zeros(*queries, 128).to("meta"), held), HOPPER)
        values = torch.empty((count * 180, 128), dtype=torch.float16, device="meta")
        packed = Packed(values, torch.empty(count + 1, dtype=torch.int64, device="meta"))
        return choose(call_of(zeros(*queries, 128).to("meta"), packed), HOPPER)

    small, large = chosen(1), chosen(10_000_000)
    assert small.kernel == large.kernel
    if queries != (1, 32):
        assert replace(small.config, bits=True) == large.config
        assert not small.config.bits


def test_own_documents_and_pairs_take_the_general_kernel() -> None:
    queries = zeros(4, 32, 128)
    for call in (call_of(queries, zeros(4, 3, 180, 128)), call_of(queries, zeros(4, 180, 128), pairs=True)):
        for capability in (HOPPER, AMPERE):
            assert choose(call, capability)[0] == "general"


def test_documents_that_no_descriptor_describes_take_the_general_kernel() -> None:
    queries = zeros(64, 32, 128)
    storage = zeros(9 * 180 * 128 + 1)
    for documents in (
        storage[1:].view(9, 180, 128),  # does not begin at 16 bytes
        zeros(9, 128, 180).transpose(1, 2),  # d is not the last dimension
        zeros(180, 9, 128).transpose(0, 1),  # tokens first
        zeros(9, 180, 132)[:, :, :128],  # rows of 264 bytes
    ):
        assert choose(call_of(queries, documents), HOPPER)[0] == "general"
    assert choose(call_of(queries, zeros(9, 200, 128)[:, :180]), HOPPER)[0] == "dense"  # padded documents are described
    affine = quantize_int8(zeros(9, 180, 128), "token", affine=True)
    assert choose(call_of(queries, affine), HOPPER)[0] == "general"


def test_fp8_is_refused_where_there_is_none() -> None:
    call = call_of(zeros(4, 32, 128), quantize_fp8(zeros(3, 9, 128)))
    refused = dispatch.supported(call, AMPERE)
    assert "8.9" in refused
    assert "8.0" in refused
    assert "INT8" in refused
    assert dispatch.supported(call, (8, 9)) == dispatch.supported(call, HOPPER) == ""
    assert dispatch.supported(call_of(zeros(4, 32, 128), quantize_int8(zeros(3, 9, 128))), AMPERE) == ""
    assert dispatch.supported(call_of(zeros(4, 32, 128), zeros(3, 9, 128)), AMPERE) == ""


def test_a_refused_dtype_is_an_error_of_the_call(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "hardware", lambda device: (AMPERE, 108))
    with pytest.raises(ValueError, match=r"^documents: got torch\.float8_e4m3fn, need another dtype on this GPU: FP8 needs"):
        dispatch.forward(call_of(zeros(4, 32, 128), quantize_fp8(zeros(3, 9, 128))))


def test_explained_rows_say_where_they_were_measured() -> None:
    assert {row.measured for (_, architecture), row in NAMED.items() if architecture == "any"} == {tuning._SAFE}


def test_choice_of_views_never_depends_on_how_many_there_are() -> None:
    """Without offsets a document may be as long as the buffer; only the buffer's size may decide whether its tiles get a table."""
    queries = torch.zeros(70, 32, 128, dtype=torch.float16)
    for tokens, kernel in ((1 << 15, "ragged"), ((1 << 15) + 1, "general")):
        values = torch.zeros(1, 128, dtype=torch.float16).expand(tokens, 128).contiguous()
        for count in (1, 600, 5000):
            starts = torch.zeros(count, dtype=torch.int64)
            call = call_of(queries, Packed.view(values, starts, starts + 5))
            assert choose(call, (9, 0))[0] == kernel
