"""What a forward left for its gradients, with shapes spelled out, and how many programs share it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
from torch import Tensor

from maxsim_kernels.gpu.geometry import hardware, padded

_WIDTH = 128  # columns a program holds; wider embeddings take several
# Query tokens a program owns, documents it reads at once, warps (H200: 32 rows of 256 bytes in flight a program, in either case).
GATHER, SCATTER = (16, 2, 2), (32, 1, 4)
_FEW_DOCUMENTS = 32  # one program walks over so many sooner than the host launches the sum of several programs' parts
_PROGRAMS = 4  # programs a multiprocessor; where there are fewer, a query token's documents are dealt to several programs


@dataclass(frozen=True)
class Saved:
    """What the forward left, with shapes spelled out: `argmax` `[Nq, N, W]`, `grad` `[Nq, N]`, both contiguous."""

    grad: Tensor
    argmax: Tensor
    queries: Tensor
    query_starts: Tensor | None
    documents: Tensor
    document_starts: Tensor | None
    owned: bool  # every document has one query

    @property
    def size(self) -> int:
        """Tokens of a dense document; 1 where documents are packed: kernels divide by it, but do not use the quotient."""
        return self.documents.shape[-2] if self.document_starts is None else 1

    @property
    def rows(self) -> int:
        """Document tokens, of all documents."""
        return self.documents.numel() // max(1, self.documents.shape[-1])

    @property
    def query_rows(self) -> int:
        """Query tokens, of all queries."""
        return self.queries.numel() // max(1, self.queries.shape[-1])

    @property
    def columns(self) -> tuple[int, int]:
        """Columns a program holds, and how many programs share a row."""
        width = self.queries.shape[-1]
        held = min(_WIDTH, padded(width))
        return held, triton.cdiv(width, held)

    def some(self, first: int, last: int) -> Saved:
        """What was saved of queries `first .. last` alone, with all documents (owned ones: with their own)."""
        packed = self.query_starts is not None
        return replace(
            self,
            grad=self.grad[first:last],
            argmax=self.argmax[first:last],
            queries=self.queries if packed else self.queries[first:last],
            query_starts=self.query_starts[first:last] if self.query_starts is not None else None,
            document_starts=self.document_starts[first:last]
            if self.owned and self.document_starts is not None
            else self.document_starts,
        )

    def splits(self) -> int:
        """Programs that share a query token's documents, so that few queries fill the GPU too."""
        count, documents, size = self.argmax.shape
        programs = count * triton.cdiv(size, GATHER[0]) * self.columns[1]
        # Rounded down: each more takes an FP32 copy of dQ, and half-full is full enough.
        wanted = hardware(self.queries.device)[1] * _PROGRAMS // programs
        return max(1, min(wanted, triton.cdiv(documents, 16))) if documents > _FEW_DOCUMENTS else 1

    def query_strides(self) -> tuple[int, int, int]:
        """Strides of the queries: by query (0: packed), token and column."""
        one = self.queries
        return (one.stride(0) if one.dim() == 3 else 0), one.stride(-2), one.stride(-1)

    def document_strides(self) -> tuple[int, int, int, int]:
        """Strides of the documents: by query, document, token and column; 0 where a side has none."""
        one = self.documents
        outer = (0, 0)
        if one.dim() == 4:
            outer = (one.stride(0), one.stride(1))
        elif one.dim() == 3:
            outer = (one.stride(0), 0) if self.owned else (0, one.stride(0))
        return *outer, one.stride(-2), one.stride(-1)
