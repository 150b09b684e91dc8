"""A Task from its parts: judgements against queries and corpus, counts against the card; every misfit is counted and said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsim_eval.data.beir import Judgements
from maxsim_eval.data.cards import Card
from maxsim_eval.data.items import take
from maxsim_eval.errors import DataError
from maxsim_eval.types import Task


@dataclass(frozen=True)
class Part:
    """The queries or the documents: ids, their texts or images in the same order, and the file they come from."""

    ids: Sequence[str]
    items: Sequence[Any]
    file: str
    sha256: str = ""


def assemble(
    source: str,
    dataset: str,
    split: str,
    qrels_file: Path | str,
    judgements: Judgements,
    queries: Part,
    corpus: Part,
    *,
    card: Card | None = None,
    exclude_same_id: bool = False,
    provenance: Mapping[str, Any],
) -> Task:
    """Check the parts against each other and the card, and keep the queries that are judged, in their order.

    Args:
        split: as the qrels name it; counts of queries and judgements are compared with the card's in its own split only.
        qrels_file: where the judgements come from, for messages.

    Raises:
        DataError: no judged query, or no judged document, is there: nothing could be evaluated.
    """
    warnings = list(judgement_warnings(qrels_file, judgements, queries, corpus))
    rows = [row for row, name in enumerate(queries.ids) if name in judgements.qrels]
    chosen = [queries.ids[row] for row in rows]
    judged = sum(len(row) for row in judgements.qrels.values())
    warnings += count_warnings(card, split, len(corpus.ids), len(chosen), judged)
    return Task(
        source=source,
        dataset=dataset,
        split=split,
        query_ids=chosen,
        queries=take(queries.items, rows),
        document_ids=corpus.ids,
        documents=corpus.items,
        qrels={name: judgements.qrels[name] for name in chosen},
        exclude_same_id=exclude_same_id or bool(card and card.exclude_same_id),
        provenance={**provenance, **card_facts(card)},
        warnings=tuple(warnings),
        dtype=card.dtype or None if card else None,
    )


def judgement_warnings(path: Path | str, judgements: Judgements, queries: Part, corpus: Part) -> Iterator[str]:
    """Yield a warning for each way in which the qrels do not fit queries and corpus.

    Raises:
        DataError: no judged query, or no judged document, is there: nothing could be evaluated.
    """
    query_ids = set(queries.ids)
    unknown = [row for query, row in judgements.qrels.items() if query not in query_ids]
    lost = sum(len(row) for row in unknown)
    pairs = [(query, name) for query, row in judgements.qrels.items() if query in query_ids for name in row]
    if not pairs:
        example = f" (for example {next(iter(judgements.qrels))!r})" if judgements.qrels else ""
        raise DataError(
            f"{path}: no judged queries: {lost} judgements of {len(unknown)} queries, none of which is in "
            f"{queries.file}{example}; need at least one"
        )
    # The judged ids alone are made a set: of five million corpus ids it would be a third of a gigabyte.
    needed = {name for _, name in pairs}
    needed.difference_update(corpus.ids)
    missing = [name for _, name in pairs if name in needed]
    if len(missing) == len(pairs):
        raise DataError(
            f"{path}: none of the {len(pairs)} judged documents is in {corpus.file} (for example {missing[0]!r}): "
            "qrels and corpus belong to different sets"
        )
    if lost:
        name = next(query for query in judgements.qrels if query not in query_ids)
        yield f"{path}: {lost} judgements of {len(unknown)} queries that {queries.file} lacks were left out, first {name!r}"
    if missing:
        yield (
            f"{path}: {len(missing)} judgements name documents that {corpus.file} lacks, first {missing[0]!r}; they stay, "
            "so those documents count as judged and never retrieved"
        )
    if judgements.repeated:
        yield repeated_warning(path, judgements.repeated)
    yield from relevance_warnings(path, {name: row for name, row in judgements.qrels.items() if name in query_ids})


def repeated_warning(path: Path | str, pairs: int) -> str:
    """The warning about pairs that a file judges twice, differently; every reader of qrels takes the later one, as BEIR does."""
    return f"{path}: {pairs} pairs are judged twice with different scores; the later score was taken"


def relevance_warnings(path: Path | str, qrels: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield a warning that counts the queries without a relevant document.

    Raises:
        DataError: no query has a relevant document: no metric would be above 0, whatever is retrieved.
    """
    nothing = [query for query, row in qrels.items() if not any(relevance > 0 for relevance in row.values())]
    if nothing and len(nothing) == len(qrels):
        raise DataError(
            f"{path}: none of the {len(qrels)} judged queries has a relevant document, so no metric would be above 0; need a relevance "
            f"of 1 or more (query {nothing[0]!r} has {max(qrels[nothing[0]].values(), default=0)} at most)"
        )
    if nothing:
        yield (
            f"{path}: {len(nothing)} of {len(qrels)} judged queries have no relevant document, first {nothing[0]!r}; they count 0 "
            "in trec_eval's metrics, and AnyHit@k leaves them out"
        )


def count_warnings(card: Card | None, split: str, documents: int, queries: int | None, judgements: int | None) -> Iterator[str]:
    """Yield a warning for every count that differs from the card's; None is not compared."""
    if card is None:
        return
    expected: list[tuple[str, int | None, int | None]] = [("documents", card.documents, documents)]
    if split == card.split:
        expected += [("judged queries", card.queries, queries), ("judgements", card.judgements, judgements)]
    for what, count, found in expected:
        if count is not None and found is not None and count != found:
            yield (
                f"{card.source} {card.name}: {found} {what} in split {split!r}, its card expects {count}: this is NOT "
                "the published set, figures are not comparable with published ones"
            )


def card_facts(card: Card | None) -> dict[str, str]:
    """The fields of the card that go into a Task's provenance."""
    if card is None:
        return {}
    shown = {
        "title": card.title,
        "homepage": card.homepage,
        "url": card.url,
        "repository": card.repository,
        "licence": card.licence,
    }
    return {key: value for key, value in shown.items() if value}
