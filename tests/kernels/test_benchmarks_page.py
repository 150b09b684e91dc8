"""docs/benchmarks.md is what the committed results give, every figure names its file and key, and every table can be shown."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER, RESULTS = ROOT / "kernels" / "benchmarks", ROOT / "docs" / "results"
NAMES = ("page", "page_cells", "page_rows", "page_forward", "page_kernels", "page_training", "page_summary", "page_readme")
LABELS = [
    "fwd",
    "fwd_abs",
    "nocg",
    "fwd_chunked",
    "chunked_sweep",
    "twoaxis",
    "mem",
    "op_abl",
    "multiquery",
    "varlen",
    "int8",
    "int8_B",
    "fat_emb_cliff",
    "splitd_perf",
    "traffic",
    "precision",
    "ooc",
    "train",
    "bwd_abl",
    "bwd_breakdown",
    "bwd_mem",
    "training_parity",
    "chamfer",
    "fast_p",
]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts, imported as the command imports them: siblings of one folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})


@pytest.fixture
def book(pages: SimpleNamespace) -> Any:
    return pages.page_cells.Book(RESULTS, pages.page.FIGURES)


def test_the_page_is_what_the_results_give(pages: SimpleNamespace, book: Any) -> None:
    held = pages.page.sections(book)
    assert pages.page.PAGE.read_text(encoding="utf-8") == pages.page.page(book, held), "run kernels/benchmarks/page.py"
    assert pages.page.MAP.read_text(encoding="utf-8") == pages.page.mapped(held), "run kernels/benchmarks/page.py"
    text = pages.page.README.read_text(encoding="utf-8")
    assert pages.page_readme.readme(book, text) == text, "run kernels/benchmarks/page.py"


def test_the_readme_marks_every_table_once(pages: SimpleNamespace, book: Any) -> None:
    text = pages.page.README.read_text(encoding="utf-8")
    stale = text.replace("| d = 4096, the same |", "| d = 4096, as we wish |")
    assert pages.page_readme.readme(book, stale) == text != stale
    with pytest.raises(ValueError, match=r"README\.md: got marks of"):
        pages.page_readme.readme(book, text.replace("<!-- table: gpu -->", ""))


def test_a_faster_rival_is_bold(pages: SimpleNamespace) -> None:
    cell = pages.page_cells.Cell
    shown = pages.page_readme._fewest([cell("1.08 (0.01)", ("a",)), cell("0.7 (0)", ("b",)), cell("-"), "x"])
    assert [pages.page_cells.text_of(one) for one in shown] == ["1.08 (0.01)", "**0.7** (0)", "-", "x"]
    ours = pages.page_readme._fewest([cell("1", ("a",)), cell("2", ("b",))])
    assert [one.text for one in ours] == ["1", "2"]


def test_every_figure_names_its_file_and_key(pages: SimpleNamespace) -> None:
    cells = json.loads(pages.page.MAP.read_text(encoding="utf-8"))
    files: dict[str, Any] = {}
    checked = 0
    for table in cells.values():
        for cell in table.values():
            assert cell["from"]
            for source in cell["from"]:
                name, _, pointer = source.partition("#")
                if name not in files:
                    files[name] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
                found = pages.page_cells.resolve(files[name], pointer)
                assert isinstance(found, int | float), source
                checked += 1
    assert checked > 300


def test_a_cell_shows_the_number_it_names(pages: SimpleNamespace) -> None:
    """Milliseconds of one source are shown as they stand in the file, to three digits."""
    cells = json.loads(pages.page.MAP.read_text(encoding="utf-8"))
    seen = 0
    for name, cell in cells["fwd_abs"].items():
        column = name.partition(" | ")[2]
        if column in ("ours", "naive FP32 acc.", "flash-maxsim"):
            (source,) = cell["from"]
            file, _, pointer = source.partition("#")
            assert pointer.endswith("/median_ms")
            found = pages.page_cells.resolve(json.loads((RESULTS / file).read_text(encoding="utf-8")), pointer)
            assert float(cell["shows"]) == pytest.approx(found, rel=5.1e-3)
            seen += 1
    assert seen >= 15


def test_no_figure_of_a_table_stands_outside_the_map(pages: SimpleNamespace, book: Any) -> None:
    """Numbers in our columns are cells with sources; what is plain text is the paper's, a count, or words."""
    for tables in pages.page.sections(book).values():
        for table in tables:
            for row in table.rows:
                for head, cell in list(zip(table.heads, row, strict=True))[1:]:
                    ours = not head.startswith("paper") and head not in ("cells", "who", "why", "bound by")
                    text = pages.page_cells.text_of(cell)
                    if ours and re.match(r"[\d.]", text):
                        assert isinstance(cell, pages.page_cells.Cell), (table.name, head, text)
                        assert cell.sources, (table.name, head, text)


def test_every_table_of_the_paper_is_on_the_page(pages: SimpleNamespace, book: Any) -> None:
    names = [table.name for tables in pages.page.sections(book).values() for table in tables]
    assert len(names) == len(set(names))
    assert set(LABELS) <= set(names)
    claimed = set(book.paper) - {"cost", "chunked_compile"}  # of the appendix's text
    assert claimed <= set(names)


def test_numbers_keep_their_digits(pages: SimpleNamespace) -> None:
    plain = pages.page_cells.plain
    shown = {
        0.02466: "0.0247",
        4.5312: "4.53",
        15.97: "16.0",
        44729.0: "44700",
        0.1: "0.1",
        0: "0",
        2.5e-7: "2.50e-07",
        9.999: "10.0",
    }
    assert {number: plain(number) for number in shown} == shown
    assert plain(0.0247, 2) == "0.025"


def test_arithmetic_keeps_sources(pages: SimpleNamespace) -> None:
    value = pages.page_cells.Value
    left, right = value(6.0, ("a#/x",)), value(3.0, ("b#/y",))
    found = left / right * 2
    assert (found.number, found.sources) == (4.0, ("a#/x", "b#/y"))
    assert pages.page_cells.times(left, right).text == "2.00x"
    assert pages.page_cells.times(None, right).text == pages.page_cells.MISSING
    assert pages.page_cells.pointer("f", ("a/b", "c~d")) == "f#/a~1b/c~0d"
    assert pages.page_cells.resolve({"a/b": [1, {"c~d": 7}]}, "/a~1b/1/c~0d") == 7


def measured(ms: dict[str, float], **more: Any) -> dict[str, Any]:
    """A row as paper.py writes it."""
    kinds = {"ours": "ours", "flash": "peer", "late-": "peer"}
    methods = {
        name: {
            "kind": next((kind for part, kind in kinds.items() if name.startswith(part)), "baseline"),
            "median_ms": time,
            "iqr_ms": time / 100,
            "of_floor": 0.5,
            "entry": "256 documents",
        }
        for name, time in ms.items()
    }
    data = {
        "methods": methods,
        "skipped": {"PyLate": "not installed"},
        "main": "ours",
        "operations": 8e9,
        "bytes": 1e6,
        "bound_by": "memory",
    }
    return {**data, "shape": {"queries": 4, "fill": 0.25, "mean_tokens": 120}, "environment": "r s", **more}


@pytest.fixture
def campaign(pages: SimpleNamespace, tmp_path: Path) -> Any:
    """A results folder with a small campaign of made-up figures, and nothing else."""
    times = {
        "ours": 1.0, "naive FP32 accumulation": 6.0, "naive FP16": 4.0, "naive FP16, amax": 3.5, "chunked FP16": 3.0,
        "compiled FP16, max-autotune-no-cudagraphs": 2.0, "compiled FP32, max-autotune": 5.0, "flash-maxsim": 0.8,
        "late-interaction-kernels": 1.25, "textbook FP32, cast inside": 9.0, "ours, a program a pair": 2.5,
        "ours, whole tokens in one tile": 1.5, "ours FP16": 1.1, "ours INT8, token scale": 0.9,
        "ours INT8, document scale": 0.6, "ours INT8, corpus scale": 0.55, "dequantise to FP32, naive": 7.0, "chunks of 256": 3.3,
        "compiled chunks, max-autotune-no-cudagraphs": 2.2,
    }  # fmt: skip
    quality = {"ours INT8, token scale": {"spearman": 0.9991, "top20": 0.95}, "ours INT8, document scale": {"top20": 1.0}}
    int8 = measured(times, main="ours INT8, token scale", stored_bytes={"FP16": 256, "token": 130}, quality=quality)
    point = {"peak_bytes": 2.7e9, "inputs_bytes": 2.6e9, "median_ms": 4.0}
    failed = {"failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 39.06 GiB. GPU 0 has"}
    sizes = ("ColPali 1000", "ColPali 15000", "ColPali 150000", "visual 10000", "ColPali 10000")
    fits, broken = dict.fromkeys(sizes, point), {**dict.fromkeys(sizes, point), "ColPali 150000": failed}
    traffic = {
        name: {"counted_bytes": 1e9, "ncu": {"bytes": 2e9}} for name in ("ours", "naive FP16", "naive FP32 accumulation")
    }
    errors = {"max_error": 1e-5, "max_relative_error": 4e-7, "spearman": 0.999999, "top20": 1.0, "top50": 1.0}
    shapes = ("textual", "long-doc", "medium", "visual", "ColPali")
    paper = pages.page_cells.Book(RESULTS, pages.page.FIGURES).paper
    groups = {
        "shapes": {f"{shape} 1000": measured(times) for shape in shapes},
        "frontier": {name: measured(times) for name in paper["chunked_sweep"] if not name.endswith(" 1000")},
        "op_abl": {name: measured(times) for name in paper["op_abl"]},
        "multiquery": {name: measured(times) for name in paper["multiquery"]},
        "varlen": {name: measured(times) for name in paper["varlen"]},
        "int8": dict.fromkeys(paper["int8"], int8),
        "int8_B": dict.fromkeys(paper["int8_B"], int8),
        "wide": {f"d = {dim}": measured(times) for dim in (128, 256, 384, 512, 768, 1024, 2048)},
        "memory": {
            **{name: {"cells": broken} for name in ("naive FP16", "naive FP32 accumulation")},
            "ours": {"cells": fits},
            "flash-maxsim": {"cells": {**fits, "ColPali 150000": {**point, "wrong": True}}},
        },
        "traffic": {shape: {"traffic": traffic} for shape in ("medium", "visual", "ColPali")},
        "precision": {shape: {"paths": {"ours FP16": {"own": errors, "true": errors}}} for shape in ("textual", "ColPali")},
        "chunks": {"ColPali 10000": measured(times)},
        "tiles": {"ColPali 1000": measured({"ours": 1.0, "tiles 128 x 64, 8 warps, 3 stages": 1.02})},
    }
    environments = {"r s": {"gpu": "G", "torch": "2", "revision": "r", "sources": "s"}}
    document = {"groups": {name: {"rows": rows} for name, rows in groups.items()}, "environments": environments}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "paper.json").write_text(json.dumps(document), encoding="utf-8")
    second = {shape: {"methods": {name: {"median_ms": time * 1.1} for name, time in times.items()}} for shape in shapes}
    (tmp_path / "h200" / "second.json").write_text(json.dumps({"shapes": second}), encoding="utf-8")
    return pages.page_cells.Book(tmp_path, pages.page.FIGURES)


def shown(pages: SimpleNamespace, book: Any) -> dict[str, Any]:
    return {table.name: table for tables in pages.page.sections(book).values() for table in tables}


def cell(pages: SimpleNamespace, table: Any, row: str, head: str) -> str:
    (found,) = [held for held in table.rows if pages.page_cells.text_of(held[0]) == row]
    return str(pages.page_cells.text_of(found[list(table.heads).index(head)]))


def test_tables_of_a_whole_campaign(pages: SimpleNamespace, campaign: Any) -> None:
    tables = shown(pages, campaign)
    of = lambda name, row, head: cell(pages, tables[name], row, head)  # noqa: E731
    assert of("fwd", "ColPali (1024, 1024)", "naive FP32 acc.") == "6.00x"
    assert of("fwd", "ColPali (1024, 1024)", "fastest eager") == "3.00x"
    assert of("fwd", "ColPali (1024, 1024)", "flash-maxsim") == "0.80x"
    assert of("nocg", "textual", "strongest") == "2.00x"
    assert of("fwd_chunked", "visual 10000", "chunked ms (chunk)") == "3.00 (256)"
    assert of("twoaxis", "150000", "naive FP16") == "OOM (39.06 GiB asked for)"
    assert of("twoaxis", "15000", "ours") == "4.00 (2.70)"
    assert of("twoaxis", "15000", "us a candidate, ours") == "0.267"
    assert of("mem", "150000", "flash-maxsim") == "wrong scores"
    assert of("mem", "150000", "naive FP16") == "OOM (39.06 GiB asked for)"
    assert of("mem", "10000", "paper: naive FP16 (40 GB), FP32 (80 GB), Flash") == "23.9, 47.2, 2.9"
    assert of("multiquery", "textual 1024, 4 queries", "queries/s") == "4000"
    assert of("op_abl", "visual 256", "pair over ours") == "2.50x"
    assert of("varlen", "highly ragged", "fill") == "25%"
    assert of("int8", "long-doc 1024", "top-20, token") == "95%"
    assert of("int8", "long-doc 1024", "storage") == "1.97x"
    assert of("int8_B", "128", "fastest dequantise (which)") == "7.00 (FP32, naive)"
    assert of("splitd_perf", "1024", "x whole tokens") == "1.50x"
    assert of("traffic", "medium", "ours, ncu") == "2.00"
    assert of("precision", "ours FP16, ColPali", "relative") == "4.0e-07"
    assert of("chunk grid", "ColPali 10000", "compiled chunks (size)") == "2.20 (256)"
    assert of("second harness", "visual", "naive FP16") == "4.00x / 4.00x"
    assert of("second harness", "visual", "largest difference") == "0%"
    for table in tables.values():
        assert pages.page_cells.markdown(table), table.name


def test_losses_and_fast_p_count_every_cell(pages: SimpleNamespace, campaign: Any) -> None:
    tables = shown(pages, campaign)
    cells = int(tables["fast_p"].rows[0][1])
    assert cells == 5 + 6 + 5 + 15 + 3 + 5 + 7 + 7
    assert pages.page_cells.text_of(tables["fast_p"].rows[0][2]) == "100%"  # everybody but peers
    losses = tables["losses"].rows
    assert {row[1] for row in losses} == {"flash-maxsim"}
    assert len(losses) == cells, "flash-maxsim's 0.8 ms beats 1.0 and INT8's 0.9 everywhere"
    assert pages.page_cells.text_of(tables["fast_p"].rows[1][2]) == "0%"
    assert {row[3] for row in losses if "ColPali" in row[0]} == {pages.page_summary.UNKNOWN}
    assert {row[3] for row in losses if "textual" in row[0]} == {pages.page_summary.UNKNOWN}, "0.8 is more than a spread"
    assert all("longest" in row[3] for row in losses if "varlen" in row[0])


def test_older_rows_stay_until_the_campaign_has_them(pages: SimpleNamespace, campaign: Any) -> None:
    older = {"dense": ("visual 10K", "medium 10K"), "wide": ("wide, d = 768", "wide, d = 4096"), "pairs": ("pairs 4 x 16",)}
    groups = {
        group: {"rows": {name: measured({"ours": 1.0, "naive FP16": 2.0}) for name in names}} for group, names in older.items()
    }
    (campaign.folder / "h200" / "forward.json").write_text(json.dumps({"groups": groups}), encoding="utf-8")
    names = [name for name, _ in pages.page_summary.measured(campaign)]
    assert [name for name in names if name.partition(":")[0] in older] == [
        *(f"wide: d = {dim}" for dim in (128, 256, 384, 512, 768, 1024, 2048)),
        "dense: medium 10K",
        "wide: wide, d = 4096",
        "pairs: pairs 4 x 16",
    ]


def test_who_was_not_timed_is_said(pages: SimpleNamespace, campaign: Any) -> None:
    rows = shown(pages, campaign)["not timed"].rows
    assert rows == [["PyLate", "not installed", "shapes: textual 1000 and 52 more"]]


def test_one_table_of_a_file_of_ones_own(pages: SimpleNamespace, campaign: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = campaign.folder / "h200" / "paper.json"
    pages.page.main(["--table", "nocg", "--files", f"h200/paper.json={path}"])
    assert "| ColPali | 1.00 | 2.00 |" in capsys.readouterr().out
    pages.page.main(["--table", "train", "--files", f"h200/paper.json={path}"])
    assert "Not measured yet." in capsys.readouterr().out, "no other file is mixed in"
    with pytest.raises(SystemExit) as ended:
        pages.page.main(["--table", "nobody"])
    assert ended.value.code == 2


def test_a_stale_page_is_noticed(
    pages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages.page, "ROOT", tmp_path)
    monkeypatch.setattr(pages.page, "PAGE", tmp_path / "benchmarks.md")
    (tmp_path / "benchmarks.md").write_text("old", encoding="utf-8")
    monkeypatch.setattr(pages.page, "MAP", tmp_path / "cells.json")
    with pytest.raises(SystemExit) as ended:
        pages.page.main(["--check"])
    assert ended.value.code == 1
    assert "benchmarks.md: not what the results give" in capsys.readouterr().err


def test_ragged_tables_are_refused(pages: SimpleNamespace) -> None:
    table = pages.page_cells.Table("t", "title", ["a", "b"], [["1"]])
    with pytest.raises(ValueError, match="another number of cells"):
        pages.page_cells.markdown(table)
    twice = pages.page_cells.Table("t", "title", ["a", "b"], [["1", pages.page_cells.Cell("2", ("f#/x",))]] * 2)
    with pytest.raises(ValueError, match=r"two cells '1 \| b'"):
        pages.page_cells.cells([twice])


def test_the_scaling_picture(pages: SimpleNamespace, campaign: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert pages.page.draw(campaign, tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert not pages.page.draw(pages.page_cells.Book(tmp_path / "empty", pages.page.FIGURES), tmp_path / "none.png")
