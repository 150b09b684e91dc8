"""REAL-MM-RAG (Wasserman et al., 2025): pages of reports and slides as images, questions in four wordings.

The four sets are Hugging Face datasets of one table each, with a row for every question and for every page without one:
`image_filename`, `image`, `query`, `rephrase_level_1` to `_3`, `answer`, `id`. The corpus is every image once, in table order;
a question's one relevant document is the page of its row. Images stay in the table, which `datasets` maps from the disk, and are
decoded one at a time.

The set is read from `<data-dir>/real-mm-rag/<name>` (or `<data-dir>/<name>`) where that folder has its parquet files, else
downloaded from the Hub into `datasets`' own cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxsim_eval.data.assembling import Part, assemble
from maxsim_eval.data.beir import Judgements, check_id, check_split
from maxsim_eval.data.cards import Card
from maxsim_eval.data.items import PackedTexts, Pages
from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.types import Task

LEVELS = (0, 1, 2, 3)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class _SplitRows:
    """The rows of one split: `rows` without images, `images` the same rows with the images' files undecoded."""

    where: str
    rows: dict[str, list[Any]]
    images: Any
    revision: str


def column_of(rephrase: int) -> str:
    """The table's column with the questions in this wording: 0 as written, 1 to 3 ever further from it.

    Raises:
        UsageError: another level.
    """
    if rephrase not in LEVELS:
        raise UsageError(f"rephrase level {rephrase!r}: need 0 (the questions as written), 1, 2 or 3")
    return f"rephrase_level_{rephrase}" if rephrase else "query"


def load(
    card: Card,
    data_dir: Path,
    *,
    split: str | None = None,
    rephrase: int = 0,
    queries: str = "text",
    revision: str | None = None,
    quiet: bool = False,
) -> Task:
    """Load one set.

    Args:
        rephrase: wording of the questions, see `column_of`; the task's split then says so (`test-rephrase-2`).
        queries: `text`, or `pages`: every page asks for itself (`test-pages`), which tells whether paths agree, not quality.
        revision: commit of the repository; default the card's, else the newest.

    Raises:
        UsageError: no such level. MissingPackageError: `datasets` is not installed.
        DataError: a set that is neither here nor can be downloaded, damaged files, no such split, missing columns, one name for
            two images, no question. The message names what was found and how to get the set by hand.
    """
    column = column_of(rephrase)
    split = split or card.split
    check_split(split)
    table = _open(card, data_dir, split, revision or card.revision, column, quiet)
    names, first = _unique_images(table)
    ids = _page_ids(table.where, names)
    images = table.images
    corpus = Part(ids, Pages([f"{table.where}: {name}" for name in names], lambda row: _bytes(images, first[row])), "the table")
    warnings = []
    if not card.revision and not revision:
        warnings.append(
            f"{card.repository}: the card pins no revision; loaded " + (table.revision or "from local files, revision unknown")
        )
    if queries == "pages":
        label, asked = f"{split}-pages", corpus
        judgements = Judgements({name: {name: 1} for name in ids})
        warnings.append("page-as-query: every page asks for itself; this tells whether paths agree, not how good a model is")
    else:
        label = f"{split}-rephrase-{rephrase}" if rephrase else split
        asked, judgements, notes = _questions(table, column, dict(zip(names, ids)))
        warnings += notes
    task = assemble(
        "real-mm-rag",
        card.name,
        label,
        table.where,
        judgements,
        asked,
        corpus,
        card=card,
        provenance={"revision": table.revision, "rephrase": rephrase, "queries": queries, "pages": len(ids)},
    )
    return replace(task, warnings=(*warnings, *task.warnings))


def _questions(table: _SplitRows, column: str, ids: dict[str, str]) -> tuple[Part, Judgements, list[str]]:
    """The questions of one wording with their ids, each judged relevant for the page of its row."""
    written, wording = table.rows["query"], table.rows[column]
    rows = [row for row, text in enumerate(written) if text and text.strip()]
    if not rows:
        raise DataError(f"{table.where}: no row has a query, need at least one")
    kept = [row for row in rows if wording[row] and wording[row].strip()]
    notes = []
    if len(kept) < len(rows):
        notes.append(f"{table.where}: {len(rows) - len(kept)} of {len(rows)} queries lack {column!r} and were left out")
    if not kept:
        raise DataError(f"{table.where}: no query has {column!r}")
    names = [str(table.rows["id"][row]) for row in kept] if "id" in table.rows else []
    if len(set(names)) != len(kept):
        names = [f"row-{row}" for row in kept]
        notes.append(f"{table.where}: no column of unique query ids; the numbers of their rows were taken")
    for name in names:
        check_id(table.where, "query id", name)
    qrels = {name: {ids[table.rows["image_filename"][row]]: 1} for name, row in zip(names, kept)}
    return Part(names, PackedTexts([wording[row] for row in kept]), "the table"), Judgements(qrels), notes


def _unique_images(table: _SplitRows) -> tuple[list[str], list[int]]:
    """Names of the images in the order they first appear, and the row of each first appearance."""
    first: dict[str, int] = {}
    for row, name in enumerate(table.rows["image_filename"]):
        if not isinstance(name, str) or not name:
            raise DataError(f"{table.where}: row {row}: image_filename is {name!r}, need a name")
        seen = first.setdefault(name, row)
        if seen != row and _digest(table.images, seen) != _digest(table.images, row):
            raise DataError(f"{table.where}: rows {seen} and {row} hold different images, both named {name!r}")
    return list(first), list(first.values())


def _page_ids(where: str, names: Sequence[str]) -> list[str]:
    """Image names as ids: TREC runs hold no white space, so it is written %20 (and % as %25, so that no two become one)."""
    for name in names:
        parts = re.split(r"[/\\]", name)
        if ".." in parts or not parts[0]:
            raise DataError(f"{where}: the image name {name!r} points outside its folder")
    ids = [re.sub(r"[%\s]", lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name) for name in names]
    for name in ids:
        check_id(where, "image_filename", name)
    return ids


def _bytes(images: Any, row: int) -> bytes:
    value = images[row]["image"]
    data = value.get("bytes") if isinstance(value, dict) else None
    if not data:
        raise DataError(f"row {row}: no image in it (found {value!r:.60}), need the bytes of a PNG or JPEG file")
    return bytes(data)


def _digest(images: Any, row: int) -> bytes:
    return hashlib.sha256(_bytes(images, row)).digest()


def _open(card: Card, data_dir: Path, split: str, revision: str, column: str, quiet: bool) -> _SplitRows:
    """The split's table; `column` must be in it."""
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(f"the dataset {card.name!r}", "datasets", "encoders") from None
    places = [data_dir / "real-mm-rag" / card.name, data_dir / card.name]
    folder = next((path for path in places if path.is_dir()), None)
    where = f"{folder}, split {split!r}" if folder else f"{card.repository}, split {split!r}"
    try:
        with _progress(datasets, quiet):
            if folder is not None:
                files = {split: [str(path) for path in _parquet(folder, split)]}
                found = datasets.load_dataset("parquet", data_files=files, split=split)
            else:
                found = datasets.load_dataset(card.repository, split=split, revision=revision or None)
        missing = [name for name in ("image_filename", "image", "query", column) if name not in found.column_names]
        if missing:
            raise DataError(f"{where}: no column {missing[0]!r}; found {', '.join(found.column_names)}")
        wanted = dict.fromkeys(["image_filename", "query", column, *(["id"] if "id" in found.column_names else [])])
        rows = found.select_columns(list(wanted)).to_dict()
        images = found.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(
            f"{where}: cannot be loaded ({cause.__class__.__name__}: {cause}). {by_hand(card, data_dir)}"
        ) from error
    return _SplitRows(where, rows, images, "" if folder else _revision(found))


def _parquet(folder: Path, split: str) -> list[Path]:
    files = sorted({*folder.glob(f"{split}-*.parquet"), *folder.glob(f"data/{split}-*.parquet")})
    if not files:
        there = sorted({path.name.split("-")[0] for path in folder.glob("**/*.parquet")})
        raise DataError(
            f"{folder}: no {split}-*.parquet in it or in its data/, need the files of the repository; "
            f"splits there: {', '.join(there) or 'none'} (--split)"
        )
    numbers = [re.search(r"-(\d{5})-of-(\d{5})\.parquet$", path.name) for path in files]
    whole = max((int(number[2]) for number in numbers if number), default=0)
    if whole and len({number[1] for number in numbers if number}) != whole:
        raise DataError(f"{folder}: {len(files)} of the {whole} files of split {split!r}: the download is not complete")
    return files


def by_hand(card: Card, data_dir: Path) -> str:
    """How to get the set without this program."""
    target = data_dir / "real-mm-rag" / card.name
    return (
        f"To get it by hand: hf download {card.repository} --repo-type dataset --local-dir {target} on a machine with network "
        "access; or name the folder that already has real-mm-rag/ with --data-dir."
    )


def _revision(found: Any) -> str:
    """The commit a downloaded dataset is of: `datasets` names the folder of its cache after it."""
    names = (part for file in found.cache_files for part in Path(file["filename"]).parts)
    return next((part for part in names if _COMMIT.fullmatch(part)), "")


@contextmanager
def _progress(datasets: Any, quiet: bool) -> Iterator[None]:
    """`datasets`' progress bars, hidden within when quiet."""
    hidden = datasets.are_progress_bars_disabled()
    if quiet and not hidden:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if quiet and not hidden:
            datasets.enable_progress_bars()
