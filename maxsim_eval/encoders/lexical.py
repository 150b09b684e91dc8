"""The `lexical` encoder: token embeddings from the words themselves, without any weights. The same text gives the same bytes.

Every word (lower-cased, stop words dropped, stemmed) has a fixed unit vector of d = 128: half a pseudo-random vector of its
stem, half the sum of the vectors of the stem's character n-grams (3 to 5, with word boundaries), so that related forms
resemble each other. A document has one token per distinct stem, in order of first use; its norm is BM25's saturated term
frequency: `tf / (tf + k1 * (1 - b + b * length / 150))`, between 0 and 1. The norm of a query token is the stem's inverse
document frequency in the corpus. MaxSim over such tokens is BM25 with soft matching, blurred by d = 128 dimensions.

Why these numbers. Chosen on the 809 queries of SciFact's *train* split; nDCG@10 / Recall@100 there, and on test:
    unit-length document tokens, no n-grams   0.652 / 0.895   0.638 / 0.905
    unit-length, half n-grams                 0.652 / 0.898   0.651 / 0.897
    BM25 length, k1 0.9, b 0.75, this file    0.700 / 0.933   0.685 / 0.922   (Anserini's BM25 on test: 0.679 / 0.925)
    n-grams 3 to 4, or a mix of 0.3 or 0.4: within 0.005. The optimum is flat; b and k1 may vary by a third.

Determinism. Hash bits become +1 and -1, sums are integers, and what is not an integer uses only + * / and sqrt, which IEEE
754 rounds correctly, element by element; logarithms come from `decimal`, which is correctly rounded too. There is no BLAS,
no libm and no Python `hash`. The stemmer's version is part of `revision`, because its rules change between versions.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Context, Decimal
from functools import cached_property, lru_cache
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from maxsim_eval.errors import UsageError
from maxsim_eval.types import Role
from maxsim_kernels import Packed

CODE_VERSION = 1
DIM = 128
NGRAMS = (3, 4, 5)
NGRAM_SHARE = 0.5
K1, B, AVERAGE_LENGTH = 0.9, 0.75, 150.0  # the average is a constant: a document's tokens never depend on the corpus
MAX_DOCUMENT_TOKENS = 256
MAX_QUERY_TOKENS = 128
_GRID = float(1 << 20)  # mixed vectors are rounded to this grid, so that their squared norm is an exact integer sum
_CACHED_WORDS = 200_000  # 100 MB of vectors
_WORD = re.compile(r"[^\W_]+")
_LN = Context(prec=20)

_STOP_WORDS = """
    a about above after again against all am an and any are aren as at be because been before being below between both
    but by can cannot could did do does doing don down during each few for from further had has have having he her here
    hers herself him himself his how i if in into is isn it its itself just ll me more most my myself no nor not now of
    off on once only or other our ours ourselves out over own re s same she should so some such t than that the their
    theirs them themselves then there these they this those through to too under until up ve very was wasn we were weren
    what when where which while who whom why will with won would you your yours yourself yourselves
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def _words(text: str) -> list[str]:
    """Lower-cased runs of letters and digits. NFKC first: a composed and a decomposed é are one letter."""
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).lower())


def _signs(keys: Sequence[str]) -> npt.NDArray[np.int8]:
    """`[len(keys), 128]` of +1 and -1 from the 128 bits of BLAKE2b of each key."""
    digests = b"".join(hashlib.blake2b(key.encode("utf-8"), digest_size=DIM // 8).digest() for key in keys)
    bits = np.unpackbits(np.frombuffer(digests, dtype=np.uint8).reshape(len(keys), DIM // 8), axis=1)
    return bits.astype(np.int8) * np.int8(2) - np.int8(1)


def _ngrams(stem: str) -> list[str]:
    marked = f"<{stem}>"  # the whole word is not an n-gram of itself: the stem's own vector stands for it
    return [marked[i : i + n] for n in NGRAMS if n < len(marked) for i in range(len(marked) - n + 1)]


def stem_vectors(stems: Sequence[str]) -> npt.NDArray[np.float32]:
    """`[len(stems), 128]` float32 unit vectors: the stem's own signs mixed with those of its character n-grams."""
    own = _signs([f"w:{stem}" for stem in stems]).astype(np.float64) / np.sqrt(np.float64(DIM))
    grams = [_ngrams(stem) for stem in stems]
    numbers = {gram: number for number, gram in enumerate(dict.fromkeys(gram for row in grams for gram in row))}
    signs = _signs([f"g:{gram}" for gram in numbers])
    sums = np.zeros((len(stems), DIM), dtype=np.int64)
    for row, of_stem in zip(sums, grams):
        if of_stem:
            row[:] = signs[[numbers[gram] for gram in of_stem]].sum(axis=0, dtype=np.int64)
    norms = np.sqrt((sums * sums).sum(axis=1).astype(np.float64))[:, None]
    shape = np.divide(sums.astype(np.float64), norms, out=np.zeros_like(own), where=norms > 0)
    mixed = np.rint(((1.0 - NGRAM_SHARE) * own + NGRAM_SHARE * shape) * _GRID).astype(np.int64)
    lengths = np.sqrt((mixed * mixed).sum(axis=1).astype(np.float64))
    return (mixed.astype(np.float64) / lengths[:, None]).astype(np.float32)


@lru_cache(maxsize=1 << 16)
def inverse_document_frequency(documents: int, containing: int) -> float:
    """BM25's `ln(1 + (N - n + 0.5) / (n + 0.5))`, correctly rounded: the same float on every machine."""
    ratio = _LN.divide(Decimal(2 * documents + 2), Decimal(2 * containing + 1))
    return float(_LN.ln(ratio))


class _Stems(dict[str, str]):
    """Word -> stem, computed once each (empty for stop words). The stemmer is made on first use: a full cache needs none."""

    @cached_property
    def _stem(self) -> Callable[[str], str]:
        # The module's own class, not snowballstemmer.stemmer(): that takes PyStemmer, of another version, where installed.
        from snowballstemmer.english_stemmer import EnglishStemmer

        return EnglishStemmer().stemWord

    def __missing__(self, word: str) -> str:
        self[word] = stem = "" if word in STOP_WORDS else self._stem(word)
        return stem


class LexicalEncoder:
    """Lexical token embeddings, d = 128, float32 (see the module's docstring).

    Args:
        max_query_tokens, max_document_tokens: distinct stems kept of a query or document, the first ones.
    """

    name = "lexical"
    dim = DIM

    def __init__(self, max_query_tokens: int = MAX_QUERY_TOKENS, max_document_tokens: int = MAX_DOCUMENT_TOKENS) -> None:
        for option, value in (("max_query_tokens", max_query_tokens), ("max_document_tokens", max_document_tokens)):
            if value < 1:
                raise UsageError(f"{option}: got {value}, need 1 or more")
        self.revision = f"{CODE_VERSION}+snowball-{metadata.version('snowballstemmer')}"
        self.max_tokens: dict[str, int] = {"query": max_query_tokens, "document": max_document_tokens}
        self._stems = _Stems()
        self._rows: dict[str, int] = {}
        self._vectors = np.empty((0, DIM), dtype=np.float32)
        self._documents = 0
        self._frequencies: Counter[str] | None = None

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """Everything but the texts that decides the embeddings; queries depend on the corpus (`corpus_statistics`)."""
        common = {
            "code": CODE_VERSION,
            "stemmer": self.revision,
            "dim": DIM,
            "dtype": "float32",
            "ngrams": list(NGRAMS),
            "ngram_share": NGRAM_SHARE,
            "max_tokens": self.max_tokens[role],
        }
        if role == "query":
            return {**common, "weight": "idf", "corpus_statistics": True}
        return {**common, "weight": "bm25", "k1": K1, "b": B, "average_length": AVERAGE_LENGTH}

    def prepare(self, documents: Sequence[Any]) -> None:
        """Count in how many documents each stem occurs; needed before queries are encoded."""
        frequencies: Counter[str] = Counter()
        for number, text in enumerate(documents):
            frequencies.update(set(self._stems_of(text, number)))
        self._documents, self._frequencies = len(documents), frequencies

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """Encode texts: `Packed` float32 `[tokens, 128]`, one row per text; a text without words gives an empty row.

        Raises:
            UsageError: an item that is not text, or queries before `prepare`.
        """
        if role == "query" and self._frequencies is None:
            raise UsageError("lexical queries are weighted by the corpus: call prepare(documents) before encoding them")
        stems: list[str] = []
        weights: list[float] = []
        offsets = np.zeros(len(items) + 1, dtype=np.int64)
        for number, text in enumerate(items):
            words = self._stems_of(text, number)
            counts = Counter(words)  # keeps the order of first use
            kept = list(counts)[: self.max_tokens[role]]
            stems += kept
            weights += self._query_weights(kept) if role == "query" else _document_weights(kept, counts, len(words))
            offsets[number + 1] = len(stems)
        values = self._lookup(stems)
        values *= np.asarray(weights, dtype=np.float32)[:, None]
        return Packed(torch.from_numpy(values), torch.from_numpy(offsets))

    def token_texts(self, item: Any, role: Role) -> list[str]:
        """The stem of each token of a text, in order."""
        return list(dict.fromkeys(self._stems_of(item, 0)))[: self.max_tokens[role]]

    def _query_weights(self, stems: Iterable[str]) -> list[float]:
        frequencies = self._frequencies
        assert frequencies is not None  # checked by encode
        return [inverse_document_frequency(self._documents, frequencies.get(stem, 0)) for stem in stems]

    def _stems_of(self, text: Any, number: int) -> list[str]:
        if not isinstance(text, str):
            raise UsageError(f"the lexical encoder reads text; item {number} is a {type(text).__name__}")
        if len(self._stems) > 4 * _CACHED_WORDS:
            self._stems.clear()
        return [stem for stem in map(self._stems.__getitem__, _words(text)) if stem]

    def _lookup(self, stems: Sequence[str]) -> npt.NDArray[np.float32]:
        """`[len(stems), 128]` float32, a copy; vectors of new stems are made and kept."""
        new = [stem for stem in dict.fromkeys(stems) if stem not in self._rows]
        if len(self._rows) + len(new) > _CACHED_WORDS:
            new = list(dict.fromkeys(stems))
            self._rows, self._vectors = {}, np.empty((0, DIM), dtype=np.float32)
        if new:
            start, stop = len(self._rows), len(self._rows) + len(new)
            if stop > len(self._vectors):  # grown by doubling: a long corpus does not copy the table for every chunk
                grown = np.empty((max(stop, 2 * start), DIM), dtype=np.float32)
                grown[:start] = self._vectors[:start]
                self._vectors = grown
            self._vectors[start:stop] = stem_vectors(new)
            self._rows.update(zip(new, range(start, stop)))
        return self._vectors[[self._rows[stem] for stem in stems]] if stems else np.empty((0, DIM), dtype=np.float32)


def _document_weights(stems: Iterable[str], counts: Counter[str], length: int) -> list[float]:
    saturation = K1 * (1.0 - B + B * length / AVERAGE_LENGTH)
    return [counts[stem] / (counts[stem] + saturation) for stem in stems]
