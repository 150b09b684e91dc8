"""Which gradient path a call takes: by its argument, FLASH_BWD_PATH and torch's deterministic mode, and `explain` says so."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inputs import on_cpu as cases
from maxsim_kernels import autograd, explain, maxsim, maxsim_pairs, quantize_int8
from maxsim_kernels.training import contrastive_loss, distillation_loss

PATHS = ["unified", "atomic", "csr"]
VARIABLE = "FLASH_BWD_PATH"
NAMES = {"atomic_unified": "unified", "atomic": "atomic", "invgrid": "csr", "unified": "unified", "csr": "csr"}
LAYOUTS = ["dense", "one query", "packed", "both packed", "view", "per query", "pairs"]


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def call(layout):
    """Queries, documents and whether they are pairs."""
    queries, documents = cases.grid(3, 7, 6), cases.grid(3, 20, 6, seed=1)
    rows = cases.packed([20, 0, 5], 6, seed=1)
    return {
        "dense": (queries, documents, False),
        "one query": (queries[0].clone(), documents, False),
        "packed": (queries, rows, False),
        "both packed": (cases.packed([7, 0, 3], 6), rows, False),
        "view": (queries, rows.select([2, 0, 0]), False),
        "per query": (queries, cases.grid(3, 4, 9, 6, seed=1), False),
        "pairs": (queries, documents, True),
    }[layout]


def train(layout, **options):
    """Scores and gradients of one step."""
    queries, documents, pairs = call(layout)
    leaves = [cases.values_of(tokens).requires_grad_() for tokens in (queries, documents)]
    scores = (maxsim_pairs if pairs else maxsim)(queries, documents, **options)
    return scores, *torch.autograd.grad(scores, leaves, cases.grid(*scores.shape, seed=9))


def gradient_line(layout, **options):
    queries, documents, pairs = call(layout)
    lines = [
        line for line in explain(queries, documents, pairs=pairs, **options).splitlines() if line.startswith("gradients: ")
    ]
    assert len(lines) == 1
    return lines[0]


def explained(layout, **options):
    """The path that `explain` names first."""
    return gradient_line(layout, **options).removeprefix("gradients: ").split()[0]


class Taken(TorchDispatchMode):
    """Paths that the backward op is told to take."""

    def __init__(self):
        super().__init__()
        self.paths = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "maxsim_kernels::backward":
            names = [argument.name for argument in func._schema.arguments]
            self.paths.append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))


def taken(layout, **options):
    with Taken() as mode:
        train(layout, **options)
    assert len(mode.paths) == 1
    return mode.paths[0]["backward_path"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_every_path_gives_the_same_bits_on_the_cpu(layout, path):
    for one, other in zip(train(layout, backward=path), train(layout), strict=True):
        assert cases.same_bits(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_path_taken_is_the_path_explained(layout):
    for path in PATHS:
        assert taken(layout, backward=path) == explained(layout, backward=path) == path
    assert taken(layout) == explained(layout)
    assert explained(layout) in PATHS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", NAMES)
def test_environment_variable(monkeypatch, layout, value):
    """The paper's names and ours, where the call says "auto"; a path that the call names goes first."""
    monkeypatch.setenv(VARIABLE, value)
    assert taken(layout) == explained(layout) == NAMES[value]
    assert VARIABLE in gradient_line(layout)
    for path in PATHS:
        assert taken(layout, backward=path) == explained(layout, backward=path) == path
        assert VARIABLE not in gradient_line(layout, backward=path)


@pytest.mark.parametrize("value", ["fastest", "CSR", "atomic,csr", " csr"])
def test_unknown_value_of_the_variable(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    for layout in ("dense", "packed", "per query", "pairs"):
        with pytest.raises(ValueError, match=f"{VARIABLE}: got {value!r}, need one of .*invgrid"):
            train(layout)
        with pytest.raises(ValueError, match=VARIABLE):
            explained(layout)


@pytest.mark.parametrize("path", ["fastest", "invgrid", "", None])
def test_unknown_path(path):
    """The paper's names are the variable's alone."""
    for layout in ("dense", "packed", "per query", "pairs"):
        with pytest.raises(ValueError, match="backward: got"):
            train(layout, backward=path)
        with pytest.raises(ValueError, match="backward: got"):
            explained(layout, backward=path)
    with pytest.raises(ValueError, match="backward: got"):
        maxsim(cases.grid(3, 7, 6), cases.grid(3, 20, 6), backward=path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic_mode_takes_csr(deterministic, layout):
    assert taken(layout) == explained(layout) == "csr"
    assert taken(layout, backward="csr") == "csr"


@pytest.mark.parametrize("path", ["unified", "atomic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic_mode_refuses_atomics(deterministic, layout, path):
    with pytest.raises(RuntimeError, match=f"backward: got '{path}' .*csr"):
        train(layout, backward=path)
    queries, documents, pairs = call(layout)
    scores = (maxsim_pairs if pairs else maxsim)(queries, documents, backward=path)  # without a gradient nothing is added up
    assert scores.isfinite().any()
    assert f"refused (backward: got '{path}'" in gradient_line(layout, backward=path)
    cases.values_of(queries).requires_grad_()
    with pytest.raises(RuntimeError, match=f"backward: got '{path}'"):
        explain(queries, documents, pairs=pairs, backward=path)
    reference = (maxsim_pairs if pairs else maxsim)(queries, documents, backward=path, impl="reference")
    assert reference.requires_grad, "whose gradient is plain torch's"
    assert "plain torch, whatever" in explain(queries, documents, pairs=pairs, backward=path, impl="reference")


@pytest.mark.parametrize("value", ["atomic_unified", "atomic"])
def test_deterministic_mode_goes_before_the_variable(deterministic, monkeypatch, value):
    """Atomics are never taken, and only a call that names them is refused."""
    monkeypatch.setenv(VARIABLE, value)
    assert taken("dense") == "csr"
    assert taken("dense", backward="csr") == "csr"
    with pytest.raises(RuntimeError, match="csr"):
        train("dense", backward="atomic")


def test_deterministic_mode_that_only_warns():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.warns(UserWarning, match="csr"):
            train("dense", backward="atomic")
        assert taken("dense") == "csr"
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_path_does_not_depend_on_sizes():
    """The same call with other numbers of queries, documents and tokens."""
    for shape in ((1, 1, 1, 1), (2, 7, 3, 9), (40, 3, 50, 2)):
        Nq, Lq, B, Ld = shape
        queries = cases.grid(Nq, Lq, 6)
        for documents, layout in ((cases.grid(B, Ld, 6), "dense"), (cases.packed([Ld] * B, 6), "packed")):
            text = explain(queries, documents)
            assert gradient_line(layout) in text.splitlines()


def test_quantised_documents_have_no_path():
    text = explain(cases.grid(3, 7, 6), quantize_int8(cases.grid(4, 20, 6)))
    assert "gradients: none" in text
    assert not any(f"gradients: {path}" in text for path in PATHS)


def test_losses_hand_the_path_on(monkeypatch):
    queries = cases.grid(3, 7, 6).requires_grad_()
    shared, own = cases.grid(3, 9, 6, seed=1), cases.grid(3, 4, 9, 6, seed=1)
    steps = {
        "contrastive": lambda **options: contrastive_loss(queries, shared, **options),
        "distillation": lambda **options: distillation_loss(queries, own, torch.zeros(3, 4), **options),
    }
    for loss in steps.values():
        with Taken() as mode:
            for path in PATHS:
                loss(backward=path).backward()
            monkeypatch.setenv(VARIABLE, "atomic")
            loss().backward()
            monkeypatch.delenv(VARIABLE)
        assert [one["backward_path"] for one in mode.paths] == [*PATHS, "atomic"]
        with pytest.raises(ValueError, match="backward: got"):
            loss(backward="fastest")


@pytest.mark.parametrize("layout", ["one query", "pairs"])
def test_scores_may_be_modified_in_place(layout) -> None:
    """What the eager GPU route returns, here around CPU scores: also where the scores are a view of what the kernels wrote."""
    queries = torch.randn(5, 6, requires_grad=True)
    documents = torch.randn(4, 7, 6, requires_grad=True)

    def score() -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.einsum("id,ntd->nit", queries, documents).max(-1)
        both = held.values.sum(-1)[None], held.indices.int()[None]
        return (both[0][0], both[1][0]) if layout == "one query" else (both[0][0, :], both[1][0, :])

    route = autograd.Route("shared", "csr", False, False)
    scores, argmax = autograd.differentiable(autograd.Node(queries, documents, None, None, route, score))
    scores /= 0.05
    scores -= 1
    assert scores.requires_grad
    assert not argmax.requires_grad
    assert scores.grad_fn is not None
