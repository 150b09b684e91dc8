"""Launching kernels cheaply: a call's launches are recorded once and replayed for every later call of the same signature.

Checking arguments, choosing a kernel and Triton's own launcher take over 100 us of host time, more than many calls take on the GPU. All
of it follows from shapes, dtypes, strides and alignment; so the second call of a signature leaves a `Plan`: the compiled kernels, their
grids and scalars, and where each pointer comes from. A replay allocates the outputs, fills in pointers and launches.

A plan is of one signature, sizes included. Where a kernel says how its launch follows from counts (`by_counts`), the plan serves
calls of other counts too (`forward/counted.py`). Every other call of new shapes is prepared anew, but goes past Triton's launcher: it
looks up the compiled kernel by every argument, which takes longer than all the rest; here compiled kernels are kept by the few things
that tell them apart (`kernel_key`), and no size that Triton does not specialise on is one of them.

All call what Triton's launcher calls, which is no public interface: it is left out under versions of Triton that it was not tried
with (`TRIED`) and on GPUs that NVIDIA did not make, and every call then goes through the public `kernel[grid](...)`.

Torch's own operators take part where they go through `call`; a call that does anything else leaves no plan and is prepared each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels import fallback
from maxsim_kernels.modes import capturing

TRIED = ("3.6", "3.7")  # versions of Triton whose launcher `Plan.run` calls as they do
VERSION = ".".join(triton.__version__.split(".")[:2])
_MOST_PLANS, _MOST_STEPS = 2048, 128  # a call of more launches is long enough for the host to prepare it anew
_MOST_SEEN = 1 << 16  # signatures remembered, 8 bytes each
_APART = 512  # bytes that scratch tensors of one buffer begin apart, as blocks of torch's allocator do
Inputs = tuple[Tensor | None, ...]
Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Step:
    """One recorded launch: `pointers` are (argument, tensor slot, byte offset), `descriptors` (argument, slot)."""

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    descriptors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ByCounts:
    """How the one launch of a call follows from counts, everything else of the call being as it was recorded.

    A program for every document and block of query rows, or `workers` a block at most. Documents stay whole where they are many enough,
    or shorter than eight tiles of `tokens` (`geometry.stay_whole`); of others this says nothing.
    """

    workers: int  # a block at most; 0: one for every document
    blocks: int
    tokens: int


@dataclass(frozen=True)
class _Torch:
    """One recorded call of torch: a function that writes its first tensor, and the slots of its tensors."""

    function: Callable[..., Any]
    slots: tuple[int, ...]


@dataclass
class Plan:
    """The launches of one call signature. Slots: the inputs, then what is allocated: results first, one buffer of scratch last."""

    device: int
    allocations: Shapes
    steps: list[Step | _Torch]
    pair: bool  # two results
    rule: ByCounts | None = None

    def run(self, inputs: Inputs, device: torch.device) -> Any:
        """Replay on new inputs of the same signature."""
        return on_device(self.device, self._run, inputs, device)

    def _run(self, inputs: Inputs, device: torch.device) -> Any:
        allocated = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.allocations]
        tensors = [*inputs, *allocated]
        # Once a tensor: most launches name one tensor in every role that they do not use.
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for step in self.steps:
            if isinstance(step, _Torch):
                step.function(*(tensors[slot] for slot in step.slots))
                continue
            arguments = list(step.arguments)
            for place, slot, offset in step.pointers:
                arguments[place] = addresses[slot] + offset
            for place, slot in step.descriptors:
                described = TensorDescriptor.__new__(TensorDescriptor)  # `copy.copy` takes the host five times as long
                described.__dict__.update(arguments[place].__dict__)
                described.base = tensors[slot]
                arguments[place] = described
            start(step.kernel, step.grid, stream, arguments)
        return (allocated[0], allocated[1]) if self.pair else allocated[0]


def start(compiled: Any, grid: int, stream: int, arguments: list[Any]) -> None:
    """What Triton's launcher does last: start a compiled kernel, pointers being numbers."""
    compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def on_device(device: int, replay: Callable[..., Any], *arguments: Any) -> Any:
    """Replay launches with their device as the current one."""
    ensure_context(device)
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return replay(*arguments)
    return replay(*arguments)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), tensor.data_ptr()


@dataclass
class _Recorder:
    inputs: Inputs
    allocated: list[Tensor] = field(default_factory=list)
    steps: list[Step | _Torch] = field(default_factory=list)
    broken: bool = False
    rule: ByCounts | None = None
    places: list[tuple[int, int] | None] = field(default_factory=list)  # storage and pointer of every tensor so far

    def slot(self, tensor: Tensor) -> tuple[int, int] | None:
        """Which tensor of the call this one is, or lies in, and how many bytes from its start."""
        storage, pointer = _place(tensor)
        known = len(self.places)
        if known < len(self.inputs) + len(self.allocated):
            more = [*self.inputs, *self.allocated][known:]
            self.places += [None if one is None else _place(one) for one in more]
        same = [(n, place[1]) for n, place in enumerate(self.places) if place is not None and place[0] == storage]
        exact = [one for one in same if one[1] == pointer]
        chosen = exact or same
        return (chosen[0][0], pointer - chosen[0][1]) if chosen else None

    def step(self, kernel: Any, grid: int, arguments: list[Any]) -> None:
        pointers, descriptors = [], []
        slots: dict[int, tuple[int, int] | None] = {}  # most launches name one tensor in every role that they do not use
        for place, argument in enumerate(arguments):
            if isinstance(argument, Tensor | TensorDescriptor):
                tensor = argument if isinstance(argument, Tensor) else argument.base
                if id(tensor) not in slots:
                    slots[id(tensor)] = self.slot(tensor)
                found = slots[id(tensor)]
                if found is None:
                    self.broken = True
                    return
                if isinstance(argument, Tensor):
                    pointers.append((place, *found))
                    arguments[place] = 0
                elif found[1]:
                    self.broken = True
                    return
                else:
                    descriptors.append((place, found[0]))
                    arguments[place] = TensorDescriptor(
                        torch.empty(0, dtype=argument.base.dtype), argument.shape, argument.strides, argument.block_shape
                    )
        self.steps.append(Step(kernel, grid, tuple(arguments), tuple(pointers), tuple(descriptors)))

    def call(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
        known = [*self.inputs, *self.allocated]
        slots = [next((n for n, one in enumerate(known) if one is tensor), None) for tensor in tensors]
        self.broken = self.broken or None in slots
        self.steps.append(_Torch(function, tuple(slot for slot in slots if slot is not None)))


_plans: dict[Hashable, Plan] = {}
classes: dict[Hashable, Any] = {}  # plans by class of shape (`forward/counted.py`)
_seen: set[int] = set()  # hashes of signatures that came once
_compiled: dict[Hashable, Any] = {}  # kernels that were launched, by `kernel_key`
_fixed: dict[Any, tuple[bool, ...]] = {}  # by kernel: which of its arguments Triton may compile in


class _Recording(threading.local):
    recorder: _Recorder | None = None

    def __init__(self) -> None:
        self.ready: set[int] = set()


_recording = _Recording()  # by thread: what one thread launches is no part of another's call


def ensure_context(device: int) -> None:
    """Give this thread the device's context: a tensor descriptor is encoded before anything else would make one."""
    if device not in _recording.ready and not capturing():  # whoever captures has a context, and must not ask about memory
        torch.cuda.mem_get_info(device)
        _recording.ready.add(device)


def launch(kernel: Any, grid: int, *arguments: Any, warps: int, registers: int = 0, **constants: Any) -> None:
    """Launch a Triton kernel on the current device, and note it when a call is being recorded. Constants by name.

    `registers`: at most so many a thread; 0: as the compiler likes.
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
    """Whether a launch whose first argument this is may go past Triton's launcher: on a GPU, and nobody watches."""
    tensor = first.base if isinstance(first, TensorDescriptor) else first
    return _is_cuda(tensor) and not watched() and not _untried()


def _is_cuda(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_cuda


def kernel_key(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, registers: int) -> Hashable:
    """What one compiled kernel serves: at least everything that Triton tells kernels apart by.

    Of a tensor dtype and alignment; of a descriptor dtype and block; of a size that is not specialised on whether it has 32 bits. Any
    other number counts as it is, where Triton asks only whether 16 divides it and whether it is 1: a key too many costs one look-up.
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
    """While a CUDA graph is captured: compiling and loading a kernel there breaks the capture, so it is refused before."""
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
    """Said by whoever does something between launches that a replay would miss."""
    if _recording.recorder is not None:
        _recording.recorder.broken = True


def by_counts(rule: ByCounts) -> None:
    """Said by whoever launches a kernel that follows from counts by this rule, noted when a call is being recorded."""
    if _recording.recorder is not None:
        _recording.recorder.rule = rule


def planned(key: Hashable) -> Plan | None:
    """The plan of a signature; none while somebody watches launches (a profiler's hooks need Triton's own launcher)."""
    return None if watched() else _plans.get(key)


def keep_class(key: Hashable, plan: Any) -> None:
    """Keep what serves a class of shapes, as many as there may be plans."""
    if len(classes) >= _MOST_PLANS:
        classes.clear()
    classes[key] = plan


def watched() -> bool:
    """Whether somebody watches launches."""
    return _watched(knobs.runtime.launch_enter_hook) or _watched(knobs.runtime.launch_exit_hook)


def repeated(key: Hashable) -> bool:
    """Whether a signature came before: one that comes once is not worth recording, which takes as long as a third of the call."""
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
    """Run a call and keep its plan where it can be replayed. Its results must be its first allocations, whatever their view."""
    untried = _untried()
    if untried:
        fallback.say_once(f"{untried}: every call goes through Triton's own launcher, which takes the host about 0.1 ms longer")
        return run()
    held = [one.data_ptr() for one in inputs if one is not None]
    if 0 in held or len(set(held)) != len(held):
        return run()  # one tensor in two roles: later calls of this signature need not repeat that
    recorder = _recording.recorder = _Recorder(inputs)
    try:
        result = run()
    finally:
        _recording.recorder = None
    results = result if isinstance(result, tuple) else (result,)
    mine = [one.data_ptr() for one in recorder.allocated[: len(results)]]
    if not recorder.broken and 0 < len(recorder.steps) <= _MOST_STEPS and mine == [one.data_ptr() for one in results]:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = Plan(device.index or 0, *_packed(recorder, results), len(results) == 2, recorder.rule)
    return result


def _packed(recorder: _Recorder, results: tuple[Tensor, ...]) -> tuple[Shapes, list[Step | _Torch]]:
    """What a replay allocates, and the steps with its slots: scratch that kernels know by its address alone is one buffer."""
    first = len(recorder.inputs) + len(results)
    named = {slot for step in recorder.steps for slot in _named(step)}
    shapes: Shapes = [(tuple(one.shape), one.dtype) for one in results]
    alone: list[Tensor] = []
    places: dict[int, tuple[int, int]] = {slot: (slot, 0) for slot in range(first)}
    total = 0
    for slot, tensor in enumerate(recorder.allocated[len(results) :], first):
        if slot in named:
            places[slot] = first + len(alone), 0
            alone.append(tensor)
        else:
            places[slot] = -1, total
            total += -(-tensor.numel() * tensor.element_size() // _APART) * _APART
    shapes += [(tuple(one.shape), one.dtype) for one in alone]
    if total:
        last = first + len(alone)
        places = {slot: (last if to < 0 else to, offset) for slot, (to, offset) in places.items()}
        shapes.append(((total,), torch.uint8))
    return shapes, [_moved(step, places) for step in recorder.steps]


def _named(step: Step | _Torch) -> tuple[int, ...]:
    """Slots whose tensors a step needs, not only their addresses."""
    return step.slots if isinstance(step, _Torch) else tuple(slot for _, slot in step.descriptors)


def _moved(step: Step | _Torch, places: dict[int, tuple[int, int]]) -> Step | _Torch:
    if isinstance(step, _Torch):
        return replace(step, slots=tuple(places[slot][0] for slot in step.slots))
    pointers = tuple((place, places[slot][0], places[slot][1] + offset) for place, slot, offset in step.pointers)
    return replace(step, pointers=pointers, descriptors=tuple((place, places[slot][0]) for place, slot in step.descriptors))


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
