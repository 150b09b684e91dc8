"""Launching kernels cheaply: a call's launches are recorded once and replayed for every later call of the same signature.

Checking arguments, choosing a kernel and Triton's own launcher take over 100 us of host time, more than many calls take on the GPU. All
of it follows from shapes, dtypes, strides and alignment; so the second call of a signature leaves a `Plan`: the compiled kernels, their
grids and scalars, and where each pointer comes from. A replay allocates the outputs, fills in pointers and launches.

A plan is of one signature, sizes included. Where a kernel says how its launch follows from counts (`by_counts`), the plan serves
calls of other counts too (`forward/counted.py`). Every other call of new shapes is prepared anew, but bypasses Triton's launcher,
which looks up the compiled kernel by every argument and takes longer for that than for all the rest: here compiled kernels are
kept by the few things that tell them apart (`kernel_key`), among them no size that Triton does not specialise on.

All of this calls what Triton's launcher calls, which is no public interface. So under versions of Triton that it was not tried
with (`TRIED`), and on GPUs that NVIDIA did not make, every call goes through the public `kernel[grid](...)` instead.

Torch's own operators are recorded where they go through `call`; a call that does anything else (`unrecorded`) leaves no plan and
is prepared each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels import fallback
from maxsim_kernels.gpu.plans import ByCounts, Inputs, Plan, Recorder, packed, start
from maxsim_kernels.modes import capturing

TRIED = ("3.6", "3.7")  # versions of Triton that `plans.start` was tried with, which calls what their launchers call
VERSION = ".".join(triton.__version__.split(".")[:2])
_MOST_PLANS, _MOST_STEPS = 2048, 128  # a call of more launches runs so long that the host has time to prepare it anew
_MOST_SEEN = 1 << 16  # signatures remembered, 8 bytes each
_plans: dict[Hashable, Plan] = {}
classes: dict[Hashable, Any] = {}  # plans by class of shape (`forward/counted.py`)
_seen: set[int] = set()  # hashes of the signatures of earlier calls
_compiled: dict[Hashable, Any] = {}  # kernels that were launched, by `kernel_key`
_fixed: dict[Any, tuple[bool, ...]] = {}  # by kernel: which of its arguments Triton may compile in


class _Recording(threading.local):
    recorder: Recorder | None = None


_recording = _Recording()  # by thread: what one thread launches is no part of another's call


def launch(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
    """Launch a Triton kernel on the current device, and note it when a call is being recorded. Constants by name.

    `registers`: the most that a thread may use; 0: as the compiler likes.
    """
    key = kernel_key(kernel, arguments, constants, warps, registers) if _past_triton(arguments[0]) else None
    compiled = _compiled.get(key) if key is not None else None
    recorder = _recording.recorder
    given: dict[str, Any] = {}
    if compiled is not None or (recorder is not None and not recorder.broken):
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    if compiled is None:
        options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
        with _nothing_compiled() if capturing() else nullcontext():
            compiled = kernel[(grid,)](*arguments, **constants, **options)
        if key is not None:
            if len(_compiled) >= _MOST_PLANS:
                _compiled.clear()
            _compiled[key] = compiled
    else:
        passed = [one.data_ptr() if isinstance(one, Tensor) else one for one in map(given.__getitem__, kernel.arg_names)]
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        start(compiled, grid, stream, passed)
    if recorder is not None and not recorder.broken:
        recorder.step(compiled, grid, [given[name] for name in kernel.arg_names])


def _past_triton(first: Any) -> bool:
    """Whether a launch with this first argument may bypass Triton's launcher: on a GPU, unwatched, by a Triton of `TRIED`."""
    tensor = first.base if isinstance(first, TensorDescriptor) else first
    return _is_cuda(tensor) and not watched() and not _untried()


def _is_cuda(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_cuda


def kernel_key(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, registers: int) -> Hashable:
    """The key of a compiled kernel: at least everything by which Triton tells kernels apart.

    A tensor counts by dtype and alignment, a descriptor by dtype and block, a size that Triton does not specialise on by whether
    it has 32 bits. Any other number counts as it is, where Triton asks only whether 16 divides it and whether it is 1: a key more
    than needed costs one launch through Triton.
    """
    fixed = _fixed.get(kernel)
    if fixed is None:
        fixed = _fixed[kernel] = tuple(not one.do_not_specialize for one in kernel.params)
    parts: list[Hashable] = [kernel, torch._C._cuda_getDevice(), warps, registers, *constants.items()]
    for one, counts in zip(arguments, fixed, strict=False):
        if isinstance(one, Tensor):
            parts += (one.dtype, one.data_ptr() & 15 == 0)
        elif isinstance(one, TensorDescriptor):
            parts += (one.base.dtype, tuple(one.block_shape))
        elif type(one) is int and not counts and -(1 << 31) <= one < 1 << 31:
            parts.append("i32")
        else:
            parts.append((type(one), one))
    return tuple(parts)


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Refuse to compile a kernel while a CUDA graph is captured: compiling and loading it would break the capture."""
    before = knobs.runtime.jit_cache_hook

    def refuse(**about: Any) -> bool | None:
        if capturing():  # another thread, which does not capture, may compile
            raise RuntimeError(
                "maxsim_kernels: a CUDA graph cannot capture a call whose kernels are not compiled yet; make one call with tensors of "
                "these shapes and dtypes before the capture, or maxsim_kernels.warmup(...)"
            )
        return before(**about) if before is not None else None

    knobs.runtime.jit_cache_hook = refuse
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, noted when a call is being recorded."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if _recording.recorder is not None:
        _recording.recorder.allocated.append(tensor)
    return tensor


def call(function: Callable[..., Any], *tensors: Tensor) -> None:
    """`function(*tensors)`, which writes the first one, noted when a call is being recorded: for inputs and whole `empty` tensors."""
    function(*tensors)
    if _recording.recorder is not None:
        _recording.recorder.call(function, tensors)


def unrecorded() -> None:
    """Give up the recording. To be called by whatever does something between launches that a replay would miss."""
    if _recording.recorder is not None:
        _recording.recorder.broken = True


def by_counts(rule: ByCounts) -> None:
    """Note by which rule the launch follows from counts, if a call is recorded. To be called by what launches the kernel."""
    if _recording.recorder is not None:
        _recording.recorder.rule = rule


def planned(key: Hashable) -> Plan | None:
    """The plan of a signature; None: there is none, or launches are watched (a profiler's hooks need Triton's own launcher)."""
    return None if watched() else _plans.get(key)


def keep_class(key: Hashable, plan: Any) -> None:
    """Keep the plan of a class of shapes (None: it can have none); of classes too there are `_MOST_PLANS` at most."""
    if len(classes) >= _MOST_PLANS:
        classes.clear()
    classes[key] = plan


def watched() -> bool:
    """Whether somebody, such as a profiler, watches launches by Triton's hooks."""
    return _watched(knobs.runtime.launch_enter_hook) or _watched(knobs.runtime.launch_exit_hook)


def repeated(key: Hashable) -> bool:
    """Whether a signature came before; it is remembered. Recording takes a third of a call: too much for one that comes once."""
    here = hash(key)
    if here in _seen:
        return True
    if len(_seen) >= _MOST_SEEN:
        _seen.clear()
    _seen.add(here)
    return False


def _watched(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def record(key: Hashable, inputs: Inputs, device: torch.device, run: Callable[[], Any]) -> Any:
    """Run a call and keep its plan if it can be replayed. Its results must be its first allocations, or views of their start."""
    untried = _untried()
    if untried:
        fallback.say_once(f"{untried}: every call goes through Triton's own launcher, which takes the host about 0.1 ms longer")
        return run()
    held = [one.data_ptr() for one in inputs if one is not None]
    if 0 in held or len(set(held)) != len(held):
        return run()  # one tensor in two roles: later calls of this signature need not repeat that
    recorder = _recording.recorder = Recorder(inputs)
    try:
        result = run()
    finally:
        _recording.recorder = None
    results = result if isinstance(result, tuple) else (result,)
    mine = [one.data_ptr() for one in recorder.allocated[: len(results)]]
    if not recorder.broken and 0 < len(recorder.steps) <= _MOST_STEPS and mine == [one.data_ptr() for one in results]:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = Plan(device.index or 0, *packed(recorder, results), len(results) == 2, recorder.rule)
    return result


def forget() -> None:
    """Drop every plan and compiled kernel: calls are prepared anew, by Triton."""
    _plans.clear()
    classes.clear()
    _seen.clear()
    _compiled.clear()


def _untried() -> str:
    """Why launches are not replayed here, or an empty string."""
    if torch.version.hip:
        return "launches were replayed on NVIDIA's GPUs alone"
    if VERSION not in TRIED:
        return f"Triton {VERSION} is not one that launches were replayed with ({', '.join(TRIED)})"
    return ""


def signature(inputs: Inputs, *flags: Hashable) -> Hashable:
    """What a plan depends on: shapes, strides, dtypes, alignment of every input, the device, and the flags."""
    parts: list[Hashable] = [flags]
    for one in inputs:
        parts.append(None if one is None else (type(one), one.shape, one.stride(), one.dtype, one.data_ptr() & 15, one.device))
    return tuple(parts)
