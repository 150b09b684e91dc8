"""Names of rows, methods and shapes that what is measured and what is printed have in common."""

from __future__ import annotations

SHAPES = {
    "textual": (32, 300),
    "long-doc": (32, 1024),
    "medium": (128, 1024),
    "visual": (512, 1024),
    "ColPali": (1024, 1024),
}
COUNTS = {"1K": 1000, "10K": 10000}
MANY = "256 queries x 8192 x 128"
RAGGED_ONE, RAGGED_MANY = "ragged, 1 query", "ragged, 256 queries"
GRANULARITIES = ("token", "document", "corpus")
WIDE = (96, 256, 384, 512, 768, 1000, 1024, 2048, 4096)
PAIRS = ((4, 16), (16, 32), (16, 64))
DEQUANTISED = (128, 1000, 10000)
FLASH, LIK = "flash-maxsim", "late-interaction-kernels"
MEMORY = 64e6


def quantised_row_name(kind: str, row: str) -> str:
    """The row of INT8 or FP8 figures of a shape."""
    return f"{kind} {row}"


def quantised_name(kind: str, granularity: str) -> str:
    """Our method there."""
    return f"ours {kind}, {granularity} scale"
