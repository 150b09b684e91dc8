"""The toolkit's nouns: Task, Encoder, Run, Result. Plain frozen dataclasses and Protocols; a Result also shows itself."""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from maxsim_kernels import Packed

Role = Literal["query", "document"]
Qrels = Mapping[str, Mapping[str, int]]  # query id -> document id -> relevance


@dataclass(frozen=True)
class Task:
    """A retrieval task: what is searched, what is asked, what was judged relevant.

    `queries` and `documents` hold texts (or images) in the order of their ids; that order is the document index of every
    score, and breaks ties. Ids are texts, each once on its side, without white space where runs are to be written; `qrels` judges
    these queries and no others. `exclude_same_id` is BEIR's rule for ArguAna and Quora: a document whose id is the query's id is
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
    tool): trec_eval's rule applies, score descending and ties by document id descending. `tag` is the run name inside its file
    where that is another path's: a certified run's file is byte for byte that of the path it certifies.
    """

    name: str
    rankings: Mapping[str, Sequence[tuple[str, float]]]
    ordered: bool = True
    tag: str = ""


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
    search: Mapping[str, Any] | None = None  # of a certified path: the work of certifying


@dataclass(frozen=True, repr=False)
class Result:
    """One evaluation, as `docs/result.md` documents it; `report/result_json.py` converts it.

    Shown in a notebook it is a table of paths; `to_dataframe` gives every figure, `report` writes the files of a report.
    """

    task: Mapping[str, Any]
    encoder: Mapping[str, Any]
    k: int
    paths: Mapping[str, PathResult]
    environment: Mapping[str, Any]
    command: Sequence[str]
    reference: str | None = "fp32"
    created: str = ""

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, one row a path and metric: value, change against the reference, its interval, p, verdict.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        rows = []
        for name, path in self.paths.items():
            parity = path.parity or {}
            for metric, value in path.metrics.items():
                found = (parity.get("statistics") or {}).get(metric) or {}
                row = {"path": name, "metric": metric, "value": value, "change": (parity.get("delta") or {}).get(metric)}
                rows.append(row | {key: found.get(key) for key in ("low", "high", "p_adjusted", "verdict")})
        columns = ["path", "metric", "value", "change", "low", "high", "p_adjusted", "verdict"]
        return importlib.import_module("pandas").DataFrame(rows, columns=columns)

    def report(self, folder: Path | str) -> Path:
        """Write report.html, report.md, the CSV files and result.json into a folder; returns the page's path.

        Run files are not written: result.json names them in the evaluation's own folder alone, elsewhere `run` is null.

        Raises:
            UsageError: the folder holds runs of another evaluation. DataError: it cannot be written.
        """
        importlib.import_module("maxsim_eval.report.writing").write_again(self, folder)
        return Path(folder) / "report.html"

    def _table(self) -> list[list[str]]:
        """A row of text for each path: its first metrics, and how near it is to the reference."""
        metrics = list(dict.fromkeys(metric for path in self.paths.values() for metric in path.metrics))
        chosen = [metric for metric in ("nDCG@10", "Recall@100") if metric in metrics] or metrics[:2]
        rows = [["path", *chosen, "Spearman", "top-10 overlap"]]
        for name, path in self.paths.items():
            parity = path.parity or {}
            near = ((parity.get("spearman") or {}).get("mean"), (parity.get("overlap") or {}).get("@10"))
            values = [path.metrics.get(metric) for metric in chosen]
            rows.append([name, *("-" if value is None else f"{value:.4f}" for value in (*values, *near))])
        return rows

    def __repr__(self) -> str:
        what = f"{self.task.get('source')}/{self.task.get('dataset')}, {self.encoder.get('name')}, k={self.k}"
        head, *rows = self._table()
        paths = [" ".join([row[0], *(f"{of} {cell}" for of, cell in zip(head[1:], row[1:], strict=True))]) for row in rows]
        return f"Result({what}: {'; '.join(paths)})"

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        what = f"{self.task.get('source')}/{self.task.get('dataset')}, {self.encoder.get('name')}, top {self.k}"
        return f"<p>{html.escape(what)}</p><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
