"""The analytic byte budget of one training step (paper appendix 'Backward Memory Footprint', table bwd_mem), beside measured peaks.

Everything is counted that a step needs beyond inputs, their gradients and the `[Nq, B]` scores. The paper's B = 128 row gives half of
S: `128^2 * 1024^2 * 4` is 68.7 GB, and vanilla autograd needs it twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

LEAN_BELOW = 65_535  # a 16-bit winner index still has a value left for "no winner"
PATHS = ("vanilla", "unified", "atomic", "csr")
CELL_BYTES = 4  # of a similarity in the paper


@dataclass(frozen=True)
class Shape:
    """In-batch negatives: every query against every document."""

    queries: int
    documents: int
    query_tokens: int
    document_tokens: int
    dim: int = 128

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Shape:
        """From what a results file says about a row."""
        return cls(*(int(about[field.name]) for field in fields(cls)))


@dataclass(frozen=True)
class Budget:
    """Bytes that a path must hold."""

    similarities: int  # S of the forward
    similarity_gradient: int  # the same again, in the backward
    winners: int  # one index a query token and document
    scratch: int  # FP32 sums of the document gradient before they are rounded
    source_list: int  # csr: where each document token's sources begin, and the sources in order

    @property
    def total(self) -> int:
        """Everything at once."""
        return self.similarities + self.similarity_gradient + self.winners + self.scratch + self.source_list


def winner_bytes(document_tokens: int) -> int:
    """Bytes of one winner that training saves for itself: two where its index fits."""
    return 2 if document_tokens < LEAN_BELOW else 4


def budget(
    shape: Shape,
    path: str,
    *,
    index_bytes: int | None = None,
    list_bytes: int | None = None,
) -> Budget:
    """What a path must hold at least.

    Args:
        path: "vanilla", "unified", "atomic" or "csr".
        index_bytes: bytes of a winner; None: what our default saves.
        list_bytes: bytes of the sources that csr lists at once; None: of all.

    Raises:
        ValueError: an unknown path.
    """
    if path not in PATHS:
        raise ValueError(f"path: got {path!r}, need one of {', '.join(PATHS)}")
    tokens = shape.queries * shape.documents * shape.query_tokens  # maxima
    if path == "vanilla":
        cells = tokens * shape.document_tokens * CELL_BYTES
        return Budget(cells, cells, 0, 0, 0)
    winners = tokens * (winner_bytes(shape.document_tokens) if index_bytes is None else index_bytes)
    rows = shape.documents * shape.document_tokens
    if path == "csr":  # one program owns a row and sums it in registers; sources are 32-bit numbers
        share = 1.0 if list_bytes is None else min(1.0, list_bytes / max(1, 4 * tokens))
        return Budget(0, 0, winners, 0, math.ceil(share * 4 * (rows + 1 + tokens)))
    return Budget(0, 0, winners, rows * shape.dim * 4, 0)
