"""`evaluate_embeddings`: embeddings that are in memory already, evaluated without a dataset or files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.api import DEFAULT_PATHS, evaluate
from maxsim_eval.comparison.metrics import DEFAULT_METRICS, judgements
from maxsim_eval.data.assembling import Part, judgement_warnings
from maxsim_eval.data.beir import Judgements
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.scoring.own_functions import Chosen
from maxsim_eval.types import Qrels, Result, Role, Task
from maxsim_kernels import Packed

Embeddings = Packed | Tensor | Sequence[Tensor]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def evaluate_embeddings(
    queries: Embeddings,
    documents: Embeddings,
    qrels: Qrels | None = None,
    query_ids: Sequence[str] | None = None,
    document_ids: Sequence[str] | None = None,
    paths: Iterable[Chosen] = DEFAULT_PATHS,
    *,
    name: str = "embeddings",
    k: int = 100,
    metrics: Iterable[str] = DEFAULT_METRICS,
    out_dir: Path | str | None = None,
    device: str = "auto",
    memory_budget: int | None = None,
    quiet: bool = False,
) -> Result:
    """Score embeddings by several paths and compare them; no dataset, encoder or file is needed.

    The tokens go through a temporary cache folder. Importing the same tokens from files gives the same results.

    Args:
        queries, documents: token embeddings: a list of tensors `[tokens, d]`, a `Packed`, or a tensor `[n, tokens, d]` without
            padding; float16, bfloat16 or float32, one width d, on any device.
        qrels: query id -> document id -> relevance. None: no metrics, only how far the paths' rankings and scores are apart.
        query_ids, document_ids: in the order of the embeddings; by default their positions, "0", "1", ...
        name: what the Result calls the encoder.
        paths, k, metrics, out_dir, device, memory_budget, quiet: as in `evaluate`.

    Raises:
        UsageError: shapes, dtypes, ids or names that do not fit. DataError: values that are not finite; ids with white space where
            `out_dir` is given; relevances that are no whole numbers; judgements none of which names a query and a document given
            here, or none of which is above 0. Other judgements that do not fit become warnings of the Result, as with files.
    """
    sides: dict[Role, Packed] = {"query": _packed("queries", queries), "document": _packed("documents", documents)}
    widths = {role: tokens.values.shape[1] for role, tokens in sides.items()}
    if widths["query"] != widths["document"]:
        raise UsageError(f"queries: d = {widths['query']}, documents: d = {widths['document']}; need one width")
    ids = {
        "query": _ids("query_ids", query_ids, len(sides["query"])),
        "document": _ids("document_ids", document_ids, len(sides["document"])),
    }
    judged = None if qrels is None else judgements(qrels)
    kept = [n for n, one in enumerate(ids["query"]) if judged is None or one in judged]
    said: tuple[str, ...] = ()
    if judged is not None:
        parts = Part(ids["query"], (), "query_ids"), Part(ids["document"], (), "document_ids")
        said = tuple(judgement_warnings("qrels", Judgements(judged), *parts))
        judged = {ids["query"][n]: judged[ids["query"][n]] for n in kept}
    task = Task(
        source="memory",
        dataset=name,
        split="given",
        query_ids=[ids["query"][n] for n in kept],
        queries=[str(n) for n in kept],
        document_ids=ids["document"],
        documents=[str(n) for n in range(len(ids["document"]))],
        qrels=judged or {},
        warnings=said,
    )
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="maxsim-eval-"))
        return evaluate(
            task,
            _Given(name, widths["query"], sides),
            paths,
            k=k,
            cache_dir=cache,
            out_dir=out_dir,
            metrics=metrics if judged is not None else (),
            device=device,
            memory_budget=memory_budget,
            quiet=quiet,
        )


@dataclass
class _Given:
    """An encoder over given embeddings: each item is the row number of one, as text."""

    name: str
    dim: int
    sides: Mapping[Role, Packed]
    revision: str = ""

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {"dtype": str(self.sides[role].dtype).removeprefix("torch."), "given": id(self)}

    def prepare(self, documents: Sequence[Any]) -> None: ...

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """The tokens of these rows, on the CPU."""
        tokens = self.sides[role]
        rows = torch.tensor([int(item) for item in items], dtype=torch.int64, device=tokens.values.device)
        return tokens.select(rows).compact().to("cpu")


def _packed(what: str, given: Any) -> Packed:
    """One side as `Packed`."""
    if isinstance(given, Tensor) and given.dim() == 3:
        count, length, width = given.shape
        offsets = torch.arange(count + 1, device=given.device) * length
        found = Packed(given.reshape(count * length, width), offsets)
    elif isinstance(given, Packed):
        found = given.compact()  # a view's buffer may hold anything between its documents
    elif isinstance(given, Sequence) and given and all(isinstance(one, Tensor) and one.dim() == 2 for one in given):
        shapes = {(one.shape[1], one.dtype, one.device) for one in given}
        if len(shapes) > 1:
            raise UsageError(
                f"{what}: tensors of {len(shapes)} widths, dtypes or devices, need one: {sorted(map(str, shapes))[:3]}"
            )
        lengths = torch.tensor([0, *(len(one) for one in given)], device=given[0].device)
        found = Packed(torch.cat(list(given)), lengths.cumsum(0))
    else:
        raise UsageError(
            f"{what}: got {_shown(given)}, need a list of tensors [tokens, d], a Packed, or a tensor [n, tokens, d]"
        )
    if found.dtype not in _DTYPES:
        raise UsageError(f"{what}: got {found.dtype}, need float16, bfloat16 or float32")
    if not bool(found.values.isfinite().all()):
        raise DataError(f"{what}: hold a value that is not finite")
    return found


def _shown(given: Any) -> str:
    """What was given instead of embeddings, for a message; of a list, its first member that is no tensor `[tokens, d]`."""
    if isinstance(given, Tensor):
        return str(list(given.shape))
    if not isinstance(given, Sequence) or isinstance(given, str):
        return type(given).__name__
    odd = next((one for one in given if not isinstance(one, Tensor) or one.dim() != 2), None)
    inside = f"a tensor {list(odd.shape)}" if isinstance(odd, Tensor) else type(odd).__name__
    return f"a {type(given).__name__} with {inside} in it" if given else f"an empty {type(given).__name__}"


def _ids(what: str, given: Sequence[str] | None, count: int) -> list[str]:
    ids = [str(number) for number in range(count)] if given is None else list(given)
    if len(ids) != count:
        raise UsageError(f"{what}: got {len(ids)}, need one for each of {count} embeddings")
    if len(set(ids)) != len(ids) or not all(isinstance(one, str) and one for one in ids):
        raise UsageError(f"{what}: need texts, each once")
    return ids
