"""One quantised copy of a shard: an HDF5 file beside it (`00000.h5` -> `00000.int8-token.h5`), written once and never changed.

    codes    [T, d]  int8 (or uint8 that holds float8_e4m3fn bits), contiguous, on a page boundary, the end of the file
    scales   [T] (token), [N] (document) or [] (corpus), float16: a token is codes * scale
    offset   as scales; affine copies alone: codes * scale + offset
    errors   [N] float32, how far a document's codes are from its tokens at most, and norms [N], that of its longest token: both
             rounded up (`maxsim_kernels.search.Residuals`, what a certified search needs)
    running_crc32 [C, S] uint32, after every `stripe_tokens` (its attribute) rows of the codes, and of scales and offset (token)
    attributes       format, key, shard, dtype, granularity, source_sha256, entry_sha256, metadata_sha256

The float shard alone holds the ids, and which tokens belong to which document: its `metadata_sha256` is kept as `source_sha256`,
and with any other a copy is stale. A corpus scale comes from all shards: `entry_sha256` is over the checksums of all of them.
Codes and scales are those of `maxsim_kernels.quantize_int8` and `quantize_fp8`, to the last bit.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.hdf5 import LIBVER, Stamp, damaged, fixed, open_hdf5, plain, read_at, reserve, structure
from maxsim_eval.cache.shards import Shard, write_error
from maxsim_eval.cache.stripes import Claim, Stripes, add_crcs, stripe_rows
from maxsim_eval.errors import CacheError, DataError, UnknownNameError
from maxsim_eval.files import atomic_path
from maxsim_eval.hashing import canonical, digest, feed
from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, quantize_fp8, quantize_int8
from maxsim_kernels.search import Residuals

FORMAT = "maxsim-eval/quantised/3"
_CRCS = "running_crc32"
_PAGE = 4096
_SCALE = np.dtype("<f2")
_RESIDUALS = ("errors", "norms")
_BESIDE: dict[str, np.dtype[Any]] = {"scales": _SCALE, "offset": _SCALE, **dict.fromkeys(_RESIDUALS, np.dtype("<f4"))}
_CODES = {"int8": (np.dtype("<i1"), torch.int8), "float8_e4m3fn": (np.dtype("<u1"), torch.float8_e4m3fn)}
_ATTRIBUTES = ("format", "key", "shard", "dtype", "granularity", "source_sha256", "entry_sha256")
_REMOVE = "Remove the file, and run `evaluate.py convert` again."
Tokens = Int8Tokens | Fp8Tokens


@dataclass(frozen=True)
class Kind:
    """How tokens are quantised: the dtype of the codes, what one scale is for, and whether there is an offset."""

    dtype: Literal["int8", "float8_e4m3fn"]
    granularity: Literal["token", "document", "corpus"]
    affine: bool = False

    @property
    def name(self) -> str:
        """As the command line and file names have it: `int8-token`, `int8-document-affine`, `fp8-document`."""
        return f"{'int8' if self.dtype == 'int8' else 'fp8'}-{self.granularity}{'-affine' if self.affine else ''}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the codes in memory."""
        return _CODES[self.dtype][1]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that codes are decoded with."""
        return ("scales", "offset") if self.affine else ("scales",)

    def token_bytes(self, dim: int) -> int:
        """Bytes of a token: its codes and, where it has them, its own scale and offset."""
        return dim + (len(self.columns) * _SCALE.itemsize if self.granularity == "token" else 0)

    def document_bytes(self, tokens: float, dim: int) -> float:
        """Bytes of a document of this many tokens: theirs and, where it has them, its own scale and offset."""
        return tokens * self.token_bytes(dim) + (len(self.columns) * _SCALE.itemsize if self.granularity == "document" else 0)

    def quantise(self, tokens: Packed, scale: Tensor | None = None) -> Tokens:
        """Documents quantised this way; `scale` is the corpus's (`corpus_scale`). Errors as of `maxsim_kernels.quantize_int8`."""
        if self.dtype == "int8":
            return quantize_int8(tokens, self.granularity, affine=self.affine, scale=scale)
        return quantize_fp8(tokens, self.granularity)


# No affine corpus copy: the quantiser sees a part of the corpus at a time, and cannot be given the offset of the whole.
_KINDS = (
    Kind("int8", "token"),
    Kind("int8", "document"),
    Kind("int8", "corpus"),
    Kind("int8", "token", affine=True),
    Kind("int8", "document", affine=True),
    Kind("float8_e4m3fn", "document"),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}


def get_kind(name: str) -> Kind:
    """The kind of that name; `UnknownNameError` offers the nearest."""
    if name not in KINDS:
        raise UnknownNameError("quantised copy", name, KINDS)
    return KINDS[name]


def corpus_scale(absmax: float) -> Tensor:
    """The scale `[]` float16 that quantising a whole corpus of this largest magnitude at once would find."""
    return quantize_int8(torch.tensor([[absmax]]), "corpus").scales


def copy_name(number: int, kind: Kind) -> str:
    """File name of the quantised copy of a shard."""
    return f"{number:05d}.{kind.name}.h5"


@dataclass(frozen=True)
class Column:
    """A column of a copy that lies on the disk: a row for each token."""

    stripes: Stripes
    checked: bool

    def read_runs(self, firsts: Sequence[int], counts: Sequence[int], out: Tensor, *, proven: bool = False) -> None:
        """Fill `out` (contiguous, CPU) with `counts[r]` rows from `firsts[r]` on, one run behind the other; safe in several threads.

        `proven`: they are not checked here, as somebody else compares them with their `claim`.

        Raises:
            CacheError: a file that cannot be read, ends too early, or is no longer the one that was opened.
        """
        target = out.reshape(-1).view(torch.uint8).numpy().data
        self.stripes.read(firsts, counts, target, checked=self.checked and not proven)

    @property
    def least_claimed(self) -> int:
        """As of `Stripes`."""
        return self.stripes.least_claimed

    def claim(self, column: str, place: int, first: int, count: int) -> Claim:
        """As of `Stripes`."""
        return self.stripes.claim(column, place, first, count)


@dataclass(frozen=True)
class QuantisedShard:
    """An opened copy: codes, and scales and offsets of single tokens, are on the disk, the rest is in memory."""

    path: Path
    kind: Kind
    shard: Shard  # the float shard
    columns: dict[str, np.ndarray] = field(repr=False)  # errors, norms; scales (and offset), but those of single tokens
    places: dict[str, int] = field(repr=False)  # column on the disk -> byte of the file where it begins
    crcs: np.ndarray = field(repr=False)  # [C, S] uint32, running, a row for every one of `places`
    stripe_tokens: int
    metadata_sha256: str
    stamp: Stamp = field(repr=False)

    @cached_property
    def single(self) -> dict[str, Column]:
        """The columns on the disk, by name: codes, and scales and offset of single tokens."""
        return {name: Column(stripes, self.shard.checked) for name, stripes in self._stripes.items()}

    def residuals(self, rows: np.ndarray) -> Residuals:
        """How far the codes of documents `rows` are from their tokens (docs/search.md)."""
        return Residuals(*(torch.from_numpy(self.columns[name][rows]) for name in _RESIDUALS))

    def verify(self) -> Iterator[int]:
        """Read and check everything: yields how many tokens of codes each part had that is right, else raises `CacheError`."""
        for name, stripes in self._stripes.items():
            for count in stripes.verify():
                if name == "codes":
                    yield count

    @cached_property
    def _stripes(self) -> dict[str, Stripes]:
        found = {}
        for crcs, (name, place) in zip(self.crcs, self.places.items(), strict=True):
            row = self.shard.spec.dim if name == "codes" else _SCALE.itemsize
            fetch = partial(_read_at, self.path, self.stamp, place, row)
            found[name] = Stripes(self.path, self.shard.tokens, row, self.stripe_tokens, crcs, fetch, _REMOVE)
        return found

    def scale_range(self) -> tuple[float, float] | None:
        """Smallest and largest scale, those of empty documents left out; None where there is none."""
        if "scales" in self.columns:
            scales = self.columns["scales"].reshape(-1)
            scales = scales[np.diff(self.shard.offsets) > 0] if self.kind.granularity == "document" else scales
        else:
            scales = np.empty(self.shard.tokens, _SCALE)
            self._stripes["scales"].read([0], [len(scales)], scales.view(np.uint8).data, checked=self.shard.checked)
        return (float(scales.min()), float(scales.max())) if scales.size else None


def _read_at(path: Path, stamp: Stamp, place: int, row: int, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
    read_at(path, stamp, ((place + first * row, targets) for first, targets in parts))


def entry_digest(stamp: Any) -> str:
    """SHA-256 of an entry's stamp: what a corpus scale depends on."""
    return digest(stamp)


def write_copy(path: Path, shard: Shard, kind: Kind, entry_sha256: str, pieces: Iterable[tuple[Tokens, Residuals]]) -> int:
    """Write the copy of a shard, whole or not at all; in memory are a piece and the scales. Returns the bytes of the file.

    Args:
        entry_sha256: `entry_digest` of the whole entry; kept for a corpus scale.
        pieces: the shard's documents in order, quantised, and their residuals.

    Raises:
        DataError: a token that no FP16 scale can hold. CacheError: pieces that are not the shard's, a file that cannot be written.
    """
    tokens, dim, documents = shard.tokens, shard.spec.dim, len(shard.offsets) - 1
    head = _head(shard, kind, entry_sha256)
    stripe, own = stripe_rows(dim), len(kind.columns) if kind.granularity == "token" else 0
    crcs = np.zeros((1 + own, -(-tokens // stripe)), np.uint32)
    columns = {name: np.zeros(shape, _BESIDE[name]) for name, shape in _shapes(kind, tokens, documents).items()}
    # Where everything will lie: that depends on sizes alone.
    _, position, size = _image(head, tokens, dim, columns, crcs, stripe)
    try:
        with atomic_path(path) as temporary, open(temporary, "wb") as handle:
            handle.seek(position)
            seen = seen_documents = 0
            for piece, residuals in pieces:
                count = piece.token_values.shape[0]
                if seen + count > tokens or piece.dim != dim:
                    raise CacheError(f"{path}: got more tokens than the {tokens} of {shard.path.name}, or of another width")
                codes = piece.token_values.view(torch.uint8).numpy()
                handle.write(codes.data)
                add_crcs(crcs[0], codes, seen, stripe)
                for name, column in columns.items():
                    values = getattr(residuals if name in _RESIDUALS else piece, name).numpy()
                    first = seen_documents if name in _RESIDUALS or kind.granularity == "document" else seen
                    column[slice(first, first + len(values)) if column.ndim else ...] = values
                seen, seen_documents = seen + count, seen_documents + len(piece)
            if (seen, seen_documents) != (tokens, documents):
                raise CacheError(f"{path}: got {seen_documents} documents of {seen} tokens, need {documents} of {tokens}")
            _require_finite(path, columns["scales"], shard)
            for number, column in enumerate(list(columns.values())[:own], 1):
                add_crcs(crcs[number], column[:, None].view(np.uint8), 0, stripe)
            image, *place = _image(head, tokens, dim, columns, crcs, stripe)
            assert place == [position, size]
            assert not position or len(image) <= position
            handle.seek(0)
            handle.write(image)
            handle.truncate(size)
    except OSError as error:
        raise write_error(path, size, error, parts="copies") from error
    return size


def _shapes(kind: Kind, tokens: int, documents: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that is stored beside the codes."""
    scales = {"token": (tokens,), "document": (documents,), "corpus": ()}[kind.granularity]
    return {**dict.fromkeys(kind.columns, scales), **dict.fromkeys(_RESIDUALS, (documents,))}


def _head(shard: Shard, kind: Kind, entry_sha256: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "key": shard.spec.key,
        "shard": shard.spec.shard,
        "dtype": kind.dtype,
        "granularity": kind.granularity,
        "source_sha256": shard.metadata_sha256,
        "entry_sha256": entry_sha256 if kind.granularity == "corpus" else "",
    }


def _require_finite(path: Path, scales: np.ndarray, shard: Shard) -> None:
    if not np.isfinite(scales).all():
        token = int(np.flatnonzero(~np.isfinite(scales.reshape(-1)))[0])
        document = int(np.searchsorted(shard.offsets, token, side="right")) - 1  # only token scales: else the quantiser refuses
        raise DataError(
            f"{path}: document {shard.ids()[document]!r}: a token is too large for an FP16 scale; nothing was stored"
        )


def _image(
    head: dict[str, Any], tokens: int, dim: int, columns: dict[str, np.ndarray], crcs: np.ndarray, stripe: int
) -> tuple[memoryview, int, int]:
    """The HDF5 file without its codes, the byte where those begin, and the size of the whole file."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=LIBVER, alignment_threshold=_PAGE, alignment_interval=_PAGE) as file:
        file[_CRCS] = crcs
        file[_CRCS].attrs["stripe_tokens"] = stripe
        file["codes"] = file[_CRCS]  # keeps a place for the name, so that codes are the end of the file
        for name, values in columns.items():
            file[name] = values
        for name, value in {**head, "metadata_sha256": _digest(head, tokens, dim, stripe, crcs, columns)}.items():
            file.attrs[name] = fixed([value.encode()])[0] if isinstance(value, str) else value
        position, size = reserve(file, "codes", (tokens, dim), _CODES[head["dtype"]][0])
    return buffer.getbuffer(), position, size


def _digest(head: dict[str, Any], tokens: int, dim: int, stripe: int, crcs: np.ndarray, columns: dict[str, np.ndarray]) -> str:
    """SHA-256 over everything that the CRCs do not cover, and over the CRCs."""
    running = hashlib.sha256()
    kept = sorted(name for name in columns if name in _RESIDUALS or head["granularity"] != "token")  # others have CRCs
    feed(running, [canonical([head, tokens, dim, stripe, sorted(columns)]), crcs.astype("<u4").tobytes()])
    feed(running, [columns[name].astype(_BESIDE[name]).tobytes() for name in kept])
    return running.hexdigest()


def open_copy(path: Path, shard: Shard, kind: Kind, entry_sha256: str) -> QuantisedShard:
    """Open the copy of a shard and prove its metadata; codes are not read.

    Raises:
        CacheError: missing, not HDF5, truncated, damaged, of another format version, another shard's, or stale (`StaleCopyError`).
    """
    with open_hdf5(path, _REMOVE) as (file, stamp):
        head = structure(path, _REMOVE, lambda: {name: plain(value) for name, value in file.attrs.items()})
        _require_format(path, head)
        crcs, stripe, columns, shapes, places = structure(path, _REMOVE, lambda: _parts(file, head))
    expected = head.pop("metadata_sha256", None)
    if set(head) != set(_ATTRIBUTES) or len(shapes["codes"][0]) != 2:
        raise damaged(path, f"attributes are {', '.join(sorted(head))}, need {', '.join(_ATTRIBUTES)}", _REMOVE)
    tokens, dim = shapes["codes"][0]
    beside = {name: columns.get(name, np.zeros(0)) for name in shapes if name != "codes"}
    if structure(path, _REMOVE, lambda: _digest(head, tokens, dim, stripe, crcs, beside)) != expected:
        raise damaged(path, "scales, checksums or attributes do not have the checksum they were written with", _REMOVE)
    need = _head(shard, kind, entry_sha256)
    for name in ("key", "shard", "dtype", "granularity"):
        if head[name] != need[name]:
            raise CacheError(
                f"{path}: not the copy of {shard.path.name}: {name} is {head[name]!r}, need {need[name]!r}. {_REMOVE}"
            )
    for name, what in (("source_sha256", shard.path.name), ("entry_sha256", "the entry")):
        if head[name] != need[name]:
            raise StaleCopyError(f"{path}: stale: {what} has changed since it was converted. Run `evaluate.py convert` again.")
    _require_shapes(path, shapes, places, kind, shard, stamp)
    _require_stripes(path, crcs, len(places), stripe, shard.tokens)
    return QuantisedShard(path, kind, shard, columns, places, crcs, stripe, expected, stamp)


class StaleCopyError(CacheError):
    """A quantised copy of what a shard or its entry held before it changed, or a copy of an earlier format."""


def _require_format(path: Path, head: dict[str, Any]) -> None:
    found = head.get("format")
    if not isinstance(found, str) or not found.startswith(FORMAT.rpartition("/")[0] + "/"):
        raise CacheError(f"{path}: an HDF5 file, but no quantised shard (format {found!r}, need {FORMAT!r})")
    if found != FORMAT:
        raise StaleCopyError(
            f"{path}: stale: format {found!r}, this version of maxsim-eval reads {FORMAT!r}. Run `evaluate.py convert` again."
        )


def _parts(file: Any, head: dict[str, Any]) -> tuple[np.ndarray, int, dict[str, np.ndarray], dict[str, Any], dict[str, int]]:
    """CRCs, rows of a stripe, columns held in memory, shape and dtype of every column, and where those on the disk begin."""
    names = ["codes", *(name for name in _BESIDE if name in file)]
    single = head.get("granularity") == "token"
    outside = [name for name in names if name == "codes" or (single and name not in _RESIDUALS)]
    places = {name: file[name].id.get_offset() for name in outside}
    if any(place is None and file[name].size for name, place in places.items()):
        raise TypeError("codes or scales are chunked or compressed")
    columns = {name: np.asarray(file[name][()]) for name in names if name not in outside}
    shapes = {name: (file[name].shape, file[name].dtype) for name in names}
    held = {name: place or 0 for name, place in places.items()}  # None: nothing to read, at any place
    return file[_CRCS][:], int(file[_CRCS].attrs["stripe_tokens"]), columns, shapes, held


def _require_shapes(path: Path, shapes: dict[str, Any], places: dict[str, int], kind: Kind, shard: Shard, stamp: Stamp) -> None:
    tokens, dim, documents = shard.tokens, shard.spec.dim, len(shard.offsets) - 1
    beside = {name: (shape, _BESIDE[name]) for name, shape in _shapes(kind, tokens, documents).items()}
    need = {"codes": ((tokens, dim), _CODES[kind.dtype][0]), **beside}
    if shapes != need:
        raise damaged(path, f"holds {shapes}, need {need}", _REMOVE)
    for name, place in places.items():
        end = place + tokens * (dim if name == "codes" else _SCALE.itemsize)
        if stamp.size < end:
            raise CacheError(f"{path}: truncated: {stamp.size} bytes, need {end}. {_REMOVE}")


def _require_stripes(path: Path, crcs: np.ndarray, columns: int, stripe: int, tokens: int) -> None:
    if crcs.shape != (columns, -(-tokens // stripe) if stripe > 0 else -1):
        raise damaged(
            path, f"holds checksums {list(crcs.shape)} of stripes of {stripe} tokens, need those of {tokens} tokens", _REMOVE
        )
