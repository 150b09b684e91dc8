"""Figures of notebooks: what is drawn is what the Result says, what is missing is said, and texts of a Result are no markup."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import report_results as made_results
from maxsim_eval.data.cards import load_card
from maxsim_eval.errors import DataError
from maxsim_eval.report.result_json import to_json
from maxsim_eval.studies import figures, samples
from maxsim_eval.studies.fidelity import token_bytes
from maxsim_eval.types import Result

DRAWN: tuple[Callable[..., figures.Picture], ...] = (
    figures.deltas,
    figures.spearman,
    figures.overlaps,
    figures.score_errors,
    figures.storage,
)
SHOWN: tuple[Callable[..., figures.Page], ...] = (figures.headline, figures.tables, figures.paper_table)


@pytest.fixture
def result() -> Result:
    found: Result = made_results.full()
    return found


def said_to_be(result: Result, source: str, dataset: str) -> Result:
    """The result under the name of another dataset."""
    return replace(result, task={**result.task, "source": source, "dataset": dataset})


def texts(picture: figures.Picture) -> str:
    """All text of a picture, from its SVG."""
    return " | ".join(ElementTree.fromstring(picture._repr_svg_()).itertext())


def panels(picture: figures.Picture) -> list[Any]:
    return list(picture.figure.axes)


def test_deltas_are_those_of_the_statistics(result: Result) -> None:
    picture = figures.deltas([result], ("nDCG@10", "Recall@100"))
    assert [axes.get_title() for axes in panels(picture)] == ["nDCG@10", "Recall@100"]
    for axes, metric in zip(panels(picture), ("nDCG@10", "Recall@100")):
        for place, name in enumerate(("fp16", "int8")):
            found: Any = (result.paths[name].parity or {})["statistics"][metric]
            point, _, (bar,) = axes.containers[2 * place + 1].lines  # a bound, then a point with its interval, for each row
            assert point.get_xydata().tolist() == [[found["mean"], place]]
            ((left, right),) = [segment[:, 0] for segment in bar.get_segments()]
            assert (left, right) == pytest.approx((found["low"], found["high"]))
            (box,) = axes.containers[2 * place].patches
            assert (box.get_x(), box.get_width()) == (-found["bound"], 2 * found["bound"])
    assert [label.get_text() for label in panels(picture)[0].get_yticklabels()] == ["fp16", "int8"]
    assert "diamonds" not in texts(picture)


def test_the_papers_changes_are_drawn_beside(result: Result) -> None:
    """ColPali's and GVE's of FinReport, from the card: fused minus FP32, and INT8 minus FP32."""
    figure = figures.deltas([said_to_be(result, "real-mm-rag", "finreport")], ("nDCG@10",))
    (axes,) = panels(figure)
    diamonds = [line for line in axes.lines if line.get_marker() == "D"]
    drawn = sorted((round(float(line.get_xdata()[0]), 6), round(float(line.get_ydata()[0]) - 0.28)) for line in diamonds)
    assert drawn == [(0.0, 0), (0.0004, 0), (0.0013, 1), (0.0029, 1)]
    assert "diamonds: the paper's" in texts(figure)


def test_the_papers_values_stand_beside_ours(result: Result) -> None:
    page = figures.paper_table([said_to_be(result, "real-mm-rag", "finreport"), result]).text
    mean = result.paths["fp16"].metrics["nDCG@10"]
    assert f"| nDCG@10 | ColPali v1.2 | fused | 0.6019 | {mean:.4f} (fp16) | 100 | tab:colpali\\_ndcg\\_full |" in page
    assert load_card("real-mm-rag", "finreport").paper_caveat[:40] in page
    assert "The paper gives no figure of beir/scifact." in page


def test_spearman_is_drawn_from_one(result: Result) -> None:
    (axes,) = panels(figures.spearman([result]))
    bounds = [line for line in axes.lines if line.get_color() == "#111111"]
    assert [line.get_xdata()[0] for line in bounds] == pytest.approx([1e-4, 1e-3])
    dots = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([1e-4, 1e-4])
    ranges = [line.get_xdata() for line in axes.lines if line.get_alpha() == 0.5]
    assert np.array(ranges) == pytest.approx(np.array([[1e-4, 1e-2]] * 2))
    path = result.paths["fp16"]
    perfect = {**(path.parity or {}), "spearman": {"mean": 1.0, "min": 1.0, "percentiles": {"50": 1.0}}}
    exact = replace(result, paths={"fp16": replace(path, parity=perfect)})
    (axes,) = panels(figures.spearman([exact]))
    assert [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"] == [1e-8]


def test_overlaps_and_errors_are_the_results(result: Result) -> None:
    (axes,) = panels(figures.overlaps([result]))
    sets, order = axes.lines[:2]
    assert list(sets.get_xdata()) == ["1", "5", "10", "20", "50", "100"]
    parity: Any = result.paths["fp16"].parity
    assert list(sets.get_ydata()) == list(parity["overlap"].values())
    assert list(order.get_ydata()) == list(parity["same_order"].values())
    (axes,) = panels(figures.score_errors([result]))
    counts = np.array(parity["error_histogram"]["counts"])
    held = np.flatnonzero(counts)
    values, edges, _ = axes.patches[0].get_data()
    assert values == pytest.approx(counts[held[0] : held[-1] + 1] / (counts.sum() + 12))
    assert edges == pytest.approx(parity["error_histogram"]["edges"][held[0] : held[-1] + 2])
    assert axes.get_xscale() == "log"


def test_storage_counts_the_scales(result: Result) -> None:
    (axes,) = panels(figures.storage([result]))
    assert [bar.get_width() for bar in axes.patches] == [512.0, 256.0, token_bytes("int8", 128, 1.0)] == [512, 256, 130]
    assert "1.97x smaller than FP16" in texts(figures.storage([result]))


def test_several_results_are_told_apart(result: Result) -> None:
    both = [result, said_to_be(result, "beir", "arguana")]
    (axes,) = panels(figures.spearman(both))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["beir/scifact  fp16", "beir/scifact  int8", "beir/arguana  fp16", "beir/arguana  int8"]
    assert [axes.get_title() for axes in panels(figures.overlaps(both))] == ["beir/scifact", "beir/arguana"]


@pytest.mark.parametrize("draw", [*DRAWN, *SHOWN], ids=lambda draw: str(draw.__name__))
def test_results_of_any_kind_are_drawn(draw: Callable[..., Any]) -> None:
    for made in (made_results.bare(), made_results.hostile(), made_results.full()):
        found = draw([made])
        text = found.text if isinstance(found, figures.Page) else found._repr_svg_()
        assert "<script>window" not in text
        assert "<img" not in text
        if isinstance(found, figures.Picture):
            ElementTree.fromstring(text)


@pytest.mark.parametrize("draw", DRAWN[:4], ids=lambda draw: str(draw.__name__))
def test_what_a_result_lacks_is_said(draw: Callable[..., figures.Picture]) -> None:
    bare = made_results.bare()
    path = bare.paths["b.trec"]
    empty = replace(bare, paths={**bare.paths, "b.trec": replace(path, parity={"reference": "a"})})
    assert re.search(r"not in th(is|ese) results?", texts(draw([empty])))


def test_pictures_are_saved_and_repeat(result: Result, tmp_path: Path) -> None:
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        figures.spearman([result]).save(tmp_path / f"one.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes().startswith(start)
    assert figures.spearman([result])._repr_svg_() == figures.spearman([result])._repr_svg_()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        figures.spearman([result]).save(tmp_path / "file" / "one.svg")


def test_named_results_are_read_and_nothing_is_made(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "result.json").write_text(to_json(result), encoding="utf-8")
    (tmp_path / "b.json").write_text(to_json(said_to_be(result, "beir", "arguana")), encoding="utf-8")

    def make() -> list[Result]:
        raise AssertionError("a Result is named")

    monkeypatch.setenv(samples.VARIABLE, os.pathsep.join(["", str(tmp_path / "report"), str(tmp_path / "b.json")]))
    assert [found.task["dataset"] for found in samples.results(make)] == ["scifact", "arguana"]
    monkeypatch.setenv(samples.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"none\.json: cannot be read as a result"):
        samples.results(make)
    monkeypatch.setenv(samples.VARIABLE, "")
    assert samples.results(lambda: [result]) == [result]


def test_generated_pages_are_the_same_everywhere_and_hold_what_is_asked() -> None:
    """Unit tokens, ragged pages; the figures of the stand-in are neither 0 nor 1."""
    encoder = samples.GeneratedPages(48)
    pages = encoder.encode(["p-1", "p-2"], "document")
    assert pages.lengths.tolist() == encoder.encode(["p-1", "p-2"], "document").lengths.tolist()
    assert all(24 <= length <= 48 for length in pages.lengths.tolist())
    assert pages.values.norm(dim=1).numpy() == pytest.approx(np.ones(len(pages.values)), abs=1e-5)
    for found in samples.small_pages():
        assert found.task["source"] == "generated"
        assert 0.5 < found.paths["fp32"].metrics["nDCG@10"] < 0.99
        assert found.paths["fp32"].metrics["AnyHit@10"] == found.paths["fp32"].metrics["Recall@10"]  # one page a question
        for name, least in (("fp16", 0.9999), ("int8", 0.999)):
            assert (found.paths[name].parity or {})["spearman"]["mean"] > least
