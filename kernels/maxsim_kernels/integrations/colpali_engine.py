"""colpali-engine 0.3.18: `score_multi_vector` of its processors, `utils.maxsim`, and with it the losses (smooth maxima stay torch).

Rules of the library that hold here: there are no masks, padding is zeros, whose similarity 0 beats negative ones; in a list, a document
shorter than the longest of its batch is padded, so `batch_size` may change scores. `strict=True` scores lists without padding, leaves
all-zero rows out, of lists too, and refuses calls that only the library scores. In `utils.maxsim`, scores have the dtype that the
library's would have, rounded once from float32; of equal maxima the first takes the gradient, where the library shares it.
COLPALI_SCORES_BACKEND other than "auto" is the library's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maxsim_kernels.integrations import calls
from maxsim_kernels.integrations.patching import Library, Target
from maxsim_kernels.tokens import Packed, joined

_MAXSIM = "colpali_engine.utils.maxsim"
_PROCESSING = "colpali_engine.utils.processing_utils"
_SCORE = "BaseVisualRetrieverProcessor.score_multi_vector"
LIBRARY = Library(
    "colpali-engine",
    "colpali_engine",
    ("0.3.18",),
    (
        Target(_MAXSIM, "maxsim_inbatch", "(query, doc)"),
        Target(_MAXSIM, "maxsim_kd", "(query, doc)"),
        Target(_PROCESSING, _SCORE, "(qs, ps, batch_size=128, device=None)"),
        Target(_MAXSIM, "_resolve_backend", "()", replaced=False),
        Target("colpali_engine.utils.torch_utils", "get_torch_device", "(device='auto')", replaced=False),
    ),
)


def maxsim_inbatch(query: Tensor, doc: Tensor) -> Tensor:
    """`colpali_engine.utils.maxsim.maxsim_inbatch`: every query `[Nq, Lq, d]` with every document `[B, Ld, d]`, `[Nq, B]`."""
    return _scored("maxsim_inbatch", query, doc, 3)


def maxsim_kd(query: Tensor, doc: Tensor) -> Tensor:
    """`colpali_engine.utils.maxsim.maxsim_kd`: every query with its own candidates `[Nq, K, Ld, d]`, `[Nq, K]`."""
    return _scored("maxsim_kd", query, doc, 4)


def score_multi_vector(qs: Any, ps: Any, batch_size: int = 128, device: Any = None) -> Tensor:
    """`processor.score_multi_vector`: every query with every page, tensors or lists of `[L, d]`; `[Nq, Np]` float32 on the CPU.

    Pages are moved and scored some at a time, without padding; `batch_size` says, as in the library, which of them are padded together.
    """
    place = torch.device(device or LIBRARY["get_torch_device"]("auto"))
    asked, held = _lengths(qs), _lengths(ps)
    reason = _named_backend() or _unlisted(qs, ps, asked, held, place, batch_size)
    if reason:
        # Not refused here where `strict` is on: the library's code calls its `maxsim_inbatch`, which is ours.
        return calls.theirs(LIBRARY, _SCORE, reason, (qs, ps), False, batch_size=batch_size, device=device)
    calls.count(LIBRARY, "score_multi_vector")
    assert asked is not None
    assert held is not None
    queries = (qs if isinstance(qs, Tensor) else joined(qs, asked)).to(place)  # a padded query token would add 0
    if isinstance(ps, Tensor):
        rows = max(1, calls.CHUNK // (ps.shape[1] * ps.shape[2]))
        parts = [_pages(queries, ps[start : start + rows].to(place)) for start in range(0, len(ps), rows)]
    else:
        short = _short(held, batch_size)
        runs = calls.slices(held, ps[0].shape[1], calls.CHUNK)
        parts = [_pages(queries, _padded(ps[run], held[run], short[run]).to(place)) for run in runs]
    return torch.cat(parts, dim=1).cpu()


REPLACEMENTS = {"maxsim_inbatch": maxsim_inbatch, "maxsim_kd": maxsim_kd, _SCORE: score_multi_vector}


def _scored(name: str, query: Tensor, doc: Tensor, dims: int) -> Tensor:
    reason = _named_backend()
    if not reason and not (isinstance(query, Tensor) and isinstance(doc, Tensor)):
        reason = "embeddings that are no tensors"
    if not reason and (query.dim() != 3 or doc.dim() != dims or (dims == 4 and len(query) != len(doc))):
        reason = "embeddings of other shapes"
    reason = reason or calls.untaken(query, doc)
    if reason:
        return calls.theirs(LIBRARY, name, reason, (query, doc), LIBRARY.strict)
    calls.count(LIBRARY, name)
    lower = calls.autocast_dtype(query.device)
    dtype = (
        (torch.float32 if query.is_cuda else lower) if lower is not None else query.dtype
    )  # a GPU's autocast sums in float32
    return _pages(query, doc, dtype)


def _pages(queries: Tensor | Packed, pages: Tensor | Packed, out: torch.dtype = torch.float32) -> Tensor:
    mask = None
    if LIBRARY.strict and isinstance(pages, Tensor):
        mask = calls.used_tokens(pages)
    elif LIBRARY.strict:
        pages = calls.without_zeros(pages)  # type: ignore[arg-type]
    return calls.score(LIBRARY, queries, pages, None, mask, out=out)


def _named_backend() -> str:
    """Why calls are left to the backend that somebody named; empty where none is."""
    named = LIBRARY["_resolve_backend"]()
    return "" if named == "auto" else f"COLPALI_SCORES_BACKEND is {named!r}"


def _lengths(side: Any) -> list[int] | None:
    """Lengths of a tensor's or a list's items; None where they are no `[L, d]`."""
    if isinstance(side, Tensor):
        return [side.shape[1]] * len(side) if side.dim() == 3 else None
    return calls.list_lengths(side)


def _unlisted(qs: Any, ps: Any, asked: list[int] | None, held: list[int] | None, place: torch.device, batch_size: int) -> str:
    if asked is None or held is None:
        return "embeddings that are no [N, L, d] tensor and no list of [L, d] tensors"
    if batch_size < 1 or not all(asked) or not all(held):
        return "nothing to score"
    first, second = (side[:1] if isinstance(side, Tensor) else side[0] for side in (qs, ps))
    return calls.untaken(first, second, place)


def _short(lengths: list[int], batch_size: int) -> list[bool]:
    """Which pages the library would pad: those shorter than the longest of their batch."""
    if LIBRARY.strict:
        return [False] * len(lengths)
    longest = [max(lengths[start : start + batch_size]) for start in range(0, len(lengths), batch_size)]
    return [length < longest[number // batch_size] for number, length in enumerate(lengths)]


def _padded(pages: list[Tensor], lengths: list[int], short: list[bool]) -> Packed:
    """Pages, with one zero token where the library pads with any number of them."""
    zero = pages[0].new_zeros(1, pages[0].shape[1])
    rows = [row for page, pad in zip(pages, short, strict=True) for row in ((page, zero) if pad else (page,))]
    return joined(rows, [length + pad for length, pad in zip(lengths, short, strict=True)])
