"""BM25 over the texts of queries and documents, by bm25s."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.first_stage.stage import Found, Texts
from maxsim_kernels.topk import TopK, of_keys


@dataclass(frozen=True)
class Bm25:
    """BM25 as Lucene counts it, over lower-cased words of two letters and more, without bm25s' English stop words, not stemmed.

    A document that shares no word with a query is not found.
    """

    k1: float = 1.5
    b: float = 0.75

    reads: ClassVar[str] = "texts"

    @property
    def description(self) -> str:
        """What it does."""
        return f"BM25 (Lucene's, k1 = {self.k1:g}, b = {self.b:g}) over the texts' words, English stop words left out; bm25s"

    def search(self, source: Texts, n: int, *, device: str, quiet: bool) -> Found:
        """The best `n` documents of every query.

        Raises:
            MissingPackageError: no bm25s. DataError: queries or documents that are no texts. UsageError: options out of range.
        """
        if not self.k1 >= 0 or not 0 <= self.b <= 1:
            raise UsageError(f"bm25: got k1={self.k1:g}, b={self.b:g}; need k1 of 0 or more and b from 0 to 1")
        try:
            import bm25s
        except ImportError:
            raise MissingPackageError("bm25", "bm25s", "atlas") from None
        for what, items in (("queries", source.queries), ("documents", source.documents)):
            if not all(isinstance(item, str) for item in items):
                raise DataError(f"bm25: the {what} are no texts")
        started = time.perf_counter()
        index = bm25s.BM25(k1=self.k1, b=self.b)
        index.index(_words(bm25s, source.documents), show_progress=False)
        indexed = time.perf_counter()
        best = TopK(len(source.queries), n)
        rows = []
        for words in _words(bm25s, source.queries):
            known = [word for word in words if word in index.vocab_dict]
            scores = index.get_scores(known) if known else np.zeros(len(source.documents), np.float32)
            rows.append(np.where(scores > 0, scores, -np.inf).astype(np.float32))
        best.add(torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, len(source.documents)))
        found, indices = of_keys(best.keys)
        held = index.scores
        size = sum(held[name].nbytes for name in ("data", "indices", "indptr")) + sum(
            len(word) for word in index.vocab_dict if word
        )
        seconds = {"index": indexed - started, "search": time.perf_counter() - indexed}
        return Found(found.numpy(), indices.numpy(), size, seconds)


def _words(bm25s: Any, texts: Any) -> list[list[str]]:
    found: list[list[str]] = bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
    return found
