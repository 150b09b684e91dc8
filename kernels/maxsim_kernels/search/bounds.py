"""How far a score over codes can lie from the score that the exact path computes, rounding of both paths included.

Document n has tokens `D_j` and codes that mean `C_j` (`code * scale + offset`). Stored beside the codes are two numbers a document
(`Residuals`): `error = max_j ||D_j - C_j||` and `norm = max_j ||D_j||`. A query's tokens `Q_i` meet the codes as `P_i` (their own
codes, or themselves). Then, token by token, `<Q_i, D_j> - <P_i, C_j> = <P_i, D_j - C_j> + <Q_i - P_i, D_j>`, and by Cauchy-Schwarz

    |exact - approximate| <= a * error_n + b * norm_n + c        a ~ sum_i ||P_i||,  b ~ sum_i ||Q_i - P_i||,  c ~ 0

where a, b, c belong to the query (`QueryTerms`) and hold the rounding of both FP32 paths as well. The proof is in docs/search.md; the
names of its constants are used here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt

import torch
from torch import Tensor

from maxsim_kernels.coded import BitTokens, CodedTokens, ResidualTokens, coded_at, levels_of
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.search.rows import Rows
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed

Codes = Int8Tokens | Fp8Tokens
AnyCodes = Codes | CodedTokens
WIDEST = 1 << 16  # embedding width up to which integer products fit 32 bits and the constants below hold
_STEPS = 16  # roundings that a similarity meets besides its inner product, at most (docs/search.md counts 12)
_TINY = 2.0**-112  # of underflow, per dimension: flushed inputs and results, times the largest scale of a code
LARGEST = 2.0**100  # magnitudes beyond which some step could overflow FP32: no bound there
_SHORTEST, _LONGEST = 2.0**-40, 2.0**60  # norms of a decoded token before it is brought to length 1
_SLACK = 1 + 2.0**-40  # FP64 rounding of the bounds themselves
_CHUNK = 1 << 22  # values widened to FP64 at once: 32 MB


@dataclass(frozen=True, eq=False)
class Residuals:
    """What is stored beside the codes of N documents: 8 bytes a document.

    Args:
        errors: `[N]` float32, at least `max_j ||D_j - C_j||`; inf where a token is not finite: such a document is always rescored.
        norms: `[N]` float32, at least `max_j ||D_j||`.
    """

    errors: Tensor
    norms: Tensor

    def __post_init__(self) -> None:
        for name, one in (("errors", self.errors), ("norms", self.norms)):
            if not isinstance(one, Tensor) or one.dtype != torch.float32 or one.dim() != 1:
                got = f"{one.dtype} {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
                raise ValueError(f"residuals.{name}: got {got}, need float32 [N]")
        if self.errors.shape != self.norms.shape:
            raise ValueError(f"residuals.norms: got {self.norms.numel()} entries, need {self.errors.numel()} as errors")

    def __len__(self) -> int:
        return self.errors.numel()

    def __getitem__(self, span: slice) -> Residuals:
        return Residuals(self.errors[span], self.norms[span])

    def to(self, device: torch.device) -> Residuals:
        """The same on another device."""
        if self.errors.device == self.norms.device == device:
            return self
        return Residuals(self.errors.to(device), self.norms.to(device))


@torch.no_grad()
def residuals_of(documents: Packed, codes: AnyCodes) -> Residuals:
    """The residuals of `codes` made from `documents` (`quantize_int8`, `quantize_fp8`, or by anybody), rounded up.

    Args:
        documents: N documents of the exact path, float16, bfloat16 or float32.
        codes: packed codes of the same documents, end to end, in the same order, on the same device; those of `BitTokens` and
            `ResidualTokens` too, for a search on a CPU.
    """
    packed = check_codes(documents, codes)
    device, width = documents.device, documents.dim
    if packed.device != device:
        raise ValueError(f"codes: on {packed.device}, need {device} as documents")
    owners = packed.document_of_token()
    begins = documents.starts.long() - packed.starts.long()  # from a token's place among the codes to its row of the documents
    errors = torch.zeros(len(packed), dtype=torch.float64, device=device)
    norms = torch.zeros(len(packed), dtype=torch.float64, device=device)
    step = max(1, _CHUNK // width)
    for first in range(0, packed.values.shape[0], step):
        span = slice(first, first + step)
        owner = owners[span]
        rows = begins[owner] + torch.arange(first, first + owner.numel(), device=device)
        tokens = documents.values[rows].double()
        meant, size = _meant(codes, span, owner)
        norm = tokens.norm(dim=1)
        # FP64 rounds `meant` where scales have more than 11 bits; a relative 2**-45 of the parts is far more than that.
        error = (tokens - meant).norm(dim=1) * _SLACK + 2.0**-45 * (norm + size)
        for best, found in ((errors, error), (norms, norm * _SLACK)):
            found.masked_fill_(~torch.isfinite(found), torch.inf)  # NaN too: no bound
            best.scatter_reduce_(0, owner, found, "amax")
    return Residuals(_rounded_up(errors), _rounded_up(norms))


def _meant(codes: AnyCodes, span: slice, owner: Tensor) -> tuple[Tensor, Tensor]:
    """What the codes of tokens `span` mean to the scoring path, FP64 `[t, d]`, and the size `[t]` of the parts that are added in it."""
    if isinstance(codes, BitTokens):  # their scales are applied before the maximum: any sign will do
        meant = levels_of(codes, span).double() * codes.scales[span].float().double().reshape(-1, 1)
        return meant, meant.norm(dim=1)
    if isinstance(codes, ResidualTokens):
        held = coded_at(codes, span)
        meant = held.dequantize().values.double()
        if codes.unit:  # lengths whose squares could leave FP32 have no bound
            length = replace(held, unit=False).dequantize().values.double().norm(dim=1, keepdim=True)
            meant = meant.masked_fill((length != 0) & ~((length > _SHORTEST) & (length < _LONGEST)), torch.nan)
        size = meant.norm(dim=1)
        # Every scan decodes them again, in its own blocks, and may add the d squares under the root in another order.
        return meant, size * (1 + 2.0**45 * gamma_of(codes.dim))

    def per_token(values: Tensor) -> Tensor:  # the CPU path reads scales and offsets as float32
        if codes.granularity != "corpus":
            values = values[span] if codes.granularity == "token" else values[owner]
        return values.float().double().reshape(-1, 1)

    scale = per_token(codes.scales)
    # A maximum is scaled after it was found, which needs a positive scale: others get no bound, a NaN scale neither.
    meant = codes.token_values[span].double() * scale.masked_fill(~(scale > 0), torch.nan)
    size = meant.norm(dim=1)
    if isinstance(codes, Int8Tokens) and codes.offset is not None:
        offset = per_token(codes.offset)
        meant, size = meant + offset, size + offset.abs()[:, 0] * sqrt(codes.dim)
    return meant, size


def _rounded_up(values: Tensor) -> Tensor:
    """FP64 to the next float32 that is not below."""
    found = values.float()
    return torch.where(found.double() < values, torch.nextafter(found, torch.full_like(found, torch.inf)), found)


def check_codes(documents: Packed | Rows, codes: AnyCodes) -> Packed:
    """The packed codes, refused unless they can be those of `documents`."""
    if not isinstance(codes, AnyCodes) or not isinstance(codes.codes, Packed) or codes.codes.offsets is None:
        view = isinstance(codes, AnyCodes) and isinstance(codes.codes, Packed)
        kind = f"{type(codes).__name__}{' of a view' if view else ''}"
        raise ValueError(f"codes: got {kind}, need Int8Tokens, Fp8Tokens or coded tokens of Packed documents, end to end")
    packed = codes.codes
    if len(packed) != len(documents) or codes.dim != documents.dim:
        got, need = f"{len(packed)} documents of d = {codes.dim}", f"{len(documents)} of d = {documents.dim}"
        raise ValueError(f"codes: got {got}, need {need} as documents")
    held = documents.lengths.to(packed.device).long()
    if not torch.equal(packed.lengths.long(), held):
        at = int((packed.lengths.long() != held).nonzero()[0])
        lengths = int(packed.lengths[at]), int(documents.lengths[at])
        raise ValueError(f"codes: document {at} has {lengths[0]} tokens, need {lengths[1]} as in documents")
    return packed


@dataclass(frozen=True)
class QueryTerms:
    """A query's part of the bounds, FP64 `[Nq]` each: `error * errors_n + norm * norms_n + rest`.

    `size`: `sum_i ||Q_i|| + ||P_i||`, inf where a token is not finite; `shift`: `2 sqrt(d) max|offset|` of the codes.
    """

    error: Tensor
    norm: Tensor
    rest: Tensor
    size: Tensor
    shift: float

    def width(self, residuals: Residuals) -> Tensor:
        """`[Nq, n]` FP64: at least `|exact - approximate|` of each pair, both scores as their paths compute them; inf: no bound."""
        errors, norms = residuals.errors.double(), residuals.norms.double()
        found = torch.outer(self.error, errors).add_(torch.outer(self.norm, norms)).add_(self.rest[:, None])
        reach = errors + norms + self.shift  # of a token's parts
        sound = (torch.outer(self.size, reach) <= LARGEST) & (self.size <= LARGEST)[:, None] & (reach <= LARGEST)
        return found.mul_(_SLACK).masked_fill_(~sound, torch.inf)


def query_terms(queries: Packed, codes: AnyCodes, quantize_queries: bool = True) -> QueryTerms:
    """The queries' part of the bounds of scores `maxsim(queries, codes, quantize_queries=...)`.

    Args:
        queries: float tokens of Nq queries, end to end, on the CPU; a query without tokens has no error.
        codes: any codes of the corpus with its largest offset (the whole corpus, or the block that is bounded).
    """
    width, count = queries.dim, len(queries)
    owners = queries.document_of_token()
    tokens = queries.values.double()
    meant = _as_multiplied(queries.values, codes).double() if quantize_queries else tokens

    def per_query(values: Tensor) -> Tensor:
        total = torch.zeros(count, dtype=torch.float64, device="cpu").index_add_(0, owners, values)
        return total.masked_fill_(~torch.isfinite(total), torch.inf)

    own, codes_own = per_query(tokens.norm(dim=1)), per_query(meant.norm(dim=1))
    between = per_query((tokens - meant).norm(dim=1))
    length = queries.lengths.double()
    shift = shift_of(codes)
    gamma, tiny = gamma_of(width), tiny_of(width)
    return QueryTerms(
        error=codes_own * (1 + gamma) + length * tiny,
        norm=between + gamma * (own + codes_own) + length * tiny,
        rest=gamma * shift * codes_own + tiny * (length * (1 + shift) + own + codes_own),
        size=own + codes_own,
        shift=shift,
    )


def gamma_of(width: int, factor: float = 1.0) -> float:
    """Relative error of an inner product and of what follows it; `factor`: how much worse than FP32 additions a step may be."""
    unit = (width + _STEPS) * factor * 2.0**-24
    return unit / (1 - unit) if unit < 0.5 else inf


def tiny_of(width: int) -> float:
    """What underflow may cost, for tokens and scales of size 1."""
    return width * _TINY


def shift_of(codes: AnyCodes) -> float:
    """`2 sqrt(d) max|offset|` of codes (read: waits on a GPU, where there are offsets)."""
    return 2 * sqrt(codes.dim) * _largest_offset(codes)


def _as_multiplied(tokens: Tensor, codes: AnyCodes) -> Tensor:
    """Query tokens as the scan multiplies them: what their codes mean."""
    if isinstance(codes, ResidualTokens):
        return tokens  # decoded tokens are multiplied with float queries
    if isinstance(codes, Int8Tokens | BitTokens):
        found = quantize_int8(tokens).dequantize(torch.float64)
    else:
        found = quantize_fp8(tokens, "token").dequantize()
    assert isinstance(found, Tensor)
    return found


def _largest_offset(codes: AnyCodes) -> float:
    if not isinstance(codes, Int8Tokens) or codes.offset is None or not codes.offset.numel():
        return 0.0
    return float(codes.offset.double().abs().nan_to_num(0.0, 0.0).amax())  # not finite: that document's error is infinite
