"""The toolkit's nouns: Task, Encoder, Run, Result. Plain frozen dataclasses and Protocols; no behaviour beyond their own shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from maxsim_kernels import Packed

Role = Literal["query", "document"]
Qrels = Mapping[str, Mapping[str, int]]  # query id -> document id -> relevance


@dataclass(frozen=True)
class Task:
    """A retrieval task: what is searched, what is asked, what was judged relevant.

    `queries` and `documents` hold texts (or images) in the order of their ids; that order is the document index of every
    score, and breaks ties. `exclude_same_id` is BEIR's rule for ArguAna and Quora: a document whose id is the query's id is
    not retrieved. `warnings` were said once while loading and go into the report. `dtype` is what embeddings are stored in unless
    the user says otherwise (a card's: float16 for large sets); None: what the encoder yields.
    """

    source: str
    dataset: str
    split: str
    query_ids: Sequence[str]
    queries: Sequence[Any]
    document_ids: Sequence[str]
    documents: Sequence[Any]
    qrels: Qrels
    exclude_same_id: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    dtype: str | None = None

    @property
    def judged_pairs(self) -> int:
        """Number of (query, document) judgements, negatives included."""
        return sum(len(row) for row in self.qrels.values())


class Encoder(Protocol):
    """Turns texts or images into token embeddings, one ragged `Packed` a call.

    `fingerprint(role)` is JSON-able and holds everything but the texts that the embeddings of that role depend on (model id
    and revision, code version, prompt, maximum length, normalisation, dtype): it goes into the cache key.

    An encoder that knows what its tokens stand for also offers `TokenTexts`; one that reads pages, `PageGrids`.
    """

    name: str
    revision: str
    dim: int

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """Everything, texts aside, that decides the embeddings of this role."""
        ...

    def prepare(self, documents: Sequence[Any]) -> None:
        """Offer the corpus before anything is encoded (corpus statistics); most encoders need nothing."""
        ...

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """Encode items, in order: `Packed` with `len(items)` rows, on the CPU; an empty text gives an empty row."""
        ...


@runtime_checkable
class TokenTexts(Protocol):
    """What the tokens of an item stand for, as `encode` keeps them; nothing is embedded."""

    def token_texts(self, item: Any, role: Role) -> list[str] | None:
        """One text a token, in order; None where it cannot be told without loading or downloading a model."""
        ...


@dataclass(frozen=True)
class PatchGrid:
    """How a page's patches lie among its tokens: `rows` x `columns`, row by row, from token `first` on."""

    rows: int
    columns: int
    first: int = 0

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.rows * self.columns


@runtime_checkable
class PageGrids(Protocol):
    """Where the patches of a page are among the tokens that `encode` gives for it."""

    def page_grid(self, page: Any) -> PatchGrid | None:
        """The grid of a page image; None where the processor does not say."""
        ...


@dataclass(frozen=True)
class Run:
    """Ranked documents per query.

    `ordered=True` (our own runs): the list order is the ranking, whatever the scores' ties. `ordered=False` (a run of another
    tool): trec_eval's rule applies, score descending and ties by document id descending.
    """

    name: str
    rankings: Mapping[str, Sequence[tuple[str, float]]]
    ordered: bool = True


@dataclass(frozen=True)
class PathResult:
    """What one scoring path gave: metrics (means over judged queries), per-query values, seconds, parity to the reference."""

    metrics: Mapping[str, float]
    per_query: Mapping[str, Mapping[str, float]]  # metric -> query id -> value
    seconds: Mapping[str, float]
    run: str | None = None  # TREC run file, relative to the result file
    description: str = ""
    parity: Mapping[str, Any] | None = None  # None for the reference itself
    tie_bounds: Mapping[str, Any] | None = None  # metric -> low, high, queries_affected
    memory: Mapping[str, Any] | None = None  # host_peak_bytes, device_peak_bytes


@dataclass(frozen=True)
class Result:
    """One evaluation, as `docs/result.md` documents it; `report/result_json.py` converts it."""

    task: Mapping[str, Any]
    encoder: Mapping[str, Any]
    k: int
    paths: Mapping[str, PathResult]
    environment: Mapping[str, Any]
    command: Sequence[str]
    reference: str | None = "fp32"
    created: str = ""
