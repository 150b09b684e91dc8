"""LOADERS: where a Task comes from.

`beir` (public sets, by card), `real-mm-rag` (page images, by card), `local` (a folder in BEIR layout or of page images), `demo`
(generated), `irds` (ids of the package ir_datasets). A loader is one function `(dataset, data_dir, wanted)
-> Task` and one line of `LOADERS`; the options beyond `split` and `quiet` that it knows stand in `OPTIONS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxsim_eval.data import generated, irds, real_mm_rag
from maxsim_eval.data.assembling import Part, assemble
from maxsim_eval.data.beir import LAYOUT, check_name, check_split, read_judgements, read_texts, splits
from maxsim_eval.data.beir_download import fetch
from maxsim_eval.data.cards import Card, known, load_card, read_card
from maxsim_eval.data.page_folder import FOLDER, QUERIES, load_image_folder
from maxsim_eval.data.page_folder import LAYOUT as IMAGE_LAYOUT
from maxsim_eval.errors import DataError, UnknownNameError, UsageError, did_you_mean
from maxsim_eval.types import Task


@dataclass(frozen=True)
class Wanted:
    """Which task of a dataset. None: the source's default."""

    split: str | None = None
    quiet: bool = False
    queries: str | None = None  # text, pages
    rephrase: int | None = None  # 0 to 3
    revision: str | None = None  # of the dataset's repository


@dataclass(frozen=True)
class Unread:
    """A task not yet read: the arguments of `load_task`, which is called when this is called."""

    source: str
    name: str  # as of `load_task`
    options: Mapping[str, Any]

    @property
    def there(self) -> tuple[str, str] | None:
        """Source and dataset where reading neither downloads nor writes, so that several processes may at once; else None."""
        data_dir = Path(self.options["data_dir"])
        if self.source == "local":
            folder = find_local(self.name, data_dir)
            return None if folder is None else (self.source, folder.resolve().name)
        folder = _find(_places(self.name, data_dir, "beir"), _BEIR_CORPUS) if self.source == "beir" else None
        return None if folder is None else (self.source, self.name)

    def __call__(self) -> Task:
        """Read it."""
        return load_task(self.source, self.name, **self.options)


_BEIR_CORPUS = ("corpus.jsonl",)
LOCAL_CORPUS = (*_BEIR_CORPUS, FOLDER)  # either makes a folder a local dataset
Loader = Callable[[str, Path, Wanted], Task]
OPTIONS: dict[str, tuple[str, ...]] = {"real-mm-rag": ("queries", "rephrase", "revision"), "local": ("queries",)}


def load_task(
    source: str,
    dataset: str,
    *,
    data_dir: Path | str,
    split: str | None = None,
    quiet: bool = False,
    queries: str | None = None,
    rephrase: int | None = None,
    revision: str | None = None,
) -> Task:
    """Load a retrieval task.

    Args:
        source: a name of `LOADERS`.
        dataset: a name of that source (`known(source)`); for `local` also a path.
        data_dir: folder of the datasets; `beir` downloads into it what is not there.
        split: qrels to take; default the card's (BEIR: `test`, for `msmarco` `dev`), else `test`.
        quiet: no progress bars.
        queries: `text` (default) or `pages`, each page a query: `real-mm-rag` and `local` folders of page images.
        rephrase: wording of the questions of `real-mm-rag`, 0 (default, as written) to 3.
        revision: commit of the repository of `real-mm-rag`; default the card's, else the newest.

    Returns:
        Task whose queries are those with at least one judgement in the split, in file order. Judgements of unknown
        documents stay (they count as relevant and never found, as in BEIR's own evaluation); those of unknown queries
        cannot. Both, and counts that differ from the card's, are said in `Task.warnings`. Texts and page images are held in
        the ways of `items`: read-only sequences.

    Raises:
        UnknownNameError: unknown source or dataset. UsageError: a collection whose parts must be named; an option that the
            source does not have, or a value it cannot take.
        DataError: data missing (the message says where it looked and how to get it), malformed, empty or unjudged.
    """
    if source not in LOADERS:
        raise UnknownNameError("source", source, LOADERS)
    if not dataset:
        raise UsageError(f"dataset: got an empty name, need a dataset of source {source!r}")
    check_name("dataset", dataset)
    for option, value in (("queries", queries), ("rephrase", rephrase), ("revision", revision)):
        if value is not None and option not in OPTIONS.get(source, ()):
            owners = ", ".join(name for name, options in OPTIONS.items() if option in options)
            raise UsageError(f"{option} {value!r}: source {source!r} has no such option, only {owners}")
    if queries not in (None, *QUERIES):
        raise UnknownNameError("kind of queries", str(queries), QUERIES)
    wanted = Wanted(split=split, quiet=quiet, queries=queries, rephrase=rephrase, revision=revision)
    return LOADERS[source](dataset, Path(data_dir), wanted)


def _load_beir(dataset: str, data_dir: Path, wanted: Wanted) -> Task:
    card = load_card("beir", dataset)
    if card.subsets:
        parts = ", ".join(f"{card.name}/{part}" for part in card.subsets)
        raise UsageError(f"dataset {card.name!r} is a collection of {len(card.subsets)} sets; name one of them: {parts}")
    folder = _find(_places(dataset, data_dir, "beir"), _BEIR_CORPUS)
    if folder is None:
        try:
            folder = fetch(card, data_dir)
        except DataError as error:
            looked = " and ".join(str(path) for path in _places(dataset, data_dir, "beir"))
            raise DataError(f"{error} (Looked in {looked}.)") from error
    return load_folder("beir", dataset, folder, split=wanted.split, card=card, quiet=wanted.quiet)


def _load_local(dataset: str, data_dir: Path, wanted: Wanted) -> Task:
    folder = find_local(dataset, data_dir)
    if folder is None:
        places = ", ".join(str(path) for path in _local_places(dataset, data_dir))
        near = did_you_mean(dataset, _local_names(data_dir))
        raise DataError(
            f"local dataset {dataset!r}: no such folder. {near}Looked for {places}. "
            f"Need a folder in BEIR layout ({LAYOUT}) or of page images ({IMAGE_LAYOUT}); name its parent with --data-dir, or "
            "give its path."
        )
    name = folder.resolve().name
    check_name("dataset", name)  # a path may lead to any folder
    card = read_card(folder / "card.toml", "local") if (folder / "card.toml").is_file() else None
    images, texts = (folder / FOLDER).is_dir(), (folder / "corpus.jsonl").is_file()
    if images and texts:
        raise DataError(f"{folder}: holds corpus.jsonl and {FOLDER}/, need one of them: a dataset of texts or of page images")
    if images:
        queries = wanted.queries or "text"
        return load_image_folder("local", name, folder, split=wanted.split, card=card, queries=queries, quiet=wanted.quiet)
    if wanted.queries == "pages":
        raise UsageError(f"queries 'pages': {folder} holds texts; a folder of page images holds {IMAGE_LAYOUT}")
    return load_folder("local", name, folder, split=wanted.split, card=card, quiet=wanted.quiet)


def _local_names(data_dir: Path) -> list[str]:
    """Names of the local datasets in this data folder."""
    found = (path for home in (data_dir, data_dir / "local") if home.is_dir() for path in home.iterdir())
    return sorted({path.name for path in found if _holds(path, LOCAL_CORPUS)})


def find_local(dataset: str, data_dir: Path) -> Path | None:
    """The folder that source `local` takes for this name or path, be it whole or not; None where there is no folder."""
    return _find(_local_places(dataset, data_dir), LOCAL_CORPUS)


def has_local(dataset: str, data_dir: Path) -> bool:
    """Whether there is a local dataset of that name or path; one that lacks files counts too: loading it says what it lacks."""
    folder = find_local(dataset, data_dir)
    if folder is None:
        return False
    # A plain name may be that of just any folder here, say the one with its embeddings: only a corpus makes it a dataset.
    by_chance = folder not in _places(dataset, data_dir, "local") and Path(dataset).name == dataset
    return not by_chance or _holds(folder, LOCAL_CORPUS)


def _local_places(dataset: str, data_dir: Path) -> list[Path]:
    return [*_places(dataset, data_dir, "local"), local_path(dataset)]


def local_path(dataset: str) -> Path:
    """A local dataset's name as a path; `~` is the home folder (a `~name` that nobody has stays as it is)."""
    return Path(os.path.expanduser(dataset))


def _load_real_mm_rag(dataset: str, data_dir: Path, wanted: Wanted) -> Task:
    return real_mm_rag.load(
        load_card("real-mm-rag", dataset),
        data_dir,
        split=wanted.split,
        rephrase=wanted.rephrase or 0,
        queries=wanted.queries or "text",
        revision=wanted.revision,
        quiet=wanted.quiet,
    )


def _load_demo(dataset: str, data_dir: Path, wanted: Wanted) -> Task:
    card = load_card("demo", dataset)
    folder, changed = generated.ensure(dataset, data_dir / "demo")
    task = load_folder("demo", dataset, folder, split=wanted.split, card=card, quiet=wanted.quiet)
    if changed:
        note = f"{folder} did not hold what the generator writes; it was generated anew"
        task = replace(task, warnings=(note, *task.warnings))
    return task


def _load_irds(dataset: str, data_dir: Path, wanted: Wanted) -> Task:
    if wanted.split is not None:
        raise UsageError(f"split {wanted.split!r}: an id of ir_datasets names its split, as in {dataset}/{wanted.split}")
    return irds.load(dataset)


LOADERS: dict[str, Loader] = {
    "beir": _load_beir,
    "real-mm-rag": _load_real_mm_rag,
    "local": _load_local,
    "demo": _load_demo,
    irds.SOURCE: _load_irds,
}


def _places(dataset: str, data_dir: Path, source: str) -> list[Path]:
    return [data_dir / dataset, data_dir / source / dataset]


def _find(places: list[Path], corpus: tuple[str, ...]) -> Path | None:
    """The first folder with a corpus, else the first that exists at all: reading it then says what it lacks."""
    folders = [path for path in places if path.is_dir()]
    return next((path for path in folders if _holds(path, corpus)), folders[0] if folders else None)


def _holds(folder: Path, corpus: tuple[str, ...]) -> bool:
    return any(os.path.exists(folder / name) for name in corpus)  # Path.exists raises where the folder is not ours to read


def load_folder(
    source: str, dataset: str, folder: Path, *, split: str | None = None, card: Card | None = None, quiet: bool = False
) -> Task:
    """Load a folder in BEIR layout; `source` and `dataset` only name it. Arguments and errors as in `load_task`."""
    split = split or (card.split if card else "test")
    check_split(split)
    qrels_file = folder / "qrels" / f"{split}.tsv"
    for path in (folder / "corpus.jsonl", folder / "queries.jsonl"):
        if not path.is_file():
            raise DataError(f"{path}: missing; a folder in BEIR layout holds {LAYOUT}")
    if not qrels_file.is_file():
        table = next(
            (path for path in (qrels_file.with_suffix(".csv"), qrels_file.with_suffix(".txt")) if path.is_file()), None
        )
        found = f"found {table.name}, " if table else ""
        there = ", ".join(splits(folder)) or "none"
        raise DataError(
            f"{qrels_file}: missing; {found}need a tab-separated file with a header. Splits there: {there} (--split)"
        )
    judgements = read_judgements(qrels_file, quiet=quiet)
    queries = read_texts(folder / "queries.jsonl", titles=False, quiet=quiet)
    corpus = read_texts(folder / "corpus.jsonl", titles=True, quiet=quiet)
    if not corpus.ids:
        raise DataError(f"{folder / 'corpus.jsonl'}: the corpus is empty, need at least one document")
    return assemble(
        source,
        dataset,
        split,
        qrels_file,
        judgements,
        Part(queries.ids, queries.texts, "queries.jsonl"),
        Part(corpus.ids, corpus.texts, "corpus.jsonl"),
        card=card,
        provenance={
            "folder": str(folder),
            "sha256": {
                "corpus.jsonl": corpus.sha256,
                "queries.jsonl": queries.sha256,
                f"qrels/{split}.tsv": judgements.sha256,
            },
        },
    )


__all__ = ["LOADERS", "find_local", "has_local", "known", "load_card", "load_folder", "load_task", "local_path"]
