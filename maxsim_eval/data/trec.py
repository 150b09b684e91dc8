"""TREC runs (`query Q0 document rank score tag`) and judgements (qrels): read strictly, written whole or not at all.

Order. trec_eval ignores the rank column: it sorts by score descending (compared as float32) and breaks ties by document
id descending. Our own runs break ties by document index instead, so in files whose tag starts with `maxsim-eval/` the
rank column is authoritative and the score column holds the true scores.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from maxsim_eval.data.assembling import relevance_warnings, repeated_warning
from maxsim_eval.data.beir import check_header, fields_of, relevance_of
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.files import atomic_path, lines_of
from maxsim_eval.types import Run

TAG_PREFIX = "maxsim-eval/"
_LONGEST = 2**20  # bytes of a line: two ids, two numbers and a tag
_INTEGER = re.compile(r"[+-]?[0-9]+")
# float() also takes "1_000" and digits of other scripts, which no other tool reads as a number.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE)


def trec_order(ranking: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort (document id, score) pairs as trec_eval does: float32 score descending, ties by document id descending."""
    with np.errstate(over="ignore"):  # beyond float32 a score is infinite, as in trec_eval
        keys = np.asarray([score for _, score in ranking], dtype=np.float64).astype(np.float32).tolist()
    order = sorted(range(len(ranking)), key=lambda i: (keys[i], ranking[i][0]), reverse=True)
    return [ranking[i] for i in order]


def ranked(run: Run, query_id: str) -> list[str]:
    """Document ids of one query, best first, by the run's own rule (`Run.ordered`); empty if nothing was retrieved."""
    ranking = list(run.rankings.get(query_id, ()))
    return [document for document, _ in (ranking if run.ordered else trec_order(ranking))]


def check_ranking(run: Run, query_id: str) -> None:
    """Refuse a ranking no metric can be computed from.

    Raises:
        DataError: a NaN score or a document listed twice; the message names run, query and document.
    """
    ranking = run.rankings[query_id]
    for document, score in ranking:
        if math.isnan(score):
            raise DataError(f"run {run.name!r}: query {query_id!r}, document {document!r}: the score is NaN, need a number")
    counts = Counter(document for document, _ in ranking)
    if len(counts) != len(ranking):
        twice = counts.most_common(1)[0][0]
        raise DataError(f"run {run.name!r}: query {query_id!r} lists document {twice!r} twice, need each document once")


def _check_name(what: str, name: str) -> None:
    if not name or name.split() != [name] or "\0" in name:
        raise DataError(f"{what} {name!r} cannot be written to a TREC run: it is empty or holds white space or NUL")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{what} {name!r} cannot be written to a TREC run: it is not valid Unicode ({error})") from None


def _float32(score: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(score)


def _numbers(scores: Iterable[float], ordered: bool) -> Iterator[str]:
    """Shortest texts that read back as the same numbers: float32 in our files, float64 in others."""
    if not ordered:
        return map(repr, map(float, scores))
    with np.errstate(over="ignore"):
        return map(str, np.fromiter(scores, np.float64).astype(np.float32))


def _tag(run: Run) -> str:
    tag = f"{TAG_PREFIX}{run.tag or run.name}" if run.ordered else run.name
    _check_name("run name", tag)
    if not run.ordered and tag.startswith(TAG_PREFIX):
        raise UsageError(
            f"run name {run.name!r}: names that start with {TAG_PREFIX!r} mark runs ordered by rank; choose another"
        )
    return tag


def _run_lines(run: Run, tag: str) -> Iterator[str]:
    checked: set[str] = set()  # document ids: most occur in many rankings
    for query_id, ranking in run.rankings.items():
        _check_name("query id", query_id)
        check_ranking(run, query_id)
        pairs = list(ranking) if run.ordered else trec_order(list(ranking))
        documents = [document for document, _ in pairs]
        for document in documents:
            if document not in checked:
                _check_name("document id", document)
                checked.add(document)
        numbers = _numbers((score for _, score in pairs), run.ordered)
        for rank, (document, number) in enumerate(zip(documents, numbers, strict=True), start=1):
            yield f"{query_id} Q0 {document} {rank} {number} {tag}\n"


def write_trec_run(path: Path | str, run: Run) -> None:
    """Write `run` as a TREC file, ranks from 1, atomically. A query that retrieved nothing has no line.

    Scores of ordered runs are float32 and are written, and read back, as such; those of others as float64.

    Raises:
        DataError: an id with white space or invalid Unicode, a NaN score, a document listed twice, or a file that cannot
            be written; nothing is left behind.
        UsageError: the name of an unordered run starts with our own tag prefix.
    """
    tag = _tag(run)
    try:
        with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as handle:
            handle.writelines(_run_lines(run, tag))
    except OSError as error:
        raise DataError(f"{path}: the run cannot be written ({error.strerror})") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of every line that is not blank; text is UTF-8, with or without a byte order mark."""
    try:
        with open(path, "rb") as handle:
            for number, raw in lines_of(handle, path, _LONGEST):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}:{number}: not UTF-8 text ({error.reason} at byte {error.start})") from None
                if "\0" in text:
                    raise DataError(f"{path}:{number}: holds a NUL character, need text")
                if raw.strip():
                    yield number, text.rstrip("\r\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _columns(text: str) -> list[str]:
    """Columns as trec_eval's C tells them apart: by ASCII white space. An id may hold any other, which `str.split` would cut at."""
    return [column.decode() for column in text.encode().split()]


def _run_line(where: str, text: str) -> tuple[str, str, str, float, str]:
    fields = _columns(text)  # trec_eval allows more after the tag
    if len(fields) < 6:
        raise DataError(f"{where}: {len(fields)} columns, need 6: query Q0 document rank score tag")
    query_id, _, document, rank, score, tag = fields[:6]
    if not _NUMBER.fullmatch(score):
        raise DataError(f"{where}: score {score!r} is not a number")
    value = float(score)
    if math.isnan(value):
        raise DataError(f"{where}: query {query_id!r}, document {document!r}: the score is NaN, need a number")
    return query_id, document, rank, value, tag


def _rank(where: str, rank: str) -> int:
    if not _INTEGER.fullmatch(rank) or len(rank) > 18:
        raise DataError(f"{where}: rank {rank!r} is not a whole number, and this run is ordered by its rank column")
    return int(rank)


def read_trec_run(path: Path | str, ordered: bool | None = None) -> Run:
    """Read a TREC run file; the run's name is the tag of its first line.

    Args:
        path: the file; 6 columns separated by ASCII white space (more are ignored, as by trec_eval), blank lines skipped.
        ordered: True takes the rank column as the ranking, False trec_eval's rule (scores), None decides by the tag:
            files of ours (tag `maxsim-eval/<name>`, read as name `<name>`) are ordered by rank, all others by score.

    Raises:
        DataError: missing or empty file, malformed line (`file:line`), a NaN score, a document or (ordered) a rank
            twice in a query, lines of our tag mixed with others.
    """
    path = Path(path)
    queries: dict[str, dict[str, tuple[int, float]]] = {}
    ranks: dict[str, set[int]] = {}
    first: str | None = None
    for number, text in _lines(path):
        where = f"{path}:{number}"
        query_id, document, rank_text, score, tag = _run_line(where, text)
        if first is None:
            first = tag
            ordered = tag.startswith(TAG_PREFIX) if ordered is None else ordered
        elif tag != first and TAG_PREFIX in (tag[: len(TAG_PREFIX)], first[: len(TAG_PREFIX)]):
            raise DataError(f"{where}: tag {tag!r} after {first!r}, need one run a file")
        rank = 0
        if not ordered and not _NUMBER.fullmatch(rank_text):  # unused, but a rank that is no number means other columns
            raise DataError(f"{where}: rank {rank_text!r} is not a number")
        if ordered:
            rank = _rank(where, rank_text)
            if rank in ranks.setdefault(query_id, set()):
                raise DataError(f"{where}: query {query_id!r} has rank {rank} twice, need each rank once")
            ranks[query_id].add(rank)
        documents = queries.setdefault(query_id, {})
        if document in documents:
            raise DataError(f"{where}: query {query_id!r} lists document {document!r} twice, need each document once")
        documents[document] = (rank, score)
    if first is None:
        raise DataError(f"{path}: holds no result line, need lines of: query Q0 document rank score tag")
    rankings: dict[str, list[tuple[str, float]]] = {}
    for query_id, documents in queries.items():
        pairs = sorted(documents.items(), key=lambda item: item[1][0]) if ordered else list(documents.items())
        rankings[query_id] = [(document, float(_float32(score)) if ordered else score) for document, (_, score) in pairs]
    name = first.removeprefix(TAG_PREFIX) if ordered else first
    return Run(name=name or first, rankings=rankings, ordered=bool(ordered))


def _judgement(where: str, text: str, beir: bool) -> tuple[str, str, int]:
    fields = fields_of(where, text) if beir else _columns(text)
    if not beir and len(fields) != 4:
        raise DataError(f"{where}: {len(fields)} columns, need 4: query 0 document relevance")
    query_id, document, relevance = fields[0], fields[-2], fields[-1]
    if not query_id or not document:
        raise DataError(f"{where}: an empty id")
    return query_id, document, relevance_of(where, relevance)


def _is_beir(path: Path, number: int, text: str) -> bool:
    """Whether the first line is the header of BEIR's three columns; a line of three that is none is refused."""
    fields = text.split("\t")
    if len(fields) != 3:
        return False
    if _INTEGER.fullmatch(fields[2].strip()):
        raise DataError(
            f"{path}:{number}: a judgement stands where BEIR's header must be (tools that skip the first line "
            "would drop it). Add the line: query-id<tab>corpus-id<tab>score"
        )
    check_header(path, number, text)
    return True


def read_qrels(path: Path | str) -> dict[str, dict[str, int]]:
    """Read judgements: TREC's 4 columns (`query 0 document relevance`) or BEIR's tab-separated file with its header.

    Returns:
        query id -> document id -> relevance (negative values are kept; they count as not relevant).

    Of two different judgements of a pair the later holds, as where a dataset is loaded; that is warned of, and so are queries
    without a relevant document.

    Raises:
        DataError: missing or empty file, malformed line (`file:line`), BEIR file without header, no relevant document at all.
    """
    path = Path(path)
    qrels: dict[str, dict[str, int]] = {}
    repeated, beir = 0, None
    for number, text in _lines(path):
        if beir is None:
            beir = _is_beir(path, number, text)
            if beir:
                continue
        query_id, document, relevance = _judgement(f"{path}:{number}", text, beir)
        row = qrels.setdefault(query_id, {})
        repeated += row.get(document, relevance) != relevance
        row[document] = relevance
    if not qrels:
        raise DataError(f"{path}: holds no judgement, need lines of: query 0 document relevance, or a BEIR qrels file")
    said = [repeated_warning(path, repeated)] if repeated else []
    for line in [*said, *relevance_warnings(path, qrels)]:
        warnings.warn(line, stacklevel=2)
    return qrels
