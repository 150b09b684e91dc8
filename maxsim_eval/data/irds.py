"""Datasets of the package ir_datasets, by its ids: `beir/scifact/test`, `msmarco-passage/trec-dl-2019/judged`, ...

ir_datasets keeps what it downloads in its own folder (`IR_DATASETS_HOME`, default `~/.ir_datasets`). A text is what it calls an
item's default text; of two different judgements of a pair the later holds.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maxsim_eval.data.assembling import Part, assemble
from maxsim_eval.data.beir import Judgements, check_id
from maxsim_eval.data.items import PackedTexts
from maxsim_eval.errors import DataError, MissingPackageError, UnknownNameError
from maxsim_eval.types import Task

SOURCE = "irds"


def load(name: str) -> Task:
    """Load the dataset of that id. The Task's `dataset` is the part of the id that has the documents: splits share it.

    Raises:
        UnknownNameError: ir_datasets has no such id. MissingPackageError: ir_datasets is not installed.
        DataError: no documents, queries or judgements under that id; a download that failed; data that cannot be evaluated.
    """
    irds = _package()
    try:
        dataset = irds.load(name)
    except KeyError:
        raise UnknownNameError("ir_datasets id", name, irds.registry) from None
    where = f"ir_datasets {name}"
    for what in ("docs", "queries", "qrels"):
        if not getattr(dataset, f"has_{what}")():
            raise DataError(f"{where}: has no {what}, need an id with docs, queries and qrels, as beir/scifact/test")
    with _reading(where):
        corpus = _part(dataset.docs_iter(), "doc", where)
        queries = _part(dataset.queries_iter(), "query", where)
        judgements = _judgements(dataset.qrels_iter())
    if not corpus.ids:
        raise DataError(f"{where}: the corpus is empty, need at least one document")
    home = irds.docs_parent_id(name) or name
    split = name.removeprefix(home).strip("/").replace("/", "-") or "test"
    home = home if name.startswith(home) else name
    version = importlib.import_module("importlib.metadata").version("ir_datasets")
    return assemble(SOURCE, home, split, where, judgements, queries, corpus, provenance={"ir_datasets": version, "id": name})


def _package() -> Any:
    try:
        return importlib.import_module("ir_datasets")
    except ModuleNotFoundError as error:
        raise MissingPackageError("source 'irds'", error.name or "ir_datasets", SOURCE) from None


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn what a download or a damaged file raises into a `DataError` of one line."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise DataError(f"{where}: could not be read ({type(error).__name__}: {first})") from error


def _part(items: Any, kind: str, where: str) -> Part:
    """Ids and texts, in ir_datasets' order; an id twice is refused."""
    ids: dict[str, None] = {}
    texts = PackedTexts()
    what = "documents" if kind == "doc" else "queries"
    for item in items:
        name = str(getattr(item, f"{kind}_id"))
        check_id(where, f"{kind} id", name)
        if name in ids:
            raise DataError(f"{where}: {kind} id {name!r} is there twice")
        ids[name] = None
        texts.append(item.default_text().strip() if kind == "doc" else item.default_text())
    return Part(list(ids), texts, f"its {what}")


def _judgements(rows: Any) -> Judgements:
    found = Judgements()
    for row in rows:
        of = found.qrels.setdefault(str(row.query_id), {})
        found.repeated += of.get(str(row.doc_id), row.relevance) != row.relevance
        of[str(row.doc_id)] = int(row.relevance)
    return found
