"""`exact_topk`: documents, codes and residuals checked block by block, and given to the search; `begin_search`: the search alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, get_args
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from maxsim_kernels.checks import Options, validate
from maxsim_kernels.fallback import HAS_TRITON
from maxsim_kernels.search.ahead import scores_ahead
from maxsim_kernels.search.bounds import AnyCodes, Codes, Residuals, check_codes, residuals_of
from maxsim_kernels.search.rescoring import packed_queries
from maxsim_kernels.search.rows import Rows
from maxsim_kernels.search.searching import Search, Stats
from maxsim_kernels.tokens import Packed

if TYPE_CHECKING:
    from maxsim_kernels.search.device import DeviceSearch

_KINDS: dict[str, tuple[type, ...]] = {"documents": (Packed, Rows), "codes": get_args(AnyCodes), "residuals": (Residuals,)}


def exact_topk(
    queries: Tensor | Packed,
    documents: Packed | Rows | Iterable[Packed | Rows],
    k: int,
    *,
    codes: AnyCodes | Iterable[AnyCodes],
    residuals: Residuals | Iterable[Residuals] | None = None,
    query_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    quantize_queries: bool = True,
    most_rescored: float = 0.25,
) -> tuple[Tensor, Tensor, Stats]:
    """The exact top-k of `stream_topk(queries, documents, k)`, bit for bit, for little more than a scan of codes.

    The search runs on the queries' device. If that is a GPU, documents and codes may each be there or on the host. Codes on the host
    are streamed; of documents on the host only those that the codes cannot rule out are copied (fastest from pinned memory).

    Args:
        queries: `[Lq, d]`, `[Nq, Lq, d]` or `Packed`, with mask and lengths as in `maxsim`.
        documents: float documents of the queries' dtype: `Packed` (or a view of one), `Rows` that are read when they are needed, or
            blocks of either in index order.
        k: how many documents to return for each query.
        codes: packed `Int8Tokens` or `Fp8Tokens` of the same documents, in the same blocks; on a CPU also `BitTokens` and
            `ResidualTokens`.
        residuals: `residuals_of(documents, codes)`, in the same blocks. None computes them here, which reads every token in full
            precision; store them if a corpus is searched more than once. Required with `Rows`.
        quantize_queries: scan with quantised queries (faster) or float ones (narrower bounds); the answer is the same.
        most_rescored: share of a block's (query, document) pairs beyond which the block is scored by brute force instead.

    Returns:
        float32 scores and int64 indices, `[k]` for one query `[Lq, d]`, else `[Nq, k]`, and `Stats`. Order, ties, -inf and padding
        are those of `stream_topk`.

    Raises:
        ValueError: names the argument, what it got and what it needs; a NaN score, by query and document.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, need 1 or more")
    if not 0 <= most_rescored <= 1:
        raise ValueError(f"most_rescored: got {most_rescored}, need 0 to 1")
    single = isinstance(queries, Tensor) and queries.dim() == 2
    search: Search | DeviceSearch | None = None
    options = Options(query_mask=query_mask, query_lengths=query_lengths, quantize_queries=quantize_queries)
    with torch.no_grad():
        for block, coded, stored in _blocks(documents, codes, residuals):
            ahead = scores_ahead(queries, block, coded, options, k, most_rescored) if search is None else None
            call = validate(queries, _like(block, queries), options)
            known = _checked(block, coded, stored, call.queries.device)
            if search is None and call.queries.device.type == "cuda":
                search = _on_device(queries, query_mask, query_lengths, k, quantize_queries, most_rescored)
                search.ahead = ahead
            elif search is None:
                padded = call if call.query_starts is None else None
                search = Search(packed_queries(call), k, quantize_queries, most_rescored, padded)
            search.add(block, coded, known)  # type: ignore[arg-type]  # `_checked` refused what a GPU does not take
    if search is None:
        raise ValueError("documents: got no blocks, need at least one (it may hold no documents)")
    scores, indices, stats = search.answer()
    return (scores[0], indices[0], stats) if single else (scores, indices, stats)


def why_no_search(device: torch.device | str) -> str:
    """Why a device cannot run the search; empty if it can."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return "need the CPU or a CUDA device"
    if kind == "cuda" and not HAS_TRITON:
        return "Triton is not installed, and bounds are proven for its kernels alone"
    return ""


def begin_search(queries: Packed, k: int, *, memory_budget: int | None = None) -> Search | DeviceSearch:
    """A search over documents that are added block by block, on the queries' device: `Search` on a CPU, `DeviceSearch` on a GPU.

    Args:
        queries: float tokens of Nq queries, one after the other.
        memory_budget: bytes of GPU memory for what is searched; on a CPU the search needs no bound.

    Raises:
        ValueError: a GPU without Triton; a memory budget that is too small.
    """
    if queries.device.type == "cuda":
        return _on_device(queries, None, None, k, True, 0.25, memory_budget, watched=True)
    return Search(queries, k)


def _like(block: Packed | Rows, queries: Tensor | Packed) -> Packed:
    """The block, or an empty one like it beside the queries where the operator would refuse it: `Rows`, or documents on the host."""
    device = queries.device
    if isinstance(block, Packed) and (block.device == device or device.type != "cuda" or block.device.type != "cpu"):
        return block
    empty = block.empty() if isinstance(block, Rows) else block.values[:0]
    return Packed(empty.to(device), torch.zeros(1, dtype=torch.int64, device=device))


def _checked(block: Packed | Rows, coded: AnyCodes, stored: Residuals | None, device: torch.device) -> Residuals:
    """Residuals of a block, checked with its codes; made here where there are none."""
    packed = _known_codes(block, coded)
    if device.type == "cuda" and not isinstance(coded, Codes):
        raise ValueError(f"codes: got {type(coded).__name__} for queries on a GPU, need Int8Tokens or Fp8Tokens")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"queries: on {device}, need the CPU or a CUDA device")
    if packed.device != device and packed.device.type != "cpu":
        raise ValueError(f"codes: on {packed.device}, need {device} as the queries, or the CPU")
    if stored is None and not isinstance(block, Packed):
        raise ValueError("residuals: got none with Rows, need residuals_of(documents, codes), stored beside the codes")
    if stored is None and packed.device != block.device:  # type: ignore[union-attr]
        where = f"codes on {packed.device} and documents on {block.device}"  # type: ignore[union-attr]
        raise ValueError(f"residuals: got none with {where}, need residuals_of(documents, codes), made where both lie together")
    known = residuals_of(block, coded) if stored is None else stored  # type: ignore[arg-type]
    if len(known) != len(block):
        raise ValueError(f"residuals: got {len(known)} documents, need {len(block)} as in documents")
    return known


_compared: WeakKeyDictionary[AnyCodes, ref[Packed | Rows]] = WeakKeyDictionary()


def _known_codes(block: Packed | Rows, coded: AnyCodes) -> Packed:
    """The packed codes of a block, checked against it; codes on a GPU only once, because the check waits for the GPU."""
    held = _compared.get(coded) if isinstance(coded.codes, Packed) else None
    if held is not None and held() is block:
        assert isinstance(coded.codes, Packed)
        return coded.codes
    packed = check_codes(block, coded)
    if packed.values.is_cuda:
        _compared[coded] = ref(block)
    return packed


def _on_device(
    queries: Tensor | Packed,
    mask: Tensor | None,
    lengths: Tensor | None,
    k: int,
    quantize_queries: bool,
    most_rescored: float,
    memory_budget: int | None = None,
    watched: bool = False,
) -> DeviceSearch:
    """The search on a GPU, whose modules need Triton."""
    if reason := why_no_search(queries.device):
        raise ValueError(f"queries: on a GPU, need the CPU: {reason}")
    from maxsim_kernels.search.device import DeviceSearch
    from maxsim_kernels.search.queries import Queries

    return DeviceSearch(Queries(queries, mask, lengths), k, quantize_queries, most_rescored, memory_budget, watched)


def _blocks(
    documents: Packed | Rows | Iterable[Packed | Rows],
    codes: AnyCodes | Iterable[AnyCodes],
    residuals: Residuals | Iterable[Residuals] | None,
) -> Iterator[tuple[Packed | Rows, AnyCodes, Residuals | None]]:
    """Blocks beside their codes and residuals; a different number of them is refused."""
    if isinstance(documents, Packed | Rows):
        if not isinstance(codes, AnyCodes) or not isinstance(residuals, Residuals | None):
            raise ValueError("codes, residuals: got blocks of them with documents in one piece, need one of each")
        yield documents, codes, residuals
        return
    if isinstance(codes, AnyCodes) or isinstance(residuals, Residuals):
        raise ValueError("codes, residuals: got one piece with documents in blocks, need blocks of the same documents")
    sides = [iter(documents), iter(codes), *([iter(residuals)] if residuals is not None else [])]
    number = 0
    while True:
        held = [next(side, None) for side in sides]
        if all(one is None for one in held):
            return
        for (name, kinds), one in zip(_KINDS.items(), held, strict=False):
            if not isinstance(one, kinds):
                got = "no more blocks" if one is None else type(one).__name__
                need = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"{name}: got {got} as block {number}, need {need}")
        yield held[0], held[1], held[2] if residuals is not None else None  # type: ignore[misc]
        number += 1
