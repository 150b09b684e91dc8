"""Which files are parts of one thing, and in which order: the files of a folder, files whose names differ in a number only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from maxsim_eval.errors import DataError
from maxsim_eval.importing.formats import OFFSETS, PICKLES, READERS, open_table
from maxsim_eval.importing.rows import Where

ID_FILE = "ids.txt"
_ID_FILES = (ID_FILE, ".ids.txt", ".query_ids.txt", ".document_ids.txt")


def files_of(folder: Path, notes: list[str]) -> list[Path]:
    """The embedding files of a folder, of one format, sorted by name with numbers as numbers; other files are noted.

    Raises:
        DataError: no embedding file, several formats, pickles, folders inside the folder.
    """
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be read: {error.strerror or error}") from error
    inner = sorted(entry.name for entry in entries if entry.is_dir())
    if inner:
        raise DataError(f"{folder}: holds folders ({_few(inner)}), need only files; name the folders one by one")
    for entry in entries:
        if entry.suffix.lower() in PICKLES:
            open_table(entry)  # refuses it, and says how it is converted
    files = [entry for entry in entries if entry.suffix.lower() in READERS and not entry.name.endswith(OFFSETS)]
    if not files:
        raise DataError(f"{folder}: the folder holds no embedding file ({', '.join(READERS)})")
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) > 1:
        raise DataError(f"{folder}: holds files of several formats ({', '.join(kinds)}), need one")
    known = {file.name for file in files}
    others = sorted(e.name for e in entries if e.name not in known and not e.name.endswith((OFFSETS, *_ID_FILES)))
    if others:
        notes.append(f"{len(others)} files of {folder.name} were not read: {_few(others)}")
    return sorted(files, key=_natural)


def in_order(files: Sequence[Path], notes: list[str]) -> list[Path]:
    """Chunks sorted by the number in which their names differ; names that differ otherwise keep the order given."""
    numbers = numbers_of([file.stem for file in files]) if len({(file.parent, file.suffix) for file in files}) == 1 else None
    twice = [file for file, times in Counter(files).items() if times > 1]
    if twice:
        raise DataError(f"{twice[0]}: named twice, need every file once")
    if numbers is None:
        return list(files)
    order = sorted(range(len(files)), key=numbers.__getitem__)
    ranked = [numbers[n] for n in order]
    for before, after, n in zip(ranked, ranked[1:], order[1:], strict=False):
        if before == after:
            raise DataError(f"{files[n]}: the number {after} stands in two names, need one file for each number")
    if order != list(range(len(files))):
        notes.append("ImportWarning: the files were not named in the order of their numbers; that order was taken")
    steps = {after - before for before, after in pairwise(ranked)}
    if len(steps) > 1:
        at = max(range(len(ranked) - 1), key=lambda n: ranked[n + 1] - ranked[n])
        notes.append(
            f"ImportWarning: the numbers of the files step unevenly ({ranked[at]} is followed by {ranked[at + 1]}): is one missing?"
        )
    return [files[n] for n in order]


def numbers_of(stems: Sequence[str]) -> list[int] | None:
    """The numbers in which names differ, where they differ in nothing else: `run2_chunk_003`, `run2_chunk_004` give 3 and 4."""
    pieces = [re.split(r"([0-9]+)", stem) for stem in stems]
    if len({len(cut) for cut in pieces}) > 1:
        return None
    differ = [place for place in range(len(pieces[0])) if len({cut[place] for cut in pieces}) > 1]
    if len(differ) != 1 or differ[0] % 2 == 0:  # every second piece is a number
        return None
    return [int(cut[differ[0]]) for cut in pieces]


def grouped(paths: Sequence[Path]) -> list[list[Path]]:
    """Group paths, in the order given: files of one folder whose names differ in one number only; every other path is alone."""
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        shape = path.name if path.is_dir() else re.sub(r"[0-9]+", "#", path.name)
        groups.setdefault((path.parent, shape), []).append(path)
    found = []
    for group in groups.values():
        alike = len(group) > 1 and numbers_of([path.stem for path in group]) is not None
        found += [group] if alike else [[path] for path in group]
    return found


def ids_by_file(files: Sequence[Path], listed: tuple[Where, list[str]] | None) -> tuple[list[str], str]:
    """Ids of files of one document each, and where they are from: file names or, for files numbered from 0 or 1, a list's lines.

    Ids are only compared with the names of files; no id is ever made a path.
    """
    stems = [file.stem for file in files]
    twice = [stem for stem, times in Counter(stems).items() if times > 1]
    if twice:
        raise DataError(f"{files[0].parent}: two files are called {twice[0]!r}, need one for each document")
    if listed is None:
        return stems, "the names of the files"
    where, ids = listed
    numbers = numbers_of(stems) if len(stems) > 1 else None
    counted = numbers is not None and numbers in (list(range(len(ids))), list(range(1, len(ids) + 1)))
    named = len(ids) == len(stems) and set(ids) == set(stems)
    if counted and named and ids != stems:
        where.fail(
            "names the numbered files in another order, so that line n could mean file n or the file of that name; remove it where "
            "the names are the ids, or call the files otherwise"
        )
    if named:
        return stems, "the names of the files"
    if counted:
        return ids, f"the lines of {where.path.name}"
    unknown = [name for name in ids if name not in set(stems)] if len(ids) <= len(stems) else []
    path_like = next((name for name in ids if "/" in name or "\\" in name or name in (".", "..")), None)
    if path_like is not None:
        where.fail(
            f"id {path_like!r} is a path, not the name of a file in {files[0].parent}, and no other file is read; number the files "
            f"from 0 to {len(ids) - 1} to give them such ids"
        )
    where.fail(
        f"holds {len(ids)} ids for {len(stems)} files{f', of which {len(unknown)} have no file ({_few(unknown)})' if unknown else ''}: "
        "need the names of all files, or files numbered from 0 in the order of the ids"
    )


def _natural(path: Path) -> tuple[list[tuple[int, str]], str]:
    cut = re.split(r"([0-9]+)", path.name)
    return [(int(piece), "") if n % 2 else (-1, piece) for n, piece in enumerate(cut)], path.name


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
