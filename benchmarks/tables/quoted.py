"""The tables that pages of docs quote of scripts with files of their own (`benchmarks/alone`, libraries.py, checksums.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measure.names import FLASH, LIK, OTHER, SAME, TIES
from tables.cells import MISSING, Book, Cell, Table, Value, number, pointer, ratio, times
from tables.columns import Maker, faster_bold
from tables.streams import streamed

MASKS = "h200/masks.json"
CODED, STEP = "h200/coded.json", "h200/step.json"
CHANGING, WARMED = "h200/changing.json", "h200/changing_warmed.json"
LIBRARIES = tuple(f"h200/libraries_{name}.json" for name in ("sentence_transformers", "pylate", "colpali_engine"))
SEARCHES = ("h200/search.json", "h200/search_nq.json")
CERTIFIED = {"cpu/certified.json": "", "cpu/certified_slow.json": ", AVX2 alone"}  # rows of a host that has no more say so
DEVICES, LIMITS = "h200/devices.json", "h200/limits.json"
UNITS = {  # what a page calls a unit, and a part of its name in ncu
    "matrix units": "pipe_tensor_cycles", "shared memory": "data_pipe_lsu", "issue": "issue_active", "ALU": "pipe_alu", "L2": "t_tag",
    "memory": "dram__cycles",
}  # fmt: skip
LEAST_SHARE = 0.2  # of a call's time: kernels with less are left out of the table
REHEARSALS = {"one GPU": "h200/rehearsal.json", "two GPUs": "h200/rehearsal_2.json"}
CHECKED = {"two CPU cores": "cpu/checksums.json", "H200": "h200/checksums.json"}  # heads of columns, and their files
OURS = "ours"
COMPILED = ("ours in torch.compile", "naive FP16 in torch.compile")  # columns of their own once they were measured


def beside(value: Value | None, other: Value | None, digits: int = 3) -> Cell:
    """A number, and how many times `other` it is."""
    found = ratio(value, other)
    if value is None or found is None:
        return Cell(MISSING)
    return Cell(f"{number(value, digits).text} ({found.number:.2f}x)", found.sources)


def named(book: Book, file: str, keys: Sequence[str], part: str) -> Value | None:
    """The least of the numbers there whose names begin with `part`: a peer with several entry points takes part by its fastest."""
    held = book.raw(file, *keys) or {}
    found = [book.value(file, *keys, name) for name in held if name.startswith(part)]
    return min((value for value in found if value is not None), key=lambda value: value.number, default=None)


def masks(book: Book) -> Table:
    """Every way to say which tokens count; in brackets over `document_lengths`."""
    heads = (
        "plain",
        "document_lengths",
        "mask of padding",
        "mask, holes in every document",
        "mask, holes in a tenth",
        "query mask",
    )
    rows: list[list[Cell | str]] = []
    for shape, held in (book.raw(MASKS, "ms") or {}).items():
        if "plain" in held:
            plain, lengths, *masked, asked = (book.value(MASKS, "ms", shape, head) for head in heads)
            rows.append(
                [shape, number(plain), number(lengths), *(beside(one, lengths) for one in masked), beside(asked, plain)]
            )
    shown = (
        "plain",
        "`document_lengths`",
        "mask of padding",
        "holes in every document",
        "holes in a tenth",
        "query mask, over plain",
    )
    return Table("masks", "masks of documents, ms", ["", *shown], rows)


def single(book: Book) -> Table:
    """FP32 tokens under TF32 by us and by both peers; IEEE is ours too."""
    rows: list[list[Cell | str]] = []
    for shape, held in (book.raw(MASKS, "ms") or {}).items():
        if "TF32" in held:
            times = [number(named(book, MASKS, ("ms", shape), name)) for name in ("TF32", FLASH, LIK)]
            rows.append([shape.removeprefix("FP32 "), *faster_bold(times), number(book.value(MASKS, "ms", shape, "IEEE"))])
    return Table("single", "FP32 tokens, ms", ["", "TF32", FLASH, f"{LIK} (rounds to FP16)", "IEEE FP32"], rows)


def coded(book: Book) -> Table:
    """Stored codes as they are, beside what a user does without them."""
    methods = {"stored codes": "stored codes", "LIK": LIK, "decode to FP16, then `maxsim`": "decode to FP16, then maxsim"}
    more = {"INT8 queries": "stored codes, INT8 queries", "FP16 decoded before": "FP16 decoded before"}
    rows: list[list[Cell | str]] = []
    for place, held in enumerate(book.raw(CODED, "rows") or []):
        keys = ("rows", str(place))
        kind, bits = held["tokens"].split()
        label = f"{'`BitTokens`' if kind == 'bits' else '`ResidualTokens`'}, {bits} bit{'s' * (bits != '1')}, {held['shape']}"
        times = [number(book.value(CODED, *keys, "ms", name)) for name in methods.values()]
        sizes = [
            number(book.value(CODED, *keys, "extra_mib", name)) for name in (methods["stored codes"], list(methods.values())[2])
        ]
        theirs = ratio(book.value(CODED, *keys, "error", LIK), book.value(CODED, *keys, "error", "stored codes"))
        others = (number(book.value(CODED, *keys, "ms", name)) for name in more.values())
        rows.append([label, *faster_bold(times), *others, *sizes, number(theirs, 2)])
    heads = [*methods, *more, "MiB: stored codes", "MiB: decoding", "LIK's error over ours"]
    return Table("coded", "stored codes, ms", ["", *heads], rows)


def changing(book: Book) -> Table:
    """Host time of calls whose shapes change; a line for every way to call, so that columns compete."""
    lines = {
        "a new shape each call, everything compiled": (CHANGING, "again us"),
        "one shape again and again": (CHANGING, "repeated us"),
        "first pass, what is compiled included": (CHANGING, "first us"),
        "first pass, kernels compiled": (CHANGING, "first compiled"),
        "first pass after our `warmup()`": (WARMED, "first us"),
    }
    held = book.raw(CHANGING, "rows") or {}
    kinds = dict.fromkeys(name.partition(", ")[0] for name in held)
    who = [OURS, FLASH, LIK, *(name for name in COMPILED if any(row.endswith(f", {name}") for row in held))]
    rows: list[list[Cell | str]] = []
    for kind in kinds:
        for label, (file, key) in lines.items():
            cells = [number(book.value(file, "rows", f"{kind}, {name}", key)) for name in who]
            rows.append([f"{kind}: {label}", *faster_bold(cells)])
    return Table("changing", "us of host time a call", ["", *who], rows)


def libraries(book: Book) -> Table:
    """Calls of libraries by their own code, by their backends and by us."""
    rows: list[list[Cell | str]] = []
    for file in LIBRARIES:
        for place, row in enumerate(book.raw(file, "rows") or []):
            methods = ("rows", str(place), "methods")
            times = [number(book.value(file, *methods, who, "ms")) for who in (OURS, "own", "LIK", "flash-maxsim")]
            sizes = [book.value(file, *methods, who, "peak_mib") for who in (OURS, "own", "LIK")]
            peaks = Cell("; ".join("-" if one is None else f"{one.number:.0f}" for one in sizes))
            rows.append([f"{row['library']}: {row['row']}", *faster_bold(times), peaks])
    heads = ("this operator", "own", "LIK", "flash-maxsim", "MiB: this; own; LIK")
    return Table("libraries", "calls of libraries, ms", ["call", *heads], rows)


def searches(book: Book) -> Table:
    """Exact search against brute force: later searches, the first of a corpus, and what was scored exactly."""
    rows: list[list[Cell | str]] = []
    found = ((file, place, row) for file in SEARCHES for place, row in enumerate(book.raw(file, "rows") or []))
    for file, place, row in found:
        unit = "s" if "brute_s" in row else "ms"
        keys = ("rows", str(place))
        brute, took, first = (book.value(file, *keys, f"{name}_{unit}") for name in ("brute", "exact", "first_search"))
        label = f"{row['row'].removeprefix('resident ')}, k = {row['k']}"
        if brute is None:
            missed = f", missed {row['missed']}" if "missed" in row else ""
            rows.append(
                [label + missed, MISSING, MISSING, number(book.value(file, *keys, unit), 3, f" {unit}"), *[MISSING] * 4]
            )
            continue
        cells = [number(value, 3, f" {unit}") for value in (brute, took)]
        speeds = [ratio(brute, took), ratio(brute, first)]
        shown = [Cell(MISSING) if one is None else Cell(_below_one(one), one.sources) for one in speeds]
        scored = number(book.value(file, *keys, "survivors_mean"))
        dense = number(book.value(file, *keys, f"brute_dense_{unit}"), 3, f" {unit}")
        rows.append([label, cells[0], dense, cells[1], shown[0], number(first, 3, f" {unit}"), shown[1], scored])
    heads = (
        "brute force",
        "of a dense tensor",
        "search",
        "times faster",
        "first search of a corpus",
        "times faster",
        "scored exactly, a query",
    )
    return Table("search", "exact search", ["row", *heads], rows)


def _below_one(found: Value) -> str:
    """A ratio, in bold where brute force is faster."""
    text = f"{found.number:.2f}x"
    return f"**{text}**" if found.number < 1 else text


def checksums(book: Book) -> Table:
    """Seconds with and without checks of stored values, medians."""
    held = {head: (file, book.raw(file, "seconds") or {}) for head, file in CHECKED.items()}
    heads = []
    for head, (file, _) in held.items():
        size, queries = (book.raw(file, key) for key in ("bytes", "queries"))
        heads.append(f"{head}, {size / 1e9:g} GB, {queries} queries: checked / not" if size else head)

    def cell(file: str, way: str) -> Cell:
        values = [_middle(book, file, ("seconds", way, kind)) for kind in ("checked", "unchecked")]
        if None in values:
            return Cell(MISSING)
        with_, without = (value for value in values if value is not None)
        text = f"{number(with_).text} / {number(without).text} ({100 * (with_.number / without.number - 1):+.0f}%)"
        return Cell(text, (*with_.sources, *without.sources))

    ways = dict.fromkeys(way for _, seconds in held.values() for way in seconds)
    rows: list[list[Cell | str]] = [[way, *(cell(file, way) for file, _ in held.values())] for way in ways]
    return Table("checksums", "seconds with and without the checks", ["", *heads], rows)


def _middle(book: Book, file: str, keys: tuple[str, ...]) -> Value | None:
    """The median of a list."""
    found = book.raw(file, *keys)
    return Value(statistics.median(found), (pointer(file, keys),)) if found else None


def step(book: Book) -> Table:
    """A small training step by every method: with the host back to back, from an idle GPU, on the GPU alone."""
    methods = book.raw(STEP, "methods") or {}
    first = next(iter(methods), "")

    def clocks(name: str) -> list[Value | None]:
        busy = methods[name].get("kernels_ms") or {}
        alone = Value(1e3 * sum(busy.values()), (pointer(STEP, ("methods", name, "kernels_ms")),)) if busy else None
        return [*(book.value(STEP, "methods", name, f"{key}_median_us") for key in ("call", "idle")), alone]

    rows: list[list[Cell | str]] = []
    for name, held in methods.items():
        theirs = name.startswith((FLASH, LIK))
        pairs = [faster_bold([number(ours, 4), number(value, 4)])[1] if theirs else number(value, 4)
                 for ours, value in zip(clocks(first), clocks(name), strict=True)]  # fmt: skip
        rows.append([name, *pairs, str(len(held.get("kernels_ms") or {}))])
    return Table("step", "us a step", ["", "back to back", "from an idle GPU", "GPU alone", "launches"], rows)


def certified(book: Book) -> Table:
    """Whole evaluations by brute force and by certified search on a CPU: medians, bytes of full precision, documents scored."""
    rows: list[list[Cell | str]] = []
    runs = [(file, name, held) for file in CERTIFIED for name, held in (book.raw(file, "runs") or {}).items()]
    for file, name, held in runs:
        places = {path: pointer(file, ("runs", name, "seconds", path)) for path in held["seconds"]}
        brute, search, scan = (Value(statistics.median(held["seconds"][path]), (place,)) for path, place in places.items())
        read, stored = (book.value(file, "runs", name, key) for key in ("row_bytes", "stored_bytes"))
        assert read is not None
        assert stored is not None
        share = Cell(f"{read.number / 1e6:,.0f} MB of {stored.number / 1e6:,.0f}", read.sources + stored.sources)
        survivors = number(book.value(file, "runs", name, "survivors"))
        seconds = (number(one, 3, " s") for one in (brute, search, scan))
        rows.append([f"{name}{CERTIFIED[file]}", *seconds, times(brute, search), survivors, share])
    heads = ("`fused-fp32`", "`exact-int8`", "its scan alone", "times faster", "scored exactly, a query", "full precision read")
    return Table("certified", "certified search in evaluations", ["SciFact, 300 queries", *heads], rows)


def predictions(book: Book) -> Table:
    """What `plan` said of the rehearsals over what was measured, phase by phase; a range where it gave one."""

    def cell(file: str, run: str, phase: str) -> Cell:
        keys = (run, "predictions", phase, "planned_over_measured")
        found = book.raw(file, *keys) or []
        return Cell(
            " to ".join(dict.fromkeys(f"{value:.2f}" for value in found)) or MISSING, (pointer(file, keys),) if found else ()
        )

    phases = {
        (run, phase): None
        for file in REHEARSALS.values()
        for run in ("encoded", "scored")
        for phase in book.raw(file, run, "predictions") or ()
    }
    rows: list[list[Cell | str]] = [
        [run, phase, *(cell(file, run, phase) for file in REHEARSALS.values())] for run, phase in phases
    ]
    return Table("predictions", "planned over measured", ["run", "phase", *REHEARSALS], rows)


def phase_cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Of a phase of the rehearsal: what was measured and in which run, the whole, its floor, and its share of that; empty: none."""
    floor = (f"{row['floor'] / 60:.1f} min", f"{row['floor'] / row['full']:.0%}") if row["floor"] else ("", "")
    return (f"{row['seconds']:.1f} s ({row['run']})", f"{row['full'] / 60:.1f} min", *floor)


def rehearsal(book: Book) -> Table:
    """The rehearsed command by phase: on one GPU what was measured, and the whole of it beside its floor; the whole on two."""
    one, two = (book.raw(file, "rows") or [] for file in REHEARSALS.values())

    def cell(file: str, places: Sequence[int], text: str) -> Cell:
        return Cell(text or MISSING, tuple(pointer(file, ("rows", str(place))) for place in places))

    def wholes(phases: Sequence[str], form: str) -> list[Cell]:
        found = []
        for file, held in zip(REHEARSALS.values(), (one, two), strict=True):
            places = [place for place, row in enumerate(held) if row["phase"] in phases]
            minutes = sum(held[place]["full"] for place in places) / 60
            found.append(cell(file, places, form.format(minutes) if places else ""))
        return found

    rows: list[list[Cell | str]] = []
    for place, row in enumerate(one):
        here = (cell(REHEARSALS["one GPU"], [place], text) for text in phase_cells(row))
        rows.append([row["phase"], *here, wholes([row["phase"]], "{:.1f} min")[1]])
    for name, phases in (("scoring", ("fp32", "fp16", "int8")), ("all", [row["phase"] for row in one])):
        first, second = wholes(phases, "**{:.1f} min**")
        rows.append([f"**{name}**", "", first, "", "", second])
    heads = ("phase", "measured", "whole", "its floor", "of the floor", "whole, two GPUs")
    return Table("rehearsal", "all of HotpotQA", list(heads), rows)


def devices(book: Book) -> Table:
    """Either device by the same path of one cache: how rankings differ, nDCG@10, the GPU's parity with its fp32 and its gate."""

    def cell(keys: tuple[str, ...], form: str) -> Cell:
        value = book.raw(DEVICES, *keys)
        return Cell(MISSING) if value is None else Cell(format(value, form), (pointer(DEVICES, keys),))

    rows: list[list[Cell | str]] = []
    for encoder, held in (book.raw(DEVICES, "encoders") or {}).items():
        for path, found in held["paths"].items():
            keys, failed = ("encoders", encoder, "paths", path), found.get("gate")
            cells = [cell((*keys, "counts", kind), ".0f") for kind in (SAME, TIES, OTHER)]
            before = MISSING if len(found["metrics"]) == 1 else cell((*keys, "metrics", "0", "nDCG@10"), ".4f")
            here = cell((*keys, "metrics", str(len(found["metrics"]) - 1), "nDCG@10"), ".4f")
            parity = cell((*keys, "parity", "spearman", "mean"), ".6f"), cell((*keys, "parity", "overlap", "@20"), ".4f")
            gate = MISSING if failed is None else f"fails {len(failed)}" if failed else "passes"
            rows.append([encoder, "BF16 sums" if path.startswith("python:") else path, *cells, before, here, *parity, gate])
    heads = (
        "same order",
        "by ties alone",
        "not explained",
        "nDCG@10, CPU",
        "GPU",
        "Spearman to fp32",
        "top-20 overlap",
        "gate",
    )
    return Table("devices", "queries by how their rankings differ", ["encoder", "path", *heads], rows)


def limits(book: Book) -> Table:
    """What the kernels of a call that take most of it keep busy, what their warps wait for longest, and power and clock under load."""
    rows: list[list[Cell | str]] = []
    for name, kernels in (book.raw(LIMITS, "rows") or {}).items():
        place = (pointer(LIMITS, ("rows", name)),)
        load = book.raw(LIMITS, "loads", name)
        power = Cell(f"{load['watts']:.0f} W, {load['mhz']:.0f} MHz", (pointer(LIMITS, ("loads", name)),))
        for kernel in dict.fromkeys(one["kernel"] for one in kernels):
            found = [one for one in kernels if one["kernel"] == kernel]
            share, first = sum(one["share"] for one in found), max(found, key=lambda one: one["share"])
            if share < LEAST_SHARE:
                continue
            # Both lists come with the largest first.
            busy = (
                f"{unit} {value:.0f}%" for key, value in first["units"].items() for unit, word in UNITS.items() if word in key
            )
            wait, cycles = next(iter(first["waits"].items()))
            cells = (f"`{kernel.strip('_')}`, {share:.0%}", ", ".join(busy), f"{wait.replace('_', ' ')} {cycles:.1f}")
            rows.append([name, *(Cell(text, place) for text in cells), power])
    heads = ("kernels, share of the call", "busiest units", "longest wait, cycles an instruction", "under load")
    return Table("limits", "what limits kernels, by counters", ["call", *heads], rows)


TABLES: dict[str, Maker] = {
    "masks": masks, "single": single, "coded": coded, "changing": changing, "libraries": libraries,
    "search": searches, "certified": certified, "checksums": checksums, "step": step,
    "devices": devices, "limits": limits, "predictions": predictions, "rehearsal": rehearsal, "streamed": streamed,
}  # fmt: skip
PLACES: dict[str, tuple[str, ...]] = {
    "docs/kernel_notes.md": ("masks", "single", "coded", "changing", "limits"),
    "docs/integrations.md": ("libraries",),
    "docs/search.md": ("search", "certified"),
    "docs/scale.md": ("checksums", "predictions", "rehearsal", "streamed"),
    "docs/training.md": ("step",),
    "docs/fidelity.md": ("devices",),
}
Told = Callable[[Book], str]


def proof(kind: str) -> Told:
    """The GPU's proof of a block over the time of scoring it."""

    def share(book: Book) -> str:
        scores, proved = (
            book.raw("h200/proving.json", "rows", kind, "ms", name, "median_ms") for name in ("scores", "proof, 256 rows")
        )
        return f"{100 * proved / scores:.1f}%"

    return share
