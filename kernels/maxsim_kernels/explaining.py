"""`explain`: which implementation a call would run, on what, and why, in a few lines."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from maxsim_kernels import api
from maxsim_kernels.checks import Call, Documents, Options, validate, validate_coded
from maxsim_kernels.coded import BitTokens, CodedTokens, ResidualTokens
from maxsim_kernels.cpu import integers
from maxsim_kernels.gpu.backward.path_choice import backward_path
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.modes import under_autocast
from maxsim_kernels.tokens import Fp8Tokens, Packed


def explain(
    queries: Tensor | Packed,
    documents: Documents | CodedTokens,
    *,
    pairs: bool = False,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    document_lengths: Tensor | None = None,
    return_argmax: bool = False,
    quantize_queries: bool = True,
    backward: str = "auto",
    impl: str = "auto",
) -> str:
    """Which implementation a call would run, on what, and why. Takes the arguments of `maxsim` (`pairs=True`: `maxsim_pairs`).

    Raises:
        ValueError, RuntimeError: where the call itself would.
    """
    options = Options(
        query_mask, document_mask, query_lengths, document_lengths, return_argmax, quantize_queries, backward, impl, pairs=pairs
    )
    if isinstance(documents, BitTokens | ResidualTokens):
        return _explain_coded(queries, documents, options)
    queries, tokens = under_autocast(queries, documents)
    call = validate(queries, tokens, options)
    found = api.implementation(call, impl)
    if found.name == "triton":
        found = api.Implementation("triton", _launch_reason(call))
    if call.granularity != "none":
        kind = "FP8" if isinstance(tokens, Fp8Tokens) else "INT8"
        queries_as = f"{kind} queries (one scale a token)" if quantize_queries else "float queries"
        products = f"{kind} codes, one scale a {call.granularity}, {queries_as}, scale after the product"
        if quantize_queries and kind == "INT8" and found.name == "cpu" and not pairs:
            products += integers.said(call.queries.shape[-1])
    else:
        products = f"{str(call.queries.dtype).removeprefix('torch.')} inputs, FP32 accumulation"
    gradients = "none (quantised documents)" if call.granularity != "none" else _gradients(call, found, backward)
    return _explained(call, found, products, f"gradients: {gradients}")


def _gradients(call: Call, found: api.Implementation, backward: str) -> str:
    """The path that gradients would take, and why. Where `backward` is refused: why, or the error if this call needs gradients."""
    if found.name == "reference":
        return "through plain torch, whatever `backward` says"
    try:
        path, why = backward_path(backward)
    except RuntimeError as error:
        if api.needs_gradient(call):
            raise
        return f"refused ({error})"
    return f"{path} ({why}{', the same bits for every path on CPU tensors' if found.name == 'cpu' else ''})"


def _explained(call: Call, found: api.Implementation, products: str, lines: str) -> str:
    held = "packed" if call.document_starts is not None else "dense"
    return (
        f"{found.name}: {found.reason}\n"
        f"layout: {call.layout}, {call.query_count} queries x {call.document_count} documents ({held}), d = {call.queries.shape[-1]}\n"
        f"products: {products}\n"
        f"{lines}"
    )


def _explain_coded(queries: Tensor | Packed, documents: CodedTokens, options: Options) -> str:
    call = validate_coded(queries, documents, options)
    found = api.implementation(call, options.impl)
    kind = f"{str(call.queries.dtype).removeprefix('torch.')} queries"
    if found.name == "triton":
        from maxsim_kernels.gpu.coded.choice import choose
        from maxsim_kernels.gpu.geometry import hardware

        found = api.Implementation("triton", _launch_words(*choose(call, documents, hardware(call.queries.device)[0])))
    else:
        found = api.Implementation(found.name, f"{found.reason}; decoded {api.CODED_TOKENS:,} tokens at a time")
    if isinstance(documents, BitTokens):
        asked = "INT8 queries (one scale a token)" if options.quantize_queries else kind
        slower = integers.said(documents.dim) if options.quantize_queries and found.name == "cpu" and not options.pairs else ""
        products = f"whole numbers of {documents.bits} bits, {asked}, one scale a token after the product{slower}"
    else:
        rounded = f"rounded to {kind}' dtype" if found.name == "triton" else "in FP32"
        products = f"centroids and {documents.bits}-bit residuals {rounded}, {kind}, FP32 accumulation"
    return _explained(call, found, products, "gradients: none (coded documents)")


def _launch_reason(call: Call) -> str:
    """Which kernel and configuration, and whether that row of the table was measured."""
    from maxsim_kernels.gpu.forward.choice import choose
    from maxsim_kernels.gpu.forward.unaligned import spread
    from maxsim_kernels.gpu.geometry import hardware

    winners = call.winners or (call.granularity == "none" and api.needs_gradient(call))
    queries = call.queries
    if call.granularity != "none" and call.quantize_queries:  # a stand-in for their codes
        queries = torch.empty(queries.shape, dtype=call.documents.dtype, device="meta")
    return _launch_words(*spread(choose(replace(call, winners=winners), hardware(call.queries.device)), call, queries))


def _launch_words(name: str, config: Config) -> str:
    tuned = "untuned" if config.measured == "untuned" else f"measured on {config.measured}"
    return f"{name} kernel, tiles of {config.rows} query rows x {config.tokens} document tokens, {tuned}: {config.reason}"
