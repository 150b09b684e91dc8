"""Token embeddings in few bits, as they are stored: whole numbers with a scale a token (`BitTokens`), and ColBERTv2's residuals
(`ResidualTokens`). `maxsim` scores them as they are.

Codes of 1, 2 or 4 bits are packed into bytes along d, the first code in the highest bits; unused bits of a token's last byte may hold
anything. Constructors check shapes, dtypes and devices, and the values of centroid ids where those are on the CPU; on a GPU a token
whose id names no centroid scores NaN.

Source: Santhanam et al. 2022, ColBERTv2, section 3.3 (residuals); Max 1960, Quantizing for Minimum Distortion (equal steps).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maxsim_kernels.needs import need
from maxsim_kernels.tokens import FLOAT_DTYPES, Int8Tokens, Packed

BITS = (1, 2, 4)
ID_DTYPES = (torch.uint16, torch.int32, torch.int64)
_LEAST_NORM = 1e-12  # a token of zeros stays one, as in torch.nn.functional.normalize


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of a token of `dim` codes."""
    return -(-dim * bits // 8)


def unpacked(packed: Tensor, dim: int, bits: int) -> Tensor:
    """Codes `[T, dim]` uint8 of packed bytes `[T, packed_bytes(dim, bits)]`."""
    shifts = torch.arange(8 - bits, -1, -bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)[:, :dim]


def _check_codes(codes: Packed, size: int, bits: int, dim: int) -> None:
    need(isinstance(codes, Packed), "codes", type(codes).__name__, "Packed of uint8 [tokens, bytes]")
    need(codes.dtype == torch.uint8, "codes", codes.dtype, "torch.uint8")
    need(codes.dim == size, "codes", f"{codes.dim} bytes a token", f"{size} for {dim} codes of {bits} bits")


def _check_side(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check one of the tensors beside the codes."""
    need(isinstance(tensor, Tensor), name, type(tensor).__name__, "a tensor")
    need(tuple(tensor.shape) == shape, name, list(tensor.shape), list(shape))
    need(tensor.device == device, name, f"a tensor on {tensor.device}", f"one on the codes' device {device}")


def _taken(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    """Some rows of a tensor. torch cannot gather uint16, which is gathered as int16."""
    if isinstance(rows, Tensor) and tensor.dtype == torch.uint16:
        return tensor.view(torch.int16)[rows].view(torch.uint16)
    return tensor[rows]


@dataclass(frozen=True, eq=False)
class BitTokens:
    """Tokens of whole numbers: code c stands for the level `2 * c - (2**bits - 1)`, and a token is its levels times its scale.

    One bit is a sign. `maxsim` scores them as `Int8Tokens` of the same levels and scales (`as_int8`), to the same bits where queries
    are quantised.

    Args:
        codes: `Packed` of uint8 `[T, ceil(dim * bits / 8)]`.
        scales: `[T]` floating, FP16 as a rule.
        bits: 1, 2 or 4.
        dim: embedding width d.

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """

    codes: Packed
    scales: Tensor
    bits: int
    dim: int

    def __post_init__(self) -> None:
        need(isinstance(self.bits, int) and self.bits in BITS, "bits", self.bits, "1, 2 or 4")
        need(isinstance(self.dim, int) and self.dim >= 1, "dim", self.dim, "1 or more")
        _check_codes(self.codes, packed_bytes(self.dim, self.bits), self.bits, self.dim)
        _check_side("scales", self.scales, (self.codes.values.shape[0],), self.codes.device)
        need(self.scales.is_floating_point(), "scales", self.scales.dtype, "a floating dtype")

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def to(self, device: torch.device | str) -> BitTokens:
        """The same tokens on another device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def select(self, indices: Tensor | Sequence[int]) -> BitTokens:
        """Documents `indices` `[M]` in that order, as a view; negative or out-of-range indices raise `IndexError`."""
        return replace(self, codes=self.codes.select(indices))

    def as_int8(self) -> Int8Tokens:
        """The same tokens as INT8 codes with a scale a token: 8 / bits times the bytes."""
        return Int8Tokens(self.codes.with_values(levels_of(self, slice(None))), self.scales, granularity="token")

    def dequantize(self) -> Packed:
        """The tokens as float32: levels times scales."""
        found = self.as_int8().dequantize()
        assert isinstance(found, Packed)
        return found

    def rows(self, rows: Tensor | slice, codes: Packed) -> BitTokens:
        """The same with other `codes`, whose tokens are the tokens `rows` of this buffer."""
        return replace(self, codes=codes, scales=self.scales[rows])

    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """Every tensor by name, offsets aside."""
        return ("codes", self.codes.values), ("scales", self.scales)


@dataclass(frozen=True, eq=False)
class ResidualTokens:
    """ColBERTv2's tokens: `centroids[ids] + weights[codes]`, at length 1 where `unit` says so.

    Args:
        codes: `Packed` of uint8 `[T, ceil(d * bits / 8)]`: the bucket of every number of the residual, of 1, 2 or 4 bits.
        ids: `[T]` uint16, int32 or int64: the centroid of every token.
        centroids: `[C, d]` fp16, bf16 or fp32.
        weights: `[2**bits]` fp32: what a bucket adds.
        unit: whether tokens are brought to length 1 (zeros stay zeros).

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """

    codes: Packed
    ids: Tensor
    centroids: Tensor
    weights: Tensor
    unit: bool = True

    def __post_init__(self) -> None:
        held = isinstance(self.centroids, Tensor) and self.centroids.dim() == 2 and self.centroids.numel() > 0
        got = list(self.centroids.shape) if isinstance(self.centroids, Tensor) else type(self.centroids).__name__
        need(held, "centroids", got, "[C, d] with C >= 1 and d >= 1")
        need(self.centroids.dtype in FLOAT_DTYPES, "centroids", self.centroids.dtype, "float16, bfloat16 or float32")
        known = isinstance(self.weights, Tensor) and self.weights.shape in [(2**bits,) for bits in BITS]
        got = list(self.weights.shape) if isinstance(self.weights, Tensor) else type(self.weights).__name__
        need(known, "weights", got, "[2], [4] or [16]: one a bucket of 1, 2 or 4 bits")
        need(self.weights.dtype == torch.float32, "weights", self.weights.dtype, "torch.float32")
        _check_codes(self.codes, packed_bytes(self.dim, self.bits), self.bits, self.dim)
        device = self.codes.device
        _check_side("ids", self.ids, (self.codes.values.shape[0],), device)
        need(self.ids.dtype in ID_DTYPES, "ids", self.ids.dtype, "uint16, int32 or int64")
        _check_side("centroids", self.centroids, tuple(self.centroids.shape), device)
        _check_side("weights", self.weights, tuple(self.weights.shape), device)
        if device.type == "cpu" and self.ids.numel():  # on a GPU this would wait; such tokens score NaN there
            low, high = (int(end) for end in torch.aminmax(self.ids.to(torch.int64)))
            need(low >= 0 and high < len(self.centroids), "ids", f"{low}..{high}", f"0..{len(self.centroids) - 1}")

    @property
    def dim(self) -> int:
        """Embedding width d."""
        return self.centroids.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.weights.shape[0].bit_length() - 1

    @property
    def device(self) -> torch.device:
        """Device of codes, ids and codebooks."""
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def to(self, device: torch.device | str) -> ResidualTokens:
        """The same tokens on another device, codebooks too."""
        beside = {name: getattr(self, name).to(device) for name in ("ids", "centroids", "weights")}
        return replace(self, codes=self.codes.to(device), **beside)

    def select(self, indices: Tensor | Sequence[int]) -> ResidualTokens:
        """Documents `indices` `[M]` in that order, as a view; negative or out-of-range indices raise `IndexError`."""
        return replace(self, codes=self.codes.select(indices))

    def dequantize(self) -> Packed:
        """The tokens as float32, differentiable in the codebooks as the other types' are in their scales."""
        values = self.weights[unpacked(self.codes.values, self.dim, self.bits).int()]
        values += self.centroids[self.ids.long()].float()
        if self.unit:
            norms = torch.linalg.vector_norm(values, dim=1, keepdim=True).clamp_min(_LEAST_NORM)
            # In place, which saves memory as large as the tokens, unless the gradient needs them as they were.
            values = values / norms if values.requires_grad else values.div_(norms)
        return self.codes.with_values(values)

    def rows(self, rows: Tensor | slice, codes: Packed) -> ResidualTokens:
        """The same with other `codes`, whose tokens are the tokens `rows` of this buffer."""
        return replace(self, codes=codes, ids=_taken(self.ids, rows))

    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """Every tensor by name, offsets aside."""
        return ("codes", self.codes.values), ("ids", self.ids), ("centroids", self.centroids), ("weights", self.weights)


CodedTokens = BitTokens | ResidualTokens


def plain_of(documents: CodedTokens) -> Packed | Int8Tokens:
    """Coded tokens as paths without the kernel take them: INT8 levels with their scales, or the decoded values."""
    return documents.as_int8() if isinstance(documents, BitTokens) else documents.dequantize()


def levels_of(documents: BitTokens, span: slice) -> Tensor:
    """Levels int8 `[t, d]` of the tokens `span` of the buffer."""
    levels = unpacked(documents.codes.values[span], documents.dim, documents.bits).to(torch.int8)
    return levels.mul_(2).sub_(2**documents.bits - 1)


def coded_at(documents: ResidualTokens, span: slice) -> ResidualTokens:
    """The tokens `span` of the buffer, as one document."""
    held = documents.codes.values[span]
    return documents.rows(span, Packed(held, torch.tensor([0, len(held)], device=held.device)))


def coded_blocks(documents: CodedTokens, tokens: int) -> Iterator[CodedTokens]:
    """The documents in order, end to end, in blocks of at most `tokens` tokens or one document (reads lengths: waits on a GPU).

    One empty block where there are no documents.
    """
    starts, lengths = documents.codes.starts.tolist(), documents.codes.lengths.tolist()
    first = 0
    while first < len(lengths) or first == 0:
        last, held = first, 0
        while last < len(lengths) and (last == first or held + lengths[last] <= tokens):
            held += lengths[last]
            last += 1
        offsets = torch.tensor([0, *lengths[first:last]], device=documents.device).cumsum(0)
        rows: Tensor | slice
        if documents.codes.offsets is not None:
            begin = starts[first] if first < last else 0
            rows = slice(begin, begin + held)
        else:
            each = documents.codes.lengths[first:last].long()
            shift = documents.codes.starts[first:last].long() - offsets[:-1]
            rows = torch.repeat_interleave(shift, each, output_size=held) + torch.arange(held, device=documents.device)
        yield documents.rows(rows, Packed(documents.codes.values[rows], offsets))
        if last == first:
            return
        first = last
