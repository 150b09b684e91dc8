"""Tables of docs/benchmarks.md about quantised and wide tokens, traffic, precision and streaming."""

from __future__ import annotations

from tables import rows as page_rows
from tables.cells import MISSING, Book, Cell, Table, Value, gigabytes, number, paper, percent, times
from tables.paper import HALF, WIDE, named
from tables.rows import MAIN, PAPER

TOKEN, DOCUMENT, CORPUS = (f"ours INT8, {kind} scale" for kind in ("token", "document", "corpus"))
OWN_HALF, DEQUANT = "ours FP16", "dequantise to FP32, naive"
ONE_SHOT, PAIR = "ours, whole tokens in one tile", "ours, a program a pair"
COMPILED = "compiled FP16, max-autotune-no-cudagraphs"


def int8(book: Book) -> Table:
    """Five shapes."""
    table = Table(
        "int8",
        "INT8 with a scale a token (and a document) against FP16 and naive, ms; rankings against FP64 on unquantised tokens",
        ["shape, documents", "ours FP16", "token scale", "document scale", "token: x naive", "x dequantise first",
         "x compiled FP16", "x FP16", "document: x FP16", "Spearman, token", "top-20, token", "top-20, document", "storage",
         "flash-maxsim INT8", "paper A100: FP16, INT8; x naive, x dequantise, x FP16; Spearman, top-20; storage"],
    )  # fmt: skip
    for cell, held in page_rows.rows_of(book, "int8"):
        half, token, document = (held.ms(name) for name in (OWN_HALF, TOKEN, DOCUMENT))
        stored = [held.value("stored_bytes", kind) for kind in ("FP16", "token")]
        row: list[Cell | str] = [cell, number(half), number(token), number(document), times(held.ms(WIDE), token)]
        row += [times(held.ms(DEQUANT), token), times(held.compiled(), token), times(half, token), times(half, document)]
        row.append(number(held.value("quality", TOKEN, "spearman"), 6))
        row += [percent(held.value("quality", name, "top20")) for name in (TOKEN, DOCUMENT)]
        row += [times(stored[0], stored[1]), number(held.fastest(("peer",))[1])]
        keys = ("half", "int8", "naive_times", "dequant_times", "half_times", "spearman", "top20", "storage")
        row.append(paper(book, "int8", cell, *keys, form="{}, {}; {}x, {}x, {}x; {}, {}%; {}x").replace(f"{MISSING}x", MISSING))
        table.rows.append(row)
    table.notes.append(
        "textual: 180 document tokens. Random tokens; rankings on real embeddings are in [fidelity.md](fidelity.md)."
    )
    return table


def int8_sweep(book: Book) -> Table:
    """By number of documents."""
    table = Table(
        "int8_B",
        "the same at ColPali by number of documents, ms",
        ["documents", "naive FP32 acc.", "dequantise first", "fastest dequantise (which)", "ours FP16", "token scale", "document scale",
         "corpus scale", "token: x naive", "x dequantise", "x compiled FP16", "token: x FP16", "document: x FP16",
         "top-20, token", "paper A100: naive, dequantise, FP16, INT8; times"],
    )  # fmt: skip
    for cell, held in page_rows.rows_of(book, "int8_B"):
        token = held.ms(TOKEN)
        name, fastest = held.fastest(("baseline",), "dequantise")
        short = name.removeprefix("dequantise to ")
        row: list[Cell | str] = [cell.partition(" ")[2], number(held.ms(WIDE)), number(held.ms(DEQUANT)), named(short, fastest)]
        row += [number(held.ms(name)) for name in (OWN_HALF, TOKEN, DOCUMENT, CORPUS)]
        row += [times(held.ms(WIDE), token), times(held.ms(DEQUANT), token), times(held.compiled(), token)]
        row += [times(held.ms(OWN_HALF), held.ms(name)) for name in (TOKEN, DOCUMENT)]
        row.append(percent(held.value("quality", TOKEN, "top20")))
        keys = ("naive", "dequant", "half", "int8", "naive_times", "dequant_times")
        row.append(paper(book, "int8_B", cell, *keys, form="{}, {}, {}, {}; {}x, {}x"))
        table.rows.append(row)
    return table


def cliff(book: Book) -> Table:
    """The whole-token kernel by width."""
    table = Table(
        "fat_emb_cliff",
        "128 documents, 1024 x 1024 tokens, by d: the kernel that holds whole tokens, forced, ms",
        ["d", "whole tokens (tile)", "over d = 512", "ours (as chosen)", "of floor", "a program a pair", "paper A100, H100"],
    )
    base = page_rows.wide(book, 512)
    for cell in book.paper["fat_emb_cliff"]:
        held = page_rows.wide(book, int(cell.rpartition(" ")[2]))
        if held is None:
            continue
        one = held.ms(ONE_SHOT)
        tile = str(held.raw("methods", ONE_SHOT, "entry") or "")
        shown: Cell | str = named(tile, one)
        if one is None and held.why(ONE_SHOT):
            why = held.why(ONE_SHOT)
            shown = "does not fit a multiprocessor" if "OutOfResources" in why or "does not fit" in why else why[:40]
        row: list[Cell | str] = [cell.rpartition(" ")[2], shown]
        row.append(times(one, base.ms(ONE_SHOT) if base is not None else None))
        row += [number(held.ms(MAIN)), number(held.value("methods", MAIN, "of_floor"), 2), number(held.ms(PAIR))]
        row.append(paper(book, "fat_emb_cliff", cell, "a100", "h100", form="{}, {}"))
        table.rows.append(row)
    return table


def split(book: Book) -> Table:
    """Split-d against everybody."""
    table = Table(
        "splitd_perf",
        "split-d at d > 512 (ours as chosen), ms",
        ["d", "ours", "x whole tokens", "x naive FP16", "x fastest eager (which)", "x compiled", "x flash-maxsim", "x LIK",
         "paper: split-d A100 (times), H100 (times)"],
    )  # fmt: skip
    for cell in (*book.paper["splitd_perf"], "d = 4096"):
        held = page_rows.wide(book, int(cell.rpartition(" ")[2]))
        if held is None:
            continue
        ours = held.ms(MAIN)
        name, eager = held.fastest(names=page_rows.EAGER)
        best = times(eager, ours)
        row: list[Cell | str] = [
            cell.rpartition(" ")[2],
            number(ours),
            times(held.ms(ONE_SHOT), ours),
            times(held.ms(HALF), ours),
        ]
        row += [
            Cell(f"{best.text} ({name})" if name else MISSING, best.sources),
            times(held.compiled(), ours),
        ]
        row += [times(held.ms(peer), ours) for peer in ("flash-maxsim", "late-interaction-kernels")]
        keys = ("a100", "a100_times", "h100", "h100_times")
        row.append(paper(book, "splitd_perf", cell, *keys, form="{} ({}x), {} ({}x)"))
        table.rows.append(row)
    table.notes.append(
        "The paper ends at 2048. At 4096 neither whole tokens nor late-interaction-kernels (LIK) fit a multiprocessor."
    )
    return table


def _both(bytes_of: dict[str, Value | None]) -> Cell:
    """Times as many bytes as ours, naive in either precision."""
    both = [times(bytes_of[name], bytes_of[MAIN], digits=1) for name in (HALF, WIDE)]
    found = both[0].sources + both[1].sources
    return Cell(", ".join(cell.text for cell in both), found) if found else Cell(MISSING)


def traffic(book: Book) -> Table:
    """Bytes."""
    table = Table(
        "traffic",
        "GB that one call moves at 1000 documents: counted, and read from the GPU's counters by ncu",
        ["shape", "ours counted", "naive FP16 counted", "naive FP32 acc. counted", "ratio (FP16, FP32)", "ours, ncu",
         "naive FP16, ncu", "naive FP32 acc., ncu", "ratio, ncu (FP16, FP32)", "paper: naive, Flash, ratio"],
    )  # fmt: skip
    for shape, held in page_rows.rows_of(book, "traffic"):
        plain = {name: held.value("traffic", name, "counted_bytes") for name in (MAIN, HALF, WIDE)}
        seen = {name: held.value("traffic", name, "ncu", "bytes") for name in (MAIN, HALF, WIDE)}
        row: list[Cell | str] = [shape, *(gigabytes(value) for value in plain.values())]
        row.append(_both(plain))
        for name, found in seen.items():
            why = "no counters" if held.raw("traffic", name, "ncu", "failed") else MISSING
            row.append(gigabytes(found) if found is not None else why)
        row.append(_both(seen))
        row.append(paper(book, "traffic", shape, "naive", "flash", "times", form="{}, {}, {}x"))
        table.rows.append(row)
    return table


def precision(book: Book) -> Table:
    """Errors of every path."""
    table = Table(
        "precision",
        "1000 documents against FP64: what the arithmetic loses (same inputs), and what a user loses (FP32 tokens)",
        ["path, shape", "largest error", "relative", "Spearman", "top-20", "top-50", "error to FP32 tokens", "top-20 of FP32 tokens",
         "paper, ColPali"],
    )  # fmt: skip
    rows = book.raw(PAPER, "groups", "precision", "rows") or {}
    for shape in ("ColPali", "textual"):
        for name, data in (rows.get(shape, {}).get("paths") or {}).items():
            held = page_rows.row(book, "precision", shape)
            assert held is not None
            if "failed" in data:
                table.rows.append([f"{name}, {shape}", f"failed: {data['failed'][:60]}", *[MISSING] * 7])
                continue

            def found(kind: str, key: str, held: page_rows.Held = held, name: str = name) -> Value | None:
                return held.value("paths", name, kind, key)

            row: list[Cell | str] = [f"{name}, {shape}", number(found("own", "max_error"), 2)]
            row += [number(found("own", "max_relative_error"), 2), number(found("own", "spearman"), 7)]
            row += [percent(found("own", key)) for key in ("top20", "top50")]
            row += [number(found("true", "max_error"), 2), percent(found("true", "top20"))]
            claims = book.paper["precision"].get(name, {}) if shape == "ColPali" else {}
            row.append(", ".join(f"{key} {value}" for key, value in claims.items()) or MISSING)
            table.rows.append(row)
    return table


def ooc(book: Book) -> Table:
    """Streaming."""
    table = Table(
        "ooc",
        "one ColPali query against pages streamed from host memory",
        ["pages", "embeddings GB", "GPU peak GB", "s", "pages/s", "of the link", "paper A100: embeddings, peak, pages/s"],
    )
    for cell in book.paper["ooc"]:
        file = "h200/streaming_ooc.json"
        keys = ("groups", "colpali", "rows", cell)
        if book.raw(file, *keys) is None:
            file = "h200/streaming.json"
        held = page_rows.Held(book, file, keys)
        seconds, size = held.value("median_s"), held.value("bytes")
        if seconds is None:
            continue
        count, peak, link = held.value("documents"), held.value("memory", "gpu_bytes"), held.value("link_s")
        row: list[Cell | str] = [cell.partition(" ")[0], gigabytes(size), gigabytes(peak), number(seconds)]
        row += [
            number(count / seconds if count is not None else None, 3),
            percent(link / seconds if link is not None else None),
        ]
        row.append(paper(book, "ooc", cell, "embeddings", "peak", "rate", form="{}, {}, {}"))
        table.rows.append(row)
    table.notes.append(
        "More rows (HotpotQA, NQ, INT8, stored files, two GPUs): [scale.md](scale.md). Part of the pages is kept and cycled; "
        "GPU peak: beyond the query."
    )
    return table


def tables(book: Book) -> list[Table]:
    """In the paper's order."""
    return [make(book) for make in (int8, int8_sweep, cliff, split, traffic, precision, ooc)]
