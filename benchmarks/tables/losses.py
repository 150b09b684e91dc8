"""fast_p and losses of docs/benchmarks.md: how ours stands against the strongest rival of every cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from measure.names import ABLATION, FLASH, LAYOUTS, LIK
from tables import rows as page_rows
from tables.cells import MISSING, Book, Cell, Table, Value, keys_of, paper
from tables.paper import GRAPHS
from tables.rows import BUSY, CLOCK, CPU, MAIN, Held

BACKWARD_FILE, LAYOUTS_FILE = "h200/training_backward.json", "h200/training_layouts_alone.json"
GROUPS = ("shapes", "frontier", "op_abl", "multiquery", "varlen", "int8", "int8_B", "wide")
LAUNCHES = "launch-bound: a few hundredths of the floor; the kernels differ by tenths of a microsecond"
OWN = "not broken down: documents of a query's own take the general kernel; the step is bound by the host, where ours is the faster"
ATOMICS = "atomics on one token wait for each other; csr, the default, has none"
EXACT = "true FP32, without matrix units: cuBLAS's products are faster than ours, which never hold S"
ROUGH = (
    "it chooses winners by rounded tokens: errors of 0.02 a query token, ours 3e-8; our INT8, rounded less, is as fast within the "
    "spread, or faster"
)
NUMKONG = "numkong 7.8.6"
ALONE = ", GPU time alone"
REASONS = {  # (row, who): the least ratio that the reason explains, and the reason, found on an H200 unless said
    ("ragged: ragged, 1 query", FLASH): (0.95, "on an H100 both are bound by reading, at 0.92 and 0.93 of the memory's rate"),
    ("pairs: pairs 4 x 16", LIK): (0.9, LAUNCHES),
    ("pairs: pairs 16 x 32", LIK): (0.9, LAUNCHES),
    ("steps: step ColBERT B=32", f"{FLASH} fused step"): (
        0.2,
        "bound by the host: the GPU is busy for a thirteenth of the step, less than half of the peer's time; the peer has loss and "
        "gradients in one call, and no autograd graph",
    ),
    (f"layouts: pairs, 64 x 1024 x 1024{ALONE}", f"{LIK} unified"): (
        0.9,
        "csr's product with the 0/1 matrix of who chose what; unified, by atomics, is the faster here",
    ),
    **{
        (f"layouts: {LAYOUTS[layout]}{ALONE}", f"{LIK} {path}"): (least, OWN)
        for layout, least in (("distillation", 0.65), ("pairs short", 0.9))
        for path in ("auto", "lowmem")  # the first takes the second's way there
    },
    **{(f"layouts: {LAYOUTS['FP32']}{clock}", "naive FP32"): (0.45, EXACT) for clock in ("", ALONE)},
    **{
        (f"backward {shape}, hot winners, unified{clock}", f"{LIK} lowmem"): (0.45, ATOMICS)
        for shape in ABLATION
        for clock in ("", ALONE)
    },
    **{(f"CPU: {case}, beside {NUMKONG}", NUMKONG): (0.45, ROUGH) for case in ("1 query", "1 query, ragged")},
    ("CPU: 1 query, beside torch products of 32 documents, padded", "torch products of 32 documents, padded"): (
        0.7,
        "the products take the same 9 to 13 ms; ours has 2 to 3 ms of Python beside them, which checks, cuts and adds (profile)",
    ),
    ("CPU: 16 queries, beside torch products of 32 documents, padded", "torch products of 32 documents, padded"): (
        0.85,
        "products whose bits no cut changes have 528 rows for these 512, and sums are added in FP64: 6% (profile); the rest is not "
        "broken down",
    ),
    ("int8: INT8 ragged, 256 queries, token scale", "ours FP16"): (
        0.9,
        "a scale a token costs an FMA a cell, here more than INT8 saves; with a scale a document INT8 is the faster",
    ),
}
SPREAD, UNKNOWN = "within the spread of the rounds", "no reason established"


def _again(book: Book, name: str) -> bool:
    """Whether the campaign has a row of an older file ("visual 10K", "wide, d = 768") too."""
    shape, _, count = name.partition(" ")
    number = {"1K": "1000", "10K": "10000"}.get(count, "")
    return any(
        page_rows.row(book, group, one) is not None
        for group, one in (
            ("shapes", f"{shape} {number}"),
            ("frontier", f"{shape} {number}"),
            ("wide", name.removeprefix("wide, ")),
        )
    )


def measured(book: Book) -> Iterator[tuple[str, Held]]:
    """(name, row) of every timed cell: the campaign's, and of older files the rows that the campaign has no counterpart of."""
    for group in GROUPS:
        yield from ((f"{group}: {name}", held) for name, held in page_rows.finished(book, group).items())
    for group in ("dense", "many", "ragged", "pairs", "wide"):
        for name, held in page_rows.forward_rows(book, group).items():
            if not _again(book, name):
                yield f"{group}: {name}", held
    for file, group in (("h200/training_steps.json", "steps"), ("h200/chamfer.json", "training")):
        yield from ((f"{group}: {name}", held) for name, held in page_rows.finished(book, group, file).items())


def right(held: Held, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """A row's methods of these kinds that were not wrong."""
    return tuple(name for name, data in (held.raw("methods") or {}).items() if data["kind"] in kinds and not data.get("wrong"))


def against(
    held: Held, ours: str, kinds: tuple[str, ...] = ("baseline", "peer"), clock: str = CLOCK, names: tuple[str, ...] = ()
) -> tuple[str, Value] | None:
    """A row's strongest rival, of those that were right or of `names`, and how many times faster ours is."""
    names = names or right(held, kinds)
    rival, theirs = held.fastest(names=names, clock=clock) if names else ("", None)
    mine = held.ms(ours, clock)
    return (rival, theirs / mine) if theirs is not None and mine is not None else None


def ratios(book: Book, *, peers: bool) -> Iterator[tuple[str, str, Value, int]]:
    """(row, strongest rival, times faster than it, compile flavours measured) wherever somebody else was measured right."""
    kinds = ("baseline", "peer") if peers else ("baseline",)
    for name, held in measured(book):
        found = against(held, held.raw("main") or MAIN, kinds)
        if found is not None:
            compiled = [one for one in right(held, kinds) if one.startswith("compiled") and "chunks" not in one]
            yield name, *found, sum(held.ms(one) is not None for one in compiled)


def by_the_papers_rivals(book: Book) -> Iterator[tuple[str, str, Value, int]]:
    """The same against eager, chunked and `torch.compile` of FP32 with graphs, wherever that flavour was measured."""
    for name, held in measured(book):
        names = tuple(one for one in right(held, ("baseline",)) if one == GRAPHS or not one.startswith("compiled"))
        found = against(held, held.raw("main") or MAIN, names=names) if GRAPHS in names else None
        if found is not None:
            yield name, *found, 1


def fast_p(book: Book) -> Table:
    """Shares of cells, apart by whether torch.compile was measured too."""
    table = Table(
        "fast_p",
        "share of cells at least p times faster than the strongest rival measured there",
        ["cells and rivals", "cells", "fast_1", "fast_1.5", "fast_2", "fast_3", "paper: cells, fast_1, fast_2, fast_3"],
    )
    claim = paper(book, "fast_p", "all", "cells", "fast1", "fast2", "fast3", form="{}, {}%, {}%, {}%")
    alone = list(ratios(book, peers=False))
    theirs = "the paper's rivals alone, eager, chunked and compiled FP32 with graphs: cells with all of them"
    for found, more in ((alone, ""), (list(ratios(book, peers=True)), ", and peers")):
        compiled = f"cells with torch.compile: against eager, chunked and compiled{more}"
        parts = {
            **({theirs: list(by_the_papers_rivals(book))} if found is alone else {}),
            compiled: [one for one in found if one[3]],
            f"cells without torch.compile: against eager and chunked alone{more}": [one for one in found if not one[3]],
            f"all cells: against everything above{more}": found,
        }
        for words, held in parts.items():
            if not held:
                continue
            sources = tuple(source for _, _, value, _ in held for source in value.sources)
            row: list[Cell | str] = [words, str(len(held))]
            for least in (1.0, 1.5, 2.0, 3.0):
                share = sum(value.number >= least for _, _, value, _ in held) / len(held)
                row.append(Cell(f"{100 * share:.0f}%", sources))
            table.rows.append([*row, claim if words == theirs else MISSING])
    counts = Counter(flavours for _, _, _, flavours in alone if flavours)
    if counts:
        said = ", ".join(f"{flavours} in {cells} cells" for flavours, cells in sorted(counts.items(), reverse=True))
        table.notes.append(
            f"Compile flavours measured (of FP16 and FP32, with and without graphs; tiny pairs: the default mode too): {said}. Cells "
            "are forward, quantised, training and Chamfer rows; INT8's eager rivals include dequantising first."
        )
    return table


def beyond(book: Book) -> Iterator[tuple[str, str, Value]]:
    """(row, strongest rival, times faster than it) of what fast_p does not count."""
    rows = [(f"layouts: {name}", held, MAIN) for name, held in page_rows.finished(book, "layouts", LAYOUTS_FILE).items()]
    for name, held in page_rows.finished(book, "ablation", BACKWARD_FILE).items():
        rows += [(f"{name}, {path}", held, f"ours {path}") for path in ("csr", "unified")]
    for name, held, ours in rows:
        for clock, how in ((CLOCK, ""), (BUSY, ", GPU time alone")):
            found = against(held, ours, clock=clock)
            if found is not None:
                yield f"{name}{how}", *found
    yield from without_gpu(book)
    codes = [
        (f"{group}: {name}", held) for group in ("int8", "int8_B") for name, held in page_rows.finished(book, group).items()
    ]
    for name, held in (*codes, *((f"int8: {name}", held) for name, held in page_rows.forward_rows(book, "int8").items())):
        half = held.ms("ours FP16")
        for kind in ("token", "document", "corpus"):
            mine = held.ms(f"ours INT8, {kind} scale")
            if half is not None and mine is not None:
                yield f"{name}, {kind} scale", "ours FP16", half / mine


def without_gpu(book: Book) -> Iterator[tuple[str, str, Value]]:
    """On a CPU every method that is not ours against ours of FP32 tokens."""
    for case, methods in (book.raw(CPU, "cases") or {}).items():
        mine = book.value(CPU, "cases", case, "ours FP32", "median_ms")
        for name in methods:
            theirs = book.value(CPU, "cases", case, name, "median_ms")
            if not name.startswith("our") and theirs is not None and mine is not None:
                yield f"CPU: {case}, beside {name}", name, theirs / mine


def reason(book: Book, name: str, rival: str, value: Value) -> str:
    """Why a row is slower than a rival: that the difference is within the spread, what was found, or neither."""
    least, why = REASONS.get((name, rival), (1.0, ""))
    known = [SPREAD] if within_spread(book, value) else []
    return "; ".join([*known, *([why] if value.number >= least else [])]) or UNKNOWN


def within_spread(book: Book, value: Value) -> bool:
    """Whether the two medians of a ratio differ by no more than the wider of the two quartile distances."""
    medians, spreads = [], []
    for place in value.sources:
        file, keys = keys_of(place)
        medians.append(float(book.raw(file, *keys)))
        spreads.append(float(book.raw(file, *keys[:-1], keys[-1].replace("median", "iqr")) or 0.0))
    return abs(medians[0] - medians[1]) <= max(spreads)


def losses(book: Book) -> Table:
    """Every cell below 1."""
    table = Table(
        "losses",
        "where somebody else was faster: of the cells counted in fast_p, training layouts, the backward alone and the CPU; and where "
        "our INT8 is slower than our FP16",
        ["row", "who", "ours is so many times faster", "why"],
    )
    counted = [(name, rival, value) for name, rival, value, _ in ratios(book, peers=True)]
    for name, rival, value in (*counted, *beyond(book)):
        if value.number < 1:
            table.rows.append([name, rival, Cell(f"{value.number:.3f}x", value.sources), reason(book, name, rival, value)])
    table.notes.append(
        "Of a row the strongest rival; on the CPU each. The backward alone: csr, the default, and unified. Reasons were found on an "
        "H200; within the spread is a difference no larger than the quartiles of one of the two are apart."
    )
    return table
