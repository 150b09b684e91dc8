"""The command `explain`: which document tokens a score comes from, as a table, as JSON and as a picture."""

from __future__ import annotations

import re
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from maxsim_eval.cli.options import (
    LIMITS,
    MODEL,
    OF_SOURCES,
    PLACES,
    AsJson,
    NoBars,
    Split,
    collection,
    encoder_option,
    loading_options,
    model_options,
    require_counts,
    with_options,
    within_64_bits,
)
from maxsim_eval.cli.output import answer, console, print_json
from maxsim_eval.cli.sources import COMMANDS, default_encoder
from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.printing import shown

if TYPE_CHECKING:
    from maxsim_eval.explain.explaining import Explanation
    from maxsim_eval.explain.ranking import QueryExplanation
    from maxsim_eval.types import PatchGrid

_MOST, _WORDS = 160, 6  # letters of a text, and query tokens, where only a part is shown


def explain(
    source: str, dataset: str, *, query: str, document: str | None, encoder: str | None, data_dir: Path, **given: Any
) -> None:
    """Explain the score of one (query, document) pair: the winning document token and the contribution of every query token.

    Without --document: the query's top hit, its best relevant document and the first relevant one beyond rank 10, in short.

    Embeddings are read from the cache; nothing is encoded. For a page image --out draws the heat map over the page. Its patches are
    known from the encoder's processor; else a square number of tokens is taken for a square grid, and --grid says it otherwise.

    Example: python evaluate.py explain beir scifact --query 3 --encoder lexical

    Example: python evaluate.py explain beir scifact --query 3 --document 14717500 --encoder lexical --path int8 --out pair.svg
    """
    from maxsim_eval.data.loading import load_task
    from maxsim_eval.environment import resolve_device
    from maxsim_eval.explain.explaining import explain_pair
    from maxsim_eval.explain.pictures import check_picture, write_picture
    from maxsim_eval.explain.ranking import explain_query
    from maxsim_eval.scoring.own_functions import check_paths

    if source not in COMMANDS:
        raise UnknownNameError("source", source, COMMANDS)
    loading = loading_options(given)
    options = model_options(given)
    out, token, split = given.pop("out"), given.pop("query_token"), given.pop("split")
    as_json, quiet = given.pop("as_json"), given.pop("quiet")
    grid = _grid(given.pop("grid"), given.pop("grid_first"))
    require_counts(given, "limit_queries", "limit_documents")
    check_paths([given["path"]])
    given["device"] = resolve_device(given["device"], quiet=quiet)
    if out is not None:
        check_picture(out)
    elif token is not None:
        raise UsageError("--query-token: needs --out, the picture whose heat map it is for")
    if document is None and (out is not None or grid is not None):
        raise UsageError(f"{'--out' if out is not None else '--grid'}: needs --document, the one it is for")
    name = encoder or default_encoder(source)
    task = load_task(source, dataset, data_dir=data_dir, split=split, quiet=quiet, **loading)
    if document is None:
        ranked = explain_query(task, name, query, encoder_options=options, quiet=quiet, **given)
        print_json(ranked.as_json()) if as_json else _render_query(ranked)
        return
    found = explain_pair(task, name, query, document, encoder_options=options, grid=grid, quiet=quiet, **given)
    if out is not None:
        write_picture(found, out, token)
    if as_json:
        print_json(found.as_json())
    else:
        _render(found)
        if out is not None:
            answer(f"picture: {out}")


def _grid(text: str | None, first: int) -> PatchGrid | None:
    from maxsim_eval.types import PatchGrid

    if text is None:
        if first:
            raise UsageError("--grid-first: needs --grid")
        return None
    said = re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", text.strip())
    if said is None:
        raise UsageError(f"--grid: got {text[:60]!r}, need ROWSxCOLUMNS, as 32x32")
    return PatchGrid(int(said[1]), int(said[2]), first)


def _render(found: Explanation) -> None:
    from maxsim_eval.explain.pictures import title, token_text, winner_text

    screen = console()
    screen.print(shown(title(found), "bold"))
    origin = f"{found.source}/{found.dataset} {found.split}, encoder {found.encoder['name']}"
    relevance = "not judged" if found.relevance is None else f"relevance {found.relevance}"
    counts = f"{len(found.tokens)} query tokens, {found.document_tokens} document tokens"
    screen.print(shown(f"{origin}; {relevance}; {counts}{_stems(found)}"))
    for what, text in (("query", found.query_text), ("document", found.document_text)):
        if text is not None:
            screen.print(shown(f"{what}: {_short(text)}"))
    table = Table("#", "query token", "contribution", "share", "document token", box=box.SIMPLE_HEAD)
    for column in (0, 2, 3):
        table.columns[column].justify = "right"
    for match in found.tokens:
        added = "-" if match.contribution is None else f"{match.contribution:.6f}"
        share = "-" if match.share is None else f"{match.share:.1%}"
        cells = (str(match.position), token_text(match.text), added, share, winner_text(match, found.patches))
        table.add_row(*map(shown, cells))
    screen.print(table)
    screen.print(shown(f"sum of contributions {found.total:.6f}"))
    for note in found.notes:
        screen.print(shown(f"note: {note}", "yellow"))


def _stems(found: Explanation) -> str:
    """A note that tokens are stems, which look like misspelt words; empty for encoders without stems."""
    return "; tokens are stems of words" if found.encoder["name"] == "lexical" and found.texts_known else ""


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MOST else words[:_MOST].rpartition(" ")[0] + " ..."


def _render_query(ranked: QueryExplanation) -> None:
    """Each document in three lines: what it is, its text, the words that win."""
    from maxsim_eval.explain.pictures import token_text, winner_text

    screen = console()
    if not ranked.documents:
        answer(f"query {ranked.query}: nothing is retrieved")
        return
    first = ranked.documents[0].explanation
    screen.print(shown(f"query {ranked.query}: {_short(first.query_text or '(no text)')}", "bold"))
    about = f"{first.source}/{first.dataset} {first.split}, encoder {first.encoder['name']}, path {first.path}"
    screen.print(shown(f"{about}; {ranked.found} of {ranked.relevant} relevant documents are among the first 10"))
    legend = "query token > place and text of the document token that matches it best, what that adds to the score"
    screen.print(shown(f"{legend}{_stems(first)}"))
    for one in ranked.documents:
        found = one.explanation
        rank = "not retrieved" if one.rank is None else f"rank {one.rank}"
        relevance = "not judged" if found.relevance is None else f"relevance {found.relevance}"
        score = "" if found.score is None else f", score {found.score:.4f}"
        screen.print(shown(f"{one.why}: {found.document} ({rank}, {relevance}{score})", "bold"))
        if found.document_text is not None:
            screen.print(shown(f"  {_short(found.document_text)}"))
        best = sorted(
            (token for token in found.tokens if token.contribution is not None), key=lambda token: -(token.contribution or 0)
        )
        pairs = (
            f"{token_text(token.text)} > {winner_text(token, found.patches)} {token.contribution:.3f}"
            for token in best[:_WORDS]
        )
        screen.print(
            shown(f"  {'; '.join(pairs) or 'no tokens'}" + (f"; {len(best) - _WORDS} more" if len(best) > _WORDS else ""))
        )
    for note in first.notes:
        screen.print(shown(f"note: {note}", "yellow"))


_PAIR = {
    "query": (Annotated[str, typer.Option(help="Id of the query.")], Parameter.empty),
    "document": (Annotated[str | None, typer.Option(help="Id of the document or page. Default: three of them.")], None),
    "path": (Annotated[str, typer.Option(help="Scoring path to explain: fp32, fp16, int8, ...")], "fp32"),
    "out": (Annotated[Path | None, typer.Option(help="Also draw it: a name that ends in .svg, .png or .html.")], None),
    "grid": (Annotated[str | None, typer.Option(help="Patches of a page, ROWSxCOLUMNS, where nothing else says.")], None),
    "grid_first": (Annotated[int, typer.Option(callback=within_64_bits, help="Document token that --grid begins at.")], 0),
    "query_token": (
        Annotated[
            int | None,
            typer.Option(
                callback=within_64_bits, help="Heat map of the similarity to this query token (by its number) instead."
            ),
        ],
        None,
    ),
    "device": (Annotated[str, typer.Option(help="Where the pair is scored: auto, cpu, cuda, cuda:1, ...")], "auto"),
}
with_options(
    explain,
    collection(),
    _PAIR,
    encoder_option(),
    {"split": (Split, None)},
    PLACES,
    LIMITS,
    OF_SOURCES,
    MODEL,
    {"as_json": (AsJson, False), "quiet": (NoBars, False)},
)
