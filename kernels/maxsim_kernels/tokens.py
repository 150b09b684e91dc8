"""The ways token embeddings are held: ragged (`Packed`), INT8 (`Int8Tokens`) and FP8 (`Fp8Tokens`).

Constructors check shapes, dtypes and devices, and the values of offsets where those are on the CPU. On a GPU offsets and
lengths are clamped by the operators that read them, so building these types never waits for a GPU.

Source: paper section 'Variable-length corpora' (cu_seqlens offsets), section 'INT8' and appendix 'INT8 algorithm'.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Literal, Self, overload

import numpy as np
import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
Granularity = Literal["token", "document", "corpus"]
_REPEATING = 0.9  # share of distinct rows up to which they are worth gathering
_SLICE_BYTES = 8 << 20  # of 16-bit halves, widened to 64 bits, that are summed at once


def _require_index(name: str, tensor: Tensor, size: int | None, device: torch.device) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in INDEX_DTYPES or tensor.dim() != 1:
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: got {got}, need a 1-D int32 or int64 tensor")
    if size is not None and tensor.numel() != size:
        raise ValueError(f"{name}: got {tensor.numel()} entries, need {size}")
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, need the values' device {device}")


def distinct_rows(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """The distinct rows `[D, d]` of `values` `[R, d]`, by their bits, and which of them each row is; None where few repeat.

    Encoders whose vectors do not depend on the context (lexical ones, static embeddings) give a word one vector in all queries. A CPU
    is slow at products and quick at this, so the maxima of such a row are found once. `values`: in CPU memory, 2 bytes or more each.
    """
    count, width = values.shape
    if count < 2 or not width:
        return None
    bits = values.detach().contiguous().view(torch.uint8).numpy()
    halves = bits.view(np.uint16)
    factors = np.arange(1, halves.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    step = max(1, _SLICE_BYTES // factors.nbytes)
    slices = [slice(n, n + step) for n in range(0, count, step)]
    sums = np.concatenate([halves[part].astype(np.uint64) @ factors for part in slices])
    found, first, which = np.unique(sums, return_index=True, return_inverse=True)
    if len(found) > _REPEATING * count:  # so with most encoders; this look costs little
        return None
    if any((halves[part] != halves[first[which[part]]]).any() for part in slices):  # two rows have the same sum
        _, first, which = np.unique(bits.view(f"V{bits.shape[1]}")[:, 0], return_index=True, return_inverse=True)
    return values[torch.from_numpy(first)], torch.from_numpy(which)


def can_be_read(tensor: Tensor) -> bool:
    """Whether the tensor's numbers can be read: not under a compiler, nor where a fake tensor stands in for it."""
    return not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack() and type(tensor) is Tensor


class Packed:
    """Ragged token embeddings without padding: one `[T, d]` buffer and where each row of it belongs.

    Args:
        values: `[T, d]` tokens of all documents, one after the other; any strides.
        offsets: `[N + 1]` int32 or int64 on the values' device, starting at 0 and ending at T: document n is
            `values[offsets[n]:offsets[n + 1]]` (`cu_seqlens` of the flash-attention family).

    `Packed.view` makes one from starts and lengths instead, sharing storage with a larger buffer.
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._check_values(values)
        _require_index("offsets", offsets, None, values.device)
        if offsets.numel() < 1:
            raise ValueError("offsets: got 0 entries, need N + 1 (a single 0 for no documents)")
        if values.device.type == "cpu" and can_be_read(offsets):
            self._check_offsets(offsets, values.shape[0])  # on a GPU this would wait; the kernels clamp there
        self.values = values
        self.offsets: Tensor | None = offsets
        self.starts = offsets[:-1]
        self.lengths = offsets[1:] - offsets[:-1]

    @classmethod
    def view(cls, values: Tensor, starts: Tensor, lengths: Tensor) -> Packed:
        """Documents `values[starts[n]:starts[n] + lengths[n]]`, in any order, overlapping or not, without a copy."""
        cls._check_values(values)
        _require_index("starts", starts, None, values.device)
        _require_index("lengths", lengths, starts.numel(), values.device)
        packed = cls.__new__(cls)
        packed.values, packed.offsets, packed.starts, packed.lengths = values, None, starts, lengths
        return packed

    @staticmethod
    def _check_values(values: Tensor) -> None:
        if not isinstance(values, Tensor) or values.dim() != 2 or values.shape[1] < 1:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"values: got {got}, need a [tokens, d] tensor with d >= 1")

    @staticmethod
    def _check_offsets(offsets: Tensor, tokens: int) -> None:
        first, last = int(offsets[0]), int(offsets[-1])
        falls = (offsets[1:] < offsets[:-1]).nonzero()
        if first != 0 or last != tokens or falls.numel():
            at = f", falling at entry {int(falls[0]) + 1}" if falls.numel() else ""
            raise ValueError(
                f"offsets: got {first}..{last}{at}, need 0..{tokens} (the number of tokens), never decreasing; "
                "Packed.view takes rows of a larger buffer"
            )

    def _check_rows(self) -> None:
        first, count = self.starts.long(), self.lengths.long()
        bad = (first < 0) | (count < 0) | (count > self.values.shape[0] - first)
        if bool(bad.any()):
            row = int(bad.int().argmax())
            raise ValueError(
                f"rows: row {row} starts at {int(first[row])} and has {int(count[row])} tokens, need rows inside the "
                f"{self.values.shape[0]} tokens"
            )

    def __len__(self) -> int:
        return self.starts.numel()

    def __repr__(self) -> str:
        kind = "view" if self.offsets is None else "packed"
        return f"Packed({kind}, {len(self)} rows, values {list(self.values.shape)} {self.dtype} on {self.device})"

    def __getitem__(self, index: int) -> Tensor:
        """Tokens `[L, d]` of one document, sharing storage (reads two numbers: waits on a GPU)."""
        index = range(len(self))[operator.index(index)]
        start = int(self.starts[index])
        return self.values[start : start + int(self.lengths[index])]

    @property
    def dim(self) -> int:
        """Embedding width d."""
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of values and offsets."""
        return self.values.device

    def select(self, indices: Tensor | Sequence[int]) -> Packed:
        """Documents `indices` `[M]` in that order, as a view; negative or out-of-range indices raise `IndexError`."""
        chosen = torch.as_tensor(indices, device=self.device)
        if chosen.numel() == 0:
            chosen = chosen.to(torch.int64)
        if chosen.dim() != 1 or chosen.dtype not in INDEX_DTYPES:
            raise ValueError(f"indices: got {chosen.dtype} {list(chosen.shape)}, need 1-D int32 or int64")
        if chosen.numel() and (int(chosen.min()) < 0 or int(chosen.max()) >= len(self)):
            raise IndexError(f"indices: got values outside 0..{len(self) - 1}")
        return Packed.view(self.values, self.starts[chosen], self.lengths[chosen])

    def to(self, *args: object, **kwargs: object) -> Packed:
        """`torch.Tensor.to` on the values; starts and lengths follow the device only."""
        values = self.values.to(*args, **kwargs)  # type: ignore[call-overload]
        if self.offsets is not None:
            return Packed(values, self.offsets.to(values.device))
        return Packed.view(values, self.starts.to(values.device), self.lengths.to(values.device))

    def with_values(self, values: Tensor) -> Packed:
        """The same rows over another buffer with the same number of tokens (codes, another dtype)."""
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"values: got {values.shape[0]} tokens, need {self.values.shape[0]}")
        if self.offsets is not None:
            return Packed(values, self.offsets)
        return Packed.view(values, self.starts, self.lengths)

    def compact(self) -> Packed:
        """The same documents end to end: itself, or a copy of a view (waits on a GPU; on a CPU rows outside the values are refused)."""
        if self.offsets is not None:
            return self
        if self.values.device.type == "cpu" and can_be_read(self.starts):
            self._check_rows()
        offsets = torch.zeros(len(self) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(self.lengths, 0, out=offsets[1:])
        rows = torch.repeat_interleave(self.starts.long() - offsets[:-1], self.lengths.long())
        rows += torch.arange(rows.numel(), device=self.device)
        return Packed(self.values[rows], offsets)

    def document_of_token(self) -> Tensor:
        """`[T]` int64: which document each token belongs to; only for documents packed end to end."""
        if self.offsets is None:
            raise ValueError("document_of_token: a view may share tokens between documents; call .compact() first")
        numbers = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(numbers, self.lengths.long(), output_size=self.values.shape[0])


def pack(documents: Sequence[Tensor], *, dim: int | None = None, dtype: torch.dtype | None = None) -> Packed:
    """Concatenate token matrices into one `Packed`.

    Args:
        documents: tensors `[L_i, d]` of one dtype and device; L_i may be 0.
        dim, dtype: needed only where `documents` is empty (default dtype float32); else what they must be.

    Raises:
        ValueError: no list of such tensors, or they are not of this width and dtype.
    """
    if len(documents) == 0:
        if dim is None:
            raise ValueError("documents: got an empty list, need dim= to know the embedding width")
        return Packed(
            torch.empty(0, dim, dtype=dtype or torch.float32, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
        )
    if not all(isinstance(one, Tensor) for one in documents):
        found = sorted({type(one).__name__ for one in documents})
        raise ValueError(f"documents: got a list of {', '.join(found)}, need tensors [L, d]")
    lengths = lengths_of(documents)
    if lengths is None:
        raise ValueError(_other_kind(documents))
    if dim not in (None, documents[0].shape[1]) or dtype not in (None, documents[0].dtype):
        raise ValueError(
            f"dim, dtype: got {dim} and {dtype}, need None or those of the documents, {documents[0].shape[1]} and {documents[0].dtype}"
        )
    return joined(documents, lengths)


def lengths_of(matrices: Sequence[Tensor]) -> list[int] | None:
    """Lengths of token matrices `[L_i, d]`; None where they are not of one width, dtype and device.

    A list may have ten thousand items, and each question about one takes the host a tenth of a microsecond: each is asked once.
    """
    shapes = [one.shape for one in matrices]
    if set(map(len, shapes)) != {2} or len({shape[1] for shape in shapes}) != 1:
        return None
    if len({one.dtype for one in matrices}) != 1 or len({one.device for one in matrices}) != 1:
        return None
    return [shape[0] for shape in shapes]


def joined(rows: Sequence[Tensor], lengths: Sequence[int]) -> Packed:
    """Pack documents of these `lengths`, whose tokens follow each other in the matrices `rows` of one width, dtype and device."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    offsets[1:] = torch.tensor(lengths, device="cpu").cumsum(0)
    values = torch.cat(list(rows))
    return Packed(values, offsets.to(values.device))


def _other_kind(documents: Sequence[Tensor]) -> str:
    """What to say of the first item of a list that is no matrix, or not like the first one."""
    first = documents[0]
    width = first.shape[1] if first.dim() == 2 else "d"
    number, other = next(one for one in enumerate(documents) if lengths_of([first, one[1]]) is None)
    if other.dim() != 2 or other.shape[1] != width:
        return f"documents[{number}]: got {list(other.shape)}, need [L, {width}]"
    return f"documents[{number}]: got {other.dtype} on {other.device}, need {first.dtype} on {first.device}"


class _QuantizedTokens:
    """What INT8 and FP8 tokens share: codes (dense tensor or `Packed`), scales, granularity."""

    codes: Tensor | Packed
    scales: Tensor
    offset: Tensor | None = None
    granularity: Granularity
    _code_dtype: torch.dtype

    def _init(self, codes: Tensor | Packed, scales: Tensor, granularity: Granularity | None) -> None:
        values = codes.values if isinstance(codes, Packed) else codes
        if values.dtype != self._code_dtype or values.dim() < 2:
            raise ValueError(f"codes: got {values.dtype} {list(values.shape)}, need {self._code_dtype} [..., L, d]")
        if not isinstance(scales, Tensor):
            raise ValueError(f"scales: got {type(scales).__name__}, need a tensor")
        if scales.device != values.device:
            raise ValueError(f"scales: on {scales.device}, need the codes' device {values.device}")
        if not scales.dtype.is_floating_point:
            raise ValueError(f"scales: got {scales.dtype}, need a floating dtype")
        self.codes, self.scales = codes, scales
        self.granularity = granularity or self._infer_granularity()
        check_granularity(self.granularity)
        need = scale_shape(codes, self.granularity)
        if tuple(scales.shape) != need:
            raise ValueError(f"scales: got {list(scales.shape)}, need {list(need)} for granularity {self.granularity!r}")

    def _infer_granularity(self) -> Granularity:
        kinds: tuple[Granularity, ...] = ("token", "document", "corpus")
        shape = tuple(self.scales.shape)
        fits = [kind for kind in kinds if scale_shape(self.codes, kind) == shape]
        if not fits:
            raise ValueError(
                f"scales: got {list(shape)}, need {list(scale_shape(self.codes, 'token'))} (token), "
                f"{list(scale_shape(self.codes, 'document'))} (document) or [] (corpus)"
            )
        if {"token", "document"} <= set(fits) and isinstance(self.codes, Packed):
            raise ValueError(f"scales: {list(shape)} fits both tokens and documents; name granularity=")
        return fits[0]

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.codes.device

    @property
    def dim(self) -> int:
        """Embedding width d."""
        return self.codes.dim if isinstance(self.codes, Packed) else self.codes.shape[-1]

    def __len__(self) -> int:
        return len(self.codes)

    def _shares_tokens(self) -> bool:
        """Whether one token may belong to several documents with scales of their own: a view with document scales."""
        return isinstance(self.codes, Packed) and self.codes.offsets is None and self.granularity == "document"

    @property
    def token_values(self) -> Tensor:
        """The codes' tensor: `[..., L, d]`, or `[T, d]` where packed."""
        return self.codes.values if isinstance(self.codes, Packed) else self.codes

    def _per_token(self, values: Tensor) -> Tensor:
        return per_token(values, self.codes if isinstance(self.codes, Packed) else None, self.granularity)

    def over(self, codes: Tensor | Packed, take: Callable[[Tensor], Tensor] | None = None) -> Self:
        """Tokens of the same kind with other `codes`; `take` makes their scales and offset from the ones here (None: the same)."""
        scales, offset = (one if one is None or take is None else take(one) for one in (self.scales, self.offset))
        affine = {} if offset is None else {"offset": offset}
        return type(self)(codes, scales, granularity=self.granularity, **affine)  # type: ignore[call-arg]

    def _end_to_end(self) -> Self:
        assert isinstance(self.codes, Packed)
        return self.over(self.codes.compact())

    def select(self, indices: Tensor | Sequence[int]) -> Self:
        """Documents `indices` of packed codes, as a view; per-document scales are gathered."""
        if not isinstance(self.codes, Packed):
            raise ValueError("select: needs packed codes; index dense codes and scales directly")
        codes = self.codes.select(indices)
        if self.granularity != "document":
            return self.over(codes)
        chosen = torch.as_tensor(indices, device=self.device, dtype=torch.int64)
        return self.over(codes, lambda one: one[chosen])


def check_granularity(granularity: str) -> None:
    """Refuse a granularity that does not exist."""
    if granularity not in ("token", "document", "corpus"):
        raise ValueError(f"granularity: got {granularity!r}, need 'token', 'document' or 'corpus'")


def per_token(values: Tensor, packed: Packed | None, granularity: str) -> Tensor:
    """One value a token, document or corpus, spread over tokens (dense, or packed end to end), ready to broadcast over d."""
    if granularity == "token":
        return values.unsqueeze(-1)
    if granularity == "corpus":
        return values
    return values[packed.document_of_token()].unsqueeze(-1) if packed is not None else values[..., None, None]


def scale_shape(codes: Tensor | Packed, granularity: Granularity) -> tuple[int, ...]:
    """Shape of the scales of `codes`: `[T]` / `[..., L]` (token), `[N]` / `[...]` (document), `[]` (corpus)."""
    if granularity == "corpus":
        return ()
    if isinstance(codes, Packed):
        return (codes.values.shape[0],) if granularity == "token" else (len(codes),)
    return tuple(codes.shape[:-1]) if granularity == "token" else tuple(codes.shape[:-2])


class Int8Tokens(_QuantizedTokens):
    """INT8 token embeddings: a token is `codes * scale (+ offset)`.

    Args:
        codes: int8 `[B, Ld, d]` (any leading shape) or `Packed` of int8.
        scales: `[B, Ld]` | `[T]` (one a token), `[B]` | `[N]` (one a document) or `[]` (one for the corpus); FP16 by default. Those
            of a document or the corpus are applied after the maximum, so they must not be negative.
        offset: the same shape as `scales` for affine codes, None for symmetric ones.
        granularity: which of the three; inferred from the shape of `scales` where only one fits.
    """

    _code_dtype = torch.int8

    def __init__(
        self,
        codes: Tensor | Packed,
        scales: Tensor,
        offset: Tensor | None = None,
        granularity: Granularity | None = None,
    ) -> None:
        self._init(codes, scales, granularity)
        if offset is not None and (offset.shape != scales.shape or offset.device != scales.device):
            raise ValueError(f"offset: got {list(offset.shape)} on {offset.device}, need {list(scales.shape)} as scales")
        if offset is not None and not offset.dtype.is_floating_point:
            raise ValueError(f"offset: got {offset.dtype}, need a floating dtype")
        self.offset = offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor | Packed:
        """`codes * scale + offset` in float32 (float64 when asked for), rounded once to `dtype`."""
        if self._shares_tokens():
            return self._end_to_end().dequantize(dtype)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        tokens = self.token_values.to(work) * self._per_token(self.scales.to(work))
        if self.offset is not None:
            tokens = tokens + self._per_token(self.offset.to(work))
        tokens = tokens.to(dtype)
        return self.codes.with_values(tokens) if isinstance(self.codes, Packed) else tokens


class Fp8Tokens(_QuantizedTokens):
    """FP8 (e4m3) token embeddings: a token is `codes * scale`. As a rule one scale a document, which the inner loop never sees.

    Args:
        codes: float8_e4m3fn `[B, Ld, d]` (any leading shape) or `Packed` of it.
        scales: `[B]` | `[N]`, or `[B, Ld]` | `[T]`, or `[]`; FP16 by default.
        granularity: inferred from the shape of `scales` where only one fits.
    """

    _code_dtype = torch.float8_e4m3fn

    def __init__(self, codes: Tensor | Packed, scales: Tensor, granularity: Granularity | None = None) -> None:
        self._init(codes, scales, granularity)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor | Packed:
        """`codes * scale` in float32 (exact: 4 + 11 significant bits), rounded once to `dtype`."""
        if self._shares_tokens():
            return self._end_to_end().dequantize(dtype)
        tokens = (self.token_values.float() * self._per_token(self.scales.float())).to(dtype)
        return self.codes.with_values(tokens) if isinstance(self.codes, Packed) else tokens


@overload
def held_of(documents: Tensor | Packed | Int8Tokens | Fp8Tokens) -> Tensor | Packed: ...
@overload
def held_of(documents: object) -> object: ...
def held_of(documents: object) -> object:
    """What holds the tokens: documents as they are or, of quantised ones, their codes."""
    return documents.codes if isinstance(documents, _QuantizedTokens) else documents
