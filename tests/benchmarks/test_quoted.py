"""Tables that pages quote of scripts with files of their own, and what is bold in any table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import page
from tables import cells as page_cells
from tables import marks
from tables.columns import below_one_bold, faster_bold

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize(
    ("place", "file", "keys"),
    [
        ("docs/kernel_notes.md", "h200/masks.json", ("ms", "ColPali 1K", "mask of padding")),
        ("docs/kernel_notes.md", "h200/masks.json", ("ms", "FP32 1 query x 1000 x 180", "late-interaction-kernels maxsim")),
        ("docs/kernel_notes.md", "h200/coded.json", ("rows", "4", "ms", "stored codes")),
        ("docs/kernel_notes.md", "h200/changing.json", ("rows", "ragged, flash-maxsim", "again us")),
        ("docs/kernel_notes.md", "h200/changing_warmed.json", ("rows", "dense, ours", "first us")),
        ("docs/integrations.md", "h200/libraries_pylate.json", ("rows", "0", "methods", "LIK", "ms")),
        ("docs/integrations.md", "h200/libraries_sentence_transformers.json", ("rows", "0", "methods", "ours", "peak_mib")),
        ("docs/search.md", "h200/search.json", ("rows", "1", "first_search_ms")),
        ("docs/search.md", "h200/search.json", ("rows", "10", "exact_s")),
        ("docs/search.md", "cpu/certified.json", ("runs", "lexical, k = 100", "row_bytes")),
        ("docs/search.md", "cpu/certified_slow.json", ("runs", "lexical, k = 10", "survivors")),
        ("docs/scale.md", "h200/proving.json", ("rows", "fp16", "ms", "proof, 256 rows", "median_ms")),
        ("docs/training.md", "h200/step.json", ("methods", "flash-maxsim fused step", "idle_median_us")),
        ("docs/fidelity.md", "h200/devices.json", ("encoders", "lexical", "paths", "fp8", "counts", "same order")),
        ("docs/fidelity.md", "h200/devices.json", ("encoders", "lexical", "paths", "fp8", "metrics", "1", "nDCG@10")),
        ("README.md", "cpu/fidelity_scifact.json", ("paths", "fp8", "metrics", "nDCG@10")),
        ("README.md", "cpu/fidelity_scifact.json", ("task", "queries")),
        ("README.md", "cpu/cold_start_slow.json", ("warm", "each", "seconds")),  # of which the median is quoted
        ("docs/kernel_notes.md", "h200/tests.json", ("files", "test_gpu_argmax", "passed")),
        ("docs/kernel_notes.md", "h200/sanitizers.json", ("runs", "memcheck, part 1/8", "calls")),
        ("docs/kernel_notes.md", "h200/soak.json", ("runs", "seed 100000", "cases")),
        ("docs/training_figures.md", "h200/parity.json", ("runs", "naive FP16", "ms_per_step")),
        ("docs/training_figures.md", "h200/parity.json", ("drift", "ours - naive FP16", "mean")),
        (
            "kernels/README.md",
            "h200/forward.json",
            ("groups", "host", "rows", "host textual 1K", "methods", "ours", "call_median_us"),
        ),
    ],
)
def test_a_changed_digit_fails(tmp_path: Path, place: str, file: str, keys: tuple[str, ...]) -> None:
    """What a page quotes between marks is of its raw file: another number there is another page."""
    folder = shutil.copytree(RESULTS, tmp_path / "results")
    held = json.loads((folder / file).read_text(encoding="utf-8"))
    places = [held]
    for key in keys[:-1]:
        places = [
            part
            for here in places
            for part in (here if key == "each" else [here[int(key)] if isinstance(here, list) else here[key]])
        ]
    for here in places:
        here[keys[-1]] *= 1.1
    (folder / file).write_text(json.dumps(held), encoding="utf-8")
    text = (ROOT / place).read_text(encoding="utf-8")
    assert marks.written(page_cells.Book(folder, page.FIGURES), text, place) != text


def test_starts_say_whether_they_hold_what_is_asked(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()

    def said(*seconds: float) -> str:
        runs = {kind: [{"seconds": one}] * 3 for kind, one in zip(marks.ASKED, seconds, strict=True)}
        (tmp_path / marks.COLD_SLOW).write_text(json.dumps(runs), encoding="utf-8")
        text = "<!-- figure: start-slow --><!-- end of figure -->"
        return marks.written(page_cells.Book(tmp_path, page.FIGURES), text, "docs/a.md").partition("-->")[2].partition("<")[0]

    assert said(9.5, 5.9) == "9.5 and 5.9 s, both held"
    assert said(9.5, 6.0) == "9.5 and 6.0 s, warm missed"
    assert said(15.1, 9.8) == "15.1 and 9.8 s, cold and warm missed"


def test_a_rehearsal_of_one_run_is_no_whole(tmp_path: Path) -> None:
    """Its phases would add up to a quarter of what the command takes."""
    held = json.loads((RESULTS / marks.REHEARSED).read_text(encoding="utf-8"))
    held.pop("scored")
    file = tmp_path / marks.REHEARSED
    file.parent.mkdir()
    file.write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(ValueError, match=r"h200/rehearsal\.json: lacks the run scored, need both"):
        marks.rehearsed(page_cells.Book(tmp_path, page.FIGURES))


def test_a_faster_rival_is_bold() -> None:
    cell = page_cells.Cell
    shown = faster_bold([cell("1.08 (0.01)", ("a",)), cell("0.7 (0)", ("b",)), cell("-"), "x", cell("1.00", ("c",))])
    assert [page_cells.text_of(one) for one in shown] == ["1.08 (0.01)", "**0.7** (0)", "-", "x", "**1.00**"], (
        "every one, not the least"
    )
    ours = faster_bold([cell("1", ("a",)), cell("2", ("b",))])
    assert [one.text for one in ours] == ["1", "2"]
    clocks = faster_bold([cell("24.2 / 70.0", ("a",)), cell("25 / 60 (x)", ("b",)), cell("OOM (39.06 GiB asked for)", ("c",))])
    assert [one.text for one in clocks[1:]] == ["25 / **60** (x)", "OOM (39.06 GiB asked for)"]
    assert [below_one_bold(cell(text, ("a",))).text for text in ("0.92x (naive)", "1.00x", "0.3")] == [
        "**0.92x** (naive)",
        "1.00x",
        "0.3",
    ]
    unmeasured = faster_bold([cell("-"), cell("2", ("b",))])
    assert [one.text for one in unmeasured] == ["-", "2"]
