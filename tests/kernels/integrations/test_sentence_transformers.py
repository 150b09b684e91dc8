"""sentence-transformers with us enabled: its own answers, forward and backward, for everything it accepts."""

from __future__ import annotations

import importlib
import logging
import math
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny_checkpoints
from library_cases import FLOATS, MASKS, ONCE, ROUNDED, mask, masks, same, scores_and_gradients, tokens, widened
from maxsim_kernels import integrations
from maxsim_kernels.integrations import sentence_transformers as ours

pytest.importorskip("sentence_transformers")
from sentence_transformers import util
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.util import similarity

NAME = "sentence-transformers"


def enabled(function: str, *inputs: Any, module: Any = similarity, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The library's function with us on; the operator must have scored the call."""
    with integrations.enable(NAME):
        found = scores_and_gradients(getattr(module, function), *inputs, **options)
        held = integrations.status()[NAME]
    assert held.calls
    assert not held.left, held.left
    return found


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("function", ["maxsim", "maxsim_pairwise", "mean_maxsim", "mean_maxsim_pairwise"])
def test_padded_tensors(function: str, kind: torch.dtype | None, normalize: bool) -> None:
    a, b = tokens(4, 7, 16), tokens(4, 9, 16, seed=1)
    a_mask, b_mask = masks(kind, (4, 7), (4, 9))
    given = (a, b, a_mask, b_mask)
    same(
        enabled(function, *given, length_normalize=normalize),
        scores_and_gradients(getattr(similarity, function), *given, length_normalize=normalize),
    )


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", ["maxsim", "maxsim_pairwise"])
def test_sixteen_bits_are_summed_in_float32(function: str, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    a, b = tokens(4, 7, 16, dtype=dtype), tokens(4, 9, 16, seed=1, dtype=dtype)
    given = (a, b, *masks(kind, (4, 7), (4, 9)))
    found = enabled(function, *given)
    assert found[0].dtype == torch.float32
    theirs = getattr(similarity, function)
    torch.testing.assert_close(found[0], theirs(*given).detach(), **ROUNDED[dtype])
    truth = scores_and_gradients(theirs, *widened(given))
    same(found, (truth[0], [gradient.to(dtype) for gradient in truth[1]]), **ONCE[dtype])


def test_float_weights_of_query_tokens_multiply() -> None:
    a, b, weights = tokens(3, 5, 8), tokens(4, 6, 8, seed=1), torch.rand(3, 5)
    same(enabled("maxsim", a, b, weights), scores_and_gradients(similarity.maxsim, a, b, weights))


def test_rows_of_zeros_are_padding_and_empty_documents_score_theirs() -> None:
    a, b = tokens(3, 7, 16), tokens(5, 9, 16, seed=1)
    with torch.no_grad():
        a[0, 4:] = 0
        b.copy_(-b.abs() * a.detach().sign().mean())  # padding must not win over negative similarities
        b[1, 3:] = 0
        b[2] = 0
    truth = scores_and_gradients(similarity.maxsim, a, b)
    found = enabled("maxsim", a, b)
    same(found, truth)
    assert (found[0][:, 2] == -1e9).all()
    assert found[1][1][2].eq(0).all()
    masked = mask(5, 9)
    masked[4] = False
    same(enabled("maxsim", a, b, None, masked), scores_and_gradients(similarity.maxsim, a, b, None, masked))


@pytest.mark.parametrize("function", ["maxsim", "maxsim_pairwise"])
@pytest.mark.parametrize("chunk", [None, 64])
def test_lists_of_tensors(function: str, chunk: int | None) -> None:
    queries = [tokens(length, 8, seed=length) for length in (3, 5, 1, 4)]
    documents = [tokens(length, 8, seed=20 + length) for length in (6, 2, 9, 7)]
    documents[1] = torch.empty(0, 8, requires_grad=True)
    same(
        enabled(function, queries, documents, chunk_elements=chunk, length_normalize=True),
        scores_and_gradients(getattr(similarity, function), queries, documents, length_normalize=True),
    )


def test_one_side_a_list_and_the_other_a_tensor() -> None:
    queries, documents = [tokens(3, 8), tokens(5, 8, seed=1)], tokens(2, 6, 8, seed=2)
    for function in ("maxsim", "maxsim_pairwise"):
        theirs = getattr(similarity, function)
        same(enabled(function, queries, documents), scores_and_gradients(theirs, queries, documents))
        same(enabled(function, documents, queries), scores_and_gradients(theirs, documents, queries))


def test_one_query_and_one_document() -> None:
    a, b = tokens(5, 8), tokens(6, 8, seed=1)
    given = (a, b, mask(5), mask(6, seed=1))
    same(enabled("maxsim", *given), scores_and_gradients(similarity.maxsim, *given))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("normalize", [False, True])
def test_groups_and_candidates(kind: torch.dtype | None, dtype: torch.dtype, normalize: bool) -> None:
    q, d = tokens(3, 5, 8, dtype=dtype), tokens(3, 2, 6, 8, seed=1, dtype=dtype)
    q_mask, d_mask = masks(kind, (3, 5), (3, 2, 6))
    for function in ("colbert_scores", "colbert_kd_scores"):
        truth = scores_and_gradients(getattr(scoring, function), *widened((q, d)), q_mask, d_mask, length_normalize=normalize)
        found = enabled(function, q, d, q_mask, d_mask, module=scoring, length_normalize=normalize)
        same(found, (truth[0], [gradient.to(dtype) for gradient in truth[1]]), **ONCE[dtype])
        plain = getattr(ours, function)
        same(scores_and_gradients(plain, q, d, q_mask, d_mask, length_normalize=normalize), found)
    pair = (q, d[:, 0].detach().requires_grad_(), q_mask, None if d_mask is None else d_mask[:, 0])
    truth = scores_and_gradients(scoring.colbert_scores_pairwise, *widened(pair))
    found = enabled("colbert_scores_pairwise", *pair, module=scoring)
    same(found, (truth[0], [gradient.to(dtype) for gradient in truth[1]]), **ONCE[dtype])
    same(scores_and_gradients(ours.colbert_scores_pairwise, *pair), found)


@pytest.mark.parametrize("function", ["maxsim", "maxsim_pairwise"])
def test_what_the_operator_does_not_take_is_theirs(function: str) -> None:
    a, b = tokens(3, 5, 8).detach(), tokens(3, 6, 8, seed=1).detach()
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (a.double(), b.double(), {}),
        ((a * 20).to(torch.int8), (b * 20).to(torch.int8), {}),
        (a.numpy(), b.numpy(), {}),
        (list(a.numpy()), list(b.numpy()), {}),
        (list(a), list(b), {"b_mask": list(mask(3, 6))}),
        (a[:0], b[:0], {}),
        (a, b[:, :0], {}),
        (a, b, {"b_mask": np.asarray(mask(3, 6))}),
    ]
    for first, second, options in cases:
        truth = getattr(similarity, function)(first, second, **options)
        with integrations.enable(NAME):
            found = getattr(similarity, function)(first, second, **options)
            assert sum(integrations.status()[NAME].left.values()) >= 1
        torch.testing.assert_close(found, truth)
    with integrations.enable(NAME), pytest.raises(ValueError, match="tokens"):
        getattr(similarity, function)(a, b, None, mask(3, 4))


def test_theirs_calls_our_scorers_for_what_it_cuts_itself() -> None:
    a, b = [tokens(4, 8).detach(), tokens(3, 8).detach()], [tokens(6, 8, seed=1).detach(), tokens(5, 8, seed=2).detach()]
    given = (a, b, None, [mask(6), mask(5)])
    truth, pairs = similarity.maxsim(*given), similarity.maxsim_pairwise(*given)
    with integrations.enable(NAME):
        torch.testing.assert_close(similarity.maxsim(*given), truth)
        torch.testing.assert_close(similarity.maxsim_pairwise(*given), pairs)
        calls = integrations.status()[NAME].calls
    assert calls["_maxsim_score_documents"] == calls["_maxsim_score_pairs"] == 1


def test_names_taken_before_score_with_us() -> None:
    a, b = tokens(3, 5, 8), tokens(4, 6, 8, seed=1)
    taken = similarity.maxsim
    with integrations.enable(NAME):
        taken(a, b)
        assert integrations.status()[NAME].calls == {"maxsim": 1}
        kept = util.maxsim
    before = integrations.status()[NAME].calls
    torch.testing.assert_close(kept(a, b), taken(a, b))
    assert integrations.status()[NAME].calls == before, "a name kept from the time of enable() still scores with us"


def test_autocast_multiplies_in_its_dtype() -> None:
    a, b = tokens(3, 5, 8), tokens(4, 6, 8, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        truth = similarity.maxsim(a, b)
        with integrations.enable(NAME):
            found = similarity.maxsim(a, b)
    assert found.dtype == truth.dtype == torch.float32
    torch.testing.assert_close(found, truth, **ROUNDED[torch.bfloat16])
    assert not torch.equal(found, similarity.maxsim(a, b)), "the products are those of bfloat16 tokens"


@pytest.mark.slow
def test_compiled_without_a_break() -> None:
    q, d, q_mask, d_mask = tokens(3, 4, 8), tokens(3, 2, 5, 8, seed=1), mask(3, 4), mask(3, 2, 5)
    for function in ("colbert_scores", "colbert_kd_scores"):
        theirs = getattr(scoring, function)
        truth = scores_and_gradients(theirs, q, d, q_mask, d_mask)
        with integrations.enable(NAME):
            compiled = torch.compile(getattr(scoring, function), fullgraph=True, backend="aot_eager")
            same(scores_and_gradients(compiled, q, d, q_mask, d_mask), truth)


@pytest.mark.slow
def test_what_was_compiled_follows_the_switch() -> None:
    """Calls compiled before score with us while we are on, and with the library after; nothing is compiled twice for it."""
    given = (tokens(3, 4, 8).detach(), tokens(3, 2, 5, 8, seed=1).detach(), mask(3, 4), mask(3, 2, 5))
    graphs: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append("maxsim_kernels" in graph.code)
        return graph

    compiled = torch.compile(lambda *given: scoring.colbert_scores(*given) * 2, fullgraph=True, backend=backend)
    truth = compiled(*given)
    for _ in range(3):
        with integrations.enable(NAME):
            torch.testing.assert_close(compiled(*given), truth)
        torch.testing.assert_close(compiled(*given), truth, rtol=0, atol=0)
    assert graphs == [False, True]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from sentence_transformers import MultiVectorEncoder

    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    return MultiVectorEncoder(str(tiny_checkpoints.pylate(tmp_path_factory.mktemp("hub") / "tiny")), device="cpu")


def features(encoder: Any, *columns: list[str]) -> list[dict[str, Any]]:
    tasks = ["query"] + ["document"] * (len(columns) - 1)
    return [encoder.preprocess(column, task=task) for column, task in zip(columns, tasks, strict=True)]


def step(encoder: Any, loss: Any, inputs: list[dict[str, Any]], labels: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    encoder.zero_grad()
    torch.manual_seed(0)
    value = loss([dict(one) for one in inputs], labels)
    value.backward()
    return float(value.detach()), {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}


QUERIES = ["glacier melt", "two cat", "the valley", "unknown cat"]
POSITIVES = ["the glacier melt.", "a cat, two cats", "valley the valley a", "cat"]
NEGATIVES = ["valley", "two glacier the", "unknown, melt", "a glacier two valleys"]


@pytest.mark.parametrize("name", ["ranking", "cached", "distillation", "margin"])
def test_losses(encoder: Any, name: str) -> None:
    from sentence_transformers.multi_vector_encoder import losses

    teacher = torch.tensor([[1.0, 0.2], [0.5, 0.4], [2.0, -1.0], [0.1, 0.0]])
    made = {
        "ranking": (losses.MultiVectorMultipleNegativesRankingLoss, {}, None),
        "cached": (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 2}, None),
        "distillation": (losses.MultiVectorDistillKLDivLoss, {}, teacher),
        "margin": (losses.MultiVectorMarginMSELoss, {}, teacher[:, :1] - teacher[:, 1:]),
    }
    kind, options, labels = made[name]
    inputs = features(encoder, QUERIES, POSITIVES, NEGATIVES)
    value, gradients = step(encoder, kind(encoder, **options), inputs, labels)
    with integrations.enable(NAME):
        loss = kind(encoder, **options)
        found, ours_too = step(encoder, loss, inputs, labels)
        held = integrations.status()[NAME]
    assert held.calls
    assert not held.left
    assert math.isclose(found, value, rel_tol=1e-5)
    assert gradients.keys() == ours_too.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(ours_too[key], gradient, rtol=1e-4, atol=1e-5)
    functions = {"distillation": ours.colbert_kd_scores, "margin": ours.colbert_scores_pairwise}
    plain = kind(encoder, similarity_fct=functions.get(name, ours.colbert_scores), **options)
    assert math.isclose(step(encoder, plain, inputs, labels)[0], value, rel_tol=1e-5)
    assert plain.get_config_dict()["similarity_fct"] == loss.get_config_dict()["similarity_fct"]


def test_a_model_scores_with_us(encoder: Any) -> None:
    queries, documents = encoder.encode_query(QUERIES), encoder.encode_document(POSITIVES)
    truth, pairs = encoder.similarity(queries, documents), encoder.similarity_pairwise(queries, documents)
    with integrations.enable(NAME):
        torch.testing.assert_close(encoder.similarity(queries, documents), truth)
        torch.testing.assert_close(encoder.similarity_pairwise(queries, documents), pairs)
        held = integrations.status()[NAME]
    assert held.calls


def test_models_and_losses_can_be_pickled_before_in_and_after(encoder: Any) -> None:
    """Also those that have scored before, which keep the function; a pool of processes pickles the model."""
    from sentence_transformers.multi_vector_encoder import losses

    queries, documents = encoder.encode_query(QUERIES), encoder.encode_document(POSITIVES)
    truth = encoder.similarity(queries, documents)
    held = [encoder, losses.MultiVectorMultipleNegativesRankingLoss(encoder)]
    before = len(pickle.dumps(held))
    with integrations.enable(NAME):
        assert encoder.similarity(queries, documents).shape == truth.shape
        assert integrations.status()[NAME].calls == {"maxsim": 1}, "a model that has scored before scores with us"
        meanwhile = losses.MultiVectorMultipleNegativesRankingLoss(encoder)
        assert len(pickle.dumps(held)) == before
        inside = pickle.dumps(meanwhile)
    for loss in (pickle.loads(pickle.dumps(meanwhile)), pickle.loads(inside)):
        assert loss.similarity_fct is scoring.colbert_scores
        torch.testing.assert_close(loss.model.similarity(queries, documents), truth, rtol=0, atol=0)


@pytest.mark.slow
def test_a_pool_of_processes_starts_while_it_is_on(encoder: Any) -> None:
    encoder.similarity(encoder.encode_query(QUERIES), encoder.encode_document(POSITIVES))
    with integrations.enable(NAME):
        pool = encoder.start_multi_process_pool(["cpu"])
        try:
            found = encoder.encode_document(POSITIVES, pool=pool)
        finally:
            encoder.stop_multi_process_pool(pool)
    for one, other in zip(found, encoder.encode_document(POSITIVES), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other).cpu(), rtol=1e-5, atol=1e-6)


def test_nothing_is_left_behind() -> None:
    importlib.import_module("sentence_transformers.multi_vector_encoder.losses")  # modules that take the functions' names
    modules = {name: dict(vars(module)) for name, module in _library().items()}
    functions = {target.path: getattr(sys.modules[target.module], target.name) for target in ours.LIBRARY.targets}
    codes = {name: function.__code__ for name, function in functions.items()}
    with integrations.enable(NAME):
        changed = integrations.status()[NAME].places
        assert f"{scoring.__name__}.colbert_scores" in changed
        assert f"{util.__name__}.maxsim" in changed
    for name, module in _library().items():
        if name in modules:
            now = vars(module)
            assert now.keys() == modules[name].keys()
            assert all(now[key] is value for key, value in modules[name].items()), name
            assert list(now) == list(modules[name])
    assert {name: function.__code__ for name, function in functions.items()} == codes


def _library() -> dict[str, Any]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sentence_transformers"}


@pytest.mark.parametrize("form", ["tensors", "gradients", "lists"])
def test_the_operator_writes_the_librarys_value_of_empty_documents_on_gpus(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    low = similarity._EMPTY_DOCUMENT_SCORE
    monkeypatch.setattr(ours, "_empty_score", lambda documents: low)  # as it is there
    q, d = tokens(3, 4, 8), tokens(5, 6, 8, seed=1)
    query_mask, document_mask = mask(3, 4), mask(5, 6, seed=1)
    document_mask[2], query_mask[1] = False, False
    given: Any = (q, d, query_mask, document_mask)
    if form == "lists":
        given = (list(q.detach()), [d[0].detach(), d[1, :0].detach(), d[2].detach()])
    elif form == "tensors":
        given = (q.detach(), d.detach(), query_mask, document_mask)
    theirs = similarity.maxsim(*given)
    assert theirs.eq(low).sum() == 3
    with integrations.enable(NAME):
        torch.testing.assert_close(similarity.maxsim(*given), theirs, rtol=2e-6, atol=2e-5)
        if form == "gradients":
            same(scores_and_gradients(similarity.maxsim, *given), scores_and_gradients(ours.LIBRARY["maxsim"], *given))


def test_on_cpus_the_library_fills_and_warns() -> None:
    assert ours._empty_score(tokens(2, 3, 8)) is None
