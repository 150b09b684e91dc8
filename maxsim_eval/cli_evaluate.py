"""What the evaluating commands share: their options, and the evaluation itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from maxsim_eval.errors import UsageError

DataDir = Annotated[Path, typer.Option(help="Folder of datasets (BEIR layout).")]
CacheDir = Annotated[Path, typer.Option(help="Folder of the HDF5 embedding cache.")]
Out = Annotated[Path | None, typer.Option(help="Where the report goes. Default: results/<source>-<dataset>-<encoder>/.")]
EncoderName = Annotated[
    str, typer.Option("--encoder", help="lexical, hf:<id or path>, or the name embeddings were imported under.")
]
Paths = Annotated[
    str, typer.Option(help="Comma-separated: fp32, fused-fp32, fp16, bf16, int8, int8-document, int8-corpus, fp8.")
]
K = Annotated[int, typer.Option("--k", help="Documents kept for each query.")]
Device = Annotated[str, typer.Option(help="Where scores are computed: cpu, cuda, cuda:1, ... (torchrun: cpu or cuda)")]
Split = Annotated[str | None, typer.Option(help="Split of the judgements. Default: test (a card may say otherwise).")]
LimitQueries = Annotated[int | None, typer.Option(help="Score only this many judged queries (a seeded sample).")]
LimitDocuments = Annotated[
    int | None, typer.Option(help="Search only this many documents: all judged for the queries, the rest a seeded sample.")
]
LimitSeed = Annotated[int, typer.Option(help="Seed of both samples: it and the ids decide what is drawn, nothing else.")]
Candidates = Annotated[Path | None, typer.Option(help="Rerank: score only the pairs that this TREC run lists.")]
MemoryBudget = Annotated[
    str | None, typer.Option(help="GPU memory for documents on their way and their scores, as 8GB. Default: up to 2GiB.")
]
Readers = Annotated[int, typer.Option(help="Threads that read the cache, in each process.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget the finished parts of an interrupted evaluation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the Result as JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no tables.")]

DATA = Path("datasets")
CACHE = Path("embeddings_cache")
PATHS = "fp32,fp16,int8"


def evaluate_task(
    source: str,
    *,
    dataset: str,
    data_dir: Path,
    cache_dir: Path,
    out: Path | None,
    encoder: str,
    paths: str,
    k: int,
    device: str,
    split: str | None,
    limit_queries: int | None,
    limit_documents: int | None,
    limit_seed: int,
    candidates: Path | None,
    memory_budget: str | None,
    readers: int,
    fresh: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Every evaluation command; its keywords are the options of each, which hand over all their arguments by `locals()`."""
    from maxsim_eval.api import Settings, check_device, run
    from maxsim_eval.cli_plan import bytes_of
    from maxsim_eval.distributed import joined, several
    from maxsim_eval.loaders import load_task
    from maxsim_eval.report import render_console, to_json
    from maxsim_eval.scoring import check_paths
    from maxsim_eval.types import Task

    names = check_paths([name.strip() for name in paths.split(",") if name.strip()])
    numbers = {"k": k, "readers": readers, "limit-queries": limit_queries, "limit-documents": limit_documents}
    for option, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"--{option}: got {value}, need 1 or more")
    if not several():
        check_device(device)  # before anything is loaded
    settings = Settings(
        encoder=encoder,
        paths=names,
        k=k,
        cache_dir=cache_dir,
        limit_queries=limit_queries,
        limit_documents=limit_documents,
        limit_seed=limit_seed,
        candidates=candidates,
        device=device,
        memory_budget=None if memory_budget is None else bytes_of(memory_budget),
        readers=readers,
        fresh=fresh,
        command=_command(),
        quiet=quiet,
    )
    folder = Path()

    def load() -> tuple[Task, Path]:
        nonlocal folder
        task = load_task(source, dataset, data_dir=data_dir, split=split, quiet=quiet)
        folder = out or Path("results") / re.sub(r"[^A-Za-z0-9._-]+", "-", f"{source}-{task.dataset}-{Path(encoder).name}")
        return task, folder

    with joined(device, _say_last) as world:
        result = run(settings, load)
        if not world.leader:
            return
        if as_json:
            sys.stdout.write(to_json(result))
        elif not quiet:
            console = Console()
            render_console(result, console)
            console.print(f"report: {folder}/report.md, {folder}/result.json, {folder}/runs/", soft_wrap=True, highlight=False)


def _say_last(line: str) -> None:
    """The one message of a failure of several processes; a follower's stderr is closed to anything else."""
    print(line, file=sys.__stderr__, flush=True)


def _command() -> list[str]:
    """The command as it was given, without the folder the program lies in."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
