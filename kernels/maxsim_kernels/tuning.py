"""Launch configurations of the Triton kernels: frozen data, a reason on every row. Retuning is an edit here, not in code.

`measured` says on what a row was timed; an architecture that is not in the table gets the safe row, and `explain()` says 'untuned'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One launch configuration: query rows and document tokens a tile, warps, pipeline stages, programs a multiprocessor.

    `programs` 0: one for every document.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int
    measured: str
    reason: str
    short: int = 32  # tokens a tile of ragged documents shorter than `tokens`


_SAFE = "untuned"
_FITS = "small tiles and two stages fit every shared memory"
TABLE: dict[tuple[str, str], Config] = {
    # Few query rows: bound by reading documents. Tokens a tile x warps; `gpu.stream_row` says when which.
    ("stream", "sm_90"): Config(64, 16, 1, 4, 64, "H200", "many one-warp programs: 0.95 to 0.98 of the read rate"),
    ("stream ragged", "sm_90"): Config(
        64, 16, 1, 3, 64, "H200", "documents of many lengths: one more program for one less stage"
    ),
    ("stream 32 x 1", "sm_90"): Config(64, 32, 1, 3, 64, "H200", "one-warp programs with larger loads"),
    ("stream 32 x 2", "sm_90"): Config(
        64, 32, 2, 3, 32, "H200", "a few thousand ragged documents: the longest ends sooner, and short ones waste little"
    ),
    ("stream 32 x 4", "sm_90"): Config(64, 32, 4, 3, 16, "H200", "33 to 64 query rows, or wide tokens: warps share the rows"),
    ("stream 64 x 4", "sm_90"): Config(
        64, 64, 4, 3, 32, "H200", "long documents, or few of them: each program reads as fast as it can; 0.98 to 1.0 when long"
    ),
    ("stream", "any"): Config(64, 32, 4, 2, 8, _SAFE, _FITS),
    # Every layout.
    ("general", "sm_90"): Config(64, 64, 4, 3, 8, "H200", "any layout: one query tile, documents by masked loads"),
    ("general", "any"): Config(64, 32, 4, 2, 4, _SAFE, _FITS),
    ("exact", "any"): Config(32, 32, 4, 2, 8, _SAFE, "FP32 products without matrix units: small tiles keep registers"),
    # Many query rows, two tiles of `rows` each; documents of one length, then ragged ones (`short`: tiles of documents below `tokens`).
    # "brief": documents of up to 256 tokens, where two programs a multiprocessor hide each other's sums and stores.
    ("dense float", "sm_90"): Config(
        128, 64, 8, 3, 8, "H200", "two query tiles share a document tile; two programs fit; 0.85 to 0.88"
    ),
    ("dense float narrow", "sm_90"): Config(
        64, 64, 4, 4, 8, "H200", "up to 128 rows: bound by reading, small tiles start sooner"
    ),
    ("dense int8 narrow", "sm_90"): Config(64, 128, 4, 3, 8, _SAFE, "up to 128 rows: tiles that hold no more"),
    ("dense fp8 narrow", "sm_90"): Config(64, 128, 4, 3, 8, _SAFE, "up to 128 rows: tiles that hold no more"),
    ("ragged float narrow", "sm_90"): Config(64, 64, 4, 3, 16, _SAFE, "up to 128 rows: tiles that hold no more"),
    ("dense int8", "sm_90"): Config(128, 128, 8, 3, 8, "H200", "integer maximum; two programs fit; twice the FP16 rate"),
    ("dense int8 brief", "sm_90"): Config(64, 128, 4, 2, 16, "H200", "four small programs hide each other's sums; 1.9x FP16"),
    ("dense int8 token", "sm_90"): Config(
        64, 128, 4, 3, 16, "H200", "a token's scale is one FMA a cell; 1.2x FP16, 1.3x when brief"
    ),
    ("dense fp8", "sm_90"): Config(128, 128, 8, 3, 8, "H200", "as INT8; 1.8x FP16"),
    ("dense fp8 brief", "sm_90"): Config(64, 128, 4, 2, 16, "H200", "as INT8; 1.7x FP16"),
    ("dense fp8 token", "sm_90"): Config(64, 128, 4, 3, 16, "H200", "as INT8"),
    ("ragged float", "sm_90"): Config(
        128, 64, 8, 3, 16, "H200", "shorter tiles waste less at documents' ends; two programs fit"
    ),
    ("ragged int8", "sm_90"): Config(64, 64, 4, 2, 24, "H200", "as float, smaller programs"),
    ("ragged int8 token", "sm_90"): Config(64, 64, 4, 3, 16, "H200", "as float, smaller programs"),
    ("ragged fp8", "sm_90"): Config(64, 64, 4, 2, 24, "H200", "as INT8"),
    ("ragged fp8 token", "sm_90"): Config(64, 64, 4, 3, 16, "H200", "as INT8"),
    # More than 256 bytes a token, many query rows: `rows` x `tokens` accumulator over slices of d.
    ("wide float", "sm_90"): Config(128, 256, 8, 3, 1, "H200", "a matrix product's tile, slices of 64: 0.87 to 0.90 of cuBLAS"),
    ("wide int8", "sm_90"): Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128"),
    ("wide int8 token", "sm_90"): Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128"),
    ("wide fp8", "sm_90"): Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128"),
    ("wide fp8 token", "sm_90"): Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128"),
}


def configuration(variant: str, capability: tuple[int, int]) -> Config | None:
    """The row for a variant on an architecture; the safe row where it has none of its own; None where there is neither."""
    architecture = f"sm_{capability[0]}{capability[1]}"
    return TABLE.get((variant, architecture)) or TABLE.get((variant, "any"))
