"""docs/benchmarks.md is what the committed results give, every figure names its file and key, and every table can be shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import page
from page_cases import figure, shown, text_at
from paper_tables import FORWARD, OTHERS
from tables import cells as page_cells
from tables import losses as page_losses
from tables import marks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture
def book() -> Any:
    return page_cells.Book(RESULTS, page.FIGURES)


def test_the_page_is_what_the_results_give(book: Any) -> None:
    held = page.sections(book)
    assert page.PAGE.read_text(encoding="utf-8") == page.page(book, held), "run benchmarks/page.py"
    assert page.MAP.read_text(encoding="utf-8") == page.mapped(held), "run benchmarks/page.py"
    for path in marks.pages(page.ROOT):
        text = path.read_text(encoding="utf-8")
        assert marks.written(book, text, path.relative_to(page.ROOT).as_posix()) == text, "run benchmarks/page.py"


def test_the_readme_marks_every_table_once(book: Any) -> None:
    assert {name for names in marks.PLACES.values() for name in names} == set(marks.TABLES)
    text = (page.ROOT / "README.md").read_text(encoding="utf-8")
    stale = text.replace("| d = 4096, the same |", "| d = 4096, as we wish |")
    assert marks.written(book, stale, "README.md") == text != stale
    with pytest.raises(ValueError, match=r"README\.md: got marks of"):
        marks.written(book, text.replace("<!-- table: gpu -->", ""), "README.md")


def test_every_figure_names_its_file_and_key() -> None:
    cells = json.loads(page.MAP.read_text(encoding="utf-8"))
    files: dict[str, Any] = {}
    checked = 0
    for table in cells.values():
        for cell in table.values():
            assert cell["from"]
            for source in cell["from"]:
                name, keys = page_cells.keys_of(source)
                if name not in files:
                    files[name] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
                found = figure(files[name], keys)
                assert isinstance(found, int | float), source
                checked += 1
    assert checked > 300


def test_a_cell_shows_the_number_it_names() -> None:
    """Milliseconds of one source are shown as they stand in the file, to three digits."""
    cells = json.loads(page.MAP.read_text(encoding="utf-8"))
    seen = 0
    for name, cell in cells["fwd_abs"].items():
        column = name.partition(" | ")[2]
        if column in ("ours", "naive FP32 acc.", "flash-maxsim"):
            (source,) = cell["from"]
            file, keys = page_cells.keys_of(source)
            assert keys[-1] == "median_ms"
            found = figure(json.loads((RESULTS / file).read_text(encoding="utf-8")), keys)
            assert float(cell["shows"]) == pytest.approx(found, rel=5.1e-3)
            seen += 1
    assert seen >= 15


def test_no_figure_of_a_table_stands_outside_the_map(book: Any) -> None:
    """Numbers in our columns are cells with sources; what is plain text is the paper's, a count, or words."""
    for tables in page.sections(book).values():
        for table in tables:
            for row in table.rows:
                for head, cell in list(zip(table.heads, row, strict=True))[1:]:
                    ours = not head.startswith("paper") and head not in ("cells", "who", "why", "bound by")
                    text = page_cells.text_of(cell)
                    if ours and re.match(r"[\d.]", text):
                        assert isinstance(cell, page_cells.Cell), (table.name, head, text)
                        assert cell.sources, (table.name, head, text)


def test_every_table_of_the_paper_is_on_the_page(book: Any) -> None:
    names = [table.name for tables in page.sections(book).values() for table in tables]
    assert len(names) == len(set(names))
    assert {*FORWARD, *OTHERS, "fast_p"} <= set(names)
    claimed = set(book.paper) - {"cost", "chunked_compile"}  # of the appendix's text
    assert claimed <= set(names)


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
def campaign(tmp_path: Path) -> Any:
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
    moved = {"ours": 2e9, "naive FP16": 4e9, "naive FP32 accumulation": 6e9}
    traffic = {name: {"counted_bytes": 1e9, "ncu": {"bytes": size}} for name, size in moved.items()}
    errors = {"max_error": 1e-5, "max_relative_error": 4e-7, "spearman": 0.999999, "top20": 1.0, "top50": 1.0}
    shapes = ("textual", "long-doc", "medium", "visual", "ColPali")
    paper = page_cells.Book(RESULTS, page.FIGURES).paper
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
        "chunks": {
            "ColPali 10000": {**measured(times), "skipped": dict.fromkeys(("chunks of 1", "chunks of 4"), "bound by the host")}
        },
        "tiles": {"ColPali 1000": measured({"ours": 1.0, "tiles 128 x 64, 8 warps, 3 stages": 1.02})},
    }
    environments = {"r s": {"gpu": "G", "torch": "2", "revision": "r", "sources": "s"}}
    document = {"groups": {name: {"rows": rows} for name, rows in groups.items()}, "environments": environments}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "paper.json").write_text(json.dumps(document), encoding="utf-8")
    second = {shape: {"methods": {name: {"median_ms": time * 1.1} for name, time in times.items()}} for shape in shapes}
    (tmp_path / "h200" / "second.json").write_text(json.dumps({"shapes": second}), encoding="utf-8")
    return page_cells.Book(tmp_path, page.FIGURES)


def test_tables_of_a_whole_campaign(campaign: Any) -> None:
    tables = shown(campaign)
    of = lambda name, row, head: text_at(tables[name], row, head)  # noqa: E731
    assert of("fwd", "ColPali (1024, 1024)", "naive FP32 acc.") == "6.00x"
    assert of("fwd", "ColPali (1024, 1024)", "fastest eager") == "3.00x"
    assert of("fwd", "ColPali (1024, 1024)", "flash-maxsim") == "**0.80x**"
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
    assert of("traffic", "medium", "ratio, ncu (FP16, FP32)") == "2.0x, 3.0x"
    assert of("int8_B", "256", "token: x FP16") == "1.22x"
    assert of("int8_B", "256", "document: x FP16") == "1.83x"
    assert of("precision", "ours FP16, ColPali", "relative") == "4.0e-07"
    assert of("chunk grid", "ColPali 10000", "compiled chunks (size; over ours)") == "2.20 (256; 2.20x)"
    assert of("chunk grid", "ColPali 10000", "paper: compiled chunks (over Flash)") == "37.4 (2.3x)"
    assert "ColPali 10000: no chunks of 1, 4: bound by the host." in tables["chunk grid"].notes
    head = "paper A100: FP16, INT8; x naive, x dequantise, x FP16; Spearman, top-20; storage"
    assert of("int8", "ColPali 128", head) == "0.35, 0.30; 3.0x, 3.3x, 1.07x; 0.9993, 100%; 1.97x"
    assert of("int8", "medium 512", head) == "0.23, 0.24; 3.7x, -, 0.98x; 0.9996, 100%; 1.97x"
    assert of("second harness", "visual", "naive FP16") == "4.00x / 4.00x"
    assert of("second harness", "visual", "largest difference") == "0%"
    for table in tables.values():
        assert page_cells.markdown(table), table.name


def test_losses_and_fast_p_count_every_cell(campaign: Any) -> None:
    tables = shown(campaign)
    cells = int(tables["fast_p"].rows[1][1])
    assert cells == 5 + 6 + 5 + 15 + 3 + 5 + 7 + 7
    assert page_cells.text_of(tables["fast_p"].rows[0][2]) == "100%"  # everybody but peers
    losses = tables["losses"].rows
    assert {row[1] for row in losses} == {"flash-maxsim"}, "INT8's 0.9 ms is less than FP16's 1.1"
    assert len(losses) == cells, "flash-maxsim's 0.8 ms beats 1.0 and INT8's 0.9 everywhere"
    assert page_cells.text_of(tables["fast_p"].rows[-1][2]) == "0%"
    assert {row[3] for row in losses if "ColPali" in row[0]} == {page_losses.UNKNOWN}
    assert {row[3] for row in losses if "textual" in row[0]} == {page_losses.UNKNOWN}, "0.8 is more than a spread"
    assert {row[3] for row in losses if "varlen" in row[0]} == {page_losses.UNKNOWN}


def test_cells_without_a_compiled_rival_are_counted_apart(campaign: Any) -> None:
    held = json.loads((campaign.folder / "h200" / "paper.json").read_text(encoding="utf-8"))
    groups = held["groups"]
    few = measured({"ours": 1.0, "naive FP16": 1.2, "compiled chunks, max-autotune-no-cudagraphs": 1.1})
    groups["op_abl"] = {"rows": dict.fromkeys(groups["op_abl"]["rows"], few)}
    (campaign.folder / "h200" / "paper.json").write_text(json.dumps(held), encoding="utf-8")
    table = shown(page_cells.Book(campaign.folder, page.FIGURES))["fast_p"]
    rows = [[page_cells.text_of(cell) for cell in row] for row in table.rows]
    assert [row[1] for row in rows] == ["48", *["48", "5", "53"] * 2]
    assert [row[3] for row in rows[:4]] == ["100%", "100%", "0%", "91%"], "fast_1.5"
    assert rows[0][0].startswith("the paper's rivals alone")
    assert [row[5] for row in rows[:2]] == ["100%", "0%"], "fast_3: compiled FP16 takes 2.0 and is none of the paper's rivals"
    assert rows[2][0] == "cells without torch.compile: against eager and chunked alone"
    assert [row[6] for row in rows] == ["53, 100%, 72%, 34%", *["-"] * 6], "the paper's beside what is like it"


def test_losses_reach_beyond_fast_p(campaign: Any) -> None:
    """Training layouts, the backward alone, the CPU, and INT8 against FP16."""
    folder = campaign.folder
    rows = {
        "FP32 inputs": measured({"ours": 5.0, "naive FP32": 2.5}),
        "packed": measured({"ours": 1.0, "naive FP16": 9.0}),
    }
    hot = measured({"ours csr": 2.0, "ours unified": 1.0, "flash-maxsim csr": 1.5})
    waits = measured({"ours": 1.0, "late-x": 1.5, "late-y": 1.2})  # the host decides; by GPU time the order is another
    for name, busy in (("ours", 0.5), ("late-x", 0.4), ("late-y", 0.6)):
        waits["methods"][name]["busy_median_ms"] = busy
    rows |= {"distillation, 2": measured({"ours": 1.0, "late-x": 0.95}), "pairs": waits}
    (folder / "h200" / "training_layouts_alone.json").write_text(
        json.dumps({"groups": {"layouts": {"rows": rows}}}), encoding="utf-8"
    )
    wrong = measured({"ours csr": 2.0, "flash-maxsim csr": 1.5})
    wrong["methods"]["flash-maxsim csr"]["wrong"] = True
    (folder / "h200" / "training_backward.json").write_text(
        json.dumps({"groups": {"ablation": {"rows": {"backward A, hot winners": hot, "backward B, hot winners": wrong}}}}),
        encoding="utf-8",
    )
    (folder / "cpu").mkdir()
    times = {"ours FP32": 4.0, "ours INT8": 1.0, "our reference, FP32": 3.0, "numkong": 3.0, "torch": 9.0}
    cpu = {name: {"median_ms": time, "times_max": 1.0} for name, time in times.items()}
    (folder / "cpu" / "forward.json").write_text(json.dumps({"cases": {"1 query": cpu}}), encoding="utf-8")
    own = measured({"ours FP16": 1.0, "ours INT8, token scale": 1.1, "ours INT8, document scale": 0.9})
    (folder / "h200" / "forward.json").write_text(json.dumps({"groups": {"int8": {"rows": {"shape": own}}}}), encoding="utf-8")
    book = page_cells.Book(folder, page.FIGURES)
    found = {(name, rival): round(value.number, 3) for name, rival, value in page_losses.beyond(book) if value.number < 1}
    assert found == {
        ("layouts: FP32 inputs", "naive FP32"): 0.5,
        ("layouts: distillation, 2", "late-x"): 0.95,
        ("layouts: pairs, GPU time alone", "late-x"): 0.8,
        ("backward A, hot winners, csr", "flash-maxsim csr"): 0.75,
        ("CPU: 1 query, beside numkong", "numkong"): 0.75,
        ("int8: shape, token scale", "ours FP16"): 0.909,
    }
    shown_rows = [page_cells.text_of(row[0]) for row in shown(book)["losses"].rows]
    assert {name for name, _ in found} <= set(shown_rows)


def test_older_rows_stay_until_the_campaign_has_them(campaign: Any) -> None:
    older = {"dense": ("visual 10K", "medium 10K"), "wide": ("wide, d = 768", "wide, d = 4096"), "pairs": ("pairs 4 x 16",)}
    groups = {
        group: {"rows": {name: measured({"ours": 1.0, "naive FP16": 2.0}) for name in names}} for group, names in older.items()
    }
    (campaign.folder / "h200" / "forward.json").write_text(json.dumps({"groups": groups}), encoding="utf-8")
    names = [name for name, _ in page_losses.measured(campaign)]
    assert [name for name in names if name.partition(":")[0] in older] == [
        *(f"wide: d = {dim}" for dim in (128, 256, 384, 512, 768, 1024, 2048)),
        "dense: medium 10K",
        "pairs: pairs 4 x 16",
        "wide: wide, d = 4096",
    ]


def test_who_was_not_timed_is_said(campaign: Any) -> None:
    rows = shown(campaign)["not timed"].rows
    assert rows == [["PyLate", "not installed", "shapes: textual 1000 and 52 more"]]


def test_scorers_of_libraries_have_their_table(campaign: Any) -> None:
    assert shown(campaign)["scorers"].rows == []
    path = campaign.folder / "h200" / "paper.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    row = held["groups"]["shapes"]["rows"]["visual 1000"]
    row["methods"] |= {
        "PyLate": {"kind": "peer", "median_ms": 1.5},
        "colpali-engine": {"kind": "peer", "median_ms": 8.0, "apart": True},
    }
    path.write_text(json.dumps(held), encoding="utf-8")
    tables = shown(page_cells.Book(campaign.folder, page.FIGURES))
    [row] = tables["scorers"].rows
    assert [page_cells.text_of(cell) for cell in row] == ["visual", "1.00", "1.50", "8.00", "1.50x", "8.00x"]
    [note] = tables["scorers"].notes
    assert note.endswith(": colpali-engine.")
    assert tables["not timed"].rows == [], "PyLate was timed in one row: its table says where"


def test_one_table_of_a_file_of_ones_own(campaign: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = campaign.folder / "h200" / "paper.json"
    page.main(["--table", "nocg", "--files", f"h200/paper.json={path}"])
    assert "| ColPali | 1.00 | 2.00 |" in capsys.readouterr().out
    page.main(["--table", "train", "--files", f"h200/paper.json={path}"])
    assert "Not measured yet." in capsys.readouterr().out, "no other file is mixed in"
    page.main(["--table", "twoaxis", "--files", f"h200/paper.json={path}"])
    said = capsys.readouterr().out
    assert f"Raw figures: {path} (G)." in said, "the caller's own file and its GPU"
    assert "results/" not in said
    assert "141" not in said.replace(str(path), ""), "the stated comparison is one of the committed files' own"
    page.main(["--table", "nocg", "--as-json", "--files", f"h200/paper.json={path}"])
    assert json.loads(capsys.readouterr().out)["files"] == {"h200/paper.json": f"{path} (G)"}
    with pytest.raises(SystemExit) as ended:
        page.main(["--table", "nobody"])
    assert ended.value.code == 2


def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in marks.PLACES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((page.ROOT / name).read_bytes())
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "benchmarks.md")
    (tmp_path / "benchmarks.md").write_text("old", encoding="utf-8")
    monkeypatch.setattr(page, "MAP", tmp_path / "cells.json")
    with pytest.raises(SystemExit) as ended:
        page.main(["--check"])
    assert ended.value.code == 1
    assert "benchmarks.md: not what the results give" in capsys.readouterr().err


def test_the_scaling_picture(campaign: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert page.draw(campaign, tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert not page.draw(page_cells.Book(tmp_path / "empty", page.FIGURES), tmp_path / "none.png")
