"""The command line: `python evaluate.py beir scifact`, also installed as `maxsim-eval`.

Results go to stdout, everything else (progress, warnings, errors) to stderr; exit codes as `output.EXIT_CODES` says.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from maxsim_eval.cli.atlas import atlas
from maxsim_eval.cli.bench import SETTINGS as SCRIPTS
from maxsim_eval.cli.bench import bench
from maxsim_eval.cli.cache import cache, convert, encode, inspect
from maxsim_eval.cli.conform import conform
from maxsim_eval.cli.evaluate import register
from maxsim_eval.cli.explain import explain
from maxsim_eval.cli.gate import gate
from maxsim_eval.cli.import_ import import_
from maxsim_eval.cli.metrics import metrics
from maxsim_eval.cli.options import AsJson, Verbose, command_line, names_of
from maxsim_eval.cli.output import (
    EXAMPLES,
    EXIT_CODES,
    console,
    escape_unwritable,
    say,
    say_lines,
    with_examples,
    with_plain_types,
    write_json,
)
from maxsim_eval.cli.plan import plan
from maxsim_eval.cli.streams import guard_streams
from maxsim_eval.ending import ending_of
from maxsim_eval.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, ProgramExit, UsageError
from maxsim_eval.printing import printable


class _PassedError(Exception):
    """Carries an error past typer, which would end the program itself, with exit code 1."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def _own_endings() -> Iterator[None]:
    try:
        yield
    except (ProgramExit, KeyboardInterrupt):
        raise
    except (OSError, EOFError) as error:
        raise _PassedError(error) from error
    except Exception as error:
        # Typer's usage errors print what was given as it is; the help that stands in for a command is ours.
        if hasattr(error, "format_message") and hasattr(error, "message") and type(error).__name__ != "NoArgsIsHelpError":
            error.message = printable(str(error.message))
        raise
    except BaseException as error:  # a foreign library's panic, or its `sys.exit`, which would pass for an end of ours
        raise _PassedError(error) from error


class _Commands(typer.core.TyperGroup):
    """The commands, whose errors end as `ending.py` says; `irds:<id>` is `irds <id>`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        with_plain_types(self.commands.values())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        source, colon, name = args[0].partition(":") if args else ("", "", "")
        return super().resolve_command(ctx, [source, name, *args[1:]] if colon and source == "irds" else args)

    def make_context(self, *given: Any, **named: Any) -> Any:
        with _own_endings():
            return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        with _own_endings():
            return super().invoke(ctx)


app = typer.Typer(
    name="maxsim-eval",
    cls=_Commands,
    help=f"Score late-interaction embeddings by several exact and quantised MaxSim paths and compare what they retrieve.\n\n{EXAMPLES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EXIT_CODES,
)


def _print_versions(asked: bool) -> None:
    """Print the versions of both distributions and of torch, and where the packages are; end."""
    if not asked:
        return
    import importlib.metadata
    import importlib.util

    for distribution, package in (("maxsim-eval", "maxsim_eval"), ("maxsim-kernels", "maxsim_kernels"), ("torch", "torch")):
        found = importlib.util.find_spec(package)
        place = "not installed" if found is None or found.origin is None else Path(found.origin).parent
        typer.echo(f"{distribution} {importlib.metadata.version(distribution)} ({place})")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and where the packages are."),
    ] = False,
) -> None:
    pass


register(app)
app.command()(plan)
app.command()(atlas)
for _command in (encode, inspect, convert, explain, gate, metrics, conform):
    app.command()(_command)
app.command("import")(import_)
app.command(context_settings=SCRIPTS)(bench)
app.add_typer(cache)


@app.command()
def compare(
    inputs: Annotated[list[Path], typer.Argument(help="Two or more result.json (or result.json:path) or TREC run files.")],
    qrels: Annotated[Path | None, typer.Option(help="Judgements: TREC or BEIR qrels. Needed for TREC runs.")] = None,
    names: Annotated[str | None, typer.Option("--metrics", help="With --qrels: comma-separated, as nDCG@10,R@100.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the reports of an evaluation into this folder.")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Compare Results or runs with the first of them: intervals, tests and verdicts over all.

    Example: python evaluate.py compare results/a/result.json results/b/result.json:int8 --out results/a-and-b
    """
    from maxsim_eval.comparison.metrics import DEFAULT_METRICS
    from maxsim_eval.report.comparing import compare_inputs, render_comparison, write_comparison

    chosen = names_of(names)
    if names is not None and (qrels is None or not chosen):
        raise UsageError("--metrics: need names, and --qrels to compute them; without it the metrics are those of the results")
    comparison = compare_inputs(inputs, qrels, chosen or DEFAULT_METRICS)
    if out is not None:
        write_comparison(comparison, out, command_line())
    if as_json:
        write_json(comparison.to_json() + "\n")
    else:
        render_comparison(comparison, console(), verbose=verbose)


@app.command()
def report(
    result: Annotated[Path, typer.Argument(help="result.json of an evaluation.")],
    out: Annotated[Path | None, typer.Option(help="Also write the reports (docs/result.md) into this folder.")] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Render a Result again; reads nothing but the file.

    Example: python evaluate.py report results/beir-scifact-lexical/result.json
    """
    from maxsim_eval.report.console import render_console
    from maxsim_eval.report.result_json import read_result, to_json
    from maxsim_eval.report.writing import write_again

    found = read_result(result)
    if out is not None:
        write_again(found, out)
    if as_json:
        write_json(to_json(found))
    else:
        render_console(found, console(), verbose=verbose)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    say(f"warning: {message}", "yellow")


with_examples([app, cache])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    guard_streams()
    _spare_collecting()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    escape_unwritable()
    _size_bars()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # torch's C++ prints a stack for every broken connection; what broke is said once, by name (processes/world.py).
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if os.environ.get("RANK") != "0":  # every process is given the same command: the first one says what there is to say
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                _run(arguments)
            return
        _run(arguments)
        return
    with _terminable():
        _run(arguments)


@functools.cache
def _spare_collecting() -> None:
    """Look for unreachable cycles seldom, and not at the end: imports make none, and finding that out takes half a second."""
    gc.set_threshold(50_000, 20)
    atexit.register(gc.freeze)


_AGAIN = 0.01  # seconds until a signal is sent once more


class _Terminated(ProgramExit):
    """SIGTERM: what is open is closed, as on Ctrl-C."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, a second one at once; neither is lost where Python drops what it raises."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say what signals do
        yield
        return

    def stop(number: int, _: Any) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated(EXIT_TERMINATED)

    def again(dropped: Any) -> None:
        """Send a signal once more that came in a finaliser or a weak reference's callback, where Python drops what it raises."""
        if not isinstance(dropped.exc_value, KeyboardInterrupt | _Terminated):
            said(dropped)
            return
        number = signal.SIGTERM if isinstance(dropped.exc_value, _Terminated) else signal.SIGINT
        signal.signal(signal.SIGTERM, stop)
        threading.Timer(_AGAIN, os.kill, (os.getpid(), number)).start()

    before, said = signal.signal(signal.SIGTERM, stop), sys.unraisablehook
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = said
        signal.signal(signal.SIGTERM, before)


def _size_bars() -> None:
    """Give bars a size where the terminal says 0 x 0, as pseudo-terminals of containers and `script` do: they would be empty."""
    with contextlib.suppress(OSError):  # no terminal
        if not os.get_terminal_size(2).columns:
            os.environ.setdefault("TQDM_NCOLS", "100")  # read when tqdm is imported, here and in the scripts of `bench`
            os.environ.setdefault("TQDM_NROWS", "20")


@functools.cache
def _commands() -> Any:
    """All commands with their options, made once: `app()` would make them at each call, half the time of a small command."""
    return typer.main.get_command(app)


def _run(arguments: list[str] | None) -> None:
    try:
        try:
            _commands()(args=arguments)
        finally:
            sys.stdout.flush()  # here, where a failure has a message
    except _PassedError as passed:
        _fail(passed.error)
    except SystemExit as exit_:  # typer's, or a `ProgramExit`
        if exit_.code == EXIT_INTERRUPTED and type(exit_) is SystemExit:  # a subclass has said it
            say("interrupted; finished parts are kept, the same command continues")
        if isinstance(exit_, _Terminated):
            say("terminated (SIGTERM); finished parts are kept, the same command continues")
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the last net: nothing may end with Python's own 1
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    text, code = ending_of(error)
    say_lines(f"error: {text}", "red")
    sys.exit(code)
