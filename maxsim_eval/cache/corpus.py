"""What a path may ask of the whole corpus before its first block: the largest magnitude, found once, by one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxsim_eval.bars import Bar
from maxsim_eval.cache.copies import Quantised
from maxsim_eval.cache.copy_shards import corpus_scale
from maxsim_eval.cache.selection import Documents
from maxsim_eval.errors import DataError, UsageError
from maxsim_kernels import Packed
from maxsim_kernels.streaming import device_blocks

BLOCK_BYTES = 1 << 30  # of a block that is not yet read; `device_blocks` cuts it to what the memory budget allows


@dataclass
class Corpus:
    """What a path may ask of the whole corpus before the first block: found once, on demand, by one pass.

    `spans` are the ranges of documents (start, stop) that this process reads for it (None: all), and `agree` makes one value of
    those that several processes found. `copies` are quantised copies in the cache, by the name of the path that reads them, not
    `entry`. `scaled` are the documents that a corpus scale is for, where they are not those of `entry` (reranking scores some
    documents, on the scale of all); `spans` then count these. `words` gives, document by document, the words that its tokens
    stand for (None: not known).
    """

    entry: Documents
    quiet: bool = False
    device: str = "cpu"
    memory_budget: int | None = None
    readers: int = 4
    spans: Sequence[tuple[int, int]] | None = None
    agree: Callable[[float], float] = float
    copies: Mapping[str, Quantised] = field(default_factory=dict)
    scaled: Documents | None = None
    words: Callable[[], Iterator[Sequence[str]]] | None = None
    _absmax: float | None = field(default=None, init=False)

    def absmax(self) -> float:
        """Largest magnitude of any token component."""
        if self._absmax is None:
            largest = torch.zeros((), device=self.device)
            with within_memory("the scale of the corpus"):
                for block in self._blocks():
                    largest = torch.maximum(largest, largest_of(block.values))
            self._absmax = self.agree(float(largest))
        return self._absmax

    def scale(self, path: str) -> float:
        """The corpus's scale: of the copy that the path reads, or from `absmax`."""
        stored = self.copies[path].scale() if path in self.copies else None
        if stored is not None:
            return stored
        try:
            return float(corpus_scale(self.absmax()))
        except ValueError as error:
            raise DataError(f"path {path}: {self.entry.folder}: {error}") from error

    def _blocks(self) -> Iterator[Packed]:
        whole = self.entry if self.scaled is None else self.scaled
        spans = [(0, whole.documents)] if self.spans is None else self.spans
        lazy = (block for span in spans for block in whole.lazy_blocks(BLOCK_BYTES, *span))
        with Bar(
            total=sum(stop - start for start, stop in spans), desc="corpus scale", unit="doc", disable=self.quiet, leave=False
        ) as bar:
            try:
                blocks = device_blocks(lazy, self.device, queries=0, memory_budget=self.memory_budget, readers=self.readers)
            except ValueError as error:
                raise UsageError(f"the scale of the corpus: {error}") from error
            with closing(blocks):
                for block in blocks:
                    assert isinstance(block, Packed)
                    yield block
                    bar.update(len(block))


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """A GPU that is full ends what runs inside with a `UsageError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{what}: out of GPU memory; a smaller --memory-budget takes less") from error


def largest_of(values: Tensor) -> Tensor:
    """The largest magnitude in a tensor, a float32 scalar on its device: one pass, no copy, nothing waits for a GPU."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    return torch.stack(torch.aminmax(values)).abs().amax().float()
