"""colpali-engine with us enabled: its own answers, forward and backward. Runs where colpali-engine can be imported.

test_environments.py runs this file in an environment of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from library_cases import FLOATS, FP32, ONCE, ROUNDED, same, scores_and_gradients, tokens, widened
from maxsim_kernels import integrations, maxsim, pack

pytest.importorskip("colpali_engine", reason="colpali-engine is not installed here")
from colpali_engine import loss as losses
from colpali_engine.loss import late_interaction_losses
from colpali_engine.models import ColPaliProcessor
from colpali_engine.utils import maxsim as dispatch
from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor

NAME = "colpali-engine"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["maxsim_inbatch", "maxsim_kd"])
def test_dispatch(name: str, dtype: torch.dtype) -> None:
    q = tokens(3, 5, 8, dtype=dtype)
    d = tokens(*((4, 6, 8) if name == "maxsim_inbatch" else (3, 2, 6, 8)), seed=1, dtype=dtype)
    truth = scores_and_gradients(getattr(dispatch, name), *widened((q, d)))
    with integrations.enable(NAME):
        found = scores_and_gradients(getattr(dispatch, name), q, d)
        held = integrations.status()[NAME]
    assert held.calls == {name: 1}
    assert found[0].dtype == dtype
    same((found[0].float(), found[1]), (truth[0], [gradient.to(dtype) for gradient in truth[1]]), **ONCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maxsim_inbatch", "maxsim_kd"])
def test_compiled_without_a_break(name: str) -> None:
    q, d = tokens(3, 5, 8), tokens(*((4, 6, 8) if name == "maxsim_inbatch" else (3, 2, 6, 8)), seed=1)
    truth = scores_and_gradients(getattr(dispatch, name), q, d)
    with integrations.enable(NAME):
        compiled = torch.compile(getattr(dispatch, name), fullgraph=True, backend="aot_eager")
        same(scores_and_gradients(compiled, q, d), truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lists", ["both", "queries", "pages", "neither"])
@pytest.mark.parametrize("batch_size", [2, 128])
def test_scores_of_processors(batch_size: int, lists: str, dtype: torch.dtype) -> None:
    qs: Any = [tokens(length, 8, seed=length, dtype=dtype).detach().abs() for length in (3, 5, 1)]
    ps: Any = [-tokens(length, 8, seed=20 + length, dtype=dtype).detach().abs() for length in (6, 2, 9, 9, 4)]
    if lists in ("pages", "neither"):
        qs = torch.nn.utils.rnn.pad_sequence(qs, batch_first=True)
    if lists in ("queries", "neither"):
        ps = torch.nn.utils.rnn.pad_sequence(ps, batch_first=True)
    truth = ColPaliProcessor.score_multi_vector(qs, ps, batch_size=batch_size, device="cpu")
    assert truth.eq(0).any(), "a zero that pads wins over negative similarities"
    with integrations.enable(NAME):
        found = ColPaliProcessor.score_multi_vector(qs, ps, batch_size=batch_size, device="cpu")
        assert integrations.status()[NAME].calls == {"score_multi_vector": 1}
    torch.testing.assert_close(found, truth, **(ROUNDED | {torch.float32: FP32})[dtype])
    with integrations.enable(NAME, strict=True):
        strict = ColPaliProcessor.score_multi_vector(qs, ps, batch_size=batch_size, device="cpu")
    documents = [page[page.any(dim=-1)] for page in ps]
    queries = qs if isinstance(qs, Tensor) else pack(qs)
    torch.testing.assert_close(strict, maxsim(queries, pack(documents)))


def test_strict_leaves_rows_of_zeros_in_lists_out() -> None:
    qs = [tokens(length, 8, seed=length).detach().abs() for length in (3, 5)]
    padded = -tokens(4, 6, 8, seed=1).detach().abs()
    padded[:, 4:] = 0
    padded[1, 1] = 0
    want = maxsim(pack(qs), padded, document_mask=padded.any(dim=-1))
    assert ColPaliProcessor.score_multi_vector(qs, list(padded), device="cpu").eq(0).any(), "the library lets them win"
    with integrations.enable(NAME, strict=True):
        for pages in (padded, list(padded), [*padded[:3], padded[3, :4]], tuple(padded)):
            torch.testing.assert_close(ColPaliProcessor.score_multi_vector(qs, pages, device="cpu"), want)


def test_strict_refuses_what_only_the_library_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    q, d = tokens(2, 5, 8).detach(), tokens(2, 6, 8, seed=1).detach()
    with integrations.enable(NAME, strict=True):
        for call in (
            lambda: dispatch.maxsim_inbatch(q.double(), d.double()),
            lambda: ColPaliProcessor.score_multi_vector(list(q.double()), list(d.double()), device="cpu"),
        ):
            with pytest.raises(ValueError, match="float64 queries, which only colpali-engine's own code scores"):
                call()
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        with pytest.raises(ValueError, match="COLPALI_SCORES_BACKEND is 'torch'"):
            dispatch.maxsim_kd(q, d.unsqueeze(1))


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_no_tensor_is_the_librarys_error(strict: bool) -> None:
    q, d = tokens(2, 5, 8).detach().tolist(), tokens(2, 6, 8, seed=1).detach().tolist()
    for name in ("maxsim_inbatch", "maxsim_kd"):
        with pytest.raises(TypeError) as theirs:
            getattr(dispatch, name)(q, d)
        with integrations.enable(NAME, strict=strict), pytest.raises(TypeError) as found:
            getattr(dispatch, name)(q, d)
        assert str(found.value) == str(theirs.value)


def test_many_pages_are_scored_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from maxsim_kernels.integrations import calls

    monkeypatch.setattr(calls, "CHUNK", 100)
    qs, ps = [tokens(4, 8).detach()], [tokens(1 + number % 9, 8, seed=number).detach() for number in range(30)]
    padded = torch.nn.utils.rnn.pad_sequence(ps, batch_first=True)
    for pages in (ps, padded):
        truth = ColPaliProcessor.score_multi_vector(qs, pages, batch_size=7)
        with integrations.enable(NAME):
            torch.testing.assert_close(ColPaliProcessor.score_multi_vector(qs, pages, batch_size=7), truth)


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "name",
    ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss", "ColbertSigmoidLoss"],
)
def test_losses(name: str, normalize: bool, filtering: bool) -> None:
    q, d, negatives = tokens(4, 5, 8), tokens(4, 6, 8, seed=1), tokens(4, 2, 7, 8, seed=2)
    inputs = [torch.nn.functional.normalize(one, dim=-1).detach().requires_grad_() for one in (q, d, negatives)]
    if "Negative" not in name:
        inputs = inputs[:2]
    loss = getattr(late_interaction_losses, name)(normalize_scores=normalize, pos_aware_negative_filtering=filtering)
    truth = scores_and_gradients(loss, *inputs)
    with integrations.enable(NAME):
        found = scores_and_gradients(loss, *inputs)
        held = integrations.status()[NAME]
    assert held.calls
    assert not held.left
    same(found, truth, rtol=1e-4, atol=1e-5)


def test_the_smooth_maximum_stays_theirs() -> None:
    q, d = tokens(4, 5, 8), tokens(4, 6, 8, seed=1)
    loss = losses.ColbertLoss(use_smooth_max=True, normalize_scores=False)
    truth = scores_and_gradients(loss, q, d)
    with integrations.enable(NAME):
        same(scores_and_gradients(loss, q, d), truth, rtol=0, atol=0)
        assert not integrations.status()[NAME].calls


def test_a_named_backend_and_odd_input_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    q, d = tokens(2, 5, 8).detach(), tokens(2, 6, 8, seed=1).detach()
    with integrations.enable(NAME):
        assert dispatch.maxsim_inbatch(q.double(), d.double()).dtype == torch.float64
        for bad in ([], torch.empty(0, 5, 8)):
            with pytest.raises(ValueError, match="No queries"):
                ColPaliProcessor.score_multi_vector(bad, list(d), device="cpu")
        ColPaliProcessor.score_multi_vector(list(q.double()), list(d.double()), device="cpu")
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        dispatch.maxsim_inbatch(q, d)
        dispatch.maxsim_kd(q, d.unsqueeze(1))
        ColPaliProcessor.score_multi_vector(list(q), list(d), device="cpu")
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "lik")
        with pytest.raises(Exception, match="late-interaction-kernels"):
            dispatch.maxsim_inbatch(q, d)
        assert not integrations.status()[NAME].calls


def test_nothing_is_left_behind() -> None:
    before = vars(BaseVisualRetrieverProcessor)["score_multi_vector"]
    scorer = late_interaction_losses.maxsim_inbatch
    codes = before.__func__.__code__, scorer.__code__
    with integrations.enable(NAME):
        assert before.__func__.__code__ is not codes[0]
        assert scorer.__code__ is not codes[1]
        assert "colpali_engine.loss.late_interaction_losses.maxsim_inbatch" in integrations.status()[NAME].places
    assert (before.__func__.__code__, scorer.__code__) == codes
    assert vars(BaseVisualRetrieverProcessor)["score_multi_vector"] is before
    assert late_interaction_losses.maxsim_inbatch is dispatch.maxsim_inbatch is scorer
