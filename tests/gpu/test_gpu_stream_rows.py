"""Few query rows: every tile that the number of documents may choose gives the same bits, so that no cut of a corpus shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, quantize_fp8, quantize_int8, warmup
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu import launch
from maxsim_kernels.gpu.forward import dispatch
from maxsim_kernels.gpu.forward.tuning import ROWS
from truth import agree

STREAM = {row.name: row.config for row in ROWS if row.name.startswith("stream") and row.architecture == "sm_90"}
COUNTS = [3, 0, 31, 1, 7, 100, 0, 512, 63, 64, 65, 128, 129, 0] * 5
FORMS = ["float16", "bfloat16", "int8 token", "int8 document"]


def documents_of(form, ragged, d):
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float16
    held = make.packed(COUNTS, d, dtype=dtype, seed=1) if ragged else make.gauss(70, 181, d, dtype=dtype, seed=1)
    return quantize_int8(held, form.split()[1]) if "int8" in form else held


def scored(queries, documents, config):
    """Scores by a given configuration, launched as `maxsim` would."""
    call = validate(queries, documents, Options())
    scores = torch.full((call.query_count, call.document_count), torch.nan, device=queries.device)
    dispatch.launch(call, scores, None, dispatch.Launch("stream", config))
    return scores


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("count", "tokens", "d"), [(1, 7, 128), (1, 32, 128), (2, 31, 64), (1, 64, 128), (1, 64, 256), (1, 32, 100)]
)
def test_every_tile_gives_the_same_bits(form, ragged, count, tokens, d):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows are for sm_90")
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float16
    queries, documents = make.gauss(count, tokens, d, dtype=dtype), documents_of(form, ragged, d)
    alone = {f"{row}, a program a document": replace(config, programs=0) for row, config in STREAM.items()}
    found = {name: scored(queries, documents, config) for name, config in (STREAM | alone).items()}
    first = found["stream"]
    assert not first.isnan().any()
    for row, scores in found.items():
        assert torch.equal(scores, first), row


@pytest.fixture(params=[*STREAM, *(f"{row}, a program a document" for row in STREAM)])
def forced(request, monkeypatch):
    """Every streaming call takes this row of the table; plans recorded with another are forgotten."""
    launch._plans.clear()
    row, _, alone = request.param.partition(", ")
    launched = dispatch.Launch("stream", replace(STREAM[row], programs=0) if alone else STREAM[row])
    choose = dispatch.choose

    def force(*call):
        chosen = choose(*call)
        return launched if chosen.kernel == "stream" else chosen

    monkeypatch.setattr(dispatch, "choose", force)
    yield request.param
    launch._plans.clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("count", "tokens", "d"), [(1, 1, 128), (1, 31, 100), (2, 20, 64), (1, 64, 256), (1, 33, 768)])
def test_every_tile_agrees_with_fp64(forced, dtype, count, tokens, d):
    queries = make.gauss(count, tokens, d, dtype=dtype)
    agree(queries, make.packed(COUNTS, d, dtype=dtype, seed=1))
    documents = make.gauss(70, 131, d, dtype=dtype, seed=1)
    agree(queries, documents)
    agree(queries, documents[:2])  # cut into pieces
    agree(queries, make.strided(documents, "odd rows"))
    agree(queries, documents, document_lengths=make.lengths(70, high=131), query_mask=make.mask(count, tokens))
    hidden = make.mask(70, 131, seed=2)
    documents[~hidden] = torch.nan
    agree(queries, documents, document_mask=hidden)
    agree(queries, documents)  # and NaN where nothing hides it


@pytest.mark.parametrize("granularity", ["token", "document"])
@pytest.mark.parametrize("affine", [False, True])
def test_every_tile_agrees_on_codes(forced, granularity, affine):
    queries, documents = make.gauss(1, 40, 128), make.gauss(70, 131, 128, seed=1)
    agree(queries, quantize_int8(documents, granularity, affine=affine))
    agree(queries, quantize_int8(make.packed(COUNTS, 128, seed=1), granularity, affine=affine))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("form", [*FORMS, "fp8 token", "fp8 document"])
@pytest.mark.parametrize("tokens", [32, 64])
def test_a_cut_corpus_gives_the_same_bits(form, ragged, tokens):
    """Numbers of documents on both sides of the thresholds."""
    lengths = torch.arange(20_000) % 61 + 1
    lengths[::1000] = 400
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float16
    queries = make.gauss(1, tokens, 128, dtype=dtype)
    values = make.gauss(int(lengths.sum()), 128, seed=1, dtype=dtype)

    def first(count):
        if ragged:
            offsets = torch.nn.functional.pad(lengths[:count].cumsum(0), (1, 0)).to(values.device)
            held = Packed(values[: int(offsets[-1])], offsets)
        else:
            held = values[: count * 20].view(count, 20, 128)
        quantize = {"int8": quantize_int8, "fp8": quantize_fp8}.get(form.partition(" ")[0])
        return quantize(held, form.split()[1]) if quantize else held

    scores = maxsim(queries, first(20_000))
    for count in (1, 100, 600, 1100, 9000):
        assert torch.equal(maxsim(queries, first(count)), scores[:, :count]), count


def test_warmup_leaves_nothing_to_compile(compilations):
    """For any number of documents of the lengths it was told."""
    warmup(queries=((1, 32), (1, 64), (64, 32)), document_tokens=(180,), forms=("dense", "packed", "int8"))
    compilations.clear()
    for count in (1, 3, 40, 100, 600, 1100, 9000):
        for queries in ((1, 32), (1, 64), (64, 32)):
            documents = make.gauss(count, 180, 128, seed=1)
            packed = Packed(documents.view(-1, 128), torch.arange(count + 1, device=documents.device) * 180)
            for held in (documents, packed, quantize_int8(documents, "token"), quantize_int8(packed, "document")):
                maxsim(make.gauss(*queries, 128), held)
    assert not compilations
