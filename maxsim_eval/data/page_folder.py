"""A folder of page images as a dataset: `pages/` with PNG or JPEG files, BEIR's `queries.jsonl` and `qrels/<split>.tsv`.

    <name>/pages/**/*.png|jpg|jpeg   a page's id is its name below `pages/`, without suffix: report-2019/p003
    <name>/queries.jsonl             text queries                       (not needed for --queries pages)
    <name>/qrels/test.tsv            query-id, corpus-id, score         split of the text queries
    <name>/qrels/pages.tsv           the same with page ids as query-id split of --queries pages

Images are opened one at a time, when an encoder asks for them. With `queries="pages"` each page that the split judges is itself a
query (with ColPali about 1024 vectors a side).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from maxsim_eval.data.assembling import Part, assemble
from maxsim_eval.data.beir import Judgements, check_id, check_split, read_judgements, read_texts, splits
from maxsim_eval.data.cards import Card
from maxsim_eval.data.items import Pages
from maxsim_eval.errors import DataError
from maxsim_eval.files import open_regular
from maxsim_eval.types import Task

FOLDER = "pages"
LAYOUT = "pages/ with PNG or JPEG files, queries.jsonl and qrels/<split>.tsv"
SUFFIXES = (".png", ".jpg", ".jpeg")
QUERIES = ("text", "pages")


def load_image_folder(
    source: str,
    dataset: str,
    folder: Path,
    *,
    split: str | None = None,
    card: Card | None = None,
    queries: str = "text",
    quiet: bool = False,
) -> Task:
    """Load a folder of page images.

    Args:
        source, dataset: only name the task.
        split: qrels to take; default `pages` for page queries, else the card's or `test`.
        queries: `text` (queries.jsonl) or `pages`. A page query does not retrieve its own page, unless the qrels judge
            some page relevant to itself.

    Raises:
        UsageError: a split that is no plain name.
        DataError: no pages, two files of one id, an id with white space, an empty file, missing or malformed qrels or queries.
            What is no image is found when it is opened; the message then names it.
    """
    paths, notes = _pages(folder / FOLDER)
    ids = list(paths)
    files = list(paths.values())
    pages = Part(ids, Pages([str(path) for path in files], lambda row: _read(files[row])), f"{FOLDER}/")
    if split is None:
        split = "pages" if queries == "pages" else card.split if card else "test"
    check_split(split)
    qrels_file = folder / "qrels" / f"{split}.tsv"
    if not qrels_file.is_file():
        there = ", ".join(splits(folder)) or "none"
        raise DataError(f"{qrels_file}: missing; a folder of page images holds {LAYOUT}. Splits there: {there} (--split)")
    judgements = read_judgements(qrels_file, quiet=quiet)
    texts = folder / "queries.jsonl"
    if queries == "pages":
        asked = pages
    elif texts.is_file():
        read = read_texts(texts, titles=False, quiet=quiet)
        asked = Part(read.ids, read.texts, texts.name, read.sha256)
    else:
        raise DataError(f"{texts}: missing; a folder of page images holds {LAYOUT} (or take the pages: --queries pages)")
    task = assemble(
        source,
        dataset,
        split,
        qrels_file,
        judgements,
        asked,
        pages,
        card=card,
        exclude_same_id=queries == "pages" and not _finds_itself(judgements),
        provenance={
            "folder": str(folder),
            "sha256": {f"qrels/{split}.tsv": judgements.sha256} | ({asked.file: asked.sha256} if asked.sha256 else {}),
            "pages": len(ids),
            "queries": queries,
        },
    )
    return replace(task, warnings=(*notes, *task.warnings))


def _finds_itself(judgements: Judgements) -> bool:
    return any(row.get(query, 0) > 0 for query, row in judgements.qrels.items())


def _pages(folder: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Page id -> file, sorted by id, and a warning about other files, if there are any."""
    found: dict[str, Path] = {}
    others: list[Path] = []
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir() and not path.name.startswith(".")):
        if path.suffix.lower() not in SUFFIXES:
            others.append(path)
            continue
        name = path.relative_to(folder).with_suffix("").as_posix()
        check_id(str(path), "the page id", name)
        if name in found:
            raise DataError(f"{path}: its page id {name!r} is already that of {found[name].name}, need unique ids")
        if not path.is_file():
            raise DataError(f"{path}: a pipe, a device or a dead link, need a PNG or JPEG file")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: an empty file, need a PNG or JPEG image")
        found[name] = path
    if not found:
        raise DataError(f"{folder}: no PNG or JPEG file in it; a folder of page images holds {LAYOUT}")
    if not others:
        return dict(sorted(found.items())), ()
    note = f"{folder}: {len(others)} files are neither PNG nor JPEG and were left out, first {others[0].name!r}"
    return dict(sorted(found.items())), (note,)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as handle:  # it may have become a pipe, which would be waited for
            return handle.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
