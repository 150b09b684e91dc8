"""Where an evaluation keeps its finished units while it runs: `<out>/.partial`, one folder a path, one evaluation at a time."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from maxsim_eval.errors import DataError
from maxsim_eval.files import remove_temporaries, writing
from maxsim_eval.processes.world import World

PARTIAL = ".partial"
_LOCK = ".lock"


def folder_for(
    out_dir: Path | str | None, units: int, rows_in_files: bool, fresh: bool, world: World, stack: contextlib.ExitStack
) -> Path | None:
    """Where finished units are kept while this evaluation runs: nowhere, if it is one unit whose score rows fit in memory."""
    if out_dir is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory())) if rows_in_files else None
    folder = Path(out_dir) / PARTIAL
    wanted = rows_in_files or world.size > 1 or units > 1
    if not wanted and not folder.exists():
        return None
    stack.enter_context(_alone(folder))
    with writing(folder):
        for place in (folder.parent, folder.parent / "runs"):
            remove_temporaries(place)
    if fresh:
        _remove_parts(folder)
    return folder if wanted else None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the output folder against another evaluation; the lock of a process that died is free."""
    lock = filelock.FileLock(folder / _LOCK)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise DataError(
            f"{folder.parent}: another evaluation is writing there; wait until it ends, or choose another --out"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _remove_parts(folder: Path) -> None:
    with writing(folder):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()


def remove(out_dir: Path) -> None:
    """Remove what was kept: the evaluation is complete."""
    shutil.rmtree(out_dir / PARTIAL, ignore_errors=True)  # a file that stays is in nobody's way
