"""Shapes of a launch: padded rows, flat token matrices, how many programs share the documents. Nothing here waits for the GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels.checks import Call

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
SCALES = {"none": 0, "token": 1, "document": 2, "corpus": 3}
MANY = 64  # documents a multiprocessor; with more, their programs hide each other's waits
SHORT_TOKENS = 64  # shorter documents are read in less time than a query's rows


OTHER = (0, 0)  # stands for the compute capability of anything that is no NVIDIA GPU


class Hardware(NamedTuple):
    """What decides how a GPU is used: its compute capability and its number of multiprocessors."""

    capability: tuple[int, int]
    processors: int


@lru_cache
def hardware(device: torch.device) -> Hardware:
    """Compute capability and multiprocessors, cached: asking the driver on every call would cost more than a launch.

    ROCm reports numbers of its own (9.4 for an MI300), which are no compute capability: `OTHER` is returned there.
    """
    if device.type != "cuda":
        return Hardware(OTHER, 1)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Hardware(OTHER if torch.version.hip else torch.cuda.get_device_capability(device), processors)


def has_descriptors(capability: tuple[int, int]) -> bool:
    """Whether the GPU reads tiles by tensor descriptors (TMA)."""
    return capability >= (9, 0)


def fp32_precision(dtype: torch.dtype) -> str:
    """How torch was told to multiply float32 on GPUs ("ieee" by default); "ieee" for other dtypes, whose products are exact."""
    if dtype != torch.float32:
        return "ieee"
    asked = torch.backends.cuda.matmul.fp32_precision
    asked = torch.backends.fp32_precision if asked == "none" else asked  # type: ignore[attr-defined]
    return "ieee" if asked == "none" else str(asked)


def allows_tf32(call: Call) -> bool:
    """Whether TF32 may be used for FP32 inputs: as the call says, else as torch's setting says (by default: no)."""
    if call.queries.dtype != torch.float32:
        return False
    return (call.fp32 or fp32_precision(torch.float32)) == "tf32"


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; Triton's own function takes the host microseconds, and every call asks several times."""
    return max(least, 1 << max(0, size - 1).bit_length())


def pitch(call: Call) -> int:
    """Rows of the flat token matrix from one dense document to the next."""
    return call.documents.stride(0) // call.documents.stride(1)


def flat_rows(call: Call) -> int:
    """Rows of the flat token matrix that holds every document."""
    documents = call.documents
    if documents.dim() == 2:
        return documents.shape[0]
    return (documents.shape[0] - 1) * (documents.stride(0) // max(1, documents.stride(1))) + documents.shape[1]


def flat_queries(queries: Tensor) -> Tensor:
    """Query tokens as rows `[R, d]`, a view where strides allow one."""
    return queries if queries.dim() == 2 else queries.reshape(-1, queries.shape[-1])


def byte_mask(mask: Tensor | None, unused: Tensor) -> Tensor:
    """A mask the kernels can read; `unused` where there is none."""
    if mask is None:
        return unused
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def descriptor(values: Tensor, rows: int, width: int, stride: int, block: list[int]) -> TensorDescriptor:
    """A tensor descriptor (TMA) of `rows` tokens of `width`, read in blocks."""
    return TensorDescriptor(values, [rows, width], [stride, 1], block)


def many_short(documents: int, tokens: int, processors: int) -> bool:
    """Whether documents are so many and so short that each program should take several, and read the query once for them."""
    return documents > MANY * processors and tokens < SHORT_TOKENS


def pieces_a_document(call: Call, tokens: int, programs: int) -> int:
    """Into how many pieces to cut each document so that few long ones fill the GPU; 1 where they are many or short."""
    processors = hardware(call.queries.device)[1]
    longest = call.documents.shape[-2]  # packed: the buffer, a bound
    if stay_whole(longest, tokens, programs, processors):
        return 1
    return max(1, min(triton.cdiv(processors, programs), triton.cdiv(longest, 4 * tokens), 64))


def stay_whole(longest: int, tokens: int, programs: int, processors: int) -> bool:
    """Whether documents are not cut into pieces: there are programs enough, or they are shorter than eight tiles of `tokens`."""
    return programs * 2 > processors or longest < 8 * tokens


def chunks_of(documents: int, tiles: int, groups: int, slots: int, waves: int) -> int:
    """How many programs share a query group's documents (of `tiles` tiles each), so that all fill up to `waves` whole waves.

    `slots`: programs that the GPU runs at once, a wave. One program beyond whole waves would run while the rest of the GPU waits.
    """
    best, least = 1, float("inf")
    for wave in range(waves, 0, -1):
        chunks = max(1, min(documents, slots * wave // groups))
        share = -(-documents // chunks)  # triton.cdiv takes microseconds on the host, and this runs for every new shape
        used = groups * -(-documents // share)
        cost = -(-used // slots) * (share * tiles + 3)  # a program loads its queries before its first tile
        if cost < least * 0.99:
            best, least = chunks, cost
    return best
