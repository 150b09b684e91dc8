"""Training tables of docs/benchmarks.md: steps, backward paths, components, byte budget, parity, Chamfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from measure.byte_budget import Budget, Shape, budget
from measure.names import STEPS as STEP_SHAPES
from tables.cells import MISSING, Book, Cell, Value, gigabytes, number, percent, ratio, times
from tables.columns import (
    PEER,
    Fastest,
    Getter,
    Line,
    Source,
    Which,
    claim,
    claims,
    faster,
    joined,
    ms,
    of_paper,
    picked,
    rows,
    step,
    value,
    with_peak,
    within,
)
from tables.rows import BUSY, MAIN, Held, row

STEPS, ABLATION, PARTS = "h200/training_steps.json", "h200/training_backward.json", "h200/training.json"
CHAMFER, PARITY = "h200/chamfer.json", "h200/parity.json"
RECOMPUTE, NAIVE = "checkpointed FP32 accumulation", "naive FP32 accumulation"
BATCHES = STEP_SHAPES  # those that were measured
PATHS = {"vanilla": NAIVE, "csr": "ours csr", "unified": "ours unified"}
BASELINE, THEIRS, PRODUCTS = Fastest(("baseline",)), "flash-maxsim train", "naive, products"


def whole_step(book: Book, cell: str) -> Held | None:
    return row(book, "steps", f"step {cell}", STEPS)


def whole_peak(held: Held, method: str) -> Value | None:
    """Bytes of a step with its inputs and their gradients: FP16 tokens of both sides beside what was measured beyond them."""
    about, peak = held.raw("about") or {}, held.value("methods", method, "strict_bytes")
    if peak is None or about.get("layout") != "shared" or about.get("dtype") != "float16":
        return None
    read = {name: held.value("about", name) for name in ("queries", "query_tokens", "documents", "document_tokens", "dim")}
    rows = about["queries"] * about["query_tokens"] + about["documents"] * about["document_tokens"]
    sources = tuple(source for value in read.values() if value is not None for source in value.sources)
    return peak + Value(2.0 * about["dim"] * rows, sources)


def joined_totals(*methods: Which) -> Getter:
    """Peaks of these methods with inputs and gradients (`whole_peak`)."""
    return lambda line: joined(
        ", ".join("{}" for _ in methods), *(gigabytes(whole_peak(line.held, picked(line.held, one)[0])) for one in methods)
    )


def hot(path: str) -> Getter:
    """The same shape's backward where one document token wins every time."""
    return lambda line: with_peak(row(line.book, "ablation", f"backward {line.cell}, hot winners", ABLATION), f"ours {path}")


def stepped(path: str) -> Getter:
    """The same shape's whole step."""
    return lambda line: with_peak(whole_step(line.book, line.cell), f"ours {path}")


# Components

GRADIENT, BOTH, QUERIES = "gradient of documents, csr", "gradient of both, csr", "gradient of queries, csr"


def added(held: Held, *parts: str) -> Value | None:
    """Milliseconds of the kernels of csr's document gradient whose names hold one of `parts`."""
    total: Value | None = None
    for name in held.raw("methods", GRADIENT, "kernels_ms") or {}:
        time = held.value("methods", GRADIENT, "kernels_ms", name) if any(part in name for part in parts) else None
        if time is not None:
            total = time if total is None else total + time
    return total


def building(held: Held) -> Value | None:
    return added(held, "_count_kernel", "_table_kernel", "_place_kernel", "Scan")


def three(line: Line) -> Cell:
    """Building, dQ and dD together."""
    held = line.held
    build, dq, dd = building(held), held.value("methods", QUERIES, "busy_median_ms"), added(held, "_lists_kernel")
    return number(build + dq + dd if build is not None and dq is not None and dd is not None else None)


def share_of_building(line: Line) -> Cell:
    return percent(ratio(building(line.held), line.held.value("methods", BOTH, "busy_median_ms")), ".0f")


# Bytes


def of_batch(book: Book, cell: str) -> Held | None:
    return whole_step(book, f"ColPali B={cell.partition(' ')[0]}")


def counted(part: Callable[[Budget], int]) -> Getter:
    """How many bytes of one part a path must hold, by the sizes that the file gives."""

    def get(line: Line) -> Cell:
        about, path = line.held.raw("about"), line.cell.partition(" ")[2]
        read = [line.held.value("about", field.name) for field in fields(Shape)]
        sources = tuple(source for value in read if value is not None for source in value.sources)
        size = part(budget(Shape.of(about), path, list_bytes=about.get("list_bytes")))
        return gigabytes(Value(float(size), sources)) if size else Cell(MISSING)

    return get


def measured_peak(line: Line) -> Cell:
    return gigabytes(line.held.value("methods", PATHS[line.cell.partition(" ")[2]], "peak_bytes"))


# Parity: a line a question


def run_over(key: str, digits: int = 2) -> Getter:
    """Naive over ours."""
    return lambda line: times(*(line.held.value("runs", name, key) for name in ("naive FP16", "ours")), digits=digits)


PARITY_LINES: dict[str, tuple[Getter, str]] = {  # what is measured, and the paper's words for it
    "largest drift of the loss": (value("drift", "ours - naive FP16", "max", digits=2), "{most}"),
    "mean drift": (value("drift", "ours - naive FP16", "mean", digits=2), "{mean}"),
    "times less memory": (run_over("peak_bytes", digits=0), "{memory}x"),
    "times faster a step": (run_over("ms_per_step"), MISSING),
}


def of_parity(book: Book, cell: str) -> Held | None:
    return Held(book, PARITY, ()) if book.file(PARITY) is not None else None


def parity_picture(book: Book) -> Iterator[str]:
    if book.file(PARITY) is not None:
        yield "![loss, drift and memory of 500 training steps](pictures/training_parity.png)"


# Chamfer


def of_points(book: Book, cell: str) -> Held | None:
    count, _, dim = cell.partition(", ")
    return row(book, "small" if count == "1K" else "training", f"forward + backward, {count} points, d = {dim}", CHAMFER)


CHECKS = {
    "error": "wrong",
    "cosine": "gradient",
    "shifted_error": "moved",
}  # of chamfer.py, the worst first, and the page's words


def judged(name: str) -> Getter:
    """A method's time and memory, and what it failed: chamfer.py judges all methods by one rule."""

    def get(line: Line) -> Cell | str:
        shown, wrong = with_peak(line.held, name), str(line.held.raw("methods", name, "wrong") or "").split()
        if not shown.sources:
            return "OOM" if "OutOfMemory" in line.held.why(name) else MISSING
        failed = next((word for check, word in CHECKS.items() if check in wrong), "")
        return Cell(shown.text + (f" ({failed})" if failed else ""), shown.sources)

    return get


SOURCES = (
    Source("train", "a contrastive step (forward and backward, in-batch negatives), ms (peak GB beyond inputs and gradients)", "batch",
           rows(BATCHES, whole_step), {
        "ours (csr)": step(MAIN), "ours unified": step("ours unified"), "naive FP32 acc.": step(NAIVE),
        "recompute FP32 acc.": step(RECOMPUTE), "fastest eager": step(BASELINE), "fastest peer": step(PEER), "x naive": faster(NAIVE),
        "GB with inputs and gradients: ours, fastest peer, naive": joined_totals(MAIN, PEER, NAIVE),
        "x fastest eager": faster(BASELINE), "x fastest peer": faster(PEER),
        "paper A100: naive, recompute, unified, csr":
            claim("naive", "naive_peak", "recompute", "recompute_peak", "unified", "unified_peak", "csr", "csr_peak",
                  form="{} ({}), {} ({}), {} ({}), {} ({})"),
    }, ("With inputs and gradients: the peak beyond the inputs, gradients counted (`strict_bytes`), and the FP16 tokens themselves.",),
           competing=("ours (csr)", "ours unified", "naive FP32 acc.", "recompute FP32 acc.", "fastest eager", "fastest peer")),
    Source("bwd_abl", "the backward alone, random winners, and our whole steps, ms (peak GB beyond inputs and gradients)", "shape",
           rows(of_paper("bwd_abl"), within("ablation", ABLATION, form="backward {}, random winners")), {
        "csr": step("ours csr"), "atomic": step("ours atomic"), "unified": step("ours unified"), "csr, hot winners": hot("csr"),
        "unified, hot winners": hot("unified"), "fastest peer": step(PEER), "x fastest peer": faster(PEER, "ours csr"),
        "whole step, csr": stepped("csr"), "whole step, unified": stepped("unified"),
        "paper H100, whole steps: csr, atomic, unified":
            claim("csr", "csr_peak", "atomic", "atomic_peak", "unified", "unified_peak", form="{} ({}), {} ({}), {} ({})"),
    }, ("Random winners are spread out; *hot*: one document token wins for every query token. Uniform winners and every peer's path: "
        "[training_figures.md](training_figures.md). Where GPU time alone is longer than a peer's, `losses` says so.",
        "The paper's figures belong beside the whole steps: its caption gives the step's peak, and its times are as long as steps, not "
        "as backwards alone (flash-maxsim's here: [training_figures.md](training_figures.md))."), competing=("csr", "fastest peer")),
    Source("bwd_breakdown", "components of the csr backward for one query, GPU ms", "shape",
           rows(of_paper("bwd_breakdown"), within("parts", PARTS, form="parts {}, one query")), {
        "forward, winners kept": ms("scores, winners kept for the gradient", BUSY),
        "list building": lambda line: number(building(line.held)), "dQ": ms(QUERIES, BUSY),
        "dD": lambda line: number(added(line.held, "_lists_kernel")), "sum of the three": three, "both in one call": ms(BOTH, BUSY),
        "share of building": share_of_building, "autograd round trip": ms("backward through autograd"),
        "paper A100: forward, build, dQ, dD, pieces, step":
            claim("forward", "build", "dq", "dd", "pieces", "step", form="{}, {}, {}, {}, {}, {}"),
    }, ("Building is a counting sort of three small kernels (times by torch's profiler, L2 warm), the rest with the host ahead; the "
        "round trip is an event time with the host's share.",)),
    Source("bwd_mem", "what a ColPali step keeps between and in its passes, GB: counted (byte_budget.py) and measured", "batch, path",
           rows([f"{batch} {path}" for batch in (64, 128) for path in PATHS], of_batch, lambda cell: cell.replace(" ", ", ")), {
        "S": counted(lambda need: need.similarities), "its gradient": counted(lambda need: need.similarity_gradient),
        "winners": counted(lambda need: need.winners), "lists and scratch": counted(lambda need: need.scratch + need.source_list),
        "total counted": counted(lambda need: need.total), "measured peak": measured_peak, "paper (counted)": claims,
    }, ("`128² · 1024² · 4` bytes are 68.7 GB, and vanilla autograd needs them twice: the paper's row for 128 counts half of S.",)),
    Source("training_parity", "500 training steps, B = 64, FP16-in-dtype naive against ours", "what", rows(PARITY_LINES, of_parity), {
        "measured": lambda line: PARITY_LINES[line.label][0](line),
        "paper A100": lambda line: PARITY_LINES[line.label][1].format(**line.book.paper[line.table]["ColPali B=64"]),
    }, (parity_picture,)),
    Source("chamfer", "Chamfer distance, forward and backward, ms (peak GB)", "points, d",
           rows([f"{count}, {dim}" for dim in (3, 128) for count in ("1K", "10K", "50K", "100K")], of_points), {
        "ours": step(MAIN), "flash-maxsim": judged(THEIRS), "naive autograd": judged(PRODUCTS),
        "x flash-maxsim": faster(THEIRS, digits=1), "x naive": faster(PRODUCTS, digits=1),
        "paper A100": claim("least", "most", form="{} to {}x naive", row="forward + backward"),
    }, ("The worst that a method failed: *wrong*, its distance of these clouds is off by more than 1e-5; *gradient*, a gradient's "
        "cosine is below 0.99999; *moved*, it is right here, and its distance is off after both clouds moved by 1000. By how much: "
        "[training_figures.md](training_figures.md).",)),
)  # fmt: skip
