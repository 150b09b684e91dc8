"""Memory that runs out while a model encodes: recognised, warned of once, with advice where a single item is too much."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from maxsim_eval.errors import UsageError

_SIGNS = ("out of memory", "not enough memory", "can't allocate", "cublas_status_alloc_failed")


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is about memory: CUDA's, or that of torch's CPU allocator, new and old."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error).lower() for sign in _SIGNS)


class Halving:
    """Batches that are halved when memory runs out, with one warning. `what`: texts or pages."""

    def __init__(self, name: str, device: torch.device, what: str) -> None:
        self.name, self.device, self.what = name, device, what
        self._said = False

    def check(self, error: RuntimeError, items: int, one: Callable[[], str]) -> None:
        """Raise where halving a batch cannot help: `error` if it is not about memory, `UsageError` if one item is too much."""
        if not out_of_memory(error):
            raise error
        if items == 1:
            lower = "lower max_document_tokens" if self.what == "texts" else "choose a smaller dtype"
            raise UsageError(
                f"{self.name}: out of memory on {self.device} with {one()}; {lower} or choose another device"
            ) from error

    def halve(self, items: int, depth: int) -> None:
        """Free cached GPU memory and warn once; `depth`: frames between this call and the one to blame."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self._said:
            self._said = True
            warnings.warn(
                f"{self.name}: out of memory on {self.device} with {items} {self.what} at once; continuing with "
                f"{items // 2}, and fewer where needed",
                RuntimeWarning,
                stacklevel=depth + 1,
            )
