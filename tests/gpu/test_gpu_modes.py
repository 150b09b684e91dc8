"""What torch does around a call on a GPU: refused calls stay refused once a call like them is recorded, autocast, the first call in a
CUDA graph; and what must not depend on Triton's version, on its flags, or on what memory held."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import maxsim_kernels
import truth
from inputs import on_gpu as make
from maxsim_kernels import Int8Tokens, Packed, chamfer_distance, maxsim, maxsim_pairs, quantize_int8

POISON = False  # transforms trace what runs
D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


class Named(torch.Tensor):
    """A subclass that has its numbers itself."""


def refused_twice(kind, words, call):
    for _ in range(2):
        with pytest.raises(kind, match=words):
            call()


@pytest.fixture
def sides():
    """Tokens of a call that is recorded: the next one like it is replayed."""
    queries, documents = make.gauss(9, 31, D), make.gauss(9, 63, D, seed=1)
    for function in (maxsim, maxsim_pairs):
        for _ in range(2):
            function(queries, documents)
    return queries, documents


# Refused on the fast path too


@pytest.mark.parametrize("function", [maxsim, maxsim_pairs])
def test_subclasses_are_refused_after_a_recorded_call(sides, function):
    queries, documents = sides
    need = function(queries, documents)
    refused_twice(ValueError, r"^queries: got a .*Named", lambda: function(queries.as_subclass(Named), documents))
    refused_twice(ValueError, r"^documents: got a .*Named", lambda: function(queries, documents.as_subclass(Named)))
    lengths = torch.full((9,), 63, device=make.device)
    function(queries, documents, document_lengths=lengths)
    named = lengths.as_subclass(Named)
    refused_twice(ValueError, "^document_lengths: got a", lambda: function(queries, documents, document_lengths=named))
    assert torch.equal(function(queries, documents), need)


def test_a_view_that_is_yet_to_be_negated_is_refused(sides):
    queries, documents = sides
    refused_twice(ValueError, "resolve_neg", lambda: maxsim(torch._neg_view(queries), documents))
    assert torch.equal(maxsim(torch._neg_view(queries).resolve_neg(), documents), maxsim(-queries, documents))


@pytest.mark.parametrize("function", [maxsim, maxsim_pairs])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_are_refused_after_a_recorded_call(sides, function, transform):
    queries, documents = sides
    need = function(queries, documents)
    calls = {
        "vmap": lambda: torch.vmap(function, in_dims=(None, 0))(queries, torch.stack([documents, documents])),
        "grad": lambda: torch.func.grad(lambda one: function(one, documents).sum())(queries),
        "jvp": lambda: torch.func.jvp(lambda one: function(one, documents), (queries,), (queries,)),
    }
    refused_twice(RuntimeError, f"called under torch.func's {transform}", calls[transform])
    assert torch.equal(function(queries, documents), need)


def test_forward_mode_is_refused_where_a_tensor_has_a_tangent(sides):
    queries, documents = sides
    need = maxsim(queries, documents)
    with forward_ad.dual_level():
        assert torch.equal(maxsim(queries, documents), need)
        dual = forward_ad.make_dual(queries, torch.ones_like(queries))
        refused_twice(RuntimeError, "queries has a forward-mode tangent", lambda: maxsim(dual, documents))


def test_chamfer_refuses_them_too():
    p, q = make.gauss(60, 3, dtype=SINGLE), make.gauss(50, 3, dtype=SINGLE, seed=1)
    need = chamfer_distance(p, q)
    refused_twice(ValueError, r"^p: got a .*Named", lambda: chamfer_distance(p.as_subclass(Named), q))
    refused_twice(RuntimeError, "torch.func's grad", lambda: torch.func.grad(chamfer_distance)(p, q))
    assert torch.equal(chamfer_distance(p, q), need)


@pytest.mark.parametrize("path", ["unified", "atomic", "csr"])
def test_a_second_derivative_is_refused(path):
    queries, documents = make.gauss(9, 31, D).requires_grad_(), make.gauss(9, 63, D, seed=1).requires_grad_()
    plain = torch.autograd.grad(maxsim(queries, documents, backward=path).sum(), (queries, documents))
    for _ in range(2):
        scores = maxsim(queries, documents, backward=path)
        kept = torch.autograd.grad(scores.sum(), (queries, documents), create_graph=True)
        for one, other in zip(plain, kept, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-2, atol=1e-2)
        with pytest.raises(RuntimeError, match="there is no second derivative"):
            sum(one.float().square().sum() for one in kept).backward()


def test_many_upstream_gradients_at_once_are_each_its_own():
    queries, documents = make.gauss(9, 31, D).requires_grad_(), make.gauss(9, 63, D, seed=1).requires_grad_()
    scores = maxsim(queries, documents, backward="csr")
    many = make.gauss(2, *scores.shape, dtype=SINGLE, seed=2)
    for _ in range(2):
        found = torch.autograd.grad(scores, (queries, documents), many, is_grads_batched=True, retain_graph=True)
        for n, one in enumerate(many):
            need = torch.autograd.grad(scores, (queries, documents), one, retain_graph=True)
            assert all(torch.equal(got[n], want) for got, want in zip(found, need, strict=True))


# Autocast


def test_autocast_casts_tokens_of_two_dtypes():
    queries, documents = make.gauss(9, 31, D, dtype=SINGLE), make.gauss(9, 63, D, seed=1)
    for cast in (HALF, BFLOAT):
        need = maxsim(queries.to(cast), documents.to(cast))
        for _ in range(2):
            with torch.autocast("cuda", dtype=cast):
                assert torch.equal(maxsim(queries, documents), need)
    refused_twice(ValueError, "^documents: got torch.float16", lambda: maxsim(queries, documents))


def test_autocast_leaves_tokens_of_one_dtype_and_says_so_once(sides):
    queries, documents = (one.float() for one in sides)
    need = maxsim(queries, documents)
    with torch.autocast("cuda", dtype=BFLOAT):
        with pytest.warns(UserWarning, match="autocast to bfloat16 is on and leaves tokens of float32 as they are"):
            assert torch.equal(maxsim(queries, documents), need)
        for _ in range(2):
            assert torch.equal(maxsim(queries, documents), need)


# Triton's public call


def test_an_untried_version_of_triton_gives_the_same_bits(monkeypatch):
    """Forward, backward and Chamfer without replays."""
    from maxsim_kernels.gpu import launch

    rows = make.packed([3, 0, 31, 1, 7, 100, 0, 1000, 63], D, seed=1)

    def everything():
        queries, documents = make.gauss(9, 31, D).requires_grad_(), make.gauss(9, 63, D, seed=1).requires_grad_()
        scores, winners = maxsim(queries, documents, return_argmax=True, backward="csr")
        grads = torch.autograd.grad(scores.sum(), (queries, documents))
        p, q = make.gauss(60, 3, dtype=SINGLE), make.gauss(50, 3, dtype=SINGLE, seed=1)
        codes = quantize_int8(documents.detach())
        return [
            scores,
            winners,
            *grads,
            maxsim(queries.detach(), rows),
            maxsim(queries.detach(), codes),
            chamfer_distance(p, q),
        ]

    need = everything()
    monkeypatch.setattr(launch, "VERSION", "0.0")
    monkeypatch.setattr(launch, "_plans", {})
    with pytest.warns(UserWarning, match="Triton 0.0 is not one"):
        first = everything()
    second = everything()
    assert not launch._plans
    for one, other, third in zip(need, first, second, strict=True):
        assert make.same_bits(one, other)
        assert make.same_bits(one, third)


# In a process of its own: nothing is compiled there


def alone(program, tmp_path, **environment):
    """Run a program in a new process with an empty cache of kernels; what it prints."""
    roots = [str(Path(maxsim_kernels.__file__).parents[1]), str(Path(__file__).parents[1] / "helpers")]
    path = os.pathsep.join(filter(None, [*roots, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "kernels"), **environment}
    command = [sys.executable, "-W", "error:maxsim_kernels", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "first", ["maxsim(queries, documents)", "warmup(queries=[(9, 31)], document_tokens=[63], forms=['dense'])"]
)
def test_the_first_call_in_a_cuda_graph(tmp_path, first):
    """Refused where it would compile, and the process goes on; captured after one call, or `warmup`."""
    alone(
        f"""
        import torch
        from inputs import on_gpu as make
        from maxsim_kernels import chamfer_distance, maxsim, warmup
        queries, documents = make.gauss(9, 31, {D}), make.gauss(9, 63, {D}, seed=1)
        p, q = make.gauss(60, 3, dtype=torch.float32), make.gauss(50, 3, dtype=torch.float32, seed=1)
        for call in (lambda: maxsim(queries, documents), lambda: chamfer_distance(p, q)):
            for _ in range(2):
                try:
                    with torch.cuda.graph(torch.cuda.CUDAGraph()):
                        call()
                except RuntimeError as error:
                    assert "a CUDA graph cannot capture a call whose kernels are not compiled yet" in str(error), error
                else:
                    raise AssertionError("captured")
        {first}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = maxsim(queries, documents)
        queries.copy_(make.gauss(9, 31, {D}, seed=5))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(held, maxsim(queries, documents))
        """,
        tmp_path,
    )


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_winners_of_packed_queries_are_refused_in_a_cuda_graph():
    queries, documents = make.packed([4, 0, 31], D), make.gauss(9, 63, D, seed=1)
    maxsim(queries, documents, return_argmax=True)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"^queries: got packed ones whose winners are wanted"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        maxsim(queries, documents, return_argmax=True)


def test_bits_do_not_depend_on_fp_fusion(tmp_path):
    """Codes whose scale follows the product, affine codes, and distances: the same with the compiler's contraction off."""
    program = """
        import torch
        from inputs import on_gpu as make
        from maxsim_kernels import chamfer_distance, maxsim, quantize_int8
        torch.manual_seed(0)
        documents = make.gauss(40, 100, 128, seed=1)
        for affine in (False, True):
            stored = quantize_int8(documents, affine=affine)
            for queries in (make.gauss(100, 31, 128), make.gauss(31, 128), make.gauss(7, 31, 128)):
                for winners in (False, True):
                    found = maxsim(queries, stored, return_argmax=winners)
                    for one in found if winners else (found,):
                        print(affine, len(queries), one.view(torch.int32).long().sum().item(), one.view(torch.int32).flatten()[:5].tolist())
        for d in (2, 3):
            p, q = make.gauss(700, d, dtype=torch.float32), make.gauss(500, d, dtype=torch.float32, seed=1)
            print(d, chamfer_distance(p, q).item())
    """
    fused = alone(program, tmp_path / "on", TRITON_DEFAULT_FP_FUSION="1")
    assert fused.count("\n") == 20
    assert alone(program, tmp_path / "off", TRITON_DEFAULT_FP_FUSION="0") == fused


# NaN, and offsets that break their promise


@pytest.mark.parametrize("kind", ["one query", "few", "many", "wide", "masked", "packed", "int8 floats", "pairs"])
def test_the_first_nan_wins_in_every_kernel(kind):
    """Two NaN tokens a document, behind better and before worse ones."""
    width = 768 if kind == "wide" else D
    documents = make.gauss(12, 300, width, seed=1)
    for number in range(12):
        documents[number, 17 + 20 * number, 5] = documents[number, 290, 3] = float("nan")
    queries = {"one query": lambda: make.gauss(31, width), "many": lambda: make.gauss(100, 32, width)}.get(
        kind, lambda: make.gauss(12, 31, width)
    )()
    options = {"return_argmax": True}
    held = documents
    if kind == "masked":
        options["document_mask"] = torch.ones(12, 300, dtype=torch.bool, device=make.device)
    elif kind == "packed":
        held = Packed(documents.flatten(0, 1), torch.arange(13, device=make.device) * 300)
    elif kind == "int8 floats":
        held, options["quantize_queries"] = quantize_int8(documents), False
    scores, winners = (maxsim_pairs if kind == "pairs" else maxsim)(queries, held, **options)
    assert bool(scores.isnan().all())
    first = (17 + 20 * torch.arange(12, device=make.device)).int()
    need = (
        first[:, None].expand(12, 31) if kind == "pairs" else first[:, None].expand(*winners.shape[:-2], 12, winners.shape[-1])
    )
    assert torch.equal(winners, need)
    if kind == "few":
        truth.agree(queries, held, return_argmax=True)


@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize("asked", [1, 7, 100])
def test_offsets_that_overlap_leave_no_score_unwritten(asked, winners, monkeypatch):
    """More tokens are claimed than there are; whatever memory held, it is in no result."""
    large, code = 1e30, -77
    plain = torch.empty

    def filled(*shape, **options):
        made = plain(*shape, **options)
        return made.fill_(large if made.dtype == SINGLE else code) if made.is_cuda else made

    values = make.gauss(300, D, seed=1)
    queries = make.gauss(asked, 31, D)
    for offsets in ([0, 300] * 30, [0, 300_000] * 30, [0, 100, 50, 250, 0, 300]):
        rows = Packed(values, torch.tensor(offsets, device=make.device))
        stored = quantize_int8(values.unsqueeze(0))
        codes = Int8Tokens(rows.with_values(stored.token_values[0]), stored.scales[0], granularity="token")
        monkeypatch.setattr(torch, "empty", filled)
        for documents in (rows, codes, rows, codes):  # the second time replayed
            found = maxsim(queries, documents, return_argmax=winners)
            scores = found[0] if winners else found
            assert not bool((scores.isfinite() & (scores.abs() > 1e6)).any())
            assert not winners or not bool((found[1] == code).any())
        monkeypatch.setattr(torch, "empty", plain)
