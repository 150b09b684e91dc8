"""The HTML page without a browser: what it holds, that it reaches nothing, that no text becomes markup. Browser: test_browser_report.py."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import report_results as made_results
from maxsim_eval.errors import DataError
from maxsim_eval.report.html import SCRIPTS, to_html
from maxsim_eval.report.html_data import page_data
from maxsim_eval.report.result_json import from_json, to_json
from maxsim_eval.report.tables import tables
from maxsim_eval.report.words import verdicts
from maxsim_eval.report.writing import write_reports
from maxsim_eval.types import PathResult, Result

PLOTS = ("means", "deltas", "differences", "errors", "shifts", "seconds", "memory", "query-lengths", "document-lengths")
VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """A parsed page: elements with attributes, scripts, text; every element must be closed where it was opened."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.shown: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        if tag == "script":
            self.scripts.append((found, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.open and self.open[-1] != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        """What a reader sees, white space as one blank."""
        return " ".join("".join(self.shown).split())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        """Attributes of every such element."""
        return [
            found
            for name, found in self.elements
            if name == tag and all(found.get(key) == value for key, value in wanted.items())
        ]

    @property
    def data(self) -> dict[str, Any]:
        """The block of data."""
        (block,) = (text for found, text in self.scripts if found.get("id") == "data")
        return dict(json.loads(block))


@pytest.fixture
def full() -> Result:
    return from_json(to_json(made_results.full()))


def test_a_full_result_fills_every_part(full: Result) -> None:
    page = Page(to_html(full))
    for fact in (
        "beir/scifact", "40 queries", "5,183 documents", "2 judged documents are missing", "path number 2", "torch",
        "python evaluate.py beir scifact --paths fp32,fp16,int8", "about 1,300 queries would tell", "\N{MINUS SIGN}0.02000", "0.003",
        "< 0.001", "10,000 bootstrap resamples", "Holm-corrected over 6 comparisons", "2026-01-02", "runs/2.trec",
    ):  # fmt: skip
        assert fact in page.text, fact
    for sentence in verdicts(full):
        assert sentence.partition(": ")[2] in page.text
    for table in tables(full)[1:]:  # the first is the page's own, of metrics
        assert table.title in page.text
        for row in table.rows:
            for cell in row:
                assert " ".join(cell.split()) in page.text
    assert {found["data-plot"] for tag, found in page.elements if "data-plot" in found} == {*PLOTS, "gain-seconds"}
    assert "missing" not in {found.get("class") for tag, found in page.elements if tag == "p"}
    assert page.text.count("equivalent") >= 3
    for document in ("doc0", "doc1", "doc2", "doc3"):
        assert page.text.count(document) == 6  # of three queries on two paths


def test_links_and_labels_meet_their_targets(full: Result) -> None:
    page = Page(to_html(full))
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    for found in page.all("a"):
        assert found["href"].startswith("#")
        assert found["href"][1:] in ids
    for found in page.all("label"):
        assert found["for"] in ids
    labelled = {found["for"] for found in page.all("label")}
    for tag in ("select", "input"):
        for found in page.all(tag):
            assert found["id"] in labelled
    for _, found in page.elements:
        if "aria-labelledby" in found:
            assert found["aria-labelledby"] in ids
    first = next(found for tag, found in page.elements if tag in ("a", "button", "input", "select"))
    assert first == {"class": "skip", "href": "#main"}
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_page_can_reach_nothing(full: Result) -> None:
    html = to_html(full)
    page = Page(html)
    for tag, found in page.elements:
        for name in ("src", "href", "action", "srcset", "poster"):
            assert found.get(name, "#").startswith(("#", "data:,")), (tag, found)
        assert not [name for name in found if name.startswith("on")], (tag, found)
    (policy,) = (found["content"] for found in page.all("meta") if found.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert "unsafe" not in rules["script-src"]
    running = [text for found, text in page.scripts if found.get("type") != "application/json"]
    assert len(running) == len(SCRIPTS)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in running}
    assert set(rules["script-src"].split()) == hashes
    assert rules["img-src"] == "data: blob:"
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    own = html
    for _, text in page.scripts:
        if "Plotly, Inc." in text[:500]:
            own = own.replace(text, "")
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", own)


def test_hostile_texts_stay_texts() -> None:
    hostile = made_results.hostile()
    html = to_html(hostile)
    page = Page(html)
    plain = Page(to_html(made_results.full(len(made_results.HOSTILE))))
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in plain.elements}
    assert len(page.all("script")) == len(SCRIPTS) + 1
    assert not page.all("img")
    assert not page.all("svg")
    attributes = {name for _, found in page.elements for name in found}
    assert attributes == {name for _, found in plain.elements for name in found}
    for text in made_results.HOSTILE:
        assert " ".join(text.split()) in page.text
        assert text in page.data["queries"]
    block = html[html.index('id="data">') :]
    assert "<" not in block[: block.index("</script>")]


@pytest.mark.parametrize("reference", ["a", None])
def test_what_a_result_lacks_is_said(reference: str | None) -> None:
    bare = from_json(to_json(replace(made_results.bare(), reference=reference)))
    page = Page(to_html(bare))
    drawn = {found["data-plot"] for _, found in page.elements if "data-plot" in found}
    assert drawn == ({"means", "deltas"} if reference else {"means"})
    assert "holds no intervals or verdicts" in page.text
    assert "(not recorded)" in page.text
    if reference:
        assert "q1 nDCG@10 1.0000 → 0.5000 (\N{MINUS SIGN}0.5000)" in page.text
        assert "Which documents moved is not in this result" in page.text


@pytest.mark.parametrize("listed", [True, False])
def test_no_change_of_the_metric_shown_is_no_word_about_others(full: Result, listed: bool) -> None:
    """Recall@100 changed, nDCG@10 did not, with queries whose documents moved and without."""
    path = full.paths["int8"]
    assert path.parity is not None
    still = [{"query": "q1", "metric": "nDCG@10", "reference": 0.5, "value": 0.5, "delta": 0.0, "moved": []}] if listed else []
    paths = {**full.paths, "int8": replace(path, parity={**path.parity, "most_changed": still})}
    text = Page(to_html(replace(full, paths=paths))).text
    assert f"No query's nDCG@10 changed{'; the order of documents did in 1' if listed else '.'}" in text
    assert "No query's value changed" not in text


def test_no_paths_and_no_queries() -> None:
    empty = Result(
        {"source": "s", "dataset": "d", "split": "", "queries": 0, "documents": 0}, {"name": "e"}, 1, {}, {}, [], None
    )
    page = Page(to_html(empty))
    assert "This result holds no values per query." in page.text
    alone = PathResult({"nDCG@10": 0.5}, {"nDCG@10": {"q": 0.5}}, {"total": 1.0})
    page = Page(to_html(replace(empty, paths={"fp16": alone})))
    assert page.data["means"] == {"nDCG@10": {"fp16": {"mean": 0.5, "half": None}}}
    assert not page.all("section", id="changed")


ODD: list[Any] = [None, 3, "text", [], {}, [1, 2], {"a": 1}, [[1, 2]], [{"query": 1}], float("nan"), True]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_foreign_entries_never_break_a_page(odd: Any) -> None:
    full = made_results.full(4)
    keys = list(full.paths["int8"].parity)
    for key in (*keys, "statistics_settings"):
        parity = {**full.paths["int8"].parity, key: odd}
        paths = {**full.paths, "int8": replace(full.paths["int8"], parity=parity, memory={"host_peak_bytes": odd})}
        assert to_html(replace(full, paths=paths))
    for inner in ("statistics", "error_histogram", "rank_shifts", "statistics_settings"):
        found = dict.fromkeys(full.paths["int8"].parity[inner], odd)
        parity = {**full.paths["int8"].parity, inner: found}
        assert to_html(replace(full, paths={**full.paths, "int8": replace(full.paths["int8"], parity=parity)}))
    for task in ({"lengths": odd}, {"lengths": {"queries": odd}}, {"lengths": {"queries": {"edges": odd, "counts": odd}}}):
        assert 'data-plot="query-lengths"' not in to_html(replace(full, task={**full.task, **task}))


def test_values_per_query_come_back_exactly(full: Result) -> None:
    data = page_data(full)
    for metric, entry in data["values"].items():
        for name, path in full.paths.items():
            values = list(entry["base"])
            if name != "fp32":
                for place, value in zip(entry["paths"][name]["at"], entry["paths"][name]["value"], strict=True):
                    values[place] = value
            assert values == [round(path.per_query[metric][query], 6) for query in data["queries"]]
        reference = full.paths["fp32"].per_query[metric]
        changed = [
            i for i, query in enumerate(data["queries"]) if full.paths["int8"].per_query[metric][query] != reference[query]
        ]
        assert entry["paths"]["int8"]["at"] == changed
        assert changed


def test_a_change_below_the_digits_is_still_a_change() -> None:
    bare = made_results.bare()
    other = replace(bare.paths["b.trec"], per_query={"nDCG@10": {"q1": 1.0 - 1e-9, "q2": 0.5}})
    data = page_data(replace(bare, paths={**bare.paths, "b.trec": other}))
    assert data["values"]["nDCG@10"]["paths"]["b.trec"] == {"at": [0], "value": [1.0]}


def test_intervals_of_means_are_students() -> None:
    values = [0.0, 0.5, 0.5, 1.0, 0.25]
    path = PathResult({"m": 0.45}, {"m": {str(i): value for i, value in enumerate(values)}}, {})
    result = Result(
        {"source": "", "dataset": "", "split": "", "queries": 5, "documents": 1}, {"name": ""}, 1, {"p": path}, {}, [], None
    )
    found = page_data(result)["means"]["m"]["p"]
    # sd = sqrt(0.5500 / 4) = 0.370810; t(0.975, 4) = 2.776445
    assert found["half"] == pytest.approx(2.776445 * 0.370810 / 5**0.5, abs=2e-6)


def test_size() -> None:
    small = len(to_html(made_results.full()).encode())
    assert small < 1_400_000
    many = len(to_html(made_results.full(10_000, share=0.05)).encode())
    assert many - small < 1_000_000


def test_the_same_result_gives_the_same_page(full: Result) -> None:
    assert to_html(full) == to_html(full)


def test_numpys_numbers_count() -> None:
    bare = made_results.bare()
    odd = {"lengths": {"queries": {"edges": list(np.arange(3)), "counts": list(np.array([1, 2], np.int32))}}}
    path = replace(bare.paths["a"], per_query={"nDCG@10": {"q1": np.float32(0.5), "q2": np.float64(1.0)}})
    made = replace(bare, task={**bare.task, **odd}, paths={**bare.paths, "a": path})
    assert to_html(made) == to_html(from_json(to_json(made)))
    assert page_data(made)["lengths"]["queries"]["counts"] == [1, 2]


def test_the_page_is_among_the_reports(full: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reports(full, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == to_html(full)

    def refuse(_: Result) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maxsim_eval.report.writing.to_html", refuse)
    with pytest.raises(DataError, match="No space left"):
        write_reports(full, tmp_path / "half")
    assert not (tmp_path / "half" / "result.json").exists()


def test_the_vendored_library_is_the_one_named() -> None:
    folder = importlib.resources.files("maxsim_eval.report").joinpath("templates", "vendor")
    script = folder.joinpath("plotly-basic.min.js").read_bytes()
    readme = folder.joinpath("README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(script).hexdigest() in readme
    version = re.search(rb"plotly\.js \(basic - minified\) v([0-9.]+)", script)
    assert version is not None
    assert f"`plotly.js-basic-dist-min` {version[1].decode()}" in readme
    assert "MIT" in folder.joinpath("plotly-LICENSE.txt").read_text(encoding="utf-8")


# Colours --------------------------------------------------------------------------------------------------------------


def _themes() -> dict[str, dict[str, tuple[float, ...]]]:
    css = importlib.resources.files("maxsim_eval.report").joinpath("templates", "report.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", block)) for block in css.split("@media screen")[:2])
    rest = {name: value for name, value in light.items() if name not in dark}
    assert not rest, "a colour without a dark one"
    return {
        name: {key: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)) for key, value in theme.items()}
        for name, theme in (("light", light), ("dark", dark))
    }


def _linear(colour: tuple[float, ...]) -> list[float]:
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]


def _contrast(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    """WCAG 2 contrast ratio."""
    light, dark = sorted(
        (sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), _linear(c), strict=True)) for c in (left, right)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_their_ground(theme: str) -> None:
    colours = _themes()[theme]
    for name in ("text", "quiet", "link", "equivalent", "different", "inconclusive"):
        for ground in ("ground", "raised"):
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert _contrast(colours["text"], colours["notice"]) >= 4.5
    for name in ("reference", "focus", "notice-line", *(f"series-{i}" for i in range(6))):
        assert _contrast(colours[name], colours["ground"]) >= 3, name


# Linear RGB as seen without the long, middle or short cones (Machado, Oliveira and Fernandes 2009, severity 1).
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _lab(colour: tuple[float, ...], kind: str) -> list[float]:
    rgb = [min(1.0, max(0.0, sum(w * p for w, p in zip(row, _linear(colour), strict=True)))) for row in BLINDNESS[kind]]
    white = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * p for w, p in zip(row, rgb, strict=True)) / sum(row) for row in white]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_colours_of_paths_differ_for_every_eye(theme: str, kind: str) -> None:
    colours = _themes()[theme]
    seen = {name: _lab(colours[name], kind) for name in ("reference", *(f"series-{i}" for i in range(6)))}
    for left, right in itertools.combinations(seen, 2):
        assert math.dist(seen[left], seen[right]) > 20, (left, right)


def test_whole_numbers_that_json_holds_as_floats() -> None:
    """`3.0` is the whole number 3 to the schema."""
    held = json.loads(to_json(made_results.full()))
    need = to_html(from_json(json.dumps(held)))
    for path in held["paths"].values():
        for entry in path.get("parity", {}).get("statistics", {}).values():
            entry |= {key: float(entry[key]) for key in ("queries", "changed")}
        for entry in path.get("parity", {}).get("most_changed", []):
            for moved in entry["moved"]:
                moved |= {key: float(value) for key, value in moved.items() if isinstance(value, int)}
    found = to_html(from_json(json.dumps(held)))
    assert re.findall(r"[0-9]+ of [0-9]+", found) == re.findall(r"[0-9]+ of [0-9]+", need)
