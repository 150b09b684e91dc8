"""`maxsim_reference`: MaxSim in plain chunked torch, TF32 off, sharing no arithmetic with any fast path.

Matrix products of one shape, maxima, sums: the paper's chunked FP32 einsum (appendix 'Benchmarking Protocol'), differentiable by
autograd alone. `dtype=torch.float64` gives the truth for tests; `torch.float32` is the toolkit's `fp32` path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels.checks import Call, Documents, Options, validate
from maxsim_kernels.coded import BitTokens, CodedTokens, ResidualTokens, plain_of
from maxsim_kernels.modes import under_autocast
from maxsim_kernels.needs import need
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.reference.products import has_float64, score_rows, true_precision
from maxsim_kernels.reference.rows import asked_of, rows_of
from maxsim_kernels.tokens import FLOAT_DTYPES, Fp8Tokens, Int8Tokens, Packed

_DTYPES = (*FLOAT_DTYPES, torch.float64)


def maxsim_reference(
    queries: Tensor | Packed,
    documents: Documents | CodedTokens,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    return_argmax: bool = False,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
    pairs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """MaxSim scores in `dtype`, computed in `dtype` from the inputs as they are.

    Args: as `maxsim` (`pairs=True`: as `maxsim_pairs`); `backward` and `impl` are checked and change nothing, so that a call can
    be swapped for this one. Quantised and coded documents are dequantised in full, and queries quantised and
    dequantised when `quantize_queries`, so the result is the truth for those codes. Differentiable in float inputs.
    `dtype`: float16, bfloat16, float32 or float64.

    Raises:
        ValueError: names the argument, what it got and what it needs; also where quantised or coded documents meet inputs that
            require gradients, as in `maxsim`.
        RuntimeError: under a transform of `torch.func`, or with forward-mode tangents.
    """
    options = Options(
        query_mask, document_mask, query_lengths, document_lengths, return_argmax, quantize_queries, backward, impl, pairs
    )
    if isinstance(documents, BitTokens | ResidualTokens):
        beside = [tensor for _, tensor in documents.tensors()]
        _refuse_gradient(type(documents).__name__, queries, *beside)
        if isinstance(documents, ResidualTokens):
            queries = queries.to(torch.float32)  # as the decoded tokens are
        documents = plain_of(documents)
    return score(*under_autocast(queries, documents), options, dtype)


def score(
    queries: Tensor | Packed, documents: Documents, options: Options, dtype: torch.dtype = torch.float32
) -> Tensor | tuple[Tensor, Tensor]:
    """`maxsim_reference` of documents that are not coded, with its options in one `Options`."""
    need(dtype in _DTYPES, "dtype", dtype, "torch.float16, torch.bfloat16, torch.float32 or torch.float64")
    if isinstance(documents, Int8Tokens | Fp8Tokens):
        offset = documents.offset if isinstance(documents, Int8Tokens) else None
        _refuse_gradient("quantised documents", queries, documents.codes, documents.scales, offset)
        plain: Tensor | Packed = documents.dequantize(torch.float64 if dtype == torch.float64 else torch.float32)
        if options.quantize_queries:
            queries = _requantized(queries, isinstance(documents, Fp8Tokens), options.query_mask, options.query_lengths)
        values = plain.values if isinstance(plain, Packed) else plain
        queries = queries.to(values.dtype)
    else:
        plain = documents
    call = validate(queries, plain, options, dtypes=_DTYPES)
    if dtype == torch.float64 and not has_float64(call.queries.device):
        raise ValueError(f"dtype: got torch.float64, which {call.queries.device.type} devices do not have, need torch.float32")
    with true_precision():
        scores, argmax = _scores_of(call, dtype)
    if call.queries.requires_grad or call.documents.requires_grad:
        # A sum of nothing ties the scores to the inputs, so that "no valid token anywhere" has a gradient too: zero.
        scores = scores + (call.queries.flatten()[:0].sum() + call.documents.flatten()[:0].sum()).to(dtype)
    if call.single_query:
        scores, argmax = scores[0], argmax[0]
    return (scores, argmax) if call.winners else scores


def _refuse_gradient(kind: str, *inputs: object) -> None:
    """Refuse inputs that require gradients in a call with this kind of documents, as `maxsim` does: rounded queries would get none."""
    tensors = [one.values if isinstance(one, Packed) else one for one in inputs]
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in tensors):
        raise ValueError(f"queries, documents: got requires_grad with {kind}, which have no gradient; detach them")


def _requantized(queries: Tensor | Packed, fp8: bool, mask: Tensor | None, lengths: Tensor | None) -> Tensor | Packed:
    """Queries as the quantised paths see them: one scale a token, whatever the documents' granularity."""
    quantize = quantize_fp8 if fp8 else quantize_int8
    return quantize(queries, "token", mask=mask, lengths=lengths).dequantize()


def _scores_of(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores `[Nq, N]` (pairs: `[N]`) and argmax, int32, the same plus `[max Lq]` (meaningless when not asked for)."""
    places = call.query_starts, call.query_lengths, call.query_mask
    queries = rows_of("query", call.queries, *places, end_to_end=call.queries_end_to_end)
    width = queries.size
    if call.layout == "shared":
        places = call.document_starts, call.document_lengths, call.document_mask
        documents = rows_of("document", call.documents, *places, end_to_end=call.end_to_end)
        return score_rows(asked_of(queries, dtype), documents, dtype, call.winners)
    one_by_one = [queries.part(n, n + 1) for n in range(call.query_count)]
    if call.layout == "per_query":
        parts = []
        for n, query in enumerate(one_by_one):
            mask = None if call.document_mask is None else call.document_mask[n]
            lengths = None if call.document_lengths is None else call.document_lengths[n]
            documents = rows_of("document", call.documents[n], None, lengths, mask)
            parts.append(score_rows(asked_of(query, dtype), documents, dtype, call.winners))
        shape: tuple[int, ...] = (0, call.document_count)
    else:
        documents = rows_of("document", call.documents, call.document_starts, call.document_lengths, call.document_mask)
        parts = [
            score_rows(asked_of(query, dtype), documents.part(n, n + 1), dtype, call.winners, together=False)
            for n, query in enumerate(one_by_one)
        ]
        parts = [(scores[0], argmax[0]) for scores, argmax in parts]
        shape = (0,)
    if not parts:
        empty = torch.zeros(*shape, width, dtype=torch.int32, device=call.documents.device)
        return call.documents.new_zeros(shape, dtype=dtype), empty
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
