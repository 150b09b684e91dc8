"""Launch configurations of the Triton kernels: frozen data, a reason on every row. Retuning is an edit here, not in code.

`measured` says on what a row was timed; an architecture that is not in the table gets the safe row, and `explain()` says 'untuned'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One launch configuration: query rows and document tokens a tile, warps, pipeline stages, programs a multiprocessor."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int
    measured: str
    reason: str


_SAFE = "untuned"
TABLE: dict[tuple[str, str], Config] = {
    ("stream", "sm_90"): Config(
        64, 64, 4, 3, 16, "H200", "few query rows: bound by reading documents; 0.93 to 1.0 of read rate"
    ),
    ("stream", "any"): Config(64, 32, 4, 2, 8, _SAFE, "small tiles and two stages fit every shared memory"),
    ("blocks", "sm_90"): Config(128, 64, 8, 3, 4, "H200", "many query rows against ragged or masked documents"),
    ("blocks", "any"): Config(64, 32, 4, 2, 4, _SAFE, "small tiles and two stages fit every shared memory"),
    ("uniform", "sm_90"): Config(
        128, 128, 8, 3, 8, "H200", "two query tiles of 128 rows a document tile: one's maximum hides in the other's product"
    ),
}


def configuration(variant: str, capability: tuple[int, int]) -> Config | None:
    """The row for a variant on an architecture; the safe row where it has none of its own; None where there is neither."""
    architecture = f"sm_{capability[0]}{capability[1]}"
    return TABLE.get((variant, architecture)) or TABLE.get((variant, "any"))
