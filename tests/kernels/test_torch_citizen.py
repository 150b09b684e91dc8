"""The operators as torch sees them: opcheck, `torch.compile`, `vmap`-free autograd, imports, `explain`."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import maxsim_kernels
from inputs import on_cpu as cases
from maxsim_kernels import (
    Int8Tokens,
    Packed,
    chamfer_distance,
    explain,
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    quantize_fp8,
    quantize_int8,
)

POISON = False  # tracing compares real with fake tensors; patched constructors would be traced too
NAMESPACE = "maxsim_kernels"


class Record(TorchDispatchMode):
    """Keeps the arguments of every call of one of our custom ops."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == NAMESPACE:
            self.calls.setdefault(func, []).append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def workload(dtype):
    """Calls that together should touch every op: all layouts, masks, argmax, gradients, quantised tokens, Chamfer."""
    queries, ragged_q = cases.gauss(3, 5, 8, dtype=dtype), cases.packed([4, 0, 2], 8, dtype=dtype, make=cases.gauss)
    dense, own = cases.gauss(3, 9, 8, dtype=dtype, seed=1), cases.gauss(3, 2, 9, 8, dtype=dtype, seed=1)
    ragged = cases.packed([4, 0, 2], 8, dtype=dtype, make=cases.gauss, seed=1)
    masks = {"query_mask": cases.mask(3, 5), "document_lengths": torch.tensor([9, 0, 3])}
    for function, q, d, options in (
        (maxsim, queries, dense, {}),
        (maxsim, queries, dense, masks),
        (maxsim, queries[0], dense, {}),
        (maxsim, queries, own, {}),
        (maxsim, queries, ragged, {}),
        (maxsim, ragged_q, dense, {}),
        (maxsim, ragged_q, ragged, {}),
        (maxsim_pairs, queries, dense, {}),
        (maxsim_pairs, ragged_q, ragged, {}),
    ):
        for ask in (False, True):
            function(q, d, return_argmax=ask, **options)
        leaves = [
            (x.values if isinstance(x, Packed) else x).requires_grad_() for x in (q.detach() if torch.is_tensor(q) else q, d)
        ]
        for backward in ("auto", "unified", "atomic", "csr"):
            out = function(q, d, backward=backward, **options)
            torch.autograd.grad(out, leaves[1:], torch.ones_like(out))
        for leaf in leaves:
            leaf.requires_grad_(False)
    for granularity in ("token", "document", "corpus"):
        for affine in (False, True):
            for tokens in (dense, ragged):
                stored = quantize_int8(tokens, granularity, affine=affine)
                for quantize_queries in (True, False):
                    maxsim(queries, stored, quantize_queries=quantize_queries, return_argmax=affine)
    for tokens in (dense, ragged):
        maxsim(queries, quantize_fp8(tokens))
    p, q = cases.gauss(9, 3).requires_grad_(), cases.gauss(7, 3, seed=1).requires_grad_()
    chamfer_distance(p, q).backward()


def registered():
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")}


def shapes(args, kwargs):
    return tuple((tuple(x.shape), x.dtype) if torch.is_tensor(x) else repr(x) for x in (*args, *kwargs.values()))


@pytest.mark.slow
def test_opcheck():
    """Schema, fake tensors, autograd registration and AOT dispatch, on the arguments that real calls gave."""
    with Record() as record:
        workload(torch.float32)
    assert record.calls, "no custom op ran"
    names = {func._schema.name for func in record.calls}
    assert names == {name.split(".")[0] for name in registered()}, "an op is not exercised by the public functions"
    for func, calls in record.calls.items():
        seen = {}
        for args, kwargs in calls:
            seen.setdefault(shapes(args, kwargs), (args, kwargs))
        for args, kwargs in list(seen.values())[:6]:
            fresh = tuple(x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in args)
            torch.library.opcheck(func, fresh, kwargs)


def test_schemas_hold_tensors_and_scalars_only():
    allowed = {
        "Tensor",
        "Optional[Tensor]",
        "int",
        "float",
        "bool",
        "str",
        "Optional[int]",
        "Optional[float]",
        "Optional[bool]",
        "Optional[str]",
        "number",
    }
    assert registered()
    for name in registered():
        schema = torch._C._get_schema(*(name.split(".") if "." in name else (name, "")))
        for argument in schema.arguments:
            assert str(argument.type) in allowed, f"{name}: {argument}"


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda function, **options: torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    torch._dynamo.reset()


def test_compile_dense(compiled):
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(4, 9, 8, seed=1)
    masks = {
        "query_mask": cases.mask(3, 5),
        "document_mask": cases.mask(4, 9),
        "query_lengths": cases.lengths(3, high=5),
        "document_lengths": cases.lengths(4, high=9),
    }

    def step(q, d, masks):
        scores, argmax = maxsim(q, d, return_argmax=True, **masks)
        return scores * 2, argmax

    need, got = step(queries, documents, masks), compiled(step)(queries, documents, masks)
    assert torch.equal(need[0], got[0])
    assert torch.equal(need[1], got[1])


@pytest.mark.parametrize("layout", ["one query", "per query", "packed", "packed argument", "view", "pairs", "packed queries"])
def test_compile_layouts(compiled, layout):
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(3, 9, 8, seed=1)
    rows = cases.packed([4, 0, 2], 8, seed=1, make=cases.gauss)
    functions = {
        "one query": (maxsim, (queries[0], documents)),
        "per query": (maxsim, (queries, documents[:, None])),
        "packed": (lambda q, v, o: maxsim(q, Packed(v, o)), (queries, rows.values, rows.offsets)),
        "packed argument": (maxsim, (queries, rows)),
        "view": (lambda q, v, s, n: maxsim(q, Packed.view(v, s, n)), (queries, rows.values, rows.starts, rows.lengths)),
        "pairs": (maxsim_pairs, (queries, documents)),
        "packed queries": (lambda v, o, d: maxsim(Packed(v, o), d), (rows.values, rows.offsets, documents)),
    }
    function, args = functions[layout]
    assert torch.equal(compiled(function)(*args), function(*args))


@pytest.mark.parametrize("quantize_queries", [True, False])
def test_compile_int8(compiled, quantize_queries):
    stored, queries = quantize_int8(cases.gauss(4, 9, 8, seed=1)), cases.gauss(3, 5, 8)

    def score(q, codes, scales):
        return maxsim(q, Int8Tokens(codes, scales), quantize_queries=quantize_queries)

    assert torch.equal(compiled(score)(queries, stored.codes, stored.scales), score(queries, stored.codes, stored.scales))


def test_compile_reference(compiled):
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(4, 9, 8, seed=1)
    assert torch.equal(compiled(maxsim_reference)(queries, documents), maxsim_reference(queries, documents))


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_compile_quantize_and_score(compiled, granularity):
    """Whether a token is finite is a value: its check stays inside an op, and tracing never asks for it."""
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(4, 9, 8, seed=1)

    def score(q, d):
        return maxsim(q, quantize_int8(d, granularity))

    assert torch.equal(compiled(score)(queries, documents), score(queries, documents))


def test_compile_fp8(compiled):
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(4, 9, 8, seed=1)

    def score(q, d):
        return maxsim(q, quantize_fp8(d))

    assert torch.equal(compiled(score)(queries, documents), score(queries, documents))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_training_step(backend):
    torch._dynamo.reset()
    queries, documents = cases.gauss(4, 5, 8).requires_grad_(), cases.gauss(4, 9, 8, seed=1).requires_grad_()

    def loss(q, d):
        return torch.nn.functional.cross_entropy(maxsim(q, d), torch.arange(4))

    need = torch.autograd.grad(loss(queries, documents), (queries, documents))
    run = torch.compile(loss, fullgraph=True, backend=backend)
    got = torch.autograd.grad(run(queries, documents), (queries, documents))
    for one, other in zip(got, need, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_compile_chamfer(compiled):
    p, q = cases.gauss(9, 3).requires_grad_(), cases.gauss(7, 3, seed=1).requires_grad_()
    need = torch.autograd.grad(chamfer_distance(p, q), (p, q))
    got = torch.autograd.grad(compiled(chamfer_distance)(p, q), (p, q))
    for one, other in zip(got, need, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_new_batch_shapes_do_not_recompile():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(maxsim, fullgraph=True, dynamic=True, backend=counter)
    for Nq, Lq, B, Ld in ((3, 5, 4, 9), (4, 6, 5, 10), (5, 7, 6, 31), (7, 33, 8, 12)):
        queries, documents = cases.gauss(Nq, Lq, 8), cases.gauss(B, Ld, 8, seed=1)
        assert torch.equal(run(queries, documents), maxsim(queries, documents))
    assert counter.frame_count == 1


def test_meta_tensors_give_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        queries, documents = mode.from_tensor(cases.gauss(3, 5, 8)), mode.from_tensor(cases.gauss(4, 9, 8))
        for implementation in ("auto", "reference"):
            scores, argmax = maxsim(queries, documents, return_argmax=True, impl=implementation)
            assert (scores.shape, scores.dtype) == ((3, 4), torch.float32)
            assert (argmax.shape, argmax.dtype) == ((3, 4, 5), torch.int32)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_traced_reference_holds_no_values(mode):
    """Repeated query tokens, lengths and masks are values: a graph is right for others too, or is refused."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def score(q, d, mask):
        return maxsim(q, d, impl="reference", document_mask=mask)

    queries, documents, mask = cases.gauss(2, 3, 8), cases.gauss(3, 4, 8, seed=1), cases.mask(3, 4)
    traced = make_fx(lambda q, d: score(q, d, None), tracing_mode=mode)(torch.ones(2, 3, 8), documents)
    assert torch.equal(traced(queries, documents), score(queries, documents, None))
    with pytest.raises(RuntimeError, match=r"aten\.equal"):
        make_fx(score, tracing_mode=mode)(queries, documents, mask)
    if mode == "real":
        traced = make_fx(lambda q: score(q, documents, mask))(torch.ones(2, 3, 8))
        assert torch.equal(traced(queries), score(queries, documents, mask))


def test_import_needs_no_triton_and_starts_no_cuda():
    program = """
        import sys
        sys.modules["triton"] = None  # importing it raises ImportError
        import torch, maxsim_kernels
        from maxsim_kernels import maxsim, maxsim_pairs, quantize_int8, explain
        assert not torch.cuda.is_initialized()
        q, d = torch.ones(2, 3, 4), torch.ones(5, 6, 4)
        assert maxsim(q, d).tolist() == [[12.0] * 5] * 2
        assert maxsim(q, quantize_int8(d)).shape == (2, 5)
        assert explain(q, d)
        assert not torch.cuda.is_initialized()
        assert not any(name.split(".")[0] == "maxsim_eval" for name in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_public_names():
    names = (
        "maxsim maxsim_pairs maxsim_reference chamfer_distance stream_topk merge_topk device_blocks explain tune warmup "
        "Packed pack LazyBlock LazyCodes Int8Tokens Fp8Tokens quantize_int8 quantize_fp8 BitTokens ResidualTokens"
    )
    assert sorted(maxsim_kernels.__all__) == sorted(names.split())
    for name in maxsim_kernels.__all__:
        assert getattr(maxsim_kernels, name).__doc__, f"{name} has no docstring"


def test_explain():
    queries, documents = cases.gauss(3, 5, 8), cases.gauss(4, 9, 8)
    assert "cpu" in explain(queries, documents)
    assert "reference" in explain(queries, documents, impl="reference")
    for tokens in (cases.packed([2, 3], 8), quantize_int8(documents), quantize_fp8(documents), cases.gauss(3, 2, 9, 8)):
        text = explain(queries, tokens)
        assert isinstance(text, str)
        assert "cpu" in text
    assert explain(queries, documents, return_argmax=True) == explain(queries, documents)
    assert inspect.signature(maxsim).parameters.keys() <= inspect.signature(explain).parameters.keys()
    with pytest.raises(ValueError, match="impl"):
        explain(queries, documents, impl="fastest")
    with pytest.raises(ValueError, match="impl"):
        explain(queries, documents, impl="triton")


def test_a_module_on_two_threads():
    """Calls from several Python threads do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    queries, documents = cases.gauss(3, 20, 64), cases.packed([31, 0, 64, 7] * 20, 64, make=cases.gauss)
    need = maxsim(queries, documents)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: maxsim(queries, documents), range(16)):
            assert torch.equal(got, need)
