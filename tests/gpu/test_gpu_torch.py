"""The operator as a torch citizen on a GPU: opcheck, compile, graphs, streams, synchronisation, devices, imports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import maxsim_kernels
from inputs import on_gpu as make
from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, explain, maxsim, maxsim_pairs, quantize_fp8, quantize_int8

POISON = False  # tracing and capture would record the poison
D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
NAMESPACE = "maxsim_kernels"
COUNTS = [3, 0, 31, 1, 7, 100, 0, 1000, 63]


def workload(dtype=HALF):
    """One call of each kind: name -> (function, queries, documents, options); tensors inside may be overwritten in place."""
    few, documents = make.gauss(9, 31, D, dtype=dtype), make.gauss(9, 63, D, dtype=dtype, seed=1)
    rows = make.packed(COUNTS, D, dtype=dtype, seed=1)
    masks = make.masks("both", "query", 9, 31) | make.masks("both", "document", 9, 63, seed=1)
    return {
        "one": (maxsim, few[0].clone(), documents, {}),
        "dense": (maxsim, few, documents, {}),
        "many": (maxsim, make.gauss(100, 32, D, dtype=dtype), documents, {}),
        "masked": (maxsim, few, documents, masks),
        "winners": (maxsim, few, documents, {"return_argmax": True}),
        "packed": (maxsim, few, rows, {}),
        "packed one": (maxsim, few[0].clone(), rows, {}),
        "packed queries": (maxsim, make.packed([4, 0, 31, 100], D, dtype=dtype), rows, {}),
        "view": (maxsim, few, make.scattered(rows), {}),
        "per query": (maxsim, few, make.gauss(9, 5, 63, D, dtype=dtype, seed=1), {}),
        "pairs": (maxsim_pairs, few, documents, {}),
        "split": (maxsim, few[0].clone(), make.gauss(2, 20000, D, dtype=dtype, seed=1), {}),
        "wide": (maxsim, make.gauss(9, 31, 768, dtype=dtype), make.gauss(9, 63, 768, dtype=dtype, seed=1), {}),
        "int8 token": (maxsim, few, quantize_int8(documents), {}),
        "int8 document": (maxsim, few, quantize_int8(rows, "document"), {}),
        "int8 floats": (maxsim, few, quantize_int8(documents), {"quantize_queries": False}),
        "fp8": (maxsim, few, quantize_fp8(documents), {}),
    }


KINDS = ["one", "dense", "many", "masked", "winners", "packed", "packed one", "packed queries", "view", "per query", "pairs"]
KINDS += ["split", "wide", "int8 token", "int8 document", "int8 floats", "fp8"]


@pytest.fixture
def calls():
    return workload()


def flat(result):
    return result if isinstance(result, tuple) else (result,)


def equal(one, other):
    return all(make.same_bits(a, b) for a, b in zip(flat(one), flat(other), strict=True))


def values_of(tokens):
    """The tensor that holds the tokens or their codes."""
    tokens = tokens.codes if isinstance(tokens, Int8Tokens | Fp8Tokens) else tokens
    return tokens.values if isinstance(tokens, Packed) else tokens


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_fused_kernel(calls, kind):
    function, queries, documents, options = calls[kind]
    options = {name: value for name, value in options.items() if name != "return_argmax"}
    text = explain(queries, documents, pairs=function is maxsim_pairs, **options)
    assert text.startswith("triton"), text


def test_named_implementation(calls):
    """`impl="triton"` is what "auto" takes; `impl="cpu"` is refused."""
    function, queries, documents, _ = calls["dense"]
    assert equal(function(queries, documents, impl="triton"), function(queries, documents))
    with pytest.raises(ValueError, match="impl"):
        function(queries, documents, impl="cpu")


class Record(TorchDispatchMode):
    """Keeps the arguments of every call of one of our custom ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == NAMESPACE:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["dense", "masked", "winners", "packed", "pairs", "per query", "int8 token", "fp8"])
def test_opcheck(calls, kind):
    """Schema, fake tensors, autograd registration and AOT dispatch, on the arguments that real calls give."""
    function, queries, documents, options = calls[kind]
    with Record() as record:
        recorded = function(queries, documents, **options)
    assert record.calls, "no custom op ran"
    assert equal(recorded, function(queries, documents, **options))
    names = {func._schema.name for func, _, _ in record.calls}
    assert f"{NAMESPACE}::forward" in names
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kind == "fp8":
        checks.remove("test_schema")  # torch compares inputs before and after by arithmetic that FP8 tensors do not have
    for func, args, kwargs in record.calls:
        torch.library.opcheck(func, args, kwargs, test_utils=checks)


@pytest.mark.parametrize("kind", KINDS)
def test_compile(calls, kind, fresh_dynamo):
    """`fullgraph=True`: one node, no break."""
    function, queries, documents, options = calls[kind]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    need = function(queries, documents, **options)
    assert equal(compiled(queries, documents, **options), need)


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_compile_with_inductor(fresh_dynamo):
    """The default backend, with code around the call that it fuses."""
    queries, documents = make.gauss(9, 31, D), make.gauss(9, 63, D, seed=1)

    def step(q, d):
        return maxsim(q * 2, d).softmax(-1), maxsim_pairs(q, d) + 1

    for got, need in zip(torch.compile(step, fullgraph=True)(queries, documents), step(queries, documents), strict=True):
        assert torch.allclose(got, need, rtol=1e-5, atol=1e-5)


def test_new_shapes_do_not_recompile_the_graph(fresh_dynamo):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(maxsim, fullgraph=True, dynamic=True, backend=counter)
    for Nq, Lq, B, Ld in ((3, 5, 4, 9), (4, 6, 5, 10), (5, 7, 6, 31), (7, 33, 8, 12)):
        queries, documents = make.gauss(Nq, Lq, D), make.gauss(B, Ld, D, seed=1)
        assert equal(run(queries, documents), maxsim(queries, documents))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph(calls, kind):
    """Captured after one warm-up call, replayed with other values in the same tensors."""
    function, queries, documents, options = calls[kind]
    function(queries, documents, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = function(queries, documents, **options)
    for seed in (5, 6):
        for tensor in (values_of(queries), values_of(documents)):
            if tensor.dtype == HALF:  # codes stay
                tensor.copy_(make.gauss(*tensor.shape, seed=seed + tensor.shape[0]))
        graph.replay()
        torch.cuda.synchronize()
        assert equal(held, function(queries, documents, **options)), f"replay with seed {seed}"


@pytest.mark.parametrize("kind", ["packed", "view"])
def test_cuda_graph_with_other_lengths(calls, kind):
    """Starts and lengths are read on the device: a replay follows them."""
    function, queries, rows, _ = calls[kind]
    view = Packed.view(rows.values, rows.starts.clone(), rows.lengths.clone())
    function(queries, view)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = function(queries, view)
    view.starts.copy_(view.starts.flip(0))
    view.lengths.copy_(view.lengths.flip(0))
    graph.replay()
    assert make.same_bits(held, function(queries, view))
    view.lengths.clamp_(max=5)
    graph.replay()
    assert make.same_bits(held, function(queries, view))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_waits_for_the_gpu(calls, kind):
    """torch raises on every synchronising operation here; the first call may compile."""
    function, queries, documents, options = calls[kind]
    function(queries, documents, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(queries, documents, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_packed_inputs_are_built_without_waiting():
    values, offsets = make.gauss(1205, D), torch.tensor([0, 3, 100, 1205], device=make.device)
    queries = make.packed([3, 0, 31], D)
    maxsim(queries, Packed(values, offsets))
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = Packed(values, offsets)
        maxsim(queries, rows)
        maxsim(queries, Packed.view(values, rows.starts, rows.lengths))
        maxsim_pairs(queries, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_runs_on_the_current_stream(calls, kind):
    """Inputs that a busy stream has yet to write: a launch on any other stream would read the old ones."""
    function, queries, documents, options = calls[kind]
    values = values_of(queries)
    before, other = values.clone(), make.gauss(*values.shape, seed=9)
    values.copy_(other)
    need = function(queries, documents, **options)
    values.copy_(before)
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        values.copy_(other)
        got = function(queries, documents, **options)
        done.record()
    torch.cuda.current_stream().wait_event(done)
    assert equal(got, need)
    for tensor in flat(got):
        tensor.record_stream(torch.cuda.current_stream())


@pytest.mark.parametrize("kind", ["dense", "packed", "split", "int8 token", "int8 document", "pairs"])
def test_two_streams_at_once(calls, kind):
    """Workspaces are the call's own: two streams do not write into each other's."""
    function, queries, documents, options = calls[kind]
    both = [queries, make.gauss(*queries.shape, seed=9)]
    need = [function(q, documents, **options) for q in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(25):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[number].append(function(both[number], documents, **options))
    torch.cuda.synchronize()
    for number in (0, 1):
        assert all(equal(result, need[number]) for result in got[number])


def test_two_threads_at_once(calls):
    from concurrent.futures import ThreadPoolExecutor

    kinds = ["dense", "packed", "split", "int8 token"]
    need = [calls[kind][0](*calls[kind][1:3], **calls[kind][3]) for kind in kinds]

    def run(number):
        function, queries, documents, options = calls[kinds[number % 4]]
        return function(queries, documents, **options)

    with ThreadPoolExecutor(4) as pool:
        for number, got in enumerate(pool.map(run, range(40))):
            assert equal(got, need[number % 4])


@pytest.mark.parametrize("kind", KINDS)
def test_other_than_current_device(kind, monkeypatch):
    """The same numbers on the second GPU (a seed means the same values there) while the first is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    function, queries, documents, options = workload()[kind]
    need = function(queries, documents, **options)
    monkeypatch.setattr(make, "device", "cuda:1")
    function, queries, documents, options = workload()[kind]
    got = function(queries, documents, **options)
    assert torch.cuda.current_device() == 0
    for one, other in zip(flat(got), flat(need), strict=True):
        assert one.device == torch.device("cuda:1")
        assert make.same_bits(one.cpu(), other.cpu())


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="documents"):
        maxsim(make.gauss(7, 31, D), make.gauss(9, 63, D, device="cpu"))
    with pytest.raises(ValueError, match="document_mask"):
        maxsim(make.gauss(7, 31, D), make.gauss(9, 63, D), document_mask=torch.ones(9, 63, dtype=torch.bool))
    with pytest.raises(ValueError, match="documents"):
        maxsim(make.gauss(7, 31, D), make.gauss(9, 63, D, dtype=BFLOAT))


@pytest.mark.filterwarnings("ignore:maxsim_kernels. autocast")
def test_autocast_leaves_inputs_alone(calls):
    for function, queries, documents, options in (calls["dense"], workload(SINGLE)["dense"]):
        need = function(queries, documents, **options)
        with torch.autocast("cuda", dtype=BFLOAT):
            assert equal(function(queries, documents, **options), need)


def test_deterministic_algorithms(calls):
    """torch's deterministic mode changes nothing of a forward call."""
    need = {kind: call[0](*call[1:3], **call[3]) for kind, call in calls.items()}
    torch.use_deterministic_algorithms(True)
    try:
        for kind, (function, queries, documents, options) in calls.items():
            assert equal(function(queries, documents, **options), need[kind]), kind
    finally:
        torch.use_deterministic_algorithms(False)


def test_import_starts_no_cuda_context():
    program = """
        import torch
        import maxsim_kernels
        from maxsim_kernels import Packed, explain, maxsim
        assert not torch.cuda.is_initialized(), "import"
        queries, documents = torch.ones(2, 3, 4), torch.ones(5, 6, 4)
        assert maxsim(queries, documents).tolist() == [[12.0] * 5] * 2
        assert explain(queries, documents).startswith("cpu")
        Packed(torch.ones(6, 4), torch.tensor([0, 6]))
        assert not torch.cuda.is_initialized(), "a call on the CPU"
    """
    root = str(Path(maxsim_kernels.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
