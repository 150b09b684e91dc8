"""One call of a library: whether the operator takes it, autocast, the precision of float32, counting.

What the operator does not take is left to the library's own code, and counted with the reason (`status`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import fallback
from maxsim_kernels.api import run
from maxsim_kernels.checks import Options
from maxsim_kernels.integrations.patching import Library
from maxsim_kernels.modes import foreign, transformed
from maxsim_kernels.tokens import FLOAT_DTYPES, Packed, lengths_of

Tokens = Tensor | Packed
_LARGE = 1 << 22  # elements from which a kernel of our own is worth its launch: torch's reads at a fifth of the memory's speed
CHUNK = 1 << 24  # elements of a list that are copied into one buffer at a time


def untaken(queries: Tokens, documents: Tokens, device: torch.device | None = None) -> str:
    """Why the operator does not take these tokens, after both are moved to `device` if it is given; empty where it does."""
    if queries.dtype not in FLOAT_DTYPES:
        return f"{queries.dtype} queries"
    if documents.dtype != queries.dtype:
        return "queries and documents of different dtypes"
    if device is None:
        device = queries.device
        if documents.device != device:
            return "queries and documents on different devices"
    if device.type != "cpu" and not (device.type == "cuda" and fallback.HAS_TRITON):
        return f"{device.type} tensors"
    if _width(queries) != _width(documents):
        return "queries and documents of different widths"
    if _bare(queries) or _bare(documents):
        return "nothing to score"
    if not torch.compiler.is_compiling():
        if transformed():
            return "a transform of torch.func, or forward-mode differentiation"
        for values in (tokens.values if isinstance(tokens, Packed) else tokens for tokens in (queries, documents)):
            if foreign(values):
                return f"a {type(values).__qualname__}, a subclass of Tensor"
            if values.is_neg():
                return "a view that is yet to be negated"
    return ""


def _width(tokens: Tokens) -> int:
    return tokens.dim if isinstance(tokens, Packed) else tokens.shape[-1]


def _bare(tokens: Tokens) -> bool:
    return (tokens.values if isinstance(tokens, Packed) else tokens).numel() == 0


def count(library: Library, function: str) -> None:
    """Note a call that the operator scores; not while it is compiled, where the note would be one of the compiler's guards."""
    if not torch.compiler.is_compiling():
        library.calls[function] += 1


def leave(library: Library, reason: str) -> None:
    """Note a call that is left to the library."""
    if not torch.compiler.is_compiling():
        library.left[reason] += 1


def theirs(library: Library, name: str, reason: str, given: tuple[Any, ...], strict: bool = False, **named: Any) -> Tensor:
    """The library's own scores of a call that is left to it; refused where they break `strict`'s promise."""
    leave(library, reason)
    scores: Tensor = library[name](*given, **named)  # first: the library's own refusals come before ours
    if strict and scores.numel():
        raise ValueError(
            f"{name}: got {reason}, which only {library.name}'s own code scores, and there padding may win; strict=True needs a call "
            f"that runs here, or disable({library.name!r})"
        )
    return scores


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that the library's own matrix product would run in under autocast; None outside it."""
    if not torch._C._is_any_autocast_enabled():  # a cheap question; that for one device takes its name as a string
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def score(
    library: Library,
    queries: Tokens,
    documents: Tokens,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairs: bool = False,
    out: torch.dtype = torch.float32,
    empty_score: float | None = None,
) -> Tensor:
    """`maxsim` or `maxsim_pairs`: products in the dtype that autocast asks for, those of float32 as `enable(fp32=)` says.

    Scores in the dtype `out`, which on GPUs the kernels write at once; `empty_score`: of documents without a token that counts.
    """
    asked = out if out in FLOAT_DTYPES else torch.float32
    lower = autocast_dtype(queries.device)
    # A part of the call, not torch's setting, which is one for all threads. CPUs have no TF32.
    fp32 = "tf32" if (lower or queries.dtype) == torch.float32 and not library.exact else None
    options = Options(query_mask, document_mask, pairs=pairs, out=asked, empty_score=empty_score, fp32=fp32)
    if lower is None:
        scores = run(queries, documents, options)
    else:
        with torch.autocast(queries.device.type, enabled=False):
            scores = run(queries.to(lower), documents.to(lower), options)
    assert isinstance(scores, Tensor)
    return scores if scores.dtype == out else scores.to(out)


def used_tokens(tokens: Tensor) -> Tensor:
    """`tokens.any(dim=-1)`: which tokens are not all zeros; without a mask, libraries mark padding by zeros."""
    large = tokens.is_cuda and tokens.numel() >= _LARGE and tokens.is_contiguous()
    if large and fallback.HAS_TRITON and not torch.compiler.is_compiling():
        from maxsim_kernels.gpu.nonzero import nonzero_rows

        return nonzero_rows(tokens.detach())
    return tokens.any(dim=-1)


def without_zeros(tokens: Packed) -> Packed:
    """The same documents without their rows of zeros; how many these are is read, which waits for a GPU."""
    kept = used_tokens(tokens.values)
    if bool(kept.all()):
        return tokens
    before = torch.zeros(len(kept) + 1, dtype=torch.int64, device=kept.device)
    before[1:] = kept.cumsum(0)
    assert tokens.offsets is not None
    return Packed(tokens.values[kept], before[tokens.offsets])


def list_lengths(items: object) -> list[int] | None:
    """Lengths of a list of token matrices that can be packed: float tensors `[L, d]` of one dtype, device and width; else None."""
    if not isinstance(items, list) or not items or not all(issubclass(kind, Tensor) for kind in set(map(type, items))):
        return None
    first = items[0]
    return lengths_of(items) if first.dim() == 2 and first.shape[1] and first.dtype in FLOAT_DTYPES else None


def slices(lengths: list[int], width: int, limit: int) -> Iterator[slice]:
    """Runs of a list whose tokens fill at most `limit` elements, one item at least."""
    start = total = 0
    for number, length in enumerate(lengths):
        if number > start and (total + length) * width > limit:
            yield slice(start, number)
            start, total = number, 0
        total += length
    yield slice(start, len(lengths))
