"""What docs/benchmarks.md says beside its figures (the paper read right, losses, protocol, provenance), and its cells' arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import page
from page_cases import figure, shown, text_at
from tables import cells as page_cells
from tables import losses as page_losses
from tables import script as page_script
from tables.cells import text_of
from tables.columns import drawn

ROOT = Path(__file__).resolve().parents[2]
FOLDER, RESULTS = ROOT / "benchmarks", ROOT / "docs" / "results"


@pytest.fixture
def book() -> Any:
    return page_cells.Book(RESULTS, page.FIGURES)


def test_numbers_keep_their_digits() -> None:
    plain = page_cells.plain
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


def test_arithmetic_keeps_sources() -> None:
    value = page_cells.Value
    left, right = value(6.0, ("a#/x",)), value(3.0, ("b#/y",))
    found = left / right * 2
    assert (found.number, found.sources) == (4.0, ("a#/x", "b#/y"))
    assert page_cells.times(left, right).text == "2.00x"
    assert page_cells.times(None, right).text == page_cells.MISSING
    assert page_cells.pointer("f", ("a/b", "c~d")) == "f#/a~1b/c~0d"
    assert figure({"a/b": [1, {"c~d": 7}]}, page_cells.keys_of("f#/a~1b/1/c~0d")[1]) == 7


def test_every_loss_on_the_page_has_a_reason_and_its_row(book: Any) -> None:
    tables = shown(book)
    assert all(row[3] != page_losses.UNKNOWN for row in tables["losses"].rows)
    assert text_at(tables["tiny pairs"], "4 x 16", "late-interaction-kernels").startswith("**"), (
        "a loss, which stands in the table too"
    )


def test_the_papers_cost_agrees_with_its_own_times(book: Any) -> None:
    table = shown(book)["roofline and cost"]
    assert text_at(table, "ColPali 10000", "paper A100: Flash, chunked, s a million") == "1.6, 4.3"
    claim = book.paper["cost"]["ColPali"]
    for name in ("flash", "chunked"):
        hours = float(claim[name]) * 1e-6 * 1e9 / 3600
        assert hours == pytest.approx(float(claim[f"{name}_printed"]), abs=0.01)
    assert any("GPU-hours a billion" in note for note in table.notes)


def test_the_papers_pieces_and_rates_are_shown(book: Any) -> None:
    tables = shown(book)
    assert text_at(tables["ooc"], "750000", "paper A100: embeddings, peak, pages/s") == "197, 5.3, 52000"
    assert text_at(tables["ooc"], "100000", "paper A100: embeddings, peak, pages/s") == "26, 5.5, -"
    parts = tables["bwd_breakdown"]
    assert text_at(parts, "ColPali B=64", list(parts.heads)[-1]) == "0.46, 0.52, 0.07, 0.12, 0.70, 1.16"
    figures = [float(text_at(parts, "ColPali B=64", head)) for head in ("list building", "dQ", "dD", "sum of the three")]
    assert sum(figures[:3]) == pytest.approx(figures[3], rel=0.01)


def test_a_file_with_memory_of_compiled_methods_alone(tmp_path: Path) -> None:
    """Graph pools are reserved, not in the peak; what failed says so."""
    names = ("compiled FP32, max-autotune", "compiled FP16, max-autotune-no-cudagraphs")
    fits = {"peak_bytes": 5.2e9, "reserved_bytes": 47.3e9, "inputs_bytes": 5.2e9, "median_ms": 24.0}
    failed = {"failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 39.06 GiB. GPU 0 has"}
    rows = {names[0]: {"cells": {"ColPali 10000": fits, "ColPali 20000": failed}}, names[1]: {"cells": {"ColPali 20000": fits}}}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "paper.json").write_text(json.dumps({"groups": {"memory_compiled": {"rows": rows}}}), encoding="utf-8")
    book = page_cells.Book(tmp_path, page.FIGURES)
    held = page.sections(book)
    assert page.page(book, held)
    table = shown(book)["compiled_memory"]
    assert [page_cells.text_of(one) for one in table.rows[0]] == [
        "ColPali 10000",
        "5.20",
        "47.3",
        "-",
        "-",
        "-",
        "OOM, -",
    ]
    assert text_at(table, "ColPali 20000", f"peak of {names[0]}") == "OOM (39.06 GiB asked for)"
    assert not shown(book)["mem"].rows


def test_provenance_says_machines_revisions_and_dates(book: Any) -> None:
    runs = page.runs
    one = {"gpu": "G", "torch": "2.1", "triton": "3", "revision": "abc+word"}
    rows = {"a": {"measured": "2026-01-02T03:04"}, "b": {"measured": "2026-01-01T03:04"}, "c": {}}
    found = {"groups": {"x": {"rows": rows, "environment": one}}}
    assert runs(found) == "G, torch 2.1, Triton 3, revision abc+word, measured 2026-01-01, 2026-01-02"
    assert runs({"environment": one, "measured": "2026-02-01T00:00"}).endswith("abc+word, measured 2026-02-01")
    assert runs({"torch": "2.1+cpu", "threads": 2}) == "CPU, 2 threads, torch 2.1+cpu"
    assert runs(None) == runs([]) == ""
    text = page.PAGE.read_text(encoding="utf-8")
    assert "changes that were not committed yet" in text
    assert re.search(r"second\.json\): .*measured 20\d\d-", text)


def test_the_introduction_says_what_the_scripts_do() -> None:
    """Numbers of the protocol, where the scripts hold them as constants."""
    held = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py") if path.name != "page.py")
    facts = {
        "SLOW, SLOWEST = 0.06": "above 60 ms: 3",
        "SLOW_RUNS, SLOW_WARM_UPS = 3,": "above 60 ms: 3",
        "SLOW_MS, SLOW_RUNS = 150.0, 5": "above 150 ms: 5",
        "WARM_COMPILED, WARM_SECONDS = 3, 100, 3.0": "100 times before",
        "CALLS, TIMED = 3, 7": "7 for the time",
        "CHUNKS = (64, 256, 1024)": "64, 256 and 1024",
        "PART = 16": "last eight documents where there are more than 16",
        "CELLS, MOST = 1 << 30, 16": "up to 16 queries and documents",
        "common(parser, 20)": "took 20",
        "common(parser, 50": "over 50 rounds",
    }
    said = " ".join(page.INTRODUCTION.split())
    for fact, words in facts.items():
        assert fact in held, "a script changed: is page.INTRODUCTION still true?"
        assert words in said, words


def test_backward_paths_stand_beside_whole_steps(book: Any) -> None:
    """The paper's figures are of steps, so ours of steps stand next to them."""
    table = shown(book)["bwd_abl"]
    assert list(table.heads)[-3:] == ["whole step, csr", "whole step, unified", "paper H100, whole steps: csr, atomic, unified"]
    sources = next(held[-3].sources + held[-2].sources for held in table.rows if held[0] == "ColPali B=128")
    assert [source.partition("/methods/")[2] for source in sources if source.endswith("median_ms")] == [
        "ours csr/median_ms",
        "ours unified/median_ms",
    ]
    assert all("/step ColPali B=128/" in source for source in sources)
    assert float(text_at(table, "ColPali B=128", "whole step, csr").split()[0]) > 3 * float(
        text_at(table, "ColPali B=128", "csr").split()[0]
    )
    assert any("step's peak" in note for note in table.notes)


def test_ragged_tables_are_refused() -> None:
    table = page_cells.Table("t", "title", ["a", "b"], [["1"]])
    with pytest.raises(ValueError, match="another number of cells"):
        page_cells.markdown(table)
    twice = page_cells.Table("t", "title", ["a", "b"], [["1", page_cells.Cell("2", ("f#/x",))]] * 2)
    with pytest.raises(ValueError, match=r"two cells '1 \| b'"):
        page_cells.cells([twice])


def test_tables_of_the_kernels_own_script(tmp_path: Path) -> None:
    def row(kinds: dict[str, str], times: dict[str, float], **more: Any) -> dict[str, Any]:
        methods = {
            name: {"kind": kinds.get(name, "baseline"), "median_ms": time, "of_floor": 0.5} for name, time in times.items()
        }
        return {"methods": methods, **more}

    ours = {
        "ours": "ours",
        "ours FP16": "ours",
        "ours INT8, token scale": "ours",
        "flash-maxsim": "peer",
        "flash-maxsim, INT8": "peer",
    }
    dense = row(
        ours,
        {"ours": 1.0, "naive FP16": 4.0, "naive FP16, amax": 3.0, "compiled FP16, default": 2.0, "flash-maxsim": 1.5},
        floor_ms=0.5,
    )
    int8 = row(ours, {"ours FP16": 3.0, "ours INT8, token scale": 2.0, "flash-maxsim, INT8": 5.0})
    first = row(ours, {"ours INT8, token scale": 2.0, "dequantise to FP16, naive": 8.0, "dequantise to FP16, chunked": 7.0})
    clocks = {
        "ours": (20.0, 70.0),
        "naive FP16": (50.0, 90.0),
        "naive FP16, amax": (40.0, 95.0),
        "compiled FP16, default": (60.0, 99.0),
    }
    host = {"methods": {name: {"call_median_us": call, "idle_median_us": idle} for name, (call, idle) in clocks.items()}}
    groups = {
        "dense": {"textual 1K": dense},
        "int8": {"INT8 A": int8, "INT8 or dequantise, B = 7": first},
        "host": {"host A": host},
        "wide": {"wide, d = 96": dense, "wide, d = 256": dense},
    }
    (tmp_path / "h200").mkdir()
    text = json.dumps({"groups": {group: {"rows": rows} for group, rows in groups.items()}})
    (tmp_path / "h200" / "forward.json").write_text(text, encoding="utf-8")
    book = page_cells.Book(tmp_path, page.FIGURES)
    tables = {source.name: drawn(source, book) for source in page_script.SOURCES}
    assert list(tables) == ["kernels", "codes", "dequantise", "host"]
    shown = {name: [[page_cells.text_of(one) for one in line] for line in table.rows] for name, table in tables.items()}
    line = ["0.5", "1.00", "0.5", "1.50", "-", "4.00 / 3.00", "-", "-", "2.00", "1.50x (flash-maxsim)"]
    assert shown["kernels"] == [["textual 1K", *line], ["wide, d = 96", *line]], "d = 256 stands in other tables"
    assert shown["codes"] == [["INT8 A", "3.00", "2.00 (1.50x)", "-", "-", "-", "5.00 (flash-maxsim, INT8)"]]
    assert shown["dequantise"] == [["B = 7", "2.00", "-", "-", "-", "8.00", "-", "7.00"]]
    assert shown["host"] == [["A", "20.0 / 70.0", "- / -", "- / -", "- / -", "40.0 / 95.0", "60.0 / 99.0"]]
    assert tables["host"].rows[0][1].sources == tuple(
        f"h200/forward.json#/groups/host/rows/host A/methods/ours/{key}_median_us" for key in ("call", "idle")
    )
    nothing = page_cells.Book(tmp_path / "nothing", page.FIGURES)
    assert [drawn(source, nothing).rows for source in page_script.SOURCES] == [[]] * 4


def test_reasons_are_of_one_row_and_one_rival(tmp_path: Path) -> None:
    """Exactly named, down to a ratio; a difference within the spread says so; nothing else has a reason."""
    row, rival = "pairs: pairs 4 x 16", "late-interaction-kernels"

    def said(name: str, who: str, theirs: float, iqr: float) -> str:
        methods = {who: {"median_ms": theirs, "iqr_ms": 0.0}, "ours": {"median_ms": 1.0, "iqr_ms": iqr}}
        (tmp_path / "f.json").write_text(json.dumps(methods), encoding="utf-8")
        book = page_cells.Book(tmp_path, page.FIGURES)
        value = page_cells.ratio(*(book.value("f.json", one, "median_ms") for one in (who, "ours")))
        assert value is not None
        return page_losses.reason(book, name, who, value)

    known = page_losses.REASONS[row, rival][1]
    assert said(row, rival, 0.95, 0.01) == known
    assert said(row, rival, 0.95, 0.06) == f"{page_losses.SPREAD}; {known}"
    assert said("pairs: pairs 16 x 64", rival, 0.999, 0.01) == page_losses.SPREAD
    for name, who, theirs in ((row, rival, 0.8), (row, "flash-maxsim", 0.95), (f"{row}, more", rival, 0.95)):
        assert said(name, who, theirs, 0.01) == page_losses.UNKNOWN


def test_chamfer_marks_what_each_method_fails(tmp_path: Path) -> None:
    """One rule for everybody, and the worst of several."""

    def row(**wrong: str) -> dict[str, Any]:
        names = {"ours": "ours", "theirs": "flash-maxsim train", "naive": "naive, products"}
        return {
            "methods": {
                name: {"kind": "peer", "median_ms": 1.0, "peak_bytes": 1e9, **({"wrong": wrong[key]} if key in wrong else {})}
                for key, name in names.items()
            }
        }

    small = row(theirs="shifted_error 1.0e+00", naive="shifted_error 6.1e-01")
    large = row(theirs="error 1.9e-03, shifted_error 1.0e+00, cosine 0.97", naive="shifted_error 1.0e+00, cosine 0.99998")
    rows = {
        "small": {"forward + backward, 1K points, d = 128": small},
        "training": {"forward + backward, 10K points, d = 3": large},
    }
    (tmp_path / "h200").mkdir()
    held = {"groups": {group: {"rows": found} for group, found in rows.items()}}
    (tmp_path / "h200" / "chamfer.json").write_text(json.dumps(held), encoding="utf-8")
    table = shown(page_cells.Book(tmp_path, page.FIGURES))["chamfer"]
    found = {text_of(line[0]): [text_of(one).removeprefix("1.00 (1.00)") for one in line[1:4]] for line in table.rows}
    assert found == {"10K, 3": ["", " (wrong)", " (gradient)"], "1K, 128": ["", " (moved)", " (moved)"]}


def test_harnesses_of_two_commits_say_so(tmp_path: Path) -> None:
    methods = {"ours": {"kind": "ours", "median_ms": 1.0}, "naive FP16": {"kind": "baseline", "median_ms": 2.0}}
    environments = {"e": {"revision": "abc"}}
    paper = {
        "environments": environments,
        "groups": {"shapes": {"rows": {"ColPali 1000": {"environment": "e", "methods": methods}}}},
    }
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "paper.json").write_text(json.dumps(paper), encoding="utf-8")

    def notes(revision: str) -> list[str]:
        second = {"environment": {"revision": revision}, "shapes": {"ColPali": {"methods": methods}}}
        (tmp_path / "h200" / "second.json").write_text(json.dumps(second), encoding="utf-8")
        table = shown(page_cells.Book(tmp_path, page.FIGURES))["second harness"]
        return [note for note in table.notes if "commit" in note]

    assert notes("xyz") == ["Not of one commit: the first harness ran at abc, the second at xyz."]
    assert notes("abc") == []


def test_tables_without_their_data_name_their_command(book: Any) -> None:
    table = shown(book)["not measured"]
    assert [row[0] for row in table.rows] == ["beir_ndcg", "beir_scale", "colpali_ndcg", "int8_realmmrag"]
    assert all("`python evaluate.py " in str(row[2]) for row in table.rows)


def test_the_floors_of_speed_are_of_committed_runs() -> None:
    """tests/gpu/test_gpu_speed.py asks for the least that these files show, less the spread that it states."""
    text = (page.ROOT / "tests" / "gpu" / "test_gpu_speed.py").read_text(encoding="utf-8")
    asked = {name: float(found) for name, found in re.findall(r'Case\("([^"]+)".*"(?:read|fp16)", ([\d.]+)\)', text)}
    rows = {
        "one short query": ("dense", "textual 10K"),
        "one short query, long documents": ("dense", "long-doc 10K"),
        "one ColPali query": ("dense", "ColPali 10K"),
        "many queries": ("many", "256 queries x 8192 x 128"),
    }
    assert set(asked) == set(rows)
    for name, (group, row) in rows.items():
        shares = []
        for file in ("forward", "forward_alone"):
            groups = json.loads((page.RESULTS / "h200" / f"{file}.json").read_text(encoding="utf-8"))["groups"]
            held = groups.get(group, {}).get("rows", {}).get(row, {}).get("methods", {}).get("ours")
            shares += [held["of_floor"]] if held else []
        assert shares
        assert 0.985 * min(shares) <= asked[name] <= min(shares) + 0.005, name


def test_spills_are_what_the_records_hold() -> None:
    """Bytes a thread, in the words of two pages."""

    def most(name: str, *architectures: str) -> int:
        held = json.loads((page.ROOT / "tests" / "kernels" / f"{name}.json").read_text(encoding="utf-8"))["kernels"]
        return max(used["spill_bytes"] for key, used in held.items() if key.split()[0] in architectures or not architectures)

    notes, kernels = (
        " ".join((page.ROOT / "docs" / f"{name}.md").read_text("utf-8").split()) for name in ("kernel_notes", "kernels")
    )
    own = ("sm_80", "sm_90")
    forward = max(most("forward/resources", *own), most("architectures", *own))
    assert f"the forward's kernels spill at most {forward} bytes a thread" in notes
    assert f"Chamfer's gradient {most('backward/resources')} and other gradients none" in notes
    others = most("architectures", "sm_89", "sm_100", "sm_120", "gfx942")
    assert f"on the other GPUs at most {others} ([record]" in notes
    assert f"none of that record spills more than {most('architectures')} bytes a thread" in kernels
