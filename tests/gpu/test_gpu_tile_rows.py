"""Many query rows: every tile that documents' lengths may choose gives the same bits, scores and winners, however work is dealt out."""

from __future__ import annotations

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, quantize_fp8, quantize_int8, warmup
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu import launch
from maxsim_kernels.gpu.forward import dense, dispatch
from maxsim_kernels.gpu.forward.tuning import ROWS

TABLE = {(row.name, row.architecture): row.config for row in ROWS}
FORMS = ["float", "int8 document", "int8 corpus", "int8 token", "fp8 document", "fp8 token"]
LENGTHS = [3, 0, 31, 1, 7, 100, 0, 512, 63, 64, 65, 127, 128, 129, 704, 705, 0] * 4
SIZES = [1, 31, 64, 65, 100, 128, 180, 320, 705]


def rows_of(name, form):
    """The table's rows of a kernel ("dense", "ragged") for a form of documents."""
    kind, _, granularity = form.partition(" ")
    start = f"{name} {kind}" + (" token" if granularity == "token" else "")
    ends = ("", " narrow", " brief", " odd", " short", " tiny", " masked", " long")
    return {start + end + also: TABLE[start + end + also, "sm_90"] for end in ends for also in ("", " winners")
            if (start + end + also, "sm_90") in TABLE}  # fmt: skip


def quantised(documents, form):
    kind, _, granularity = form.partition(" ")
    return {"int8": quantize_int8, "fp8": quantize_fp8}[kind](documents, granularity) if granularity else documents


def scored(queries, documents, name, config, winners):
    """Scores (and winners) by a given row, launched as `maxsim` would."""
    call = validate(queries, documents, Options(return_argmax=winners))
    shape = (call.query_count, call.document_count)
    scores = torch.full(shape, torch.nan, device=queries.device)
    argmax = torch.full((*shape, queries.shape[1]), -7, dtype=torch.int32, device=queries.device) if winners else None
    dispatch.launch(call, scores, argmax, dispatch.Launch(name, config))
    return scores, argmax


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows are for sm_90")


@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("count", "tokens"), [(20, 32), (3, 100)])
@pytest.mark.parametrize("form", FORMS)
def test_every_tile_gives_the_same_bits(form, count, tokens, d, winners):
    queries = make.gauss(count, tokens, d, dtype=torch.float16)
    held = {"ragged": make.packed(LENGTHS, d, dtype=torch.float16, seed=1)}
    held |= {f"dense {size}": make.gauss(37, size, d, dtype=torch.float16, seed=size) for size in SIZES}
    for name, documents in held.items():
        kernel, codes = name.partition(" ")[0], quantised(documents, form)
        found = {row: scored(queries, codes, kernel, config, winners) for row, config in rows_of(kernel, form).items()}
        assert found
        scores, argmax = maxsim(queries, codes, return_argmax=True)
        for row, (mine, won) in found.items():
            assert torch.equal(mine, scores), (name, row)
            assert won is None or torch.equal(won, argmax), (name, row)


@pytest.mark.parametrize("waves", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["float", "int8 document", "int8 token", "fp8 token"])
def test_waves_change_no_bit(monkeypatch, form, waves):
    queries = make.gauss(20, 32, 128, dtype=torch.float16)
    for documents in (make.packed(LENGTHS * 20, 128, dtype=torch.float16, seed=1), make.gauss(700, 180, 128, seed=1)):
        codes = quantised(documents, form)
        launch._plans.clear()
        scores = maxsim(queries, codes)
        monkeypatch.setattr(
            dense, "_chunks", lambda count, each, groups, slots, tiles: max(1, min(count, slots * waves // groups))
        )
        launch._plans.clear()
        assert torch.equal(maxsim(queries, codes), scores)
        monkeypatch.undo()
    launch._plans.clear()


def test_warmup_knows_other_lengths_of_ragged_documents(compilations):
    """Tiles of ragged codes depend on their mean length, which a server is not told."""
    warmup(queries=((64, 32),), document_tokens=(180,), forms=("packed", "int8"), return_argmax=True)
    compilations.clear()
    for tokens in (20, 180, 383, 384, 600):
        values, offsets = make.gauss(100 * tokens, 128, seed=1), torch.arange(101, device="cuda") * tokens
        for granularity in ("token", "document", "corpus"):
            for winners in (False, True):
                held = quantize_int8(Packed(values, offsets), granularity)
                maxsim(make.gauss(64, 32, 128), held, return_argmax=winners)
    assert not compilations
