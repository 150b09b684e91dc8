"""Launches recorded once and replayed (`launch.py`), without a GPU: signatures, the recorder, plans."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels import Packed, fallback
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu import launch
from maxsim_kernels.gpu.forward import dispatch

CPU = torch.device("cpu")
STREAM = 77
ENSURE_CONTEXT = launch.ensure_context  # the tests have none


class FakeCompiled:
    """What Triton returns from a launch: `run` notes what a replay passes to the driver."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)


class FakeKernel:
    """Triton's `kernel[grid](*arguments, **constants)`."""

    arg_names = ("source", "out", "size", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=name == "size") for name in arg_names)

    def __init__(self) -> None:
        self.compiled = FakeCompiled()
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def start(*arguments: Any, **options: Any) -> FakeCompiled:
            self.launches.append((grid, arguments, options))
            return self.compiled

        return start


@pytest.fixture(autouse=True)
def no_plans(monkeypatch) -> None:
    """Plans of this test only, and a driver that is not there."""
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "ensure_context", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


# Signatures


def base() -> torch.Tensor:
    return torch.zeros(8, 32, dtype=torch.float16)


OTHERS = {
    "shape": lambda: torch.zeros(7, 32, dtype=torch.float16),
    "rank": lambda: torch.zeros(1, 8, 32, dtype=torch.float16),
    "stride": lambda: torch.zeros(8, 64, dtype=torch.float16)[:, :32],
    "order": lambda: torch.zeros(32, 8, dtype=torch.float16).t(),
    "dtype": lambda: torch.zeros(8, 32, dtype=torch.bfloat16),
    "alignment": lambda: torch.zeros(8 * 32 + 1, dtype=torch.float16)[1:].view(8, 32),
    "device": lambda: torch.zeros(8, 32, dtype=torch.float16, device="meta"),
    "class": lambda: torch.nn.Parameter(base(), requires_grad=False),
    "none": lambda: None,
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_signature_tells_inputs_apart(change) -> None:
    assert launch.signature((base(), OTHERS[change]()), True) != launch.signature((base(), base()), True)


def test_a_signature_does_not_depend_on_values_or_place() -> None:
    assert launch.signature((base(), None), "a", 1) == launch.signature((base() + 1, None), "a", 1)
    assert hash(launch.signature((base(), None), "a")) == hash(launch.signature((base(), None), "a"))


def test_a_signature_tells_flags_and_roles_apart() -> None:
    one = base()
    found = {
        launch.signature(*parts) for parts in (((one,), 0), ((one,), 1), ((one,), 0, 0), ((one, None), 0), ((None, one), 0))
    }
    assert len(found) == 5


# Recording


def scored(kernel: FakeKernel, source: torch.Tensor, after: Any = None) -> torch.Tensor:
    """A call: one result, one launch."""
    out = launch.empty((4,), torch.float32, CPU)
    launch.launch(kernel, 3, source, out, 4, BLOCK=16, warps=8)
    if after is not None:
        after()
    return out


def recorded(
    kernel: FakeKernel, source: torch.Tensor, inputs: tuple[Any, ...] | None = None, after: Any = None
) -> launch.Plan | None:
    launch.record("key", (source,) if inputs is None else inputs, CPU, lambda: scored(kernel, source, after))
    assert launch._recording.recorder is None
    return launch.planned("key")


def test_a_launch_passes_arguments_and_warps() -> None:
    kernel, source, out = FakeKernel(), base(), base()
    launch.launch(kernel, 3, source, out, 4, BLOCK=16, warps=8)
    assert kernel.launches == [((3,), (source, out, 4), {"BLOCK": 16, "num_warps": 8})]
    assert launch.planned("key") is None


def test_a_plan_replays_the_pointers_of_new_tensors() -> None:
    kernel = FakeKernel()
    plan = recorded(kernel, base())
    assert plan is not None
    assert len(kernel.launches) == 1
    fresh = base()
    result = plan.run((fresh,), CPU)
    assert result.shape == (4,)
    assert result.dtype == torch.float32
    expected = (3, 1, 1, STREAM, "function", "metadata", None, None, None, fresh.data_ptr(), result.data_ptr(), 4, 16)
    assert kernel.compiled.runs == [expected]
    another = plan.run((fresh,), CPU)
    assert another.data_ptr() != result.data_ptr()
    assert kernel.compiled.runs[1][10] == another.data_ptr()
    assert len(kernel.launches) == 1  # a replay goes past Triton's own launcher


def test_a_plan_switches_to_its_device(monkeypatch) -> None:
    kernel, switched = FakeKernel(), []

    class Device:
        def __init__(self, index: int) -> None:
            switched.append(index)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    plan = recorded(kernel, base())
    assert plan is not None
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    plan.run((base(),), CPU)
    assert switched == [0]


def test_a_pointer_inside_an_input_keeps_its_offset() -> None:
    kernel, source = FakeKernel(), base()
    launch.record("key", (source,), CPU, lambda: scored(kernel, source[2:]))
    plan = launch.planned("key")
    assert plan is not None
    assert plan.steps[0].pointers == ((0, 0, 2 * 64), (1, 1, 0))
    fresh = base()
    plan.run((fresh,), CPU)
    assert kernel.compiled.runs[0][9] == fresh[2:].data_ptr()


def test_inputs_of_one_storage_are_told_apart() -> None:
    kernel, storage = FakeKernel(), torch.zeros(16, 32, dtype=torch.float16)
    low, high = storage[:8], storage[8:]
    plan = recorded(kernel, high, (low, None, high))
    assert plan is not None
    assert plan.steps[0].pointers == ((0, 2, 0), (1, 3, 0))
    fresh = base()
    plan.run((base(), None, fresh), CPU)
    assert kernel.compiled.runs[0][9] == fresh.data_ptr()


def test_a_descriptor_is_described_anew() -> None:
    kernel, source = FakeKernel(), base()
    described = TensorDescriptor(source, [8, 32], [32, 1], [4, 32])
    launch.record("key", (source,), CPU, lambda: scored(kernel, described))  # type: ignore[arg-type]
    plan = launch.planned("key")
    assert plan is not None
    kept = plan.steps[0].arguments[0]
    assert kept.base.numel() == 0  # a plan keeps nobody's tensors alive
    fresh = base()
    plan.run((fresh,), CPU)
    passed = kernel.compiled.runs[0][9]
    assert passed.base is fresh
    assert (passed.shape, passed.strides, passed.block_shape) == ([8, 32], [32, 1], [4, 32])
    assert kept.base.numel() == 0


def test_a_descriptor_inside_an_input_leaves_no_plan() -> None:
    kernel, source = FakeKernel(), base()
    described = TensorDescriptor(source[1:], [7, 32], [32, 1], [4, 32])
    launch.record("key", (source,), CPU, lambda: scored(kernel, described))  # type: ignore[arg-type]
    assert launch.planned("key") is None


def test_an_unknown_tensor_leaves_no_plan() -> None:
    """A copy made on the way: a replay could not make it."""
    kernel, source = FakeKernel(), base()
    launch.record("key", (source,), CPU, lambda: scored(kernel, source.clone()))
    assert launch.planned("key") is None
    assert len(kernel.launches) == 1


def test_unrecorded_work_leaves_no_plan() -> None:
    assert recorded(FakeKernel(), base(), after=launch.unrecorded) is None
    launch.unrecorded()  # outside a recording: nothing to say


def test_one_tensor_in_two_roles_is_not_recorded() -> None:
    kernel, source = FakeKernel(), base()
    assert recorded(kernel, source, (source, source)) is None
    assert recorded(kernel, source, (source, source[:4])) is None  # another view, the same pointer
    assert len(kernel.launches) == 2


def test_an_empty_input_is_not_recorded() -> None:
    source = base()
    assert recorded(FakeKernel(), source, (source, torch.zeros(0))) is None


def test_results_that_were_not_allocated_first_leave_no_plan() -> None:
    kernel, source = FakeKernel(), base()

    def run() -> torch.Tensor:
        launch.empty((2,), torch.float32, CPU)
        return scored(kernel, source)

    launch.record("key", (source,), CPU, run)
    assert launch.planned("key") is None


def test_a_call_without_a_launch_leaves_no_plan() -> None:
    launch.record("key", (base(),), CPU, lambda: launch.empty((4,), torch.float32, CPU))
    assert launch.planned("key") is None


def test_results_and_scratch_keep_their_shapes() -> None:
    kernel, source = FakeKernel(), base()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        scores, winners = launch.empty((1, 4), torch.float32, CPU), launch.empty((1, 4, 2), torch.int32, CPU)
        scratch = launch.empty((5,), torch.int32, CPU)
        launch.launch(kernel, 1, source, scratch, 4, BLOCK=16, warps=4)
        launch.launch(kernel, 2, scratch, winners, 4, BLOCK=16, warps=4)
        return scores[0], winners[0]

    launch.record("key", (source,), CPU, run)
    plan = launch.planned("key")
    assert plan is not None
    assert plan.pair
    scores, winners = plan.run((base(),), CPU)
    assert (scores.shape, winners.shape, winners.dtype) == ((4,), (4, 2), torch.int32)
    (_, *first), (_, *second) = kernel.compiled.runs
    assert first[9] == second[8]  # what the first launch wrote is what the second one reads
    assert second[9] == winners.data_ptr()


def test_scratch_of_kernels_alone_is_one_buffer() -> None:
    """Allocations take the host longer than a launch's arguments; what torch or a descriptor names stays a tensor of its own."""
    kernel, source = FakeKernel(), base()

    def run() -> torch.Tensor:
        out = launch.empty((4,), torch.float32, CPU)
        first, named, second, third = (launch.empty((size,), torch.int32, CPU) for size in (3, 8, 200, 5))
        held = launch.empty((4, 32), torch.float16, CPU)
        launch.call(torch.Tensor.zero_, named)
        launch.launch(kernel, 1, first, second, 4, BLOCK=16, warps=4)
        launch.launch(kernel, 2, named[2:], third, 4, BLOCK=16, warps=4)
        launch.launch(kernel, 3, TensorDescriptor(held, [4, 32], [32, 1], [4, 32]), second[1:], 4, BLOCK=16, warps=4)
        launch.launch(kernel, 4, source, out, 4, BLOCK=16, warps=4)
        return out

    launch.record("key", (source,), CPU, run)
    plan = launch.planned("key")
    assert plan is not None
    assert [shape for shape, _ in plan.allocations] == [(4,), (8,), (4, 32), (512 + 1024 + 512,)]
    out = plan.run((source,), CPU)
    (first, second), (named, third), (held, again), (_, result) = (ran[9:11] for ran in kernel.compiled.runs)
    assert (second - first, third - first, again - second) == (512, 512 + 1024, 4)
    assert named not in range(first, first + 2048)
    assert (held.base.shape, held.base.dtype) == ((4, 32), torch.float16)
    assert result == out.data_ptr()


def test_an_error_ends_the_recording() -> None:
    def fail() -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        launch.record("key", (base(),), CPU, fail)
    assert launch._recording.recorder is None


def test_plans_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_MOST_PLANS", 3)
    source = base()
    for key in range(10):
        launch.record(key, (source,), CPU, lambda: scored(FakeKernel(), source))
        assert launch.planned(key) is not None
        assert len(launch._plans) <= 3


def test_a_signature_is_worth_recording_when_it_comes_again(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_seen", set())
    monkeypatch.setattr(launch, "_MOST_SEEN", 3)
    key = launch.signature((base(),), "a")
    assert [launch.repeated(key), launch.repeated(key), launch.repeated(launch.signature((base(),), "b"))] == [
        False,
        True,
        False,
    ]
    for number in range(100):
        launch.repeated(number)
        assert len(launch._seen) <= 3


def test_watched_launches_are_not_replayed(monkeypatch) -> None:
    assert recorded(FakeKernel(), base()) is not None
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert launch.planned("key") is None


# Launches of new shapes, past Triton's launcher


def other_launch(change: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options that differ from (base, base, 4; BLOCK 16, 8 warps) in one thing."""
    unaligned = OTHERS["alignment"]()
    arguments = {
        "size": (base(), base(), 5),
        "aligned size": (base(), base(), 64),
        "shape": (OTHERS["shape"](), base(), 1),
        "large size": (base(), base(), 2**31),
        "alignment": (unaligned, base(), 4),
        "dtype": (OTHERS["dtype"](), base(), 4),
        "kind": (base(), base(), 4.0),
        "descriptor": (TensorDescriptor(base(), [8, 32], [32, 1], [4, 32]), base(), 4),
    }
    options = {"constant": {"BLOCK": 32}, "warps": {"warps": 4}, "registers": {"registers": 128}}
    return arguments.get(change, (base(), base(), 4)), {"BLOCK": 16, "warps": 8} | options.get(change, {})


@pytest.mark.parametrize("change", ["size", "aligned size", "shape"])
def test_other_sizes_go_past_tritons_launcher(monkeypatch, change) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel = FakeKernel()
    launch.launch(kernel, 3, base(), base(), 4, BLOCK=16, warps=8)
    assert len(kernel.launches) == 1
    assert not kernel.compiled.runs
    (source, out, size), options = other_launch(change)
    launch.launch(kernel, 7, source, out, size, **options)
    assert len(kernel.launches) == 1
    expected = (7, 1, 1, STREAM, "function", "metadata", None, None, None, source.data_ptr(), out.data_ptr(), size, 16)
    assert kernel.compiled.runs == [expected]


@pytest.mark.parametrize("change", ["large size", "alignment", "dtype", "kind", "descriptor", "constant", "warps", "registers"])
def test_what_tells_kernels_apart_goes_through_triton(monkeypatch, change) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel = FakeKernel()
    launch.launch(kernel, 3, base(), base(), 4, BLOCK=16, warps=8)
    arguments, options = other_launch(change)
    for number in (2, 2):
        launch.launch(kernel, 3, *arguments, **options)
        assert len(kernel.launches) == number
    assert len(kernel.compiled.runs) == 1


def test_watched_launches_and_untried_versions_go_through_triton(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel = FakeKernel()
    with monkeypatch.context() as watching:
        watching.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: None)
        for _ in range(2):
            scored(kernel, base())
    with monkeypatch.context() as later:
        later.setattr(launch, "VERSION", "4.0")
        for _ in range(2):
            scored(kernel, base())
    assert len(kernel.launches) == 4
    assert not kernel.compiled.runs


def test_a_launch_past_triton_is_recorded_like_any_other(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    kernel, fresh = FakeKernel(), base()
    scored(kernel, base())
    plan = recorded(kernel, base())
    assert plan is not None
    assert len(kernel.launches) == 1
    result = plan.run((fresh,), CPU)
    assert kernel.compiled.runs[-1][9:] == (fresh.data_ptr(), result.data_ptr(), 4, 16)


def test_an_argument_is_looked_for_once(monkeypatch) -> None:
    """Most launches name one tensor in a dozen roles; asking for its storage takes the host longer than all else of a role."""
    asked: list[torch.Tensor] = []
    place = launch._place
    monkeypatch.setattr(launch, "_place", lambda tensor: asked.append(tensor) or place(tensor))
    source = base()
    recorder = launch._Recorder((source,))
    recorder.step(FakeCompiled(), 1, [source] * 12)
    assert len(recorder.steps[0].pointers) == 12  # type: ignore[union-attr]
    assert len(asked) == 2  # the input, and the argument


# Versions of Triton


@pytest.mark.parametrize("version", ["3.5", "3.8", "4.0"])
def test_a_version_that_was_not_tried_goes_through_the_public_call(monkeypatch, version) -> None:
    """Every call launches by Triton's own `kernel[grid](...)`, and nothing of what a replay would call is touched; said once."""
    monkeypatch.setattr(launch, "VERSION", version)
    monkeypatch.setattr(fallback, "_SAID", set())
    kernel, source = FakeKernel(), base()
    with pytest.warns(UserWarning, match=f"Triton {version} is not one that launches were replayed with"):
        assert recorded(kernel, source) is None
    for _ in range(2):
        assert recorded(kernel, source) is None  # another warning would be an error
    assert len(kernel.launches) == 3
    assert not kernel.compiled.runs
    assert launch.planned("key") is None


def test_gpus_of_other_makers_go_through_the_public_call(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(fallback, "_SAID", set())
    kernel, source = FakeKernel(), base()
    with pytest.warns(
        UserWarning, match="launches were replayed on NVIDIA's GPUs alone: every call goes through Triton's own launcher"
    ):
        assert recorded(kernel, source) is None
    assert recorded(kernel, source) is None
    assert not kernel.compiled.runs


def test_the_installed_version_was_tried() -> None:
    assert launch.VERSION in launch.TRIED, "try tests/gpu with it, then add it"


# Capture in a CUDA graph


class Cached(FakeKernel):
    """A kernel that asks Triton's hook whenever it would compile, as `JITFunction` does."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.ready = compiled

    def __getitem__(self, grid: tuple[int]) -> Any:
        start = super().__getitem__(grid)

        def look(*arguments: Any, **options: Any) -> FakeCompiled:
            if not self.ready:
                hook = knobs.runtime.jit_cache_hook
                assert hook is None or not hook(key="key", repr="repr", fn=None, compile={}, is_manual_warmup=False)
                self.ready = True
            return start(*arguments, **options)

        return look


@pytest.fixture
def captured(monkeypatch) -> None:
    """A stream that is being captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_capture_that_would_compile_is_refused_clearly(captured, monkeypatch) -> None:
    kernel, source = Cached(compiled=False), base()
    heard: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **about: heard.append(about))
    before = knobs.runtime.jit_cache_hook
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot capture a call whose kernels are not compiled yet.*warmup"):
            recorded(kernel, source)
        assert knobs.runtime.jit_cache_hook is before
    assert not kernel.launches
    assert not heard
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert recorded(kernel, source) is not None
    assert len(heard) == 1


def test_a_first_call_is_captured_where_its_kernels_are_compiled(captured) -> None:
    """After `warmup`, or a call of another signature."""
    kernel, source = Cached(compiled=True), base()
    assert recorded(kernel, source) is not None
    assert len(kernel.launches) == 1


def test_another_thread_may_compile_during_a_capture(captured, monkeypatch) -> None:
    capturing = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: threading.get_ident() == capturing)
    other = Cached(compiled=False)
    with launch._nothing_compiled():
        thread = threading.Thread(target=scored, args=(other, base()))
        thread.start()
        thread.join()
    assert len(other.launches) == 1


def test_no_memory_is_asked_about_during_a_capture(captured, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    monkeypatch.setattr(launch._recording, "ready", set())
    ENSURE_CONTEXT(0)
    assert not asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ENSURE_CONTEXT(0)
    ENSURE_CONTEXT(0)
    assert asked == [0]


def test_winners_of_packed_queries_are_refused_during_a_capture(captured) -> None:
    rows = Packed(torch.zeros(6, 8), torch.tensor([0, 2, 6]))
    call = validate(rows, torch.zeros(3, 5, 8), Options(return_argmax=True))
    with pytest.raises(RuntimeError, match=r"^queries: got packed ones whose winners are wanted.*need padded queries"):
        dispatch._longest(call)
