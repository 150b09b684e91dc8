"""The command line: `python evaluate.py beir scifact`, also installed as `maxsim-eval`.

Results go to stdout, everything else (progress, warnings, errors) to stderr. Exit codes: 0 fine, 1 the gate says no (`plan`: it does
not fit), 2 a wrong name or option, 3 data or cache that is missing or damaged, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from maxsim_eval.cli_cache import cache, convert, encode, inspect
from maxsim_eval.cli_evaluate import register
from maxsim_eval.cli_import import import_
from maxsim_eval.cli_options import AsJson
from maxsim_eval.cli_plan import plan
from maxsim_eval.errors import EXIT_DATA, EXIT_GATE, EXIT_INTERRUPTED, MaxsimEvalError, UsageError

app = typer.Typer(
    name="maxsim-eval",
    help="Score late-interaction embeddings by several exact and quantised MaxSim paths and compare what they retrieve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


register(app)
app.command()(plan)
for _command in (encode, inspect, convert):
    app.command()(_command)
app.command("import")(import_)
app.add_typer(cache)


@app.command()
def compare(
    inputs: Annotated[list[Path], typer.Argument(help="Two or more result.json (or result.json:path) or TREC run files.")],
    qrels: Annotated[Path | None, typer.Option(help="Judgements: TREC or BEIR qrels. Needed for TREC runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare Results or runs with the first of them.

    Example: python evaluate.py compare results/a/result.json results/b/result.json:int8
    """
    from maxsim_eval.comparing import compare_inputs, render_comparison

    comparison = compare_inputs(inputs, qrels)
    if as_json:
        typer.echo(comparison.to_json())
    else:
        render_comparison(comparison, Console())


@app.command()
def metrics(
    qrels: Annotated[Path, typer.Argument(help="Judgements: TREC or BEIR qrels.")],
    run: Annotated[Path, typer.Argument(help="TREC run file.")],
    names: Annotated[str | None, typer.Option("--metrics", help="Comma-separated, as nDCG@10,R@100,AP,RR@10.")] = None,
    as_json: AsJson = False,
) -> None:
    """Metrics of a TREC run, by trec_eval's own code; a judged query without results scores 0.

    Example: python evaluate.py metrics qrels.txt run.trec --metrics nDCG@10,R@100
    """
    from maxsim_eval.metrics import DEFAULT_METRICS, evaluate_run, means
    from maxsim_eval.runs import read_qrels, read_trec_run

    chosen = DEFAULT_METRICS if names is None else tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise UsageError("--metrics: got no name, need some, as nDCG@10,R@100,AP,RR@10")
    values = means(evaluate_run(read_trec_run(run), read_qrels(qrels), chosen))
    if as_json:
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        for name, value in values.items():
            typer.echo(f"{name:12} {value:.4f}")


@app.command()
def gate(
    result: Annotated[Path, typer.Argument(help="result.json of a fresh evaluation.")],
    baseline: Annotated[Path, typer.Option(help="Committed baseline JSON.")],
    thresholds: Annotated[Path | None, typer.Option(help="Thresholds TOML. Default: the paper's bounds.")] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="Write the baseline from this result.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show the checks that passed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fail (exit code 1) when quality fell or a path left its parity bounds.

    Example: python evaluate.py gate results/beir-scifact-lexical/result.json --baseline tests/baselines/scifact.json
    """
    from maxsim_eval.gate import check, load_baseline, load_thresholds, passed, render, write_baseline

    found = _read_result(result)
    if update_baseline:
        write_baseline(baseline, found)
        typer.echo(f"baseline written: {baseline}")
        return
    findings = check(found, load_baseline(baseline), load_thresholds(thresholds))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2, default=str))
    else:
        typer.echo(render(findings, every=verbose))
    if not passed(findings):
        raise typer.Exit(EXIT_GATE)


@app.command()
def report(
    result: Annotated[Path, typer.Argument(help="result.json of an evaluation.")],
    out: Annotated[Path | None, typer.Option(help="Also write report.md and result.json into this folder.")] = None,
) -> None:
    """Render a Result again; reads nothing but the file.

    Example: python evaluate.py report results/beir-scifact-lexical/result.json
    """
    from maxsim_eval.report import render_console, write_reports

    found = _read_result(result)
    render_console(found, Console())
    if out is not None:
        write_reports(found, out)


def _read_result(path: Path) -> Any:
    from maxsim_eval.errors import DataError
    from maxsim_eval.report import from_json

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a result ({error})") from error
    return from_json(text, origin=str(path))


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    typer.secho(f"warning: {message}", fg="yellow", err=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # torch's C++ prints a stack for every broken connection; what broke is said once, by name (distributed.py).
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if os.environ.get("RANK") != "0":  # every process is given the same command: the first one says what there is to say
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                _run(arguments)
            return
    _run(arguments)


def _run(arguments: list[str] | None) -> None:
    try:
        app(args=arguments)
    except MaxsimEvalError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:  # a file that cannot be written or read: the system's own words and the file's name
        _fail(str(error), EXIT_DATA)
    except SystemExit as exit_:
        if exit_.code == EXIT_INTERRUPTED and type(exit_) is SystemExit:  # a subclass has said it
            typer.secho("interrupted; finished parts are kept, the same command continues", err=True)
        raise


def _fail(text: str, code: int) -> NoReturn:
    typer.secho(f"error: {text}", fg="red", err=True)
    sys.exit(code)
