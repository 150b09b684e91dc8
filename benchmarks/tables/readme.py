"""The tables that the READMEs quote. Those of times stand on docs/benchmarks.md too, written from the same raw figures."""

from __future__ import annotations

from collections.abc import Callable

from measure.names import FLASH, LIK, MANY, RAGGED_MANY, quantised_name
from tables.cells import MISSING, Book, Cell, number, pointer, times
from tables.columns import COMPILED, Fastest, Getter, Line, Maker, Source, ms, picked, rows, value, with_peak
from tables.paper_training import whole_step
from tables.rows import BUSY, MAIN, Held, forward_rows, row, shape, wide
from tables.summary import cpu

HALF = "naive FP16"


def of_work(book: Book, label: str) -> Held | None:
    find, ours = WORK[label]
    held = find(book)
    return held if held is not None and held.ms(ours) is not None else None


def of_group(group: str, name: str) -> Callable[[Book], Held | None]:
    return lambda book: forward_rows(book, group).get(name)


INT8 = quantised_name("INT8", "document")
WORK: dict[str, tuple[Callable[[Book], Held | None], str]] = {  # where a row is, and the name of our method there
    "1 query of 32 tokens, 1000 documents of 300": (lambda book: shape(book, "textual", 1000), MAIN),
    "the same, 1000 ragged documents (log-normal lengths, mean 118)": (lambda book: row(book, "varlen", "HotpotQA-like"), MAIN),
    "1 ColPali query (1024 tokens), 10,000 pages of 1024": (lambda book: shape(book, "ColPali", 10000), MAIN),
    "the same, INT8, a scale a document": (lambda book: row(book, "int8_B", "ColPali 10000"), INT8),
    "256 queries of 32, 8192 documents of 128": (of_group("many", MANY), MAIN),
    "the same, ragged documents of 16 to 240": (of_group("ragged", RAGGED_MANY), MAIN),
    "d = 1024: 1024 tokens, 128 documents of 1024": (lambda book: wide(book, 1024), MAIN),
    "d = 4096, the same": (lambda book: wide(book, 4096), MAIN),
}


def of_floats(get: Getter) -> Getter:
    """A column without INT8 rows: eager and compiled FP16 score unquantised documents, and torch's INT8 is slower than ours."""
    return lambda line: get(line) if WORK[line.cell][1] == MAIN else MISSING


ALONE = "the same, GPU time alone (as behind an encoder)"
BATCHES = {
    "B = 64, 1024 x 1024": "ColPali B=64",
    "B = 128, 1024 x 1024": "ColPali B=128",
    "B = 1024, 32 x 180": "ColBERT B=1024",
    "B = 128, 32 x 180 (bound by the host)": "ColBERT B=128",
    ALONE: "ColBERT B=128",
}


def step(which: str | Fastest) -> Getter:
    """The time and memory of a method or of a peer's fastest path; on the line `ALONE`, GPU time."""

    def get(line: Line) -> Cell:
        if line.label == ALONE:
            return number(picked(line.held, which, BUSY)[1])
        name, time = picked(line.held, which)
        return Cell(MISSING) if time is None and not isinstance(which, str) else with_peak(line.held, name)

    return get


STREAMED = {  # file, group and row
    "pinned host memory": ("h200/streaming.json", "hotpotqa", "pinned"),
    "warm page cache (HDF5)": ("h200/streaming.json", "stored", "8 readers"),
    "pinned host memory, NQ's volume (116 GB: a tenth, ten times)": ("h200/streaming.json", "nq", "2680000 documents"),
    "the same, one ColPali query, 750,000 pages (197 GB: 17, cycled)": ("h200/streaming.json", "colpali", "750000 documents"),
    "pinned, 2 H200s": ("h200/streaming.json", "ranks 2", "500 queries, 2 GPUs"),
    "pinned, 4 H200s": ("h200/streaming_4.json", "ranks 4", "500 queries, 4 GPUs"),
}


def streamed(book: Book, label: str) -> Held | None:
    file, group, name = STREAMED[label]
    return row(book, group, name, file)


def times_floor(line: Line) -> Cell:
    """Times the floor; of several GPUs, how many times faster than one."""
    if not line.cell.startswith("pinned, "):
        return number(line.held.value("ratio"))
    alone = line.book.value(line.held.file, *line.held.keys[:-1], "500 queries, one GPU", "median_s")
    found = times(alone, line.held.value("median_s"))
    return Cell(found.text.removesuffix("x") + " times one GPU", found.sources)


SOURCES = (
    Source("gpu", "one H200, FP16, d = 128, ms", "work", rows(WORK, of_work), {
        "ours": lambda line: ms(WORK[line.cell][1])(line),
        "flash-maxsim 0.3.0": lambda line: ms(FLASH if WORK[line.cell][1] == MAIN else f"{FLASH}, INT8")(line),
        "late-interaction-kernels 0.4.5": ms(LIK), "naive FP16": of_floats(ms(HALF)),
        "best `torch.compile`": of_floats(ms(COMPILED)), "ours, of the floor": of_floats(value("methods", MAIN, "of_floor", digits=2)),
    }, competing=("ours", "flash-maxsim 0.3.0", "late-interaction-kernels 0.4.5", "naive FP16", "best `torch.compile`")),
    Source("steps", "training steps: forward and backward of in-batch negatives, ms (peak GB beyond inputs and gradients)", "batch",
           rows(BATCHES, lambda book, label: whole_step(book, BATCHES[label])), {
        "ours": step(MAIN), "flash-maxsim, best path": step(Fastest(("peer",), FLASH)),
        "late-interaction-kernels, best path": step(Fastest(("peer",), LIK)), "naive FP16": step(HALF),
        "checkpointed FP16": step("checkpointed FP16"),
    }, competing=("ours", "flash-maxsim, best path", "late-interaction-kernels, best path", "naive FP16", "checkpointed FP16")),
    Source("streams", "500 queries of 32 tokens against 500,000 ragged documents (15.4 GB) that do not lie on the GPU, exact top-100",
           "documents lie in", rows(STREAMED, streamed), {
        "seconds": value("median_s"), "times the floor (copying or in-memory scoring, the longer)": times_floor,
    }),
)  # fmt: skip
TABLES: dict[str, Maker] = {**{source.name: source for source in SOURCES}, "CPU": cpu}


# Quality: SciFact by every path, on a CPU

STUDY, REFERENCE = "cpu/fidelity_scifact.json", "fp32"
QUOTED = (REFERENCE, "fp16", "bf16", "int8", "int8-document", "fp8")


def of_path(*keys: str, form: str) -> Getter:
    """A figure of a path, which the reference may have none of."""

    def get(line: Line) -> Cell | str:
        found = line.book.value(STUDY, "paths", line.cell, *keys)
        return Cell(form.format(found.number), found.sources) if found is not None else ""

    return get


def change(line: Line) -> Cell | str:
    """The change of nDCG@10 from the reference's."""
    if line.cell == REFERENCE:
        return "reference"
    exact, found = (line.book.value(STUDY, "paths", name, "metrics", "nDCG@10") for name in (REFERENCE, line.cell))
    if exact is None or found is None:
        return ""
    difference = found + exact * -1
    return Cell(f"{difference.number:+.4f}", difference.sources)


def shared(line: Line) -> Cell | str:
    """The mean share of the reference's first 20 documents; the file names the queries that do not share all of them."""
    less = line.book.raw(STUDY, "paths", line.cell, "overlap_below_1")
    if line.cell == REFERENCE or less is None:
        return ""
    queries = line.book.raw(STUDY, "task", "queries")
    mean = 1 - sum(1 - share for share in less.values()) / queries
    return Cell(f"{mean:.4f}", (pointer(STUDY, ["paths", line.cell, "overlap_below_1"]), pointer(STUDY, ["task", "queries"])))


QUALITY: dict[str, Maker] = {
    "fidelity": Source("fidelity", "SciFact by every path", "path", rows(QUOTED, lambda book, name: Held(book, STUDY, ())), {
        "bytes a token": of_path("token_bytes", form="{:.0f}"), "nDCG@10": of_path("metrics", "nDCG@10", form="{:.4f}"),
        "change": change, "Spearman (mean)": of_path("parity", "spearman", "mean", form="{:.6f}"), "top-20 overlap": shared,
    }),
}  # fmt: skip
