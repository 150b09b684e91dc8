"""One shard of the embedding cache: an HDF5 file with the tokens of a range of documents, checked and never changed.

    offsets  [N + 1] int64: document n is values[offsets[n]:offsets[n + 1]]
    ids      [N]     UTF-8 strings of one fixed length, padded with NUL
    running_crc32 [S] uint32: after every `stripe_tokens` (its attribute) rows, the CRC-32 of all values so far (`stripes.py`);
                     earlier files have `crc32` instead, of every stripe by itself
    values   [T, d]  contiguous, page-aligned, uncompressed; float16, float32, or uint16 that holds bfloat16 bits
    attributes       format, key, shard, start, stop, dim, dtype, metadata_sha256

Embeddings barely compress, so values lie in the file as they lie in memory and are read at their offset straight into a
torch buffer, past HDF5 (several times faster for single documents than any other way), by any number of threads at once.
Metadata is proven by `metadata_sha256` whenever a shard is opened, values by their CRCs whenever they are read; a file that was
replaced, cut or written to after it was opened is refused (`hdf5.Stamp`).
"""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from maxsim_eval.cache.hdf5 import LIBVER, Stamp, damaged, fixed, open_hdf5, plain, read_at, reserve, structure, write_at
from maxsim_eval.cache.stripes import Claim, Stripes, add_crcs, running, stripe_rows
from maxsim_eval.crc.summed import Summed
from maxsim_eval.errors import CacheError, DataError
from maxsim_eval.files import atomic_path
from maxsim_eval.hashing import canonical, feed
from maxsim_kernels import Packed

FORMAT = "maxsim-eval/cache/1"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_RUNNING, _SINGLE = "running_crc32", "crc32"
_PAGE = 4096
# As signed numbers, bits of infinity and positive NaN are the largest; as unsigned ones, those of minus infinity and negative NaN.
_INFINITY = {
    torch.float16: (np.int16, 0x7C00, np.uint16, 0xFC00),
    torch.bfloat16: (np.int16, 0x7F80, np.uint16, 0xFF80),
    torch.float32: (np.int32, 0x7F800000, np.uint32, 0xFF800000),
}
_SCAN_BYTES = 1 << 20  # checked for NaN and summed at a time: a core's own cache holds it from the first pass to the third
_MAX_ID_BYTES = 4096  # ids take the length of the longest in their shard
_STORED: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}
# With the checksum these are 8, the most that HDF5 keeps in one piece: more would put something behind the values.
_ATTRIBUTES = ("format", "key", "shard", "start", "stop", "dim", "dtype")
_REMOVE = "Remove the file to encode its documents again."
_HDF5 = threading.Lock()  # h5py reads one thing at a time anyway; waiting here, other threads hold no decompressed chunks


@dataclass(frozen=True)
class ShardSpec:
    """What a shard must be: documents `start` to `stop` of entry `key`, tokens of width `dim` in `dtype` (a name)."""

    key: str
    shard: int
    start: int
    stop: int
    dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.dim * _STORED[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """An opened shard: metadata in memory, values on disk."""

    path: Path
    spec: ShardSpec
    offsets: np.ndarray = field(repr=False)  # [N + 1] int64
    crcs: np.ndarray = field(repr=False)  # [S] uint32, running
    stripe_tokens: int
    position: int | None  # byte of the file where values begin; None: only HDF5 can read them (chunked, compressed)
    metadata_sha256: str  # over everything but the values, their CRCs included: what tells one content from another
    stamp: Stamp = field(repr=False)  # of the file that was proven
    checked: bool = True  # whether values are proven whenever they are read

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return int(self.offsets[-1])

    def ids(self) -> list[str]:
        """Document ids, read from the file."""
        with open_hdf5(self.path, _REMOVE, self.stamp) as (file, _):
            return [text.decode() for text in structure(self.path, _REMOVE, lambda: _names(file))]

    def read(self, first: int, out: Tensor) -> None:
        """Fill `out` `[n, d]` (contiguous, CPU) with tokens `first` to `first + n`. Any number of threads may read at once.

        Raises:
            CacheError: a file that cannot be read, ends too early, is no longer the one that was opened, or does not hold the values
                that were written.
        """
        self.read_runs([first], [out.shape[0]], out)

    def read_runs(self, firsts: Sequence[int], counts: Sequence[int], out: Tensor, *, proven: bool = False) -> None:
        """As `read`, for several runs of tokens, one behind the other in `out`: `counts[r]` tokens from `firsts[r]` on.

        `proven`: they are not checked here, as somebody else compares them with their `claim`.
        """
        if not out.is_contiguous() or out.dtype != DTYPES[self.spec.dtype] or out.shape != (sum(counts), self.spec.dim):
            got = f"{out.dtype} {list(out.shape)}"
            raise ValueError(f"out: got {got}, need contiguous {DTYPES[self.spec.dtype]} {[sum(counts), self.spec.dim]}")
        for first, count in zip(firsts, counts, strict=True):
            if first < 0 or count < 0 or first + count > self.tokens:
                raise ValueError(f"{self.path}: got tokens {first} to {first + count}, need some of 0 to {self.tokens}")
        self._stripes.read(firsts, counts, _as_bytes(out).reshape(-1).data, checked=self.checked and not proven)

    @property
    def least_claimed(self) -> int:
        """As of `Stripes`."""
        return self._stripes.least_claimed

    def claim(self, column: str, place: int, first: int, count: int) -> Claim:
        """As of `Stripes`."""
        return self._stripes.claim(column, place, first, count)

    def verify(self) -> Iterator[int]:
        """Read and check everything: yields how many tokens each part had that is right, else raises `CacheError`."""
        return self._stripes.verify()

    @cached_property
    def _stripes(self) -> Stripes:
        fetch = self._read_hdf5 if self.position is None else self._read_at
        return Stripes(self.path, self.tokens, self.spec.row_bytes, self.stripe_tokens, self.crcs, fetch, _REMOVE)

    def _read_at(self, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        assert self.position is not None
        position, row = self.position, self.spec.row_bytes
        read_at(self.path, self.stamp, ((position + first * row, targets) for first, targets in parts))

    def _read_hdf5(self, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        with _HDF5, open_hdf5(self.path, _REMOVE, self.stamp) as (file, _):
            values = structure(self.path, _REMOVE, lambda: file["values"])
            for first, targets in parts:
                place = first
                for target in targets:
                    rows = np.frombuffer(target, _STORED[self.spec.dtype]).reshape(-1, self.spec.dim)
                    _read_rows(self.path, values, place, rows)
                    place += len(rows)


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"{number:05d}.h5"


def encode_ids(ids: Sequence[str]) -> list[bytes]:
    """Ids as UTF-8; a `DataError` for those that a shard cannot hold (NUL, lone surrogates, more than 4096 bytes)."""
    try:
        encoded = list(map(str.encode, ids))
    except UnicodeEncodeError as error:
        raise DataError(f"id {error.object!r}: holds a lone surrogate, which is not valid Unicode text") from error
    if b"\0" in b"".join(encoded):
        text = next(text for text in encoded if b"\0" in text)
        raise DataError(f"id {text.decode()!r}: holds a NUL character, which an HDF5 string cannot")
    longest = max(encoded, key=len, default=b"")
    if len(longest) > _MAX_ID_BYTES:
        raise DataError(f"id {longest.decode()[:40]!r}...: {len(longest)} bytes long, need at most {_MAX_ID_BYTES}")
    return encoded


def write_error(path: Path, need: int, error: OSError, *, folder: str = "cache", parts: str = "shards") -> CacheError:
    """The `CacheError` for a file that could not be written: the reason and, on a full disk, how much is needed.

    `folder` and `parts` name what the user chose and what is there already.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        return CacheError(
            f"{path}: the disk is full (or a quota is): the file needs {_size(need)}, {_size(free)} are free. "
            f"Make room or choose another {folder} folder; finished {parts} are kept, and the same command continues."
        )
    return CacheError(f"{path}: cannot be written: {error}")


def write_shard(path: Path, spec: ShardSpec, ids: Sequence[str], pieces: Iterable[Packed]) -> int:
    """Write one shard, whole or not at all; returns its number of tokens.

    Args:
        ids: the ids of documents `spec.start` to `spec.stop`.
        pieces: their tokens in order, in any number of `Packed`; dtype and width as in `spec`. Each is checked for NaN and summed
            when it comes, while the next is made; `Summed` ones were checked where they were made.

    Raises:
        CacheError: pieces that are not what `spec` says, or a file that cannot be written (disk full: what is needed).
        DataError: a NaN or infinite embedding of a piece that is not `Summed` (names the document), an id that HDF5 cannot hold.
    """
    names = encode_ids(ids)
    stripe_tokens = stripe_rows(spec.row_bytes)
    values, offsets, crcs = list[Tensor](), np.zeros(1, np.int64), np.zeros(0, np.uint32)
    for piece in pieces:
        part, rows = _checked(piece, spec)
        first = int(offsets[-1])
        offsets = np.concatenate([offsets, first + rows[1:]])
        values.append(part)
        crcs = np.append(crcs, np.zeros(-(-int(offsets[-1]) // stripe_tokens) - len(crcs), np.uint32))
        if isinstance(piece, Summed):
            _require_arrived(path, piece, stripe_tokens)
            piece.enter(crcs, first, stripe_tokens)
        else:
            _scan(part, first, crcs, stripe_tokens, offsets, ids)
    if len(offsets) - 1 != spec.stop - spec.start or len(names) != spec.stop - spec.start:
        got = f"{len(names)} ids and embeddings of {len(offsets) - 1}"
        raise CacheError(f"{path}: got {got} documents, need {spec.stop - spec.start} (documents {spec.start} to {spec.stop})")
    image, position, size = _image(spec, offsets, names, crcs, stripe_tokens)
    try:
        with atomic_path(path) as temporary:
            with open(temporary, "wb") as handle:
                handle.write(image)
                handle.truncate(size)
            write_at(temporary, position, [_as_bytes(part).reshape(-1).data for part in values])
    except OSError as error:
        raise write_error(path, size, error) from error
    return int(offsets[-1])


def open_shard(path: Path, spec: ShardSpec) -> tuple[Shard, list[bytes]]:
    """Open a shard and prove its metadata; returns it with its ids (UTF-8). Values are not read.

    Raises:
        CacheError: missing, not HDF5, truncated, damaged, of another format version, or not the shard `spec` describes.
    """
    with open_hdf5(path, _REMOVE) as (file, stamp):
        attributes = structure(path, _REMOVE, lambda: {name: plain(value) for name, value in file.attrs.items()})
        _require_format(path, attributes)
        offsets, names = structure(path, _REMOVE, lambda: (file["offsets"][:], _names(file)))
        kind = _SINGLE if _SINGLE in file else _RUNNING
        crcs, stripe_tokens = structure(path, _REMOVE, lambda: (file[kind][:], int(file[kind].attrs["stripe_tokens"])))
        shape, dtype, position = structure(path, _REMOVE, lambda: _layout(file["values"]))
    expected = attributes.pop("metadata_sha256", None)
    if set(attributes) != set(_ATTRIBUTES) or len(shape) != 2:
        found = f"values are {list(shape)}, attributes {', '.join(sorted(attributes))}"
        raise _damaged(path, f"{found}; need [tokens, dim] and {', '.join(_ATTRIBUTES)}")
    parts = (attributes, shape[0], kind, stripe_tokens, offsets, names, crcs)
    if structure(path, _REMOVE, lambda: _metadata_digest(*parts)) != expected:
        raise _damaged(path, "offsets, ids or attributes do not have the checksum they were written with")
    for name, need in asdict(spec).items():
        if attributes[name] != need:
            raise CacheError(f"{path}: not of this entry: {name} is {attributes[name]!r}, need {need!r}. {_REMOVE}")
    if shape[1] != spec.dim or dtype != _STORED[spec.dtype]:
        got = f"{list(shape)} {dtype}"
        raise _damaged(path, f"values are {got}, need {[shape[0], spec.dim]} {_STORED[spec.dtype]}")
    stripes = -(-shape[0] // stripe_tokens) if stripe_tokens > 0 else -1
    if offsets.shape != (spec.stop - spec.start + 1,) or offsets[0] or offsets[-1] != shape[0] or (np.diff(offsets) < 0).any():
        raise _damaged(path, f"its offsets do not cut {shape[0]} tokens into {spec.stop - spec.start} documents")
    if crcs.shape != (stripes,) or len(names) != spec.stop - spec.start:
        raise _damaged(
            path, f"holds {len(names)} ids and checksums {list(crcs.shape)}, need {spec.stop - spec.start} and [{stripes}]"
        )
    end = 0 if position is None else position + shape[0] * spec.row_bytes
    if stamp.size < end:
        raise CacheError(f"{path}: truncated: {stamp.size} bytes, need {end}. {_REMOVE}")
    if kind == _SINGLE:
        last = shape[0] - (len(crcs) - 1) * stripe_tokens
        crcs = running(crcs, stripe_tokens * spec.row_bytes, last * spec.row_bytes)
    if shape[0] == 0:
        position = 0  # nothing to read, at any place
    return Shard(path, spec, offsets.astype(np.int64), crcs, stripe_tokens, position, expected, stamp), names


def _damaged(path: Path, reason: str) -> CacheError:
    return damaged(path, reason, _REMOVE)


def _read_rows(path: Path, values: Any, first: int, target: np.ndarray) -> None:
    structure(path, _REMOVE, lambda: values.read_direct(target, source_sel=np.s_[first : first + len(target)]))


def _require_format(path: Path, attributes: dict[str, Any]) -> None:
    found = attributes.get("format")
    if not isinstance(found, str) or not found.startswith(FORMAT.rpartition("/")[0] + "/"):
        raise CacheError(f"{path}: an HDF5 file, but no embedding shard (format {found!r}, need {FORMAT!r})")
    if found != FORMAT:
        raise CacheError(f"{path}: format {found!r}, this version of maxsim-eval reads {FORMAT!r}. {_REMOVE}")


def _names(file: Any) -> list[bytes]:
    if file["ids"].dtype.kind != "S":
        raise TypeError(f"ids are {file['ids'].dtype}, need strings of a fixed length")
    return file["ids"][:].tolist()


def _layout(values: Any) -> tuple[tuple[int, ...], np.dtype, int | None]:
    return values.shape, values.dtype, values.id.get_offset()


def _as_bytes(tensor: Tensor) -> np.ndarray:
    """`[n, d]` contiguous CPU tokens as `[n, d * itemsize]` uint8, sharing memory (numpy has no bfloat16)."""
    rows, width = tensor.shape  # flat first: without tokens strides may be anything, which `view` refuses
    return tensor.reshape(-1).view(torch.uint8).numpy().reshape(rows, width * tensor.element_size())


def _checked(piece: Packed, spec: ShardSpec) -> tuple[Tensor, np.ndarray]:
    """Contiguous CPU values and int64 offsets of a piece that has the width and dtype of the entry."""
    if piece.dim != spec.dim or piece.dtype != DTYPES[spec.dtype]:
        got = f"dim {piece.dim}, {piece.dtype}"
        raise CacheError(f"embeddings of shard {spec.shard}: got {got}, need dim {spec.dim}, {DTYPES[spec.dtype]}")
    piece = piece.compact().to("cpu")  # checks the offsets of what comes from a GPU
    assert piece.offsets is not None  # compact() gives documents packed end to end
    return piece.values.detach().contiguous(), piece.offsets.numpy().astype(np.int64)


def _all_finite(rows: Tensor) -> bool:
    """Whether contiguous rows hold no NaN and no infinity, by their bits: two maxima, which write nothing."""
    bits = _as_bytes(rows).reshape(-1)
    signed, above, unsigned, below = _INFINITY[rows.dtype]
    return not len(bits) or bool(bits.view(signed).max() < above and bits.view(unsigned).max() < below)


def _scan(part: Tensor, first: int, crcs: np.ndarray, stripe_tokens: int, offsets: np.ndarray, ids: Sequence[str]) -> None:
    """Enter in `crcs` `[S]` the running CRC-32s of tokens from `first` on; NaN or infinity: `DataError` names the document."""
    row_bytes = part.shape[1] * part.element_size()
    step = max(1, _SCAN_BYTES // row_bytes)
    for rows in part.split(step):
        if not _all_finite(rows):
            token = first + int((~torch.isfinite(rows).all(dim=1)).nonzero()[0])
            document = int(np.searchsorted(offsets, token, side="right")) - 1
            name = repr(ids[document]) if document < len(ids) else f"document {document}"
            place = f"token {token - int(offsets[document])} of {name}"
            raise DataError(f"embeddings: {place} holds NaN or infinity, need finite numbers; nothing of it was stored")
        add_crcs(crcs, _as_bytes(rows), first, stripe_tokens)
        first += rows.shape[0]


def _require_arrived(path: Path, piece: Summed, stripe_tokens: int) -> None:
    """Refuse a piece whose first or last tokens are not those that were summed; damage to others is found when they are read."""
    count = len(piece.sums)
    few = min(count, stripe_tokens)
    for first in {0, count - few} if few else ():
        if zlib_ng.crc32(_as_bytes(piece.values[first : first + few]).data) != piece.crc(first, first + few):
            raise CacheError(
                f"{path}: tokens do not have the CRC-32 that the GPU made of them before they were copied: the memory, the link or the "
                "GPU is at fault; nothing of this shard was stored. The same command tries again."
            )


def _image(
    spec: ShardSpec, offsets: np.ndarray, names: Sequence[bytes], crcs: np.ndarray, stripe_tokens: int
) -> tuple[memoryview, int, int]:
    """The HDF5 file without its values, the byte where those begin, and the size of the whole file."""
    attributes, tokens = {"format": FORMAT, **asdict(spec)}, int(offsets[-1])
    digest = _metadata_digest(attributes, tokens, _RUNNING, stripe_tokens, offsets, names, crcs)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=LIBVER, alignment_threshold=_PAGE, alignment_interval=_PAGE) as file:
        file["offsets"] = offsets
        # Keeps a place for the name, so that values are the end of the file and the image ends before them.
        file["values"] = file["offsets"]
        file["ids"] = fixed(names)
        file[_RUNNING] = crcs
        file[_RUNNING].attrs["stripe_tokens"] = stripe_tokens
        for name, value in {**attributes, "metadata_sha256": digest}.items():
            file.attrs[name] = fixed([value.encode()])[0] if isinstance(value, str) else value
        position, size = reserve(file, "values", (tokens, spec.dim), _STORED[spec.dtype])
    return buffer.getbuffer(), position, size


def _metadata_digest(
    attributes: dict[str, Any],
    tokens: int,
    kind: str,
    stripe_tokens: int,
    offsets: np.ndarray,
    names: Sequence[bytes],
    crcs: np.ndarray,
) -> str:
    """SHA-256 over everything in a shard that is not values."""
    digest = hashlib.sha256()
    head = canonical([attributes, tokens, stripe_tokens, *([] if kind == _SINGLE else [kind])])
    feed(digest, [head, offsets.astype("<i8").tobytes(), crcs.astype("<u4").tobytes()])
    feed(digest, names)
    return digest.hexdigest()


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
