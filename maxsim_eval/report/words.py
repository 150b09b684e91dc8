"""A Result in words, for every format: the headline, the verdicts, the facts, the warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxsim_eval.comparison.bounds import Finding, outside
from maxsim_eval.data.subsets import describe, describe_candidates
from maxsim_eval.report.values import about, entries, entry, figure, known, mapping, signed
from maxsim_eval.types import Result

METRIC = "nDCG@10"


def _shared(parity: Mapping[str, Any]) -> str:
    share = entry(parity, "overlap", "@10")
    return f", top-10 overlap {share:.4f}" if known(share) else ""


def metric_shown(result: Result) -> str | None:
    """The metric that stands for all where there is room for one: nDCG@10, else the first."""
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.metrics))
    return METRIC if METRIC in names else next(iter(names), None)


def change_text(result: Result, name: str, metric: str) -> str:
    """How a path's mean differs from the reference's: `=`, `+0.0012`, `?` where that is not known."""
    return signed(entry(result.paths[name].parity, "delta", metric))


def verdict(result: Result, name: str) -> str:
    """One of `reference`, `equivalent`, `different`, `inconclusive`, `fails gate` (outside the packaged bounds); `-`: not known."""
    path = result.paths[name]
    if path.parity is None:
        return "reference" if name == result.reference else "-"
    if outside(result).get(name):
        return "fails gate"
    found = {str(entry(one, "verdict")) for one in mapping(path.parity, "statistics").values()}
    return next((word for word in ("different", "inconclusive", "equivalent") if word in found), "-")


def brief(result: Result) -> list[str]:
    """A line for each path: the metric, how it changed, the verdict."""
    metric = metric_shown(result)
    lines = []
    for name, path in result.paths.items():
        value = "" if metric is None else f" {metric} {figure(path.metrics.get(metric), '.4f')}"
        if path.parity is not None and metric is not None:
            value += f" ({change_text(result, name, metric)})"
        lines.append(f"{name}:{value}, {verdict(result, name)}")
    return lines


def verdicts(result: Result) -> list[str]:
    """A line for each compared path: its ranking and a metric against the reference, statistics, what the gate would refuse."""
    bad, metric = outside(result), metric_shown(result)
    lines = []
    for name, path in result.paths.items():
        if path.parity is None:
            continue
        order = entry(path.parity, "identical_order")
        effect = "" if metric is None else f"; {_effect(entry(path.parity, 'delta', metric), metric)}"
        if not isinstance(order, Mapping) or not all(known(order.get(key)) for key in ("k", "identical", "queries")):
            said = f"order not compared with {result.reference}"
        elif order["identical"] == order["queries"]:
            said = f"ranking identical to {result.reference} (top {order['k']}, all {order['queries']} queries)"
        else:
            changed = f"{order['queries'] - order['identical']} of {order['queries']} queries"
            said = f"order of the top {order['k']} differs from {result.reference} in {changed}{_shared(path.parity)}"
        certified = "" if path.search is None else f" {_certified(path.search)}"
        lines.append(f"{name}: {said}{effect}.{_judged(path.parity)}{certified}{_refused(bad.get(name, []))}")
    return lines


def _effect(change: Any, metric: str) -> str:
    if not known(change):
        return f"change of {metric} unknown"
    return f"{metric} is the same" if change == 0 else f"{metric} changes by {change:+.4f}"


def _certified(search: Mapping[str, Any]) -> str:
    same = identical_text(search)
    return f"Certified{f', run {same}' if same else ''}: {survivors_text(search)} documents a query scored exactly."


def survivors_text(search: Mapping[str, Any]) -> str:
    """How many documents of a certified search were scored exactly: `36.2 of 5,183 (0.70%)`."""
    survivors, documents = (entry(search, key) for key in ("survivors", "documents"))
    if not known(survivors) or not known(documents) or not documents:
        return "-"
    return f"{survivors:,.1f} of {documents:,} ({survivors / documents:.2%})"


def identical_text(search: Mapping[str, Any]) -> str:
    """Which paths' run files a certified one equals, and which it should and does not; empty where none of them was scored."""
    found = mapping(search, "identical_to")
    same = " and ".join(name for name, equal in found.items() if equal is True)
    others = " and ".join(name for name, equal in found.items() if equal is not True)
    return ", ".join(([f"identical to {same}'s"] if same else []) + ([f"NOT identical to {others}'s"] if others else []))


def _refused(findings: Sequence[Finding]) -> str:
    """What lies outside the bounds, under the gate's own names."""
    if not findings:
        return ""
    each = "; ".join(f"{one.what.partition(': ')[2]} {one.found}, need {one.needed}" for one in findings)
    return f" NOT within bounds ({each}): the gate would fail."


def _judged(parity: Mapping[str, Any]) -> str:
    """What the statistics say of all metrics: how many are equivalent, which are different, what would decide the rest."""
    found = mapping(parity, "statistics")
    if not found:
        return ""
    kinds = {metric: str(entry(one, "verdict")) for metric, one in found.items()}
    same = [metric for metric, kind in kinds.items() if kind == "equivalent"]
    if len(same) == len(found):
        return f" Equivalent in all {len(found)} metrics."
    said = [f"Equivalent in {len(same)} of {len(found)} metrics"]
    different = [metric for metric, kind in kinds.items() if kind == "different"]
    if different:
        said.append(f"different in {', '.join(different)}")
    open_ = {
        metric: entry(found[metric], "queries_needed")
        for metric, kind in kinds.items()
        if kind not in ("equivalent", "different")
    }
    if open_:
        asked = figure(entry(found[next(iter(open_))], "queries"), ",d", "these")
        needed = [value for value in open_.values() if known(value)]
        few = f": {asked} queries are too few to decide (about {about(max(needed))} would)" if len(needed) == len(open_) else ""
        said.append(f"inconclusive in {', '.join(open_)}{few}")
    return f" {', '.join(said)}."


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


def headline(result: Result, *, brief: bool = False) -> list[str]:
    """What was evaluated, a line each: task and counts (`brief`: of queries and documents), subset, reranking, encoder."""
    task, encoder = result.task, result.encoder
    counts = ", ".join(
        f"{task[key]:,} {key.replace('_', ' ')}"
        for key in ("queries", "documents", *(() if brief else ("query_tokens", "document_tokens", "judged_pairs")))
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
