"""What was asked of streaming and what was measured, as verdicts and Markdown tables, from one results file, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.markdown import Lines, gigabytes, grid
from tables.streams import ASKED

DEFAULT_READERS = "8 readers"
PAPER = {  # seconds on an A100 (its section 'Out-of-core')
    "hotpotqa": "paper: 26 s",
    "nq": "paper: 103 s",
    "colpali": "paper: 14.4 s (52K pages/s)",
}


class Held:
    """Look-ups in a results document: group -> line -> figures."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        groups = {**report["partial"], **report["groups"]}
        self.groups: dict[str, dict[str, Any]] = {name: group["rows"] for name, group in groups.items()}

    def line(self, group: str, name: str) -> dict[str, Any]:
        """Figures of a line; empty where it was not measured."""
        found: dict[str, Any] = self.groups.get(group, {}).get(name, {})
        return found

    def last(self, group: str) -> tuple[str, dict[str, Any]]:
        """The last line of a group."""
        lines = self.groups.get(group, {})
        return next(reversed(lines.items())) if lines else ("", {})

    def streams(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Group, name and figures of all lines whose memory was watched."""
        return [(group, name, data) for group, held in self.groups.items() for name, data in held.items() if "memory" in data]


def beyond(data: Mapping[str, Any]) -> int:
    """Host bytes a stream took: growth of the process, and pinned memory, which may be part of that growth."""
    return int(data["memory"]["host_bytes"] + data["memory"].get("pinned_bytes", 0))


def verdicts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every line of the issue's table that a group of the file answers, each with its floor and time where it has them."""
    held, found = Held(report), Lines()

    def add(group: str, name: str, *rest: Any, line: Mapping[str, Any] | None = None, most: bool = False) -> None:
        if group in held.groups:
            found.add(name, *rest, most=most)
            data = line or {}
            found.all[-1] |= {"floor_s": data.get("floor_s"), "measured_s": data.get("median_s")}

    pinned, warm = held.line("hotpotqa", "pinned"), held.line("stored", DEFAULT_READERS)
    add(
        "hotpotqa", "HotpotQA shape, pinned", "times the floor", pinned.get("ratio"), *ASKED["hotpotqa"], line=pinned, most=True
    )
    name = f"HotpotQA shape, page cache, {DEFAULT_READERS}"
    add("stored", name, "times the floor", warm.get("ratio"), *ASKED["stored"], line=warm, most=True)
    _reference(held, add)
    few = min((data["queries"] for data in held.groups.get("int8", {}).values()), default=0)
    half = held.line("int8", f"{few} queries, FP16")
    codes = held.line("int8", f"{few} queries, INT8, a scale a token")
    faster = half["median_s"] / codes["median_s"] if "median_s" in half and "median_s" in codes else None
    add("int8", f"INT8, {few} queries", "times faster than FP16", faster, *ASKED["int8"], line=codes)
    _volume(held, add)
    most = max(((beyond(line), f"{group}, {name}") for group, name, line in held.streams() if group != "cpu"), default=None)
    if most is not None:
        found.add(f"every stream; most in {most[1]}", "GB of host memory beyond the buffers", most[0] / 1e9, 4.0, most=True)
        found.all[-1] |= {"floor_s": None, "measured_s": None}
    name, data = held.last("cpu")
    growth = data["memory"]["host_bytes"] / 1e6 if "memory" in data else None
    add("cpu", f"without a GPU, {name}", "MB of memory beyond inputs and results", growth, 256.0, None, line=data, most=True)
    for gpus in (2, 4):
        for name, data in held.groups.get(f"ranks {gpus}", {}).items():
            if name.endswith(f"{gpus} GPUs"):
                limits = ASKED[f"ranks {gpus}"] if name == next(iter(_shared(held, gpus))) else (None, None)
                add(f"ranks {gpus}", name, "times faster than one GPU", data.get("times_faster"), *limits, line=data)
    return found.all


def _shared(held: Held, gpus: int) -> list[str]:
    """Lines of all GPUs together; the first has all queries."""
    return [name for name in held.groups[f"ranks {gpus}"] if name.endswith(f"{gpus} GPUs")]


def _reference(held: Held, add: Any) -> None:
    ours = held.line("reference", "ours, pinned")
    for name in ("FP32 reference", "padded FP32 einsum"):
        data = held.line("reference", name)
        times = data["whole_s"] / ours["median_s"] if "whole_s" in data and "median_s" in ours else None
        add(
            "reference", f"HotpotQA shape, {name}", "times slower than ours (paper: 4.0)", times, *ASKED["reference"], line=ours
        )
        same = data.get("same_ndcg_10")
        add("reference", f"HotpotQA shape, {name}", "metrics identical (1: yes)", None if same is None else float(same), 1.0)


def _volume(held: Held, add: Any) -> None:
    name, volume = held.last("nq")
    add("nq", f"NQ shape, {name}", "seconds", volume.get("median_s"), *ASKED["nq"], line=volume, most=True)
    memories = [line["memory"] for line in held.groups.get("nq", {}).values() if "memory" in line]
    for key, what in (("gpu_bytes", "GPU peak"), ("gpu_free_bytes", "GPU memory taken")):
        peaks = [memory.get(key) for memory in memories]
        flat = max(peaks) / min(peaks) - 1 if len(peaks) > 1 and all(peaks) else None
        add("nq", "NQ shape", f"{what}, growth from the fewest documents to all", flat, 0.05, None, most=True)
    name, shown = held.last("colpali")
    share = shown["link_s"] / shown["median_s"] if "median_s" in shown else None
    add("colpali", f"ColPali, {name}", "of the pinned copy rate", share, *ASKED["colpali"], line=shown)


# Tables


def seconds(value: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if value is None else f"{value:.3g}"


def cells(name: str, data: Mapping[str, Any]) -> list[str]:
    """One stream as a line of its group's table."""
    if "wrong" in data:
        return [name, data["wrong"]]
    memory, median = data.get("memory", {}), data.get("median_s")
    speed = data["bytes"] / median / 1e9 if median and data.get("bytes") else None
    return [
        name,
        f"{data['documents']:,}",
        gigabytes(data.get("bytes")),
        seconds(data.get("link_s")),
        seconds(data.get("memory_s")),
        seconds(data.get("floor_s")),
        seconds(median),
        seconds(data.get("first_s")),
        seconds(data.get("ratio")),
        seconds(speed),
        seconds(data["documents"] / median if median else None),
        gigabytes(memory.get("gpu_bytes")),
        gigabytes(memory.get("gpu_free_bytes")),
        gigabytes(beyond(data) if memory else None),
    ]


HEADS = "line,documents,GB,link s,in memory s,floor s,measured s,first run s,ratio,GB/s,documents/s,GPU peak GB,GPU taken GB,host GB"


def group_table(name: str, lines: Mapping[str, Any]) -> list[str]:
    """One group: streams with the same columns, or what else it holds as text."""
    streams = {key: data for key, data in lines.items() if "documents" in data and ("ratio" in data or "wrong" in data)}
    shown = [f"### {name}" + (f" ({PAPER[name]})" if name in PAPER else ""), ""]
    if streams:
        shown += grid(HEADS.split(","), [cells(key, data) for key, data in streams.items()])
    for key, data in lines.items():
        if key not in streams:
            shown.append(
                f"- {key}: " + ", ".join(f"{what} {text(value)}" for what, value in data.items() if what != "samples_s")
            )
        if "stages" in data:
            shown.append(f"- {key}, seconds busy in one profiled run: {text(data['stages'])}")
    return [*shown, ""]


def text(value: Any) -> str:
    """A figure, or several in a list or by name, as text."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {text(held)}" for key, held in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def rates_table(lines: Mapping[str, Any]) -> list[str]:
    """The machine's rates."""
    rows = []
    for name, data in lines.items():
        gigas = data.get("GB_s")
        rows.append([name, seconds(gigas) if gigas else "-", seconds(data.get("TFLOP_s"))])
    return ["### rates", "", *grid(["what", "GB/s", "TFLOP/s"], rows)]


def asked_table(lines: list[dict[str, Any]]) -> list[str]:
    """Asked, floor, measured, ratio."""
    words = {None: "", True: "yes", False: "**no**"}
    rows = []
    for line in lines:
        sign = "<= " if line["most"] else ""
        limits = ["-" if line[key] is None else f"{sign}{line[key]:.4g}" for key in ("asked", "aim")]
        value = "not measured" if line["measured"] is None else f"{line['measured']:.3g}"
        times = [seconds(line["floor_s"]), seconds(line["measured_s"])]
        rows.append([line["row"], line["what"], *limits, *times, value, words[line["met"]], words[line["aimed"]]])
    heads = ["work", "what", "asked", "aim", "floor s", "measured s", "value", "met", "aim met"]
    counted = [line for line in lines if line["met"] is not None]
    return [
        "## Asked and measured",
        "",
        *grid(heads, rows),
        f"{sum(line['met'] for line in counted)} of {len(counted)} lines met.",
    ]


def markdown(report: Mapping[str, Any], brief: bool = False) -> list[str]:
    """All tables of a file; `brief`: only what was asked."""
    shown = asked_table(verdicts(report))
    if brief:
        return shown
    for name, lines in Held(report).groups.items():
        shown += ["", *(rates_table(lines) if name == "rates" else group_table(name, lines))]
    return shown
