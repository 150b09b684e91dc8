"""Errors about one item that a model encoder cannot encode, or gives NaN for; they know which item it is.

An encoder gets a part of a collection and knows an item only by its number in the call; the caller knows its id (`named`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from maxsim_eval.errors import DataError, MaxsimEvalError

_SURROGATE = re.compile("[\ud800-\udfff]")


class ItemError(DataError):
    """Item `number` of the `items` of a call cannot be encoded; `before` and `behind` are the message around its name."""

    def __init__(self, before: str, number: int, items: int, behind: str) -> None:
        super().__init__(f"{before}item {number} of {items}{behind}")
        self.before, self.number, self.behind = before, number, behind

    def named(self, item: str) -> DataError:
        """The same error with the caller's own name for the item."""
        return DataError(f"{self.before}{item}{self.behind}")


def not_finite(name: str, number: int, items: int, largest: float, computed: torch.dtype, stored: torch.dtype) -> ItemError:
    """The error of embeddings that are not finite; if `largest`, the model's own magnitude, is finite, storing overflowed."""
    if math.isfinite(largest):
        return ItemError(
            f"{name}: ",
            number,
            items,
            f" has values up to {largest:.4g}, which {_short(stored)} cannot hold; store --embedding-dtype {_wider(stored)}",
        )
    ways = "" if computed == torch.float32 else f"use --dtype {_wider(computed)}, or "
    return ItemError(
        f"{name}: the model gave NaN or infinity for ", number, items, f" in {_short(computed)}; {ways}check its weights"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wider(dtype: torch.dtype) -> str:
    """The dtypes to advise in place of this one."""
    return "float32 or bfloat16" if dtype == torch.float16 else "float32"


@contextmanager
def surrogates_named(name: str, items: Sequence[Any]) -> Iterator[None]:
    """Turn a tokenizer's failure in the block into an `ItemError` for the first text with a lone surrogate, if there is one.

    JSON may hold a half of a character ("\\ud800"), and Python keeps it; no tokenizer takes it. Searched only after a failure.
    """
    try:
        yield
    except MaxsimEvalError:
        raise
    except Exception as error:  # tokenizers raise TypeError or UnicodeEncodeError, a processor's code anything
        found = next(((at, sign) for at, item in enumerate(items) if (sign := _lone_surrogate(item))), None)
        if found is None:
            raise
        number, sign = found
        behind = (
            f" holds a lone surrogate, U+{ord(sign):04X}, half a character, which no tokenizer takes; replace it in the text"
        )
        raise ItemError(f"{name}: ", number, len(items), behind) from error


def _lone_surrogate(item: Any) -> str:
    found = _SURROGATE.search(item) if isinstance(item, str) else None
    return found[0] if found else ""
