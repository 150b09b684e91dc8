"""INT8 and FP8 quantisation of token embeddings.

Symmetric: `scale = absmax / 127`, rounded to its stored type first, then `code = round(x / scale)`. Affine: `scale = (max - min) / 255`
and an offset, so that `x ~ code * scale + offset` with int8 codes. One scale a token, a document or a corpus.

Scales are FP16: at d = 128 a token takes 128 + 2 bytes against 256 in FP16, the 1.97x of the paper (section 'INT8', appendix
'INT8 algorithm').
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxsim_kernels.checks import check_lengths, check_mask, check_padded, is_plain
from maxsim_kernels.needs import describe
from maxsim_kernels.tokens import FLOAT_DTYPES, Fp8Tokens, Granularity, Int8Tokens, Packed, check_granularity, per_token

_SCALE_DTYPE = torch.float16
_SMALLEST_SCALE = 2.0**-24  # the smallest FP16 subnormal: a tiny token keeps a nonzero scale
_FP8_MAX = 448.0  # largest finite e4m3 value


def quantize_int8(
    tokens: Tensor | Packed,
    granularity: Granularity = "token",
    affine: bool = False,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Int8Tokens:
    """Quantise token embeddings to INT8 codes and FP16 scales.

    Args:
        tokens: float `[..., L, d]`, or `Packed` (a view is compacted first).
        granularity: one scale a "token", "document" (the leading dimensions) or "corpus".
        affine: asymmetric codes with an offset (the paper's uint8 variant, codes shifted by 128 into int8).
        mask, lengths: valid tokens of padded input, `[..., L]` bool or 0/1 and `[...]`; padding never sets a scale, its codes
            are 0. Refused with `Packed`, which has no padding.
        scale: a corpus scale found earlier (symmetric corpus granularity only); values beyond 127 scales are clipped.

    Returns:
        `Int8Tokens`. A zero token has scale 1 and codes 0. A token that is not finite, or whose scale FP16 cannot hold, gets a
        NaN scale (granularity "token") or is a `ValueError` ("document", "corpus").
    """
    check_granularity(granularity)
    given = None
    if scale is not None:
        if granularity != "corpus" or affine:
            raise ValueError("scale: got a value, need None except for symmetric codes with granularity='corpus'")
        given = torch.as_tensor(scale, dtype=_SCALE_DTYPE, device=scale.device if isinstance(scale, Tensor) else "cpu")
    packed, values = _held(tokens, mask, lengths)
    offsets = None if packed is None else packed.offsets
    kind = "int8-affine" if affine else "int8"
    codes, scales, offset = _quantize(values, mask, lengths, offsets, granularity, kind, given)
    held = codes if packed is None else packed.with_values(codes)
    return Int8Tokens(held, scales, offset if affine else None, granularity)


def quantize_fp8(
    tokens: Tensor | Packed,
    granularity: Granularity = "document",
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Fp8Tokens:
    """Quantise token embeddings to FP8 (e4m3) codes with FP16 scales, by default one a document.

    A document's scale stays outside the scoring loop; e4m3 keeps its relative precision over the whole range, so a finer scale
    would gain little. Arguments, NaN scales ("token") and refusals ("document", "corpus") as in `quantize_int8`.
    """
    check_granularity(granularity)
    packed, values = _held(tokens, mask, lengths)
    offsets = None if packed is None else packed.offsets
    codes, scales, _ = _quantize(values, mask, lengths, offsets, granularity, "fp8", None)
    return Fp8Tokens(codes if packed is None else packed.with_values(codes), scales, granularity)


def _held(tokens: Tensor | Packed, mask: Tensor | None, lengths: Tensor | None) -> tuple[Packed | None, Tensor]:
    """Packed tokens end to end (None: dense), and the tokens' values; shapes and dtypes are checked."""
    packed = tokens.compact() if isinstance(tokens, Packed) else None
    values = packed.values if packed is not None else tokens
    if not isinstance(values, Tensor) or values.dim() < 2 or values.dtype not in FLOAT_DTYPES:
        raise ValueError(f"tokens: got {describe(values)}, need fp16, bf16 or fp32 [..., L, d] or Packed")
    if packed is not None and (mask is not None or lengths is not None):
        raise ValueError("mask, lengths: got a value with Packed, which has no padding, need None")
    if values.shape[-1] < 1:
        raise ValueError(f"tokens: got {list(values.shape)}, need a width of 1 or more")
    check_mask("mask", mask, tuple(values.shape[:-1]), values.device)
    check_lengths("lengths", lengths, tuple(values.shape[:-2]), values.device)
    return packed, values.detach()


def _valid(values: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Which padded tokens count, `[..., L]`; None: all."""
    if values.device.type == "cpu":
        check_padded("", mask, lengths, values.shape[-2])
    valid = None if mask is None else mask != 0
    if lengths is not None:
        inside = torch.arange(values.shape[-2], device=values.device) < lengths.unsqueeze(-1)
        valid = inside if valid is None else valid & inside
    return valid


def _quantize(
    values: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    granularity: str,
    kind: str,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = _quantize_values if is_plain(values, mask, lengths, offsets, scale) else _quantize_op
    return run(values, mask, lengths, offsets, granularity, kind, scale)


def _quantize_values(
    values: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    granularity: str,
    kind: str,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offset (empty unless affine). A custom op, because it refuses *values*, as a compiled graph cannot."""
    valid = _valid(values, mask, lengths)
    packed = None if offsets is None else Packed(values, offsets)
    _refuse_non_finite(values, valid, granularity)
    offset: Tensor | None = None
    if scale is not None:
        if scale.dim() != 0 or not bool(torch.isfinite(scale)) or not bool(scale > 0):
            raise ValueError(f"scale: got {scale.tolist()}, need one positive finite number that FP16 can hold")
        scales = scale.to(values.device, copy=True)
    elif kind == "int8-affine":
        low = _reduce(values.float().amin(-1), valid, packed, granularity, "amin")
        high = _reduce(values.float().amax(-1), valid, packed, granularity, "amax")
        step = (high - low) / low.new_full((), 255)
        scales = _stored_scale(step, 255 / 2)
        # A constant token is its offset alone.
        offset = torch.where(step == 0, low, low + 128 * scales.float()).to(_SCALE_DTYPE)
        bad = ~torch.isfinite(offset) | torch.isnan(scales)
        scales, offset = scales.masked_fill(bad, torch.nan), offset.masked_fill(bad, torch.nan)
    else:
        largest = _FP8_MAX if kind == "fp8" else 127
        absmax = _reduce(values.float().abs().amax(-1), valid, packed, granularity, "amax")
        # Divided by a tensor: for a number, a GPU multiplies by its rounded inverse, and codes would not be those of a CPU.
        scales = _stored_scale(absmax / absmax.new_full((), largest), largest)
    if granularity != "token" and bool(torch.isnan(scales).any()):
        raise ValueError(f"tokens: values too large, a {granularity} scale does not fit FP16 (at most 65504)")
    codes = _codes(values, valid, packed, scales, offset, granularity, kind)
    return codes, scales, offset if offset is not None else scales.new_empty(0)


_quantize_op = torch.library.custom_op("maxsim_kernels::quantize", _quantize_values, mutates_args=())


@_quantize_op.register_fake
def _(
    values: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    granularity: str,
    kind: str,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if granularity == "corpus":
        shape: list[int] = []
    elif granularity == "token":
        shape = list(values.shape[:-1])
    else:
        shape = list(values.shape[:-2]) if offsets is None else [offsets.shape[0] - 1]
    codes = torch.empty_like(values, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    scales = values.new_empty(shape, dtype=_SCALE_DTYPE)
    return codes.contiguous(), scales, torch.empty_like(scales) if kind == "int8-affine" else scales.new_empty(0)


def _refuse_non_finite(values: Tensor, valid: Tensor | None, granularity: str) -> None:
    if granularity == "token":
        return
    finite = torch.isfinite(values).all(-1)
    if valid is not None:
        finite = finite | ~valid
    if not bool(finite.all()):
        raise ValueError(f"tokens: {int((~finite).sum())} tokens are not finite; a {granularity} scale cannot hold that")


def _reduce(per_token: Tensor, valid: Tensor | None, packed: Packed | None, granularity: str, how: str) -> Tensor:
    """Reduce one value a token (`amax` or `amin`) to one a token, document or corpus; nothing valid gives 0."""
    empty = -torch.inf if how == "amax" else torch.inf
    if valid is not None:
        per_token = per_token.masked_fill(~valid, empty)
    if granularity == "document":
        if packed is not None:
            reduced = per_token.new_full((len(packed),), empty)
            reduced.scatter_reduce_(0, packed.document_of_token(), per_token, how)
        elif per_token.shape[-1] == 0:
            reduced = per_token.new_full(per_token.shape[:-1], empty)
        else:
            reduced = getattr(per_token, how)(-1)
    elif granularity == "corpus":
        reduced = getattr(per_token, how)() if per_token.numel() else per_token.new_full((), empty)
    else:
        reduced = per_token
    return torch.where(reduced == empty, torch.zeros_like(reduced), reduced)


def _stored_scale(exact: Tensor, codes: float) -> Tensor:
    """Round a scale to FP16: 1 for zero, NaN beyond FP16, one step up where rounding down would clip a value."""
    scales = exact.clamp(min=_SMALLEST_SCALE).to(_SCALE_DTYPE)
    # Among FP16 subnormals rounding may lose half the scale; there the largest value would leave the code range.
    clips = scales.float() * (codes + 0.5) < exact * codes
    above = (scales.view(torch.int16) + 1).view(_SCALE_DTYPE)
    scales = torch.where(clips & torch.isfinite(scales), above, scales)
    scales = torch.where(exact == 0, torch.ones_like(scales), scales)
    return torch.where(torch.isfinite(scales) & torch.isfinite(exact), scales, torch.full_like(scales, torch.nan))


def _codes(
    values: Tensor,
    valid: Tensor | None,
    packed: Packed | None,
    scales: Tensor,
    offset: Tensor | None,
    granularity: str,
    kind: str,
) -> Tensor:
    shifted = values.float()
    if offset is not None:
        shifted = shifted - per_token(offset.float(), packed, granularity)
    scaled = shifted / per_token(scales.float(), packed, granularity)
    low, high = {"int8": (-127.0, 127.0), "int8-affine": (-128.0, 127.0), "fp8": (-_FP8_MAX, _FP8_MAX)}[kind]
    codes = (scaled if kind == "fp8" else scaled.round_()).clamp_(low, high)
    codes = codes.nan_to_num_(nan=0.0)  # a NaN scale marks the token; its codes must be numbers
    if valid is not None:
        codes = codes.masked_fill_(~valid.unsqueeze(-1), 0)
    return codes.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8).contiguous()
