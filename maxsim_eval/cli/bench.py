"""The command `bench`: one table of the paper, measured here by the scripts of `benchmarks/`, and shown.

Which tables there are stands in `benchmarks/registry.toml`. It and the scripts belong to the repository, not to the distribution: an
installed package without its checkout is told so. Everything that can be refused is refused before a script starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from maxsim_eval.cli.options import AsJson, NoBars
from maxsim_eval.cli.output import print_json, say
from maxsim_eval.errors import EXIT_INTERRUPTED, DataError, ProgramExit, UnknownNameError, UsageError
from maxsim_eval.parsing import json_of, toml_of

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # what the command does not know is the script's


REGISTRY = "registry.toml"
MOST_NAMES = 12
CHILD = """
import os, runpy, signal, sys
def stop(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once: what cleans up is not interrupted again
    sys.stderr = open(os.devnull, "w")  # the command says that it was interrupted, in one line
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, stop)
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # the script does not outlive the command
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except KeyboardInterrupt:
    sys.exit(130)
"""  # runs a script as python itself would, but ends without a traceback at Ctrl-C


class InterruptedBench(ProgramExit):
    """Ctrl-C, which has been reported already."""


@dataclass(frozen=True)
class Bench:
    """A table: what it answers, its script and arguments, their results file in the output folder, and page.py's name of it."""

    answers: str
    script: str
    arguments: tuple[str, ...]
    file: str
    shows: str


class Registry:
    """What `registry.toml` names: measured tables, computed ones, evaluations, aliases, and what each answers in a sentence."""

    def __init__(self, path: Path) -> None:
        held = toml_of(path.read_text(encoding="utf-8"))
        self._scripts: dict[str, dict[str, Any]] = held["scripts"]
        self.tables = {name: self._bench(name, **said) for name, said in held["tables"].items()}
        self.computed: dict[str, str] = {name: said["shows"] for name, said in held["computed"].items()}
        self.evaluations: dict[str, str] = {name: said["run"] for name, said in held["evaluations"].items()}
        self.aliases: dict[str, str] = held["aliases"]
        self.answers: dict[str, str] = {
            name: said["answers"] for part in ("tables", "computed", "evaluations") for name, said in held[part].items()
        }
        self.files = list(dict.fromkeys(table.file for table in self.tables.values()))

    def _bench(self, name: str, answers: str, script: str, only: str = "", file: str = "", shows: str = "") -> Bench:
        arguments = ("--only", only) if only else ()
        return Bench(answers, script, arguments, file or self._scripts[script]["file"], shows or name)

    def options(self, script: str) -> list[str]:
        """The options that may be handed on to a script."""
        return list(self._scripts[script]["options"])

    def on_page(self, file: str) -> str:
        """The name that page.py has for a results file."""
        named = {said["file"]: said["page"] for said in self._scripts.values() if "page" in said}
        return str(named.get(file, f"h200/{file}"))

    def results(self, out: Path, without: Path | None = None) -> dict[str, Path]:
        """page.py's name -> path of every results file in a folder, except those of smoke runs and the file `without`."""
        paths = [out / name for name in self.files if (out / name).exists() and out / name != without]
        return {self.on_page(path.name): path for path in paths if not _is_smoke(_read(path))}


def opened(scripts: Path) -> Registry:
    """The registry in the folder of the scripts; the repository's own, where that folder has none.

    Raises:
        UsageError: neither is there.
    """
    own = FOLDER / REGISTRY
    path = scripts / REGISTRY
    if not path.is_file() and own.is_file():
        path = own
    _need_script(path.parent, REGISTRY)
    return Registry(path)


def bench(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="A table of the paper; list: what there is.")] = "list",
    out: Annotated[Path, typer.Option(help="Folder of the raw figures.")] = Path("results/bench"),
    scripts: Annotated[Path, typer.Option(help="The repository's benchmarks.")] = FOLDER,
    listed: Annotated[bool, typer.Option("--list", help="Print what each table answers, and end.")] = False,
    quiet: NoBars = False,
    as_json: AsJson = False,
) -> None:
    """Measure a table of the paper on this machine, every method checked first, and show it.

    Options of the table's script are handed on to it (--runs 20, --no-compile, --peers none, --seconds 300, --smoke: those it has; list
    --json names them); another one is refused. Figures are kept while a script measures. Tables of paper.py keep the rows in their
    file and do not measure them again; other scripts measure anew. fast_p, losses, not timed, roofline, scorers, gpu, steps and
    streams measure nothing: they are made of what other tables measured, from the files in --out.

    Example: python evaluate.py bench fwd --no-compile
    """
    registry = opened(scripts)
    if table == "list":
        _list(registry, as_json)
        return
    table = registry.aliases.get(table, table)
    # With a table --list is refused as any option that its script does not take.
    given = [*context.args, *(["--list"] if listed else [])]
    if table in registry.evaluations:
        raise UsageError(
            f"{table} needs trained encoders and their data, so it is an evaluation: evaluate.py {registry.evaluations[table]}"
        )
    if table in registry.computed:
        raise typer.Exit(_computed(registry, table, out, scripts, given, quiet, as_json))
    if table not in registry.tables:
        raise UnknownNameError("table", table, [*registry.tables, *registry.computed, *registry.aliases, *registry.evaluations])
    found = registry.tables[table]
    takes = registry.options(found.script)
    _need_script(scripts, found.script)
    _need_options(table, found.script, takes, given)
    smoke = bool({"--smoke", "--tiny"} & set(given))
    if not smoke and table != "cpu":
        _need_gpu(table, takes)
    file = out / found.file
    _need_folder(out, file)
    held = file.read_bytes() if file.exists() else b""
    before = _measured(file, fresh="--fresh" in given)
    registry.results(out, without=file)  # a damaged one is told before hours of measuring
    if any(word.partition("=")[0] == "--rows" for word in given):
        _need_rows(table, scripts / found.script, found.arguments, given)
    if smoke and before is not None and "--fresh" not in given and not _is_smoke(_read(file)):
        raise UsageError(f"--smoke: {file} holds measured figures, need another folder: --out DIR")
    ended = _run([sys.executable, str(scripts / found.script), *found.arguments, "--json", str(file), *given], quiet)
    if ended == EXIT_INTERRUPTED:
        _interrupted(file, file.exists() and file.read_bytes() != held)
    after = _measured(file)
    if after is None or (ended and after == before):
        kept = f"; {file} is as it was" if before is not None else ""
        raise UsageError(f"{table}: {found.script} ended with {ended} and wrote no figures{kept}")
    if not smoke:
        ended = _show(found, registry.results(out), file, scripts, as_json) or ended
    elif as_json:
        print_json({"table": table, "smoke": True, "figures": str(file), "ended": ended})
    if not quiet:
        say(f"raw figures: {file}")
    raise typer.Exit(ended)


def _computed(
    registry: Registry, table: str, out: Path, scripts: Path, given: Sequence[str], quiet: bool, as_json: bool
) -> int:
    """Show a table made from results files in `out`; nothing is measured. Returns page.py's exit status."""
    _need_script(scripts, "page.py")
    said = f"{table} measures nothing, it is made of what other tables measured"
    if given:
        raise UsageError(f"{said}: got {given[0]}, need no further option")
    held = registry.results(out)
    if not held:
        raise UsageError(f"{said}: the folder {out} (--out) has none of {', '.join(registry.files)}; run bench fwd first")
    if not quiet:
        say(f"{table} measures nothing; made from {', '.join(str(path) for path in held.values())}")
    return _page(registry.computed[table], held, scripts, as_json)


def _show(found: Bench, held: Mapping[str, Path], file: Path, scripts: Path, as_json: bool) -> int:
    """Show the table, with every results file that there is; returns the exit status."""
    if found.script == "second.py" and not _has_first(held):
        _second_alone(file, as_json)
        return 0
    return _page(found.shows, held, scripts, as_json)


def _page(name: str, known: Mapping[str, Path], scripts: Path, as_json: bool) -> int:
    files = ",".join(f"{held}={path}" for held, path in known.items())
    show = [sys.executable, str(scripts / "page.py"), "--table", name, "--files", files]
    return subprocess.run([*show, *(["--as-json"] if as_json else [])], check=False).returncode


def _has_first(known: Mapping[str, Path]) -> bool:
    """Whether there are rows of the first harness to compare the second with."""
    path = known.get("h200/paper.json")
    groups = _read(path).get("groups", {}) if path is not None else {}
    return any(name.endswith(" 1000") for group in ("shapes", "frontier") for name in groups.get(group, {}).get("rows", {}))


def _second_alone(file: Path, as_json: bool) -> None:
    """Show the second harness's own figures, where there are none of the first."""
    shapes: dict[str, Any] = _read(file).get("shapes", {})
    methods = list(dict.fromkeys(name for held in shapes.values() for name in held["methods"]))
    rows = []
    for shape, held in shapes.items():
        times = [held["methods"].get(name, {}).get("median_ms") for name in methods]
        rows.append([shape, *("-" if one is None else f"{one:.4g}" for one in times)])
    note = f"To compare with the first harness run bench fwd first: {file.with_name('paper.json')} has no rows of it."
    title, heads = "the second harness alone, ms", ["shape", *methods]
    if as_json:
        print_json({"table": "second harness", "title": title, "heads": heads, "rows": rows, "notes": [note]})
        return
    lines = [f"### second harness: {title}", "", *(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])]
    typer.echo("\n".join([*lines, "", note]))


# The results files


def _read(path: Path) -> dict[str, Any]:
    """A results file.

    Raises:
        DataError: it cannot be read or holds something else.
    """
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: not a results file ({problem}); remove it or give another folder with --out") from None
    if not isinstance(found, dict):
        raise DataError(
            f"{path}: not a results file (got a {type(found).__name__}); remove it or give another folder with --out"
        )
    return found


def _is_smoke(found: Mapping[str, Any]) -> bool:
    return str(found.get("schema", "")).endswith(("/smoke", "/tiny"))


def _measured(path: Path, fresh: bool = False) -> Any:
    """What a file has of finished rows, None where there is none; `fresh`: it will be replaced, so it may be damaged."""
    if not path.exists():
        return None
    try:
        found = _read(path)
    except DataError:
        if fresh:
            return None
        raise
    return (
        {key: held for key, held in found.items() if key not in ("partial", "verdicts")} if found.get("groups", True) else None
    )


# What is refused


def _need_script(scripts: Path, script: str) -> None:
    if not (scripts / script).is_file():
        raise UsageError(
            f"bench needs the benchmark scripts of the repository, and {scripts} has no {script}: the installed package does "
            "not carry them. Run it in a checkout, or give a checkout's benchmarks folder with --scripts"
        )


def _need_options(table: str, script: str, takes: Sequence[str], given: Sequence[str]) -> None:
    """Refuse what the script would not take, or what would make it measure another table."""
    for word in given:
        name = word.partition("=")[0]
        if name.startswith("-") and not name[1:2].isdigit() and name not in takes:
            raise UsageError(f"{name}: bench {table} has no such option; {script} takes {', '.join(takes)}")


def _need_folder(out: Path, file: Path) -> None:
    """Make the folder and try to write there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as problem:
        raise DataError(f"--out: cannot write to {out} ({problem.strerror}); give another folder") from None
    if file.exists() and not os.access(file, os.W_OK):
        raise DataError(f"--out: {file} cannot be written; give another folder")


def _need_rows(table: str, script: Path, arguments: Sequence[str], given: Sequence[str]) -> None:
    """Refuse a `--rows` that no row matches, with the names there are; what is wrong otherwise is the script's to refuse."""
    if _rows([sys.executable, str(script), *arguments, *given, "--list"]) == []:
        names = list(dict.fromkeys(_rows([sys.executable, str(script), *arguments, "--list"]) or []))
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise UsageError(f"--rows: no row of {table} has such a name; its rows are {', '.join(names[:MOST_NAMES])}{more}")


def _rows(command: list[str]) -> list[str] | None:
    """The names that a script's `--list` prints ("group name seconds s", then their number); None where it fails otherwise."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [] if "error: --rows" in done.stderr else None
    return [line.split(None, 1)[1].rsplit(None, 2)[0].rstrip() for line in done.stdout.splitlines()[:-1]]


def _list(registry: Registry, as_json: bool) -> None:
    """What each table answers, and what measures it."""
    if as_json:
        tables = {name: {**asdict(held), "options": registry.options(held.script)} for name, held in registry.tables.items()}
        named = {"computed": registry.computed, "aliases": registry.aliases, "evaluations": registry.evaluations}
        print_json({"tables": tables, **named, "answers": registry.answers})
        return
    by = {name: " ".join((held.script, *held.arguments)) for name, held in registry.tables.items()}
    by |= dict.fromkeys(registry.computed, "measures nothing: made of the tables above, after them")
    by |= {name: f"an evaluation: evaluate.py {words}" for name, words in registry.evaluations.items()}
    for name, words in by.items():
        typer.echo(f"{name:18} {registry.answers[name]} [{words}]")


def _need_gpu(table: str, takes: Sequence[str]) -> None:
    import torch

    if not torch.cuda.is_available():
        flow = [f", {name} only runs the flow" for name in ("--smoke", "--tiny") if name in takes]
        raise UsageError(
            f"{table} is measured on an NVIDIA GPU, and torch sees none here; `bench cpu` measures the CPU{''.join(flow)}"
        )


def _run(command: list[str], quiet: bool) -> int:
    """Run a script, its output on stderr (`quiet`: only if it fails); returns its exit status, 130 if it was interrupted."""
    where: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if not quiet:
        say(" ".join(command))
        sys.stderr.flush()
        where = {"stdout": sys.stderr.fileno()}
    # In a group of its own: Ctrl-C reaches the script through this process alone, and not the processes that it measures in.
    child = subprocess.Popen([command[0], "-c", CHILD, *command[1:]], process_group=0, **where)
    try:
        said, _ = child.communicate()
    except (KeyboardInterrupt, SystemExit) as stopped:  # Ctrl-C; SIGTERM (app.py)
        child.send_signal(signal.SIGINT)
        try:
            child.communicate()  # it may have gigabytes of temporary files to remove
        except KeyboardInterrupt:
            child.kill()
            child.communicate()
        if isinstance(stopped, SystemExit):
            raise
        return EXIT_INTERRUPTED
    if quiet and child.returncode not in (0, EXIT_INTERRUPTED):
        typer.echo(said[-4000:], err=True)  # lines of our own script
    return child.returncode


def _interrupted(file: Path, new: bool) -> NoReturn:
    say(f"interrupted; what was measured is in {file}" if new else "interrupted; nothing new was measured")
    raise InterruptedBench(EXIT_INTERRUPTED)
