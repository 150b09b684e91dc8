"""Where an evaluation keeps its finished units while it runs: `<out>/.partial`, one folder a path.

The output folder is held by one evaluation at a time (`files.alone`), so nobody else writes here.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from maxsim_eval.errors import DataError
from maxsim_eval.files import delete, remove_temporaries, writing
from maxsim_eval.processes.world import World

PARTIAL = ".partial"


def folder_for(
    out_dir: Path | str | None, units: int, rows_in_files: bool, fresh: bool, world: World, stack: contextlib.ExitStack
) -> Path | None:
    """Where finished units are kept while this evaluation runs: nowhere, if it is one unit whose score rows fit in memory.

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


def remove(out_dir: Path) -> None:
    """Remove what was kept: the evaluation is complete."""
    with contextlib.suppress(OSError):  # a file that stays is in nobody's way
        delete(out_dir / PARTIAL)
