"""Validation of a call's arguments: shapes, dtypes and devices at once; *values* of offsets, lengths and masks inside the operators.

Every message names the argument, what it got and what it needs. Only `check_rows` and `check_padded`, which the operators call, read
a tensor's values; nothing else waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maxsim_kernels.coded import CodedTokens
from maxsim_kernels.modes import check_tensors, ordinary, transformed, unusual
from maxsim_kernels.needs import describe, need
from maxsim_kernels.tokens import FLOAT_DTYPES, INDEX_DTYPES, Fp8Tokens, Int8Tokens, Packed, held_of

Documents = Tensor | Packed | Int8Tokens | Fp8Tokens
Layout = Literal["shared", "per_query", "pairs"]
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BACKWARDS = ("auto", "unified", "atomic", "csr")
IMPLS = ("auto", "triton", "cpu", "reference")


class Options(NamedTuple):
    """The options of a call, as `maxsim` takes them beside its tokens: the four tensors first (`TENSORS`), then the others.

    A named tuple, because every call makes one, replayed calls too: a frozen dataclass takes the host three times as long.
    """

    query_mask: Tensor | None = None
    document_mask: Tensor | None = None
    query_lengths: Tensor | None = None
    document_lengths: Tensor | None = None
    return_argmax: bool = False
    quantize_queries: bool = True
    backward: str = "auto"
    impl: str = "auto"
    pairs: bool = False
    lean: bool = False  # winners for the backward alone, in 16 bits; no public argument
    out: torch.dtype = torch.float32  # dtype of the scores, rounded once; set by the integrations
    # Score of a document without a token that counts, whatever the query; None: as `maxsim` says. Set by the integrations.
    empty_score: float | None = None
    # How a GPU multiplies float32 in this call ("tf32", "ieee"); None: as torch is set. Set by the integrations.
    fp32: str | None = None


TENSORS: Final = 4  # how many fields of `Options` are tensors: the first ones


@dataclass(frozen=True)
class Call:
    """A validated call, with the single-query form lifted to a batch of one.

    `queries`: `[Nq, Lq, d]` or `[T, d]` with `query_starts` and `query_lengths`. `documents`: float tensor or codes, `[B, Ld, d]`,
    `[Nq, B, Ld, d]`, or `[T, d]` with `document_starts` and `document_lengths`. Masks and lengths are None or as given.
    """

    layout: Layout
    queries: Tensor
    query_starts: Tensor | None
    query_lengths: Tensor | None
    query_mask: Tensor | None
    documents: Tensor
    document_starts: Tensor | None
    document_lengths: Tensor | None
    document_mask: Tensor | None
    scales: Tensor | None
    offset: Tensor | None
    granularity: str
    quantize_queries: bool
    winners: bool  # whether the forward leaves winners; always where a gradient is wanted
    lean: bool  # on a GPU: int16 winners, the low 16 bits of each
    single_query: bool
    end_to_end: bool  # packed documents follow each other in the buffer; views may overlap
    queries_end_to_end: bool  # the same of packed queries
    out: torch.dtype = torch.float32  # as `Options` says
    empty_score: float | None = None
    fp32: str | None = None

    @property
    def query_count(self) -> int:
        """Nq: how many queries the call has."""
        return self.queries.shape[0] if self.query_starts is None else self.query_starts.shape[0]

    @property
    def document_count(self) -> int:
        """N: documents scored by each query (per pair: the number of pairs)."""
        if self.document_starts is not None:
            return self.document_starts.shape[0]
        return self.documents.shape[1] if self.layout == "per_query" else self.documents.shape[0]


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value outside `known`."""
    if value not in known:
        need(False, name, repr(value), "one of " + ", ".join(map(repr, known)))


def check_lengths(name: str, lengths: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse lengths that are no integers, or of another shape or device; their values are looked at by `check_padded`."""
    if lengths is None:
        return
    need(isinstance(lengths, Tensor) and lengths.dtype in INDEX_DTYPES, name, describe(lengths), "int32 or int64")
    need(tuple(lengths.shape) == shape, name, list(lengths.shape), list(shape))
    need(lengths.device == device, name, f"a tensor on {lengths.device}", f"one on {device}")


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """As `check_lengths`, of a mask."""
    if mask is None:
        return
    need(isinstance(mask, Tensor) and mask.dtype in MASK_DTYPES, name, describe(mask), "bool or 0/1 integers")
    need(tuple(mask.shape) == shape, name, list(mask.shape), list(shape))
    need(mask.device == device, name, f"a tensor on {mask.device}", f"one on {device}")


_Side = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # values, starts, lengths, mask


def _packed_side(name: str, packed: Packed, mask: Tensor | None, lengths: Tensor | None) -> _Side:
    if mask is not None or lengths is not None:
        what = f"{name}_mask" if mask is not None else f"{name}_lengths"
        raise ValueError(f"{what}: got a value with Packed, which has no padding to mask, need None")
    return packed.values, packed.starts, packed.lengths, None


def tensors_of(queries: Tensor | Packed, documents: Documents, held: Tensor | Packed, options: Options) -> list[Tensor | None]:
    """Every tensor of a call, in a fixed order, queries and documents first. `held`: the documents, or the codes of quantised ones."""
    values = queries.values if isinstance(queries, Packed) else queries
    found = [values, held.values if isinstance(held, Packed) else held, *options[:TENSORS]]
    for packed in (queries, held):
        if isinstance(packed, Packed):
            found += [packed.starts, packed.lengths]
    if held is not documents:
        found += [documents.scales, documents.offset]  # type: ignore[union-attr]
    return found


def _named(queries: Tensor | Packed, documents: Documents, options: Options) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a call with its name; arguments of other types are left out, for the checks to refuse."""
    sides: list[tuple[str, object]] = [("queries", queries), ("documents", documents)]
    if isinstance(documents, Int8Tokens | Fp8Tokens):
        offset = documents.offset if isinstance(documents, Int8Tokens) else None
        sides[1:] = [("documents", documents.codes), ("documents.scales", documents.scales), ("documents.offset", offset)]
    for name, side in (*sides, *zip(Options._fields, options[:TENSORS], strict=False)):
        if isinstance(side, Packed):
            yield name, side.values
            yield f"{name}.starts", side.starts
            yield f"{name}.lengths", side.lengths
        elif isinstance(side, Tensor):
            yield name, side


def _query_side(queries: Tensor | Packed, options: Options, single: bool) -> _Side:
    """The tensors of the queries, checked; `single`: they are one `[Lq, d]`, which becomes a batch of one."""
    mask, lengths = options.query_mask, options.query_lengths
    if isinstance(queries, Packed):
        return _packed_side("query", queries, mask, lengths)
    if single:
        queries, mask, lengths = queries.unsqueeze(0), _lift(mask, 1), _lift(lengths, 0)
    wanted = "[N, Lq, d] or Packed" if options.pairs else "[Lq, d], [Nq, Lq, d] or Packed"
    need(queries.dim() == 3 and queries.shape[-1] >= 1, "queries", list(queries.shape), wanted)
    check_mask("query_mask", mask, tuple(queries.shape[:2]), queries.device)
    check_lengths("query_lengths", lengths, (queries.shape[0],), queries.device)
    return queries, None, lengths, mask


def _document_side(held: Tensor | Packed, options: Options, queries: int) -> _Side:
    """The tensors of the documents, checked; `queries`: how many queries there are."""
    mask, lengths = options.document_mask, options.document_lengths
    if isinstance(held, Packed):
        return _packed_side("document", held, mask, lengths)
    if options.pairs:
        need(held.dim() == 3, "documents", list(held.shape), "[N, Ld, d] or packed")
    else:
        need(held.dim() in (3, 4), "documents", list(held.shape), "[B, Ld, d], [Nq, B, Ld, d] or packed")
        if held.dim() == 4:
            need(held.shape[0] == queries, "documents", list(held.shape), f"[{queries}, B, Ld, d] for {queries} queries")
    check_mask("document_mask", mask, tuple(held.shape[:-1]), held.device)
    check_lengths("document_lengths", lengths, tuple(held.shape[:-2]), held.device)
    return held, None, lengths, mask


def validate(
    queries: Tensor | Packed,
    documents: Documents,
    options: Options,
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
) -> Call:
    """Check everything that shapes, dtypes and devices can tell, and bring the call to one form."""
    check_choice("backward", options.backward, BACKWARDS)
    check_choice("impl", options.impl, IMPLS)
    pairs = options.pairs
    quantized = documents if isinstance(documents, Int8Tokens | Fp8Tokens) else None
    held = held_of(documents)
    need(isinstance(queries, Tensor | Packed), "queries", describe(queries), "a tensor or Packed")
    need(isinstance(held, Tensor | Packed), "documents", describe(held), "a tensor, Packed, Int8Tokens or Fp8Tokens")

    if unusual(tensors_of(queries, documents, held, options)):
        check_tensors("maxsim_pairs" if pairs else "maxsim", _named(queries, documents, options))

    single = isinstance(queries, Tensor) and queries.dim() == 2 and not pairs
    query_values, query_starts, query_lengths, query_mask = _query_side(queries, options, single)
    count = query_values.shape[0] if query_starts is None else query_starts.shape[0]
    values, document_starts, document_lengths, document_mask = _document_side(held, options, count)
    layout: Layout = "pairs" if pairs else "per_query" if values.dim() == 4 else "shared"
    width = query_values.shape[-1]
    need(values.shape[-1] == width, "documents", f"d = {values.shape[-1]}", f"the queries' d = {width}")
    need(query_values.dtype in dtypes, "queries", query_values.dtype, "float16, bfloat16 or float32")
    if quantized is None:
        need(values.dtype == query_values.dtype, "documents", values.dtype, f"the queries' dtype {query_values.dtype}")
    need(values.device == query_values.device, "documents", f"on {values.device}", f"on {query_values.device} as queries")
    call = Call(
        layout=layout,
        queries=query_values,
        query_starts=query_starts,
        query_lengths=query_lengths,
        query_mask=query_mask,
        documents=values,
        document_starts=document_starts,
        document_lengths=document_lengths,
        document_mask=document_mask,
        scales=None if quantized is None else quantized.scales,
        offset=quantized.offset if isinstance(quantized, Int8Tokens) else None,
        granularity="none" if quantized is None else quantized.granularity,
        quantize_queries=options.quantize_queries,
        winners=options.return_argmax,
        lean=options.lean,
        single_query=single,
        end_to_end=isinstance(held, Packed) and held.offsets is not None,
        queries_end_to_end=isinstance(queries, Packed) and queries.offsets is not None,
        out=options.out,
        empty_score=options.empty_score,
        fp32=options.fp32,
    )
    if pairs:
        got = f"{call.document_count} documents"
        need(call.query_count == call.document_count, "documents", got, f"{call.query_count}, one a query")
    return call


def validate_coded(queries: Tensor | Packed, documents: CodedTokens, options: Options) -> Call:
    """`validate` for coded tokens; the call's `documents` are a stand-in of the decoded shape, which takes no memory."""
    kind = type(documents).__name__
    if torch.compiler.is_compiling():
        raise RuntimeError(f"documents: got {kind} inside torch.compile, need an eager call (torch.compiler.disable)")
    need(not options.return_argmax, "return_argmax", f"True with {kind}", "False: winners are given for .dequantize()")
    need(isinstance(queries, Tensor | Packed), "queries", describe(queries), "a tensor or Packed")
    values = queries.values if isinstance(queries, Packed) else queries
    beside = [tensor for _, tensor in documents.tensors()[1:]]
    if unusual([*tensors_of(queries, documents.codes, documents.codes, options), *beside]):
        named = [(f"documents.{name}", tensor) for name, tensor in documents.tensors()]
        operator = "maxsim_pairs" if options.pairs else "maxsim"
        check_tensors(operator, [*_named(queries, documents.codes, options), *named])
    if torch.is_grad_enabled() and any(one.requires_grad for one in (values, *beside)):
        raise ValueError(f"queries, documents: got requires_grad with {kind}, which have no gradient; detach them")
    codes = documents.codes
    one = torch.empty(1, 1, dtype=values.dtype, device=documents.device)
    # A view: it keeps the tensors of starts and lengths, which a recorded launch has to know.
    stand_in = Packed.view(one.expand(codes.values.shape[0], documents.dim), codes.starts, codes.lengths)
    return replace(validate(queries, stand_in, options), end_to_end=codes.offsets is not None)


def _lift(tensor: Tensor | None, rank: int) -> Tensor | None:
    """Give a single query's mask or length its batch dimension; a tensor of another rank stays, for the checks to refuse."""
    if isinstance(tensor, Tensor) and tensor.dim() == rank:
        return tensor.unsqueeze(0)
    return tensor


def check_rows(name: str, starts: Tensor, lengths: Tensor, tokens: int) -> np.ndarray:
    """Check the values of packed rows (reads them): starts at 0 or above, lengths not negative, ends inside `tokens`.

    Returns:
        The lengths `[N]`, int64, on the host.
    """
    first, count = torch.stack((starts.long(), lengths.long())).cpu().numpy()
    for what, bad in (("start", first < 0), ("length", count < 0), ("end", count > tokens - first)):
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{name}: row {row} has a bad {what} (start {first[row]}, length {count[row]}); "
                f"need rows inside {tokens} tokens, offsets starting at 0 and never decreasing"
            )
    return count


def check_padded(side: str, mask: Tensor | None, lengths: Tensor | None, size: int) -> None:
    """Check the values of a mask and lengths of padded tokens (CPU only: reads them); `side`: prefix of the arguments' names."""
    if lengths is not None and lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > size):
        raise ValueError(f"{side}lengths: got {int(lengths.min())}..{int(lengths.max())}, need 0..{size} (the padded size)")
    if mask is not None and mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{side}mask: got integers other than 0 and 1, need bool or 0/1 integers")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call may skip the custom op: eager, no gradient, ordinary tensors. The op costs a dispatch, and on its first call
    the import of torch's compiler (over a second)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed():  # someone traces what runs
        return False
    return ordinary(tensors)
