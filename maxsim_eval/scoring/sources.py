"""Where the documents of a path come from: the embeddings themselves, or a quantised copy of them in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from maxsim_eval.cache import corpus as corpora
from maxsim_eval.cache.copies import Quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.stripes import Claims
from maxsim_eval.errors import DataError
from maxsim_eval.scoring.paths import ScoringPath


class EmbeddingSource:
    """The embeddings as they are stored: the path casts or quantises each block before it scores it."""

    def __init__(self, name: str, path: ScoringPath, corpus: Corpus) -> None:
        self.name, self.path, self.corpus = name, path, corpus
        self.copies = path.copies * 4 / corpus.entry.dtype.itemsize  # of a stored block, that preparing it takes

    def blocks(self, units: Sequence[tuple[int, int]], claims: Claims | None = None) -> Iterator[Any]:
        """Blocks of all units, one after the other, on the host; what is added to `claims` is left to the caller to prove."""
        stored, most = self.corpus.entry, corpora.BLOCK_BYTES
        return (block for start, stop in units for block in stored.lazy_blocks(most, start, stop, claims))

    def may_exceed(self, block: Any) -> bool:
        """Whether a block may hold what the path's number format does not."""
        return self.path.may_exceed(block)

    def prepare(self, block: Any, first: int = 0) -> Any:
        """What the path scores, made from a block on its device, whose documents begin with number `first` of the corpus.

        Raises:
            DataError: no scale holds the values.
        """
        placed = () if self.path.codec is None else (first,)
        try:
            return self.path.documents(block, self.corpus, *placed)
        except ValueError as error:
            raise DataError(f"path {self.name}: {self.corpus.entry.folder}: {error}") from error

    def size(self, block: Any) -> int:
        """Bytes of a block's tokens."""
        return _bytes(block.values)


class CopySource:
    """A quantised copy, which holds what preparing the embeddings would make, to the last bit."""

    copies = 0.0

    def __init__(self, copy: Quantised) -> None:
        self.copy = copy

    def blocks(self, units: Sequence[tuple[int, int]], claims: Claims | None = None) -> Iterator[Any]:
        """As of `EmbeddingSource`."""
        return self.copy.lazy_blocks(corpora.BLOCK_BYTES, units, claims)

    def may_exceed(self, block: Any) -> bool:
        """No: codes fit the format that they are of."""
        return False

    def prepare(self, block: Any, first: int = 0) -> Any:
        """The block is ready as it is."""
        return block

    def size(self, block: Any) -> int:
        """Bytes of a block's codes."""
        return _bytes(block.token_values)


def source_of(name: str, path: ScoringPath, corpus: Corpus) -> EmbeddingSource | CopySource:
    """The copy that this path reads, where the corpus has one, else the embeddings."""
    copy = corpus.copies.get(name)
    return EmbeddingSource(name, path, corpus) if copy is None else CopySource(copy)


def _bytes(values: Any) -> int:
    return int(values.numel() * values.element_size())
