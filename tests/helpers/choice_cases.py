"""Calls by their shapes, for tests of what follows from shapes alone."""

from __future__ import annotations

from typing import Any

import torch

from maxsim_kernels import Packed
from maxsim_kernels.checks import Call, Options, validate

HOPPER = (9, 0)


def call_of(queries: Any, documents: Any, *, pairs: bool = False, **options: Any) -> Call:
    """The call that `maxsim` or `maxsim_pairs` would make of these."""
    names = ("query_mask", "document_mask", "query_lengths", "document_lengths")
    held = {name: options.get(name) for name in names}
    held |= {name: options[name] for name in ("quantize_queries", "return_argmax") if name in options}
    return validate(queries, documents, Options(pairs=pairs, **held))


def zeros(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Tokens whose values do not matter."""
    return torch.zeros(size, dtype=dtype)


def pack_of(count: int, size: int, d: int = 128, dtype: torch.dtype = torch.float16) -> Packed:
    """The same, `count` documents of `size` tokens."""
    return Packed(zeros(count * size, d, dtype=dtype), torch.arange(count + 1) * size)
