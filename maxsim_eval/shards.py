"""One shard of the embedding cache: an HDF5 file with the tokens of a range of documents, checked and never changed.

    offsets  [N + 1] int64: document n is values[offsets[n]:offsets[n + 1]]
    ids      [N]     UTF-8 strings of one fixed length, padded with NUL
    crc32    [S]     uint32, one CRC-32 for every `stripe_tokens` (its attribute) rows of values
    values   [T, d]  contiguous, page-aligned, uncompressed; float16, float32, or uint16 that holds bfloat16 bits
    attributes       format, key, shard, start, stop, dim, dtype, metadata_sha256

Embeddings barely compress, so values lie in the file as they lie in memory and are read at their offset straight into a
torch buffer, past HDF5 (several times faster for single documents than any other way). Metadata is proven by
`metadata_sha256` whenever a shard is opened, values by `Shard.verify`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from maxsim_eval.errors import CacheError, DataError
from maxsim_eval.files import atomic_path
from maxsim_eval.hashing import canonical, feed
from maxsim_kernels import Packed

FORMAT = "maxsim-eval/cache/1"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STRIPE_BYTES = 16 << 20
_PAGE = 4096
_MAX_ID_BYTES = 4096  # ids take the length of the longest in their shard
_STORED: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# With the checksum these are 8, the most that HDF5 keeps in one piece: more would put something behind the values.
_ATTRIBUTES = ("format", "key", "shard", "start", "stop", "dim", "dtype")
# Object headers of HDF5 1.8 and later carry checksums, so a damaged structure is found by the library itself.
_LIBVER = ("v108", "v108")
# What h5py raises when a file's structure does not hold what it says.
_READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)

ReadTokens = Callable[[int, Tensor], None]


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
    crcs: np.ndarray = field(repr=False)  # [S] uint32
    stripe_tokens: int
    position: int | None  # byte of the file where values begin; None: only HDF5 can read them (chunked, compressed)

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return int(self.offsets[-1])

    def ids(self) -> list[str]:
        """Document ids, read from the file."""
        with _reading(self.path) as file:
            return [text.decode() for text in _structure(self.path, lambda: _names(file))]

    @contextmanager
    def opened(self) -> Iterator[ReadTokens]:
        """Yield `read(first, out)`, which fills `out` `[n, d]` (contiguous, CPU) with tokens `first` to `first + n`."""
        if self.position is None:
            with _reading(self.path) as file:
                yield lambda first, out: self._read_hdf5(file, first, out)
            return
        try:
            handle = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by the block below)
        except OSError as error:
            raise CacheError(f"{self.path}: cannot be opened: {error}") from error
        with handle:
            yield lambda first, out: self._read_raw(handle, first, out)

    def _read_hdf5(self, file: Any, first: int, out: Tensor) -> None:
        if out.shape[0]:
            target = _as_bytes(out).view(_STORED[self.spec.dtype])
            rows = np.s_[first : first + out.shape[0]]
            _structure(self.path, lambda: file["values"].read_direct(target, source_sel=rows))

    def _read_raw(self, handle: Any, first: int, out: Tensor) -> None:
        rest = _as_bytes(out).reshape(-1).data
        try:
            handle.seek((self.position or 0) + first * self.spec.row_bytes)
            while rest:
                count = handle.readinto(rest)
                if not count:
                    raise CacheError(f"{self.path}: truncated: the file ends {len(rest)} bytes too early. {_REMOVE}")
                rest = rest[count:]
        except OSError as error:
            raise CacheError(f"{self.path}: cannot be read: {error}") from error

    def verify(self) -> Iterator[int]:
        """Check the CRC of every stripe: yields the tokens of each one that is right, else raises `CacheError`."""
        buffer = torch.empty(min(self.stripe_tokens, self.tokens), self.spec.dim, dtype=DTYPES[self.spec.dtype])
        with self.opened() as read:
            for number, crc in enumerate(self.crcs.tolist()):
                first = number * self.stripe_tokens
                stripe = buffer[: min(self.stripe_tokens, self.tokens - first)]
                read(first, stripe)
                if zlib.crc32(_as_bytes(stripe).data) != crc:
                    last = first + stripe.shape[0] - 1
                    raise _damaged(self.path, f"tokens {first} to {last} do not have the CRC-32 they were written with")
                yield stripe.shape[0]


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"{number:05d}.h5"


def encode_ids(ids: Sequence[str]) -> list[bytes]:
    """Ids as UTF-8; a `DataError` for those that a shard cannot hold (NUL, lone surrogates, more than 4096 bytes)."""
    try:
        encoded = [text.encode() for text in ids]
    except UnicodeEncodeError as error:
        raise DataError(f"id {error.object!r}: holds a lone surrogate, which is not valid Unicode text") from error
    for text in encoded:
        if b"\0" in text:
            raise DataError(f"id {text.decode()!r}: holds a NUL character, which an HDF5 string cannot")
        if len(text) > _MAX_ID_BYTES:
            raise DataError(f"id {text.decode()[:40]!r}...: {len(text)} bytes long, need at most {_MAX_ID_BYTES}")
    return encoded


def write_error(path: Path, need: int, error: OSError) -> CacheError:
    """The `CacheError` for a file that could not be written: the reason and, on a full disk, how much is needed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        return CacheError(
            f"{path}: the disk is full (or a quota is): the file needs {_size(need)}, {_size(free)} are free. "
            "Make room or choose another cache folder; finished shards are kept, and the same command continues."
        )
    return CacheError(f"{path}: cannot be written: {error}")


def write_shard(path: Path, spec: ShardSpec, ids: Sequence[str], pieces: Sequence[Packed]) -> int:
    """Write one shard, whole or not at all; returns its number of tokens.

    Args:
        ids: the ids of documents `spec.start` to `spec.stop`.
        pieces: their tokens in order, in any number of `Packed`; dtype and width as in `spec`.

    Raises:
        CacheError: pieces that are not what `spec` says, or a file that cannot be written (disk full: what is needed).
        DataError: a NaN or infinite embedding (names the document), an id that HDF5 cannot hold.
    """
    names = encode_ids(ids)
    parts = [_checked(piece, spec) for piece in pieces]
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(rows) for _, rows in parts)])
    offsets = np.cumsum(lengths, dtype=np.int64)
    if len(offsets) - 1 != spec.stop - spec.start or len(names) != spec.stop - spec.start:
        got = f"{len(names)} ids and embeddings of {len(offsets) - 1}"
        raise CacheError(f"{path}: got {got} documents, need {spec.stop - spec.start} (documents {spec.start} to {spec.stop})")
    values = [part for part, _ in parts]
    stripe_tokens = max(1, STRIPE_BYTES // spec.row_bytes)
    crcs = _scan(values, offsets, ids, stripe_tokens)
    tokens = int(offsets[-1])
    image, position, size = _image(spec, offsets, names, crcs, stripe_tokens)
    try:
        with atomic_path(path) as temporary, open(temporary, "wb") as handle:
            handle.write(image)
            handle.seek(position)
            for part in values:
                handle.write(_as_bytes(part).data)
            handle.truncate(size)
    except OSError as error:
        raise write_error(path, size, error) from error
    return tokens


def open_shard(path: Path, spec: ShardSpec) -> tuple[Shard, list[bytes]]:
    """Open a shard and prove its metadata; returns it with its ids (UTF-8). Values are not read.

    Raises:
        CacheError: missing, not HDF5, truncated, damaged, of another format version, or not the shard `spec` describes.
    """
    with _reading(path) as file:
        attributes = _structure(path, lambda: {name: _plain(value) for name, value in file.attrs.items()})
        _require_format(path, attributes)
        offsets, crcs, names = _structure(path, lambda: (file["offsets"][:], file["crc32"][:], _names(file)))
        stripe_tokens = _structure(path, lambda: int(file["crc32"].attrs["stripe_tokens"]))
        shape, dtype, position = _structure(path, lambda: _layout(file["values"]))
    expected = attributes.pop("metadata_sha256", None)
    if set(attributes) != set(_ATTRIBUTES) or len(shape) != 2:
        found = f"values are {list(shape)}, attributes {', '.join(sorted(attributes))}"
        raise _damaged(path, f"{found}; need [tokens, dim] and {', '.join(_ATTRIBUTES)}")
    parts = (attributes, shape[0], stripe_tokens, offsets, names, crcs)
    if _structure(path, lambda: _metadata_digest(*parts)) != expected:
        raise _damaged(path, "offsets, ids or attributes do not have the checksum they were written with")
    for name, need in asdict(spec).items():
        if attributes[name] != need:
            raise CacheError(f"{path}: not of this entry: {name} is {attributes[name]!r}, need {need!r}. {_REMOVE}")
    if shape[1] != spec.dim or dtype != _STORED[spec.dtype]:
        got = f"{list(shape)} {dtype}"
        raise _damaged(path, f"values are {got}, need {[shape[0], spec.dim]} {_STORED[spec.dtype]}")
    end = 0 if position is None else position + shape[0] * spec.row_bytes
    if (size := path.stat().st_size) < end:
        raise CacheError(f"{path}: truncated: {size} bytes, need {end}. {_REMOVE}")
    if shape[0] == 0:
        position = 0  # nothing to read, at any place
    return Shard(path, spec, offsets.astype(np.int64), crcs, stripe_tokens, position), names


_REMOVE = "Remove the file to encode its documents again."


def _damaged(path: Path, reason: str) -> CacheError:
    return CacheError(f"{path}: damaged: {reason}. {_REMOVE}")


def _require_format(path: Path, attributes: dict[str, Any]) -> None:
    found = attributes.get("format")
    if not isinstance(found, str) or not found.startswith(FORMAT.rpartition("/")[0] + "/"):
        raise CacheError(f"{path}: an HDF5 file, but no embedding shard (format {found!r}, need {FORMAT!r})")
    if found != FORMAT:
        raise CacheError(f"{path}: format {found!r}, this version of maxsim-eval reads {FORMAT!r}. {_REMOVE}")


def _structure(path: Path, read: Callable[[], Any]) -> Any:
    """`read()`; where HDF5 or h5py stumbles over the file's structure, a `CacheError`."""
    try:
        return read()
    except _READ_ERRORS as error:
        raise _damaged(path, f"HDF5 cannot read it ({error})") from error


def _names(file: Any) -> list[bytes]:
    if file["ids"].dtype.kind != "S":
        raise TypeError(f"ids are {file['ids'].dtype}, need strings of a fixed length")
    return file["ids"][:].tolist()


def _fixed(texts: Sequence[bytes]) -> np.ndarray:
    """UTF-8 strings of one length. Never HDF5's variable-length ones: damage in their heap makes HDF5 hang."""
    width = max((len(text) for text in texts), default=0)
    return np.array(texts, dtype=h5py.string_dtype("utf-8", max(width, 1)))


def _layout(values: Any) -> tuple[tuple[int, ...], np.dtype, int | None]:
    return values.shape, values.dtype, values.id.get_offset()


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The HDF5 file opened for reading; what cannot be opened is a `CacheError` with the reason."""
    try:
        with open(path, "rb") as handle:
            start = handle.read(len(_SIGNATURE))
        if start != _SIGNATURE:
            raise CacheError(f"{path}: not an HDF5 file (begins with {start!r}). {_REMOVE}")
        # Finished shards never change, so HDF5's own lock guards nothing (and fails on some network file systems).
        file = h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise CacheError(f"{path}: missing") from error
    except OSError as error:
        if "truncated" in str(error):
            raise CacheError(f"{path}: truncated: {path.stat().st_size} bytes are not the whole file. {_REMOVE}") from error
        raise CacheError(f"{path}: cannot be opened: {error}. {_REMOVE}") from error
    with file:
        yield file


def _as_bytes(tensor: Tensor) -> np.ndarray:
    """`[n, d]` contiguous CPU tokens as `[n, d * itemsize]` uint8, sharing memory (numpy has no bfloat16)."""
    return tensor.view(torch.uint8).numpy()


def _checked(piece: Packed, spec: ShardSpec) -> tuple[Tensor, np.ndarray]:
    """Contiguous CPU values and int64 offsets of a piece that has the width and dtype of the entry."""
    if piece.dim != spec.dim or piece.dtype != DTYPES[spec.dtype]:
        got = f"dim {piece.dim}, {piece.dtype}"
        raise CacheError(f"embeddings of shard {spec.shard}: got {got}, need dim {spec.dim}, {DTYPES[spec.dtype]}")
    piece = piece.compact().to("cpu")  # checks the offsets of what comes from a GPU
    assert piece.offsets is not None  # compact() gives documents packed end to end
    return piece.values.detach().contiguous(), piece.offsets.numpy().astype(np.int64)


def _scan(parts: Sequence[Tensor], offsets: np.ndarray, ids: Sequence[str], stripe_tokens: int) -> np.ndarray:
    """CRC-32 of every stripe, `[S]` uint32; a NaN or infinity is a `DataError` that names the document."""
    crcs = np.zeros(-(-int(offsets[-1]) // stripe_tokens), np.uint32)
    first = 0
    for part in parts:
        rest = part
        while rest.shape[0]:
            rows, rest = rest.tensor_split((stripe_tokens - first % stripe_tokens,))
            # Smallest and largest keep a NaN, and cost a tenth of isfinite over everything.
            if not bool(torch.isfinite(torch.stack(torch.aminmax(rows))).all()):
                token = first + int((~torch.isfinite(rows).all(dim=1)).nonzero()[0])
                document = int(np.searchsorted(offsets, token, side="right")) - 1
                place = f"token {token - int(offsets[document])} of {ids[document]!r}"
                raise DataError(f"embeddings: {place} holds NaN or infinity, need finite numbers; nothing of it was stored")
            stripe = first // stripe_tokens
            crcs[stripe] = zlib.crc32(_as_bytes(rows).data, int(crcs[stripe]))
            first += rows.shape[0]
    return crcs


def _image(
    spec: ShardSpec, offsets: np.ndarray, names: Sequence[bytes], crcs: np.ndarray, stripe_tokens: int
) -> tuple[memoryview, int, int]:
    """The HDF5 file without its values, the byte where those begin, and the size of the whole file.

    HDF5 writes into memory, never to the disk: on a full disk it cannot close its file, and may end the process.
    """
    attributes, tokens = {"format": FORMAT, **asdict(spec)}, int(offsets[-1])
    digest = _metadata_digest(attributes, tokens, stripe_tokens, offsets, names, crcs)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=_LIBVER, alignment_threshold=_PAGE, alignment_interval=_PAGE) as file:
        file["offsets"] = offsets
        # Keeps a place for the name, so that values are the end of the file and the image ends before them.
        file["values"] = file["offsets"]
        file["ids"] = _fixed(names)
        file["crc32"] = crcs
        file["crc32"].attrs["stripe_tokens"] = stripe_tokens
        for name, value in {**attributes, "metadata_sha256": digest}.items():
            file.attrs[name] = _fixed([value.encode()])[0] if isinstance(value, str) else value
        del file["values"]
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # a place in the file, known before anything is written to it
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((tokens, spec.dim))
        stored = h5py.h5t.py_create(_STORED[spec.dtype], logical=True)
        position = h5py.h5d.create(file.id, b"values", stored, space, layout).get_offset()
        file.flush()  # gives everything its place: only then is the size known
        size = file.id.get_filesize()
    return buffer.getbuffer(), position or 0, size  # None: no tokens, no place


def _metadata_digest(
    attributes: dict[str, Any],
    tokens: int,
    stripe_tokens: int,
    offsets: np.ndarray,
    names: Sequence[bytes],
    crcs: np.ndarray,
) -> str:
    """SHA-256 over everything in a shard that is not values."""
    digest = hashlib.sha256()
    head = canonical([attributes, tokens, stripe_tokens])
    feed(digest, [head, offsets.astype("<i8").tobytes(), crcs.astype("<u4").tobytes()])
    feed(digest, names)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """An attribute as the Python value that was written."""
    value = value.item() if isinstance(value, np.generic) else value
    return value.decode() if isinstance(value, bytes) else value


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
