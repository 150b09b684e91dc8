"""The forward tables of docs/benchmarks.md: the paper's with its figures beside ours, and those of forward.py alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from measure.names import FLASH, GRANULARITIES, LIK, SHAPES, quantised_name
from results.paper_file import NOT_TRIED
from tables.cells import MISSING, Book, Cell, Value, gigabytes, number, percent, ratio, times
from tables.columns import (
    COMPILED,
    PEER,
    Fastest,
    Getter,
    Line,
    Lines,
    Source,
    claim,
    claims,
    each,
    faster,
    faster_than,
    joined,
    ms,
    named,
    of_paper,
    over,
    peak,
    peak_of,
    rows,
    share,
    size,
    value,
    who,
    within,
)
from tables.rows import EAGER, MAIN, PAPER, Held, point, row, shape, wide

WIDE, HALF = "naive FP32 accumulation", "naive FP16"
GRAPHLESS, GRAPHED = "max-autotune-no-cudagraphs", "max-autotune"
PLAIN, GRAPHS = f"compiled FP16, {GRAPHLESS}", f"compiled FP32, {GRAPHED}"
CHUNKED, CHUNKS = "chunked FP16", "chunked FP16, 1024 documents"
SCORERS = ("PyLate", "colpali-engine")
TOKEN, DOCUMENT, CORPUS = (quantised_name("INT8", kind) for kind in GRANULARITIES)
OWN_HALF, DEQUANT = "ours FP16", "dequantise to FP32, naive"
ONE_SHOT, PAIR = "ours, whole tokens in one tile", "ours, a program a pair"
ANY_EAGER = Fastest(names=EAGER)
PEERS = (FLASH, LIK)


# Where rows come from


def at_1000(book: Book, name: str) -> Held | None:
    return shape(book, name, 1000)


def sized(book: Book, cell: str) -> Held | None:
    """The row of a cell named "shape documents"."""
    name, _, count = cell.partition(" ")
    return shape(book, name, int(count))


def scored(book: Book, name: str) -> Held | None:
    """A shape's row at 1000 documents, where a library's scorer was measured."""
    held = at_1000(book, name)
    return held if held is not None and any(held.ms(one) for one in SCORERS) else None


def last(cell: str) -> str:
    """The last word, which is a number of documents or a width."""
    return cell.rpartition(" ")[2]


def by_width(book: Book, cell: str) -> Held | None:
    return wide(book, int(last(cell)))


def tried_by(group: str, *methods: str) -> Callable[[Book], list[str]]:
    """Cells that these methods came to in the processes that measured their memory."""

    def cells(book: Book) -> list[str]:
        held = book.raw(PAPER, "groups", group, "rows") or {}
        return list(dict.fromkeys(cell for name in methods for cell in held.get(name, {}).get("cells", {})))

    return cells


def same(table: str, label: Callable[[str], str] = str) -> Lines:
    """The campaign's rows of a table's name."""
    return rows(of_paper(table), within(table, PAPER), label)


def paths(book: Book) -> Iterator[tuple[str, str, Held]]:
    """Every path whose errors were measured."""
    for name in ("ColPali", "textual"):
        held = row(book, "precision", name)
        for path in (held.raw("paths") if held is not None else None) or {}:
            yield f"{path}, {name}", path, Held(book, PAPER, ("groups", "precision", "rows", name, "paths", path))


# Columns of their own


def apart(book: Book) -> Iterator[str]:
    """Which scorers were measured in rounds of their own, as the first row with one says."""
    for name in SHAPES:
        held = scored(book, name)
        names = ", ".join(one for one in SCORERS if held is not None and held.raw("methods", one, "apart"))
        if names:
            yield f"Rounds of its own, because it keeps the host for milliseconds and would delay the others: {names}."
            return


def with_chunk(line: Line) -> Cell:
    """The time in chunks and which size it is of."""
    return named(str(line.held.raw("methods", CHUNKED, "entry") or "").partition(" ")[0], line.held.ms(CHUNKED))


def time_and_peak(method: str) -> Getter:
    """A method's time and peak by a process of its own, or why there is neither."""

    def get(line: Line) -> Cell:
        held = point(line.book, method, line.cell)
        time = held.value("median_ms") if held is not None else None
        return joined("{} ({})", number(time), peak_of(held)) if time is not None else peak_of(held)

    return get


def of_point(method: str, key: str, shown: Callable[[Value | None, Line], Cell]) -> Getter:
    """A number that the process of a method's memory measured."""

    def get(line: Line) -> Cell:
        held = point(line.book, method, line.cell)
        return shown(held.value(key) if held is not None else None, line)

    return get


def a_candidate(method: str) -> Getter:
    """Microseconds a document."""
    return of_point(
        method, "median_ms", lambda time, line: number(time * (1e3 / int(line.label)) if time is not None else None)
    )


def of_size(method: str, key: str) -> Getter:
    return of_point(method, key, lambda size, line: gigabytes(size))


def lost(book: Book) -> Iterator[str]:
    """Which methods lost the GPU, where, and why cells were not tried."""
    for method, held in (book.raw(PAPER, "groups", "memory", "rows") or {}).items():
        reasons: dict[str, list[str]] = {}
        for cell, found in held.get("cells", {}).items():
            if "lost" in found:
                yield f"{method} at {cell}: {found['lost'][:76]}; larger cells were not tried."
            elif str(found.get("failed")).startswith(f"{NOT_TRIED}: "):
                reasons.setdefault(found["failed"].partition(": ")[2], []).append(cell)
        for why, cells in reasons.items():
            yield f"{method} was {NOT_TRIED} at {', '.join(cells)}: {why}."


def queries_a_second(line: Line) -> Cell:
    return number(ratio(line.held.value("shape", "queries"), line.held.ms(MAIN), 1e3))


def stored(line: Line) -> Cell:
    return times(*(line.held.value("stored_bytes", kind) for kind in ("FP16", "token")))


def whole_tokens(line: Line) -> Cell | str:
    """The time of the kernel that holds whole tokens, and its tile, or why there is none."""
    why, held = line.held.why(ONE_SHOT), line.held
    if held.ms(ONE_SHOT) is None and why:
        return "does not fit a multiprocessor" if "OutOfResources" in why or "does not fit" in why else why[:40]
    return named(str(held.raw("methods", ONE_SHOT, "entry") or ""), held.ms(ONE_SHOT))


def over_512(line: Line) -> Cell:
    """The time of the kernel that holds whole tokens, over its own at d = 512."""
    base = wide(line.book, 512)
    return times(line.held.ms(ONE_SHOT), base.ms(ONE_SHOT) if base is not None else None)


def moved(method: str) -> Getter:
    """Bytes that the GPU's counters saw."""

    def get(line: Line) -> Cell | str:
        failed = line.held.raw("traffic", method, "ncu", "failed")
        return "no counters" if failed else size("traffic", method, "ncu", "bytes")(line)

    return get


def both_over_ours(*keys: str) -> Getter:
    """Times as many bytes as ours, naive in either precision."""

    def get(line: Line) -> Cell:
        found = {name: line.held.value("traffic", name, *keys) for name in (MAIN, HALF, WIDE)}
        both = [times(found[name], found[MAIN], digits=1) for name in (HALF, WIDE)]
        return joined("{}, {}", *both) if any(cell.sources for cell in both) else Cell(MISSING)

    return get


def largest_error(line: Line) -> Cell | str:
    """A path's largest error, or why it has none."""
    failed = line.held.raw("failed")
    return f"failed: {failed[:60]}" if failed else value("own", "max_error", digits=2)(line)


def claimed_errors(line: Line) -> str:
    """The paper's errors, which are of ColPali."""
    return (claims(line) if line.label.endswith("ColPali") and not line.held.raw("failed") else "") or MISSING


# Tables of the paper

FORWARD = (
    Source("fwd", "one query, 1000 documents: times faster than", "shape (Lq, Ld)",
           rows(SHAPES, at_1000, lambda name: f"{name} {SHAPES[name]}"), {
        "naive FP32 acc.": faster(WIDE), "paper A100": claim("a100"), "paper H100": claim("h100"),
        "compiled FP32, graphs": faster(GRAPHS), "paper A100, compiled": claim("compiled"),
        "fastest eager": faster(ANY_EAGER), "fastest compiled": faster(Fastest(("baseline",), "compiled")),
        **each(faster, *PEERS),
    }, ("'Fastest eager' is the best of naive FP16 (`max` and `amax`), naive FP32 accumulation and chunked FP16 (chunk size swept).",)),
    Source("fwd_abs", "the same in ms, and peak GB of a process of its own, inputs included", "shape", rows(SHAPES, at_1000), {
        "ours": ms(MAIN), "IQR": value("methods", MAIN, "iqr_ms", digits=2), "of floor": value("methods", MAIN, "of_floor", digits=2),
        "naive FP32 acc.": ms(WIDE), "naive FP16": ms(HALF), "chunked FP16": ms(CHUNKED), "compiled FP32, graphs": ms(GRAPHS),
        "compiled FP16, no graphs": ms(PLAIN), **each(ms, *PEERS),
        "peak ours": peak(MAIN, "{} 1000"), "peak naive FP32 acc.": peak(WIDE, "{} 1000"),
        "paper A100: naive, MA, nocg, Flash; peaks":
            claim("naive", "graphs", "plain", "flash", "naive_peak", "flash_peak", form="{}, {}, {}, {}; {}, {}"),
    }, competing=("ours", "naive FP32 acc.", "naive FP16", "chunked FP16", "compiled FP32, graphs", "compiled FP16, no graphs",
                  *PEERS)),
    Source("nocg", "every compile flavour at 1000 documents, ms; times faster than the strongest", "shape", rows(SHAPES, at_1000), {
        "ours": ms(MAIN), "FP16, no graphs": ms(PLAIN), "FP16, graphs": ms(f"compiled FP16, {GRAPHED}"),
        "FP32, no graphs": ms(f"compiled FP32, {GRAPHLESS}"), "FP32, graphs": ms(GRAPHS), "strongest": faster(COMPILED),
        "paper A100: no graphs": claim("times", form="{}x"),
    }, competing=("ours", "FP16, no graphs", "FP16, graphs", "FP32, no graphs", "FP32, graphs")),
    Source("scorers", "scorers of PyLate and colpali-engine at 1000 documents, ms", "shape", rows(SHAPES, scored), {
        "ours": ms(MAIN), **each(ms, *SCORERS), **{f"times faster than {name}": faster(name) for name in SCORERS},
    }, (apart,), competing=("ours", *SCORERS)),
    Source("fwd_chunked", "large candidate sets: times faster than chunked FP16 (best chunk), and peak GB", "shape, documents",
           rows(of_paper("fwd_chunked"), sized), {
        "times": faster(CHUNKED), "paper A100": claim("times"), "ours ms": ms(MAIN), "chunked ms (chunk)": with_chunk,
        "peak ours": peak(MAIN), "peak chunked": peak(CHUNKS), "peak whole FP16": peak(HALF),
        "paper: ours, chunked, whole": claim("flash", "chunked", "whole", form="{}, {}, {}"),
    }),
    Source("chunked_sweep", "FP16 eager whole and in chunks, ms", "shape, documents", rows(of_paper("chunked_sweep"), sized), {
        "ours": ms(MAIN), "naive FP16": ms(HALF), "naive FP16, amax": ms("naive FP16, amax"), "chunked (best)": ms(CHUNKED),
        "times faster than chunked": faster(CHUNKED), "fastest compiled": ms(COMPILED), "x compiled": faster(COMPILED),
        "fastest peer": who(PEER),
        "paper A100: whole, chunked, Flash, times": claim("whole", "chunked", "flash", "times", form="{}, {}, {}, {}x"),
    }, competing=("ours", "naive FP16", "naive FP16, amax", "chunked (best)", "fastest compiled", "fastest peer")),
    Source("twoaxis", "ColPali, one call, ms (peak GB); the paper's GPU has 40 GB", "documents",
           rows(of_paper("twoaxis"), lambda book, cell: point(book, MAIN, cell), last), {
        "ours": time_and_peak(MAIN), "naive FP16": time_and_peak(HALF), "us a candidate, ours": a_candidate(MAIN),
        "us a candidate, naive": a_candidate(HALF), "paper A100-40GB: Flash, naive": claim("flash", "naive", form="{}, {}"),
    }, competing=("ours", "naive FP16")),
    Source("mem", "ColPali corpus scaling: peak GB of a process of its own, inputs included", "documents",
           rows(tried_by("memory", MAIN), lambda book, cell: point(book, MAIN, cell) if cell.startswith("ColPali ") else None, last), {
        "ours": peak(MAIN), "documents alone": of_size(MAIN, "inputs_bytes"), "naive FP16": peak(HALF),
        "naive FP32 acc.": peak(WIDE), **each(peak, CHUNKS, *PEERS),
        "paper: naive FP16 (40 GB), FP32 (80 GB), Flash": claim("half", "wide", "flash", form="{}, {}, {}"),
    }, (lost, "'Asked for' is the allocation that failed: S, or, where not even those fit, the documents (for FP32 accumulation their "
        "FP32 copy).")),
    Source("compiled_memory", "compiled naive: peak GB of a process of its own, inputs included, and reserved GB, since graph pools "
           "are not in the peak", "shape, documents",
           rows(tried_by("memory_compiled", GRAPHS, PLAIN), lambda book, cell: Held(book, PAPER, ())), {
        f"peak of {GRAPHS}": peak(GRAPHS), f"reserved of {GRAPHS}": of_size(GRAPHS, "reserved_bytes"),
        f"peak of {PLAIN}": peak(PLAIN), f"reserved of {PLAIN}": of_size(PLAIN, "reserved_bytes"), "peak of ours": peak(MAIN),
        "paper, 80 GB: FP32 graphs, FP16 no graphs": claim("graphs", "plain", form="{}, {}"),
    }),
    Source("op_abl", "operator design, ms: naive FP32 accumulation, a program a (query, document) pair, query tiles of programs of "
           "their own", "shape, documents", same("op_abl"), {
        "naive": ms(WIDE), "a program a pair": ms(PAIR), "query tiles (ours)": ms(MAIN), "naive over pair": faster(WIDE, PAIR),
        "naive over ours": faster(WIDE), "pair over ours": faster(PAIR), "fastest compiled": ms(COMPILED),
        "x compiled": faster(COMPILED),
        "paper A100: naive, fused, +chunk; times":
            claim("naive", "fused", "chunk", "fused_times", "chunk_times", "delta", form="{}, {}, {}; {}, {}, {}"),
    }, ("textual: 180 document tokens. Up to 64 query tokens 'ours' is the streaming kernel, which has no query tiles.",)),
    Source("multiquery", "several queries in one call, ms; textbook naive: true FP32, its casts inside the call",
           "shape, documents, queries", same("multiquery"), {
        "ours": ms(MAIN), "queries/s": queries_a_second, "textbook": ms("textbook FP32, cast inside"),
        "x textbook": faster("textbook FP32, cast inside"), "best eager": who(ANY_EAGER), "x best eager": faster(ANY_EAGER),
        "fastest compiled": ms(COMPILED), "x compiled": faster(COMPILED), **each(ms, *PEERS),
        "paper A100: Flash, QPS, naive, times": claim("flash", "qps", "naive", "times", form="{}, {}, {}, {}x"),
    }, competing=("ours", "textbook", "best eager", "fastest compiled", *PEERS)),
    Source("varlen", "1000 documents of up to 512 tokens, one query of 32, ms", "lengths", same("varlen"), {
        "fill": share("shape", "fill"), "mean tokens": value("shape", "mean_tokens"), "ours, packed": ms(MAIN),
        "naive FP32 acc., padded": ms(WIDE), "x naive": faster(WIDE), "naive FP16, padded": ms(HALF),
        "fastest compiled, padded": ms(COMPILED), "x compiled": faster(COMPILED), "flash-maxsim, packed": ms(FLASH),
        "late-interaction-kernels, varlen": ms(LIK),
        "paper A100: fill, naive, Flash, times": claim("fill", "naive", "flash", "times", form="{}, {}, {}, {}x"),
    }, ("The names are the paper's, the lengths are drawn: 'HotpotQA-like' is log-normal with about the paper's mean and fill, not "
        "HotpotQA's own lengths.",),
           competing=("ours, packed", "naive FP32 acc., padded", "naive FP16, padded", "fastest compiled, padded",
                      "flash-maxsim, packed", "late-interaction-kernels, varlen")),
)  # fmt: skip

OTHERS = (
    Source("int8", "INT8 with a scale a token (and a document) against FP16 and naive, ms; rankings against FP64 on unquantised tokens",
           "shape, documents", same("int8"), {
        "ours FP16": ms(OWN_HALF), "token scale": ms(TOKEN), "document scale": ms(DOCUMENT), "token: x naive": faster(WIDE, TOKEN),
        "x dequantise first": faster(DEQUANT, TOKEN), "x compiled FP16": faster(COMPILED, TOKEN), "x FP16": faster(OWN_HALF, TOKEN),
        "document: x FP16": faster(OWN_HALF, DOCUMENT), "Spearman, token": value("quality", TOKEN, "spearman", digits=6),
        "top-20, token": share("quality", TOKEN, "top20"), "top-20, document": share("quality", DOCUMENT, "top20"),
        "storage": stored, "flash-maxsim INT8": ms(PEER),
        "paper A100: FP16, INT8; x naive, x dequantise, x FP16; Spearman, top-20; storage": lambda line:
            claim("half", "int8", "naive_times", "dequant_times", "half_times", "spearman", "top20", "storage",
                  form="{}, {}; {}x, {}x, {}x; {}, {}%; {}x")(line).replace(f"{MISSING}x", MISSING),
    }, ("textual: 180 document tokens. Random tokens; rankings on real embeddings are in [fidelity.md](fidelity.md).",)),
    Source("int8_B", "the same at ColPali by number of documents, ms", "documents", same("int8_B", last), {
        "naive FP32 acc.": ms(WIDE), "dequantise first": ms(DEQUANT),
        "fastest dequantise (which)": who(Fastest(("baseline",), "dequantise"), "dequantise to "),
        "ours FP16": ms(OWN_HALF), "token scale": ms(TOKEN), "document scale": ms(DOCUMENT), "corpus scale": ms(CORPUS),
        "token: x naive": faster(WIDE, TOKEN), "x dequantise": faster(DEQUANT, TOKEN), "x compiled FP16": faster(COMPILED, TOKEN),
        "token: x FP16": faster(OWN_HALF, TOKEN), "document: x FP16": faster(OWN_HALF, DOCUMENT),
        "top-20, token": share("quality", TOKEN, "top20"),
        "paper A100: naive, dequantise, FP16, INT8; times":
            claim("naive", "dequant", "half", "int8", "naive_times", "dequant_times", form="{}, {}, {}, {}; {}x, {}x"),
    }),
    Source("fat_emb_cliff", "128 documents, 1024 x 1024 tokens, by d: the kernel that holds whole tokens, forced, ms", "d",
           rows(of_paper("fat_emb_cliff"), by_width, last), {
        "whole tokens (tile)": whole_tokens, "over d = 512": over_512, "ours (as chosen)": ms(MAIN),
        "of floor": value("methods", MAIN, "of_floor", digits=2), "a program a pair": ms(PAIR),
        "paper A100, H100": claim("a100", "h100", form="{}, {}"),
    }),
    Source("splitd_perf", "split-d at d > 512 (ours as chosen), ms", "d", rows(of_paper("splitd_perf", "d = 4096"), by_width, last), {
        "ours": ms(MAIN), "x whole tokens": faster(ONE_SHOT), "x naive FP16": faster(HALF),
        "x fastest eager (which)": faster_than(ANY_EAGER), "x compiled": faster(COMPILED), "x flash-maxsim": faster(FLASH),
        "x LIK": faster(LIK),
        "paper: split-d A100 (times), H100 (times)": claim("a100", "a100_times", "h100", "h100_times", form="{} ({}x), {} ({}x)"),
    }, ("The paper ends at 2048. At 4096 neither whole tokens nor late-interaction-kernels (LIK) fit a multiprocessor.",)),
    Source("traffic", "GB that one call moves at 1000 documents: counted, and read from the GPU's counters by ncu", "shape",
           same("traffic"), {
        "ours counted": size("traffic", MAIN, "counted_bytes"), "naive FP16 counted": size("traffic", HALF, "counted_bytes"),
        "naive FP32 acc. counted": size("traffic", WIDE, "counted_bytes"), "ratio (FP16, FP32)": both_over_ours("counted_bytes"),
        "ours, ncu": moved(MAIN), "naive FP16, ncu": moved(HALF), "naive FP32 acc., ncu": moved(WIDE),
        "ratio, ncu (FP16, FP32)": both_over_ours("ncu", "bytes"),
        "paper: naive, Flash, ratio": claim("naive", "flash", "times", form="{}, {}, {}x"),
    }),
    Source("precision", "1000 documents against FP64: what the arithmetic loses (same inputs), and what a user loses (FP32 tokens)",
           "path, shape", paths, {
        "largest error": largest_error, "relative": value("own", "max_relative_error", digits=2),
        "Spearman": value("own", "spearman", digits=7), "top-20": share("own", "top20"), "top-50": share("own", "top50"),
        "error to FP32 tokens": value("true", "max_error", digits=2), "top-20 of FP32 tokens": share("true", "top20"),
        "paper, ColPali": claimed_errors,
    }),
    Source("ooc", "one ColPali query against pages streamed from host memory", "pages",
           rows(of_paper("ooc"), within("colpali", "h200/streaming.json"), lambda cell: cell.partition(" ")[0]), {
        "embeddings GB": size("bytes"), "GPU peak GB": size("memory", "gpu_bytes"), "s": value("median_s"),
        "pages/s": over(("documents",), ("median_s",)), "of the link": over(("link_s",), ("median_s",), percent),
        "paper A100: embeddings, peak, pages/s": claim("embeddings", "peak", "rate", form="{}, {}, {}"),
    }, ("More rows (HotpotQA, NQ, INT8, stored files, two GPUs): [scale.md](scale.md). Part of the pages is kept and cycled; "
        "GPU peak: beyond the query.",)),
)  # fmt: skip
