"""A Result as one self-contained HTML page: tables, plots and everything they need in one file, and no network.

The page holds three scripts (plotly.js, and ours for plots and tables) and one block of data (`html_data`). Its content security policy
names the scripts by their hashes and forbids everything else, so neither text from a Result nor the plotting library can run another
script or reach the network. plotly.js is the vendored `basic` bundle (templates/vendor/README.md says why and how it is updated).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import shlex
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from maxsim_eval.report import words
from maxsim_eval.report.html_data import LEVEL, METRIC, metric_names, page_data
from maxsim_eval.report.tables import tables
from maxsim_eval.report.values import about, entries, figure, mapping, number, p_value, statistics
from maxsim_eval.report.values import entry as entry_of
from maxsim_eval.types import PathResult, Result

# In the order of the page: the table's script before the large one.
SCRIPTS = ("report_data.js", "report_table.js", "vendor/plotly-basic.min.js", "report_plots.js")
NONE, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
_MOST_CHANGED = 20
_SIGNS = {"equivalent": "=", "different": "≠", "inconclusive": "?"}  # a verdict is never told by its colour alone


@functools.cache
def _asset(name: str) -> str:
    """A file of `templates/` that goes into the page as it is.

    Raises:
        ValueError: a script that would end its own element early.
    """
    text = importlib.resources.files(__package__).joinpath("templates", *name.split("/")).read_text(encoding="utf-8")
    if any(bad in text.lower() for bad in ("</script", "</style", "<!--")):
        raise ValueError(f"templates/{name}: holds the end of an HTML element, need a script that can stand inside one")
    return text


def _policy(scripts: list[str]) -> str:
    """Content security policy: these scripts run, nothing is fetched. (plotly.js writes styles and, on request, an image.)"""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _text(value: Any, form: str) -> str:
    return figure(value, form, NONE).replace("-", MINUS)


def _change(value: Any) -> str:
    """A difference of means; 0 says that there is none, +0.00000 that it is smaller than the digits shown."""
    return "0" if value == 0 else _text(value, "+.5f")


def _verdict_rows(name: str, path: PathResult) -> list[dict[str, Any]]:
    """Rows of the verdict table of one path, as text."""
    rows = []
    for metric, entry in statistics(path).items():
        needed = number(entry.get("queries_needed"))
        low, high = (_change(entry.get(end)) for end in ("low", "high"))
        rows.append(
            {
                "path": name,
                "metric": metric,
                "mean": _change(entry.get("mean")),
                "interval": NONE if low == high == NONE else f"{low} to {high}",
                "bound": _text(entry.get("bound"), "g"),
                "p": p_value(entry.get("p_adjusted"), NONE),
                "changed": f"{_text(entry.get('changed'), ',d')} of {_text(entry.get('queries'), ',d')}",
                "verdict": (verdict := str(entry.get("verdict"))),
                "sign": _SIGNS.get(verdict, "?"),
                "needed": "" if needed is None else f"about {about(int(needed))} queries would tell",
            }
        )
    return rows


def _metric_rows(result: Result) -> list[dict[str, Any]]:
    """One row a metric: the value on every path, beside it the change (nothing where there is none) and the verdict's sign."""
    names = list(dict.fromkeys(name for path in result.paths.values() for name in path.metrics))
    rows = []
    for metric in names:
        cells = []
        for path in result.paths.values():
            delta = number(entry_of(path.parity, "delta", metric))
            verdict = statistics(path).get(metric, {}).get("verdict")
            cells.append(
                {
                    "value": _text(path.metrics.get(metric), ".4f"),
                    "change": "" if path.parity is None or delta == 0 else _text(delta, "+.4f"),
                    "sign": "" if verdict is None else _SIGNS.get(str(verdict), "?"),
                    "verdict": "" if verdict is None else str(verdict),
                }
            )
        rows.append({"metric": metric, "cells": cells})
    return rows


def _machine(result: Result) -> str:
    """Paths and environment on one line."""
    found = result.environment
    parts = [", ".join(result.paths), *(f"{name} {found[name]}" for name in ("torch", "python") if found.get(name))]
    device = found.get("gpu") or found.get("cpu") or found.get("device")
    parts += [str(device)] if device else []
    parts += [f"{found['threads']} threads"] if number(found.get("threads")) is not None and not found.get("gpu") else []
    return " \N{MIDDLE DOT} ".join(parts)


def _settings_text(result: Result) -> str:
    """How intervals and p-values were made; empty where no path has statistics."""
    for path in result.paths.values():
        found = mapping(path.parity, "statistics_settings")
        if statistics(path):
            level = number(found.get("level"))
            what = "Intervals" if level is None else f"{level:.0%} intervals"
            drawn = number(found.get("resamples"))
            parts = [
                f"{what} of the mean difference"
                + ("" if drawn is None else f" by {drawn:,} bootstrap resamples of the queries")
            ]
            compared = number(found.get("comparisons"))
            if compared is not None:
                parts.append(f"p-values by a paired randomisation test, Holm-corrected over {compared:,} comparisons")
            return "; ".join(parts) + "."
    return ""


def _summary(result: Result) -> list[dict[str, Any]]:
    """One card a compared path: its sentence and how many metrics got which verdict."""
    compared = [(name, path) for name, path in result.paths.items() if path.parity is not None]
    cards = []
    for (name, path), sentence in zip(compared, words.verdicts(result), strict=True):
        found = [str(entry.get("verdict")) for entry in statistics(path).values()]
        counts = [{"verdict": kind, "sign": sign, "count": found.count(kind)} for kind, sign in _SIGNS.items() if kind in found]
        cards.append({"path": name, "sentence": sentence.removeprefix(f"{name}: "), "counts": counts, "judged": len(found)})
    return cards


def _first(entry: Any, texts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both lists side by side: at each rank the reference's document and the path's, with their texts and relevance."""
    rows = []
    for rank, found in enumerate(map(mapping, entries(entry)), 1):
        sides = []
        for name, judged in (("reference", "reference_relevance"), ("document", "relevance")):
            document = found.get(name)
            sides.append(
                {
                    "document": NONE if document is None else str(document),
                    "text": "" if document is None else str(texts.get(str(document), "")),
                    "relevance": number(found.get(judged)),
                }
            )
        rows.append({"rank": rank, "sides": sides, "same": found.get("reference") == found.get("document")})
    return rows


def _moved(entry: Any) -> list[dict[str, str]]:
    return [
        {
            "document": str(found.get("document")),
            "reference_rank": _text(found.get("reference_rank"), "d"),
            "rank": _text(found.get("rank"), "d"),
            "relevance": _text(found.get("relevance"), "d"),
        }
        for found in map(mapping, entries(entry))
        if found
    ]


def _largest_changes(result: Result, path: PathResult) -> list[dict[str, Any]]:
    """For results that list no changed queries: those with the largest change of the first metric; moved documents are unknown."""
    reference = result.paths.get(result.reference or "")
    names = metric_names(result)
    metric = METRIC if METRIC in names else next(iter(names), "")
    if reference is None:
        return []
    pairs = ((query, number(value), number(path.per_query.get(metric, {}).get(query)))
             for query, value in reference.per_query.get(metric, {}).items())  # fmt: skip
    changed = [(query, left, right) for query, left, right in pairs if left is not None and right is not None and left != right]
    changed.sort(key=lambda found: -abs(found[2] - found[1]))
    return [
        {"query": query, "metric": metric, "reference": left, "value": right, "delta": right - left}
        for query, left, right in changed[:_MOST_CHANGED]
    ]


def _most_changed(result: Result) -> list[dict[str, Any]]:
    """Each compared path's most changed queries, as text."""
    found = []
    texts = {side: mapping(result.task.get("texts"), side) for side in ("queries", "documents")}
    for name, path in result.paths.items():
        if path.parity is None:
            continue
        known = path.parity.get("most_changed")
        listed = [mapping(entry) for entry in (entries(known) if known is not None else _largest_changes(result, path))]
        queries = [
            {
                "query": str(entry.get("query")),
                "metric": str(entry.get("metric")),
                "reference": _text(entry.get("reference"), ".4f"),
                "value": _text(entry.get("value"), ".4f"),
                "delta": "=" if entry.get("delta") == 0 else _text(entry.get("delta"), "+.4f"),
                "text": str(texts["queries"].get(str(entry.get("query")), "")),
                "first": _first(entry.get("first"), texts["documents"]),
                "moved": _moved(entry.get("moved")),
            }
            for entry in listed
            if entry and entry.get("delta") != 0
        ]
        still = len([entry for entry in listed if entry]) - len(queries)
        metric = next((str(entry["metric"]) for entry in listed if entry.get("metric")), words.metric_shown(result))
        found.append({"path": name, "queries": queries, "metric": metric, "documents_known": known is not None, "still": still})
    return found


def _command(result: Result) -> str:
    text = shlex.join(result.command)
    return f"python {text}" if text.startswith("evaluate.py") else text


def _provenance(result: Result) -> list[tuple[str, list[tuple[str, str]]]]:
    parts: list[tuple[str, Mapping[str, Any]]] = [
        ("Task", result.task),
        ("Encoder", result.encoder),
        ("Environment", result.environment),
    ]
    return [(title, words.facts(found)) for title, found in parts]


def _context(result: Result) -> dict[str, Any]:
    data = page_data(result)
    scripts = [_asset(name) for name in SCRIPTS]
    return {
        "title": f"{result.task.get('source')}/{result.task.get('dataset')}",
        "created": result.created,
        "headline": words.headline(result),
        "machine": _machine(result),
        "metric_rows": _metric_rows(result),
        "level": 100 * LEVEL,
        "warnings": words.warnings(result),
        "reference": data["reference"],
        "summary": _summary(result),
        "verdict_rows": [row for name, path in result.paths.items() for row in _verdict_rows(name, path)],
        "settings": _settings_text(result),
        "tables": [table for table in tables(result) if not table.title.startswith("Metrics")],
        "most_changed": _most_changed(result),
        "described": [(name, path.description) for name, path in result.paths.items() if path.description],
        "provenance": _provenance(result),
        "command": _command(result),
        "runs": [path.run for path in result.paths.values() if path.run],
        "changes": data["reference"] is not None
        and any(found["at"] for held in data["values"].values() for found in held["paths"].values()),
        "data": data,
        "style": Markup(_asset("report.css")),
        "scripts": [Markup(script) for script in scripts],
        "policy": _policy(scripts),
    }


def to_html(result: Result) -> str:
    """The report as one HTML page; the same Result gives the same page.

    Holds what the Markdown report holds, the statistics, a table of every query, plots and the queries that changed most. Parts that
    a Result has no figures for (one of an older version, a comparison of run files) say so.
    """
    return _template().render(_context(result)) + "\n"


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("maxsim_eval.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `tojson` writes <, >, & and ' as escapes, so no text from a Result ends the script element that holds it.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return environment.get_template("report.html")
