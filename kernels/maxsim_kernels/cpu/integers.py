"""Products of INT8 codes on the CPU, exact on every processor: the library's of integers where they are right and fast, else of floats.

`torch._int_mm` goes through oneDNN, whose kernels for processors without VNNI add pairs of products in 16 bits that saturate: codes
near the ends of their range then give other numbers, silently. So it is looked at before it is believed, once a process and kind of
product. Without AVX-512 it has no kernel of its own, and is right but fourteen times slower than floats (AMD's Zen 1): its speed is
looked at too. Float products of codes are exact while no sum leaves what the format holds: 2**24 for float32, 2**53 for float64.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from maxsim_kernels.turns import alone

EXACT_WIDTH = 1024  # d * 128 * 128 <= 2**24: float32 holds every partial sum of so many products of codes
_INT32_WIDTH = (2**31 - 1) // 128**2  # the same of the 32-bit integers that `torch._int_mm` gives
_WORK = 1 << 23  # multiplications of a look, at most: half a millisecond
_LEAST = 64  # document tokens of a look
_PERIOD = 16  # rows and tokens repeat after so many
_SPEED = (256, 128)  # rows on either side, and width, of the product whose speed is looked at
_TRIES = 3
_MUCH = 2.0  # times that floats take: bits are equal either way, so only a clear difference counts
_SLOWER = "torch._int_mm adds products of INT8 codes wrongly on this CPU, so they are multiplied as floats, which is slower"
_WIDER = "sums of so many products of codes leave 32-bit integers, so they are multiplied as floats, which is slower"
_FASTER = "as floats, which this CPU multiplies faster than integers"
_lock = Lock()  # threads that ask at once wait for one look, and one warning


def exact_float(width: int) -> torch.dtype:
    """The float type whose products of INT8 codes of `width` dimensions are exact."""
    return torch.float32 if width <= EXACT_WIDTH else torch.float64


def worthwhile(rows: int, tokens: int, width: int, tokens_first: bool) -> bool:
    """Whether codes are multiplied as integers: products of this shape are `right`, and floats are not much faster."""
    return not slow() and right(rows, tokens, width, tokens_first)


def slow() -> bool:
    """Whether products of integers take this CPU more than twice as long as those of floats, widening included."""
    with _lock:
        return _timed()


def right(rows: int, tokens: int, width: int, tokens_first: bool) -> bool:
    """Whether `torch._int_mm` gives exact integers for products of this shape, by all threads and by one.

    Warns once if this CPU is to blame, not if the sums of such a width are too large for 32-bit integers on every CPU.

    Args:
        rows, tokens, width: query rows, document tokens, inner dimension.
        tokens_first: the product is `[tokens, rows]`, of documents with transposed queries, else the other way round.
    """
    if width > _INT32_WIDTH:
        return False
    few = min(tokens, max(_LEAST, _WORK // max(1, rows * width)))
    threads = torch.get_num_threads()
    with _lock:
        return _looked_at(rows, few, width, tokens_first, threads) and _looked_at(rows, few, width, tokens_first, 1)


def said(width: int) -> str:
    """What `explain` adds where codes of `width` dimensions are multiplied as floats; empty where they are not."""
    if width > _INT32_WIDTH:
        return f" ({_WIDER})"
    if width > 1 and slow():
        return f" ({_FASTER})"
    wrong = width > 1 and not all(right(32, _LEAST, width, first) for first in (False, True))
    return f" ({_SLOWER})" if wrong else ""


@lru_cache(maxsize=1024)
def _looked_at(rows: int, tokens: int, width: int, tokens_first: bool, threads: int) -> bool:
    """Compare products of random codes and of codes at both ends of their range, of one and of changing signs, with exact sums.

    `threads`: how many make a product together, 1 or torch's number.
    """
    left, right_side = (
        _codes(width, 0)[torch.arange(rows, device="cpu") % _PERIOD],
        _codes(width, 1)[torch.arange(tokens, device="cpu") % _PERIOD],
    )
    expected = (left[:_PERIOD].double() @ right_side[:_PERIOD].double().t()).int()
    expected = expected[torch.arange(rows, device="cpu")[:, None] % _PERIOD, torch.arange(tokens, device="cpu") % _PERIOD]
    operands = (right_side, left.t()) if tokens_first else (left, right_side.t())
    found = alone(product, *operands) if threads == 1 else product(*operands)
    found = found.t() if tokens_first else found
    same = torch.equal(found, expected)
    if not same:
        _warn()
    return same


@lru_cache(maxsize=1)
def _timed() -> bool:
    codes = _codes(_SPEED[1], 0).repeat(_SPEED[0] // _PERIOD, 1)
    return _least(lambda: product(codes, codes.t())) > _MUCH * _least(lambda: codes.float() @ codes.float().t())


def _least(call: Callable[[], Tensor]) -> float:
    """Seconds of a call, the least of some, once it was made."""
    call()
    found = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


@lru_cache(maxsize=1)
def _warn() -> None:
    warnings.warn(f"maxsim_kernels: {_SLOWER}", RuntimeWarning, stacklevel=2)


def product(left: Tensor, right_side: Tensor, out: Tensor | None = None) -> Tensor:
    """`torch._int_mm`; only `right` says whether its results can be trusted here."""
    return torch._int_mm(left, right_side) if out is None else torch._int_mm(left, right_side, out=out)


def _codes(width: int, seed: int) -> Tensor:
    """The codes of a look, `[_PERIOD, width]` int8: five extreme rows, the others random."""
    codes = torch.randint(
        -128, 128, (_PERIOD, width), generator=torch.Generator().manual_seed(seed), dtype=torch.int8, device="cpu"
    )
    sign = 1 - 2 * (torch.arange(width, device="cpu") % 2)
    codes[0], codes[1], codes[2] = 127, -128, -127
    codes[3], codes[4] = 127 * sign, -127 * sign
    return codes
