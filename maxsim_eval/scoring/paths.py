"""Scoring paths: how token embeddings become scores.

`PATHS` maps a path's name to how it prepares tokens. `fp32` is the independent reference of `maxsim_kernels`; every other path is the
fused operator on cast or quantised tokens. A path sees the corpus block by block and must give the same scores for every cut.
`CERTIFIED` are those that scan a copy, and score in full precision what that cannot rule out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from maxsim_eval.cache.copy_shards import KINDS, Kind, corpus_scale
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.codecs.codec import Codec
from maxsim_eval.errors import DataError
from maxsim_kernels import Packed, maxsim, maxsim_reference

_FP16_MAX = 65504.0


@dataclass(frozen=True)
class ScoringPath:
    """One way to score: `documents` casts or quantises a block of documents, `queries` the queries, `score` multiplies.

    `copies` is what preparing a block takes at most, in FP32 copies of it. `narrow` says that wider tokens may not fit the path's
    number format (`check_range`), `corpus_scale` that `documents` asks for `Corpus.absmax`. `copy` names the quantised copy in the
    cache that holds what `documents` would make, to the last bit. `own` marks a user's function (`own_functions.py`), whose `source` is
    a digest of its code (None: not known). `codec` marks tokens that are stored in fewer bytes and decoded (`compressed.py`); it
    has to be fitted to the corpus first. `certified` marks the exact top-k of the stored embeddings through a scan of `copy`,
    which must be there (`certified.py`), multiplied in `precision` (None: as they are stored). Its functions score in FP32.
    """

    description: str
    queries: Callable[[Packed], Packed]
    documents: Callable[..., object]  # (block, corpus), of a codec also the number of the block's first document
    score: Callable[..., object]
    copies: float
    narrow: bool = False
    corpus_scale: bool = False
    copy: str | None = None
    own: bool = False
    source: str | None = None
    codec: Codec | None = None
    certified: bool = False
    precision: torch.dtype | None = None

    def document_bytes(self, tokens: float, dim: int) -> float | None:
        """Bytes of a document of this many tokens as this path multiplies it, its scales included (the one of a whole corpus is not).

        None for a user's function, a codec, and a certified path, which reads two forms.
        """
        if self.own or self.codec is not None or self.certified:
            return None
        return KINDS[self.copy].document_bytes(tokens, dim) if self.copy is not None else self.copies * 4 * dim * tokens

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


def _certified(precision: torch.dtype | None, what: str) -> ScoringPath:
    text = f"certified: the best k of the embeddings {what}, bit for bit, through a scan of INT8 codes; FP32 accumulation"
    cast = _cast(torch.float32)
    return ScoringPath(
        text, cast, lambda block, _: cast(block), maxsim, 1, copy="int8-document", certified=True, precision=precision
    )


CERTIFIED = {
    "exact-int8": _certified(None, "as stored"),
    "exact-int8-fp32": _certified(torch.float32, "in FP32"),
}
REFERENCE = "fp32"


def our_paths() -> dict[str, ScoringPath]:
    """Every path of ours by name."""
    return {**PATHS, **CERTIFIED}
