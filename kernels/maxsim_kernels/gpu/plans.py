"""Plans: the launches of one call signature, as they are recorded and as they are replayed (`launch.py` says when)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels.modes import capturing

_APART = 512  # scratch tensors begin at multiples of so many bytes of their buffer, as blocks of torch's allocator do
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
    """How the one launch of a call follows from its counts, when everything else of the call is as it was recorded.

    There is a program for every document and block of query rows, or at most `workers` programs a block. This holds only while
    documents stay whole: they are many enough, or shorter than eight tiles of `tokens` (`geometry.stay_whole`).
    """

    workers: int  # programs a block, at most; 0: one for every document
    blocks: int
    tokens: int


@dataclass(frozen=True)
class TorchStep:
    """One recorded call of torch: a function that writes its first tensor, and the slots of its tensors."""

    function: Callable[..., Any]
    slots: tuple[int, ...]


@dataclass
class Plan:
    """The launches of one call signature. Slots number inputs, then what is allocated: results first, one scratch buffer last."""

    device: int
    allocations: Shapes
    steps: list[Step | TorchStep]
    pair: bool  # two results
    rule: ByCounts | None = None

    def run(self, inputs: Inputs, device: torch.device) -> Any:
        """Replay on new inputs of the same signature."""
        return on_device(self.device, self._run, inputs, device)

    def _run(self, inputs: Inputs, device: torch.device) -> Any:
        allocated = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.allocations]
        tensors = [*inputs, *allocated]
        # Asked for once a tensor: most launches name one tensor in every role that they do not use.
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for step in self.steps:
            if isinstance(step, TorchStep):
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
    """Start a compiled kernel, as Triton's launcher does last; pointers are passed as numbers."""
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
class Recorder:
    """A call whose launches are being noted."""

    inputs: Inputs
    allocated: list[Tensor] = field(default_factory=list)
    steps: list[Step | TorchStep] = field(default_factory=list)
    broken: bool = False
    rule: ByCounts | None = None
    places: list[tuple[int, int] | None] = field(default_factory=list)  # storage and pointer of every tensor so far

    def slot(self, tensor: Tensor) -> tuple[int, int] | None:
        """Which tensor of the call this one is, or lies in, and how many bytes from its start; None: none of them."""
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
        """Note a launch."""
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
        """Note a call of torch."""
        known = [*self.inputs, *self.allocated]
        slots = [next((n for n, one in enumerate(known) if one is tensor), None) for tensor in tensors]
        self.broken = self.broken or None in slots
        self.steps.append(TorchStep(function, tuple(slot for slot in slots if slot is not None)))


class _Ready(threading.local):
    """Devices whose context a thread has."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ready = _Ready()


def ensure_context(device: int) -> None:
    """Give this thread the device's context, which encoding a tensor descriptor needs before anything else would have made it."""
    if device not in _ready.devices and not capturing():  # whoever captures has a context, and must not ask about memory
        torch.cuda.mem_get_info(device)
        _ready.devices.add(device)


def packed(recorder: Recorder, results: tuple[Tensor, ...]) -> tuple[Shapes, list[Step | TorchStep]]:
    """What a replay allocates, and the steps with its slots: scratch that kernels get by address alone becomes one buffer."""
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


def _named(step: Step | TorchStep) -> tuple[int, ...]:
    """Slots whose tensors a step needs, not only their addresses."""
    return step.slots if isinstance(step, TorchStep) else tuple(slot for _, slot in step.descriptors)


def _moved(step: Step | TorchStep, places: dict[int, tuple[int, int]]) -> Step | TorchStep:
    if isinstance(step, TorchStep):
        return replace(step, slots=tuple(places[slot][0] for slot in step.slots))
    pointers = tuple((place, places[slot][0], places[slot][1] + offset) for place, slot, offset in step.pointers)
    return replace(step, pointers=pointers, descriptors=tuple((place, places[slot][0]) for place, slot in step.descriptors))
