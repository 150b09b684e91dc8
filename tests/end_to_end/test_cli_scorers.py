"""Users' functions on the command line: a fresh process as people start it, several processes, plan, and what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from places import ROOT
from ports import reserved_port

pytestmark = pytest.mark.slow

SCORER = re.search(r"```python\n(import torch\nfrom torch\.nn.*?)```", (ROOT / "docs" / "scorers.md").read_text(), re.DOTALL)


@pytest.fixture
def work(demo: Any, tmp_path: Path) -> Iterator[Path]:
    """The demo's data and cache, and the documentation's own function."""
    folder: Path = demo.copy(tmp_path / "work", "datasets", "embeddings_cache")
    assert SCORER is not None
    (folder / "cli_scorers_kernels.py").write_text(f"{SCORER[1]}\ndef broken(queries, documents):\n    return 1 / 0\n")
    yield folder
    sys.modules.pop("cli_scorers_kernels", None)  # commands run in this process


def environment(**more: Any) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def test_the_documented_function_on_one_and_two_processes(work: Path, demo: Any) -> None:
    name = "python:cli_scorers_kernels:score"
    line = [sys.executable, str(ROOT / "evaluate.py"), "demo", "--paths", f"fp32,{name}", "--quiet", "--out"]
    with reserved_port() as port:
        several = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        envs = [environment(**several, RANK=rank, LOCAL_RANK=rank) for rank in range(2)]
        started = [subprocess.Popen([*line, "two"], cwd=work, env=env, stderr=subprocess.PIPE, text=True) for env in envs]
        said = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    one = subprocess.run([*line, "one"], cwd=work, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert one.returncode == 0, one.stderr
    runs = [(work / out / "runs" / "python-cli_scorers_kernels-score.trec").read_bytes() for out in ("one", "two")]
    assert runs[0] == runs[1]
    result = json.loads((work / "two" / "result.json").read_text())
    assert result["environment"]["processes"] == 2
    parity = result["paths"][name]["parity"]
    assert parity["overlap"]["@10"] == 1
    assert parity["max_abs_error"] < 1e-5
    assert result["paths"][name]["metrics"] == demo.result["paths"]["fp32"]["metrics"]


def test_a_failing_function_is_said_with_its_own_traceback(work: Path, cli: Any, clean: Any) -> None:
    outcome = cli("demo", "--paths", "fp32,python:cli_scorers_kernels:broken", "--quiet", cwd=work)
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert lines[0].startswith(
        "error: path python:cli_scorers_kernels:broken: its function raised, given 40 queries and 300 documents"
    )
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert sum("File " in text for text in lines) == 1
    assert "return 1 / 0" in outcome.err
    clean(work)


@pytest.mark.parametrize(
    "close", ["sys.stdout.close()", "sys.stdout.buffer.close()", "getattr(sys.stdout.buffer, 'raw', sys.stdout.buffer).close()"]
)
def test_a_function_that_closes_stdout_does_not_cost_the_report(work: Path, close: str) -> None:
    source = "import sys\nfrom maxsim_kernels import maxsim\n\ndef score(queries, documents):\n    {}\n    return maxsim(queries, documents)\n"
    (work / "closes.py").write_text(source.format(close))
    line = [
        sys.executable,
        "-c",
        "from maxsim_eval.cli import main; main()",
        "demo",
        "--paths",
        "fp32,python:closes:score",
        "--quiet",
        "--out",
        "out",
    ]
    done = subprocess.run(line, cwd=work, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python:closes:score" in done.stdout
    assert (work / "out" / "result.json").is_file()


def test_mistakes_in_the_name_end_before_anything_is_loaded(work: Path, cli: Any) -> None:
    for text, said in (
        ("python:cli_scorers_kernel:score", "Did you mean 'cli_scorers_kernels'"),
        ("python:cli_scorers_kernels:scor", "Did you mean 'score'"),
        ("python:cli_scorers_kernels", "need python:<module>:<function>"),
        ("pyhton:cli_scorers_kernels:score", "unknown path"),
    ):
        cli("local", "no-such-folder", "--paths", f"fp32,{text}", cwd=work).refused(2, said)


def test_plan_measures_it(work: Path, cli: Any) -> None:
    outcome = cli("plan", "demo", "small", "--paths", "fp32,python:cli_scorers_kernels:score", "--json", cwd=work).fine()
    paths = json.loads(outcome.out)["rates"]["paths"]
    assert paths["python:cli_scorers_kernels:score"]["score"]["value"] > 0


def test_explain_and_report_take_its_result(work: Path, cli: Any) -> None:
    name = "python:cli_scorers_kernels:score"
    cli("demo", "--paths", f"fp32,{name}", "--quiet", "--out", "out", cwd=work).fine()
    assert name in cli("report", "out/result.json", cwd=work).fine().out
    cli("explain", "demo", "small", "--query", "q07", "--document", "d032", "--path", name, cwd=work).refused(2, "no winners")
    assert "nDCG@10" in cli("compare", "out/result.json", f"out/result.json:{name}", cwd=work).fine().out
