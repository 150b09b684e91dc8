"""The commands of the embedding cache: `encode`, `inspect`, `convert` and `cache ls | rm | gc`."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from maxsim_eval.cli.options import (
    ANSWERS,
    CACHE,
    DATA,
    LIMITS,
    MODEL,
    OF_SOURCES,
    PLACES,
    AsJson,
    CacheDir,
    Quiet,
    Split,
    collection,
    encoder_option,
    loading_options,
    model_options,
    require_counts,
    with_options,
)
from maxsim_eval.cli.output import answer, console, print_json, say, say_last
from maxsim_eval.cli.sources import default_encoder
from maxsim_eval.errors import UsageError
from maxsim_eval.printing import printable, shown

if TYPE_CHECKING:
    from maxsim_eval.cache.embeddings import Embeddings
    from maxsim_eval.cache.housekeeping import Listed

Words = Annotated[list[str], typer.Argument(help="Folder of an entry (or one above several), or a source and a dataset.")]
OfEncoder = Annotated[str | None, typer.Option("--encoder", help="Only entries of this encoder.")]
OfRole = Annotated[str | None, typer.Option("--role", help="Only query or only document embeddings.")]
Yes = Annotated[bool, typer.Option("--yes", help="Remove without asking.")]

cache = typer.Typer(
    name="cache",
    help="List what the embedding cache holds, and free it.\n\n\b\nExample:\n  python evaluate.py cache ls",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def encode(
    source: str, dataset: str, *, encoder: str | None, device: str, data_dir: Path, cache_dir: Path, **given: Any
) -> None:
    """Fill the cache with the embeddings of a dataset's documents and queries; nothing is scored.

    An interrupted run goes on with the shards that are missing. Under torchrun every process encodes some, each on its own GPU.
    Options of the model default to the encoder's own; all but --device, --batch-size and --trust-remote-code make another entry,
    which an evaluation finds only with the same ones. With --limit-documents only those of evaluations with that limit.

    Example: python evaluate.py encode beir scifact --encoder hf:/models/my-encoder
    """
    from maxsim_eval.cache.embeddings import embeddings_by
    from maxsim_eval.data.loading import Unread
    from maxsim_eval.data.subsets import limit_task
    from maxsim_eval.environment import resolve_device
    from maxsim_eval.processes.world import joined, several
    from maxsim_eval.types import Task

    options = model_options(given)
    require_counts(given, "limit_queries", "limit_documents")
    limits = {side: given.pop(f"limit_{side}") for side in ("queries", "documents", "seed")}
    as_json, quiet = given.pop("as_json"), given.pop("quiet")
    given |= loading_options(given)
    if not several():
        resolve_device(device, quiet=quiet)  # before anything is loaded
    unread = Unread(source, dataset, {"data_dir": data_dir, "quiet": quiet, **given})
    name = encoder or default_encoder(source)
    before: set[Path] = set()
    began = 0.0

    def tasks() -> tuple[Task, Task]:
        nonlocal before, began
        task = unread()
        before, began = set(cache_dir.glob("*/*/*/[0-9]*.h5")), time.monotonic()
        return task, limit_task(task, **limits)

    with joined(device, say_last) as world:
        found = embeddings_by(
            world, tasks, name, cache_dir, of=unread.there, device=world.device(device), quiet=quiet, **options
        )
        if found is not None:
            _say_encoded(found, before, time.monotonic() - began, world.size, as_json)


def _say_encoded(found: Embeddings, before: set[Path], seconds: float, processes: int, as_json: bool) -> None:
    from maxsim_eval.cache.selection import whole

    made = []
    for role, entry in (("documents", whole(found.documents)), ("queries", found.queries)):
        new = [shard for shard in entry.shards if shard.path not in before]
        row = {"role": role, "rows": entry.documents, "tokens": entry.tokens, "dim": entry.dim}
        row |= {"dtype": str(entry.dtype).removeprefix("torch."), "shards": len(entry.shards), "new_shards": len(new)}
        made.append({**row, "origin": entry.manifest["provenance"].get("origin", ""), "folder": str(entry.folder)})
    if as_json:
        about_all = {"seconds": round(seconds, 3), "processes": processes}
        print_json({"schema": "maxsim-eval/encode/1", "entries": made, **about_all})
        return
    for row in made:
        how = f"new shards: {row['new_shards']} of {row['shards']}"
        if not row["new_shards"]:
            how = "was imported" if row["origin"] == "imported" else "was in the cache"
        about = f"{row['rows']:,} rows, {row['tokens']:,} tokens, d = {row['dim']}, {row['dtype']}"
        answer(f"{row['role']}: {about}; {how}: {row['folder']}")
    answer(f"{seconds:.1f} s" + (f", {processes} processes" if processes > 1 else ""))


_MODEL_DEVICE = {
    "device": (
        Annotated[str, typer.Option(help="Where the model runs: auto, cpu, cuda, cuda:1, ... (torchrun: cpu or cuda)")],
        "auto",
    )
}
with_options(
    encode,
    collection(),
    encoder_option(),
    _MODEL_DEVICE,
    MODEL,
    PLACES,
    {"split": (Split, None)},
    LIMITS,
    OF_SOURCES,
    ANSWERS,
)


def inspect(
    what: Words,
    encoder: OfEncoder = None,
    role: OfRole = None,
    cache_dir: CacheDir = CACHE,
    verify: Annotated[bool, typer.Option("--verify", help="Also check every stored value, copies included.")] = False,
    lengths: Annotated[bool, typer.Option("--lengths", help="Only list each id and its number of tokens (patches).")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what cache entries hold: sizes, lengths, norms, NaN, quantised copies, provenance. Reads them once, whole.

    Example: python evaluate.py inspect beir scifact --encoder lexical --verify
    """
    from maxsim_eval.cache.entries import open_entry
    from maxsim_eval.cache.housekeeping import chosen
    from maxsim_eval.cache.inspecting import inspect_entry

    folders = chosen(cache_dir, what, encoder, role, what="inspect")
    if lengths:
        if verify or as_json:
            raise UsageError("--lengths: got it with --verify or --json, need it alone: it lists ids and numbers, by tabs")
        for folder in folders:
            entry = open_entry(folder)
            for name, count in zip(entry.ids(), entry.lengths().tolist(), strict=True):
                typer.echo(f"{printable(name)}\t{count}")
        return
    found = []
    for folder in folders:
        found.append(inspect_entry(folder, verify=verify, quiet=quiet))
        if not as_json:
            found[-1].render(console())
    if as_json:
        print_json(found[0].as_json() if len(found) == 1 else [one.as_json() for one in found])


def convert(
    what: Words,
    *,
    to: Annotated[
        str,
        typer.Option(help="Comma-separated: int8-token, int8-document, ...; or the path that reads it: int8, fp8."),
    ],
    encoder: OfEncoder = None,
    role: OfRole = None,
    cache_dir: CacheDir = CACHE,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write quantised copies beside document embeddings: paths int8, int8-document, int8-corpus and fp8 then read those.

    Kinds: int8-token, int8-document, int8-corpus (what one scale is for), int8-token-affine, int8-document-affine (with an
    offset; no path reads them), fp8-document. The embeddings themselves stay.

    Example: python evaluate.py convert beir scifact --encoder lexical --to int8-token
    """
    from maxsim_eval.cache.converting import convert_entry
    from maxsim_eval.cache.copy_shards import get_kind
    from maxsim_eval.cache.entries import open_entry
    from maxsim_eval.cache.housekeeping import chosen
    from maxsim_eval.scoring.paths import our_paths

    copies = {name: path.copy for name, path in our_paths().items() if path.copy is not None}
    kinds = list(dict.fromkeys(copies.get(name.strip(), name.strip()) for name in to.split(",") if name.strip()))
    if not kinds:
        raise UsageError("--to: got none, need at least one, as int8-token")
    for name in kinds:
        get_kind(name)
    folders = chosen(cache_dir, what, encoder, role or ("document" if len(what) == 2 else None), what="convert")
    if len(folders) > 1:
        raise UsageError("convert: these entries fit, name the folder of one: " + ", ".join(map(str, folders)))
    entry, made = open_entry(folders[0]), []
    if entry.manifest["provenance"].get("role") == "query":
        raise UsageError(f"convert: {entry.folder} holds queries, which no path reads from a copy; name the documents' entry")
    for name in kinds:
        done = convert_entry(entry, name, quiet=quiet)
        whole = entry.tokens * entry.dim * entry.dtype.itemsize
        row: dict[str, Any] = {"kind": name, "tokens": entry.tokens, "bytes": done.copy.stored_bytes, "entry_bytes": whole}
        row |= {"ratio": round(done.ratio, 4) if entry.tokens else None, "scale": done.copy.scale()}
        made.append({**row, "kept": done.kept, "written": done.written, "replaced": done.replaced})
        if as_json:
            continue
        stored = str(entry.dtype).removeprefix("torch.")
        ratio = f": {done.ratio:.2f}x smaller" if entry.tokens else ""
        answer(
            f"{name}: {entry.tokens:,} tokens, {done.copy.stored_bytes / 1e6:,.2f} MB beside {whole / 1e6:,.2f} MB of {stored}{ratio}"
            f" (shards: {done.written} written, {done.replaced} stale replaced, {done.kept} kept)"
        )
    if as_json:
        print_json({"schema": "maxsim-eval/convert/1", "folder": str(entry.folder), "copies": made})
    else:
        answer(str(entry.folder))


@cache.command("ls")
def list_(cache_dir: CacheDir = CACHE, as_json: AsJson = False) -> None:
    """List the entries of the cache, largest first.

    Example: python evaluate.py cache ls
    """
    from maxsim_eval.cache.housekeeping import list_entries

    found = sorted(list_entries(cache_dir), key=lambda entry: (-entry.file_bytes, str(entry.folder)))
    if as_json:
        rows = [{**asdict(entry), "folder": str(entry.folder), "state": entry.state} for entry in found]
        print_json({"schema": "maxsim-eval/cache-ls/1", "entries": rows})
        return
    if found:
        _entry_table(found, cache_dir)
    answer(f"{len(found)} entries, {sum(entry.file_bytes for entry in found) / 1e6:,.2f} MB in {cache_dir}")


def _entry_table(found: list[Listed], cache_dir: Path) -> None:
    heads = ("entry", "encoder", "documents", "tokens", "MB", "copies", "written", "state")
    table = Table(*heads, box=box.SIMPLE)
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    table.columns[0].overflow = "fold"
    for entry in found:
        tokens = "" if entry.tokens is None else f"{entry.tokens:,}"
        place = entry.folder.relative_to(cache_dir) if entry.folder.is_relative_to(cache_dir) else entry.folder
        size, age = f"{entry.file_bytes / 1e6:,.2f}", _age(entry.age_seconds)
        cells = (str(place), entry.encoder, f"{entry.documents:,}", tokens, size, " ".join(entry.copies), age, entry.state)
        table.add_row(*map(shown, cells))
    console().print(table)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@cache.command("rm")
def remove(
    what: Words,
    encoder: OfEncoder = None,
    role: OfRole = None,
    cache_dir: CacheDir = CACHE,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove entries with their copies. Asks first; never touches what is no entry of the cache folder.

    Example: python evaluate.py cache rm beir scifact --encoder lexical
    """
    from maxsim_eval.cache.housekeeping import chosen, folder_bytes, remove_entry, require_entry

    folders = chosen(cache_dir, what, encoder, role, what="cache rm")
    for folder in folders:  # before anything is removed
        require_entry(cache_dir, folder)
        say(f"{folder}: {folder_bytes(folder) / 1e6:,.2f} MB")
    agreed = yes or _confirmed(f"Remove {len(folders)} entries?")
    freed = sum(remove_entry(cache_dir, folder) for folder in folders) if agreed else 0
    if as_json:
        removed = [str(folder) for folder in folders] if agreed else []
        print_json({"schema": "maxsim-eval/cache-rm/1", "removed": removed, "freed_bytes": freed})
    elif agreed:
        answer(f"{len(folders)} entries removed, {freed / 1e6:,.2f} MB freed")
    else:
        answer("nothing was removed")


def _confirmed(question: str) -> bool:
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer:
        raise UsageError("cache rm: nobody to ask, need --yes; nothing was removed")
    return answer.strip().lower() in ("y", "yes")


@cache.command("gc")
def collect_garbage(
    cache_dir: CacheDir = CACHE,
    data_dir: Annotated[Path, typer.Option(help="Folder of the datasets: leftovers of loads and downloads.")] = DATA,
    partial: Annotated[bool, typer.Option("--partial", help="Also entries that lack shards and that nobody writes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this nothing is removed, only listed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what nobody can use any more: leftovers of writers and loads that died, copies of changed shards; with --yes remove it.

    Example: python evaluate.py cache gc --partial --yes
    """
    from maxsim_eval.cache.housekeeping import collect, find_garbage

    found, problems = find_garbage(cache_dir, data_dir, partial=partial)
    freed = collect(cache_dir, found) if yes else 0
    if as_json:
        rows = [{"path": str(item.path), "why": item.why, "bytes": item.file_bytes} for item in found]
        print_json(
            {"schema": "maxsim-eval/cache-gc/1", "removed": yes, "garbage": rows, "left": problems, "freed_bytes": freed}
        )
        return
    for item in found:
        answer(f"{item.path}: {item.why}, {item.file_bytes / 1e6:,.2f} MB")
    for line in problems:
        say(f"left alone: {line}")
    total = sum(item.file_bytes for item in found) / 1e6
    if yes:
        answer(f"{len(found)} removed, {freed / 1e6:,.2f} MB freed")
    else:
        answer(f"{len(found)} to remove, {total:,.2f} MB; nothing was removed (--yes does it)")
