"""Runs texts through a model in batches limited by their tokens; tokens are put in order where the model runs, then copied once.

Batches are padded, the longest texts first, or not padded where the model takes that (`unpadded.py`).

To keep a GPU busy, the host never handles the tokens of single texts, and waits for the GPU only when a whole window (the texts
of one call) is launched. Meanwhile another thread may launch the next window (`ModelEncoder.at_once`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.crc.summed import Summed
from maxsim_eval.crc.summing import Summing
from maxsim_eval.encoders.memory import Halving
from maxsim_eval.encoders.refused_items import not_finite
from maxsim_eval.encoders.staging import Rooms, to_host
from maxsim_eval.encoders.unpadded import Ends, unpadded
from maxsim_kernels import Packed

TOKENS = {"cpu": 4096, "cuda": 262144}  # most of one batch, padding counted; a longer text is a batch of its own
Forward = Callable[[dict[str, Any]], tuple[Tensor, Tensor]]
"""A batch `[b, l]` of every feature -> embeddings `[b, l, d]` and which of them count `[b, l]` bool, all where the model runs."""


@dataclass(frozen=True)
class Read:
    """Texts as a model reads them: whole numbers `[n, L]` on the CPU, padded at one end (`left`: before the text)."""

    features: Mapping[str, Tensor]
    lengths: np.ndarray  # [n] int64, padding apart
    left: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)  # further arguments of every batch

    @staticmethod
    def of(features: Mapping[str, Tensor], used: Tensor, left: bool, others: Mapping[str, Any]) -> Read:
        """Features whose texts end (or begin) where `used`, `[n, L]` bool, is true for the last (first) time."""
        places = torch.arange(1, used.shape[1] + 1)
        lengths = (used * (places.flip(0) if left else places)).amax(1) if used.numel() else torch.zeros(len(used))
        return Read(features, lengths.numpy().astype(np.int64), left, others)

    def among(self, places: np.ndarray, items: int) -> Read:
        """The same texts as rows `places` of `items` rows; the other rows have no tokens."""
        lengths = np.zeros(items, np.int64)
        lengths[places] = self.lengths
        features = {name: values.new_zeros(items, values.shape[1]) for name, values in self.features.items()}
        for name, values in self.features.items():
            features[name][torch.from_numpy(places)] = values
        return Read(features, lengths, self.left, self.others)

    def part(self, span: slice) -> Read:
        """Texts that follow each other."""
        return Read({name: values[span] for name, values in self.features.items()}, self.lengths[span], self.left, self.others)

    def batch(self, rows: np.ndarray, device: torch.device) -> dict[str, Any]:
        """Features `[b, longest]` of the texts `rows` on a device, and `others`."""
        longest, place = int(self.lengths[rows].max()), torch.from_numpy(rows)
        if device.type == "cuda":  # whole eights, where there is room: attention kernels copy masks of other widths
            longest = min(-(-longest // 8) * 8, next(iter(self.features.values())).shape[1])
        found = dict(self.others)
        for name, values in self.features.items():
            part = values[place, values.shape[1] - longest :] if self.left else values[place, :longest]
            found[name] = _moved(part, device)
        return found

    def can_lie_unpadded(self) -> bool:
        """Whether the attention mask covers every token, so that texts may be concatenated without a mask."""
        mask = self.features.get("attention_mask")
        return mask is not None and int(mask[torch.from_numpy(self.lengths > 0)].sum()) == int(self.lengths.sum())

    def laid_out(self, first: int, device: torch.device) -> Row:
        """All texts concatenated, with position ids that begin at `first` in each; in pinned memory where the device is a GPU."""
        places = np.arange(next(iter(self.features.values())).shape[1])
        used = torch.from_numpy((places[::-1] if self.left else places) < self.lengths[:, None])
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        found = {name: values[used] for name, values in self.features.items()}
        found["position_ids"] = torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends[:-1], self.lengths) + first)
        return Row({name: _pinned(values, device) for name, values in found.items()}, ends, self.others)


@dataclass(frozen=True)
class Row:
    """Concatenated texts: features `[tokens]` on the CPU, `ends` `[n + 1]` from 0 on, further arguments of every batch."""

    features: Mapping[str, Tensor]
    ends: np.ndarray
    others: Mapping[str, Any]

    def batch(self, rows: np.ndarray, device: torch.device) -> tuple[dict[str, Any], Ends]:
        """Features `[1, tokens]` on a device of neighbouring texts `rows` (those without tokens left out), and where they end."""
        span = slice(int(self.ends[rows[0]]), int(self.ends[rows[-1] + 1]))
        found = dict(self.others)
        for name, values in self.features.items():
            found[name] = values[span][None].to(device, non_blocking=True)
        ends = np.append(self.ends[rows], span.stop) - span.start
        return found, Ends(_moved(torch.from_numpy(ends.astype(np.int32)), device), int(np.diff(ends).max()))


@dataclass(frozen=True)
class _Part:
    """What a batch of b texts gave; r is b, or 1 where they are concatenated."""

    values: Tensor  # [r, l, d]
    kept: Tensor  # [r, l] bool
    counts: Tensor  # [b] int64: tokens that count
    peaks: Tensor  # [b] float32: the largest magnitude among these


@dataclass(frozen=True)
class _Window:
    """What a window of n texts gave, on the CPU."""

    tokens: Tensor  # [T, d]
    counts: Tensor  # [n] int64: tokens of each text
    peaks: Tensor  # [n] float32: the largest magnitude among these
    sums: Tensor | None = None  # [T] int32, bits of uint32: what each token adds to a CRC-32


class TextBatches:
    """Runs a model over texts.

    Args:
        name: the encoder's, for messages.
        texts: the most in one batch; None: as many as `TOKENS` allows.
        computed, dtype: what the model computes in, and what is handed out.
    """

    def __init__(self, name: str, device: torch.device, texts: int | None, computed: torch.dtype, dtype: torch.dtype) -> None:
        self.name, self.device, self.texts, self.computed, self.dtype = name, device, texts, computed, dtype
        self.tokens = TOKENS[device.type]
        self.first_position: int | None = None  # of a text's tokens, if the model reads unpadded texts; None: pad them
        self._most: float = float("inf")  # tokens put together at once; lowered when memory runs out
        self._halving = Halving(name, device, "texts")
        self._rooms = Rooms()
        self._summing = Summing(device)
        self._turn = threading.Lock()  # one window is launched at a time: two would share the memory meant for one

    def expect(self, texts: int) -> None:
        """Announce that `texts` texts will come, a few of them first."""
        self._summing.expect(texts)

    def run(self, read: Read, dim: int, forward: Forward) -> Packed:
        """Tokens of all texts, in their order, on the CPU; a text of length 0 has none and is not run.

        Where many texts are expected, a GPU also sums the rows for their CRC-32s (`Summed`).

        Raises:
            UsageError: no memory even for one text. ItemError: NaN or infinity (names the text by its number).
        """
        found = self._window(read, dim, forward)
        self._require_finite(found.peaks)
        offsets = torch.zeros(len(found.counts) + 1, dtype=torch.int64)
        torch.cumsum(found.counts, 0, out=offsets[1:])
        if found.sums is None:
            return Packed(found.tokens, offsets)
        return Summed(found.tokens, offsets, found.sums.numpy().view(np.uint32).copy())  # pinned memory is soon wanted again

    def _window(self, read: Read, dim: int, forward: Forward) -> _Window:
        if len(read.lengths) > 1 and int(read.lengths.sum()) > self._most:
            return self._halves(read, dim, forward)
        first = self.first_position if read.can_lie_unpadded() else None
        row = None if first is None else read.laid_out(first, self.device)  # before the lock: a GPU waits for launches
        with (
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        ):  # a new thread begins on the first GPU
            with self._turn, _attention_without_plans(), torch.inference_mode():
                ended = None
                while ended is None:
                    ended = self._launched(read, row, dim, forward)
            return ended()

    def _halves(self, read: Read, dim: int, forward: Forward) -> _Window:
        """`_window` of texts whose embeddings do not fit into memory together."""
        half = len(read.lengths) // 2
        parts = [self._window(read.part(span), dim, forward) for span in (slice(half), slice(half, None))]
        # Without sums: those of the second half are relative to its own first token.
        return _Window(*(torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "counts", "peaks")))

    def _launched(self, read: Read, row: Row | None, dim: int, forward: Forward) -> Callable[[], _Window] | None:
        """Launch all batches of a window; a function that waits for its tokens. None: memory ran out; batches are smaller now.

        Where the batches fit but all their tokens together do not, that function does the window again in two halves.
        """
        order = np.arange(len(read.lengths)) if row is not None else np.argsort(-read.lengths, kind="stable")
        order = order[read.lengths[order] > 0]
        sizes = read.lengths[order]
        begin = size = 0
        parts: list[_Part] = []
        try:
            while begin < len(order):
                size = self._fitting(sizes[begin:], row is None)
                rows = order[begin : begin + size]
                parts.append(self._padded(read, rows, forward) if row is None else self._unpadded(row, rows, forward))
                begin += size
            return self._together(parts, order, len(read.lengths), dim)
        except RuntimeError as error:
            crowded = begin == len(order)
            size = len(order) if crowded else size
            self._halving.check(error, size, lambda: f"one text of {int(sizes[min(begin, len(order) - 1)])} tokens")
        parts.clear()  # outside the except clause, whose traceback keeps the failed batch's tensors
        self._halving.halve(size, depth=5)
        if crowded:  # smaller batches would leave as much to put together
            self._most = min(self._most, int(sizes.sum()) // 2)
            return lambda: self._halves(read, dim, forward)
        half = sizes[begin : begin + size // 2]
        self.tokens = int(half.sum() if row is not None else len(half) * half[0])
        return None

    def _fitting(self, sizes: np.ndarray, padded: bool) -> int:
        """Number of texts in the next batch: the first ones, as many as `tokens` allows, at least one."""
        if padded:
            fitting = self.tokens // int(sizes[0])
        else:  # batches of equal size: after a short last one the GPU would wait for the host
            ends = np.cumsum(sizes)
            fitting = int(np.searchsorted(ends, -(-ends[-1] // -(-ends[-1] // self.tokens)), side="right"))
        return min(max(1, fitting), len(sizes), self.texts or len(sizes))

    def _padded(self, read: Read, rows: np.ndarray, forward: Forward) -> _Part:
        values, kept = forward(read.batch(rows, self.device))
        return _Part(values.to(self.dtype), kept, kept.sum(1), _peaks(values, kept).amax(1))

    def _unpadded(self, row: Row, rows: np.ndarray, forward: Forward) -> _Part:
        batch, ends = row.batch(rows, self.device)
        with unpadded(ends):
            values, kept = forward(batch)
        lengths = ends.places.diff().long()
        # NaN becomes infinity, and infinity stays: a maximum could lose a NaN.
        peaks = _peaks(values, kept)[0].nan_to_num(torch.inf, posinf=torch.inf)
        # `unsafe` skips the checks of the lengths, which are right.
        counts = torch.segment_reduce(kept[0].float(), "sum", lengths=lengths, unsafe=True)
        peaks = torch.segment_reduce(peaks, "max", lengths=lengths, unsafe=True)
        return _Part(values.to(self.dtype), kept, counts.long(), peaks)

    def _together(self, parts: list[_Part], order: np.ndarray, texts: int, dim: int) -> Callable[[], _Window]:
        """Put every token in its place on the device; a function that waits for that and copies the window to the CPU."""
        rows = _moved(torch.from_numpy(order), self.device)
        counts = torch.zeros(texts, dtype=torch.int64, device=self.device)
        peaks = torch.zeros(texts, device=self.device)
        if parts:
            counts[rows] = torch.cat([part.counts for part in parts])
            peaks[rows] = torch.cat([part.peaks for part in parts])
        most = sum(part.kept.numel() for part in parts)
        tokens = torch.empty(most + 1, dim, dtype=self.dtype, device=self.device)  # the last row takes what does not count
        first = (counts.cumsum(0) - counts)[rows]
        begin = 0
        for part in parts:
            kept = part.kept
            place = first[begin : begin + len(kept), None] + kept.cumsum(1) - 1
            tokens.index_copy_(0, torch.where(kept, place, most).reshape(-1), part.values.reshape(-1, dim))
            begin += len(part.counts)
        sums = self._summing.of(tokens)
        if self.device.type == "cpu":
            count = int(counts.sum())
            return lambda: _Window(tokens[:count].clone(), counts, peaks, None if sums is None else sums[:count])
        small = [_to_pinned(each) for each in (counts, peaks, *([] if sums is None else [sums]))]
        done = torch.cuda.Event()
        done.record()

        def ended() -> _Window:
            done.synchronize()
            count = int(small[0].sum())
            host = to_host(tokens[:count], self._rooms)
            return _Window(host, small[0], small[1], None if sums is None else small[2][:count])

        return ended

    def _require_finite(self, peaks: Tensor) -> None:
        """Refuse NaN and infinity, judged by each text's peak: the model's own, or values that the output dtype cannot hold."""
        stored = peaks.to(self.dtype)
        if bool(torch.isfinite(stored).all()):
            return
        number = int((~torch.isfinite(stored)).nonzero()[0])
        raise not_finite(self.name, number, len(peaks), float(peaks[number]), self.computed, self.dtype)


def _peaks(values: Tensor, kept: Tensor) -> Tensor:
    """The largest magnitude in every token `[r, l]` float32; 0 for tokens that do not count, whatever they hold; NaN stays."""
    return values.abs().amax(2).float().masked_fill_(~kept, 0)


@contextmanager
def _attention_without_plans() -> Iterator[None]:
    """No attention by cuDNN: it builds a plan for every new shape, 20 ms each, and nearly every batch has a shape of its own."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """A copy of CPU values on a device; the host does not wait for it."""
    return _pinned(values, device).to(device, non_blocking=True)


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    """CPU values in pinned memory where the device is a GPU, so that the host need not wait for copies."""
    return values.pin_memory() if device.type == "cuda" else values


def _to_pinned(values: Tensor) -> Tensor:
    """A copy in pinned memory, which the host does not wait for."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
