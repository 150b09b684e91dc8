"""Files that are written whole or not at all, one writer a folder, and the removal of what killed writers left."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import io
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from maxsim_eval.errors import DataError

LOCK = ".lock"
LONGEST_LINE = 2**28  # bytes: a document's text may be long
_PIPED = 2**26  # most bytes of a text from a pipe or a device
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")  # names that `atomic_path` makes
# Names that `hidden` makes; earlier versions made them without a host.
_HIDDEN = re.compile(r"\.(?P<name>.+)\.((?P<host>[0-9a-f]{12})-)?(?P<process>\d{1,9})\.(tmp|old|download)")
_TURNS = 100  # attempts at a lock whose file its holders delete as they end
_STALE_SECONDS = 86400.0  # age from which leftovers of another machine, which cannot be asked, count as abandoned


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable (POSIX: the directory entry is data of the folder)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block ends well, delete it when it does not.

    The temporary name starts with a dot and is used once, so two writers never share one, also on two machines (process ids
    repeat there). The caller writes and closes the file inside the block; its bytes are on the disk before the rename.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def open_regular(path: Path) -> io.BufferedReader:
    """Open one of our own files for reading; `OSError` at once for all but regular files (a named pipe would block)."""
    handle = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - the caller's to close
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return handle


def lines_of(handle: BinaryIO, path: Path | str, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes with the line's end): `DataError` for one beyond `longest` bytes, as in `/dev/zero`."""
    number = 0
    while raw := handle.readline(longest + 1):
        number += 1
        if len(raw) > longest:
            raise DataError(f"{path}:{number}: no line ends within {longest:,} bytes, need lines of text")
        yield number, raw


def read_text(path: Path | str) -> str:
    """A whole text (UTF-8); `OSError` where a pipe or device gives more than 64 MiB, `UnicodeDecodeError` for other encodings."""
    with open(path, "rb") as handle:
        if stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
            return handle.read().decode()
        content = handle.read(_PIPED + 1)
    if len(content) > _PIPED:
        raise OSError(errno.EFBIG, f"no file, and holds more than {_PIPED:,} bytes", str(path))
    return content.decode()


def delete(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link; what a link points to is never touched."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files that killed writers left in `folder`; the caller knows that nobody else writes there now."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


@functools.cache
def host() -> str:
    """An id of this machine (or container): a folder may be shared with others, whose process numbers mean nothing here."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # Linux has these; elsewhere the name has to do
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def alive(process: int) -> bool:
    """Whether a process of this machine runs, as far as this user may know."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def hidden(path: Path, kind: str) -> Path:
    """The path beside `path` where this process builds it (`tmp`), downloads it (`download`) or keeps the one before (`old`)."""
    return path.with_name(f".{path.name}.{host()}-{os.getpid()}.{kind}")


def leftovers(parent: Path, name: str | None = None) -> list[Path]:
    """The `hidden` paths for `name` (None: for anything) in `parent` whose process no longer runs.

    Those of another machine, which cannot be asked, or without one (earlier versions) must also be a day old.
    """
    found = []
    for path in sorted(parent.glob(".*")):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or name not in (None, match["name"]):
            continue
        here = match["host"] == host()
        with suppress(FileNotFoundError):
            old = time.time() - path.lstat().st_mtime > _STALE_SECONDS
            gone = not alive(int(match["process"]))
            if (here and gone) or (not here and old and (gone or match["host"] is not None)):
                found.append(path)
    return found


def remove_leftovers(path: Path) -> None:
    """Delete what killed writers of `path` left beside it."""
    for left in leftovers(path.parent, path.name):
        with suppress(OSError):  # another user's, or another process was quicker: it is in nobody's way
            delete(left)


@contextmanager
def alone(folder: Path | str) -> Iterator[None]:
    """Lock an output folder against every other writer; folders that were made for it are removed again if nothing was written.

    Temporary files that killed writers left are deleted first.

    The lock of a process that died is free. Unlike `filelock`'s, the lock file does not stay in the user's folder, so whoever
    gets a lock checks that its file still has that name.

    Raises:
        DataError: another process writes there, or the folder cannot be made.
    """
    folder = Path(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    with writing(folder):
        descriptor = _locked(folder)
    try:
        with writing(folder):
            remove_temporaries(folder)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):  # not empty: something came of it
            for place in made:
                place.rmdir()


def _locked(folder: Path) -> int:
    """Lock the folder; the descriptor of its lock file."""
    path = folder / LOCK
    for turn in range(1, _TURNS + 1):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            if turn < _TURNS:
                continue  # its holder ended between the two lines, and took an empty folder along
            raise  # nobody does that so often: a place like /proc holds no files
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except FileNotFoundError:
            pass  # its holder ended: the file we have locked is nobody's
        except BlockingIOError:
            held = os.read(descriptor, 200).decode("utf-8", "replace")
            os.close(descriptor)
            owner = f" ({held})" if held.isprintable() and held else ""
            raise DataError(
                f"{folder}: another command is writing there{owner}; wait until it ends, or choose another --out"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise DataError(f"{path}: is replaced as soon as it is locked; need a folder on a file system with locks")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn what the system says while `path` is written (no space, no permission, a file in the way) into one `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_text(path: Path | str, text: str) -> None:
    """Write `text` (UTF-8) to `path`, whole or not at all; half a surrogate pair, which UTF-8 cannot hold, as JSON's escape of it."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
