"""Scoring paths: how token embeddings become scores.

`PATHS` maps a path's name to how it prepares tokens. `fp32` is the independent reference of `maxsim_kernels`; every other path is the
fused operator on cast or quantised tokens. A path sees the corpus block by block and must give the same scores for every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.quantised import Quantised
from maxsim_eval.quantised_shards import KINDS, Kind, corpus_scale
from maxsim_eval.selection import Documents
from maxsim_kernels import Packed, maxsim, maxsim_reference
from maxsim_kernels.streaming import device_blocks

BLOCK_BYTES = 1 << 30  # of a block that is not yet read; `device_blocks` cuts it to what the memory budget allows
_FP16_MAX = 65504.0


@dataclass
class Corpus:
    """What a path may ask of the whole corpus before the first block: found once, on demand, by one pass.

    `spans` are the documents (start, stop) that this process passes over for it, and `agree` makes one value of those that several
    processes found; by default all documents, and nobody to agree with. `copies` are quantised copies in the cache, by the name of the
    path that reads them instead of `entry`. `scaled` are the documents that a corpus scale is for, where they are not those of `entry`:
    reranking scores some documents, on the scale of all; `spans` are of these then.
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
        with tqdm(
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


@dataclass(frozen=True)
class ScoringPath:
    """One way to score: `documents` casts or quantises a block of documents, `queries` the queries, `score` multiplies.

    `copies` is what preparing a block takes at most, in FP32 copies of it. `narrow` says that wider tokens may not fit the path's
    number format (`check_range`), `corpus_scale` that `documents` asks for `Corpus.absmax`. `copy` names the quantised copy in the
    cache that holds what `documents` would make, to the last bit. `own` marks a user's function (`scorers.py`), whose `source` is a
    digest of its code (None: not known).
    """

    description: str
    queries: Callable[[Packed], Packed]
    documents: Callable[[Packed, Corpus], object]
    score: Callable[..., object]
    copies: float
    narrow: bool = False
    corpus_scale: bool = False
    copy: str | None = None
    own: bool = False
    source: str | None = None

    def may_exceed(self, tokens: Packed) -> bool:
        """Whether tokens of this dtype may hold what the path's format does not."""
        return self.narrow and tokens.dtype != torch.float16 and tokens.values.numel() > 0


def check_range(largest: float) -> None:
    """Refuse tokens whose largest magnitude FP16 cannot hold, by a `DataError`."""
    if largest > _FP16_MAX:
        raise DataError(f"embeddings: a component of {largest:g} does not fit FP16 (at most {_FP16_MAX:g}); use bf16")


def _cast(dtype: torch.dtype) -> Callable[[Packed], Packed]:
    return lambda tokens: tokens.to(dtype)


def _fused(dtype: torch.dtype, description: str) -> ScoringPath:
    cast = _cast(dtype)
    return ScoringPath(
        description, cast, lambda block, _: cast(block), maxsim, dtype.itemsize / 4, narrow=dtype == torch.float16
    )


def _quantised(kind: Kind, description: str) -> ScoringPath:
    whole = kind.granularity == "corpus"

    def documents(block: Packed, corpus: Corpus) -> object:
        return kind.quantise(block, corpus_scale(corpus.absmax()) if whole else None)

    return ScoringPath(description, _cast(torch.float32), documents, maxsim, 3.25, corpus_scale=whole, copy=kind.name)


_CODES = "INT8 queries (one scale a token), exact integer products, scales after the product"
PATHS: dict[str, ScoringPath] = {
    "fp32": ScoringPath(
        "independent reference: plain chunked torch in FP32, TF32 off",
        _cast(torch.float32),
        lambda block, _: block.to(torch.float32),
        maxsim_reference,
        1,
    ),
    "fused-fp32": _fused(torch.float32, "fused operator, FP32 inputs"),
    "fp16": _fused(torch.float16, "fused operator, FP16 inputs, FP32 accumulation"),
    "bf16": _fused(torch.bfloat16, "fused operator, BF16 inputs, FP32 accumulation"),
    "int8": _quantised(KINDS["int8-token"], f"INT8 documents, one scale a token; {_CODES}"),
    "int8-document": _quantised(KINDS["int8-document"], f"INT8 documents, one scale a document; {_CODES}"),
    "int8-corpus": _quantised(KINDS["int8-corpus"], f"INT8 documents, one scale for the corpus; {_CODES}"),
    "fp8": _quantised(
        KINDS["fp8-document"], "FP8 (e4m3) documents, one scale a document; FP8 queries (one scale a token), FP32 accumulation"
    ),
}
REFERENCE = "fp32"
