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
        ValueError: an unknown name, in the call or (where the call says "auto") in FLASH_BWD_PATH.
        RuntimeError: the call asks for float atomics while `torch.use_deterministic_algorithms(True)` holds.
    """
    check_choice("backward", backward, BACKWARDS)
    deterministic = torch.are_deterministic_algorithms_enabled()
    path, reason = backward, "asked for by the call"
    if backward == "auto":
        named = os.environ.get(VARIABLE) or "auto"
        check_choice(VARIABLE, named, tuple(_NAMES))
        path, reason = _NAMES[named], f"asked for by {VARIABLE}"
        if path == "auto":
            return "csr", "the default: no atomics, the same bits every time, and the fastest measured"
        if path != "csr" and deterministic:
            return "csr", f"deterministic algorithms were asked for, which {VARIABLE}={named} cannot give"
    if path != "csr" and deterministic:
        message = f"backward: got {path!r} with torch.use_deterministic_algorithms(True), need 'auto' or 'csr' (no atomics)"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=5)
    return path, reason
