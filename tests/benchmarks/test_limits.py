"""What `ncu` counted of every row is read, and only that, and what `nvidia-smi` sampled; the calls themselves run small and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alone import limits
from measure import power

HEAD = '"ID","Kernel Name","gpu__time_duration.sum","sm__issue_active.avg.pct_of_peak_sustained_elapsed","a__b.avg.pct_of_peak_sustained_elapsed"'
WAITS = ',"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"'
UNITS = '"","","ns","%","%","inst","inst"'


def table(*kernels: tuple[str, float, float, float]) -> str:
    """What ncu prints: its own lines, and the table of raw values."""
    lines = [
        f'"{n}","{name}","{ns:,.1f}","{issue}","{other}","1.5","0.25"' for n, (name, ns, issue, other) in enumerate(kernels)
    ]
    return "\n".join(["==PROF== Connected to process 7", HEAD + WAITS, UNITS, *lines, ""])


SPIN = ("spin_kernel(long)", 900.0, 1.0, 1.0)


def test_kernels_are_those_after_each_rows_mark() -> None:
    found = limits.kernels_of(
        table(("early(int)", 9, 9, 9), SPIN, ("one(int)", 1, 2, 3), SPIN, ("two", 4, 5, 6), ("three", 7, 8, 9))
    )
    assert [[line["Kernel Name"] for line in lines] for lines in found] == [["one(int)"], ["two", "three"]]
    with pytest.raises(ValueError, match="no table"):
        limits.kernels_of("==ERROR== LibraryNotLoaded")


def test_small_kernels_are_left_out_and_units_stand_by_size() -> None:
    (lines,) = limits.kernels_of(table(SPIN, ("_tiles_kernel(int)", 9_600.0, 41.0, 93.5), ("small", 400.0, 99.0, 99.0)))
    assert limits.summary(lines) == [
        {
            "kernel": "_tiles_kernel",
            "share": 0.96,
            "units": {"a__b": 93.5, "sm__issue_active": 41.0},
            "waits": {"barrier": 1.5, "wait": 0.25},
        }
    ]
    assert list(limits.summary(lines)[0]["units"]) == ["a__b", "sm__issue_active"]
    assert limits.summary([]) == []


def tool(folder: Path, printed: str, code: int = 0, name: str = "ncu") -> None:
    """An `ncu`, or another command, that keeps its arguments and prints this."""
    (folder / "printed").write_text(printed)
    script = folder / name
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nhere = pathlib.Path({str(folder)!r})\n"
        f"(here / 'asked').write_text('\\n'.join(sys.argv[1:]))\nprint((here / 'printed').read_text())\nsys.exit({code})\n"
    )
    script.chmod(0o755)


def test_the_command_asks_for_its_rows_and_writes_what_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(limits, "about", lambda: {"device": "none", "families": {}})
    monkeypatch.setattr(limits, "Sizes", lambda device, smoke: None)
    monkeypatch.setattr(limits, "ROWS", {name: lambda _, name=name: name for name in limits.ROWS})
    monkeypatch.setattr(limits, "under_load", lambda call: {"watts": len(call), "most_watts": 700.0, "mhz": 1500.0})
    words = ["--json", str(tmp_path / "limits.json"), "--only", "Chamfer"]
    with pytest.raises(SystemExit, match="needs Nsight Compute"):
        limits.main(words)
    tool(tmp_path, table(SPIN, ("near", 5, 60, 70), SPIN, ("products", 5, 80, 90)))
    limits.main(words)
    written = json.loads((tmp_path / "limits.json").read_text())
    assert {name: [one["kernel"] for one in row] for name, row in written["rows"].items()} == {
        "Chamfer 50K, d = 3": ["near"],
        "Chamfer 50K, d = 128": ["products"],
    }
    assert {name: load["watts"] for name, load in written["loads"].items()} == {name: len(name) for name in written["rows"]}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-3:] == ["--called", "--only", "Chamfer 50K, d = 3;Chamfer 50K, d = 128"]
    for printed, code, said in ((table(SPIN), 0, "1 of 2 rows"), ("==ERROR== no counters", 1, "no counters")):
        tool(tmp_path, printed, code)
        with pytest.raises(SystemExit, match=said):
            limits.main(words)


def test_power_and_clock_are_means_once_they_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(power.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(power.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(power.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"unit-{device}"))
    monkeypatch.setattr(power, "PATIENCE", 5.0)
    calls: list[int] = []
    early, late = (
        "300.0, 700.00, 1980, 1980, Not Active\n",
        "690.5, 700.00, 1500, 1980, Active\n500.5, 700.00, 1700, 1980, Not Active\n",
    )
    tool(tmp_path, early * power.SETTLE + late * (power.SAMPLES // 2), name="nvidia-smi")
    found = power.under_load(lambda: calls.append(1))
    assert found == {"watts": 595.5, "most_watts": 700.0, "mhz": 1600.0, "most_mhz": 1980.0, "capped": 0.5}
    assert calls
    assert (tmp_path / "asked").read_text().splitlines()[0] == "--id=GPU-unit-0"
    tool(tmp_path, "No devices were found", name="nvidia-smi")
    with pytest.raises(RuntimeError, match=r"gave 1 lines.*No devices"):
        power.under_load(lambda: None)
    with pytest.raises(ValueError, match=r"expected|could not"):
        power.sampled(["N/A, 700.00, 1980, 1980, Active"])


def test_every_row_is_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    limits.main(["--smoke"])
    assert capsys.readouterr().out.splitlines() == list(limits.ROWS)
