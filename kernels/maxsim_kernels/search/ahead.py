"""What a GPU's searches leave to the next: whether bounds pruned these codes, and the scan of a search that comes again.

The host checks and prepares a search for 0.2 ms before it can queue the scan, and the GPU would wait. So the scan of a search like the
last one of the same documents and codes is queued before anything is looked at. What the checks then refuse is refused all the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from maxsim_kernels.api import run
from maxsim_kernels.checks import Options
from maxsim_kernels.search.bounds import AnyCodes, Codes
from maxsim_kernels.search.rows import Rows
from maxsim_kernels.tokens import Packed

# By codes on a device: whether bounds pruned them last time.
pruned_before: WeakKeyDictionary[Codes, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Last:
    """A search that scanned all codes at once: its documents, what was asked, and the codes in the form that it scanned."""

    documents: ref[Packed | Rows]
    asked: Hashable
    scanned: Codes


_last: WeakKeyDictionary[Codes, _Last] = WeakKeyDictionary()


def asked_of(queries: Tensor | Packed, k: int, quantize_queries: bool, most_rescored: float) -> Hashable:
    """What a search must have in common with the last one: form, dtype and place of its queries, and its options."""
    values = queries.values if isinstance(queries, Packed) else queries
    return type(queries), len(queries), values.shape, values.dtype, values.device, k, quantize_queries, most_rescored


def remember(documents: Packed | Rows, codes: Codes, asked: Hashable, scanned: Codes) -> None:
    """Keep what `scores_ahead` needs if this search comes again; `scanned` must not be `codes`, whose end is the entry's end."""
    _last[codes] = _Last(ref(documents), asked, scanned)


def scores_ahead(
    queries: Tensor | Packed, documents: Packed | Rows, codes: AnyCodes, options: Options, k: int, most_rescored: float
) -> Tensor | None:
    """`[Nq, N]` scores over the codes, queued at once, where the last search of them was like this one and pruned; else None."""
    if not isinstance(codes, Codes) or not isinstance(queries, Tensor | Packed):
        return None
    last = _last.get(codes)
    if last is None or last.documents() is not documents or not pruned_before.get(codes):
        return None
    if last.asked != asked_of(queries, k, options.quantize_queries, most_rescored):
        return None
    try:
        found = run(queries, last.scanned, options)
    except ValueError:
        return None  # the checks that follow say it of the caller's own arguments
    assert isinstance(found, Tensor)
    return found.unsqueeze(0) if isinstance(queries, Tensor) and queries.dim() == 2 else found
