"""The command `import`: token embeddings that were computed elsewhere, checked and put into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maxsim_eval.cli.options import CACHE, DATA, AsJson, CacheDir, DataDir, Quiet, Split
from maxsim_eval.cli.output import answer, print_json
from maxsim_eval.errors import UsageError

if TYPE_CHECKING:
    from maxsim_eval.cache.entries import Entry


def import_(
    source: Annotated[str, typer.Argument(help="Source of the dataset: beir, local, demo, ...")],
    dataset: Annotated[str, typer.Argument(help="Name of the dataset the embeddings belong to.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files (.pt, .npz, .npy, .safetensors) or folders; names that differ in a number only are chunks."),
    ] = None,
    *,
    encoder: Annotated[str, typer.Option(help="Name of the encoder that made them; evaluate with the same name.")],
    queries: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of query embeddings that does not name its role; again for chunks."),
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of document embeddings that does not name its role; again for chunks."),
    ] = None,
    query_ids: Annotated[
        Path | None, typer.Option(help="File of query ids, one a line, where the embeddings hold none.")
    ] = None,
    document_ids: Annotated[
        Path | None, typer.Option(help="File of document or page ids, one a line, where the embeddings hold none.")
    ] = None,
    drop_zero_tokens: Annotated[
        bool, typer.Option("--drop-zero-tokens", help="Leave out tokens that are exactly zero: padding, at either end.")
    ] = False,
    require_normalised: Annotated[
        bool, typer.Option("--require-normalised", help="Refuse tokens that are no unit vectors.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Revision of the model, recorded in the report.")] = "",
    data_dir: DataDir = DATA,
    cache_dir: CacheDir = CACHE,
    split: Split = None,
    page_queries: Annotated[
        bool, typer.Option("--page-queries", help="The queries are pages, as with --queries pages in an evaluation.")
    ] = False,
    rephrase: Annotated[
        int | None, typer.Option(help="real-mm-rag: the wording the query embeddings are of, 0 (as written) to 3.")
    ] = None,
    dataset_revision: Annotated[str | None, typer.Option(help="real-mm-rag: commit of the dataset's repository.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace embeddings imported earlier.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Put precomputed token embeddings into the cache, checked against the dataset.

    Example: python evaluate.py import beir scifact colbertv2.pt --encoder colbertv2
    """
    from maxsim_eval.data.loading import has_local, load_task
    from maxsim_eval.importing.importing import import_embeddings

    given = {"query": queries, "document": documents}
    roles: dict[Any, Any] = {role: paths[0] if len(paths) == 1 else paths for role, paths in given.items() if paths}
    if roles and files:
        raise UsageError("import: got files and --queries/--documents; name every file once, one way or the other")
    if not roles and not files:
        raise UsageError("import: got no file, need the embedding files (or --queries FILE and --documents FILE)")
    ids: dict[Any, Path] = {role: path for role, path in (("query", query_ids), ("document", document_ids)) if path is not None}
    # A local dataset need not exist: a file with ids and qrels makes it.
    # What is asked of it beyond that, loading refuses: a dataset made here has one split, `test`, and text queries.
    asked = {"queries": "pages" if page_queries else None, "rephrase": rephrase, "revision": dataset_revision}
    loading: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    alone = source == "local" and not loading and split in (None, "test") and not has_local(dataset, data_dir)
    task = None if alone else load_task(source, dataset, data_dir=data_dir, split=split, quiet=quiet, **loading)
    entries = import_embeddings(
        roles or list(files or ()),
        task,
        source=source,
        dataset=dataset,
        encoder_name=encoder,
        cache_dir=cache_dir,
        data_dir=data_dir,
        revision=revision,
        quiet=quiet,
        replace=replace,
        ids=ids,
        drop_zero_tokens=drop_zero_tokens,
        require_normalised=require_normalised,
    )
    if as_json:
        print_json({"schema": "maxsim-eval/import/1", "entries": [_facts(role, entry) for role, entry in entries.items()]})
        return
    for role, entry in entries.items():
        row = _facts(role, entry)
        about = f"{row['rows']} rows, {row['tokens']} tokens, d = {row['dim']}, {entry.dtype}"
        answer(f"{row['role']}: {about}: {entry.folder}")
        for note in row["notes"]:
            answer(f"  note: {note}")


def _facts(role: str, entry: Entry) -> dict[str, Any]:
    return {
        "role": "queries" if role == "query" else "documents",
        "rows": entry.documents,
        "tokens": entry.tokens,
        "dim": entry.dim,
        "dtype": str(entry.dtype).removeprefix("torch."),
        "folder": str(entry.folder),
        "notes": list(entry.manifest["provenance"].get("notes", [])),
    }
