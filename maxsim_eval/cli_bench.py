"""The command `bench`: one table of the paper, measured here by the scripts of `kernels/benchmarks/`, and shown.

The scripts belong to the repository, not to the distribution: an installed package without its checkout is told so. A table that
needs trained encoders is an evaluation, and the message says which.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from maxsim_eval.cli_options import AsJson, NoBars
from maxsim_eval.cli_output import print_json, say
from maxsim_eval.errors import UnknownNameError, UsageError

FOLDER = Path(__file__).resolve().parents[1] / "kernels" / "benchmarks"
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # what the command does not know is the script's


@dataclass(frozen=True)
class Bench:
    """A script with its arguments, the file it writes below the output folder, and the page's name of the table."""

    script: str
    arguments: tuple[str, ...]
    file: str
    shows: str


def _paper(*names: str) -> dict[str, Bench]:
    return {name: Bench("paper.py", ("--only", name), "paper.json", name) for name in names}


TABLES: dict[str, Bench] = {
    **_paper("fwd", "fwd_abs", "nocg", "fwd_chunked", "chunked_sweep", "twoaxis", "mem", "op_abl", "multiquery", "varlen"),
    **_paper("int8", "int8_B", "fat_emb_cliff", "splitd_perf", "traffic", "precision"),
    "scaling": Bench("paper.py", ("--only", "scaling"), "paper.json", "mem"),
    "chunks": Bench("paper.py", ("--only", "chunks"), "paper.json", "chunk grid"),
    "tiles": Bench("paper.py", ("--only", "tiles"), "paper.json", "tile table"),
    "compiled_memory": Bench("paper.py", ("--only", "memory_compiled"), "paper.json", "mem"),
    "all": Bench("paper.py", (), "paper.json", "fast_p"),
    "second": Bench("second.py", (), "second.json", "second harness"),
    "train": Bench("training.py", ("--only", "steps"), "training_steps.json", "train"),
    "bwd_abl": Bench("training.py", ("--only", "ablation"), "training.json", "bwd_abl"),
    "bwd_breakdown": Bench("training.py", ("--only", "parts"), "training.json", "bwd_breakdown"),
    "bwd_mem": Bench("training.py", ("--only", "steps"), "training_steps.json", "bwd_mem"),
    "training_parity": Bench("parity.py", (), "parity.json", "training_parity"),
    "chamfer": Bench("chamfer.py", (), "chamfer.json", "chamfer"),
    "ooc": Bench("streaming.py", ("--only", "colpali"), "streaming.json", "ooc"),
    "pairs": Bench("forward.py", ("--only", "pairs"), "forward.json", "tiny pairs"),
    "cpu": Bench("cpu_forward.py", (), "cpu.json", "CPU"),
}
EVALUATIONS = {
    "beir_ndcg": "beir arguana --paths fp32,fp16 (and scidocs)",
    "beir_scale": "beir hotpotqa --paths fp32,fp16 (and nq)",
    "colpali_ndcg": "real-mm-rag finreport --paths fp32,fp16 (and its other sets)",
    "int8_realmmrag": "real-mm-rag finreport --paths fp32,int8 (and its other sets)",
}
FILES = {"cpu.json": "cpu/forward.json"}  # where the page looks for a file; else below h200/


def bench(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="A table of the paper; list: what there is.")] = "list",
    out: Annotated[Path, typer.Option(help="Folder of the raw figures; runs add to what is there.")] = Path("results/bench"),
    scripts: Annotated[Path, typer.Option(help="The repository's kernels/benchmarks.")] = FOLDER,
    quiet: NoBars = False,
    as_json: AsJson = False,
) -> None:
    """Measure a table of the paper on this machine, every method checked first, and show it.

    Further options go to the script, as --no-compile, --peers none, --runs 20, --seconds 300, --smoke. Raw figures are kept after
    every row, and a row that is there is not measured again.

    Example: python evaluate.py bench fwd --no-compile
    """
    if table == "list":
        _list(as_json)
        return
    if table in EVALUATIONS:
        raise UsageError(
            f"{table} needs trained encoders and their data, so it is an evaluation: evaluate.py {EVALUATIONS[table]}"
        )
    if table not in TABLES:
        raise UnknownNameError("table", table, [*TABLES, *EVALUATIONS])
    found = TABLES[table]
    if not (scripts / found.script).is_file():
        raise UsageError(
            f"bench needs the benchmark scripts of the repository, and {scripts} has no {found.script}: the installed package does "
            "not carry them. Run it in a checkout, or give a checkout's kernels/benchmarks with --scripts"
        )
    smoke = "--smoke" in context.args
    if not smoke and table != "cpu":
        _need_gpu(table)
    file = out / found.file
    command = [sys.executable, str(scripts / found.script), *found.arguments, "--json", str(file), *context.args]
    ended = _run(command, quiet)
    if not file.exists():
        raise UsageError(f"{table}: {found.script} ended with {ended} and wrote no figures")
    if not smoke:
        name = FILES.get(found.file, f"h200/{found.file}")
        show = [sys.executable, str(scripts / "page.py"), "--table", found.shows, "--files", f"{name}={file}"]
        ended = subprocess.run([*show, *(["--as-json"] if as_json else [])], check=False).returncode or ended
    elif as_json:
        print_json({"table": table, "smoke": True, "figures": str(file), "ended": ended})
    if not quiet:
        say(f"raw figures: {file}")
    raise typer.Exit(ended)


def _list(as_json: bool) -> None:
    """The tables and what measures them."""
    if as_json:
        print_json({"tables": {name: asdict(held) for name, held in TABLES.items()}, "evaluations": EVALUATIONS})
        return
    for name, held in TABLES.items():
        typer.echo(f"{name:18} {' '.join((held.script, *held.arguments))}")
    for name, words in EVALUATIONS.items():
        typer.echo(f"{name:18} an evaluation: evaluate.py {words}")


def _need_gpu(table: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"{table} is measured on an NVIDIA GPU, and torch sees none here; `bench cpu` measures the CPU, --smoke only runs the flow"
        )


def _run(command: list[str], quiet: bool) -> int:
    """Run a script, what it prints on stderr; with `quiet` only where it failed."""
    if not quiet:
        say(" ".join(command))
        sys.stderr.flush()
        return subprocess.run(command, check=False, stdout=sys.stderr.fileno()).returncode
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        say(done.stdout[-4000:])
    return done.returncode
