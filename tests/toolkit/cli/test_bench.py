"""`bench`: names, what it would run, what an installed package without the repository says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from maxsim_eval.cli import bench
from maxsim_eval.errors import UnknownNameError, UsageError
from paper_tables import FORWARD, OTHERS

FOLDER = bench.FOLDER
REGISTRY = bench.opened(FOLDER)


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Scripts that write their arguments, paper.py ending with 1 as after rows that were left out."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    body = "import json, sys\nfrom pathlib import Path\nargs = sys.argv[1:]\nprint('measuring')\n"
    writes = 'path = Path(args[args.index("--json") + 1])\npath.parent.mkdir(parents=True, exist_ok=True)\n'
    (folder / "paper.py").write_text(
        f"{body}{writes}path.write_text(json.dumps({{'args': args}}))\nraise SystemExit(1)\n", encoding="utf-8"
    )
    (folder / "second.py").write_text(f"{body}raise SystemExit(2)\n", encoding="utf-8")
    (folder / "page.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n", encoding="utf-8")
    return folder


def test_every_table_of_the_paper_can_be_measured() -> None:
    assert {*FORWARD, *OTHERS, "scaling", "second"} <= set(REGISTRY.tables)


def test_list(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["bench"])
    assert shown.exit_code == 0
    assert (
        shown.stdout == CliRunner().invoke(app, ["bench", "--list"]).stdout == CliRunner().invoke(app, ["bench", "list"]).stdout
    )
    lines = shown.stdout.splitlines()
    assert [line for line in lines if re.match(r"fwd {16}How many times faster .*\? \[paper.py --only fwd\]$", line)]
    assert [line for line in lines if re.match(r"beir_ndcg {10}.*\? \[an evaluation: evaluate.py beir arguana", line)]
    assert [
        line for line in lines if re.match(r"losses {13}.*\? \[measures nothing: made of the tables above, after them\]$", line)
    ]
    held = json.loads(CliRunner().invoke(app, ["bench", "list", "--json"]).stdout)
    assert held["tables"]["train"]["script"] == "training.py"
    assert "--smoke" in held["tables"]["train"]["options"]
    assert "--smoke" not in held["tables"]["ooc"]["options"]
    assert set(held["computed"]) >= {"fast_p", "losses", "roofline"}
    assert set(held["evaluations"]) == {"beir_ndcg", "beir_scale", "colpali_ndcg", "int8_realmmrag"}
    assert held["tables"]["train"]["answers"] == held["answers"]["train"]
    assert set(held["answers"]) == {*held["tables"], *held["computed"], *held["evaluations"]}
    assert len(lines) == len(held["answers"])


def test_refusals(app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnknownNameError, match=r"unknown table 'fwdd'. Did you mean 'fwd'"):
        run(app, ["bench", "fwdd"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"beir_scale needs trained encoders .* evaluate.py beir hotpotqa"):
        run(app, ["bench", "beir_scale"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"needs the benchmark scripts of the repository.*has no paper.py.*--scripts"):
        run(app, ["bench", "fwd", "--scripts", str(tmp_path)], catch_exceptions=False)
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match=r"needs the benchmark scripts of the repository.*has no registry.toml.*--scripts"):
        run(app, ["bench", "list", "--scripts", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"--list: bench fwd has no such option; paper.py takes --rows, --fresh"):
        run(app, ["bench", "fwd", "--list", "--scripts", str(FOLDER)], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"fwd is measured on an NVIDIA GPU, and torch sees none here; `bench cpu`"):
        run(app, ["bench", "fwd", "--scripts", str(FOLDER)], catch_exceptions=False)


@pytest.mark.parametrize("as_json", [False, True])
def test_runs_the_script_and_shows_the_table(
    app: typer.Typer,
    scripts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    as_json: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "_run", lambda command, quiet: bench.subprocess.run(command, check=False).returncode)
    out = tmp_path / "out"
    command = ["bench", "nocg", "--scripts", str(scripts), "--out", str(out), "--no-compile", "--runs", "7"]
    ended = CliRunner().invoke(app, [*command, *(["--json"] if as_json else [])])
    assert ended.exit_code == 1, "rows were left out"
    said = json.loads((out / "paper.json").read_text(encoding="utf-8"))["args"]
    assert said == ["--only", "nocg", "--json", str(out / "paper.json"), "--no-compile", "--runs", "7"]
    shown = json.loads(capfd.readouterr().out.splitlines()[-1])
    need = ["--table", "nocg", "--files", f"h200/paper.json={out / 'paper.json'}", *(["--as-json"] if as_json else [])]
    assert shown == need


def test_what_scripts_print_goes_to_stderr_and_quiet_keeps_it(scripts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(scripts / "page.py")]
    assert bench._run(command, quiet=True) == 0
    assert capfd.readouterr() == ("", "")
    assert bench._run(command, quiet=False) == 0
    found = capfd.readouterr()
    assert (found.out, found.err.splitlines()) == ("", [" ".join(command), "[]"])
    assert bench._run([sys.executable, str(scripts / "second.py")], quiet=True) == 2
    assert "measuring" in capfd.readouterr().err


def test_a_script_without_figures_is_an_error(
    app: typer.Typer, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    command = ["bench", "second", "--quiet", "--scripts", str(scripts), "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match=r"second.py ended with 2 and wrote no figures"):
        CliRunner().invoke(app, command, catch_exceptions=False)
