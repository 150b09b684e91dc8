"""Launch configurations of the Triton kernels: frozen data, a reason on every row. Retuning is an edit here, not in code.

`measured` says on what a row was timed; an architecture that is not in the table gets the safe row, and `explain()` says 'untuned'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """One launch configuration: query rows and document tokens a tile, warps, pipeline stages, programs a multiprocessor.

    `programs`: of the descriptor kernels those that registers let run at once at d = 128 or that pay, never more than fit; of the
    others at most so many, and 0 is one for every document.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int
    measured: str
    reason: str
    short: int = 32  # tokens a tile of ragged documents shorter than `tokens`
    short_programs: int = 0  # `programs` of those tiles; 0: the same
    registers: int = 0  # at most so many a thread, where another program then fits; 0: as the compiler likes


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
    # `gpu.tile_sizes` says what is odd, brief, long, ...; from a sweep of tiles x stages x programs (docs/results/h200/tiles.json).
    ("dense float", "sm_90"): Config(
        128, 64, 8, 3, 3, "H200", "two query tiles share a document tile; two programs fit; 0.85 to 0.88"
    ),
    ("dense float masked", "sm_90"): Config(128, 64, 8, 3, 2, _SAFE, "as dense; masks take registers"),
    ("dense float masked winners", "sm_90"): Config(128, 64, 8, 3, 1, _SAFE, "as masked; winners take more"),
    ("dense float narrow", "sm_90"): Config(
        64, 64, 4, 4, 4, "H200", "up to 128 rows: bound by reading, small tiles start sooner"
    ),
    ("dense int8", "sm_90"): Config(64, 128, 4, 3, 4, "H200", "integer maximum; three programs fit; 1.9x the FP16 rate"),
    ("dense int8 narrow", "sm_90"): Config(64, 128, 4, 3, 2, "H200", "up to 128 rows: two programs read as fast as three"),
    ("dense int8 brief", "sm_90"): Config(64, 128, 4, 2, 4, "H200", "four small programs hide each other's sums; 1.9x FP16"),
    ("dense int8 odd", "sm_90"): Config(64, 64, 4, 3, 5, "H200", "tiles of 128 waste half a tile: 2.5x at 64 tokens"),
    ("dense int8 tiny", "sm_90"): Config(64, 64, 4, 3, 4, "H200", "as odd; masks take registers: 1.9x at 48 tokens"),
    ("dense int8 winners", "sm_90"): Config(64, 128, 4, 2, 4, "H200", "larger tiles leave room for one program: 1.2x"),
    ("dense int8 token", "sm_90"): Config(64, 128, 4, 3, 2, "H200", "a token's scale is one FMA a cell; 1.25x FP16"),
    ("dense int8 token short", "sm_90"): Config(
        64, 64, 4, 3, 4, "H200", "as odd; a fourth program fits; 1.55x at 48", registers=128
    ),
    ("dense int8 token short winners", "sm_90"): Config(64, 64, 4, 3, 3, "H200", "fewer registers would spill"),
    ("dense fp8", "sm_90"): Config(128, 128, 8, 3, 2, "H200", "two programs fit; 1.6x FP16"),
    ("dense fp8 narrow", "sm_90"): Config(64, 128, 4, 3, 2, "H200", "as INT8"),
    ("dense fp8 brief", "sm_90"): Config(64, 128, 4, 2, 4, "H200", "as INT8; 1.6x FP16"),
    ("dense fp8 odd", "sm_90"): Config(64, 64, 4, 3, 5, "H200", "as INT8"),
    ("dense fp8 tiny", "sm_90"): Config(64, 64, 4, 3, 4, "H200", "as INT8"),
    ("dense fp8 winners", "sm_90"): Config(64, 128, 4, 2, 4, "H200", "as INT8"),
    ("dense fp8 token", "sm_90"): Config(64, 128, 4, 3, 3, "H200", "as INT8; a third program fits; 1.1x", registers=168),
    ("dense fp8 token short", "sm_90"): Config(64, 64, 4, 3, 4, "H200", "as INT8", registers=128),
    ("dense fp8 token short winners", "sm_90"): Config(64, 64, 4, 3, 3, "H200", "as INT8"),
    ("dense fp8 token winners", "sm_90"): Config(64, 128, 4, 3, 2, "H200", "fewer registers would spill: 1.2x slower"),
    ("ragged float", "sm_90"): Config(
        128, 64, 8, 3, 3, "H200", "shorter tiles waste less at documents' ends; two programs fit"
    ),
    ("ragged float narrow", "sm_90"): Config(64, 64, 4, 3, 4, "H200", "as dense; within 1% of four stages"),
    ("ragged int8", "sm_90"): Config(64, 64, 4, 2, 6, "H200", "as float, smaller programs"),
    ("ragged int8 long", "sm_90"): Config(64, 128, 4, 3, 3, "H200", "few tiles are last ones: 1.05x", short_programs=5),
    ("ragged int8 winners", "sm_90"): Config(64, 64, 4, 3, 5, "H200", "five fit"),
    ("ragged int8 token", "sm_90"): Config(
        64, 128, 4, 3, 2, "H200", "fewer barriers, which spread scales: 1.04x to 1.2x", short_programs=5
    ),
    ("ragged int8 token winners", "sm_90"): Config(
        64, 128, 4, 3, 2, "H200", "as without; winners take registers of the short tiles", short_programs=4
    ),
    ("ragged fp8", "sm_90"): Config(64, 64, 4, 2, 6, "H200", "as INT8"),
    ("ragged fp8 long", "sm_90"): Config(64, 128, 4, 3, 3, "H200", "as INT8; 1.1x", short_programs=5),
    ("ragged fp8 winners", "sm_90"): Config(64, 64, 4, 3, 5, "H200", "as INT8"),
    ("ragged fp8 token", "sm_90"): Config(
        64, 128, 4, 3, 3, "H200", "a third program fits; 1.1x to 1.4x", short_programs=5, registers=168
    ),
    ("ragged fp8 token winners", "sm_90"): Config(64, 128, 4, 3, 2, "H200", "fewer registers would spill", short_programs=4),
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
