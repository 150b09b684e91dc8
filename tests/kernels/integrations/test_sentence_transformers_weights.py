"""Weights of query tokens, transforms and shapes that sentence-transformers takes or refuses: what we do with them is what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from library_cases import ROUNDED, mask, same, scores_and_gradients, tokens
from maxsim_kernels import integrations
from maxsim_kernels.integrations import sentence_transformers as ours

pytest.importorskip("sentence_transformers")
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.util import similarity

NAME = "sentence-transformers"
WEIGHTS = {
    "counts": torch.tensor([[2, 1, 1, 0, 3]] * 3),
    "int8": torch.tensor([[2, 1, 1, 0, 3]] * 3, dtype=torch.int8),
    "uint8": torch.full((3, 5), 255, dtype=torch.uint8),
    "fractions": torch.linspace(0, 2, 15).view(3, 5),
    "zeros and ones": mask(3, 5, dtype=torch.float32),
    "all zero": torch.zeros(3, 5, dtype=torch.int64),
}


def left() -> dict[str, int]:
    return dict(integrations.status()[NAME].left)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_mask_of_any_dtype_but_bool_multiplies_maxima(name: str, normalize: bool) -> None:
    q, d, weights = tokens(3, 5, 8), tokens(4, 6, 8, seed=1), WEIGHTS[name]
    candidates = tokens(3, 2, 6, 8, seed=2)
    cases: list[tuple[Any, str, tuple[Any, ...]]] = [
        (similarity, "maxsim", (q, d, weights)),
        (similarity, "maxsim_pairwise", (q, d[:3].detach().requires_grad_(), weights)),
        (scoring, "colbert_scores", (q, candidates, weights)),
        (scoring, "colbert_kd_scores", (q, candidates, weights)),
        (similarity, "maxsim", (list(q.detach()), [one.detach().requires_grad_() for one in d], list(weights))),
        (similarity, "maxsim", (q, [one.detach().requires_grad_() for one in d], weights)),
    ]
    for module, function, given in cases:
        truth = scores_and_gradients(getattr(module, function), *given, length_normalize=normalize)
        with integrations.enable(NAME):
            found = scores_and_gradients(getattr(module, function), *given, length_normalize=normalize)
            assert integrations.status()[NAME].calls
        same(found, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_sixteen_bit_tokens(dtype: torch.dtype) -> None:
    q, d = tokens(3, 5, 8, dtype=dtype).detach(), tokens(4, 6, 8, seed=1, dtype=dtype).detach()
    for weights in WEIGHTS.values():
        if weights.dtype == torch.uint8:
            continue
        truth = similarity.maxsim(q, d, weights)
        with integrations.enable(NAME):
            torch.testing.assert_close(similarity.maxsim(q, d, weights), truth, **ROUNDED[dtype])


@pytest.mark.parametrize("function", ["maxsim", "maxsim_pairwise"])
def test_learned_weights_are_the_librarys(function: str) -> None:
    """At a weight of 0 its gradient is the token's maximum."""
    weights = torch.rand(3, 5)
    weights[:, 2] = 0
    given = (tokens(3, 5, 8), tokens(3, 6, 8, seed=1), weights.requires_grad_())
    truth = scores_and_gradients(getattr(similarity, function), *given)
    assert truth[1][2][:, 2].ne(0).all()
    with integrations.enable(NAME):
        same(scores_and_gradients(getattr(similarity, function), *given), truth, rtol=0, atol=0)
        assert set(left()) == {"weights of query tokens that want a gradient"}
        with torch.no_grad():
            torch.testing.assert_close(getattr(similarity, function)(*given), truth[0])
        assert integrations.status()[NAME].calls == {function: 1}


def test_negative_weights_are_the_librarys_where_reading_them_waits_for_nobody() -> None:
    q, d, weights = tokens(3, 5, 8), tokens(3, 6, 8, seed=1), torch.linspace(-1, 1, 15).view(3, 5)
    for function in (similarity.maxsim, similarity.maxsim_pairwise):
        truth = scores_and_gradients(function, q, d, weights)
        with integrations.enable(NAME):
            same(scores_and_gradients(getattr(similarity, function.__name__), q, d, weights), truth)
            assert set(left()) == {"negative weights of query tokens"}
            assert not integrations.status()[NAME].calls


def test_complex_weights_are_the_librarys() -> None:
    q, d, weights = tokens(3, 5, 8).detach(), tokens(4, 6, 8, seed=1).detach(), torch.ones(3, 5, dtype=torch.complex64)
    truth = similarity.maxsim(q, d, weights)
    with integrations.enable(NAME):
        torch.testing.assert_close(similarity.maxsim(q, d, weights), truth)


def test_a_nan_in_a_masked_query_token() -> None:
    """The one difference of masks of 0 and 1: they leave the token out, and NaN times 0 is NaN."""
    q, d, kept = tokens(3, 5, 8).detach(), tokens(4, 6, 8, seed=1).detach(), torch.tensor([[1, 1, 1, 0, 0]] * 3)
    plain = similarity.maxsim(q, d, kept)
    q[:, 4] = torch.nan
    assert similarity.maxsim(q, d, kept).isnan().all()
    with integrations.enable(NAME):
        torch.testing.assert_close(similarity.maxsim(q, d, kept), plain)
        assert similarity.maxsim(q, d, kept * 2).isnan().all()


def raised(call: Callable[[], Any]) -> type[Exception] | None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)
    return None


def test_what_the_library_refuses_is_refused() -> None:
    q = tokens(3, 5, 8).detach()

    def documents(*shape: int) -> Tensor:
        return tokens(*shape, 6, 8, seed=1).detach()

    cases: dict[str, Callable[[], Any]] = {
        "candidates in maxsim": lambda: similarity.maxsim(q, documents(3, 2)),
        "one group in maxsim": lambda: similarity.maxsim(q, documents(1, 4)),
        "candidates in maxsim_pairwise": lambda: similarity.maxsim_pairwise(q, documents(3, 2)),
        "four dimensions of queries": lambda: similarity.maxsim(documents(3, 2), q),
        "no group": lambda: scoring.colbert_scores(q, documents(0, 2)),
        "empty groups": lambda: scoring.colbert_scores(q, documents(3, 0)),
        "no candidates": lambda: scoring.colbert_kd_scores(q, documents(3, 0)),
    }
    truth = {name: raised(call) for name, call in cases.items()}
    assert None not in truth.values()
    with integrations.enable(NAME):
        assert {name: raised(call) for name, call in cases.items()} == truth
        assert not integrations.status()[NAME].calls


def test_transforms_of_torch_func_are_the_librarys() -> None:
    q, d, kept = tokens(3, 5, 8).detach(), tokens(4, 6, 8, seed=1).detach(), torch.ones(3, 5)

    def score(queries: Tensor) -> Tensor:
        return similarity.maxsim(queries, d, kept, torch.ones(4, 6))

    def every() -> list[Tensor]:
        tangent = torch.func.jvp(score, (q,), (tokens(3, 5, 8, seed=3).detach(),))[1]
        batched = torch.func.vmap(lambda one: similarity.maxsim(one, d, kept))(torch.stack((q, q + 1)))
        return [torch.func.grad(lambda one: score(one).sum())(q), tangent, batched]

    truth = every()
    with integrations.enable(NAME):
        torch.testing.assert_close(every(), truth)
        assert "a transform of torch.func, or forward-mode differentiation" in left()


@pytest.mark.parametrize("name", ["counts", "fractions"])
def test_weights_on_a_gpu_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where reading would wait: the same scores by the product, without a mask for the operator."""
    q, d, weights = tokens(3, 5, 8), tokens(4, 6, 8, seed=1), WEIGHTS[name]
    truth = scores_and_gradients(similarity.maxsim, q, d, weights)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("the weights were read"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # what a CPU's call may not read either
    rows, kept = ours._asking(ours._Side(q, weights))
    monkeypatch.undo()
    assert kept is None
    same(scores_and_gradients(lambda q, d, w: ours._all(ours._Side(q, w), ours._Side(d, None), None), q, d, weights), truth)
    assert isinstance(rows, Tensor)
    torch.testing.assert_close(rows, q * weights.unsqueeze(-1))
