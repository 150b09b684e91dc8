"""Compiling ahead: the kernels that a server's calls will need, so that no user waits for a compiler.

Everything of `gpu/` is imported where it is used: it needs Triton, which importing this package must not.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxsim_kernels import fallback
from maxsim_kernels.api import maxsim, maxsim_pairs
from maxsim_kernels.checks import Call, Documents, Options, validate
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed

if TYPE_CHECKING:
    from maxsim_kernels.gpu.forward.choice import Launch
    from maxsim_kernels.gpu.forward.tuning import Config

_CUT_TOKENS = 1024  # of a packed buffer, from which on every kernel cuts few documents into pieces
FORMS = ("dense", "lengths", "mask", "packed", "pairs", "training", "int8", "fp8")


def warmup(
    device: torch.device | str | None = None,
    *,
    dim: int = 128,
    dtype: torch.dtype = torch.float16,
    queries: Sequence[tuple[int, int]] = ((1, 32), (64, 32), (1, 1024)),
    document_tokens: Sequence[int] = (180, 1024),
    forms: Sequence[str] = ("dense", "packed"),
    return_argmax: bool = False,
) -> str:
    """Compile the kernels of the calls described, by making small ones; Triton keeps them on disk for later processes too.

    Args:
        device: where calls will run; the current GPU by default, and nothing to do where there is none.
        dim, dtype: of the embeddings.
        queries: (queries, tokens a query) of each kind of call; counts beyond a few hundred rows need no other kernel.
        document_tokens: padded lengths of documents to come (packed: mean lengths); any number of documents is covered, except
            a few packed ones that together are shorter than a tile of a wide embedding (256 tokens).
        forms: which of "dense", "lengths", "mask", "packed", "pairs", "training" (dense, both gradients), "int8" (all three
            granularities, dense and packed) and "fp8".
        return_argmax: compile for winners as well.

    Returns:
        What was done: calls made, seconds.

    Raises:
        ValueError: an unknown form.
    """
    unknown = set(forms) - set(FORMS)
    if unknown:
        raise ValueError(f"forms: got {sorted(unknown)}, need some of {', '.join(FORMS)}")
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if place.type != "cuda":
        return f"{place}: nothing to compile"
    if not fallback.HAS_TRITON:
        return f"{place}: nothing to compile, Triton is not installed"
    started, calls, counts = time.perf_counter(), 0, numbers(place)
    with torch.cuda.device(place), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # real calls will warn of what falls back
        for count, size in queries:
            asked = torch.zeros(count, size, dim, dtype=dtype, device=place)
            for length, number in itertools.product(document_tokens, counts):
                for run in _calls(asked, (number, length), forms, most=number == counts[-1]):
                    for winners in (False, True)[: 1 + return_argmax]:
                        run(winners)
                        calls += 1
    torch.cuda.synchronize(place)
    return f"{place}: {calls} calls compiled or found compiled in {time.perf_counter() - started:.1f} s"


def packed_tokens(count: int, length: int) -> int:
    """Tokens of each of `count` packed documents: `length`, or more if together they would not exceed `_CUT_TOKENS`."""
    return max(length, _CUT_TOKENS // count + 1)


def _calls(
    queries: Tensor, sizes: tuple[int, int], forms: Sequence[str], *, most: bool = False
) -> Iterator[Callable[[bool], object]]:
    """Calls of these queries against `sizes` (documents, tokens each) in every form; a call takes whether winners are wanted.

    `most`: whether there are as many documents as the largest of `numbers`; kernels for still more documents are then compiled too.
    """
    (count, length), device = sizes, queries.device
    documents = torch.zeros(*sizes, queries.shape[-1], dtype=queries.dtype, device=device)
    each = torch.full((count,), length, device=device)
    size = packed_tokens(count, length)
    values = torch.zeros(count * size, queries.shape[-1], dtype=queries.dtype, device=device)
    packed = Packed(values, torch.arange(count + 1, device=device) * size)
    kinds: dict[str, tuple[Documents, dict[str, Tensor]]] = {"dense": (documents, {}), "packed": (packed, {})}
    kinds["lengths"] = (documents, {"document_lengths": each})
    kinds["mask"] = (documents, {"document_mask": torch.ones(sizes, dtype=torch.bool, device=device)})
    for form in forms:
        if form == "pairs":
            pairs = torch.zeros(queries.shape[0], length, queries.shape[-1], dtype=queries.dtype, device=device)
            yield lambda winners, pairs=pairs: maxsim_pairs(queries, pairs, return_argmax=winners)  # type: ignore[misc]
        elif form == "training":
            yield lambda winners: _trained(queries, documents, winners)
        elif form in kinds:
            held, options = kinds[form]
            yield lambda winners, held=held, options=options: _scored(queries, held, winners, most, **options)  # type: ignore[misc]
        else:
            for codes in _codes(documents, packed, form):
                yield lambda winners, codes=codes: _scored(queries, codes, winners, most)  # type: ignore[misc]


def _scored(
    queries: Tensor, documents: Documents, winners: bool, most: bool, **options: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    found = maxsim(queries, documents, return_argmax=winners, **options)  # type: ignore[arg-type]
    if queries.is_cuda:
        call = validate(queries, documents, Options(return_argmax=winners, **options))  # type: ignore[arg-type]
        other_lengths(call)
        if most:
            other_numbers(call)
    return found


def _trained(queries: Tensor, documents: Tensor, winners: bool) -> Tensor:
    with torch.enable_grad():
        sides = (queries.detach().requires_grad_(), documents.detach().requires_grad_())
        found = maxsim(*sides, return_argmax=winners)
        scores = found[0] if winners else found
        assert isinstance(scores, Tensor)
        scores.sum().backward()
    return scores.detach()


def _codes(documents: Tensor, packed: Packed, form: str) -> Iterator[Int8Tokens | Fp8Tokens]:
    quantize = quantize_int8 if form == "int8" else quantize_fp8
    for granularity in ("token", "document", "corpus"):
        for tokens in (documents, packed):
            yield quantize(tokens, granularity)


def numbers(device: torch.device) -> tuple[int, ...]:
    """Numbers of documents that together need every kernel except those of `other_numbers`.

    Few documents may be cut into pieces, whose maxima are merged for eight documents at once if there are eight; from half as many
    documents as multiprocessors on, none is cut.
    """
    from maxsim_kernels.gpu.geometry import hardware

    return (1, 8, hardware(device)[1] // 2 + 1)


def other_lengths(call: Call) -> None:
    """Launch the kernels that such documents would need if there were more, or (ragged ones) if they were longer or shorter."""
    from maxsim_kernels.gpu.forward.choice import choose, every_choice
    from maxsim_kernels.gpu.geometry import hardware

    gpu = hardware(call.queries.device)
    if choose(call, gpu).kernel in ("dense", "ragged"):
        _launch_all(call, every_choice(call, gpu))


def other_numbers(call: Call) -> None:
    """Launch the other kernels that thousands of such documents would need: other tiles for few query rows, tables of ragged ones."""
    from maxsim_kernels.gpu.forward.choice import choose, every_choice
    from maxsim_kernels.gpu.geometry import hardware

    gpu = hardware(call.queries.device)
    chosen, others = choose(call, gpu), every_choice(call, gpu)
    if chosen.kernel == "stream":
        _launch_all(call, others)
    if chosen.kernel == "ragged":
        for config in {one.config for one in (chosen, *others)}:
            _tables(call, config)


def _launch_all(call: Call, choices: list[Launch]) -> None:
    from maxsim_kernels.gpu.forward import dispatch

    device = call.queries.device
    scores = torch.empty(call.query_count, call.document_count, dtype=torch.float32, device=device)
    argmax = torch.empty(*scores.shape, call.queries.shape[1], dtype=torch.int32, device=device) if call.winners else None
    for choice in choices:
        dispatch.launch(call, scores, argmax, choice)


def _tables(call: Call, config: Config) -> None:
    """Build the tables of tiles that large numbers of documents need."""
    from maxsim_kernels.gpu.forward.tile_tables import LAID_OUT, tiles_of

    for count in LAID_OUT:
        documents, starts, lengths, mask = call.documents, call.document_starts, call.document_lengths, call.document_mask
        if starts is None:
            documents = documents[:1].expand(count + 1, -1, -1)
        else:
            starts = starts.new_zeros(count + 1)
        lengths = None if lengths is None else lengths.new_ones(count + 1)
        mask = None if mask is None else mask[:1].expand(count + 1, -1)
        many = replace(call, documents=documents, document_starts=starts, document_lengths=lengths, document_mask=mask)
        tiles_of(many, config.tokens, config.short, 1)
