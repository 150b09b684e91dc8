"""Training tables of docs/benchmarks.md: steps, backward paths, components, byte budget, parity, Chamfer."""

from __future__ import annotations

from cases.byte_budget import Shape, budget
from tables.cells import MISSING, Book, Cell, Table, Value, gigabytes, number, paper, times
from tables.rows import Held

STEPS = ("h200/training_steps.json", "h200/training.json")
ABLATION = ("h200/training_backward.json", "h200/training.json")
PARTS, CHAMFER, PARITY = "h200/training.json", "h200/chamfer.json", "h200/parity.json"
RECOMPUTE, NAIVE = "checkpointed FP32 accumulation", "naive FP32 accumulation"
BUILD = ("_count_kernel", "_place_kernel", "Scan")


def first(book: Book, files: tuple[str, ...], group: str, row: str) -> Held | None:
    """The first of these files that has a row."""
    keys = ("groups", group, "rows", row)
    return next((Held(book, file, keys) for file in files if book.raw(file, *keys) is not None), None)


def with_peak(held: Held | None, method: str) -> Cell:
    """Milliseconds and peak GB beyond inputs and gradients."""
    if held is None:
        return Cell(MISSING)
    time, peak = number(held.ms(method)), gigabytes(held.value("methods", method, "peak_bytes"))
    return (
        Cell(f"{time.text} ({peak.text})", time.sources + peak.sources)
        if time.sources
        else Cell(held.why(method)[:40] or MISSING)
    )


def train(book: Book) -> Table:
    """Whole steps."""
    table = Table(
        "train",
        "a contrastive step (forward and backward, in-batch negatives), ms (peak GB beyond inputs and gradients)",
        ["batch", "ours (csr)", "ours unified", "naive FP32 acc.", "recompute FP32 acc.", "fastest eager", "fastest peer", "x naive",
         "x fastest eager", "x fastest peer", "paper A100: naive, recompute, unified, csr"],
    )  # fmt: skip
    for cell in ("ColPali B=64", "ColPali B=128", "ColBERT B=128", "ColBERT B=512", "ColBERT B=1024"):
        held = first(book, STEPS, "steps", f"step {cell}")
        if held is None:
            continue
        ours = held.ms("ours")
        (eager, eager_ms), (peer, peer_ms) = held.fastest(("baseline",)), held.fastest(("peer",))
        row: list[Cell | str] = [cell, *(with_peak(held, name) for name in ("ours", "ours unified", NAIVE, RECOMPUTE))]
        for name in (eager, peer):
            shown = with_peak(held, name)
            row.append(Cell(f"{shown.text} {name}", shown.sources))
        row += [times(held.ms(NAIVE), ours), times(eager_ms, ours), times(peer_ms, ours)]
        pairs = ("naive", "recompute", "unified", "csr")
        keys = [key for name in pairs for key in (name, f"{name}_peak")]
        row.append(paper(book, "train", cell, *keys, form="{} ({}), {} ({}), {} ({}), {} ({})"))
        table.rows.append(row)
    return table


def ablation(book: Book) -> Table:
    """Backward paths."""
    table = Table(
        "bwd_abl",
        "the backward alone, random winners, and our whole steps, ms (peak GB beyond inputs and gradients)",
        ["shape", "csr", "atomic", "unified", "csr, hot winners", "unified, hot winners", "fastest peer", "x fastest peer",
         "whole step, csr", "whole step, unified", "paper H100, whole steps: csr, atomic, unified"],
    )  # fmt: skip
    for cell in book.paper["bwd_abl"]:
        held = first(book, ABLATION, "ablation", f"backward {cell}, random winners")
        hot = first(book, ABLATION, "ablation", f"backward {cell}, hot winners")
        if held is None:
            continue
        row: list[Cell | str] = [cell, *(with_peak(held, f"ours {name}") for name in ("csr", "atomic", "unified"))]
        row += [with_peak(hot, f"ours {name}") for name in ("csr", "unified")]
        name, rival = held.fastest(("peer",))
        shown = with_peak(held, name)
        row += [Cell(f"{shown.text} {name}", shown.sources) if name else MISSING, times(rival, held.ms("ours csr"))]
        step = first(book, STEPS, "steps", f"step {cell}")
        row += [with_peak(step, f"ours {name}") for name in ("csr", "unified")]
        pairs = [key for kind in ("csr", "atomic", "unified") for key in (kind, f"{kind}_peak")]
        row.append(paper(book, "bwd_abl", cell, *pairs, form="{} ({}), {} ({}), {} ({})"))
        table.rows.append(row)
    table.notes.append(
        "Random winners are spread out; *hot*: one document token wins for every query token. Uniform winners and every peer's path: "
        "[training.md](training.md). With the host, which csr's launches wait for where they are short (ColBERT B=128, ColPali B=32 "
        "and B=64); where GPU time alone is longer than a peer's, `losses` says so."
    )
    table.notes.append(
        "The paper's figures belong beside the whole steps: its caption gives the step's peak, and its times are as long as steps, not "
        "as backwards alone (flash-maxsim's here: [training.md](training.md)). Steps at ColPali B=32 were not measured."
    )
    return table


def added(held: Held, method: str, parts: tuple[str, ...]) -> Value | None:
    """Milliseconds of the kernels whose names hold one of `parts`."""
    names = [name for name in held.raw("methods", method, "kernels_ms") or {} if any(part in name for part in parts)]
    total: Value | None = None
    for name in names:
        value = held.value("methods", method, "kernels_ms", name)
        if value is not None:
            total = value if total is None else total + value
    return total


def breakdown(book: Book) -> Table:
    """What csr's time is made of."""
    table = Table(
        "bwd_breakdown",
        "components of the csr backward for one query, GPU ms",
        ["shape", "forward, winners kept", "list building", "dQ", "dD", "sum of the three", "both in one call", "share of building",
         "autograd round trip", "paper A100: forward, build, dQ, dD, pieces, step"],
    )  # fmt: skip
    for cell in book.paper["bwd_breakdown"]:
        held = first(book, (PARTS,), "parts", f"parts {cell}, one query")
        if held is None:
            continue
        method = "gradient of documents, csr"
        build, dd = added(held, method, BUILD), added(held, method, ("_lists_kernel",))
        both = held.value("methods", "gradient of both, csr", "busy_median_ms")
        row: list[Cell | str] = [cell, number(held.value("methods", "scores, winners kept for the gradient", "busy_median_ms"))]
        dq = held.value("methods", "gradient of queries, csr", "busy_median_ms")
        whole = build + dq + dd if build is not None and dq is not None and dd is not None else None
        row += [number(value) for value in (build, dq, dd, whole, both)]
        share = build / both if build is not None and both is not None else None
        row.append(Cell(f"{100 * share.number:.0f}%", share.sources) if share is not None else MISSING)
        row.append(number(held.ms("backward through autograd")))
        row.append(
            paper(book, "bwd_breakdown", cell, "forward", "build", "dq", "dd", "pieces", "step", form="{}, {}, {}, {}, {}, {}")
        )
        table.rows.append(row)
    table.notes.append(
        "Building is a counting sort of three small kernels (times by torch's profiler, L2 warm), the rest with the host ahead; the "
        "round trip is an event time with the host's share."
    )
    return table


def bytes_needed(book: Book) -> Table:
    """Analytic and measured."""
    table = Table(
        "bwd_mem",
        "what a ColPali step keeps between and in its passes, GB: counted (budget.py) and measured",
        [
            "batch, path",
            "S",
            "its gradient",
            "winners",
            "lists and scratch",
            "total counted",
            "measured peak",
            "paper (counted)",
        ],
    )
    names = {"vanilla": NAIVE, "csr": "ours csr", "unified": "ours unified"}
    for batch in (64, 128):
        held = first(book, STEPS, "steps", f"step ColPali B={batch}")
        if held is None:
            continue
        keys = ("queries", "documents", "query_tokens", "document_tokens", "dim")
        about = held.raw("about")
        from_file = tuple(source for key in keys for source in (held.value("about", key) or Value(0, ())).sources)
        for path, method in names.items():
            need = budget(Shape(*(int(about[key]) for key in keys)), path, list_bytes=about.get("list_bytes"))
            held_bytes = (
                need.similarities,
                need.similarity_gradient,
                need.winners,
                need.scratch + need.source_list,
                need.total,
            )
            row: list[Cell | str] = [f"{batch}, {path}"]
            row += [gigabytes(Value(float(size), from_file)) if size else MISSING for size in held_bytes]
            row.append(gigabytes(held.value("methods", method, "peak_bytes")))
            claims = book.paper["bwd_mem"].get(f"{batch} {path}", {})
            row.append(", ".join(f"{key} {value}" for key, value in claims.items()))
            table.rows.append(row)
    table.notes.append(
        "`128² · 1024² · 4` bytes are 68.7 GB, and vanilla autograd needs them twice: the paper's row for 128 counts half of S."
    )
    return table


def parity(book: Book) -> Table:
    """500 steps."""
    table = Table(
        "training_parity",
        "500 training steps, B = 64, FP16-in-dtype naive against ours",
        ["what", "measured", "paper A100"],
    )
    if book.file(PARITY) is None:
        return table
    drift = ("drift", "ours - naive FP16")
    peaks = [book.value(PARITY, "runs", name, "peak_bytes") for name in ("naive FP16", "ours")]
    steps = [book.value(PARITY, "runs", name, "ms_per_step") for name in ("naive FP16", "ours")]
    claim = book.paper["training_parity"]["ColPali B=64"]
    table.rows = [
        ["largest drift of the loss", number(book.value(PARITY, *drift, "max"), 2), str(claim["most"])],
        ["mean drift", number(book.value(PARITY, *drift, "mean"), 2), str(claim["mean"])],
        ["times less memory", times(peaks[0], peaks[1], digits=0), f"{claim['memory']}x"],
        ["times faster a step", times(steps[0], steps[1]), MISSING],
    ]
    table.notes.append("![loss, drift and memory of 500 training steps](pictures/training_parity.png)")
    return table


def chamfer(book: Book) -> Table:
    """Distance between point sets."""
    table = Table(
        "chamfer",
        "Chamfer distance, forward and backward, ms (peak GB)",
        ["points, d", "ours", "flash-maxsim", "naive autograd", "x flash-maxsim", "x naive", "paper A100"],
    )
    claim = book.paper["chamfer"]["forward + backward"]
    for dim in (3, 128):
        for count in ("1K", "10K", "50K", "100K"):
            group = "small" if count == "1K" else "training"
            held = first(book, (CHAMFER,), group, f"forward + backward, {count} points, d = {dim}")
            if held is None:
                continue
            wrong = " (wrong)" if held.raw("methods", "flash-maxsim train", "wrong") else ""
            theirs = with_peak(held, "flash-maxsim train")
            naive = with_peak(held, "naive, products")
            row: list[Cell | str] = [f"{count}, {dim}", with_peak(held, "ours"), Cell(theirs.text + wrong, theirs.sources)]
            row.append(naive if naive.sources else "OOM" if "OutOfMemory" in held.why("naive, products") else MISSING)
            row += [times(held.ms(name), held.ms("ours"), digits=1) for name in ("flash-maxsim train", "naive, products")]
            row.append(f"{claim['least']} to {claim['most']}x naive")
            table.rows.append(row)
    table.notes.append("'Wrong': its distance or a gradient is off by more than 1e-5 (docs/training.md says by how much).")
    return table


def tables(book: Book) -> list[Table]:
    """In the paper's order."""
    return [make(book) for make in (train, ablation, breakdown, bytes_needed, parity, chamfer)]
