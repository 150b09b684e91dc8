"""What a row must do at least, the least time that takes, and the summary of many samples."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a row must do at least: multiply-add operations (2 each) in `unit`, and bytes of documents read once."""

    operations: float
    size: float
    unit: str = "fp16"


def summary(samples: list[float], unit: str) -> dict[str, float]:
    """Median and interquartile range."""
    if len(samples) < 2:
        return {f"median_{unit}": samples[0], f"iqr_{unit}": 0.0}
    quarters = statistics.quantiles(samples, n=4, method="inclusive")
    return {f"median_{unit}": statistics.median(samples), f"iqr_{unit}": quarters[2] - quarters[0]}


def floor(work: Work, ceilings: dict[str, float]) -> tuple[float, str]:
    """The least time in ms by this run's ceilings, and what bounds it: "memory" or "matrix"."""
    memory = work.size / ceilings["read"] * 1e3 if work.size else 0.0
    matrix = work.operations / ceilings[work.unit] * 1e3 if work.unit in ceilings else 0.0
    return (matrix, "matrix") if matrix > memory else (memory, "memory")
