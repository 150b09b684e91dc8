"""Names of rows and methods that cases, rivals and tables share, and the sizes behind them."""

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


SAME, TIES, OTHER = "same order", "another order by ties alone", "not explained"  # how two devices rank a query
AFFINE = "affine token"  # INT8 of the paper: a scale and an offset a token


def quantised_row_name(kind: str, row: str) -> str:
    """The row of INT8 or FP8 figures of a shape."""
    return f"{kind} {row}"


def quantised_name(kind: str, granularity: str) -> str:
    """Our method in such a row."""
    return f"ours {kind}, {granularity} scale"


# Training

STEPS = ("ColPali B=32", "ColPali B=64", "ColPali B=128", "ColBERT B=32", "ColBERT B=128", "ColBERT B=512", "ColBERT B=1024")
MEMORY_STEPS = ("ColPali B=64", "ColPali B=128", "ColPali B=256", "ColBERT B=1024")
LAYOUTS = {
    "distillation": "distillation, 32 queries x 32 candidates of their own",
    "pairs short": "pairs, 1024 x 32 x 180",
    "pairs long": "pairs, 64 x 1024 x 1024",
    "packed": "packed, 512 queries x 512 documents of 16 to 240 tokens",
    "wide short": "d = 768, B=128, 32 x 180",
    "wide long": "d = 768, B=32, 1024 x 1024",
    "FP32": "FP32 inputs, B=128, 32 x 180",
}
ABLATION = ("ColBERT B=128", "ColBERT B=512", "ColBERT B=1024", "ColPali B=32", "ColPali B=64", "ColPali B=128")
WINNERS = ("random", "hot", "uniform")


def step_name(shape: str) -> str:
    """The row of a whole step."""
    return f"step {shape}"


def memory_name(shape: str) -> str:
    """The row of memory alone."""
    return f"memory {shape}"


def parts_name(shape: str, one: bool) -> str:
    """The row of a step's parts."""
    return f"parts {shape}, one query" if one else f"parts {shape}"


def ablation_name(shape: str, kind: str) -> str:
    """The row of the backward alone."""
    return f"backward {shape}, {kind} winners"
