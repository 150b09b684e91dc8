"""What a row of a benchmark is: its methods, each with entry points and how it is checked, and who does not take part.

Scores are compared with one of the row's truths; whatever else a method makes (gradients, distances) it checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed
from measure.timing import Call
from measure.work import Work

EXACT = 2e-6  # the contract's bound, times sum_i |Q_i| * max_j |D_j|
FP8_BOUND = 4 * 2.0**-13  # FP8 tensor cores keep about 13 bits for every 32 products (d = 128: four times)
LOOSE = 2e-3  # FP16 products or sums: what naive FP16 may lose
INT8_LOOSE = 2e-2  # against unquantised inputs: what somebody's codes may lose
Documents = Tensor | Packed | Int8Tokens | Fp8Tokens


@dataclass(frozen=True)
class Method:
    """One line of a row: entry points of which the fastest correct one is timed, and how far from `truth` it may be."""

    name: str
    kind: str  # "ours", "baseline" or "peer"
    entries: Mapping[str, Call]
    bound: float = LOOSE
    truth: str = "float"  # which of the row's truths
    work: Work | None = None  # where it differs from the row's
    says: str = ""  # explain(): what ours chose, and why
    check: Callable[[str], dict[str, Any]] | None = (
        None  # instead of `bound` and `truth`: entry -> what was found, or RefusedError
    )
    gradient_bytes: int = 0  # what a call leaves behind
    kernels: bool = False  # record the time of each of its kernels


@dataclass
class Lineup:
    """The methods of one row, and who does not take part for which reason."""

    methods: list[Method] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, other: Lineup) -> Lineup:
        """Append another lineup's methods and reasons."""
        self.methods += other.methods
        self.skipped |= other.skipped
        return self
