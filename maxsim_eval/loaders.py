"""LOADERS: where a Task comes from. `beir` (public sets, by card), `local` (any folder in BEIR layout), `demo` (generated).

A loader is one function `(dataset, data_dir, split, quiet) -> Task` and one line of `LOADERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from maxsim_eval import demo
from maxsim_eval.beir_format import LAYOUT, Judgements, Texts, read_judgements, read_texts, splits
from maxsim_eval.cards import Card, known, load_card
from maxsim_eval.download import fetch
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.types import Task

Loader = Callable[[str, Path, str | None, bool], Task]


def load_task(source: str, dataset: str, *, data_dir: Path | str, split: str | None = None, quiet: bool = False) -> Task:
    """Load a retrieval task.

    Args:
        source: a name of `LOADERS`.
        dataset: a name of that source (`known(source)`); for `local` also a path.
        data_dir: folder of the datasets; `beir` downloads into it what is not there.
        split: qrels to take; default the card's (BEIR: `test`, for `msmarco` `dev`), else `test`.
        quiet: no progress bars.

    Returns:
        Task whose queries are those with at least one judgement in the split, in file order. Judgements of unknown
        documents stay (they count as relevant and never found, as in BEIR's own evaluation); those of unknown queries
        cannot. Both, and counts that differ from the card's, are said in `Task.warnings`.

    Raises:
        UnknownNameError: unknown source or dataset. UsageError: a collection whose parts must be named.
        DataError: data missing (the message says where it looked and how to get it), malformed, empty or unjudged.
    """
    if source not in LOADERS:
        raise UnknownNameError("source", source, LOADERS)
    if not dataset:
        raise UsageError(f"dataset: got an empty name, need a dataset of source {source!r}")
    return LOADERS[source](dataset, Path(data_dir), split, quiet)


def _load_beir(dataset: str, data_dir: Path, split: str | None, quiet: bool) -> Task:
    card = load_card("beir", dataset)
    if card.subsets:
        parts = ", ".join(f"{card.name}/{part}" for part in card.subsets)
        raise UsageError(f"dataset {card.name!r} is a collection of {len(card.subsets)} sets; name one of them: {parts}")
    folder = _find(_places(dataset, data_dir, "beir"))
    if folder is None:
        try:
            folder = fetch(card, data_dir)
        except DataError as error:
            looked = " and ".join(str(path) for path in _places(dataset, data_dir, "beir"))
            raise DataError(f"{error} (Looked in {looked}.)") from error
    return load_folder("beir", dataset, folder, split=split, card=card, quiet=quiet)


def _load_local(dataset: str, data_dir: Path, split: str | None, quiet: bool) -> Task:
    places = [*_places(dataset, data_dir, "local"), Path(dataset).expanduser()]
    folder = _find(places)
    if folder is None:
        raise DataError(
            f"local dataset {dataset!r}: no such folder. Looked for {', '.join(str(path) for path in places)}. "
            f"Need a folder in BEIR layout ({LAYOUT}); name its parent with --data-dir, or give its path."
        )
    return load_folder("local", folder.resolve().name, folder, split=split, card=None, quiet=quiet)


def _load_demo(dataset: str, data_dir: Path, split: str | None, quiet: bool) -> Task:
    card = load_card("demo", dataset)
    folder, changed = demo.ensure(dataset, data_dir / "demo")
    task = load_folder("demo", dataset, folder, split=split, card=card, quiet=quiet)
    if changed:
        note = f"{folder} did not hold what the generator writes; it was generated anew"
        task = replace(task, warnings=(note, *task.warnings))
    return task


LOADERS: dict[str, Loader] = {"beir": _load_beir, "local": _load_local, "demo": _load_demo}


def _places(dataset: str, data_dir: Path, source: str) -> list[Path]:
    return [data_dir / dataset, data_dir / source / dataset]


def _find(places: list[Path]) -> Path | None:
    """The first folder with a corpus, else the first folder at all: what it lacks is then said when it is read."""
    folders = [path for path in places if path.is_dir()]
    return next((path for path in folders if (path / "corpus.jsonl").is_file()), folders[0] if folders else None)


def load_folder(
    source: str, dataset: str, folder: Path, *, split: str | None = None, card: Card | None = None, quiet: bool = False
) -> Task:
    """Load a folder in BEIR layout; `source` and `dataset` only name it. Arguments and errors as in `load_task`."""
    split = split or (card.split if card else "test")
    if not split or Path(split).name != split:
        raise UsageError(f"split {split!r}: need the name of a file qrels/<split>.tsv, without folders")
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
    warnings = list(_judgement_warnings(qrels_file, judgements, queries, corpus))
    chosen = [(name, text) for name, text in zip(queries.ids, queries.texts) if name in judgements.qrels]
    warnings += _count_warnings(card, split, corpus, len(chosen), judgements)
    return Task(
        source=source,
        dataset=dataset,
        split=split,
        query_ids=[name for name, _ in chosen],
        queries=[text for _, text in chosen],
        document_ids=corpus.ids,
        documents=corpus.texts,
        qrels={name: judgements.qrels[name] for name, _ in chosen},
        exclude_same_id=bool(card and card.exclude_same_id),
        provenance=_provenance(folder, split, card, judgements, queries, corpus),
        warnings=tuple(warnings),
    )


def _judgement_warnings(path: Path, judgements: Judgements, queries: Texts, corpus: Texts) -> Iterator[str]:
    """Say what of the qrels does not fit the rest.

    Raises:
        DataError: no judged query, or no judged document, is in the folder: nothing could be evaluated.
    """
    query_ids, document_ids = set(queries.ids), set(corpus.ids)
    unknown = [row for query, row in judgements.qrels.items() if query not in query_ids]
    lost = sum(len(row) for row in unknown)
    pairs = [(query, name) for query, row in judgements.qrels.items() if query in query_ids for name in row]
    if not pairs:
        example = f" (for example {next(iter(judgements.qrels))!r})" if judgements.qrels else ""
        raise DataError(
            f"{path}: no judged queries: {lost} judgements of {len(unknown)} queries, none of which is in "
            f"queries.jsonl{example}; need at least one"
        )
    missing = [name for _, name in pairs if name not in document_ids]
    if len(missing) == len(pairs):
        raise DataError(
            f"{path}: none of the {len(pairs)} judged documents is in corpus.jsonl (for example {missing[0]!r}): "
            "qrels and corpus belong to different sets"
        )
    if lost:
        name = next(query for query in judgements.qrels if query not in query_ids)
        yield f"{path}: {lost} judgements of {len(unknown)} queries that queries.jsonl lacks were left out, first {name!r}"
    if missing:
        yield (
            f"{path}: {len(missing)} judgements name documents that corpus.jsonl lacks, first {missing[0]!r}; they stay, "
            "so those documents count as judged and never retrieved"
        )
    if judgements.repeated:
        yield f"{path}: {judgements.repeated} pairs are judged twice with different scores; the later score was taken"


def _count_warnings(card: Card | None, split: str, corpus: Texts, queries: int, judgements: Judgements) -> Iterator[str]:
    if card is None:
        return
    expected = [("documents", card.documents, len(corpus.ids))]
    if split == card.split:
        expected.append(("judged queries", card.queries, queries))
        expected.append(("judgements", card.judgements, sum(len(row) for row in judgements.qrels.values())))
    for what, count, found in expected:
        if count is not None and count != found:
            yield (
                f"{card.source} {card.name}: {found} {what} in split {split!r}, its card expects {count}: this is NOT "
                "the published set, figures are not comparable with published ones"
            )


def _provenance(
    folder: Path, split: str, card: Card | None, judgements: Judgements, queries: Texts, corpus: Texts
) -> dict[str, object]:
    files = {
        "corpus.jsonl": corpus.sha256,
        "queries.jsonl": queries.sha256,
        f"qrels/{split}.tsv": judgements.sha256,
    }
    provenance: dict[str, object] = {"folder": str(folder), "sha256": files}
    if card is not None:
        shown = {"title": card.title, "homepage": card.homepage, "url": card.url, "licence": card.licence}
        provenance |= {key: value for key, value in shown.items() if value}
    return provenance


__all__ = ["LOADERS", "known", "load_card", "load_folder", "load_task"]
