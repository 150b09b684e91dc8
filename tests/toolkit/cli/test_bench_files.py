"""`bench`: which files a table is made of, what a failed or refused run shows, options, interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from maxsim_eval.cli import bench
from maxsim_eval.errors import DataError, UsageError

pytestmark = pytest.mark.slow

REGISTRY = bench.opened(bench.FOLDER)
RESULTS = bench.FOLDER.parent / "docs" / "results"
STARTS = "import json, sys\nfrom pathlib import Path\nargs = sys.argv[1:]\npath = Path(args[args.index('--json') + 1])\n"


@pytest.fixture
def app(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """As on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return app


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """The real page and stubs that tests write over."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in {held.script for held in REGISTRY.tables.values()}:
        (folder / name).write_text("raise SystemExit(3)\n", encoding="utf-8")
    for name in ("page.py", "measure", "results", "tables"):
        (folder / name).symlink_to(bench.FOLDER / name)
    return folder


def committed(out: Path, *names: str) -> None:
    """Committed results under the names that `bench` gives them."""
    out.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(RESULTS / REGISTRY.on_page(name), out / name)


def run(app: typer.Typer, scripts: Path, out: Path, *words: str) -> Any:
    return CliRunner().invoke(
        app, ["bench", *words, "--quiet", "--scripts", str(scripts), "--out", str(out)], catch_exceptions=False
    )


def test_second_is_shown_beside_the_first_harness_or_alone(
    app: typer.Typer, scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (scripts / "second.py").write_text(
        f"{STARTS}path.write_bytes(Path({str(RESULTS / 'h200' / 'second.json')!r}).read_bytes())\n", encoding="utf-8"
    )
    out = tmp_path / "out"
    alone = run(app, scripts, out, "second")
    assert alone.exit_code == 0
    assert "run bench fwd first" in alone.stdout
    assert "| ColPali |" in alone.stdout
    held = json.loads(run(app, scripts, out, "second", "--json").stdout)
    assert {"shape", "ours"} <= set(held["heads"])
    assert len(held["rows"]) == 5
    committed(out, "paper.json")
    capfd.readouterr()
    assert run(app, scripts, out, "second harness").exit_code == 0
    shown = capfd.readouterr().out
    assert shown.startswith("### second harness")
    assert all(f"{name}.json" in shown for name in ("paper", "second"))


def test_a_failed_run_shows_no_old_figures(
    app: typer.Typer, scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    committed(out, "paper.json", "streaming.json")
    for words in (["fwd"], ["fwd", "--fresh"]):
        with pytest.raises(UsageError, match=r"fwd: paper.py ended with 3 and wrote no figures; .*paper.json is as it was"):
            run(app, scripts, out, *words)
    # Half-done rows under `partial` are no figures of the table either.
    half = "held = json.loads(path.read_text())\nheld['partial']['x'] = {'rows': {}}\npath.write_text(json.dumps(held))\n"
    (scripts / "streaming.py").write_text(f"{STARTS}{half}raise SystemExit(1)\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"streaming.py ended with 1"):
        run(app, scripts, out, "ooc")
    assert capfd.readouterr().out == ""


def test_nothing_new_but_ended_well_shows_the_table(
    app: typer.Typer, scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    committed(out, "paper.json")
    (scripts / "paper.py").write_text("", encoding="utf-8")
    assert run(app, scripts, out, "nocg").exit_code == 0
    assert capfd.readouterr().out.startswith("### nocg")


def test_computed_tables_measure_nothing(
    app: typer.Typer, scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    with pytest.raises(
        UsageError,
        match=r"losses measures nothing, it is made of what other tables measured.* has none of paper.json, .*bench fwd first",
    ):
        run(app, scripts, out, "losses")
    assert not out.exists()
    committed(out, "paper.json")
    with pytest.raises(UsageError, match=r"roofline measures nothing.* got --runs"):
        run(app, scripts, out, "roofline", "--runs", "3")
    for name in ("fast_p", "losses", "roofline", "roofline and cost"):
        capfd.readouterr()
        command = ["bench", name, "--scripts", str(scripts), "--out", str(out)]
        shown = CliRunner().invoke(app, command, catch_exceptions=False)
        assert shown.exit_code == 0
        assert "measures nothing; made from" in shown.stderr
        assert "\n| " in capfd.readouterr().out


def test_an_option_the_script_does_not_have_is_refused(app: typer.Typer, scripts: Path, tmp_path: Path) -> None:
    for words, option in (
        (["second", "--runs", "3"], "--runs"),
        (["ooc", "--smoke"], "--smoke"),
        (["fwd", "--only=mem"], "--only"),
    ):
        with pytest.raises(UsageError, match=rf"{option}: bench {words[0]} has no such option; .*py takes --"):
            run(app, scripts, tmp_path / "out", *words)


def test_rows_that_match_nothing_are_said(app: typer.Typer, scripts: Path, tmp_path: Path) -> None:
    listing = "import sys\nassert '--list' in sys.argv\nrows = [] if '--rows' in sys.argv else ['varlen ColPali 1000   12 s']\n"
    (scripts / "paper.py").write_text(f"{listing}print(*rows, f'{{len(rows)}} rows, about 0 s', sep='\\n')\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"--rows: no row of varlen has such a name; its rows are ColPali 1000$"):
        run(app, scripts, tmp_path, "varlen", "--rows", "nothing")
    real = [sys.executable, str(bench.FOLDER / "paper.py"), "--only", "multiquery", "--list"]
    assert bench._rows([*real, "--rows", "nothing"]) == []
    assert "ColPali 128, 4 queries" in (bench._rows(real) or [])


def test_folders_and_files_are_looked_at_before_anything_is_measured(app: typer.Typer, scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"--out: cannot write to .*file"):
        run(app, scripts, tmp_path / "file", "fwd")
    out = tmp_path / "out"
    committed(out, "paper.json", "second.json")
    whole = (out / "second.json").read_text(encoding="utf-8")
    (out / "second.json").write_text(whole[:500], encoding="utf-8")
    for table in ("fwd", "second", "losses"):
        with pytest.raises(DataError, match=r"out/second.json: not a results file \(.*line .*remove it or give another folder"):
            run(app, scripts, out, table)
    (out / "second.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match=r"second.json: not a results file \(got a list\)"):
        run(app, scripts, out, "fwd")
    (out / "second.json").write_text(whole, encoding="utf-8")
    with pytest.raises(UsageError, match=r"--smoke: .*second.json holds measured figures, need another folder"):
        run(app, scripts, out, "second", "--smoke")
    (out / "second.json").write_text('{"schema": "maxsim-kernels/second/1/smoke"}', encoding="utf-8")
    assert "h200/second.json" not in REGISTRY.results(out), "a smoke run's figures are none"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="POSIX signals")
@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [
        (signal.SIGINT, 130, "interrupted; what was measured is in {}"),
        (signal.SIGTERM, 143, "terminated (SIGTERM); finished parts are kept, the same command continues"),
    ],
)
def test_interrupted_in_one_line_and_what_was_measured_is_kept(
    sent: signal.Signals, code: int, words: str, scripts: Path, tmp_path: Path
) -> None:
    body = "path.write_text('{\"cases\": {}}')\nimport time\ntry:\n    time.sleep(60)\nfinally:\n    path.with_name('cleaned').touch()\n    print('stopped', file=sys.stderr)\n"
    (scripts / "cpu_forward.py").write_text(STARTS + body, encoding="utf-8")
    out = tmp_path / "out"
    begins = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs ignore it
    command = f"{begins}; from maxsim_eval.cli import main; main(['bench', 'cpu', '--scripts', {str(scripts)!r}, '--out', {str(out)!r}])"
    child = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (out / "cpu.json").exists() or not (out / "cpu.json").stat().st_size:
        assert time.monotonic() < end
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(sent)
    said, messages = child.communicate(timeout=60)
    assert child.returncode == code
    assert said == ""
    started, *rest = messages.splitlines()
    assert started.endswith(f"--json {out / 'cpu.json'}")
    assert rest == [words.format(out / "cpu.json")]
    assert (out / "cleaned").exists()
