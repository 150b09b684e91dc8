"""A Result in words, for every format: the headline, the verdicts, the facts, the warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxsim_eval.data.subsets import describe, describe_candidates
from maxsim_eval.report.values import about, entries, entry, known
from maxsim_eval.types import Result


def _shared(parity: Mapping[str, Any]) -> str:
    share = entry(parity, "overlap", "@10")
    return f", top-10 overlap {share:.4f}" if known(share) else ""


def verdicts(result: Result) -> list[str]:
    """A line for each compared path: whether its ranking is the reference's, what that did to nDCG@10, and the metrics' verdicts."""
    lines = []
    for name, path in result.paths.items():
        if path.parity is None:
            continue
        order = entry(path.parity, "identical_order")
        change = entry(path.parity, "delta", "nDCG@10")
        effect = f"nDCG@10 changes by {change:+.4f}" if known(change) else "change of nDCG@10 unknown"
        if change == 0:
            effect = "nDCG@10 is the same"
        if not isinstance(order, Mapping) or not all(known(order.get(key)) for key in ("k", "identical", "queries")):
            said = f"order not compared with {result.reference}"
        elif order["identical"] == order["queries"]:
            said = f"ranking identical to {result.reference} (top {order['k']}, all {order['queries']} queries)"
        else:
            changed = f"{order['queries'] - order['identical']} of {order['queries']} queries"
            said = f"order of the top {order['k']} differs from {result.reference} in {changed}{_shared(path.parity)}"
        lines.append(f"{name}: {said}; {effect}.{_judged(path.parity)}")
    return lines


def _judged(parity: Mapping[str, Any]) -> str:
    """What the statistics say of all metrics: how many are equivalent, and which are not."""
    found = entry(parity, "statistics")
    if not isinstance(found, Mapping) or not found:
        return ""
    by_verdict: dict[str, list[str]] = {}
    for metric, one in found.items():
        needed = entry(one, "queries_needed")
        more = f" (needs about {about(needed)} queries)" if known(needed) else ""
        by_verdict.setdefault(str(entry(one, "verdict")), []).append(f"{metric}{more}")
    same = len(by_verdict.pop("equivalent", []))
    if not by_verdict:
        return f" Equivalent in all {same} metrics."
    others = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())
    return f" Equivalent in {same} of {len(found)} metrics; {others}."


def _scalar(value: Any) -> str | None:
    if isinstance(value, bool) or value is None:
        return None if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return format(value, "g") if isinstance(value, float) else value if isinstance(value, str) and value else None


def facts(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of every number and text of a mapping, in order; nested entries are left to result.json."""
    found = ((str(key).replace("_", " "), _scalar(value)) for key, value in given.items())
    return [(key, text) for key, text in found if text is not None]


def headline(result: Result) -> list[str]:
    """What was evaluated, a line each: task and counts, subset, reranking, encoder."""
    task, encoder = result.task, result.encoder
    counts = ", ".join(
        f"{task[key]:,} {key.replace('_', ' ')}"
        for key in ("queries", "documents", "query_tokens", "document_tokens", "judged_pairs")
        if known(task.get(key))
    )
    revision = f" ({encoder['revision']})" if encoder.get("revision") else ""
    dim = f", d = {encoder['dim']}" if known(encoder.get("dim")) else ""
    limits, candidates = task.get("limits"), task.get("candidates")
    reranked = "" if candidates is None else describe_candidates(candidates)
    return [
        f"{task.get('source')}/{task.get('dataset')} {task.get('split')}: {counts}",
        *([] if limits is None else [f"SUBSET: {describe(limits)}; figures are not those of the whole collection"]),
        *([f"RERANKED: {reranked}; what a query's run does not list is not retrieved"] if reranked else []),
        f"encoder {encoder.get('name')}{revision}{dim}, top {result.k}, on {result.environment.get('device', 'an unknown device')}",
    ]


def warnings(result: Result) -> list[str]:
    """The task's warnings."""
    return [str(line) for line in entries(result.task.get("warnings"))]
