"""`inspect`: what a cache entry holds, read block by block; its quantised copies, and with `verify` every checksum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from maxsim_eval.bars import Bar
from maxsim_eval.cache.copies import missing_copies, quantised
from maxsim_eval.cache.copy_shards import KINDS, Kind, copy_name
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.errors import CacheError
from maxsim_eval.printing import shown
from maxsim_kernels import Packed

SCHEMA = "maxsim-eval/inspect/1"
NEAR_ONE = 1e-3
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Copy:
    """A quantised copy. `scales` is the smallest and the largest; `ratio` bytes of the entry's tokens for each of the copy's."""

    kind: str
    granularity: str
    affine: bool
    shards: int
    state: str  # complete, partial, or what is wrong with it
    file_bytes: int
    ratio: float | None = None
    scales: tuple[float, float] | None = None


@dataclass(frozen=True)
class Inspection:
    """What an entry holds. `norms` is None where no token is finite; `verified` says that every stored value was checked."""

    folder: str
    key: str
    documents: int
    tokens: int
    dim: int
    dtype: str
    shards: int
    file_bytes: int
    value_bytes: int
    lengths: Mapping[str, float]
    histogram: tuple[tuple[int, int, int], ...]  # (shortest, longest, documents), in powers of two
    norms: Mapping[str, float] | None
    zero_tokens: int
    nan_values: int
    inf_values: int
    copies: tuple[Copy, ...]
    provenance: Mapping[str, Any]
    verified: bool

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: no NaN, no infinity."""
        return {"schema": SCHEMA, **asdict(self)}

    def render(self, console: Console) -> None:
        """Print the figures, the histogram of lengths and the quantised copies."""
        console.print(shown(self.folder), style="bold", soft_wrap=True)
        table = Table(box=box.SIMPLE, show_header=False)
        for name, value in self._rows():
            table.add_row(shown(name), shown(value))
        console.print(table)
        lengths = Table("tokens", self._items, "", box=box.SIMPLE, title="lengths", title_justify="left")
        most = max((count for _, _, count in self.histogram), default=1)
        for low, high, count in self.histogram:
            bar = "#" * -(-40 * count // most)
            lengths.add_row(f"{low:,}" if low == high else f"{low:,} to {high:,}", f"{count:,}", bar)
        console.print(lengths)
        if self.copies:
            copies = Table("copy", "one scale a", "shards", "MB", "smaller", "scales", "", box=box.SIMPLE)
            for copy in self.copies:
                ratio = "" if copy.ratio is None else f"{copy.ratio:.2f}x"
                scales = "" if copy.scales is None else f"{copy.scales[0]:.3g} to {copy.scales[1]:.3g}"
                counted = f"{copy.shards} of {self.shards}"
                row = (copy.kind, copy.granularity, counted, f"{copy.file_bytes / 1e6:,.2f}", ratio, scales, copy.state)
                copies.add_row(*map(shown, row))
            console.print(copies)

    @property
    def _items(self) -> str:
        return "queries" if self.provenance.get("role") == "query" else "documents"

    def _rows(self) -> Iterator[tuple[str, str]]:
        said = self.provenance
        yield "made by", f"{said.get('encoder', '?')} {said.get('revision', '')} ({said.get('origin', 'unknown')})"
        yield "for", f"{said.get('source', '?')} {said.get('dataset', '?')}, role {said.get('role', '?')}"
        shards = "1 shard" if self.shards == 1 else f"{self.shards:,} shards"
        yield self._items, f"{self.documents:,} in {shards}, {self.file_bytes / 1e6:,.2f} MB"
        yield "tokens", f"{self.tokens:,} of {self.dim} x {self.dtype}, {self.value_bytes / 1e6:,.2f} MB"
        if self.documents:
            about = self.lengths
            yield "length", "min {min:g}, mean {mean:.1f}, median {median:g}, 95% {p95:g}, max {max:g}".format(**about)
        if self.norms is not None:
            yield "norms", "min {min:.5f}, mean {mean:.5f}, max {max:.5f}".format(**self.norms)
            yield f"norm within {NEAR_ONE:g} of 1", f"{self.norms['near_one']:.2%} of the tokens"
        yield "zero tokens", f"{self.zero_tokens:,}"
        yield "NaN, infinity", f"{self.nan_values:,}, {self.inf_values:,}"
        yield "checksums", "every stored value was checked" if self.verified else "metadata was checked (--verify reads all)"


class _Values:
    """What is counted over all tokens."""

    def __init__(self) -> None:
        self.zero = self.nan = self.inf = self.finite = self.near = 0
        self.low, self.high, self.sum = float("inf"), 0.0, 0.0

    def add(self, values: torch.Tensor) -> None:
        if not values.shape[0]:
            return
        # FP16 cannot overflow the sum of its squares in FP32; the others can.
        norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32 if values.dtype == torch.float16 else torch.float64)
        good = norms[torch.isfinite(norms)]
        if len(good) < len(norms):
            self.nan += int(torch.isnan(values).sum())
            self.inf += int(torch.isinf(values).sum())
        self.zero += int((values == 0).all(1).sum())
        if len(good):
            self.low, self.high = min(self.low, float(good.min())), max(self.high, float(good.max()))
            self.sum += float(good.sum(dtype=torch.float64))
            self.near += int(((good - 1).abs() <= NEAR_ONE).sum())
            self.finite += len(good)

    def norms(self) -> dict[str, float] | None:
        if not self.finite:
            return None
        return {"min": self.low, "mean": self.sum / self.finite, "max": self.high, "near_one": self.near / self.finite}


def inspect_entry(folder: Path | str, *, verify: bool = False, quiet: bool = False) -> Inspection:
    """Read a complete entry once; with `verify` check every CRC of it and of its copies first.

    Raises:
        CacheError: an entry that is missing, partial or damaged; with `verify` also stored values, of the entry or a copy. Without it
            a damaged copy is described, not refused.
    """
    entry = open_entry(folder)
    if verify:
        entry.verify(quiet=quiet)
    found = _Values()
    with Bar(total=entry.tokens, desc="inspect", unit=" tokens", unit_scale=True, disable=quiet) as bar:
        for block in entry.blocks(_BLOCK_BYTES):
            assert isinstance(block, Packed)
            found.add(block.values)
            bar.update(block.values.shape[0])
    lengths = entry.lengths()
    manifest = entry.manifest
    return Inspection(
        folder=str(entry.folder),
        key=manifest["key"],
        documents=entry.documents,
        tokens=entry.tokens,
        dim=entry.dim,
        dtype=manifest["dtype"],
        shards=len(entry.shards),
        file_bytes=sum(shard.stamp.size for shard in entry.shards),
        value_bytes=entry.tokens * entry.dim * entry.dtype.itemsize,
        lengths=_lengths(lengths),
        histogram=tuple(_histogram(lengths)),
        norms=found.norms(),
        zero_tokens=found.zero,
        nan_values=found.nan,
        inf_values=found.inf,
        copies=tuple(_copies(entry, verify, quiet)),
        provenance=manifest["provenance"],
        verified=verify,
    )


def _lengths(lengths: np.ndarray) -> dict[str, float]:
    if not len(lengths):
        return {}
    middle, most = np.percentile(lengths, [50, 95])
    return {
        "min": int(lengths.min()),
        "mean": float(lengths.mean()),
        "median": float(middle),
        "p95": float(most),
        "max": int(lengths.max()),
        "empty": int((lengths == 0).sum()),
    }


def _histogram(lengths: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Documents by length: 0, 1, 2 to 3, 4 to 7, ...; bins at both ends have documents."""
    bins = np.bincount(np.ceil(np.log2(lengths + 1.0)).astype(np.int64)) if len(lengths) else np.zeros(0, np.int64)
    first = int(np.flatnonzero(bins)[0]) if bins.any() else 0
    for number, count in enumerate(bins.tolist()[first:], first):
        yield (2 ** (number - 1) if number else 0), 2**number - 1, count


def _copies(entry: Entry, verify: bool, quiet: bool) -> Iterator[Copy]:
    for kind in KINDS.values():
        there = len(entry.shards) - len(missing_copies(entry, kind))
        if there:
            yield _copy(entry, kind, there, verify, quiet)


def _copy(entry: Entry, kind: Kind, there: int, verify: bool, quiet: bool) -> Copy:
    names = [entry.folder / copy_name(shard.spec.shard, kind) for shard in entry.shards]
    size = sum(path.stat().st_size for path in names if path.exists())
    about: dict[str, Any] = {
        "kind": kind.name,
        "granularity": kind.granularity,
        "affine": kind.affine,
        "shards": there,
        "file_bytes": size,
    }
    if there < len(entry.shards):
        return Copy(**about, state="partial: evaluate.py convert goes on with it")
    try:
        copy = quantised(entry, kind.name)
    except CacheError as error:
        if verify:
            raise
        return Copy(**about, state=str(error))
    assert copy is not None
    if verify:
        copy.verify(quiet=quiet)
    ranges = [found for shard in copy.shards if (found := shard.scale_range()) is not None]
    scales = (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None
    ratio = entry.tokens * entry.dim * entry.dtype.itemsize / copy.stored_bytes if entry.tokens else None
    return Copy(**about, state="complete", ratio=ratio, scales=scales)
