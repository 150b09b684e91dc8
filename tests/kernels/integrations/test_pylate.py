"""PyLate with us enabled: its own answers, forward and backward, and `strict`'s. Runs where PyLate can be imported.

PyLate pins other versions than ours: test_environments.py runs this file in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_checkpoints
from library_cases import FLOATS, MASKS, ONCE, mask, masks, same, scores_and_gradients, tokens, widened
from maxsim_kernels import integrations, maxsim
from maxsim_kernels.integrations import pylate as ours

pytest.importorskip("pylate", reason="PyLate is not installed here")
from pylate import losses, models, rank, scores

NAME = "pylate"


def enabled(function: Any, *inputs: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    with integrations.enable(NAME):
        found = scores_and_gradients(lambda *given: function()(*given, **options), *inputs)
        held = integrations.status()[NAME]
    assert held.calls
    assert not held.left, held.left
    return found


FUNCTIONS = {
    "colbert_scores": (lambda: scores.colbert_scores, (4, 6, 8)),
    "colbert_kd_scores": (lambda: scores.colbert_kd_scores, (3, 2, 6, 8)),
    "groups": (scores.ColBERTScores, (3, 2, 6, 8)),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores(name: str, dtype: torch.dtype, kind: torch.dtype | None) -> None:
    function, shape = FUNCTIONS[name]
    q, d = tokens(3, 5, 8, dtype=dtype), tokens(*shape, seed=1, dtype=dtype)
    given = (q, d, *masks(kind, (3, 5), shape[:-1]))
    truth = scores_and_gradients(function(), *widened(given))
    found = enabled(function, *given)
    assert found[0].dtype == function()(*given).dtype
    same((found[0].float(), found[1]), (truth[0], [gradient.to(dtype) for gradient in truth[1]]), **ONCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores"])
def test_compiled_without_a_break(name: str) -> None:
    q, d = tokens(3, 5, 8), tokens(*((4, 6, 8) if name == "colbert_scores" else (3, 2, 6, 8)), seed=1)
    truth = scores_and_gradients(getattr(scores, name), q, d)
    with integrations.enable(NAME):
        compiled = torch.compile(getattr(scores, name), fullgraph=True, backend="aot_eager")
        same(scores_and_gradients(compiled, q, d), truth)


def test_negative_documents_lose_to_padding_unless_strict() -> None:
    q = tokens(2, 3, 8).detach().abs()
    d = -tokens(3, 4, 8, seed=1).detach().abs()
    kept = mask(3, 4)
    kept[2] = False
    truth = scores.colbert_scores(q, d, None, kept)
    assert truth.eq(0).any(), "a padded token wins"
    strict = maxsim(q, d, document_mask=kept)
    with integrations.enable(NAME):
        torch.testing.assert_close(scores.colbert_scores(q, d, None, kept), truth)
        torch.testing.assert_close(scores.colbert_scores(q, d, None, kept.float()), truth)
    with integrations.enable(NAME, strict=True):
        torch.testing.assert_close(scores.colbert_scores(q, d, None, kept), strict)
        torch.testing.assert_close(scores.colbert_scores(q, d * kept.unsqueeze(-1)), strict)
        torch.testing.assert_close(scores.colbert_kd_scores(q, torch.stack((d, d)), None, torch.stack((kept, kept))), strict)
        pairs = scores.colbert_scores_pairwise(q, (d * kept.unsqueeze(-1))[:2])
    torch.testing.assert_close(pairs, strict.diagonal())
    torch.testing.assert_close(ours.colbert_scores(q, d, None, kept, strict=True), strict)
    torch.testing.assert_close(ours.colbert_scores(q, d, None, kept), truth)


def test_strict_leaves_rows_of_zeros_in_lists_out() -> None:
    q, d = tokens(3, 5, 8).detach().abs(), -tokens(3, 6, 8, seed=1).detach().abs()
    padded = torch.cat((d, torch.zeros(3, 2, 8)), 1)
    padded[1, 2] = 0  # in the middle
    padded[2] = 0  # a document without tokens
    want = maxsim(q, padded, document_mask=padded.any(dim=-1)).diagonal()
    assert want[2] == -torch.inf
    wanted = [(tokens(5, 8, seed=n), padded[n].clone().requires_grad_()) for n in range(2)]
    with integrations.enable(NAME, strict=True):
        for documents in (padded, list(padded)):
            torch.testing.assert_close(
                scores.colbert_scores_pairwise(list(q) if isinstance(documents, list) else q, documents), want
            )
        torch.testing.assert_close(scores.colbert_scores(list(q), list(padded)).diagonal(), want)
        scores.colbert_scores_pairwise(*map(list, zip(*wanted))).sum().backward()
        assert not integrations.status()[NAME].left
    assert wanted[1][1].grad[2].eq(0).all()
    assert wanted[1][1].grad[6:].eq(0).all()
    assert scores.colbert_scores_pairwise(list(q), list(padded)).eq(0).any(), "the library lets them win"


def test_strict_refuses_what_only_the_library_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    q, d, kept = tokens(2, 5, 8).detach(), tokens(2, 6, 8, seed=1).detach(), mask(1, 6)
    calls = {
        "float64": lambda: scores.colbert_scores(q.double(), d.double()),
        "a mask of another shape": lambda: scores.colbert_scores(q, d, None, kept),
        "backend 'torch'": lambda: scores.colbert_scores(q, d, backend="torch"),
        "pairs that are no": lambda: scores.colbert_scores_pairwise([q[0], q[1]], [d[0].numpy(), d[1].numpy()]),
        "float64 queries": lambda: scores.ColBERTScores()(q.double(), d.double().unsqueeze(1)),
    }
    for call in calls.values():
        call()  # the library scores it
    with integrations.enable(NAME):
        for call in calls.values():
            call()
    with integrations.enable(NAME, strict=True):
        for reason, call in calls.items():
            with pytest.raises(ValueError, match=f"got .*{reason}.*padding may win; strict=True needs"):
                call()
        with pytest.raises(RuntimeError, match="CUDA"):  # what the library refuses stays its own error
            scores.colbert_scores(q, d, backend="lik")
        assert scores.colbert_scores(q[:0], d).shape == (0, 2)
    with pytest.raises(ValueError, match="strict=True needs"):
        ours.colbert_kd_scores(q.double(), d.double().unsqueeze(1), strict=True)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_no_group_is_refused_as_there(shape: tuple[int, int]) -> None:
    q, d = tokens(2, 5, 8).detach(), torch.empty(*shape, 6, 8)
    with pytest.raises(RuntimeError) as theirs:
        scores.ColBERTScores()(q, d)
    with integrations.enable(NAME), pytest.raises(RuntimeError) as found:
        scores.ColBERTScores()(q, d)
    assert str(found.value) == str(theirs.value)


def test_complex_masks_are_refused_as_there() -> None:
    q, d = tokens(2, 5, 8).detach(), tokens(3, 6, 8, seed=1).detach()
    weights = torch.ones(3, 6, dtype=torch.complex64)
    with pytest.raises(RuntimeError) as theirs:
        scores.colbert_scores(q, d, None, weights)
    for strict in (False, True):
        with integrations.enable(NAME, strict=strict), pytest.raises(RuntimeError) as found:
            scores.colbert_scores(q, d, None, weights)
        assert str(found.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lists", [False, True])
def test_pairs(dtype: torch.dtype, lists: bool) -> None:
    if lists:
        q: Any = [tokens(length, 8, seed=length, dtype=dtype) for length in (3, 5, 1)]
        d: Any = [tokens(length, 8, seed=20 + length, dtype=dtype) for length in (6, 2, 9)]
        wide: Any = ([one.detach().float().requires_grad_() for one in q], [one.detach().float().requires_grad_() for one in d])
    else:
        q, d = tokens(3, 5, 8, dtype=dtype), tokens(3, 6, 8, seed=1, dtype=dtype)
        wide = widened((q, d))
    truth = scores_and_gradients(scores.colbert_scores_pairwise, *wide)
    found = enabled(lambda: scores.colbert_scores_pairwise, q, d)
    assert found[0].dtype == dtype
    same((found[0].float(), found[1]), (truth[0], [gradient.to(dtype) for gradient in truth[1]]), **ONCE[dtype])


def test_lists_and_arrays_are_read_as_there() -> None:
    q, d = tokens(2, 5, 8).detach(), tokens(3, 6, 8, seed=1).detach()
    kept = mask(3, 6, dtype=torch.float32)
    truth = scores.colbert_scores(q, d, None, kept)
    for convert in (list, lambda one: one.numpy(), lambda one: one.tolist(), lambda one: [row.numpy() for row in one]):
        with integrations.enable(NAME):
            torch.testing.assert_close(scores.colbert_scores(convert(q), convert(d), None, kept.numpy()), truth)
            assert integrations.status()[NAME].calls == {"colbert_scores": 1}


def test_a_named_backend_and_float64_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    q, d = tokens(2, 5, 8).detach(), tokens(2, 6, 8, seed=1).detach()
    truth = scores.colbert_scores(q, d)
    with integrations.enable(NAME):
        torch.testing.assert_close(scores.colbert_scores(q, d, backend="torch"), truth, rtol=0, atol=0)
        assert integrations.status()[NAME].left == {"backend 'torch' was asked for": 1}
        with pytest.raises(RuntimeError, match="CUDA"):
            scores.colbert_scores(q, d, backend="lik")
        with pytest.raises(ValueError, match="backend"):
            scores.colbert_scores(q, d, backend="triton")
        assert scores.colbert_scores(q.double(), d.double()).dtype == torch.float64
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
        scores.ColBERTScores()(q, d.unsqueeze(1))
        scores.colbert_kd_scores(q, d.unsqueeze(1))
        scores.colbert_scores_pairwise(q, d)
        assert not integrations.status()[NAME].calls


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_checkpoints.pylate(tmp_path_factory.mktemp("hub") / "tiny")
    return models.ColBERT(str(folder), device="cpu")


def step(encoder: Any, loss: Any, labels: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    encoder.zero_grad()
    torch.manual_seed(0)
    columns = [encoder.tokenize(["glacier melt", "two cat", "the valley"], is_query=True)]
    documents = [["the glacier melt.", "a cat, two cats", "valley the valley a"], ["valley", "two the", "unknown melt"]]
    if labels is None:
        columns += [encoder.tokenize(texts, is_query=False, pad=True) for texts in documents]
    else:
        columns += [encoder.tokenize([text for pair in zip(*documents) for text in pair], is_query=False, pad=True)]
    value = loss(columns, labels)
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive", "Distillation"])
def test_losses(encoder: Any, name: str) -> None:
    labels = torch.tensor([[1.0, 0.2], [0.5, 0.4], [2.0, -1.0]]) if name == "Distillation" else None
    options = {"mini_batch_size": 2} if name == "CachedContrastive" else {}
    encoder.eval()
    value, gradients = step(encoder, getattr(losses, name)(encoder, **options), labels)
    with integrations.enable(NAME):
        loss = getattr(losses, name)(encoder, **options)
        found, ours_too = step(encoder, loss, labels)
        held = integrations.status()[NAME]
    assert held.calls
    assert not held.left
    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(ours_too[key], gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(encoder, loss, labels)[0], value, rtol=0, atol=0)  # made while enabled: theirs again


def test_rerank() -> None:
    queries = [tokens(4, 8, seed=7).detach(), tokens(6, 8, seed=8).detach()]
    documents = [[tokens(length, 8, seed=length).detach() for length in row] for row in ((3, 9, 5), (2, 7))]
    ids = [["a", "b", "c"], ["d", "e"]]
    truth = rank.rerank(ids, queries, documents)
    with integrations.enable(NAME):
        found = rank.rerank(ids, queries, documents)
        assert integrations.status()[NAME].calls == {"colbert_scores": 2}
    assert [[one["id"] for one in row] for row in found] == [[one["id"] for one in row] for row in truth]
    for row, other in zip(found, truth):
        assert [one["score"] for one in row] == pytest.approx([one["score"] for one in other], rel=1e-5)


def test_defaults_that_hold_a_function_change_and_come_back() -> None:
    init = losses.Distillation.__init__
    before, theirs = init.__defaults__, scores.colbert_kd_scores
    q, d = tokens(2, 5, 8).detach(), tokens(2, 2, 6, 8, seed=1).detach()
    with integrations.enable(NAME):
        held = next(one for one in init.__defaults__ if callable(one))
        held(q, d)
        assert integrations.status()[NAME].calls == {"colbert_kd_scores": 1}
        places = integrations.status()[NAME].places
    assert "pylate.losses.distillation.Distillation.__init__ (a default)" in places
    assert init.__defaults__ == before
    assert all(one is other for one, other in zip(init.__defaults__, before))
    assert scores.colbert_kd_scores is theirs
    assert Path(scores.colbert.__file__).name == "colbert.py"
