"""The tables of docs/scale.md: the arithmetic of `costs.py` carried to collections larger than the machines at hand.

    python -m maxsim_eval.studies.scale                               prints the tables
    python -m maxsim_eval.studies.scale --write docs/scale.md         puts them between their markers there
    python -m maxsim_eval.studies.scale --rates FILE ...              from other rates (default: docs/results/h200/rates.json)

Every figure is a formula of this file over a rate of the JSON, which says where that was measured, or that it was assumed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsim_eval.data.cards import load_card
from maxsim_eval.errors import DataError
from maxsim_eval.files import write_text
from maxsim_eval.parsing import json_of
from maxsim_eval.planning.costs import (
    PathPlan,
    PathRates,
    Rate,
    Rates,
    Sizes,
    corpus_bytes,
    kept_rows,
    largest_share,
    merge_bytes,
    operations,
    path_plan,
    units,
)
from maxsim_eval.quantities import size_text, time_text

SCHEMA = "maxsim-eval/scale-rates/1"
RATES = Path("docs/results/h200/rates.json")
DIM = 128
QUERY_TOKENS = 32
MEAN_TOKENS = 120  # of a passage: an assumption
PAGE_TOKENS = 1024
PAGES = 100_000_000
PAGE_QUERIES = 1000
K = 100
_UNSAVED = 3  # units a rank can lose: one being scored, one waiting to be written, one being written
_PAPER_NQ_BYTES = 116e9  # the paper's out-of-core corpus: 2.68M documents in FP16

# BEIR's largest sets have cards; BioASQ is not freely downloadable and has none: counts of BEIR's own table.
SETS = ("nq", "dbpedia-entity", "hotpotqa", "fever", "climate-fever", "msmarco")
BIOASQ = (14_914_602, 500)


@dataclass(frozen=True)
class Figures:
    """The rates of a JSON, by name."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        if name not in self.values:
            raise DataError(f"rates: {name!r} is missing; there are {', '.join(self.values)}")
        return self.values[name]

    def machine(self, what: str, form: str, *, nodes: int = 1, gpus: int = 1, drives: int = 1) -> Rates:
        """Rates of `nodes` nodes of `gpus` GPUs each that score `what` (passages or pages) kept in `form`."""
        name = "fp16" if form == "float16" else form
        return Rates(
            device="cuda",
            paths={name: PathRates(Rate(self[f"score {what} {name}"]))},
            disk=Rate(nodes * drives * self["drive"]),
            host=Rate(nodes * gpus * self["readers"] * self["page cache thread"]),
            link=Rate(self["link"]),
            network=Rate(self["network"]),
        )

    def path(self, what: str, sizes: Sizes, *, cold: float = 0, nodes: int = 1, gpus: int = 1, drives: int = 1) -> PathPlan:
        """One path over a corpus, from the page cache but for `cold` bytes."""
        rates = self.machine(what, sizes.form, nodes=nodes, gpus=gpus, drives=drives)
        return path_plan(next(iter(rates.paths)), sizes, rates, cold=cold, k=K, processes=nodes * gpus)


def read_rates(path: Path) -> Figures:
    """Rates from a JSON file, measured and assumed.

    Raises:
        DataError: not there, or not such a file.
    """
    try:
        document = json_of(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise DataError(f"{path}: schema {document['schema']!r}, need {SCHEMA!r}")
        entries = {**document["measured"], **document["assumed"]}
        return Figures({name: float(entry["value"]) for name, entry in entries.items()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a file of rates ({error!r})") from error


def passages(documents: int, queries: int, form: str = "float16", mean: float = MEAN_TOKENS) -> Sizes:
    """Sizes of a text collection: queries of 32 tokens, d = 128."""
    return Sizes(queries, documents, queries * QUERY_TOKENS, round(documents * mean), DIM, form, "assumed", exact=False)


def pages(queries: int, form: str = "float16", query_tokens: int = QUERY_TOKENS) -> Sizes:
    """Sizes of a hundred million pages of 1024 patches, d = 128."""
    return Sizes(queries, PAGES, queries * query_tokens, PAGES * PAGE_TOKENS, DIM, form, "assumed", exact=False)


def break_even(rate: float, score: float, form: str) -> float:
    """Query tokens from which matrix units, not a level that delivers `rate` bytes a second, bound scoring of long documents."""
    return score * corpus_bytes(1024, 1, DIM, form) / 1024 / (2 * DIM * rate)


def levels_table(figures: Figures) -> list[str]:
    """Where documents may lie, how fast one GPU gets them, and what bounds then."""
    link, thread, readers = figures["link"], figures["page cache thread"], int(figures["readers"])
    rows: list[tuple[str, float, str]] = [
        ("GPU memory", figures["gpu memory"], ""),
        ("host memory, pinned", link, ""),
        ("page cache, 1 thread", min(thread, link), ""),
        (
            f"page cache, {readers} threads",
            min(readers * thread, link),
            "limited by the link" if readers * thread > link else "",
        ),
        ("one NVMe drive", figures["drive"], "assumed"),
        ("shared file system, 8 GPUs a node", figures["shared file system"] / figures["gpus"], "assumed"),
    ]
    lines = _head(
        "documents lie in",
        "bytes a second and GPU",
        "note",
        "FP16: matrix units bound from",
        "INT8: from",
        "100 GB take at least",
    )
    for name, rate, note in rows:
        cells = [name, f"{size_text(rate)}/s", note]
        for form in ("fp16", "int8-document"):
            tokens = break_even(rate, figures[f"score passages {form}"], "float16" if form == "fp16" else form)
            cells.append(f"{tokens:,.0f} tokens ({max(1, round(tokens / QUERY_TOKENS)):,} queries)")
        lines.append(_row(*cells, time_text(100e9 / rate)))
    return lines


def beir_table(figures: Figures) -> list[str]:
    """BEIR's largest sets, all judged queries, and NQ as the paper measured it."""
    lines = _head(
        "set",
        "documents",
        "queries",
        "FP16",
        "link",
        "matrix units",
        "expected, 1 GPU",
        "INT8, 1 GPU",
        "FP16, 8 GPUs",
        "1 GPU, cold, one NVMe drive",
    )
    rows: list[tuple[str, int, int, float]] = []
    for name in SETS:
        card = load_card("beir", name)
        assert card.documents is not None
        assert card.queries is not None
        rows.append((name, card.documents, card.queries, MEAN_TOKENS))
    rows.append(("bioasq", *BIOASQ, MEAN_TOKENS))
    documents = rows[0][1]
    mean = _PAPER_NQ_BYTES / documents / (2 * DIM)
    rows.append((f"nq, the paper's 116 GB ({mean:.0f} tokens)", documents, 500, mean))
    for name, documents, queries, mean in rows:
        half, codes = (passages(documents, queries, form, mean) for form in ("float16", "int8-document"))
        one = figures.path("passages", half)
        lines.append(
            _row(
                name,
                f"{documents:,}",
                f"{queries:,}",
                size_text(half.stored),
                time_text(one.of("link")),
                time_text(one.of("score")),
                time_text(one.seconds),
                time_text(figures.path("passages", codes).seconds),
                time_text(figures.path("passages", half, gpus=8).seconds),
                time_text(figures.path("passages", half, cold=half.stored).seconds),
            )
        )
    return lines


def cluster_table(figures: Figures) -> list[str]:
    """A hundred million pages, 1000 text queries, on nodes of 8 GPUs."""
    lines = _head(
        "nodes (GPUs)", "form", "bytes a node", "lies in", "disk", "link", "matrix units", "expected a pass", "merge of top-100"
    )
    gpus, drives = int(figures["gpus"]), int(figures["drives"])
    for nodes in (1, 8, 32, 128):
        for form in ("float16", "int8-document"):
            sizes = pages(PAGE_QUERIES, form)
            each = sizes.stored / nodes
            stays = each <= figures["page cache size"]
            found = figures.path("pages", sizes, cold=0 if stays else sizes.stored, nodes=nodes, gpus=gpus, drives=drives)
            first = sizes.stored / (nodes * drives * figures["drive"])
            merged = merge_bytes(nodes * gpus, sizes.queries, K)
            lines.append(
                _row(
                    f"{nodes} ({nodes * gpus})",
                    "FP16" if form == "float16" else "INT8",
                    size_text(each),
                    "page cache" if stays else "NVMe",
                    f"{time_text(first)}{', first pass only' if stays else ''}",
                    time_text(found.of("link")),
                    time_text(found.of("score")),
                    time_text(found.seconds),
                    f"{size_text(merged)}, {time_text(found.of('merge'))}",
                )
            )
    return lines


def query_table(figures: Figures) -> list[str]:
    """What one query against a hundred million pages costs, exactly scored."""
    lines = _head(
        "one query of",
        "form",
        "operations",
        "GPU-seconds, matrix units",
        "GPU-seconds, link",
        "GPU-seconds, GPU memory",
        "GPUs to hold it",
    )
    for tokens, name in ((QUERY_TOKENS, "32 tokens (text)"), (PAGE_TOKENS, "1024 tokens (a page)")):
        for form in ("float16", "int8-document"):
            sizes = pages(1, form, tokens)
            work = operations(tokens, sizes.document_tokens, DIM)
            score = figures[f"score pages {'fp16' if form == 'float16' else form}"]
            lines.append(
                _row(
                    name,
                    "FP16" if form == "float16" else "INT8",
                    f"{work:.2g}",
                    f"{work / score:,.2f}",
                    f"{sizes.stored / figures['link']:,.0f}",
                    f"{sizes.stored / figures['gpu memory']:,.1f}",
                    f"{-(-sizes.stored // int(figures['gpu memory size'])):,}",
                )
            )
    return lines


def restart_table(figures: Figures) -> list[str]:
    """What a killed run loses and what every start costs, in FP16."""
    lines = _head(
        "corpus", "GPUs", "units", "a unit", "lost by a kill, a GPU", "to score again", "busiest share", "kept scores a path"
    )
    gpus = int(figures["gpus"])
    nq, msmarco = (passages(load_card("beir", name).documents or 0, 500) for name in ("nq", "msmarco"))
    for name, sizes, what, ranks in (
        ("nq", nq, "passages", 1),
        ("nq", nq, "passages", gpus),
        ("msmarco", msmarco, "passages", gpus),
        ("100M pages", pages(PAGE_QUERIES), "pages", 32 * gpus),
    ):
        count = units(sizes.stored, sizes.documents)
        unit = sizes.stored / count
        lost = min(_UNSAVED * unit, sizes.stored / ranks)
        rate = min(
            figures["link"],
            figures[f"score {what} fp16"] * sizes.stored / operations(sizes.query_tokens, sizes.document_tokens, DIM),
        )
        rows = kept_rows(sizes.queries, sizes.documents, ["fp32"])
        lines.append(
            _row(
                name,
                f"{ranks}",
                f"{count:,}",
                size_text(unit),
                size_text(lost),
                time_text(lost / rate),
                f"{largest_share(count, ranks) * ranks:.2f} of even",
                f"{size_text(rows * sizes.documents * 4)} ({rows} queries)",
            )
        )
    return lines


TABLES: dict[str, Callable[[Figures], list[str]]] = {
    "levels": levels_table,
    "beir": beir_table,
    "cluster": cluster_table,
    "query": query_table,
    "restart": restart_table,
}


def rates_table(path: Path) -> list[str]:
    """The rates themselves, with where they come from."""
    document: dict[str, Any] = json_of(path.read_text(encoding="utf-8"))
    lines = ["| rate | value | | where from |", "| --- | ---: | --- | --- |"]
    for kind in ("measured", "assumed"):
        for name, entry in document[kind].items():
            value = entry["value"]
            shown = f"{value / 1e12:,.0f} T operations/s" if name.startswith("score") else f"{size_text(value)}/s"
            if name.endswith("size"):
                shown = size_text(value)
            elif name in ("readers", "gpus", "drives"):
                shown = f"{value}"
            lines.append(_row(name, shown, kind, entry["how"]))
    return lines


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "| --- |" + " ---: |" * (len(cells) - 1)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def fill(text: str, tables: Mapping[str, list[str]]) -> str:
    """Put every table between its markers, `<!-- table: name -->` and `<!-- end -->`.

    Raises:
        DataError: a table without its markers.
    """
    for name, lines in tables.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        body = "\n" + "\n".join(lines) + "\n"
        text, count = pattern.subn(lambda found, body=body: found[1] + body + found[2], text)  # type: ignore[misc]
        if count != 1:
            raise DataError(
                f"markers of table {name!r}: found {count} times, need '<!-- table: {name} -->' ... '<!-- end -->' once"
            )
    return text


def all_tables(path: Path) -> dict[str, list[str]]:
    """Every table of docs/scale.md, from a JSON of rates."""
    figures = read_rates(path)
    return {**{name: table(figures) for name, table in TABLES.items()}, "rates": rates_table(path)}


def put(tables: dict[str, list[str]], page: Path | None) -> None:
    """Write tables between their markers in a page; None prints them."""
    if page is None:
        for name, lines in tables.items():
            print(f"{name}\n\n" + "\n".join(lines) + "\n")
    else:
        write_text(page, fill(page.read_text(encoding="utf-8"), tables))


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=Path, default=RATES, help="JSON of rates")
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    put(all_tables(options.rates), options.write)


if __name__ == "__main__":
    main()
