"""What a row of a benchmark is: its methods, each with entry points and how it is checked, and who does not take part.

Scores are compared with one of the row's truths; whatever else a method makes (gradients, distances) it checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from measure.score_truth import Truth
from measure.timing import Call
from measure.work import Work

EXACT = 2e-6  # the contract's bound, times sum_i |Q_i| * max_j |D_j|
FP8_BOUND = 4 * 2.0**-13  # what FP8 tensor cores cut off of random tokens, for every 32 products (d = 128: four times)
LOOSE = 2e-3  # FP16 products or sums: what naive FP16 may lose
INT8_LOOSE = 2e-2  # against unquantised inputs: what somebody's codes may lose


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
    # Instead of `bound` and `truth`: entry -> what was found, or RefusedError.
    check: Callable[[str], dict[str, Any]] | None = None
    gradient_bytes: int = 0  # of the gradients that a call leaves behind
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


@dataclass
class Row:
    """One piece of work, with all methods that can do it."""

    name: str
    about: dict[str, Any]
    lineup: Lineup
    work: Work | None = None  # None: no floor is given
    shape: tuple[int, ...] = ()  # of the scores: (queries, documents), pairs: (N,)
    truths: dict[str, Callable[[], Truth]] = field(default_factory=dict)  # made when the row is checked
    main: str = "ours"
    host: bool = False  # by the host's clock
    timed: bool = True
    busy: bool = False  # time short calls once more with the host ahead of the GPU
    precision: str = ""  # of FP32 products in torch ("high": TF32, as the paper's naive); "": as it stands
    more: Callable[[dict[str, Call]], dict[str, Any]] | None = None  # adds findings about the calls that are timed


@dataclass(frozen=True)
class Options:
    """What rows depend on: what the command line leaves in, and the device."""

    device: torch.device
    peers: tuple[str, ...] = ()
    compile: bool = True
    smoke: bool = False
    runs: int = 50
    autotune_here: bool = False
