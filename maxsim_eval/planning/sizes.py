"""How large an evaluation is: exact where its embeddings are cached, estimated from texts or a card where not.

Reads only: nothing is encoded, generated or downloaded, and no model is loaded (`around.py` encodes a sample).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from maxsim_eval.cache.embeddings import cached_embeddings, chosen_rows, imported_entries
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.selection import Documents
from maxsim_eval.cache.sides import Contents, find_entry, provenances
from maxsim_eval.data.cards import load_card
from maxsim_eval.data.items import Pages
from maxsim_eval.data.loading import LOADERS, load_folder, load_task
from maxsim_eval.data.subsets import limit_task, rows_of
from maxsim_eval.encoders.names import ONE_DTYPE, get_encoder
from maxsim_eval.errors import DataError, MissingPackageError, UnknownNameError, UsageError
from maxsim_eval.planning.costs import Sizes
from maxsim_eval.types import Encoder, Task
from maxsim_kernels import Packed

CARD_DOCUMENT_TOKENS = 120  # of a passage, where not even its text is here
CARD_QUERY_TOKENS = 32
_SAMPLED_TEXTS = 20_000
_DIM = 128
_NOBODY = ModuleType("nobody")


@dataclass(frozen=True)
class Rule:
    """What is assumed where nothing can be encoded: `factor` tokens a word of a document, `most` at most; tokens a query; dtype.

    `parameters`: those of the model that every token passes; 0: no model.
    """

    factor: float
    most: int
    query: int
    form: str
    parameters: float = 85e6  # of BERT-base's layers


# Stems or BERT's word pieces a word, on SciFact (abstracts of 212 words; everyday text makes fewer pieces). 0: always the most.
RULES = {
    "lexical": Rule(0.42, 256, 9, "float32", 0),
    "hf": Rule(1.57, 256, 20, "float32"),
    "colbertv2": Rule(1.57, 180, 32, "float32"),
    "multi-vector": Rule(1.57, 300, 32, "float32"),
    "colpali": Rule(0.0, 1030, 32, "bfloat16", 2.9e9),  # patches and the prompt of a page
    "gve": Rule(0.0, 729, 32, "float16", 2e9),
}
IMPORTED = Rule(1.57, 300, 32, "float16")


@dataclass(frozen=True)
class FoundSizes:
    """Sizes, the documents in the cache (None: not there), a sample of document lengths, and what the reader must know.

    `queries`: all or some of the encoded queries, where there are any. `kept` and `encoder` are there where something has to be
    encoded and both are on this machine.
    """

    sizes: Sizes
    entry: Documents | None
    lengths: np.ndarray | None
    task: dict[str, Any]
    notes: tuple[str, ...]
    kept: Task | None = None
    encoder: Encoder | None = None
    queries: Packed | None = None


def find_sizes(
    source: str,
    dataset: str,
    encoder: str,
    *,
    data_dir: Path,
    cache_dir: Path,
    split: str | None = None,
    limits: dict[str, int | None] | None = None,
    seed: int = 0,
    quiet: bool = False,
    device: str = "cpu",
) -> FoundSizes:
    """Sizes of an evaluation.

    Args:
        device: where the encoder's model would run.
        limits: of `queries` and `documents`, as `--limit-queries` and `--limit-documents` give them.

    Raises:
        UnknownNameError: no such source, dataset or encoder. DataError, CacheError: data or cache that are there but damaged,
            or neither a dataset nor a card with counts; the message says what to do.
    """
    asked = {"queries": None, "documents": None, **(limits or {})}
    task = _task(source, dataset, data_dir, split, quiet)
    if task is None:
        return _by_card(source, dataset, encoder, asked)
    kept = limit_task(task, **asked, seed=seed)
    facts = {"source": task.source, "dataset": task.dataset, "split": task.split, "limits": asked, "seed": seed}
    queries, documents, made, notes = _entries(task, kept, encoder, cache_dir, device)
    if queries is not None and documents is not None:
        lengths = documents.lengths()
        chosen = rows_of(task.query_ids, kept.query_ids)
        tokens = int(queries.lengths()[chosen].sum()), int(lengths.sum())
        sizes = Sizes(len(kept.query_ids), len(kept.document_ids), *tokens, documents.dim, documents.manifest["dtype"])
        real = queries.load().select(torch.from_numpy(chosen)).compact()
        return FoundSizes(sizes, documents, lengths, facts, notes, queries=real)
    return _by_texts(kept, encoder, made, documents, queries, facts, notes)


def _task(source: str, dataset: str, data_dir: Path, split: str | None, quiet: bool) -> Task | None:
    """The task where it lies on this machine, else None: loaders may download or generate, this must not."""
    if source not in LOADERS:
        raise UnknownNameError("source", source, LOADERS)
    if source == "irds":
        raise UsageError("plan: source 'irds': a plan downloads nothing, which ir_datasets may; need another source")
    if source == "local":
        return load_task(source, dataset, data_dir=data_dir, split=split, quiet=quiet)
    there = [path for path in (data_dir / dataset, data_dir / source / dataset) if path.is_dir()]
    if source == "real-mm-rag":
        return load_task(source, dataset, data_dir=data_dir, split=split, quiet=quiet) if there else None
    card = load_card(source, dataset)
    there = [path for path in there if (path / "corpus.jsonl").is_file()]
    if card.subsets or (there and source == "beir"):
        return load_task(source, dataset, data_dir=data_dir, split=split, quiet=quiet)
    return load_folder(source, dataset, there[-1], split=split, card=card, quiet=quiet) if there else None


def _entries(
    task: Task, kept: Task, name: str, cache_dir: Path, device: str
) -> tuple[Entry | None, Documents | None, Encoder | None, tuple[str, ...]]:
    """The cache entries of queries and documents that an evaluation would use, the encoder where it is here, and notes."""
    if any(provenances(cache_dir, task.source, task.dataset)):
        try:
            with offline(), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                cached = cached_embeddings(task, name, cache_dir, kept=kept, device=device)
            return cached.queries, cached.documents, None, tuple(str(one.message) for one in said)
        except (DataError, MissingPackageError):
            pass  # a side is not there, or no model: below it is said which
    contents = Contents(task)
    imported = imported_entries(task, name, cache_dir, contents)
    queries, documents = imported.get("query"), imported.get("document")
    encoder, notes = _encoder(name, task.dtype, device)
    if encoder is None:
        return queries, None if documents is None else chosen_rows(documents, task, kept), None, notes
    whole = find_entry(task, "document", encoder, cache_dir, contents)
    found: Documents | None = None if whole is None else chosen_rows(whole, task, kept)
    if found is None and kept.document_ids is not task.document_ids:
        found = find_entry(kept, "document", encoder, cache_dir)
    return find_entry(task, "query", encoder, cache_dir, contents), found, encoder, notes


def _encoder(name: str, dtype: str | None, device: str = "cpu") -> tuple[Encoder | None, tuple[str, ...]]:
    """The encoder without its weights, or why it is not to be had here."""
    try:
        with offline():
            return get_encoder(name, default_dtype=dtype, device=device), ()
    except (DataError, MissingPackageError) as error:
        return None, (str(error),)


@contextmanager
def offline() -> Iterator[None]:
    """Keep Hugging Face's libraries from the network: a plan downloads nothing."""
    name, module = "HF_HUB_OFFLINE", "huggingface_hub.constants"  # the module reads it once, when it is imported
    before = os.environ.get(name)
    known = getattr(sys.modules.get(module), name, before in ("1", "ON", "YES", "TRUE"))
    os.environ[name] = "1"
    vars(sys.modules.get(module, _NOBODY))[name] = True
    try:
        yield
    finally:
        vars(sys.modules.get(module, _NOBODY))[name] = known
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}


def rule_of(name: str, dtype: str | None = None) -> Rule:
    """The rule of an encoder; `dtype` is what the card stores embeddings in, where it says so."""
    prefix = name.partition(":")[0].partition("@")[0]  # colbertv2@<revision> too
    rule = RULES.get(prefix, IMPORTED)
    return rule if dtype is None or prefix in ONE_DTYPE else replace(rule, form=dtype)


def estimate_lengths(texts: Sequence[Any], factor: float, most: int) -> np.ndarray:
    """Tokens of texts by their words, at most `most` each: of all, or of 20,000 evenly chosen ones. A factor of 0: `most`."""
    if factor == 0 or isinstance(texts, Pages):
        return np.full(min(len(texts), _SAMPLED_TEXTS), most, np.int64)
    step = max(1, -(-len(texts) // _SAMPLED_TEXTS))
    words = np.array([len(str(texts[place]).split()) for place in range(0, len(texts), step)], np.float64)
    return np.minimum(np.ceil(words * factor), most).astype(np.int64)


def _by_texts(
    kept: Task,
    name: str,
    encoder: Encoder | None,
    documents: Documents | None,
    queries: Entry | None,
    facts: dict[str, Any],
    notes: tuple[str, ...],
) -> FoundSizes:
    """Sizes where a side is not in the cache: documents as cached, else by their words; queries by the encoder's rule."""
    rule = rule_of(name, kept.dtype)
    lengths = estimate_lengths(kept.documents, rule.factor, rule.most) if documents is None else documents.lengths()
    missing = " and ".join(side for side, entry in (("documents", documents), ("queries", queries)) if entry is None)
    dim = encoder.dim if encoder is not None else documents.dim if documents is not None else _DIM
    count, searched = len(kept.query_ids), len(kept.document_ids)
    tokens = count * rule.query, round(float(lengths.mean()) * searched)
    form = rule.form if documents is None else documents.manifest["dtype"]
    sizes = Sizes(count, searched, *tokens, dim, form, "texts", exact=False, encoded=False)
    said = f"ESTIMATE: {missing} not in the cache; tokens by words: {rule.factor} a word of a document, at most {rule.most}"
    return FoundSizes(sizes, documents, lengths, facts, (said, *notes), kept, encoder)


def _by_card(source: str, dataset: str, name: str, asked: dict[str, int | None]) -> FoundSizes:
    """Sizes where the dataset is not here: by the counts that its card expects."""
    card = load_card(source, dataset)
    if card.documents is None or card.queries is None:
        raise DataError(
            f"{source} {dataset}: not on this machine, and its card gives no counts; fetch it first (evaluate.py {source} "
            f"{dataset} ... does), then plan"
        )
    encoder, notes = _encoder(name, card.dtype or None)
    rule = rule_of(name, card.dtype or None)
    documents, queries = (min(n, asked[side] or n) for n, side in ((card.documents, "documents"), (card.queries, "queries")))
    tokens, dim = (queries * CARD_QUERY_TOKENS, documents * CARD_DOCUMENT_TOKENS), _DIM if encoder is None else encoder.dim
    sizes = Sizes(queries, documents, *tokens, dim, rule.form, "card", exact=False, encoded=False)
    said = (
        f"ESTIMATE: {source} {dataset} is not on this machine; counts are its card's, {CARD_DOCUMENT_TOKENS} tokens a document "
        f"and {CARD_QUERY_TOKENS} a query are assumed (nothing was downloaded)"
    )
    facts = {"source": source, "dataset": dataset, "split": card.split, "limits": asked, "seed": None}
    return FoundSizes(sizes, None, None, facts, (said, *notes))
