"""What torch does around a call (`modes.py`): kinds of tensor, transforms, second derivatives, autocast. Refused calls are refused again."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import forward_ad

from inputs import on_cpu as cases
from maxsim_kernels import (
    Packed,
    chamfer_distance,
    explain,
    fallback,
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    quantize_int8,
)
from maxsim_kernels.checks import is_plain

POISON = False  # transforms trace what runs
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


class Named(torch.Tensor):
    """A subclass that has its numbers itself."""


class Elsewhere(torch.Tensor):
    """A subclass that holds its numbers elsewhere and dispatches for itself, as a DTensor does."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} ran on what was to be refused")


@pytest.fixture
def sides():
    return cases.gauss(3, 5, 8), cases.gauss(4, 9, 8, seed=1)


@pytest.fixture
def said(monkeypatch):
    """Nothing was said yet."""
    monkeypatch.setattr(fallback, "_SAID", set())


def refused_twice(kind, words, call):
    for _ in range(2):
        with pytest.raises(kind, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


# Kinds of tensor


@pytest.mark.parametrize("function", [maxsim, maxsim_reference, maxsim_pairs, explain])
@pytest.mark.parametrize("side", ["queries", "documents"])
@pytest.mark.parametrize(("kind", "remedy"), [(Named, "as_subclass"), (Elsewhere, "to_local")])
def test_subclasses_of_tensor_are_refused(function, side, kind, remedy) -> None:
    given = {"queries": cases.gauss(3, 5, 8), "documents": cases.gauss(3, 9, 8, seed=1)}
    need = function(*given.values())
    plain, given[side] = given[side], Elsewhere(given[side]) if kind is Elsewhere else given[side].as_subclass(Named)
    refused_twice(
        ValueError,
        f"^{side}: got a .*test_modes.{kind.__name__}, need a plain torch.Tensor: .*{remedy}",
        lambda: function(*given.values()),
    )
    given[side] = plain
    again = function(*given.values())
    assert again == need if isinstance(need, str) else torch.equal(again, need)


def test_every_tensor_of_a_call_is_looked_at(sides) -> None:
    queries, documents = sides
    lengths, mask = torch.tensor([9, 3, 0, 1]), cases.mask(3, 5)
    named = lengths.as_subclass(Named)
    values, starts = documents.flatten(0, 1), torch.tensor([0, 9, 18, 27])
    stored = quantize_int8(documents, affine=True)
    with torch.no_grad():
        stored_scales, stored_offset = (quantize_int8(documents, affine=True) for _ in range(2))
        object.__setattr__(stored_scales, "scales", stored.scales.as_subclass(Named))
        object.__setattr__(stored_offset, "offset", stored.offset.as_subclass(Named))
    calls = {
        "document_lengths": (documents, {"document_lengths": named}),
        "query_mask": (documents, {"query_mask": mask.as_subclass(Named)}),
        "documents": (Packed.view(values.as_subclass(Named), starts, lengths), {}),
        "documents.starts": (Packed.view(values, starts.as_subclass(Named), lengths), {}),
        "documents.lengths": (Packed.view(values, starts, named), {}),
        "documents.scales": (stored_scales, {}),
        "documents.offset": (stored_offset, {}),
    }
    for name, (held, options) in calls.items():
        refused_twice(
            ValueError, f"^{name}: got a .*Named", lambda held=held, options=options: maxsim(queries, held, **options)
        )


def test_a_call_with_a_subclass_is_never_replayed(sides) -> None:
    """`gpu/launch.py` replays calls that are plain; signatures are not to be asked."""
    queries, documents = sides
    assert is_plain(queries, documents, None, torch.nn.Parameter(queries))
    for other in (queries.as_subclass(Named), Elsewhere(queries)):
        assert not is_plain(other, documents)
        assert not is_plain(queries, documents, other)


def test_chamfer_refuses_subclasses() -> None:
    p, q = cases.gauss(7, 3), cases.gauss(5, 3, seed=1)
    refused_twice(ValueError, "^p: got a .*Named", lambda: chamfer_distance(p.as_subclass(Named), q))
    refused_twice(ValueError, "^q: got a .*Elsewhere", lambda: chamfer_distance(p, Elsewhere(q)))


def test_a_view_that_is_yet_to_be_negated_is_refused(sides) -> None:
    """Its pointer is to numbers of the other sign."""
    queries, documents = sides
    lazy = torch._neg_view(queries)
    refused_twice(ValueError, "^queries: .*resolve_neg", lambda: maxsim(lazy, documents))
    refused_twice(ValueError, "^documents: .*resolve_neg", lambda: maxsim(documents, lazy))
    assert torch.equal(maxsim(lazy.resolve_neg(), documents), maxsim(-queries, documents))


def test_parameters_and_fake_tensors_are_no_strangers(sides) -> None:
    queries, documents = sides
    need = maxsim(queries, documents)
    assert torch.equal(maxsim(torch.nn.Parameter(queries), documents).detach(), need)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = maxsim(mode.from_tensor(queries), mode.from_tensor(documents))
    assert fake.shape == need.shape


# Transforms of torch.func, forward mode


@pytest.mark.parametrize("function", [maxsim, maxsim_reference, maxsim_pairs])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_are_refused(function, transform) -> None:
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(3, 9, 8, seed=1)
    need = function(queries, documents)
    calls = {
        "vmap": lambda: torch.vmap(function, in_dims=(None, 0))(queries, torch.stack([documents, documents])),
        "grad": lambda: torch.func.grad(lambda one: function(one, documents).sum())(queries),
        "jvp": lambda: torch.func.jvp(lambda one: function(one, documents), (queries,), (queries,)),
    }
    refused_twice(
        RuntimeError, f"^maxsim(_pairs)?: called under torch.func's {transform}, which it does not support", calls[transform]
    )
    assert torch.equal(function(queries, documents), need)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_chamfer_refuses_transforms(transform) -> None:
    p, q = cases.gauss(7, 3), cases.gauss(5, 3, seed=1)
    calls = {
        "vmap": lambda: torch.vmap(chamfer_distance, in_dims=(0, None))(torch.stack([p, p]), q),
        "grad": lambda: torch.func.grad(chamfer_distance)(p, q),
    }
    refused_twice(RuntimeError, f"^chamfer_distance: called under torch.func's {transform}", calls[transform])


def test_forward_mode_is_refused_where_a_tensor_has_a_tangent(sides) -> None:
    queries, documents = sides
    need = maxsim(queries, documents)
    with forward_ad.dual_level():
        assert torch.equal(maxsim(queries, documents), need)
        packed = Packed(documents.flatten(0, 1), torch.arange(5) * 9)
        assert torch.equal(maxsim(queries, packed), need)
        dual = forward_ad.make_dual(queries, torch.ones_like(queries))
        refused_twice(RuntimeError, "^maxsim: queries has a forward-mode tangent", lambda: maxsim(dual, documents))
        cloud = forward_ad.make_dual(queries[0], torch.ones_like(queries[0]))
        refused_twice(
            RuntimeError, "^chamfer_distance: q has a forward-mode tangent", lambda: chamfer_distance(documents[0], cloud)
        )


def test_many_upstream_gradients_at_once_are_each_its_own(sides) -> None:
    """`is_grads_batched` runs the backward on a tensor that stands for many."""
    queries, documents = (one.requires_grad_() for one in sides)
    scores = maxsim(queries, documents)
    many = cases.gauss(2, *scores.shape, seed=2)
    for _ in range(2):
        found = torch.autograd.grad(scores, (queries, documents), many, is_grads_batched=True, retain_graph=True)
        for n, one in enumerate(many):
            need = torch.autograd.grad(scores, (queries, documents), one, retain_graph=True)
            assert all(torch.equal(got[n], want) for got, want in zip(found, need, strict=True))


def test_an_upstream_gradient_of_another_kind_is_refused(sides) -> None:
    queries, documents = sides
    scores = maxsim(queries.requires_grad_(), documents)
    with pytest.raises(ValueError, match=r"^upstream gradient: got a .*Named"):
        torch.autograd.grad(scores, queries, torch.ones_like(scores).as_subclass(Named))


# Second derivatives


@pytest.mark.parametrize("function", [maxsim, maxsim_pairs])
def test_a_second_derivative_is_refused(function) -> None:
    queries, documents = cases.gauss(3, 5, 8).requires_grad_(), cases.gauss(3, 9, 8, seed=1).requires_grad_()
    plain = torch.autograd.grad(function(queries, documents).sum(), (queries, documents))
    for _ in range(2):
        kept = torch.autograd.grad(function(queries, documents).sum(), (queries, documents), create_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
        assert all(one.requires_grad for one in kept)
        with pytest.raises(RuntimeError, match=r"^maxsim: there is no second derivative"):
            sum(one.square().sum() for one in kept).backward()


def test_the_reference_has_a_second_derivative() -> None:
    queries, documents = cases.gauss(2, 3, 4).double(), cases.gauss(2, 5, 4, seed=1).double()
    queries.requires_grad_()
    documents.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q, d: maxsim_reference(q, d, dtype=torch.float64), (queries, documents))
    queries, documents = queries.detach().float().requires_grad_(), documents.detach().float()
    (grad,) = torch.autograd.grad(maxsim(queries, documents, impl="reference").square().sum(), queries, create_graph=True)
    grad.square().sum().backward()
    assert queries.grad.abs().sum() > 0


# Autocast


@pytest.mark.parametrize("cast", [BFLOAT, HALF])
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_casts_tokens_of_two_dtypes_as_matmul_does(said, cast, packed, impl) -> None:
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(4, 9, 8, dtype=BFLOAT, seed=1)
    with torch.autocast("cpu", dtype=cast):
        assert (queries @ documents[0].T).dtype == cast
    if packed:
        documents = Packed(documents.flatten(0, 1), torch.arange(5) * 9)
    need = maxsim(queries.to(cast), documents.to(cast), impl=impl)
    with torch.autocast("cpu", dtype=cast):
        scores = maxsim(queries, documents, impl=impl)
        assert f"{cast}".removeprefix("torch.") in explain(queries, documents)
        assert torch.equal(maxsim_reference(queries, documents), maxsim_reference(queries.to(cast), documents.to(cast)))
    assert scores.dtype == SINGLE
    assert torch.equal(scores, need)
    with pytest.raises(ValueError, match=r"^documents: got torch.bfloat16, need the queries' dtype"):
        maxsim(queries, documents)


def test_gradients_of_cast_tokens_come_back_in_their_own_dtypes(said) -> None:
    queries, documents = cases.gauss(3, 5, 8).requires_grad_(), cases.gauss(4, 9, 8, dtype=BFLOAT, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype=BFLOAT):
        maxsim(queries, documents).sum().backward()
    assert (queries.grad.dtype, documents.grad.dtype) == (SINGLE, BFLOAT)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_tokens_of_one_dtype_stay_and_that_is_said_once(said, dtype, sides) -> None:
    queries, documents = (one.to(dtype) for one in sides)
    need = maxsim(queries, documents)
    with torch.autocast("cpu", dtype=BFLOAT):
        with pytest.warns(UserWarning, match=f"autocast to bfloat16 is on and leaves tokens of {str(dtype)[6:]} as they are"):
            assert torch.equal(maxsim(queries, documents), need)
        assert torch.equal(maxsim(queries, documents), need)  # a warning would be an error


def test_autocast_that_asks_for_nothing_says_nothing(said, sides) -> None:
    queries, documents = sides
    with torch.autocast("cpu", dtype=BFLOAT):
        assert maxsim(queries.to(BFLOAT), documents.to(BFLOAT)).dtype == SINGLE
        assert maxsim(queries, quantize_int8(documents)).dtype == SINGLE
        with torch.autocast("cpu", enabled=False):
            maxsim(queries, documents)
            with pytest.raises(ValueError, match="the queries' dtype"):
                maxsim(queries, documents.to(BFLOAT))
        with pytest.raises(ValueError, match=r"^queries: got torch.float64"):
            maxsim(queries.double(), documents)
        with pytest.raises(ValueError, match=r"^documents: got int"):
            maxsim(queries, 3)


def test_autocast_of_another_device_is_none(said, sides) -> None:
    queries, documents = sides
    torch.set_autocast_enabled("cuda", True)
    try:
        maxsim(queries, documents)
        with pytest.raises(ValueError, match="the queries' dtype"):
            maxsim(queries, documents.to(BFLOAT))
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.slow
def test_compiled_calls_under_autocast_are_one_graph(said, sides) -> None:
    queries, documents = sides
    compiled = torch.compile(maxsim, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=BFLOAT):
        for held in (documents.to(BFLOAT), documents):
            got = compiled(queries, held)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert torch.equal(got, maxsim(queries, held))
