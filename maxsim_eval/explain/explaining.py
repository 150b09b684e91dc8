"""Why a document has its score: the winning document token of every query token, and what each adds to the score.

`explain_pair` reads the two rows from the cache and runs the path's own operator on them: once for the winners, and once with every
query token as a query of its own, whose score is that token's contribution, `max_j <Q_i, D_j>`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.corpus import Corpus, largest_of
from maxsim_eval.cache.embeddings import Embeddings, cached_embeddings, check_widths
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.environment import resolve_device
from maxsim_eval.errors import DataError, UsageError, did_you_mean
from maxsim_eval.scoring.certified import certified_by
from maxsim_eval.scoring.finite import one_row, reason
from maxsim_eval.scoring.job import find_copies
from maxsim_eval.scoring.own_functions import find_paths
from maxsim_eval.scoring.paths import PATHS, ScoringPath, check_range, our_paths
from maxsim_eval.scoring.sources import EmbeddingSource
from maxsim_eval.types import Encoder, PageGrids, PatchGrid, Role, Task, TokenTexts
from maxsim_kernels import Packed
from maxsim_kernels.streaming import device_blocks

SCHEMA = "maxsim-eval/explain/1"
_SEARCHED_IDS = 200_000  # beyond, looking for similar ids takes too long


@dataclass(frozen=True)
class TokenMatch:
    """A query token: what it adds to the score, and the document token that gives it (None: the document has none)."""

    position: int
    text: str | None
    contribution: float | None
    share: float | None  # of the score
    document_position: int | None
    document_text: str | None


@dataclass(frozen=True)
class Explanation:
    """One (query, document) pair, explained.

    `score` is the path's (None: the document has no tokens and is not retrieved). `similarities` `[Lq, Ld]` float32 are all
    products of the stored tokens in FP32, whatever the path. `patches` says which document tokens are patches of `page`,
    `grid_from` how that is known.
    """

    source: str
    dataset: str
    split: str
    encoder: Mapping[str, Any]
    path: str
    query: str
    document: str
    query_text: str | None
    document_text: str | None
    relevance: int | None
    score: float | None
    tokens: tuple[TokenMatch, ...]
    document_tokens: int
    notes: tuple[str, ...]
    patches: PatchGrid | None = None
    grid_from: str | None = None
    page: Any = field(default=None, repr=False)
    similarities: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32), repr=False)

    @property
    def total(self) -> float:
        """The contributions added up: the score, up to the rounding of a sum."""
        return math.fsum(token.contribution for token in self.tokens if token.contribution is not None)

    @property
    def texts_known(self) -> bool:
        """Whether any token says what it stands for."""
        return any(token.text is not None or token.document_text is not None for token in self.tokens)

    def patch_map(self, token: int | None = None) -> np.ndarray:
        """`[rows, columns]` float32 over the page: what each patch adds to the score, or its similarity to one query token.

        Raises:
            UsageError: no grid of patches is known, or no such token.
        """
        grid = self.patches
        if grid is None:
            raise UsageError("heat map: which document tokens are patches of the page is not known")
        found = np.zeros(self.document_tokens, np.float32)
        if token is None:
            for match in self.tokens:
                if match.document_position is not None and match.contribution is not None:
                    found[match.document_position] += match.contribution
        elif not 0 <= token < len(self.tokens):
            raise UsageError(f"query token: got {token}, need 0 to {len(self.tokens) - 1}")
        else:
            found = self.similarities[token]
        return found[grid.first : grid.first + grid.patches].reshape(grid.rows, grid.columns)

    def as_json(self) -> dict[str, Any]:
        """Everything but the page and the similarities, JSON-able."""
        plain = ("source", "dataset", "split", "path", "query", "document", "query_text", "document_text", "relevance", "score")
        patches = None
        if self.patches is not None:
            patches = {**asdict(self.patches), "known_from": self.grid_from, "contributions": self.patch_map().tolist()}
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in plain},
            "encoder": dict(self.encoder),
            "sum_of_contributions": self.total,
            "document_tokens": self.document_tokens,
            "tokens": [asdict(token) for token in self.tokens],
            "patches": patches,
            "notes": list(self.notes),
        }


def path_with_winners(name: str) -> ScoringPath:
    """The path of that name; `UsageError` where it has no winners to show."""
    found = find_paths([name])[name]
    if found.own:
        raise UsageError(f"path {name}: a function of your own gives scores alone, no winners; explain needs one of our paths")
    if found.codec is not None:
        raise UsageError(f"path {name}: a codec's tokens are not the document's; explain needs one of {', '.join(our_paths())}")
    return found


def brute_force(how: ScoringPath, stored: torch.dtype, device: str) -> ScoringPath:
    """The path that computes the scores in the run of `how`, for any document: `how` itself unless it is certified.

    A certified path's scan of a quantised copy only rules documents out; the scores in its run are another path's over the
    embeddings, which have the dtype `stored`.
    """
    return PATHS[certified_by(how.precision or stored, device)[0]] if how.certified else how


def explain_pair(
    task: Task,
    encoder: Encoder | str,
    query: str,
    document: str,
    *,
    path: str = "fp32",
    cache_dir: Path | str = "embeddings_cache",
    device: str = "auto",
    encoder_options: Mapping[str, Any] | None = None,
    grid: PatchGrid | None = None,
    limit_queries: int | None = None,
    limit_documents: int | None = None,
    limit_seed: int = 0,
    quiet: bool = False,
) -> Explanation:
    """Explain the score of one pair; embeddings come from the cache, and nothing is encoded.

    Args:
        task, encoder, encoder_options, limit_*: as of the evaluation (`api.evaluate`).
        query, document: ids.
        path: a name of `scoring.paths.our_paths`; a user's own function has no winners to show.
        device: where the pair is scored.
        grid: where a page's patches are among its tokens, instead of what the encoder says.
        quiet: no progress bar (`int8-corpus` passes over the corpus for its scale, unless a copy in the cache has it).

    Raises:
        UsageError: no such query or document (similar ids are named), a grid that does not fit, a user's function as path.
        DataError: embeddings that are not in the cache, or not finite. CacheError: a cache that is damaged.
    """
    how = path_with_winners(path)
    kept = limit_task(task, queries=limit_queries, documents=limit_documents, seed=limit_seed)
    row, place = place_of("query", query, task.query_ids), place_of("document", document, kept.document_ids)
    opened = Opened.of(task, kept, path, how, encoder, cache_dir, device=device, options=encoder_options, quiet=quiet)
    return opened.pair(row, place, grid)


@dataclass(frozen=True)
class Opened:
    """Embeddings of the cache, opened for any number of pairs of one path, `how`; `kept` is what is searched of the task."""

    task: Task
    kept: Task
    found: Embeddings
    corpus: Corpus
    path: str
    how: ScoringPath
    device: str

    @classmethod
    def of(
        cls,
        task: Task,
        kept: Task,
        path: str,
        how: ScoringPath,
        encoder: Encoder | str,
        cache_dir: Path | str,
        *,
        device: str,
        options: Mapping[str, Any] | None,
        quiet: bool,
    ) -> Opened:
        """Open what the cache holds of a task by an encoder of these `options`, to be scored by the path of this name."""
        device = resolve_device(device, quiet=quiet)
        found = cached_embeddings(task, encoder, cache_dir, kept=kept, device=device, **dict(options or {}))
        how = brute_force(how, found.documents.dtype, device)
        corpus = Corpus(found.documents, quiet, device, copies=find_copies([path] if how.copy else [], found.documents))
        return cls(task, kept, found, corpus, path, how, device)

    def pair(self, row: int, place: int, grid: PatchGrid | None = None) -> Explanation:
        """Explain a query, by its place in the task, and a document, by its place among those searched."""
        task, found, path = self.task, self.found, self.path
        query, document = task.query_ids[row], self.kept.document_ids[place]
        queries, tokens = one_row(found.queries, row), one_row(found.documents, place)
        check_widths(found, queries)
        score, winners, parts = _Pair(path, self.how, queries, tokens, self.corpus, place).run(self.device)
        items = (task.queries[row], self.kept.documents[place])
        notes = list(_notes(task, query, document, score))
        texts = {
            role: _texts(found, role, item, len(side.values), notes) for role, item, side in _sides(items, queries, tokens)
        }
        page = None if isinstance(items[1], str) else items[1]
        known = _grid(found, page, len(tokens.values), grid, notes) if page is not None else (None, None)
        if page is None and grid is not None:
            raise UsageError(f"grid: document {document!r} is a text, which has no patches")
        return Explanation(
            source=task.source,
            dataset=task.dataset,
            split=task.split,
            encoder=found.encoder,
            path=path,
            query=query,
            document=document,
            query_text=items[0] if isinstance(items[0], str) else None,
            document_text=items[1] if isinstance(items[1], str) else None,
            relevance=task.qrels.get(query, {}).get(document),
            score=score if math.isfinite(score) else None,
            tokens=tuple(_matches(score, winners, parts, texts)),
            document_tokens=len(tokens.values),
            notes=tuple(notes),
            patches=known[0],
            grid_from=known[1],
            page=page,
            similarities=(queries.values.float() @ tokens.values.float().T).numpy(),
        )


def place_of(what: str, name: str, ids: Sequence[str]) -> int:
    """Where an id is among others; `UsageError` with similar ones where it is not."""
    for place, one in enumerate(ids):
        if one == name:
            return place
    hint = did_you_mean(name, ids).strip() if len(ids) <= _SEARCHED_IDS else ""
    hint = hint or f"The first ids are {', '.join(map(repr, ids[:3]))}."
    raise UsageError(f"no {what} {name!r} among the {len(ids):,} here. {hint}")


@dataclass(frozen=True)
class _Pair:
    """A query, a document and the path that scores them: its name, and how."""

    path: str
    how: ScoringPath
    query: Packed
    document: Packed
    corpus: Corpus
    place: int

    def run(self, device: str) -> tuple[float, list[int], list[float]]:
        """The score, the winner of every query token (-1: none), and what each adds."""
        how = self.how
        for tokens in (self.query, self.document):
            if how.may_exceed(tokens):
                check_range(float(largest_of(tokens.values)))
        ready = self._document(device)
        whole = how.queries(self.query).to(device)
        count = len(self.query.values)
        alone = how.queries(Packed(self.query.values, torch.arange(count + 1))).to(device)
        scores, winners = cast(tuple[Tensor, Tensor], how.score(whole, ready, return_argmax=True))
        parts = cast(Tensor, how.score(alone, ready))[:, 0].cpu() if count else torch.empty(0)
        score = float(scores[0, 0])
        if math.isnan(score) or score == math.inf or (math.isinf(score) and len(self.document.values)):
            word = "NaN" if math.isnan(score) else "infinite"
            raise DataError(f"path {self.path}: {word} score; {reason(self.query.values, self.document.values)}")
        return score, winners[0, 0, :count].tolist(), parts.tolist()

    def _document(self, device: str) -> Any:
        """The document as the path reads it: from a quantised copy in the cache, which has the corpus's scale, or prepared now."""
        copy = self.corpus.copies.get(self.path)
        if copy is not None and len(self.document.values):
            with closing(device_blocks(copy.blocks([(self.place, self.place + 1)]), device, queries=1)) as blocks:
                return next(blocks)
        return EmbeddingSource(self.path, self.how, self.corpus).prepare(self.document.to(device))


def _sides(items: tuple[Any, Any], queries: Packed, tokens: Packed) -> list[tuple[Role, Any, Packed]]:
    return [("query", items[0], queries), ("document", items[1], tokens)]


def _notes(task: Task, query: str, document: str, score: float) -> list[str]:
    found = []
    if task.exclude_same_id and query == document:
        found.append("an evaluation of this dataset never retrieves a document for the query of the same id")
    if math.isinf(score):
        found.append("the document has no tokens: it is not retrieved")
    return found


def _texts(found: Embeddings, role: Role, item: Any, count: int, notes: list[str]) -> list[str] | None:
    """Texts of the tokens of one side; None, and a note, where they are not known."""
    name, side = found.encoder["name"], {"query": "query", "document": "document"}[role]
    if found.made_by is None:
        note = f"the embeddings of {name} were imported: what its tokens stand for is not known, positions are given alone"
        notes += [] if note in notes else [note]
        return None
    texts = found.made_by.token_texts(item, role) if isinstance(found.made_by, TokenTexts) else None
    if texts is None:
        notes.append(f"encoder {name} does not say what the tokens of this {side} stand for: positions are given alone")
        return None
    if len(texts) != count:
        notes.append(
            f"encoder {name} names {len(texts)} tokens of this {side} and the cache holds {count}: positions are given alone"
        )
        return None
    return texts


def _matches(
    score: float, winners: Sequence[int], parts: Sequence[float], texts: Mapping[Role, list[str] | None]
) -> list[TokenMatch]:
    asked, held = texts["query"], texts["document"]
    found = []
    for position, (winner, part) in enumerate(zip(winners, parts, strict=True)):
        share = part / score if math.isfinite(part) and math.isfinite(score) and score else None
        found.append(
            TokenMatch(
                position=position,
                text=None if asked is None else asked[position],
                contribution=part if math.isfinite(part) else None,
                share=share,
                document_position=None if winner < 0 else winner,
                document_text=None if held is None or winner < 0 else held[winner],
            )
        )
    return found


def _grid(
    found: Embeddings, page: Any, tokens: int, given: PatchGrid | None, notes: list[str]
) -> tuple[PatchGrid | None, str | None]:
    """Where the patches of a page are: as given, as the encoder says, else by the rule for square grids; None, with a note, if not."""
    if given is not None:
        if given.rows < 1 or given.columns < 1 or given.first < 0 or given.first + given.patches > tokens:
            raise UsageError(
                f"grid: got {given.rows} x {given.columns} patches from token {given.first} on, but the page has {tokens} tokens"
            )
        return given, "given"
    if isinstance(found.made_by, PageGrids):
        grid = found.made_by.page_grid(page)
        if grid is not None and grid.first + grid.patches <= tokens:
            return grid, "processor"
    side = math.isqrt(tokens)
    if tokens and side * side == tokens:
        notes.append(
            f"the page has {tokens} tokens: taken for {side} x {side} patches, row by row (nothing says so; --grid does)"
        )
        return PatchGrid(side, side), "square"
    notes.append(
        f"no heat map: the page has {tokens} tokens, which is no square number, and nothing says which are patches; "
        "--grid ROWSxCOLUMNS (and --grid-first) does"
    )
    return None, None
