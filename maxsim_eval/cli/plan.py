"""The command `plan`: what an evaluation will take, on this machine or on one with GPUs of a table, before anything long starts.

The answer first, then the seconds of every phase, and what memory and disks must hold. Exit code 1 when they do not. Nothing is
downloaded, generated or left on a disk.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from maxsim_eval.cli.options import (
    ANSWERS,
    LIMITS,
    PLACES,
    SCORING,
    Split,
    collection,
    encoder_option,
    names_of,
    require_counts,
    with_options,
)
from maxsim_eval.cli.output import console, print_json
from maxsim_eval.cli.sources import default_encoder
from maxsim_eval.errors import EXIT_GATE, UsageError
from maxsim_eval.planning.costs import PathPlan, Rates
from maxsim_eval.planning.hardware import GPUS, Machine
from maxsim_eval.planning.plan import Check, Plan, Room, make_plan
from maxsim_eval.printing import shown
from maxsim_eval.quantities import about_text, bytes_of, size_text

if TYPE_CHECKING:
    from maxsim_eval.planning.sizes import FoundSizes

SCHEMA = "maxsim-eval/plan/3"
HERE = "this machine"
DISK = "3GB/s"  # assumed of a machine that is not here
COLUMNS = (
    "in all: wait (for documents: what reading, and the rest, takes beside the scoring) + score; of a range, a figure within it"
)
BUSY = 0.25  # part of the total that unsteady rates may add before the answer says that the machine is busy

_HERE = {
    "out": (Annotated[Path, typer.Option(help="Folder below which reports go: its disk is looked at.")], Path("results")),
    **encoder_option(),
    "split": (Split, None),
    **{name: SCORING[name] for name in ("paths", "k", "device", *LIMITS, "memory_budget", "readers")},
    "processes": (Annotated[int, typer.Option(help="Processes torchrun would start on this machine.")], 1),
}
_ELSEWHERE = {
    "gpu": (Annotated[str | None, typer.Option(help=f"Plan for a machine with this GPU: {', '.join(GPUS)}.")], None),
    "gpus": (Annotated[int | None, typer.Option(help="With --gpu: how many, a process each. Default: 1.")], None),
    "disk": (Annotated[str | None, typer.Option(help=f"With --gpu: what its disk reads. Default: {DISK}.")], None),
    "link": (Annotated[str | None, typer.Option(help="With --gpu: from memory to a GPU. Default: as the GPU's.")], None),
    "ram": (Annotated[str | None, typer.Option(help="With --gpu: its memory. Default: every path reads the disk.")], None),
}


def plan(source: str, dataset: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Say what an evaluation will take. Exit code 1 when memory, disk or GPU do not suffice.

    Example: python evaluate.py plan beir nq --encoder colbertv2

    Example: python evaluate.py plan beir nq --encoder colbertv2 --gpu h200 --gpus 4 --disk 3GB/s
    """
    from maxsim_eval.codecs.names import names_step
    from maxsim_eval.environment import resolve_device
    from maxsim_eval.planning.around import compare_rate, finish_rate
    from maxsim_eval.planning.sizes import find_sizes, rule_of
    from maxsim_eval.report.writing import write_reports
    from maxsim_eval.scoring.certified import require_certifiable
    from maxsim_eval.scoring.own_functions import check_paths, find_paths
    from maxsim_eval.scoring.paths import our_paths

    names = check_paths(names_of(given["paths"]))
    codecs = [name for name in names if name not in our_paths() and names_step(name)]
    if codecs:
        raise UsageError(f"--paths: plan knows no rates of codecs, got {', '.join(codecs)}; name paths alone")
    given["device"] = "cpu" if given["gpu"] else resolve_device(given["device"], quiet=True)
    require_certifiable(find_paths(names), given["device"], candidates=False)
    if not names:
        raise UsageError("--paths: got none, need at least one")
    require_counts(given, "k", "processes", "readers", "gpus", "limit_queries", "limit_documents")
    elsewhere, k = _elsewhere(given), given["k"]
    budget = None if given["memory_budget"] is None else bytes_of(given["memory_budget"])
    name = given["encoder"] or default_encoder(source)
    limits = {side: given[f"limit_{side}"] for side in ("queries", "documents")}
    where = {option: given[option] for option in ("data_dir", "cache_dir", "split")}
    silent = quiet or as_json
    found = find_sizes(
        source, dataset, name, **where, limits=limits, seed=given["limit_seed"], quiet=silent, device=given["device"]
    )
    count = elsewhere.gpus if elsewhere else given["processes"]
    start = time.process_time()  # the imports too, which the evaluation does as well
    start += _launching() if count > 1 else 0.0
    if elsewhere is None:
        found, rates, room = _measured(found, names, given)
    else:
        encode = elsewhere.encode(found.sizes, rule_of(name).parameters)
        rates, room = replace(elsewhere.rates(names, given["readers"]), encode=encode), elsewhere.room()
    finish = finish_rate(found.sizes, names, k, write_reports)
    rates = replace(rates, compare=compare_rate(found.sizes.documents, given["device"], budget), finish=finish)
    made = make_plan(found.sizes, rates, room, names, k=k, processes=count, memory_budget=budget, start=start)
    answer = Answer(found, name, str(elsewhere or f"{HERE}, {given['device']}, measured now"), made)
    if as_json:
        print_json(answer.as_json(given["device"]))
    else:
        answer.render()
    if not made.fits:
        raise typer.Exit(EXIT_GATE)


with_options(plan, collection("small"), PLACES, _HERE, _ELSEWHERE, ANSWERS)


def _launching() -> float:
    """Seconds until torchrun starts its processes: it loads torch before each of them does."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch.distributed.run"], check=False, capture_output=True)
    return time.perf_counter() - began


def _measured(found: FoundSizes, names: Sequence[str], given: Mapping[str, Any]) -> tuple[FoundSizes, Rates, Room]:
    """Sizes (of a sample, where it was encoded), rates and room of this machine."""
    from maxsim_eval.planning.around import encoding
    from maxsim_eval.planning.rates import measure
    from maxsim_eval.planning.room import read_room

    found, encode = encoding(found)
    folder, device, threads = given["cache_dir"], given["device"], given["readers"] * given["processes"]
    of_entry = {"entry": found.entry, "lengths": found.lengths, "queries": found.queries, "folder": folder}
    rates, resident = measure(found.sizes, names, **of_entry, device=device, k=given["k"], readers=threads)
    return found, replace(rates, encode=encode), read_room(folder, given["out"], device, resident)


def _elsewhere(given: Mapping[str, Any]) -> Machine | None:
    """The machine that the options describe; None: this one."""
    if given["gpu"] is None:
        for name in (name for name in _ELSEWHERE if given[name] is not None):
            raise UsageError(f"--{name}: got {given[name]!r} without --gpu, need --gpu NAME too: this machine is measured")
        return None
    if given["processes"] > 1:
        raise UsageError(f"--processes: got {given['processes']} with --gpu, need --gpus: each of them has a process")
    return Machine(
        given["gpu"],
        given["gpus"] or 1,
        disk=bytes_of(given["disk"] or DISK, "--disk", rate=True),
        link=None if given["link"] is None else bytes_of(given["link"], "--link", rate=True),
        ram=None if given["ram"] is None else bytes_of(given["ram"], "--ram"),
    )


@dataclass(frozen=True)
class Answer:
    """A plan with what it was made from, as JSON or in a few lines."""

    found: FoundSizes
    encoder: str
    where: str
    plan: Plan

    def as_json(self, device: str) -> dict[str, Any]:
        """Everything, in full figures: seconds, bytes; rates a second, in the units of `Rates`."""
        from maxsim_eval.environment import environment

        return {
            "schema": SCHEMA,
            "answer": self.sentence(),
            "where": self.where,
            "fits": self.plan.fits,
            "task": {**self.found.task, "encoder": self.encoder},
            **asdict(self.plan),
            "notes": list(self.found.notes),
            "environment": environment(device),
        }

    def sentence(self) -> str:
        """How long in all, whether it fits, what takes the most and what bounds that."""
        made = self.plan
        short = [check.what for check in made.checks if check.ok is False]
        fits = f"NO, it does not fit: not enough {', '.join(short)}" if short else "it fits"
        if made.total is None:
            return f"How long is not known; {fits}."
        longest = max(made.phases, key=lambda phase: phase.seconds or 0.0)
        bound = f" (bound by {longest.bound})" if longest.stages else ""
        left = ", without encoding" if "encode" in made.unknown else ""
        seconds = f"{about_text(made.total, made.more)} in all"
        if made.more > BUSY * made.total and self.where.startswith(HERE):
            seconds = f"{about_text(made.total)} in all ({about_text(made.total, made.more)}: the machine is busy)"
        return f"About {seconds}{left}; {fits}; {longest.name} takes the most{bound}."

    def render(self) -> None:
        """Print the sentence, the phases, the needs, and the notes."""
        sizes, task, screen = self.plan.sizes, self.found.task, console()
        about = "" if sizes.exact else "about "
        lines = [
            f"{task['source']}/{task['dataset']} {task['split']}, encoder {self.encoder}: {sizes.queries:,} queries of {about}"
            f"{sizes.query_tokens:,} tokens, {sizes.documents:,} documents of {about}{sizes.document_tokens:,}, d = {sizes.dim}; "
            f"{size_text(sizes.stored)} {'cached' if sizes.encoded else 'to be encoded'} as {sizes.form}",
            f"on {self.where}",
        ]
        screen.print(shown(self.sentence(), "bold"), *map(shown, lines), sep="\n")
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        for head in ("phase", "in all", "wait", "score", "bound by"):
            table.add_column(head, justify="left" if head in ("phase", "bound by") else "right")
        for phase in self.plan.phases:
            table.add_row(shown(phase.name), about_text(phase.seconds, phase.more), *_parts(phase), phase.bound)
        screen.print(table)
        if any(phase.stages for phase in self.plan.phases):
            screen.print(shown(COLUMNS))
        screen.print(shown("needs " + "; ".join(map(_check_text, self.plan.checks))))
        unknown = [f"not known: {', '.join(self.plan.unknown)}"] if self.plan.unknown else []
        for line in (*self.found.notes, *unknown):
            screen.print(shown(line if len(line) < 180 else f"{line[:150]} ... (all of it: --json)", "yellow"))


def _parts(phase: PathPlan) -> tuple[str, str]:
    """A path's seconds as text: beyond its scoring, which overlaps the reading, and of its scoring; empty for other phases."""
    if not phase.stages or phase.seconds is None:
        return "", ""
    scored = sum(phase.of(stage) for stage in ("prepare", "score", "top-k"))
    return about_text(max(phase.seconds - scored, 0.0)), about_text(scored)


def _check_text(check: Check) -> str:
    text = str if check.what == "GPUs" else size_text
    return f"{check.what} {text(check.needed)}" + ("" if check.available is None else f" of {text(check.available)}")
