"""The command `plan`: what an evaluation will take on this machine, before anything long starts.

Prints sizes, rates measured here, seconds of every path by stage, and whether memory, disks and GPU suffice. Exit code 1 when they
do not. Nothing is downloaded, generated, encoded or left on a disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from maxsim_eval.cli.options import AsJson, NoBars, require_counts
from maxsim_eval.cli.output import console, print_json
from maxsim_eval.cli.sources import COMMANDS
from maxsim_eval.errors import EXIT_GATE, UsageError
from maxsim_eval.planning.costs import Rate, Rates
from maxsim_eval.planning.plan import Plan, Room, make_plan
from maxsim_eval.quantities import bytes_of, size_text, time_text

if TYPE_CHECKING:
    from maxsim_eval.planning.sizes import FoundSizes

SCHEMA = "maxsim-eval/plan/1"


def plan(
    source: Annotated[str, typer.Argument(help="beir, real-mm-rag, local or demo.")],
    dataset: Annotated[str, typer.Argument(help="Name of the dataset (local: or its path).")] = "small",
    data_dir: Annotated[Path, typer.Option(help="Folder of datasets (BEIR layout).")] = Path("datasets"),
    cache_dir: Annotated[Path, typer.Option(help="Folder of the HDF5 embedding cache.")] = Path("embeddings_cache"),
    out: Annotated[Path, typer.Option(help="Folder below which reports go: its disk is looked at.")] = Path("results"),
    encoder: Annotated[str | None, typer.Option(help="As of the evaluation. Default: its default.")] = None,
    paths: Annotated[str, typer.Option(help="Comma-separated, as of the evaluation.")] = "fp32,fp16,int8",
    k: Annotated[int, typer.Option("--k", help="Documents kept for each query.")] = 100,
    device: Annotated[str, typer.Option(help="Where scores would be computed: auto, cpu, cuda, cuda:1, ...")] = "auto",
    split: Annotated[str | None, typer.Option(help="Split of the judgements.")] = None,
    limit_queries: Annotated[int | None, typer.Option(help="As of the evaluation.")] = None,
    limit_documents: Annotated[int | None, typer.Option(help="As of the evaluation.")] = None,
    limit_seed: Annotated[int, typer.Option(help="As of the evaluation.")] = 0,
    processes: Annotated[int, typer.Option(help="Processes torchrun would start on this machine.")] = 1,
    memory_budget: Annotated[str | None, typer.Option(help="GPU memory for blocks in flight, as 8GB.")] = None,
    readers: Annotated[int, typer.Option(help="Threads that read the cache, in each process.")] = 8,
    as_json: AsJson = False,
    quiet: NoBars = False,
) -> None:
    """Say what an evaluation will take on this machine. Exit code 1 when memory, disk or GPU do not suffice.

    Example: python evaluate.py plan beir nq --encoder colbertv2
    """
    from maxsim_eval.environment import resolve_device
    from maxsim_eval.planning.rates import measure
    from maxsim_eval.planning.room import read_room
    from maxsim_eval.planning.sizes import find_sizes
    from maxsim_eval.scoring.scoring import check_paths

    names = check_paths([name.strip() for name in paths.split(",") if name.strip()])
    if not names:
        raise UsageError("--paths: got none, need at least one")
    limits = {"queries": limit_queries, "documents": limit_documents}
    numbers = {"k": k, "processes": processes, "readers": readers}
    numbers |= {f"limit-{side}": limit for side, limit in limits.items() if limit is not None}
    require_counts(numbers, *numbers)
    device = resolve_device(device, quiet=True)
    budget = None if memory_budget is None else bytes_of(memory_budget)
    name = encoder or (COMMANDS[source][2] if source in COMMANDS else "lexical")
    started = time.perf_counter()
    found = find_sizes(
        source,
        dataset,
        name,
        data_dir=data_dir,
        cache_dir=cache_dir,
        split=split,
        limits=limits,
        seed=limit_seed,
        quiet=quiet or as_json,
    )
    start = time.perf_counter() - started
    rates, resident = measure(
        found.sizes,
        names,
        entry=found.entry,
        lengths=found.lengths,
        folder=cache_dir,
        device=device,
        k=k,
        readers=readers * processes,
    )
    room = read_room(cache_dir, out, device, resident)
    made = make_plan(found.sizes, rates, room, names, k=k, processes=processes, memory_budget=budget, start=start)
    answer = Answer(found, name, device, rates, room, made)
    if as_json:
        print_json(answer.as_json())
    else:
        answer.render(console())
    if not made.fits:
        raise typer.Exit(EXIT_GATE)


def _rate_text(rate: Rate | None, unit: str) -> str:
    if rate is None:
        return "not measured"
    if unit == "B":
        return f"{size_text(rate.value)}/s"
    value, prefixes = rate.value, iter(("K", "M", "G", "T", "P"))
    prefix = ""
    while value >= 1000:
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}/s"


@dataclass(frozen=True)
class Answer:
    """A plan with what it was made from, as JSON or as tables."""

    found: FoundSizes
    encoder: str
    device: str
    rates: Rates
    room: Room
    plan: Plan

    def as_json(self) -> dict[str, Any]:
        """Everything the tables say and more; rates in bytes, operations or pairs a second."""
        from maxsim_eval.environment import environment

        made = asdict(self.plan)
        return {
            "schema": SCHEMA,
            "fits": self.plan.fits,
            "task": {**self.found.task, "encoder": self.encoder},
            **made,
            "sizes": {**made["sizes"], "stored_bytes": self.plan.sizes.stored},
            "rates": asdict(self.rates),
            "room": asdict(self.room),
            "notes": list(self.found.notes),
            "environment": environment(self.device),
        }

    def render(self, console: Console) -> None:
        """Print the tables and the verdict."""
        sizes, made, task = self.plan.sizes, self.plan, self.found.task
        about = "" if sizes.exact else "about "
        console.print(Text(f"{task['source']}/{task['dataset']} {task['split']}, encoder {self.encoder}", style="bold"))
        for note in self.found.notes:
            console.print(Text(note, style="yellow"))
        console.print(
            Text(
                f"{sizes.queries:,} queries of {about}{sizes.query_tokens:,} tokens, {sizes.documents:,} documents of {about}"
                f"{sizes.document_tokens:,} tokens, d = {sizes.dim}; {self._state()}"
            )
        )
        for title, heads, rows in (
            ("Documents in bytes", ["", "size"], [[form, size_text(count)] for form, count in made.bytes.items()]),
            ("Rates measured now", ["", "rate", "how"], list(self._rate_rows())),
            (f"Seconds ({made.processes} process{'es' if made.processes > 1 else ''})", *self._path_rows()),
            ("Does it fit?", ["", "needed", "available", "", ""], [list(row) for row in self._check_rows()]),
        ):
            console.print(_table(title, heads, rows))
        for line in self._verdict():
            console.print(Text(line))

    def _state(self) -> str:
        sizes, cached = self.plan.sizes, self.room.in_page_cache
        if not sizes.encoded:
            return f"to be encoded into {size_text(sizes.stored)} of {sizes.form}; every path reads that"
        now = "" if cached is None else f", {cached:.0%} of it in memory now"
        return f"in the cache as {sizes.form}, {size_text(sizes.stored)}{now}; every path reads that"

    def _rate_rows(self) -> Iterator[list[str]]:
        rates = self.rates
        for name, rate, unit in (
            ("disk", rates.disk, "B"),
            ("page cache to buffer", rates.host, "B"),
            ("memory copy", rates.memory, "B"),
            *((("host to GPU", rates.link, "B"),) if rates.device == "cuda" else ()),
            ("writing", rates.output, "B"),
            ("top-k", rates.topk, "scores"),
            ("comparison", rates.compare, "scores"),
        ):
            yield [name, _rate_text(rate, unit), "" if rate is None else rate.how]
        for name, path in rates.paths.items():
            yield [f"{name}: score", _rate_text(path.score, "op"), path.score.how]
            if path.prepare is not None:
                yield [f"{name}: prepare", _rate_text(path.prepare, "B"), path.prepare.how]

    def _path_rows(self) -> tuple[list[str], list[list[str]]]:
        names = list(dict.fromkeys(stage.name for path in self.plan.paths for stage in path.stages))
        rows = []
        for name in names:
            row = [name]
            for path in self.plan.paths:
                found = [stage for stage in path.stages if stage.name == name]
                row.append(time_text(found[0].seconds) if found else "-")
            rows.append(row)
        rows.append(["bound by", *(path.bound for path in self.plan.paths)])
        rows.append(["expected", *(time_text(path.seconds) for path in self.plan.paths)])
        return ["", *(path.name for path in self.plan.paths)], rows

    def _check_rows(self) -> Iterator[list[str]]:
        for check in self.plan.checks:
            verdict = {True: "yes", False: "NO", None: ""}[check.ok]
            count = str if check.what == "GPUs" else size_text
            yield [check.what, count(check.needed), count(check.available), verdict, check.note]

    def _verdict(self) -> Iterator[str]:
        made = self.plan
        if made.kept_rows:
            yield (
                f"full scores of {made.kept_rows:,} queries are kept; comparing them takes {time_text(made.compare)} after "
                "the paths"
            )
        yield f"in all {time_text(made.total)}, {time_text(made.start)} of it loading; metrics and reports are not counted"
        for line in made.unknown:
            yield f"not known: {line}"
        short = [check.what for check in made.checks if check.ok is False]
        yield f"NO, it does not fit: not enough {', '.join(short)}" if short else "it fits"


def _table(title: str, heads: list[str], rows: list[list[str]]) -> Table:
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, head in enumerate(heads):
        drawn.add_column(Text(head), justify="left" if index == 0 or head in ("how", "") else "right")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
