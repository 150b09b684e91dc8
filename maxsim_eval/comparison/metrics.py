"""Retrieval metrics per query, computed by trec_eval itself through pytrec_eval, under ir-measures' names; and the paper's own.

Our own runs are ordered lists; they reach trec_eval as strictly decreasing scores, so no tie can change their order.
Runs of other tools keep their scores and trec_eval's rule (float32 score descending, ties by document id descending).
Every judged query counts: one without results scores 0 in every metric and stays in the mean (`AnyHit@k` aside, which has no value
where nothing is relevant).

Metrics as the paper's own scripts define them stand beside trec_eval's, under names of their own: a figure of the paper can only be
compared with one of the same definition.

`AnyHit@k`    1 when any relevant document is among the first k, else 0. A query without a relevant document has no value and is
              left out of the mean (trec_eval's `Success@k` counts it as 0). The paper calls the mean "recall".
`nDCG-exp@k`  DCG with gain 2^rel - 1 and discount log2(rank + 1), over that of the best possible ranking. For judgements of 0 and
              1 it equals trec_eval's nDCG, whose gain is rel itself. A query without a relevant document counts 0, as there.

Judgements of 0 and below are not relevant and gain nothing, as in trec_eval. Below 0 a document counts as unjudged where that matters
(Bpref, infAP), as there.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytrec_eval

from maxsim_eval.comparison import measures
from maxsim_eval.comparison.measures import MAX_CUTOFF
from maxsim_eval.data.beir import MAX_RELEVANCE
from maxsim_eval.data.trec import check_ranking, ranked
from maxsim_eval.errors import DataError, MissingPackageError, UnknownNameError, UsageError
from maxsim_eval.types import Qrels, Run

DEFAULT_METRICS: tuple[str, ...] = (
    "nDCG@1",
    "nDCG@5",
    "nDCG@10",
    "nDCG@20",
    "Recall@5",
    "Recall@10",
    "Recall@20",
    "Recall@100",
    "MAP@100",
    "MRR@10",
)

# name -> (trec_eval measure without a cutoff, with a cutoff); None: that form does not exist.
# RR@k is trec_eval's recip_rank on a run truncated to k, because trec_eval's own has no cutoff.
# iprec_at_recall and 11pt_avg are left out: trec_eval 9 (pytrec_eval) and 10 round their recall points differently.
_MEASURES: dict[str, tuple[str | None, str | None]] = {
    "nDCG": ("ndcg", "ndcg_cut"),
    "Recall": (None, "recall"),
    "MAP": ("map", "map_cut"),
    "MRR": ("recip_rank", "recip_rank"),
    "P": (None, "P"),
    "Success": (None, "success"),
    "Rprec": ("Rprec", None),
    "Bpref": ("bpref", None),
    "infAP": ("infAP", None),
    "SetP": ("set_P", None),
    "SetR": ("set_recall", None),
    "SetF": ("set_F", None),
    "SetAP": ("set_map", None),
}
_ALIASES = {"R": "Recall", "AP": "MAP", "RR": "MRR"}
_NAME = re.compile(r"(?P<base>[A-Za-z]+(-exp)?)(@(?P<cutoff>[0-9]+))?")
_TREC_EVAL = re.compile(r"\A(?P<measure>[A-Za-z_]+?)(_(?P<cutoff>[0-9]+))?\Z")
_MAX_EXPONENT = 60  # the highest relevance of nDCG-exp: gains are below 2^60, and sums of them far from overflow
# Rank surrogates are consecutive normal float32 numbers, counted by their bit pattern from the smallest one: strictly
# decreasing by construction, and 2^31 - 2^24 of them, so no ranking is too long (integers end at 2^24).
_FIRST_NORMAL_BITS = 0x0080_0000


def any_hit(ranking: Sequence[str], judged: Mapping[str, int], k: int) -> float | None:
    """`AnyHit@k` of one query: `ranking` best first, `judged` document id -> relevance; None for a query without a relevant one."""
    if not any(relevance > 0 for relevance in judged.values()):
        return None
    return float(any(judged.get(document, 0) > 0 for document in ranking[:k]))


def exponential_ndcg(ranking: Sequence[str], judged: Mapping[str, int], k: int) -> float:
    """`nDCG-exp@k` of one query: `ranking` best first, `judged` document id -> relevance.

    Raises:
        DataError: a relevance above 60, whose gain would drown every other.
    """
    highest = max(judged.values(), default=0)
    if highest > _MAX_EXPONENT:
        raise DataError(f"nDCG-exp: relevance {highest}, need {_MAX_EXPONENT} or less (its gain is 2^relevance - 1)")
    ideal = _dcg(sorted(judged.values(), reverse=True)[:k])
    return _dcg([judged.get(document, 0) for document in ranking[:k]]) / ideal if ideal else 0.0


def _dcg(relevances: Sequence[int]) -> float:
    gains = (2.0**relevance - 1.0 if relevance > 0 else 0.0 for relevance in relevances)
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


PAPER_METRICS: dict[str, Callable[[Sequence[str], Mapping[str, int], int], float | None]] = {
    "AnyHit": any_hit,
    "nDCG-exp": exponential_ndcg,
}


@dataclass(frozen=True)
class Metric:
    """One parsed metric: the name as asked for, its canonical name, and how trec_eval is asked for it.

    For one of `PAPER_METRICS`, `measure` is its name there and `truncate` its cutoff. `other` is a measure of ir-measures.
    """

    name: str
    canonical: str
    measure: str  # pytrec_eval's name in results, e.g. "ndcg_cut_10"
    truncate: int | None = None  # cut the run to this depth first
    other: Any = None

    @property
    def cutoff(self) -> int | None:
        """How many of the first documents it looks at; None: all that were retrieved."""
        if self.other is not None:
            return self.other.params.get("cutoff")
        return int(self.canonical.partition("@")[2] or 0) or None


def _known(cutoff: str | None) -> list[str]:
    bases = {**_MEASURES, **{alias: _MEASURES[name] for alias, name in _ALIASES.items()}}
    names = [base for base, (_, cut) in bases.items() if cut] + list(PAPER_METRICS)
    with_cutoff = [f"{base}@{cutoff or 'k'}" for base in names]
    return with_cutoff + [base for base, (plain, _) in bases.items() if plain]


def _from_trec_eval(found: re.Match[str]) -> str:
    """`ndcg_cut_10` as `nDCG@10`, `map` as `MAP`: the name here of a measure of trec_eval; others as they are."""
    measure, cutoff = found["measure"], found["cutoff"]
    for name, (plain, cut) in _MEASURES.items():
        if measure == (plain if cutoff is None else cut) and not (cutoff and measure == "recip_rank"):
            return name if cutoff is None else f"{name}@{cutoff}"
    return found[0]


def known_metrics() -> list[str]:
    """Every name that `parse_metric` takes, `k` for a cutoff; of ir-measures, where it is installed, without optional parameters."""
    others = [name for name, tried in measures.forms().items() if _is_taken(tried)]
    return list(dict.fromkeys([*_known(None), *others]))


def _is_taken(name: str) -> bool:
    try:
        parse_metric(name)
    except UsageError:
        return False
    return True


def parse_metric(name: str) -> Metric:
    """Parse an ir-measures style name: `nDCG@10`, `R@100` (= `Recall@100`), `AP`, `RR@10`, `Bpref`, ..., one of trec_eval's,
    `ndcg_cut_10`, `map`, or one of the paper's, `AnyHit@10`, `nDCG-exp@10`. Where ir-measures is installed, any that it knows:
    `ERR@20`, `AP(rel=2)@100`.

    Raises:
        UnknownNameError: no such metric, or not in that form (with or without a cutoff); the message offers near names.
        UsageError: a cutoff below 1 or above 2^31 - 1, or a measure that ir-measures cannot compute for a query of three documents.
    """
    match = _NAME.fullmatch(_TREC_EVAL.sub(_from_trec_eval, name))
    cutoff = match["cutoff"] if match else None
    base = _ALIASES.get(match["base"], match["base"]) if match else ""
    plain, cut = _MEASURES.get(base, (None, None))
    measure = plain if cutoff is None else base if base in PAPER_METRICS else cut
    if measure is None:
        known = _known(cutoff)
        same_letters = [entry for entry in known if entry.lower() == name.lower()]  # only the case is wrong
        other = None if same_letters else measures.measure_of(name)
        if other is not None:
            measures.require_computable(name, other)
            return Metric(name, str(other), "", other=other)
        if "(" in name and measures.library() is None:
            raise MissingPackageError(f"metric {name!r}", "ir_measures", measures.EXTRA)
        raise UnknownNameError("metric", name, same_letters or known)
    if cutoff is None:
        return Metric(name, base, measure)
    if not 1 <= len(cutoff.lstrip("0")) <= 10 or int(cutoff) > MAX_CUTOFF:
        raise UsageError(f"metric {name!r}: the cutoff is {cutoff}, need a whole number from 1 to {MAX_CUTOFF}")
    k = int(cutoff)
    if measure == "recip_rank" or measure in PAPER_METRICS:
        return Metric(name, f"{base}@{k}", measure, truncate=k)
    return Metric(name, f"{base}@{k}", f"{measure}_{k}")


def deeper_than(k: int, names: Iterable[str]) -> dict[str, int]:
    """Those of the metrics that look at more than the first `k` documents, and at how many."""
    return {name: cutoff for name in names if (cutoff := parse_metric(name).cutoff or 0) > k}


def said_of_depth(asked: int, documents: int, metrics: Iterable[str], what: str) -> Iterator[str]:
    """A sentence where a run of the best `asked` of so many documents (a "corpus", "subset", ...) is less than its metrics look at."""
    if documents < asked:
        yield f"k was clamped to the {documents} documents of the {what}"
    elif asked < documents and (deeper := deeper_than(asked, metrics)):
        yield (
            f"k is {asked}: {', '.join(deeper)} look at more documents than that, and count those that were not kept as not found; "
            f"need k = {min(max(deeper.values()), documents)} for the values that their names stand for"
        )


@functools.cache
def within_one(name: str) -> bool:
    """Whether a metric's values are known to lie from 0 to 1: trec_eval's and the paper's do; of others nothing is known."""
    try:
        return parse_metric(name).other is None
    except (UsageError, MissingPackageError):
        return False


def _check_id(what: str, name: str) -> None:
    """Refuse ids that pytrec_eval cannot take: it crashes on lone surrogates and cuts ids at NUL."""
    if not isinstance(name, str):
        raise DataError(f"{what} {name!r} is a {type(name).__name__}, need text")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{what} {name!r} is not valid Unicode, need text that can be written as UTF-8") from None
    if "\0" in name:
        raise DataError(f"{what} {name!r} holds a NUL character")


def judgements(qrels: Qrels) -> dict[str, dict[str, int]]:
    """Judged queries only, as plain dicts of plain ints.

    Raises:
        DataError: no judgement at all, an impossible id or relevance, or a query's judgements that are no dict.
    """
    judged: dict[str, dict[str, int]] = {}
    for query_id, row in qrels.items():
        _check_id("qrels: query id", query_id)
        if not row:
            continue
        if not isinstance(row, Mapping):
            raise DataError(f"qrels: query {query_id!r}: got {type(row).__name__}, need a dict: document id -> relevance")
        for document, relevance in row.items():
            _check_id("qrels: document id", document)
            if not _is_grade(relevance):
                raise DataError(
                    f"qrels: query {query_id!r}, document {document!r}: relevance {relevance!r}, need a whole "
                    f"number from -{MAX_RELEVANCE} to {MAX_RELEVANCE}"
                )
        judged[query_id] = {document: int(relevance) for document, relevance in row.items()}
    if not judged:
        raise DataError("qrels: no query has a judgement, need at least one")
    return judged


def _is_grade(relevance: Any) -> bool:
    try:
        return bool(int(relevance) == relevance and abs(relevance) <= MAX_RELEVANCE)
    except (TypeError, ValueError, OverflowError):  # None or a text; NaN; an infinity
        return False


def _surrogates(count: int) -> list[float]:
    bits = np.arange(_FIRST_NORMAL_BITS + count, _FIRST_NORMAL_BITS, -1, dtype=np.uint32)
    return [float(value) for value in bits.view(np.float32)]


def _trec_scores(run: Run, query_id: str, truncate: int | None) -> dict[str, float]:
    """Document id -> score, by which trec_eval orders documents as the run does; cut to the first `truncate` if given."""
    if run.ordered or truncate is not None:
        documents = ranked(run, query_id)[:truncate]
        return dict(zip(documents, _surrogates(len(documents)), strict=True))
    return {document: float(score) for document, score in run.rankings[query_id]}


def evaluate_run(run: Run, qrels: Qrels, metrics: Iterable[str] = DEFAULT_METRICS) -> dict[str, dict[str, float]]:
    """Compute metrics of a run against judgements.

    Args:
        run: rankings; queries without judgements are ignored, as by trec_eval.
        qrels: query id -> document id -> relevance; relevant means 1 or more, negative values are allowed.
        metrics: names, see `parse_metric`.

    Returns:
        metric name (as asked for) -> query id -> value; every judged query is present, in qrels order, with 0 when the
        run has no results for it. `AnyHit@k` lacks the queries without a relevant document.

    Raises:
        UnknownNameError, UsageError: a metric name that is not one.
        DataError: no judgements, an impossible id or relevance, a NaN score, a document twice in a query.
    """
    asked = [parse_metric(name) for name in metrics]
    wanted = [metric for metric in asked if metric.measure and metric.measure not in PAPER_METRICS]
    judged = judgements(qrels)
    queries = [query_id for query_id in judged if run.rankings.get(query_id)]
    for query_id in queries:
        check_ranking(run, query_id)
        for document, _ in run.rankings[query_id]:
            _check_id(f"run {run.name!r}: document id", document)
    per_query: dict[str, dict[str, float]] = {metric.name: dict.fromkeys(judged, 0.0) for metric in wanted}
    for truncate in dict.fromkeys(metric.truncate for metric in wanted):
        group = [metric for metric in wanted if metric.truncate == truncate]
        for query_id, values in _by_trec_eval(run, judged, queries, {metric.measure for metric in group}, truncate):
            for metric in group:
                per_query[metric.name][query_id] = float(values[metric.measure])
    for metric in asked:
        if metric.measure in PAPER_METRICS:
            per_query[metric.name] = _paper_metric(metric, run, judged)
        elif metric.other is not None:
            scores = {query_id: _trec_scores(run, query_id, None) for query_id in queries}
            per_query[metric.name] = dict.fromkeys(judged, 0.0) | measures.values_of(metric.other, judged, scores)
    return {metric.name: per_query[metric.name] for metric in asked}


def _by_trec_eval(
    run: Run, judged: Mapping[str, dict[str, int]], queries: Sequence[str], measures: set[str], truncate: int | None
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """(query id, measure -> value) of the queries that have a relevant document; of the others every measure is 0.

    trec_eval does not get what it cannot take. For a query whose highest grade is below 0 it counts grades in memory that is not
    its own, and crashes or keeps the counts of the query before. It takes a query with one of its internal names ("no query",
    "no_query") for one that it has just computed, so queries are passed by number.
    """
    number = {
        query_id: str(place) for place, query_id in enumerate(queries) if any(grade > 0 for grade in judged[query_id].values())
    }
    if not number:
        return
    evaluator = pytrec_eval.RelevanceEvaluator({place: judged[query_id] for query_id, place in number.items()}, measures)
    found = evaluator.evaluate({place: _trec_scores(run, query_id, truncate) for query_id, place in number.items()})
    for query_id, place in number.items():
        yield query_id, found[place]


def _paper_metric(metric: Metric, run: Run, judged: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Query id -> value, without the queries the metric has none for."""
    compute, cutoff = PAPER_METRICS[metric.measure], metric.truncate or 0
    values = {
        query_id: compute(ranked(run, query_id)[:cutoff] if run.rankings.get(query_id) else [], row, cutoff)
        for query_id, row in judged.items()
    }
    return {query_id: value for query_id, value in values.items() if value is not None}


def means(per_query: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean of every metric over its queries, summed exactly (`math.fsum`): the order of the queries does not matter."""
    return {name: math.fsum(values.values()) / len(values) if values else math.nan for name, values in per_query.items()}
