"""`bench`: names, what it would run, what an installed package without the repository says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from maxsim_eval import cli_bench
from maxsim_eval.errors import UnknownNameError, UsageError

PAPER = ["fwd", "fwd_abs", "fwd_chunked", "nocg", "twoaxis", "chunked_sweep", "op_abl", "multiquery", "ooc", "train", "bwd_abl", "bwd_breakdown", "bwd_mem", "varlen", "int8", "int8_B", "fat_emb_cliff", "splitd_perf", "traffic", "mem", "precision", "scaling", "training_parity", "chamfer", "second"]


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)
    cli_bench.register(made)
    made.command("other")(lambda: None)
    return made


def test_every_table_has_an_entry_and_a_script() -> None:
    assert set(PAPER) <= set(cli_bench.TABLES)
    for held in cli_bench.TABLES.values():
        assert (cli_bench.FOLDER / held.script).is_file()


def test_entries_name_tables_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(cli_bench.FOLDER))
    import paper
    from page import FIGURES, RESULTS, sections
    from page_cells import Book

    names = {table.name for tables in sections(Book(RESULTS, FIGURES)).values() for table in tables}
    for name, held in cli_bench.TABLES.items():
        assert not held.shows or held.shows in names, name
        if held.script == "paper.py" and held.arguments:
            assert paper.groups_of([held.arguments[1]])


def test_list(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["bench"])
    assert shown.exit_code == 0
    assert "fwd                paper.py --only fwd" in shown.stdout
    assert "beir_ndcg          an evaluation: evaluate.py beir arguana" in shown.stdout


def test_refusals(app: typer.Typer, tmp_path: Path) -> None:
    run = CliRunner().invoke
    with pytest.raises(UnknownNameError, match=r"unknown table 'fwdd'. Did you mean 'fwd'"):
        run(app, ["bench", "fwdd"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"beir_scale needs trained encoders .* evaluate.py beir hotpotqa"):
        run(app, ["bench", "beir_scale"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"needs the benchmark scripts of the repository.*has no paper.py.*--scripts"):
        run(app, ["bench", "fwd", "--scripts", str(tmp_path)], catch_exceptions=False)


def test_runs_the_script_and_shows_the_table(app: typer.Typer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    body = "import json, sys\nfrom pathlib import Path\nargs = sys.argv[1:]\n"
    writes = 'path = Path(args[args.index("--json") + 1])\npath.parent.mkdir(parents=True, exist_ok=True)\n'
    (scripts / "paper.py").write_text(
        f"{body}{writes}path.write_text(json.dumps(args))\nraise SystemExit(1)\n", encoding="utf-8"
    )
    (scripts / "page.py").write_text(f'{body}print("page", *args)\n', encoding="utf-8")
    out = tmp_path / "out"
    command = ["bench", "nocg", "--scripts", str(scripts), "--out", str(out), "--no-compile", "--runs", "7"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 1, "rows were left out"
    said = json.loads((out / "paper.json").read_text(encoding="utf-8"))
    assert said == ["--only", "nocg", "--json", str(out / "paper.json"), "--no-compile", "--runs", "7"]
    assert f"page --table nocg --files h200/paper.json={out / 'paper.json'}" in capfd.readouterr().out
    assert sys.executable in ended.stderr
