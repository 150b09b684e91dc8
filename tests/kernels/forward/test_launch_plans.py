"""Launches recorded once and replayed (`launch.py`, `plans.py`), without a GPU: signatures, the recorder, plans."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fake_kernels import CPU, OTHERS, STREAM, FakeCompiled, FakeKernel, base, no_plans, recorded, scored  # noqa: F401
from maxsim_kernels.gpu import launch, plans

# Signatures


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


def test_an_argument_is_looked_for_once(monkeypatch) -> None:
    """Most launches name one tensor in a dozen roles; asking for its storage takes the host longer than all else of a role."""
    asked: list[torch.Tensor] = []
    place = plans._place
    monkeypatch.setattr(plans, "_place", lambda tensor: asked.append(tensor) or place(tensor))
    source = base()
    recorder = plans.Recorder((source,))
    recorder.step(FakeCompiled(), 1, [source] * 12)
    assert len(recorder.steps[0].pointers) == 12  # type: ignore[union-attr]
    assert len(asked) == 2  # the input, and the argument
