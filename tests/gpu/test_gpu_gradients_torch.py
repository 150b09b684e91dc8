"""A training step as a torch citizen on a GPU: opcheck, compile, graphs, streams, memory, more than 2^31 winners."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import gradient_truth as gradients
from inputs import on_gpu as make
from maxsim_kernels import Packed, maxsim, maxsim_pairs

POISON = False  # memory is measured, and tracing and capture would record the poison
D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
PATHS = ["unified", "atomic", "csr"]
KINDS = ["one query", "few", "long", "packed", "packed one", "views", "per query", "pairs"]  # the shapes of these are no values
MIB = 2**20


@pytest.fixture(autouse=True)
def given_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def equal(one, other):
    """Integer tokens: the same numbers on every path and in every order."""
    return all(torch.equal(a, b) for a, b in zip(one.grads, other.grads, strict=True))


def ready(kind, path, d=16):
    """Integer inputs whose storage a test may overwrite, upstream, and a step of them."""
    queries, documents, pairs = gradients.case(kind, make.grid, d=d)
    upstream = gradients.step(queries, documents, gradients.integers(), pairs=pairs).upstream
    return queries, documents, upstream, lambda: gradients.step(queries, documents, upstream, pairs=pairs, backward=path)


# --- tracing ---------------------------------------------------------------------------------------------------------------


class Record(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the arguments of every call of one of our custom ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "maxsim_kernels":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("kind", ["few", "packed", "per query", "pairs"])
def test_opcheck(kind, path):
    """Schema, fake tensors, autograd registration and AOT dispatch with gradients, on the arguments that real steps give."""
    _, _, _, step = ready(kind, path)
    with Record() as record:
        step()
    found = {func._schema.name.removeprefix("maxsim_kernels::"): (func, args, kwargs) for func, args, kwargs in record.calls}
    assert {"forward", "backward"} <= set(found), f"recorded {sorted(found)}"
    for name, checks in (
        ("forward", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]),
        ("backward", ["test_schema", "test_faketensor"]),
    ):
        func, args, kwargs = found[name]
        args = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if name == "forward":
            args = [arg.requires_grad_() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
        torch.library.opcheck(func, tuple(args), kwargs, test_utils=checks)


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loss(kind, path, fresh_dynamo):
    """`fullgraph=True`: one node forward and one backward, no break."""
    queries, documents, pairs = gradients.case(kind, make.grid, d=16)
    function = maxsim_pairs if pairs else maxsim

    def loss(q, d):
        return function(q, d, backward=path).clamp(min=-1000).tanh().sum()

    held = gradients.values_of(documents)

    def train(run):
        q, values = queries.detach().requires_grad_(), held.detach().requires_grad_()
        return torch.autograd.grad(run(q, documents.with_values(values) if held is not documents else values), (q, values))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, need in zip(train(compiled), train(loss), strict=True):
        assert torch.equal(got, need)


@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("path", ["auto", "csr"])
def test_compiled_step_with_inductor(path, fresh_dynamo):
    """The default backend, with an encoder and a loss around the call that it fuses, forward and backward."""
    encoder = torch.nn.Linear(24, 64, device=make.device)
    inputs, others = make.gauss(9, 31, 24, dtype=SINGLE), make.gauss(9, 63, 24, dtype=SINGLE, seed=1)

    def loss(q, d):
        q, d = (F.normalize(encoder(x), dim=-1) for x in (q, d))
        return F.cross_entropy(maxsim(q, d, backward=path) / 0.5, torch.arange(9, device=q.device))

    need = torch.autograd.grad(loss(inputs, others), list(encoder.parameters()))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(inputs, others), list(encoder.parameters()))
    for one, other in zip(got, need, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph(kind, path):
    """Forward and backward captured after a warm-up, replayed with other values in the same tensors."""
    queries, documents, _, step = ready(kind, path)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for seed in (5, 6):
        for tensor in (queries, gradients.values_of(documents)):
            tensor.copy_(make.grid(*tensor.shape, seed=seed + tensor.shape[0]))
        for grad in held.grads:
            grad.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(held, step()), f"replay with seed {seed}"


# --- streams and waiting ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("kind", [*KINDS, "masked"])
def test_no_step_waits_for_the_gpu(kind, path):
    """torch raises on every synchronising operation here; the first step may compile."""
    queries, documents, pairs = gradients.case("few" if kind == "masked" else kind, make.grid, d=16)
    masks = {}
    if kind == "masked":
        masks = make.masks("both", "query", 7, 31) | make.masks("both", "document", 100, 63, seed=1)
    need = gradients.step(queries, documents, gradients.integers(), pairs=pairs, **masks)

    def step():
        return gradients.step(queries, documents, need.upstream, pairs=pairs, backward=path, **masks)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert equal(got, need)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [*KINDS, "packed queries", "both packed"])
def test_runs_on_the_current_stream(kind, path):
    """Inputs that a busy stream has yet to write: a launch on any other stream would read the old ones."""
    queries, _, _, step = ready(kind, path)
    values = gradients.values_of(queries)
    before, other = values.clone(), make.grid(*values.shape, seed=9)
    values.copy_(other)
    need = step()
    values.copy_(before)
    step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        values.copy_(other)
        got = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert equal(got, need)
    torch.cuda.synchronize()


def test_other_than_current_device(monkeypatch):
    """The same numbers on the second GPU (a seed means the same values there) while the first is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for kind in KINDS:
        for path in PATHS:
            need = ready(kind, path)[3]()
            with monkeypatch.context() as patch:
                patch.setattr(make, "device", "cuda:1")
                got = ready(kind, path)[3]()
            assert torch.cuda.current_device() == 0
            for one, other in zip(got.grads, need.grads, strict=True):
                assert one.device == torch.device("cuda:1")
                assert torch.equal(one.cpu(), other.cpu())


# --- memory ----------------------------------------------------------------------------------------------------------------

# name: (queries, documents, d); the similarity tensor of each, in FP16, is several times what a step may take.
MEMORY = {
    "ColPali": ((48, 1024), (48, 1024), D),
    "ColBERT": ((512, 32), (512, 180), D),
    "packed": ((64, 256), (256, 1024), D),
    "per query": ((4, 4096), (4, 4, 8192), 16),
    "pairs": ((8, 8192), (8, 8192), 16),
}


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("name", MEMORY)
def test_peak_memory_is_linear(name, path):
    """Winners, gradients and FP32 accumulators, for csr also a sorted list of winners; never the similarity tensor."""
    asked, held, d = MEMORY[name]
    queries, documents = make.unit(*asked, d), make.unit(*held, d, seed=1)
    function = maxsim_pairs if name == "pairs" else maxsim
    tokens = (queries.numel() + documents.numel()) // d
    own = held[1] if name == "per query" else 1 if name == "pairs" else held[0]
    winners = asked[0] * own * asked[1]
    leaves = (queries.requires_grad_(), documents.requires_grad_())
    if name == "packed":
        offsets = torch.arange(held[0] + 1, device=make.device) * held[1]

    def step():
        given = Packed(documents.view(-1, d), offsets) if name == "packed" else documents
        scores = function(queries, given, backward=path)
        return torch.autograd.grad(scores, leaves, torch.ones_like(scores))

    step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = step()
    extra = torch.cuda.max_memory_allocated() - before
    # A gradient and its accumulator are 6 bytes an entry, a winner 4, and 48 where (row, place) pairs of it are sorted.
    allowed = tokens * d * 6 + winners * (4 if path in ("unified", "atomic") else 48) + 64 * MIB
    similarity = winners * documents.shape[-2] * 2
    assert similarity > 2 * allowed, "the bound would not notice a similarity tensor"
    assert extra <= allowed, (
        f"{extra / MIB:.0f} MiB, need at most {allowed / MIB:.0f}; the similarity tensor has {similarity / MIB:.0f}"
    )
    assert all(grad.isfinite().all() for grad in grads)


def needs_memory(size):
    if torch.cuda.mem_get_info()[0] < size:
        pytest.skip(f"needs {size / 1e9:.0f} GB of GPU memory")


@pytest.mark.parametrize("width", [torch.int16, torch.int32])
@pytest.mark.parametrize("path", PATHS)
def test_more_winners_than_an_int32_counts(path, width):
    """2^31 + 2^20 of them, t*(q, n, i) = (i + n + q) mod 64: every sum is an einsum over residues."""
    from maxsim_kernels.gpu.backward import gradients as backward

    needs_memory(75e9 if path == "csr" else 24e9)
    Nq, B, Lq, Ld, d = 2049, 1024, 1024, 64, 16
    queries, documents = make.gauss(Nq, Lq, d), make.gauss(B, Ld, d, seed=1)
    upstream = make.gauss(Nq, B, dtype=SINGLE, seed=2)
    q, n, i, t = (torch.arange(size, device=make.device) for size in (Nq, B, Lq, Ld))
    argmax = torch.empty(Nq, B, Lq, dtype=width, device=make.device)
    assert argmax.numel() > 2**31
    for number in range(Nq):
        argmax[number] = (i + n[:, None] + number) % Ld
    dq, dd = backward.backward(upstream, argmax, queries, None, documents, None, "shared", True, True, path)
    # With r = (i + q) mod 64 the winner is (r + n) mod 64: sums over tokens of one residue, then over queries or documents.
    turned = documents.double()[n[:, None], (t + n[:, None]) % Ld]
    residues = torch.einsum("qn,nrd->qrd", upstream.double(), turned)
    need_q = residues[q[:, None], (i + q[:, None]) % Ld]
    folded = queries.double().view(Nq, Lq // Ld, Ld, d).sum(1)[q[:, None], (t - q[:, None]) % Ld]
    need_d = torch.einsum("qn,qrd->nrd", upstream.double(), folded)[n[:, None], (t - n[:, None]) % Ld]
    for name, got, need, tokens in (("dQ", dq, need_q, queries), ("dD", dd, need_d, documents)):
        gradients.check(name, got, gradients.Sums(need, need.abs()), tokens)
