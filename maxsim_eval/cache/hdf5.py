"""HDF5 as the toolkit keeps it: files written once and never changed, whose large arrays are read at their offset, past HDF5.

A file is proven once, when it is opened; `Stamp` tells afterwards that it is still that file. `read_at` reads by position, from any
number of threads, and `write_at` writes by several. HDF5 itself writes into memory only (`reserve`): on a full disk it cannot close its
file, and may end the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from maxsim_eval.errors import CacheError
from maxsim_eval.files import open_regular

# Object headers of HDF5 1.8 and later carry checksums, so a damaged structure is found by the library itself.
LIBVER = ("v108", "v108")
# What h5py raises when a file's structure does not hold what it says (AttributeError: a group where a dataset must be).
READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError, IndexError)
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_WRITE_BYTES = 32 << 20  # by one call
_WRITERS = 4  # threads of one file, at most: each fills 1.5 GB/s of new pages
_MOST_BUFFERS = 1000  # of one call; Linux takes 1024


@dataclass(frozen=True)
class Stamp:
    """Which file lies at a path, and in what state: other values after it was proven mean that it is another file now."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp in what `os.stat` or `os.fstat` says."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def require(self, path: Path, status: os.stat_result) -> None:
        """`CacheError` where the file is no longer the one with this stamp."""
        found = Stamp.of(status)
        if found == self:
            return
        if found.size < self.size:
            what = f"truncated: {found.size} bytes, need {self.size}"
        elif (found.device, found.inode) != (self.device, self.inode):
            what = "another file has taken its place"
        elif found.size > self.size:
            what = f"{found.size} bytes, need {self.size}"
        else:
            when = datetime.fromtimestamp(found.modified_ns / 1e9, UTC).isoformat(timespec="seconds")
            what = f"somebody wrote to it at {when}"
        raise CacheError(f"{path}: changed since it was opened: {what}. Run the command again: it checks what is there now")


@contextmanager
def open_hdf5(path: Path, advice: str, stamp: Stamp | None = None) -> Iterator[tuple[Any, Stamp]]:
    """The file opened for reading through HDF5, and its stamp; `CacheError` with the reason where it cannot be opened.

    With a `stamp`, only the file that has it is opened. Either way the same file must lie there when the block ends. Messages end
    with `advice`.
    """
    try:
        with open_regular(path) as handle:
            status = os.fstat(handle.fileno())
            start = handle.read(len(_SIGNATURE))
    except FileNotFoundError as error:
        raise CacheError(f"{path}: missing") from error
    except OSError as error:
        raise CacheError(f"{path}: cannot be opened: {error}. {advice}") from error
    found = Stamp.of(status)
    if stamp is not None:
        stamp.require(path, status)
    if start != _SIGNATURE:
        raise CacheError(f"{path}: not an HDF5 file (begins with {start!r}). {advice}")
    try:
        # Finished files never change, so HDF5's own lock guards nothing (and fails on some network file systems).
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        if "truncated file" in str(error):
            raise CacheError(f"{path}: truncated: {found.size} bytes are not the whole file. {advice}") from error
        raise CacheError(f"{path}: cannot be opened: {error}. {advice}") from error
    with file:
        yield file, found
    found.require(path, _status(path))  # HDF5 opened it by name: it must have been this one all the time


def _status(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise CacheError(f"{path}: cannot be opened: {error}") from error


def structure(path: Path, advice: str, read: Callable[[], Any]) -> Any:
    """`read()`; where HDF5 or h5py stumbles over the file's structure, a `CacheError`."""
    try:
        return read()
    except READ_ERRORS as error:
        what = "HDF5 cannot read it" if not isinstance(error, AttributeError) else "holds something of another kind"
        raise damaged(path, f"{what} ({error})", advice) from error


def damaged(path: Path, reason: str, advice: str) -> CacheError:
    """The error for a file that does not hold what was written."""
    return CacheError(f"{path}: damaged: {reason}. {advice}")


def read_at(path: Path, stamp: Stamp, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
    """Fill buffers one behind the other from a byte of the file on; any number of threads may read one file at once.

    Raises:
        CacheError: a file that cannot be read, ends early, or is not (or while it is read stops to be) the one with this stamp.
    """
    try:
        # One of its own for each call: no shared position, nothing to close later.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CacheError(f"{path}: missing: it was there when it was opened first, with {stamp.size} bytes") from error
    except OSError as error:
        raise CacheError(f"{path}: cannot be opened: {error}") from error
    try:
        stamp.require(path, os.fstat(descriptor))
        for begin, targets in parts:
            place = begin
            for first in range(0, len(targets), _MOST_BUFFERS):
                place = _fill(path, stamp, descriptor, place, targets[first : first + _MOST_BUFFERS])
        stamp.require(path, os.fstat(descriptor))
    except OSError as error:
        raise CacheError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def write_at(path: Path, begin: int, buffers: Iterable[memoryview]) -> None:
    """Write buffers one behind the other into an existing file, from byte `begin` on; by several threads if that is much.

    Raises:
        OSError: a file that cannot be written.
    """
    parts, size = list[tuple[int, memoryview]](), 0
    for data in buffers:
        size += len(data)
        parts += [(begin + first, data[first : first + _WRITE_BYTES]) for first in range(0, len(data), _WRITE_BYTES)]
        begin += len(data)

    def write(mine: Sequence[tuple[int, memoryview]]) -> None:
        with open(path, "r+b", buffering=0) as handle:
            for place, data in mine:
                handle.seek(place)
                done = 0
                while done < len(data):  # a system call may take less than it is given
                    done += handle.write(data[done:])

    writers = min(_WRITERS, size // (2 * _WRITE_BYTES))  # little is written by this thread alone, whatever its buffers
    if writers < 2:
        write(parts)
        return
    with ThreadPoolExecutor(writers, "write") as pool:
        for ended in [pool.submit(write, parts[number::writers]) for number in range(writers)]:
            ended.result()


def _fill(path: Path, stamp: Stamp, descriptor: int, place: int, targets: Sequence[memoryview]) -> int:
    """Fill buffers from byte `place` on, by one call or, where that falls short, several; returns the byte behind them."""
    stop, rest = place + sum(map(len, targets)), targets
    while place < stop:
        count = os.preadv(descriptor, rest, place)
        if not count:
            raise CacheError(f"{path}: truncated: the file ends {stop - place} bytes too early, need {stamp.size} bytes")
        place += count
        while rest and count >= len(rest[0]):
            count, rest = count - len(rest[0]), rest[1:]
        if rest:
            rest = [rest[0][count:], *rest[1:]]
    return place


def reserve(file: Any, name: str, shape: tuple[int, int], stored: np.dtype[Any]) -> tuple[int, int]:
    """Give a contiguous dataset its place at the end of a file, unwritten: returns the byte where it begins and the file's size.

    `name` must already be in the file, as a link to anything: so the name has its place before the values.
    """
    del file[name]
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # a place in the file, known before anything is written to it
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)  # no clock in the file: the same content is the same bytes, whoever writes it and when
    space = h5py.h5s.create_simple(shape)
    kind = h5py.h5t.py_create(stored, logical=True)
    position = h5py.h5d.create(file.id, name.encode(), kind, space, layout).get_offset()
    file.flush()  # gives everything its place: only then is the size known
    return position or 0, file.id.get_filesize()  # None: no values, no place


def fixed(texts: Sequence[bytes]) -> np.ndarray:
    """UTF-8 strings of one length. Never HDF5's variable-length ones: damage in their heap makes HDF5 hang."""
    width = max((len(text) for text in texts), default=0)
    return np.array(texts, dtype=h5py.string_dtype("utf-8", max(width, 1)))


def plain(value: Any) -> Any:
    """An attribute as the Python value that was written; an array (none of ours is one) as a list, which `==` compares whole."""
    value = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
    return value.decode() if isinstance(value, bytes) else value
