"""Launch configurations of the Triton kernels: frozen data, a reason on every row. Retuning is an edit here, not in code.

`measured` says on what a row was timed; an architecture that is not in the table gets the safe row, and `explain()` says 'untuned'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product


@dataclass(frozen=True)
class Config:
    """One launch configuration: query rows and document tokens a tile, warps, pipeline stages, programs a multiprocessor.

    `programs`: for the descriptor kernels, how many registers let run at once at d = 128, or how many pay, but never more than
    fit; for the others the most, and 0 is one for every document.
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
    registers: int = 0  # most registers a thread, where one more program then fits; 0: as the compiler likes
    bits: bool = False  # of the tile kernel: maxima of floats by their bits (`choice.py` says when)


@dataclass(frozen=True)
class Key:
    """What decides which configuration a call gets (`choice.py`)."""

    kernel: str  # "stream", "general", "exact" (the general one, FP32 products), "dense", "ragged" or "wide"
    operands: str = ""  # of the last three: "float", "tf32" (wide), "int8", "fp8", "int8 token" or "fp8 token"
    size: str = ""  # of documents; of "stream", the tile
    narrow: bool = False  # few query rows
    winners: bool = False


@dataclass(frozen=True)
class Row:
    """A configuration, the calls it serves, and the architecture; "any": those that have no row of their own for these calls."""

    name: str
    architecture: str
    keys: tuple[Key, ...]
    config: Config

    @property
    def kernel(self) -> str:
        """The kernel that it configures."""
        return "general" if self.keys[0].kernel == "exact" else self.keys[0].kernel


def _keys(
    kernel: str,
    operands: str = "",
    sizes: tuple[str, ...] = ("",),
    narrow: tuple[bool, ...] = (False,),
    winners: tuple[bool, ...] = (False,),
) -> tuple[Key, ...]:
    """Every combination of what is given."""
    return tuple(Key(kernel, operands, *rest) for rest in product(sizes, narrow, winners))


STREAM = ("", "ragged", "32 x 1", "32 x 2", "32 x 4", "64 x 4")
DENSE = ("tiny", "short", "odd", "brief", "")
RAGGED = ("long", "")
BOTH = (False, True)
_SAFE = "untuned"
_FITS = "small tiles and two stages fit every shared memory"
# fmt: off
ROWS = (
    # Few query rows: bound by reading documents. Tokens a tile x warps; `choice.py` says when which.
    Row("stream", "sm_90", _keys("stream"),
        Config(64, 16, 1, 4, 64, "H200", "many one-warp programs: 0.95 to 0.98 of the read rate")),
    Row("stream ragged", "sm_90", _keys("stream", sizes=("ragged",)),
        Config(64, 16, 1, 3, 64, "H200", "documents of many lengths: one more program for one less stage")),
    Row("stream 32 x 1", "sm_90", _keys("stream", sizes=("32 x 1",)),
        Config(64, 32, 1, 3, 64, "H200", "one-warp programs with larger loads")),
    Row("stream 32 x 2", "sm_90", _keys("stream", sizes=("32 x 2",)),
        Config(64, 32, 2, 3, 32, "H200", "a few thousand ragged documents: the longest ends sooner, and short ones waste little")),
    Row("stream 32 x 4", "sm_90", _keys("stream", sizes=("32 x 4",)),
        Config(64, 32, 4, 3, 16, "H200", "33 to 64 query rows, or wide tokens: warps share the rows")),
    Row("stream 64 x 4", "sm_90", _keys("stream", sizes=("64 x 4",)),
        Config(64, 64, 4, 3, 32, "H200", "long documents, or few of them: each program reads as fast as it can; 0.98 to 1.0 when long"),
    ),
    Row("stream", "any", _keys("stream", sizes=STREAM),
        Config(64, 32, 4, 2, 8, _SAFE, _FITS)),
    # Every layout.
    Row("general", "sm_90", _keys("general"),
        Config(64, 64, 4, 3, 8, "H200", "any layout: one query tile, documents by masked loads")),
    Row("general", "any", _keys("general"),
        Config(64, 32, 4, 2, 4, _SAFE, _FITS)),
    Row("exact", "any", _keys("exact"),
        Config(32, 32, 4, 2, 8, _SAFE, "FP32 products without matrix units: small tiles keep registers")),
    # Many query rows, two tiles of `rows` each; documents of one length, then ragged ones (`short`: tiles of documents below `tokens`).
    # `choice.py` says what is odd, brief, long, ...; from a sweep of tiles x stages x programs (docs/results/h200/tiles.json).
    Row("dense float", "sm_90", _keys("dense", "float", ("short", "odd", "brief", ""), winners=BOTH),
        Config(128, 64, 8, 3, 3, "H200", "two query tiles share a document tile; two programs fit; 0.85 to 0.88")),
    Row("dense float masked", "sm_90", _keys("dense", "float", ("tiny",)),
        Config(128, 64, 8, 3, 2, _SAFE, "as dense; masks take registers")),
    Row("dense float masked winners", "sm_90", _keys("dense", "float", ("tiny",), winners=(True,)),
        Config(128, 64, 8, 3, 1, _SAFE, "as masked; winners take more")),
    Row("dense float narrow", "sm_90", _keys("dense", "float", DENSE, narrow=(True,), winners=BOTH),
        Config(64, 64, 4, 4, 4, "H200", "up to 128 rows: bound by reading, small tiles start sooner")),
    Row("dense int8", "sm_90", _keys("dense", "int8"),
        Config(64, 128, 4, 3, 4, "H200", "integer maximum; three programs fit; 1.9x the FP16 rate")),
    Row("dense int8 narrow", "sm_90", _keys("dense", "int8", ("brief", ""), narrow=(True,), winners=BOTH),
        Config(64, 128, 4, 3, 2, "H200", "up to 128 rows: two programs read as fast as three")),
    Row("dense int8 brief", "sm_90", _keys("dense", "int8", ("brief",), winners=BOTH),
        Config(64, 128, 4, 2, 4, "H200", "four small programs hide each other's sums; 1.9x FP16")),
    Row("dense int8 odd", "sm_90", _keys("dense", "int8", ("short", "odd"), narrow=BOTH, winners=BOTH),
        Config(64, 64, 4, 3, 5, "H200", "tiles of 128 waste half a tile: 2.5x at 64 tokens")),
    Row("dense int8 tiny", "sm_90", _keys("dense", "int8", ("tiny",), narrow=BOTH, winners=BOTH),
        Config(64, 64, 4, 3, 4, "H200", "as odd; masks take registers: 1.9x at 48 tokens")),
    Row("dense int8 winners", "sm_90", _keys("dense", "int8", winners=(True,)),
        Config(64, 128, 4, 2, 4, "H200", "larger tiles leave room for one program: 1.2x")),
    Row("dense int8 token", "sm_90", _keys("dense", "int8 token", ("odd", "brief", ""), narrow=BOTH, winners=BOTH),
        Config(64, 128, 4, 3, 2, "H200", "a token's scale is one FMA a cell; 1.25x FP16")),
    Row("dense int8 token short", "sm_90", _keys("dense", "int8 token", ("tiny", "short"), narrow=BOTH),
        Config(64, 64, 4, 3, 4, "H200", "as odd; a fourth program fits; 1.55x at 48", registers=128)),
    Row("dense int8 token short winners", "sm_90", _keys("dense", "int8 token", ("tiny", "short"), narrow=BOTH, winners=(True,)),
        Config(64, 64, 4, 3, 3, "H200", "fewer registers would spill")),
    Row("dense fp8", "sm_90", _keys("dense", "fp8"),
        Config(64, 128, 4, 3, 3, "H200", "three programs fit; 1.7x FP16")),
    Row("dense fp8 narrow", "sm_90", _keys("dense", "fp8", ("brief", ""), narrow=(True,), winners=BOTH),
        Config(64, 128, 4, 3, 2, "H200", "as INT8")),
    Row("dense fp8 brief", "sm_90", _keys("dense", "fp8", ("brief",), winners=BOTH),
        Config(64, 128, 4, 2, 4, "H200", "as INT8; 1.6x FP16")),
    Row("dense fp8 odd", "sm_90", _keys("dense", "fp8", ("short", "odd"), narrow=BOTH, winners=BOTH),
        Config(64, 64, 4, 3, 5, "H200", "as INT8")),
    Row("dense fp8 tiny", "sm_90", _keys("dense", "fp8", ("tiny",), narrow=BOTH, winners=BOTH),
        Config(64, 64, 4, 3, 4, "H200", "as INT8")),
    Row("dense fp8 winners", "sm_90", _keys("dense", "fp8", winners=(True,)),
        Config(64, 128, 4, 2, 4, "H200", "as INT8")),
    Row("dense fp8 token", "sm_90", _keys("dense", "fp8 token", ("odd", "brief", ""), narrow=BOTH),
        Config(64, 128, 4, 3, 3, "H200", "as INT8; a third program fits; 1.1x", registers=168)),
    Row("dense fp8 token short", "sm_90", _keys("dense", "fp8 token", ("tiny", "short"), narrow=BOTH),
        Config(64, 64, 4, 3, 4, "H200", "as INT8", registers=128)),
    Row("dense fp8 token short winners", "sm_90", _keys("dense", "fp8 token", ("tiny", "short"), narrow=BOTH, winners=(True,)),
        Config(64, 64, 4, 3, 3, "H200", "as INT8")),
    Row("dense fp8 token winners", "sm_90", _keys("dense", "fp8 token", ("odd", "brief", ""), narrow=BOTH, winners=(True,)),
        Config(64, 128, 4, 3, 2, "H200", "fewer registers would spill: 1.2x slower")),
    Row("ragged float", "sm_90", _keys("ragged", "float", RAGGED, winners=BOTH),
        Config(128, 64, 8, 3, 3, "H200", "shorter tiles waste less at documents' ends; two programs fit")),
    Row("ragged float narrow", "sm_90", _keys("ragged", "float", RAGGED, narrow=(True,), winners=BOTH),
        Config(64, 64, 4, 3, 4, "H200", "as dense; within 1% of four stages")),
    Row("ragged int8", "sm_90", _keys("ragged", "int8", narrow=BOTH),
        Config(64, 64, 4, 2, 6, "H200", "as float, smaller programs")),
    Row("ragged int8 long", "sm_90", _keys("ragged", "int8", ("long",), narrow=BOTH, winners=BOTH),
        Config(64, 128, 4, 3, 3, "H200", "few tiles are last ones: 1.05x", short_programs=5)),
    Row("ragged int8 winners", "sm_90", _keys("ragged", "int8", narrow=BOTH, winners=(True,)),
        Config(64, 64, 4, 3, 5, "H200", "five fit")),
    Row("ragged int8 token", "sm_90", _keys("ragged", "int8 token", RAGGED, narrow=BOTH),
        Config(64, 128, 4, 3, 2, "H200", "fewer barriers, which spread scales: 1.04x to 1.2x", short_programs=5)),
    Row("ragged int8 token winners", "sm_90", _keys("ragged", "int8 token", RAGGED, narrow=BOTH, winners=(True,)),
        Config(64, 128, 4, 3, 2, "H200", "as without; winners take registers of the short tiles", short_programs=4)),
    Row("ragged fp8", "sm_90", _keys("ragged", "fp8", narrow=BOTH),
        Config(64, 64, 4, 2, 6, "H200", "as INT8")),
    Row("ragged fp8 long", "sm_90", _keys("ragged", "fp8", ("long",), narrow=BOTH, winners=BOTH),
        Config(64, 128, 4, 3, 3, "H200", "as INT8; 1.1x", short_programs=5)),
    Row("ragged fp8 winners", "sm_90", _keys("ragged", "fp8", narrow=BOTH, winners=(True,)),
        Config(64, 64, 4, 3, 5, "H200", "as INT8")),
    Row("ragged fp8 token", "sm_90", _keys("ragged", "fp8 token", RAGGED, narrow=BOTH),
        Config(64, 128, 4, 3, 3, "H200", "a third program fits; 1.1x to 1.4x", short_programs=5, registers=168)),
    Row("ragged fp8 token winners", "sm_90", _keys("ragged", "fp8 token", RAGGED, narrow=BOTH, winners=(True,)),
        Config(64, 128, 4, 3, 2, "H200", "fewer registers would spill", short_programs=4)),
    # More than 256 bytes a token, many query rows: `rows` x `tokens` accumulator over slices of d.
    Row("wide float", "sm_90", _keys("wide", "float", narrow=BOTH, winners=BOTH),
        Config(128, 256, 8, 3, 1, "H200", "a matrix product's tile, slices of 64: 0.87 to 0.90 of cuBLAS")),
    Row("wide tf32", "sm_90", _keys("wide", "tf32", narrow=BOTH, winners=BOTH),
        Config(128, 256, 8, 3, 1, _SAFE, "as float, slices of 32: FP32 tokens where torch allows TF32, of any width")),
    Row("wide int8", "sm_90", _keys("wide", "int8", narrow=BOTH, winners=BOTH),
        Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128")),
    Row("wide int8 token", "sm_90", _keys("wide", "int8 token", narrow=BOTH, winners=BOTH),
        Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128")),
    Row("wide fp8", "sm_90", _keys("wide", "fp8", narrow=BOTH, winners=BOTH),
        Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128")),
    Row("wide fp8 token", "sm_90", _keys("wide", "fp8 token", narrow=BOTH, winners=BOTH),
        Config(128, 256, 8, 3, 1, "H200", "as float, slices of 128")),
)
# What no call takes by itself: tried by `tune()` beside the rows above.
TRIED = (
    Row("general 64 x 2", "tried", _keys("general"), Config(64, 64, 4, 2, 8, _SAFE, "larger tiles")),
    Row("general 128", "tried", _keys("general"), Config(64, 128, 8, 2, 4, _SAFE, "tiles of 128 tokens, eight warps")),
    Row("exact 64", "tried", _keys("exact"), Config(32, 64, 4, 2, 8, _SAFE, "larger tiles")),
    Row("exact 32 x 8", "tried", _keys("exact"), Config(32, 32, 8, 2, 8, _SAFE, "eight warps")),
)
# fmt: on


def _by_key() -> Iterator[tuple[tuple[Key, str], Row]]:
    for row in ROWS:
        for key in row.keys:
            yield (key, row.architecture), row


TABLE: dict[tuple[Key, str], Row] = dict(_by_key())
NAMED: dict[tuple[str, str], Row] = {(row.name, row.architecture): row for row in (*ROWS, *TRIED)}


def row_of(key: Key, capability: tuple[int, int]) -> Row | None:
    """The row for a call on an architecture; the safe row where it has none of its own; None where there is neither."""
    return TABLE.get((key, f"sm_{capability[0]}{capability[1]}")) or TABLE.get((key, "any"))


def configuration(key: Key, capability: tuple[int, int]) -> Config | None:
    """The configuration of `row_of`."""
    row = row_of(key, capability)
    return None if row is None else row.config


def candidates(key: Key) -> list[Row]:
    """Rows that could take a call: of its kernel and operands, one for each configuration, whatever they were measured on."""
    found: dict[tuple[int, ...], Row] = {}
    for row in (*ROWS, *TRIED):
        if any((one.kernel, one.operands) == (key.kernel, key.operands) for one in row.keys):
            found.setdefault(numbers(row.config), row)
    return list(found.values())


def numbers(config: Config) -> tuple[int, ...]:
    """The numbers of a configuration, without `measured` and `reason`."""
    return tuple(value for value in astuple(config) if isinstance(value, int))
