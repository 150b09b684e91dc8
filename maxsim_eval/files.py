"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxsim_eval.errors import DataError

_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")  # `atomic_path`


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


def remove_temporaries(folder: Path) -> None:
    """Delete what writers that were killed in the middle left in `folder`, which nobody else is writing to now."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


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
