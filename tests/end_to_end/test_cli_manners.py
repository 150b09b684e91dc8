"""Manners that every command has: help with examples, JSON, quiet, streams, colours, exit codes, near names."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from maxsim_eval.cli.app import app
from maxsim_eval.cli.output import EXIT_CODES
from maxsim_eval.errors import EXIT_DATA, EXIT_GATE, EXIT_INTERRUPTED, EXIT_USAGE
from places import ROOT

ROOT_COMMAND: Any = typer.main.get_command(app)
ESCAPE = "\x1b["
# Commands that take long enough for a bar.
LONG = {
    "beir",
    "real-mm-rag",
    "local",
    "demo",
    "irds",
    "plan",
    "encode",
    "import",
    "convert",
    "inspect",
    "explain",
    "bench",
    "atlas",
}


def commands() -> Iterator[tuple[str, Any]]:
    for name, command in ROOT_COMMAND.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


COMMANDS = dict(commands())
EVERY = pytest.mark.parametrize("name", COMMANDS)


def options(command: Any) -> set[str]:
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}


def test_the_commands_are_these() -> None:
    assert set(COMMANDS) == {
        "beir", "real-mm-rag", "local", "demo", "irds", "plan", "encode", "import", "convert", "inspect", "cache ls", "cache rm", "cache gc",
        "metrics", "compare", "gate", "report", "explain", "bench", "conform", "atlas",
    }  # fmt: skip


# Help ------------------------------------------------------------------------------------------------------------------


@EVERY
def test_help_has_an_example_that_is_a_command_line(name: str, cli: Any, tmp_path: Path) -> None:
    text = cli(*name.split(), "--help", cwd=tmp_path).fine().out
    examples = re.findall(r"^Example:\n  (.+)$", re.sub(r"^  ", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    assert examples, text
    assert len(text.split("Options:")[0].strip().splitlines()) > 3, "it says what the command is for"
    for example in examples:
        words = shlex.split(example)
        assert words[:2] == ["python", "evaluate.py"], example
        assert words[2 : 2 + len(name.split())] == name.split()
        COMMANDS[name].make_context(name, words[2 + len(name.split()) :])  # parses; runs nothing


@EVERY
def test_every_option_says_what_it_does(name: str, cli: Any, tmp_path: Path) -> None:
    for one in COMMANDS[name].params:
        assert getattr(one, "help", None), f"{name}: {one.opts} has no help"
        assert getattr(one, "help", "")[0].isupper() or re.match(r"[a-z0-9-]+\b", one.help), one.help


@EVERY
def test_help_names_types_and_bounds_as_people_do(name: str, cli: Any, tmp_path: Path) -> None:
    text = cli(*name.split(), "--help", cwd=tmp_path).fine().out
    assert not re.search(r"list\[|<str>|<int|range>|<=x|\d{12}", text), text


def test_a_seed_that_no_result_could_hold_is_refused(cli: Any, tmp_path: Path) -> None:
    cli("demo", "--limit-seed", 10**30, cwd=tmp_path).refused(EXIT_USAGE, "--limit-seed: got 1000", f"to {2**63 - 1}")


def test_every_command_whose_answer_may_be_no_is_named_beside_the_exit_code() -> None:
    (line,) = [line for line in EXIT_CODES.splitlines() if line.startswith("  1 ")]
    assert all(f"{name}:" in line for name in ("gate", "plan", "conform"))


def test_help_of_the_program_has_examples_and_exit_codes(cli: Any, tmp_path: Path) -> None:
    text = cli("--help", cwd=tmp_path).fine().out
    assert "python evaluate.py demo" in text
    for code in (0, EXIT_GATE, EXIT_USAGE, EXIT_DATA, EXIT_INTERRUPTED):
        assert re.search(rf"^ +{code} +\S", text, flags=re.MULTILINE), code
    assert "stderr" in text
    assert "NO_COLOR" in text
    assert str(EXIT_INTERRUPTED) in EXIT_CODES
    bare = cli(cwd=tmp_path)
    assert "Commands:" in bare.out + bare.err
    assert "python evaluate.py cache" in cli("cache", "--help", cwd=tmp_path).fine().out


def test_exit_codes_are_documented_for_people() -> None:
    """In one place, which the pages that speak of an exit code link."""
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    said = text[text.index("## How a command ends") :][:900]
    for code in (0, EXIT_GATE, EXIT_USAGE, EXIT_DATA, EXIT_INTERRUPTED):
        assert re.search(rf"^\| {code}\b", said, re.MULTILINE), code
    for name in ("README.md", "docs/gate.md", "docs/scale.md"):
        assert "promises.md#how-a-command-ends" in (ROOT / name).read_text(encoding="utf-8"), name


@EVERY
def test_json_and_quiet_are_offered(name: str) -> None:
    offered = options(COMMANDS[name])
    assert "--json" in offered
    if name in LONG:
        assert "--quiet" in offered


@pytest.mark.slow
def test_no_line_ends_in_spaces(work: Path, cli: Any) -> None:
    for words in (
        f"report {RESULT}",
        f"report {RESULT} --verbose",
        "inspect demo small",
        "plan demo",
        "explain demo small --query q07",
    ):
        lines = cli(*words.split(), cwd=work).fine().out.splitlines()
        assert [line for line in lines if line != line.rstrip()] == [], words


def test_a_sentence_that_is_too_long_for_a_terminal_goes_on_indented(
    work: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = cli("report", RESULT, cwd=work).fine().out
    assert max(map(len, text.splitlines())) <= 60
    said = text[text.index("int8: ") :].splitlines()
    assert len(said) > 2
    assert all(re.match(r"  \S", line) for line in said[1:])
    assert " ".join(" ".join(said).split()).endswith(": 40 queries are too few to decide (about 820 would).")


# Running ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(demo: Any, cli: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished demo, a result of it, qrels, embeddings to import."""
    folder: Path = demo.copy(tmp_path_factory.mktemp("manners") / "work")
    (folder / "result").symlink_to(folder / "results" / "demo-small-lexical")
    rng = torch.Generator().manual_seed(0)
    torch.save(
        {
            "query_embeddings": torch.randn(2, 3, 4, generator=rng),
            "query_lengths": torch.tensor([3, 2]),
            "doc_embeddings": [torch.randn(n, 4, generator=rng) for n in (4, 1, 2)],
            "meta": {"query_ids": ["q1", "q2"], "doc_ids": ["a", "b", "c"], "qrels": {"q1": {"a": 1}, "q2": {"c": 1}}},
        },
        folder / "mine.pt",
    )
    written = json.loads(cli("gate", RESULT, "--baseline", "base.json", "--update-baseline", "--json", cwd=folder).fine().out)
    assert (written["baseline"], written["written"]) == ("base.json", True)
    cli(*line("import", folder), cwd=folder).fine()
    return folder


QRELS = "datasets/demo/small/qrels/test.tsv"
RUN = "result/runs/fp32.trec"
RESULT = "result/result.json"
# Each ends well on the demo, in this order; {} is replaced by a folder of its own.
LINES = {
    "demo": "demo --out {}",
    "atlas": "atlas demo small --entries int8 --out {}",
    "local": "local datasets/demo/small --out {}",
    "plan": "plan demo small",
    "encode": "encode demo small",
    "import": "import local mine mine.pt --encoder mine --replace",
    "convert": "convert demo small --encoder lexical --to int8-token",
    "inspect": "inspect demo small --encoder lexical",
    "cache ls": "cache ls",
    "cache gc": "cache gc",
    "metrics": f"metrics {QRELS} {RUN}",
    "compare": f"compare {RESULT} {RESULT}:int8",
    "gate": f"gate {RESULT} --baseline base.json",
    "report": f"report {RESULT}",
    "explain": "explain demo small --query q07 --document d032",
    "conform": "conform python:maxsim_kernels:maxsim",
    "cache rm": "cache rm local mine --yes",
    "bench": "bench list",
}


def line(name: str, folder: Path, *more: str) -> list[str]:
    return [*LINES[name].format(folder).split(), *more]


def test_every_command_has_a_line() -> None:
    assert set(COMMANDS) - set(LINES) == {"beir", "real-mm-rag", "irds"}, (
        "those need a download; they are made as `demo` and `local` are"
    )


@pytest.mark.parametrize("name", LINES)
def test_json_is_all_there_is_on_stdout(name: str, work: Path, cli: Any, tmp_path: Path) -> None:
    if name == "cache rm":
        cli(*line("import", work), cwd=work).fine()
    outcome = cli(*line(name, tmp_path / "out", "--json"), cwd=work).fine()
    assert json.loads(outcome.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON")) is not None
    assert "Traceback" not in outcome.err
    if "--quiet" in options(COMMANDS[name]):
        quiet = cli(*line(name, tmp_path / "quiet", "--json", "--quiet"), cwd=work).fine()
        assert "%|" not in quiet.err, "a progress bar"
        json.loads(quiet.out)


@pytest.mark.parametrize("name", [name for name in LINES if "--quiet" in options(COMMANDS[name])])
def test_quiet_commands_show_no_progress(name: str, work: Path, cli: Any, tmp_path: Path) -> None:
    outcome = cli(*line(name, tmp_path / "out", "--quiet"), cwd=work).fine()
    assert outcome.err == ""


@pytest.mark.parametrize("name", LINES)
def test_no_colours_in_a_pipe(name: str, work: Path, cli: Any, tmp_path: Path) -> None:
    if name == "cache rm":
        cli(*line("import", work), cwd=work).fine()
    outcome = cli(*line(name, tmp_path / "out"), cwd=work).fine()
    assert outcome.out.strip(), "people get an answer"
    assert ESCAPE not in outcome.out + outcome.err


def shown(arguments: list[str], folder: Path, **more: str) -> str:
    """What a command prints to a terminal on both streams."""
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover (another process)
        os.chdir(folder)
        os.environ.update({"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "COLUMNS": "100", **more})
        os.execv(sys.executable, [sys.executable, str(ROOT / "evaluate.py"), *arguments])
    text = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(terminal)
    os.waitpid(pid, 0)
    return text.decode()


def test_bars_on_a_terminal_that_says_no_width(tmp_path: Path) -> None:
    """As pseudo-terminals of containers are until somebody sets their size."""
    text = shown(["demo"], tmp_path)
    assert re.search(r"\d+%\|.*(doc|B|tok)", text), text[-2000:]


@pytest.mark.slow
def test_colours_on_a_terminal_and_none_with_no_color(work: Path) -> None:
    wrong = ["report", "nowhere.json"]
    coloured = shown(wrong, work, NO_COLOR="")
    plain = shown(wrong, work, NO_COLOR="1")
    assert "error: nowhere.json: cannot be read" in plain
    assert ESCAPE not in plain
    assert ESCAPE in coloured
    table = shown(["report", RESULT], work, NO_COLOR="1")
    assert "nDCG@10" in table
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", table), "a colour"


# Exit codes and near names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        ("beir scifcat", EXIT_USAGE, ["Did you mean 'scifact'"]),
        ("real-mm-rag finreprot", EXIT_USAGE, ["Did you mean 'finreport'"]),
        ("local manners-of-nobody", EXIT_DATA, ["no such folder"]),
        ("local smal --data-dir datasets/demo", EXIT_DATA, ["no such folder", "Did you mean 'small'"]),
        ("demo smal", EXIT_USAGE, ["Did you mean 'small'"]),
        ("demo --paths fp32,itn8", EXIT_USAGE, ["unknown path 'itn8'", "Did you mean 'int8'"]),
        ("demo --encoder lexcal", EXIT_USAGE, ["unknown encoder 'lexcal'", "Did you mean 'lexical'"]),
        ("local mine --encoder mien --data-dir datasets", EXIT_USAGE, ["Did you mean", "'mine'"]),
        ("demo --metrics nDGC@10", EXIT_USAGE, ["unknown metric", "Did you mean 'nDCG@10'"]),
        ("demo --device gpu", EXIT_USAGE, ["device 'gpu'"]),
        ("demo --k 0", EXIT_USAGE, ["--k: got 0"]),
        ("atlas demo small --entries itn8", EXIT_USAGE, ["itn8", "Did you mean 'int8'"]),
        ("atlas demo small --grid nowhere.toml", EXIT_USAGE, ["nowhere.toml"]),
        ("plan bier scifact", EXIT_USAGE, ["unknown source 'bier'", "Did you mean 'beir'"]),
        ("plan demo small --paths fp23", EXIT_USAGE, ["Did you mean 'fp32'"]),
        ("plan demo small --k 0", EXIT_USAGE, ["--k: got 0, need 1 or more"]),
        ("encode dmeo small --encoder lexical", EXIT_USAGE, ["Did you mean 'demo'"]),
        ("encode demo small --encoder lexikal", EXIT_USAGE, ["Did you mean 'lexical'"]),
        ("import local mine nothing.pt --encoder x", EXIT_DATA, ["nothing.pt"]),
        ("convert demo small --encoder lexical --to int8-tokn", EXIT_USAGE, ["Did you mean 'int8-token'"]),
        ("convert demo smal --to int8-token", EXIT_DATA, ["Did you mean 'demo small'"]),
        ("inspect demo small --encoder lexicl", EXIT_DATA, ["Did you mean 'lexical'"]),
        ("inspect embeddings_cache/demo/smal", EXIT_DATA, ["no such folder"]),
        ("cache rm dmo small --yes", EXIT_DATA, ["Did you mean 'demo small'"]),
        (f"metrics {QRELS} nowhere.trec", EXIT_DATA, ["nowhere.trec"]),
        (f"metrics {QRELS} {RUN} --metrics nDCG@1O", EXIT_USAGE, ["unknown metric 'nDCG@1O'. Did you mean 'nDCG@k'"]),
        (f"compare {RESULT} {RESULT}:int9", EXIT_USAGE, ["Did you mean 'int8'"]),
        ("gate nowhere.json --baseline base.json", EXIT_DATA, ["nowhere.json"]),
        ("report nowhere.json", EXIT_DATA, ["nowhere.json"]),
        ("explain demo small --query q077 --document d032", EXIT_USAGE, ["Did you mean 'q07'", "no query 'q077'"]),
        ("explain demo small --query q07 --document d32", EXIT_USAGE, ["no document 'd32'", "Did you mean"]),
        ("explain demo small --query q07 --document d032 --path fp61", EXIT_USAGE, ["Did you mean 'fp16'"]),
        ("explain demo small --query q07 --document d032 --out x.gif", EXIT_USAGE, ["--out", ".svg"]),
        ("explain demo small --query q07 --document d032 --grid 4", EXIT_USAGE, ["--grid", "ROWSxCOLUMNS"]),
        ("explain demo small --query q07 --document d032 --query-token 1", EXIT_USAGE, ["--query-token"]),
        ("explain dem small --query q07 --document d032", EXIT_USAGE, ["Did you mean 'demo'"]),
        ("bench fwdd", EXIT_USAGE, ["unknown table 'fwdd'", "Did you mean 'fwd'"]),
        ("bench beir_scale", EXIT_USAGE, ["needs trained encoders", "evaluate.py beir hotpotqa"]),
    ],
)
def test_mistakes_are_said_in_one_line_with_near_names(words: str, code: int, texts: list[str], work: Path, cli: Any) -> None:
    if "mien" in words:
        cli(*line("import", work), cwd=work).fine()
    cli(*words.split(), cwd=work).refused(code, *texts)


@pytest.mark.parametrize("words", ["demo --pahts fp32", "cache lst", "evalute demo", "explain demo small", "demo --k ten"])
def test_what_does_not_parse_is_a_usage_error_on_stderr(words: str, work: Path, cli: Any) -> None:
    outcome = cli(*words.split(), cwd=work)
    assert outcome.code == EXIT_USAGE
    assert outcome.out == ""
    assert "Error: " in outcome.err
    if "--pahts" in words:
        assert "--paths" in outcome.err
