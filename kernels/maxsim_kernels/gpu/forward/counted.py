"""Plans by class of shape: calls that differ from a recorded one in counts alone take its launch with other numbers in it.

A reranker's calls never have the same number of documents or tokens twice, so that a plan of one signature (`gpu/launch.py`) seldom
serves them. A call of few query rows is one launch, and nearly all of it follows from what `class_of` holds: strides, dtypes,
alignment, device and options as in a signature, every size but the number of documents and of packed tokens, and what the choice of the
kernel sees of those two (`choice.stream_class`). What remains is where tensors are, two counts, and how many programs there are.

Nothing is served that would otherwise be refused or launched differently: the recorded call had the same ranks, dtypes, devices
and other sizes, and passed the checks; tensors whose length has to agree with the number of documents are looked at here
(`sizes_of`). Calls with masks of documents, winners, pairs, packed queries or quantised documents have no class, and calls whose
few documents are split are not served by theirs (`Counted.takes`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxsim_kernels.checks import Options
from maxsim_kernels.gpu.forward.choice import STREAM_ROWS, stream_class
from maxsim_kernels.gpu.forward.general import ARGUMENTS, workers_of
from maxsim_kernels.gpu.geometry import hardware, stay_whole
from maxsim_kernels.gpu.launch import classes, keep_class, planned, signature, watched
from maxsim_kernels.gpu.plans import ByCounts, Inputs, Plan, Step, on_device, start
from maxsim_kernels.tokens import Packed

_DOCUMENTS, _TOTAL, _WORKERS = (ARGUMENTS.index(name) for name in ("documents", "document_total", "workers"))
_MOST = 1 << 31  # numbers from here on have another kernel
_CONTIGUOUS = (1,)  # strides of starts and lengths as the kernels read them, without a copy


class Sizes(NamedTuple):
    """Documents of a call, tokens of the packed buffer (0: padded), tokens of a document at most and in the mean (0: unknown)."""

    documents: int
    total: int
    longest: int
    mean: int


def sizes_of(queries: object, documents: object, inputs: Inputs, options: Options) -> Sizes | None:
    """Counts of a call that may belong to a class, None of any other. `inputs`: its tensors in the order of `checks.tensors_of`."""
    rows, tokens = inputs[0], inputs[1]
    assert rows is not None
    assert tokens is not None
    if options.return_argmax or options.pairs or inputs[3] is not None or not isinstance(queries, Tensor):
        return None
    if not 2 <= rows.dim() <= 3 or rows.numel() > STREAM_ROWS * rows.shape[-1]:
        return None
    count, lengths = tokens.shape[0] if tokens.dim() else 0, inputs[5]
    if isinstance(documents, Packed):
        starts, lengths = inputs[6:8]
        assert starts is not None
        total, count = count, starts.numel()
        sizes = Sizes(count, total, total, total // max(1, count) if documents.offsets is not None else 0)
        alike = starts.stride() == _CONTIGUOUS and 0 < total < _MOST
    else:
        if tokens is not documents or tokens.dim() != 3:
            return None
        size = tokens.shape[1]
        sizes, alike = Sizes(count, 0, size, size), True
    if lengths is not None:
        alike = alike and lengths.stride() == _CONTIGUOUS and lengths.numel() == count
    return sizes if alike and 0 < count < _MOST else None


def class_of(inputs: Inputs, sizes: Sizes, flags: Hashable) -> Hashable:
    """Everything that the launch of a call follows from, but for its `sizes` and where its tensors are."""
    rows, tokens, query_mask, _, query_lengths, *counted = inputs
    assert rows is not None
    assert tokens is not None
    device = rows.device
    parts: list[Hashable] = [
        flags,
        stream_class(sizes.documents, sizes.mean, hardware(device).processors),
        device,
        rows.shape,
        rows.stride(),
        rows.dtype,
        rows.data_ptr() & 15,
        tokens.shape[1:],
        tokens.stride(),
        tokens.dtype,
        tokens.data_ptr() & 15,
        tokens.device,
    ]
    if query_mask is not None or query_lengths is not None:
        parts.append(signature((query_mask, query_lengths)))
    for one in counted:  # one number a document, one after the other
        parts.append(None if one is None else (one.dtype, one.data_ptr() & 15, one.device))
    return tuple(parts)


@dataclass(frozen=True)
class Counted:
    """The launch of a class. `pointers`: (number of a tensor, arguments that point to it), counting inputs, then the scores."""

    device: int
    processors: int
    rule: ByCounts
    kernel: Any
    arguments: tuple[Any, ...]
    pointers: tuple[tuple[int, tuple[int, ...]], ...]
    queries: tuple[int, ...]  # the scores' shape, but for the documents
    scores: torch.dtype

    def takes(self, sizes: Sizes) -> bool:
        """Whether a call of the class has this launch: its documents stay whole, and its programs are not too many."""
        programs = sizes.documents * self.rule.blocks
        return programs < _MOST and stay_whole(sizes.longest, self.rule.tokens, programs, self.processors)

    def run(self, inputs: Inputs, sizes: Sizes, device: torch.device) -> Tensor:
        """Score a call that `takes` accepts."""
        scores: Tensor = on_device(self.device, self._run, inputs, sizes, device)
        return scores

    def _run(self, inputs: Inputs, sizes: Sizes, device: torch.device) -> Tensor:
        grid, arguments = self.numbers(sizes)
        scores = torch.empty((*self.queries, sizes.documents), dtype=self.scores, device=device)
        tensors = (*inputs, scores)
        for slot, places in self.pointers:
            pointer = tensors[slot].data_ptr()  # type: ignore[union-attr]
            for place in places:
                arguments[place] = pointer
        start(self.kernel, grid, torch._C._cuda_getCurrentRawStream(self.device), arguments)
        return scores

    def numbers(self, sizes: Sizes) -> tuple[int, list[Any]]:
        """The grid, and the arguments with a call's counts in them."""
        arguments = list(self.arguments)
        workers = workers_of(sizes.documents, self.rule.workers)
        arguments[_DOCUMENTS], arguments[_TOTAL], arguments[_WORKERS] = sizes.documents, sizes.total, workers
        return workers * self.rule.blocks, arguments


def find(key: Hashable, sizes: Sizes) -> Counted | None:
    """The launch that serves a call of a class; None: none was recorded, the documents are split, or launches are watched."""
    found: Counted | None = classes.get(key)
    return found if found is not None and found.takes(sizes) and not watched() else None


def wanted(key: Hashable) -> bool:
    """Whether a class of calls was neither recorded yet nor given up because no rule describes its launches."""
    return key not in classes


def learn(key: Hashable, recorded: Hashable, sizes: Sizes) -> None:
    """Keep the launch of a class, from the plan of one of its calls; None where the rule does not give that call's launch."""
    plan = planned(recorded)
    if plan is not None and wanted(key):
        keep_class(key, _counted(plan, sizes))


def _counted(plan: Plan, sizes: Sizes) -> Counted | None:
    if plan.rule is None or len(plan.steps) != 1 or len(plan.allocations) != 1:
        return None
    step, (shape, dtype) = plan.steps[0], plan.allocations[0]
    assert isinstance(step, Step)
    places: dict[int, list[int]] = {}
    for place, slot, offset in step.pointers:
        if offset:
            return None
        places.setdefault(slot, []).append(place)
    pointers = tuple((slot, tuple(of_it)) for slot, of_it in places.items())
    processors = hardware(torch.device("cuda", plan.device)).processors
    made = Counted(plan.device, processors, plan.rule, step.kernel, step.arguments, pointers, shape[:-1], dtype)
    same = made.takes(sizes) and made.numbers(sizes) == (step.grid, list(step.arguments))
    return made if same and shape[-1] == sizes.documents else None
