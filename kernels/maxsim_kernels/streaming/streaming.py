"""Scoring a corpus block by block with a running exact top-k (paper section 'Out-of-core').

The order is fixed: score descending, then document index ascending, on every path and for every cut of the corpus (`topk.py`). Blocks
are cut into pieces of bounded size (`blocks.py`) and, where the queries are on a GPU, flow there through a ring of buffers while the
piece before is scored (`transfer.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing

import torch
from torch import Tensor

from maxsim_kernels.api import maxsim
from maxsim_kernels.checks import Documents
from maxsim_kernels.streaming.blocks import Block, LazyBlock, LazyCodes, Limits, pieces
from maxsim_kernels.streaming.links import CudaLink, HostLink, Link
from maxsim_kernels.streaming.transfer import Ring
from maxsim_kernels.tokens import Packed
from maxsim_kernels.topk import TopK, of_keys

__all__ = ["Block", "LazyBlock", "LazyCodes", "device_blocks", "least_budget", "stream_topk"]

_MIB = 1 << 20
# At most; larger ones gain nothing on a GPU, and on a CPU less than their memory is worth. There two hold 64 MiB of whole documents.
_GPU_BUFFER, _CPU_BUFFER = 128 * _MIB, 33 * _MIB
_LEAST_BUFFER, _LEAST_DOCUMENTS = _MIB, 64
_GPU_SCORING = 64 * _MIB  # what `maxsim` takes beyond inputs and scores (tests/gpu/test_gpu_large.py)
_GPU_BUDGET, _CPU_BUDGET = 2048 * _MIB, 160 * _MIB  # unless a call says otherwise
_PAIR_BYTES = 48  # of a (query, document) pair: its score, twice, and the top-k's temporaries at their worst
_DOCUMENT_BYTES = 64  # tables of tiles
_ALIGNED = 4096


def stream_topk(
    queries: Tensor | Packed,
    blocks: Iterable[Block],
    k: int,
    *,
    query_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    quantize_queries: bool = True,
    impl: str = "auto",
    memory_budget: int | None = None,
    readers: int = 8,
) -> tuple[Tensor, Tensor]:
    """Exact top-k documents of each query over blocks of documents that need not fit in memory together.

    Args:
        queries: `[Lq, d]`, `[Nq, Lq, d]` or `Packed`, with mask and lengths as in `maxsim`; scoring runs on their device.
        blocks: documents in index order: `Packed`, `[b, Ld, d]`, `Int8Tokens` or `Fp8Tokens`, on the host or on the queries' device, or
            `LazyBlock` or `LazyCodes`; indices count over all blocks. Host blocks are read ahead: they must not change before the call
            returns.
        k: at least 1.
        memory_budget, readers: as in `device_blocks`; the k best of each query are part of the budget.

    Returns:
        scores float32 and indices int64, `[Nq, k]` (`[k]` for one query), on the queries' device, score descending, ties by index
        ascending; rows short of k end in -inf and -1. The same bits for every cut, budget and number of readers.

    Raises:
        ValueError: names the argument, what it got and what it needs; a NaN score, by query and document. What a lazy block's `read`
            raises arrives unchanged.
    """
    single = isinstance(queries, Tensor) and queries.dim() == 2
    count = 1 if single else len(queries)
    best = TopK(count, k, queries.device)
    kept = 4 * 8 * count * k  # the best so far, beside the candidates that they are merged with
    with torch.no_grad(), closing(_stream(blocks, queries.device, count, memory_budget, kept, readers)) as documents:
        for block in documents:
            scores = maxsim(
                queries,
                block,
                query_mask=query_mask,
                query_lengths=query_lengths,
                quantize_queries=quantize_queries,
                impl=impl,
            )
            assert isinstance(scores, Tensor)
            best.add(scores.unsqueeze(0) if single else scores)
            del scores  # before the next piece's
    scores, indices = of_keys(best.keys)
    return (scores[0], indices[0]) if single else (scores, indices)


def device_blocks(
    blocks: Iterable[Block],
    device: torch.device | str,
    *,
    queries: int,
    memory_budget: int | None = None,
    readers: int = 8,
) -> Generator[Documents]:
    """The same documents in order, on `device`, in pieces that keep everything in flight within a budget.

    Host blocks and lazy ones reach a GPU through pinned buffers that reader threads fill and a copy stream of their own, several
    pieces ahead; pinned blocks are copied from where they lie; blocks on the device are only sliced. On a CPU host blocks are sliced,
    and lazy ones are read ahead. Empty blocks give no piece.

    A yielded piece is valid until the next one is asked for: its memory is used again then, behind whatever the caller queued on the
    stream that was current when it got the piece or is current when it asks for the next (a GPU is never waited for). Close the
    generator (`contextlib.closing`) where a loop may end early; that ends its threads.

    Args:
        blocks: as in `stream_topk`. It is iterated a few pieces ahead in the caller's thread; host blocks must not change meanwhile.
        device: "cpu", or a CUDA device.
        queries: how many queries the documents will be scored against: bounds the documents of a piece.
        memory_budget: bytes of the device's memory for buffers, scores and the temporaries of `maxsim` and `TopK`. Default: 2 GiB or,
            if less, half of what is free; 160 MiB on a CPU. Pieces of at most 128 MiB (CPU: 33) do not depend on the corpus, so memory
            stays flat; but a document larger than a piece gets a buffer of its own size, within the budget or not.
        readers: reader threads (each copies about 5 GB/s from a page cache or pageable memory); a CPU takes 2 at most. Host buffers
            come on top of the budget: 4 pieces, at most twice their size (CPU: part of the budget).

    Raises:
        ValueError: a budget too small for pieces of 1 MiB and 64 documents, with what is needed; a block of another kind or device.
    """
    return _stream(blocks, torch.device(device), queries, memory_budget, 0, readers)


def _stream(
    blocks: Iterable[Block], device: torch.device, queries: int, budget: int | None, kept: int, readers: int
) -> Generator[Documents]:
    """`device_blocks`, checked at once; `kept`: bytes of the budget that are in use by something else."""
    if readers < 1:
        raise ValueError(f"readers: got {readers}, need 1 or more")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, need cpu or cuda")
    link: Link
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        link = CudaLink(device)
    else:
        device, link, readers = torch.device("cpu"), HostLink(), min(readers, 2)
    limits = _limits(device, link, queries, budget, kept)
    return Ring(link, limits.size, readers).documents(pieces(blocks, device, limits))


def least_budget(device: torch.device | str, queries: int) -> int:
    """The smallest `memory_budget` of `device_blocks`, in bytes."""
    gpu = torch.device(device).type == "cuda"
    buffers = CudaLink.rooms if gpu else HostLink.hosts
    document = max(1, queries) * _PAIR_BYTES + _DOCUMENT_BYTES
    return (_GPU_SCORING if gpu else 0) + (buffers + 1) * max(_LEAST_BUFFER, _LEAST_DOCUMENTS * document)


def _limits(device: torch.device, link: Link, queries: int, budget: int | None, kept: int) -> Limits:
    """Sizes from the budget, the number of queries and the device; never from the corpus."""
    gpu = device.type == "cuda"
    fixed, most = (_GPU_SCORING, _GPU_BUFFER) if gpu else (0, _CPU_BUFFER)
    buffers = link.rooms or link.hosts
    document = max(1, queries) * _PAIR_BYTES + _DOCUMENT_BYTES
    least = kept + least_budget(device, queries)
    if budget is None:
        budget = max(least, min(_GPU_BUDGET, _free(device) // 2) + kept if gpu else _CPU_BUDGET + kept)
    elif budget < least:
        raise ValueError(f"memory_budget: got {budget} bytes, need at least {least} for {queries} queries")
    rest = budget - kept - fixed
    size = min(most, rest // (buffers + 1)) // _ALIGNED * _ALIGNED
    return Limits(size, (rest - buffers * size) // document)


def _free(device: torch.device) -> int:
    """Bytes that this process could still get: free on the device, or held by torch's allocator without use."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
