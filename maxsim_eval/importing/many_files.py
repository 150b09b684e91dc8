"""Embeddings in many files, one open at a time: a folder of one file a document, chunks of a set too large for memory.

A set is read twice, file by file: once to check it (which leaves lengths and ids in memory), once when its rows are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.importing.file_order import ID_FILE, files_of, ids_by_file, in_order, numbers_of
from maxsim_eval.importing.formats import FileTable, open_table
from maxsim_eval.importing.ids import IdList, Judgements, checked_ids, id_lists, listed_in, note_unknown, one_list, qrels_of
from maxsim_eval.importing.rows import TokenRows, Where
from maxsim_eval.importing.tables import (
    KNOWN,
    Imported,
    RoleKeys,
    build_rows,
    check_keys,
    find_embeddings,
    finished_side,
    read_file,
    role_in,
    where_of,
)
from maxsim_eval.importing.token_checks import Norms, check_tokens
from maxsim_eval.printing import printable
from maxsim_eval.types import Role
from maxsim_kernels import Packed

Files = Path | str | Sequence[Path | str]  # a file, a folder, or the chunks of one thing


def read_embeddings(
    path: Files,
    *,
    role: Role | None = None,
    ids: Mapping[Role, Path | str] | None = None,
    drop_zero_tokens: bool = False,
    quiet: bool = False,
) -> Imported:
    """Read and check precomputed token embeddings (.pt .pth .bin, .npz, .npy, .safetensors): a file, a folder, or chunks.

    Every token is looked at once (NaN, Inf, norm), a slice and a file at a time, so memory stays small for sets of any size.

    Args:
        path: a file; a folder of one file a document, or of chunks; or the chunks. docs/import.md describes the layouts.
        role: what embeddings without a role name are ("query" or "document").
        ids: files of ids, one a line, for a role whose embeddings hold none.
        drop_zero_tokens: leave out tokens that are exactly zero, wherever they stand.
        quiet: no progress bars.

    Raises:
        DataError: names the file, the key, what was found and what is needed.
        UsageError: a role or a list of files that cannot be.
    """
    if role not in (None, "query", "document"):
        raise UsageError(f"role: got {role!r}, need 'query' or 'document'")
    beside = {name: Path(file) for name, file in (ids or {}).items()}
    if isinstance(path, (str, Path)):
        if not Path(path).is_dir():
            return read_file(Path(path), role=role, ids=beside, drop_zero_tokens=drop_zero_tokens, quiet=quiet)
        notes: list[str] = []
        return _Set(files_of(Path(path), notes), Path(path), role, drop_zero_tokens, notes).read(beside, quiet)
    notes = []
    files = in_order([Path(file) for file in path], notes)
    if not files:
        raise UsageError("paths: got no file, need at least one")
    for file in files:
        if file.is_dir():
            raise DataError(f"{file}: a folder among chunks, need only files (a folder is named alone)")
    return _Set(files, None, role, drop_zero_tokens, notes).read(beside, quiet)


def chunks_or_roles(files: list[Path]) -> list[Path | list[Path]]:
    """Files named alike are chunks of one thing, unless they are two that hold one role each (`part_1.pt`, `part_2.pt`)."""
    if len(files) == 2:
        first, second = ({found.role for found in find_embeddings(open_table(file), None)} for file in files)
        if first != second:
            return [*files]
    return [files] if len(files) > 1 else [*files]


class FileRows(TokenRows):
    """The rows of many files, one behind the other; the file read last stays open."""

    def __init__(
        self, dtype: torch.dtype, dim: int, lengths: np.ndarray, counts: Sequence[int], reopen: Callable[[int], TokenRows]
    ) -> None:
        super().__init__(dtype, dim, lengths)
        self.firsts = np.cumsum([0, *counts], dtype=np.int64)
        self.reopen = reopen
        self.current: tuple[int, TokenRows | None] = (-1, None)

    def row(self, index: int) -> Tensor:
        """Tokens `[L, d]` of one document, copied: its file may be closed while they are used."""
        return self.take([index]).values

    def take(self, rows: Sequence[int] | np.ndarray) -> Packed:
        """Copy documents `rows`, in that order; every file that holds one of them is opened once."""
        wanted = np.asarray(rows, dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[wanted], dtype=np.int64)])
        values = torch.empty(int(offsets[-1]), self.dim, dtype=self.dtype)
        files = np.searchsorted(self.firsts, wanted, side="right") - 1
        for place in np.argsort(files, kind="stable").tolist():
            number = int(files[place])
            tokens = self._file(number).row(int(wanted[place] - self.firsts[number]))
            values[int(offsets[place]) : int(offsets[place + 1])] = tokens
        return Packed(values, torch.from_numpy(offsets))

    def _file(self, number: int) -> TokenRows:
        at, rows = self.current
        if rows is None or at != number:
            rows, self.current = None, (-1, None)  # closed before the next is opened
            rows = self.reopen(number)
            self.current = (number, rows)
        return rows


@dataclass
class _Set:
    """A set that is being read: its files, and what is remembered of those that were read."""

    files: list[Path]
    folder: Path | None
    role: Role | None
    drop_zero_tokens: bool
    notes: list[str]
    listed: IdList | None = None
    key: str = ""
    kind: tuple[int, torch.dtype] | None = None  # width and dtype of the first file
    stamps: list[tuple[int, int]] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    opened: list[Path] = field(default_factory=list)  # the files and what lay beside them
    said: dict[str, tuple[str, int]] = field(default_factory=dict)  # note with # for numbers -> the first such note, how often
    dropped: int | None = None
    norms: Norms = field(default_factory=Norms)
    done: int = 0  # rows
    qrels: Judgements | None = None

    @cached_property
    def _numbered(self) -> bool:
        return len(self.files) == 1 or numbers_of([file.stem for file in self.files]) is not None

    @cached_property
    def _listed_names(self) -> frozenset[str]:
        return frozenset(() if self.listed is None else self.listed[1])

    @property
    def origin(self) -> str:
        """What messages call the set."""
        if self.folder is not None:
            return str(self.folder)
        several = f" to {self.files[-1].name} ({len(self.files)} files)" if len(self.files) > 1 else ""
        return f"{self.files[0]}{several}"

    def read(self, id_files: Mapping[Role, Path], quiet: bool) -> Imported:
        """Check every file once; the rows are read again when they are asked for."""
        self.role = role = self._find_role()
        beside = id_files.get(role)
        if beside is None and self.folder is not None and (self.folder / ID_FILE).is_file():
            beside = self.folder / ID_FILE
        self.listed = None if beside is None else listed_in(beside)
        with Bar(
            total=len(self.files), desc=f"checking {printable(Path(self.origin).name)}", unit="files", disable=quiet, delay=1
        ) as bar:
            for number, path in enumerate(self.files):
                self._scan(number, path)
                bar.update()
        counts, lengths = [len(part) for part in self.lengths], np.concatenate(self.lengths)
        where = Where(Path(self.origin), self.key, [*self.notes, *self._said()], role)
        ids, ids_are = self._all_ids(where, counts)
        assert self.kind is not None  # set by the first file
        rows = FileRows(self.kind[1], self.kind[0], lengths, counts, self._reopen)
        rows.dropped = self.dropped
        files = tuple(self.opened if beside is None else [*self.opened, beside])
        side = finished_side(where, rows, ids, self.norms, files, self.origin, ids_are)
        notes: list[str] = []
        note_unknown(notes, ids if role == "query" else None, ids if role == "document" else None, self.qrels)
        return Imported(Path(self.origin), {role: side}, self.qrels, {"notes": [*notes, *side.notes]}, tuple(notes))

    def _find_role(self) -> Role:
        """The role: from the first file's keys, the caller, its `role`, the folder's or first chunk's name, in this order."""
        table, single = self._open(self.files[0])
        role = self.role
        if role is None and table.entries.get("role", table.meta.get("role")) is None:
            role = role_in(self.folder.name) if self.folder is not None else None
            if role is None and not single:
                role = role_in(self.files[0].stem)
            if role is None and {"embeddings", "values"} & table.entries.keys():
                what = "the folder's name" if self.folder is not None else "their names"
                self.notes.append(f"taken as documents: neither the files nor {what} say query or document")
                role = "document"
        return find_embeddings(table, role)[0].role

    def _open(self, path: Path) -> tuple[FileTable, bool]:
        """A file as a table, and whether it holds one document; in a folder, a bare `[L, d]` counts as one."""
        table = open_table(path)
        if self.folder is not None:
            if len(table.entries) == 1 and not KNOWN & table.entries.keys():  # numpy and safetensors name every array
                table.entries = {"embeddings": next(iter(table.entries.values()))}
            for key in [key for key in table.entries if key.endswith("embeddings")]:
                _lift_document(table, key)
        check_keys(table)
        values = [value for key, value in table.entries.items() if key.endswith("embeddings")]
        return table, bool(values) and all(_holds_one(value) for value in values)

    def _found(self, table: FileTable) -> RoleKeys:
        found = find_embeddings(table, self.role)
        if len(found) > 1 or found[0].role != self.role:
            roles = " and ".join(side.role for side in found)
            raise DataError(
                f"{table.path}: holds {roles} embeddings, in a set of {self.role} embeddings: a set has one role. Name queries "
                "and documents apart (--queries, --documents)"
            )
        return found[0]

    def _scan(self, number: int, path: Path) -> None:
        table, single = self._open(path)
        self.stamps.append(_stamp(path))
        found = self._found(table)
        where = where_of(table, found)
        own = id_lists(table, where, found.id_names)
        if not own:
            where = where_of(table, found, *self._names(path, single))
        rows = build_rows(table, found, where, drop_zero_tokens=self.drop_zero_tokens)
        self._require_kind(where, rows)
        if len(rows) > 1 and self.folder is not None:
            self._require_numbers(path, len(rows))
        self.norms += check_tokens(where, rows, quiet=True)
        if number and bool(own) != bool(self.ids):
            have = ("ids", "none") if own else ("no ids", "some")
            where.fail(f"has {have[0]}, the files before it have {have[1]}: need ids in every file or in none")
        if own:
            self.ids += one_list(where, own, len(rows))
        qrels = qrels_of(table)
        if qrels is not None and self.qrels is not None and qrels != self.qrels:
            raise DataError(f"{path}: its qrels differ from those of a file before it, need one set of judgements")
        self.qrels = self.qrels if qrels is None else qrels
        self.lengths.append(np.array(rows.lengths))  # a copy: lengths may lie in the file
        self.done += len(rows)
        self.opened += table.files
        if rows.dropped is not None:
            self.dropped = (self.dropped or 0) + rows.dropped
        for note in (*where.notes, *table.notes):
            shape = re.sub(r"[0-9]+", "#", note)
            text, times = self.said.get(shape, (note, 0))
            self.said[shape] = (text, times + 1)

    def _said(self) -> list[str]:
        return [text + f" (so, or with other numbers, in {n} files)" * (n > 1) for text, n in self.said.values()]

    def _names(self, path: Path, single: bool) -> tuple[Sequence[str] | None, int]:
        """Names for the rows of a file without ids inside, for messages (None: no names), and the place of row 0 among them."""
        if single and self.folder is not None and (self.listed is None or path.stem in self._listed_names):
            return [path.stem], 0
        return (None, 0) if self.listed is None else (self.listed[1], self.done)

    def _require_kind(self, where: Where, rows: TokenRows) -> None:
        """Refuse a file with another width or dtype than the first file's."""
        kind = (rows.dim, rows.dtype)
        if self.kind is None:
            self.kind, self.key = kind, where.key
        for what, first, found in zip(("embedding widths", "dtypes"), self.kind, kind):
            if first != found:
                where.fail(
                    f"mixed {what}: {where.row(0)} has {found}, {self.files[0].name} has {first}; need one for the whole set"
                )

    def _require_numbers(self, path: Path, rows: int) -> None:
        if not self._numbered:
            raise DataError(
                f"{path}: holds {rows} rows, so it is a chunk, but the files of {self.folder} differ in more than one number: "
                "their order is unknown. Name the files one by one, in their order, or call them chunk_000, chunk_001, ..."
            )

    def _all_ids(self, where: Where, counts: Sequence[int]) -> tuple[list[str] | None, str]:
        """Ids of all rows: inside the files, names of files of one document each, or an id file's; and where they are from."""
        total = sum(counts)
        if self.folder is not None and total == len(counts) and not self.ids:
            ids, ids_are = ids_by_file(self.files, self.listed)
            return one_list(where, [checked_ids(where, ids)], total), ids_are
        if self.folder is not None:
            in_order(self.files, where.notes)  # sorted already; notes it where one seems to be missing
        lists = [(where.sibling("ids"), self.ids)] if self.ids else []
        lists += [] if self.listed is None else [self.listed]
        return (one_list(where, lists, total) if lists else None), ""

    def _reopen(self, number: int) -> TokenRows:
        """The rows of one file once more; `DataError` where it is not what was checked."""
        path, known = self.files[number], self.lengths[number]
        if _stamp(path) == self.stamps[number]:
            table, _ = self._open(path)
            found = self._found(table)
            where = where_of(table, found, ())
            rows = build_rows(table, found, where, drop_zero_tokens=self.drop_zero_tokens, known=known)
            if (rows.dim, rows.dtype) == self.kind and np.array_equal(rows.lengths, known):
                return rows
        raise DataError(f"{path}: changed while it was imported. Run the command again: it checks what is there now")


def _lift_document(table: FileTable, key: str) -> None:
    """Turn a file's bare `[L, d]` into a set of one document, in place; its mask `[L]` and length likewise."""
    value, prefix = table.entries[key], key.removesuffix("embeddings")
    if not isinstance(value, Tensor) or value.dim() != 2:
        return
    mask, length = (table.entries.get(f"{prefix}{suffix}") for suffix in ("mask", "lengths"))
    table.entries[key] = [value] if mask is None else value[None]
    if isinstance(mask, Tensor):
        table.entries[f"{prefix}mask"] = mask.reshape(1, -1)
    if isinstance(length, Tensor):
        table.entries[f"{prefix}lengths"] = length.reshape(-1)
    elif type(length) is int:
        table.entries[f"{prefix}lengths"] = [length]


def _holds_one(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == 1
    return isinstance(value, (list, tuple)) and len(value) == 1


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of the last change: where they differ after a file was checked, its content may differ too."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns
