"""What rows of tokens add to a CRC-32, by the GPU that made them: the host need not look through what it writes.

That takes a GPU a millisecond for a window of a thousand texts. The host takes 80 and more, in 2,500 calls; each of them asks for
Python's lock when it ends, and the thread that launches the model waits behind all of them: an H100 was busy 67% of the time with
the host's checks, and 93% without any (`docs/results/h100/encoding_waits.json`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from maxsim_eval.crc.devices import can_prove

MANY = 16384  # texts from which on the kernel pays for its compilation
_BYTES = 32 << 20  # fewer bytes of tokens are soon looked through by the host


class Summing:
    """What rows of a GPU's tokens add to a CRC-32; a thread compiles the kernel for it once many texts are announced."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._row_sums: Callable[[Tensor], Tensor | None] | None = None
        self._settled = not can_prove(device)  # compiling has begun, or never will

    def expect(self, texts: int) -> None:
        """Announce that `texts` texts will be encoded."""
        if texts >= MANY and not self._settled:
            self._settled = True
            # No daemon: the end of a command waits for it, since a compiler is not to be cut short.
            threading.Thread(target=self._begin, name="compile-sums").start()

    def of(self, tokens: Tensor) -> Tensor | None:
        """What rows `[T, d]` add, `[T]` int32, queued behind them; None: not ready, few, or rows that are no whole words."""
        if self._row_sums is None or tokens.nbytes < _BYTES:
            return None
        return self._row_sums(tokens)

    def _begin(self) -> None:
        try:
            from maxsim_eval.crc.device_rows import row_sums

            with torch.cuda.device(self._device):
                row_sums(torch.zeros(1, 2, dtype=torch.float16, device=self._device))
        except Exception as error:  # noqa: BLE001 (whatever a compiler may raise: said, and done without)
            warnings.warn(
                f"tokens are looked through on the CPU, and the GPU may have to wait for it: the kernel that sums them failed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._row_sums = row_sums
