"""What an evaluation has finished, kept on disk so that an interrupted one goes on where it stopped.

    <folder>/<start>-<stop>.h5      one scored unit: documents start to stop of the corpus, by one path

    keys        [Nq, k]    int64, the unit's own top-k as keys of `maxsim_kernels.topk`
    scores      [rows, n]  float32, the kept queries' full score rows (absent where none are kept), the end of the file
    row_crc32   [rows]     uint32, one CRC-32 for every row of scores
    attributes             format, fingerprint, start, stop, seconds (JSON), keys_crc32

A record is written whole or not at all, by one background thread, and used only by an evaluation with the same fingerprint: a hash
over everything its numbers depend on. The folders lie in `<out>/.partial`, one a path; the output folder is held by one evaluation at
a time (`files.alone`), so nobody else writes there.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from maxsim_eval.cache.hdf5 import LIBVER, Stamp, damaged, fixed, open_hdf5, plain, read_at, reserve, structure
from maxsim_eval.cache.shards import write_error
from maxsim_eval.errors import CacheError, DataError
from maxsim_eval.files import alive, delete, fsync_folder, host, remove_temporaries, writing
from maxsim_eval.hashing import canonical, digest
from maxsim_eval.parsing import json_of
from maxsim_eval.processes.world import World

FORMAT = "maxsim-eval/record/1"
PARTIAL = ".partial"
_KEYS, _SCORES, _CRCS = np.dtype("<i8"), np.dtype("<f4"), np.dtype("<u4")
_AGAIN = "Its documents are scored again."
_WAITING = 1  # with the one that is being written: two records in memory
_LOOK_SECONDS = 0.2  # how often an idle writer looks whether the program has ended
_STALE_SECONDS = 3600.0
_OURS = re.compile(r"\d+-\d+\.h5|\.\d+-\d+\.h5\.(?P<host>[0-9a-f]+)-(?P<process>\d+)\.tmp")


def folder_for(
    out_dir: Path | str | None, units: int, rows_in_files: bool, fresh: bool, world: World, stack: contextlib.ExitStack
) -> Path | None:
    """Where finished units are kept while this evaluation runs: in `.partial`, or a temporary folder; None: nothing is kept.

    Raises:
        DataError: `.partial` is a link: what is finished is removed there, and links are not followed for that.
    """
    if out_dir is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory())) if rows_in_files else None
    folder = Path(out_dir) / PARTIAL
    with writing(folder):
        remove_temporaries(folder.parent / "runs")
        if fresh:
            delete(folder)
    if folder.is_symlink():
        raise DataError(f"{folder}: is a link, need a folder of this evaluation's own; remove the link, or say --fresh")
    return folder if rows_in_files or world.size > 1 or units > 1 else None


def remove_partial(out_dir: Path) -> None:
    """Remove what was kept: the evaluation is complete."""
    with contextlib.suppress(OSError):  # a file that stays is in nobody's way
        delete(out_dir / PARTIAL)


@dataclass(frozen=True)
class StoredScores:
    """Scores `[rows, n]` float32 of a record, read from its file some rows at a time."""

    path: Path
    stamp: Stamp = field(repr=False)
    position: int  # byte of the file where they begin
    shape: tuple[int, int]
    crcs: np.ndarray = field(repr=False)  # [rows] uint32

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill `out` `[m, n]` float32, of contiguous rows, with those from `first` on; `CacheError`: it changed, or is damaged."""
        targets = [row.data.cast("B") for row in out]
        read_at(self.path, self.stamp, [(self.position + first * self.shape[1] * out.itemsize, targets)])
        for row, target in enumerate(targets, first):
            if zlib.crc32(target) != self.crcs[row]:
                reason = f"scores of row {row} do not have the CRC-32 they were written with"
                raise damaged(self.path, reason, _AGAIN)


@dataclass(frozen=True)
class Record:
    """One finished unit: documents `start` to `stop`."""

    start: int
    stop: int
    keys: np.ndarray = field(repr=False)  # [Nq, k] int64
    scores: StoredScores | None
    cost: Mapping[str, float]


class ScoreRows:
    """Full score rows `[rows, N]` float32 in parts that lie side by side; `self[first:last]` copies some rows into memory.

    A part in a file is opened for each reading: with many rows at a time that costs nothing, row by row it is most of the time.

    Args:
        parts: in order of their documents, each `[rows, n]`: in memory, or in the file of a record.

    Raises:
        ValueError: parts of different numbers of rows.
    """

    ndim = 2

    def __init__(self, parts: Sequence[np.ndarray | StoredScores]) -> None:
        rows = {part.shape[0] for part in parts}
        if len(rows) > 1:
            raise ValueError(f"parts: got {sorted(rows)} rows, need as many in each")
        self._parts = tuple(parts)
        self.shape = (rows.pop() if rows else 0, sum(part.shape[1] for part in parts))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, span: slice) -> np.ndarray:
        rows = range(*span.indices(self.shape[0]))
        if rows.step != 1:
            raise ValueError(f"rows: got a step of {rows.step}, need 1")
        out = np.empty((len(rows), self.shape[1]), np.float32)
        first = 0
        for part in self._parts:
            target = out[:, first : first + part.shape[1]]
            if isinstance(part, StoredScores):
                part.read(rows.start, target)
            else:
                target[:] = part[span]
            first += part.shape[1]
        return out


class Records:
    """The finished units of one path of one evaluation, in a folder of their own.

    Several processes may use a folder at once (each for its own units), but a process has one `Records` for it. Where records cannot
    be written, the next `put` or `close` says so; what was written before stays good. As a context manager it closes itself.

    Args:
        folder: made when the first record is written.
        fingerprint: JSON-able: everything that the keys and scores depend on.
    """

    def __init__(self, folder: Path | str, fingerprint: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.fingerprint = digest(dict(fingerprint))
        self._waiting: queue.Queue[_Finished | None] = queue.Queue(_WAITING)
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._said = False
        self._closed = False
        for path in self.folder.glob(".*.tmp"):
            if _abandoned(path):
                with contextlib.suppress(OSError):  # another user's, or another process was quicker: it is in nobody's way
                    path.unlink()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except CacheError as failure:
            if error is None:
                raise
            error.add_note(f"And: {failure}")

    def put(self, start: int, stop: int, keys: np.ndarray, scores: np.ndarray | None, cost: Mapping[str, float]) -> None:
        """Keep a finished unit: hand it to the writer, and wait only while two others are not yet written.

        Args:
            start, stop: its documents.
            keys: `[Nq, k]` int64. This and `scores` belong to the record from here on: nobody may write to them.
            scores: `[rows, stop - start]` float32; None where no score rows are kept.
            cost: seconds by phase and what else is counted.

        Raises:
            CacheError: this or an earlier record could not be written (a full disk: how much is needed).
            ValueError: arrays that are not so, or after `close`.
        """
        self._refuse()
        if self._closed:
            raise ValueError("put: these records are closed")
        if keys.ndim != 2 or keys.dtype != np.int64:
            raise ValueError(f"keys: got {keys.dtype} {list(keys.shape)}, need int64 [queries, k]")
        if scores is not None and (scores.ndim != 2 or scores.dtype != np.float32 or scores.shape[1] != stop - start):
            raise ValueError(f"scores: got {scores.dtype} {list(scores.shape)}, need float32 [rows, {stop - start}]")
        text = canonical(dict(cost))
        if self._writer is None:
            # No daemon: one that is stopped inside HDF5 keeps the library's lock, and Python waits for that when it ends.
            self._writer = threading.Thread(target=self._write_all, name="records")
            self._writer.start()
        rows = None if scores is None else np.ascontiguousarray(scores, _SCORES)
        self._waiting.put(_Finished(start, stop, np.ascontiguousarray(keys, _KEYS), rows, text))

    def get(self, start: int, stop: int) -> Record | None:
        """The record of documents `start` to `stop`, every number of it checked; None where there is none for this evaluation.

        One that is damaged is None too, and a warning names the file.
        """
        try:
            record = self._open(start, stop)
            if record is not None and record.scores is not None:
                row = np.empty((1, record.scores.shape[1]), np.float32)
                for number in range(record.scores.shape[0]):
                    record.scores.read(number, row)
        except CacheError as error:
            warnings.warn(f"an unfinished evaluation: {error}", stacklevel=2)
            return None
        return record

    def rows(self, units: Iterable[tuple[int, int]]) -> ScoreRows:
        """The kept score rows of these units side by side, read from their files when asked for (each row's CRC is checked then).

        Raises:
            CacheError: a unit without a record for this evaluation, or without score rows.
        """
        parts = []
        for start, stop in units:
            record = self._open(start, stop)
            if record is None or record.scores is None:
                raise CacheError(f"{self._path(start, stop)}: no score rows of this evaluation. Run the command again")
            parts.append(record.scores)
        return ScoreRows(parts)

    def close(self) -> None:
        """Wait until everything is written; `CacheError` where something could not be and no `put` has said so yet."""
        self._closed = True
        if self._writer is not None and self._writer.is_alive():
            self._waiting.put(None)
            self._writer.join()
        if not self._said:
            self._refuse()

    def _path(self, start: int, stop: int) -> Path:
        return self.folder / f"{start}-{stop}.h5"

    def _refuse(self) -> None:
        if self._error is not None:
            self._said = True
            raise self._error

    def _write_all(self) -> None:
        """The writer's loop, until `close`; after an error it only empties the queue, so that nobody waits for it."""
        while (finished := self._next()) is not None:
            if self._error is None:
                try:
                    self._write(finished)
                except Exception as error:  # noqa: BLE001 (raised again by `put` and `close`, in the thread that can act on it)
                    self._error = error

    def _next(self) -> _Finished | None:
        """What is to be written next; None after `close`, or when the program ends without one."""
        while True:
            try:
                return self._waiting.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if not threading.main_thread().is_alive():
                    return None

    def _write(self, finished: _Finished) -> None:
        path = self._path(finished.start, finished.stop)
        image, position, size = _image(finished, self.fingerprint)
        temporary = path.with_name(f".{path.name}.{host()}-{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "wb") as handle:
                    handle.write(image)
                    if finished.scores is not None:
                        handle.seek(position)
                        handle.write(finished.scores.reshape(-1).data)
                    handle.truncate(size)
                    handle.flush()
                    os.fsync(handle.fileno())
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(self.folder)
        except OSError as error:
            raise write_error(path, size, error, folder="output", parts="parts") from error

    def _open(self, start: int, stop: int) -> Record | None:
        """A record whose structure and keys are proven; None where there is none for this evaluation. `CacheError`: damaged."""
        path = self._path(start, stop)
        if not os.path.exists(path):
            return None
        with open_hdf5(path, _AGAIN) as (file, stamp):
            attributes = structure(path, _AGAIN, lambda: {name: plain(value) for name, value in file.attrs.items()})
            if attributes.get("format") != FORMAT or attributes.get("fingerprint") != self.fingerprint:
                return None
            keys, crcs, scores = structure(path, _AGAIN, lambda: _content(file, stamp))
        wrong = (attributes.get("start"), attributes.get("stop")) != (start, stop)
        if wrong or keys.dtype != _KEYS or keys.ndim != 2 or _crc(keys) != attributes.get("keys_crc32"):
            raise damaged(path, "its keys do not have the range or the CRC-32 they were written with", _AGAIN)
        stored = None
        if scores is not None:
            shape, position = scores
            if len(shape) != 2 or shape[1] != stop - start or crcs.shape != shape[:1] or crcs.dtype != _CRCS:
                raise damaged(path, f"scores are {list(shape)}, need [rows, {stop - start}] and a CRC-32 for each row", _AGAIN)
            stored = StoredScores(path, stamp, position, shape, crcs)
        cost = structure(
            path, _AGAIN, lambda: {str(key): float(value) for key, value in json_of(attributes["seconds"]).items()}
        )
        return Record(start, stop, keys, stored, cost)


@dataclass(frozen=True)
class _Finished:
    """A unit that waits to be written."""

    start: int
    stop: int
    keys: np.ndarray
    scores: np.ndarray | None
    seconds: bytes


def _content(file: Any, stamp: Stamp) -> tuple[np.ndarray, np.ndarray | None, tuple[tuple[int, ...], int] | None]:
    """Keys, the CRCs of the score rows, and the shape and place of the scores in the file."""
    keys = np.ascontiguousarray(file["keys"][:])
    if "scores" not in file:
        return keys, None, None
    scores = file["scores"]
    position = scores.id.get_offset()
    if scores.dtype != _SCORES or (position is None and scores.size):
        raise ValueError("scores are not as they were written")
    position = position or 0  # an empty dataset has no offset
    if position + scores.size * _SCORES.itemsize > stamp.size:
        raise ValueError(f"truncated: {stamp.size} bytes")
    return keys, file["row_crc32"][:], (scores.shape, position)


def _image(finished: _Finished, fingerprint: str) -> tuple[memoryview, int, int]:
    """The HDF5 file without its scores, the byte where those begin, and the size of the whole file."""
    scores = finished.scores
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "start": finished.start,
        "stop": finished.stop,
        "seconds": finished.seconds.decode(),
        "keys_crc32": _crc(finished.keys),
    }
    buffer, position = io.BytesIO(), 0
    with h5py.File(buffer, "w", libver=LIBVER) as file:
        file["keys"] = finished.keys
        for name, value in attributes.items():
            file.attrs[name] = fixed([value.encode()])[0] if isinstance(value, str) else value
        if scores is not None:
            file["row_crc32"] = np.array([_crc(row) for row in scores], _CRCS)
            file["scores"] = file["keys"]  # any link: `reserve` puts the scores in its place
            position, size = reserve(file, "scores", (scores.shape[0], scores.shape[1]), _SCORES)
        else:
            file.flush()
            size = file.id.get_filesize()
    return buffer.getbuffer(), position, size


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _abandoned(path: Path) -> bool:
    """Whether nobody writes this temporary file any more: its process ran here and is gone, or it was last written an hour ago."""
    match = _OURS.fullmatch(path.name)
    if match is None:
        return False
    try:
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            return True
    except FileNotFoundError:  # gone already
        return False
    # With our own number: an earlier process, as these `Records` have not written yet.
    return match["host"] == host() and (int(match["process"]) == os.getpid() or not alive(int(match["process"])))
