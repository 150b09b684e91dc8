"""What the kernels of gradients, the contrastive loss and the Chamfer distance compile to, without a GPU: registers, shared memory, spills. Written anew by

    python tests/helpers/record_gradients.py

after one of them or the pinned Triton has changed, and read in the diff. `tests/kernels/{backward,chamfer}/test_compiles.py` compile
the same calls and compare with `tests/kernels/backward/resources.json`; `record_resources.py` is the same for the forward kernels.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

import record_resources as recorder
from maxsim_kernels.chamfer import nearest
from maxsim_kernels.gpu.backward import contrast, gradients, inverse_grid, saved
from places import TESTS

RECORD = TESTS / "kernels" / "backward" / "resources.json"
PROCESSORS = 132


@dataclass(frozen=True)
class Backward:
    """Gradients of `count` queries and documents of 32 x 180 tokens."""

    path: str
    layout: str
    dtype: torch.dtype
    winners: torch.dtype
    packed: bool
    count: int = 8

    @property
    def name(self) -> str:
        kinds = [str(kind).removeprefix("torch.") for kind in (self.dtype, self.winners)]
        return ", ".join([self.path, self.layout, *kinds, *(["packed"] if self.packed else []), f"{self.count} documents"])


half, wide, brief, short, long = torch.float16, torch.float32, torch.bfloat16, torch.int16, torch.int32
BACKWARDS = (
    Backward("csr", "shared", half, short, False),
    Backward("csr", "shared", wide, long, False),
    Backward("csr", "shared", brief, long, True),
    Backward("unified", "shared", half, short, False),
    Backward("atomic", "shared", brief, long, True),
    Backward("csr", "per_query", half, short, False),
    Backward("csr", "pairs", wide, long, True),
)
# So many documents that lists of a document token may be long: they are cut into pieces.
LONG_LISTS = (
    Backward("csr", "shared", half, short, False, 64),
    Backward("csr", "shared", wide, long, False, 64),
    Backward("csr", "shared", brief, long, True, 64),
)
MANY_WINNERS = Backward("csr", "shared", half, short, False, 288)  # of a document: more than one program counts
CLOUDS = ((3, wide), (16, brief), (40, wide), (128, wide), (128, half), (256, half))  # d, dtype


class Caught(list[Any]):
    """Launches as Triton would see them."""

    def __call__(self, kernel: Any, grid: int, *arguments: Any, warps: int, **constants: Any) -> None:
        assert grid > 0
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        self.append(recorder.Launch(kernel, {name: given[name] for name in kernel.arg_names}, warps))


def backward_launches(case: Backward, architecture: int | str) -> list[Any]:
    """Everything that a backward would launch."""
    caught, count, size, tokens, width = Caught(), case.count, 32, 180, 128
    own = case.layout == "per_query"
    documents = torch.ones(*((count, 4) if own else (count,)), tokens, width, dtype=case.dtype)
    starts = torch.arange(count) * tokens if case.packed else None
    shape = (count, 4) if own else (count,) if case.layout == "pairs" else (count, count)
    with ExitStack() as patched:
        for module in (gradients, inverse_grid):
            patched.enter_context(mock.patch.object(module, "launch", caught))
        for module in (gradients, inverse_grid, saved):
            capability = recorder.CAPABILITIES[architecture]
            patched.enter_context(mock.patch.object(module, "hardware", return_value=(capability, PROCESSORS)))
        patched.enter_context(mock.patch.object(inverse_grid, "_accumulate", return_value=None))
        gradients.backward(
            torch.ones(shape), torch.zeros(*shape, size, dtype=case.winners),
            torch.ones(count, size, width, dtype=case.dtype), None,
            documents.flatten(0, 1) if case.packed else documents, starts, case.layout, True, True, case.path,
        )  # fmt: skip
    return caught


def contrast_launches(named: bool) -> list[Any]:
    """Everything that a contrastive loss and its gradient would launch beside `maxsim`'s kernels."""
    caught, scores = Caught(), torch.ones(128, 1100)
    positives = torch.arange(128) if named else None
    with mock.patch.object(contrast, "launch", caught):
        _, states = contrast.loss(scores, positives, 1.0)
        contrast.slopes(torch.tensor(1.0), contrast.Contrast(scores, positives, states, 1.0), torch.empty_like(scores))
    return caught


def chamfer_launches(d: int, dtype: torch.dtype, points: tuple[int, int], architecture: int | str) -> list[Any]:
    """Everything that a distance with nearest points and a backward of both clouds would launch."""
    caught = Caught()
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(nearest, "launch", caught))
        found = (recorder.CAPABILITIES[architecture], PROCESSORS)
        patched.enter_context(mock.patch.object(nearest, "hardware", return_value=found))
        p, q = (torch.ones(count, d, dtype=dtype) for count in points)
        nearest.forward(p, q, True)
        nearest.backward(torch.tensor(1.0), p, q, torch.zeros(sum(points), dtype=torch.int32), True, True)
    return caught


def keyed(name: str, launches: list[Any], architecture: int | str) -> dict[str, Any]:
    """Launches by their key in the record; kernels launched a second time have a number."""
    found: dict[str, Any] = {}
    seen: dict[str, int] = {}
    for launch in launches:
        kernel = launch.kernel.__name__
        seen[kernel] = seen.get(kernel, 0) + 1
        found[
            f"{recorder.architecture_name(architecture)} {name}: {kernel}" + (f" {seen[kernel]}" if seen[kernel] > 1 else "")
        ] = launch
    return found


def chamfer_name(d: int, dtype: torch.dtype) -> str:
    """A cloud's name in the record."""
    return f"Chamfer, d = {d}, {str(dtype).removeprefix('torch.')}"


def contrast_name(named: bool) -> str:
    """A loss's name in the record."""
    return f"contrastive loss, {'named positives' if named else 'in order'}"


def everything(architecture: int | str) -> dict[str, Any]:
    """Every launch that the record holds."""
    found: dict[str, Any] = {}
    for case in (*BACKWARDS, *LONG_LISTS, MANY_WINNERS):
        found |= keyed(case.name, backward_launches(case, architecture), architecture)
    for named in (False, True):
        found |= keyed(contrast_name(named), contrast_launches(named), architecture)
    for d, dtype in CLOUDS:
        found |= keyed(chamfer_name(d, dtype), chamfer_launches(d, dtype, (300, 200), architecture), architecture)
    return found


def compare(key: str, used: dict[str, int], record: dict[str, Any]) -> None:
    """Fail where a kernel takes more than the record says; under another Triton only where it spills more."""
    assert key in record["kernels"], f"{key}: not in {RECORD.name}; {__doc__}"
    known = record["kernels"][key]
    assert used["spill_bytes"] <= known["spill_bytes"], f"{key}: {used}, {known} recorded"
    if record["triton"] == triton.__version__:
        assert used["shared"] <= known["shared"], f"{key}: {used}, {known} recorded"
        # Registers are given out eight at a time.
        assert -(-used["registers"] // 8) <= -(-known["registers"] // 8), f"{key}: {used}, {known} recorded"


def main() -> None:
    kernels: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in recorder.RECORDED:
            for key, launch in everything(architecture).items():
                kernels[key] = recorder.resources(recorder.compiled(launch, architecture), Path(folder))
    recorder.write(RECORD, kernels)


if __name__ == "__main__":
    main()
