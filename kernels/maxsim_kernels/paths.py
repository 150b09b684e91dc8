"""Which backward path a call takes: from its arguments, the environment and torch's deterministic mode; never from data or sizes.

Source: paper section 'Backward Pseudo-Code and Dispatch', whose names for the paths FLASH_BWD_PATH accepts too.
"""

from __future__ import annotations

import os
import warnings

import torch

from maxsim_kernels.checks import BACKWARDS, check_choice

VARIABLE = "FLASH_BWD_PATH"
_NAMES = {
    "unified": "unified", "atomic_unified": "unified", "atomic": "atomic", "csr": "csr", "invgrid": "csr", "auto": "auto"
}  # fmt: skip


def backward_path(backward: str) -> tuple[str, str]:
    """The path of a call that says `backward`, and why.

    Raises:
        ValueError: a name nobody knows, in the call or in FLASH_BWD_PATH.
        RuntimeError: float atomics are asked for while `torch.use_deterministic_algorithms(True)` holds.
    """
    check_choice("backward", backward, BACKWARDS)
    named = os.environ.get(VARIABLE, "auto")
    check_choice(VARIABLE, named, tuple(_NAMES))
    path, reason = backward, "asked for by the call"
    if backward == "auto":
        path, reason = _NAMES[named], f"asked for by {VARIABLE}"
    if path == "auto":
        return "csr", "the default: no atomics, the same bits every time, and the fastest measured"
    if path != "csr" and torch.are_deterministic_algorithms_enabled():
        message = f"backward: got {path!r} with torch.use_deterministic_algorithms(True), need 'auto' or 'csr' (no atomics)"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=4)
    return path, reason
