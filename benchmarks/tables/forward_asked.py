"""What the forward kernels are asked to reach on one H200, and whether they do: 'asked / measured / met'.

Every line is computed from figures of one run. A line whose figures are missing is left out; one whose own method failed is not met.
"""

from __future__ import annotations

from typing import Any

from measure.names import (
    COUNTS,
    DEQUANTISED,
    FLASH,
    GRANULARITIES,
    LIK,
    MANY,
    MEMORY,
    PAIRS,
    RAGGED_MANY,
    RAGGED_ONE,
    SHAPES,
    WIDE,
    quantised_name,
    quantised_row_name,
)
from results.file import Figures


class Verdicts:
    """Collects the lines."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self.lines: list[dict[str, Any]] = []

    def least(self, row: str, what: str, asked: float, measured: float | None, *, main: str = "ours") -> None:
        """`measured` is to reach `asked`."""
        if row not in self._figures.rows:
            return
        if measured is None:
            if self._figures.method(row, main) is not None:
                return  # the rival is missing: nothing to compare
            what += " (ours was not measured)"
        met = measured is not None and measured >= asked
        self.lines.append({"row": row, "what": what, "asked": asked, "measured": measured, "met": met})

    def peers(self, row: str, asked: float) -> None:
        """Ours is to be `asked` times faster than the faster peer."""
        rival = self._figures.fastest(row, ("peer",))
        if rival is not None:
            self.least(row, f"times faster than {rival}, the faster peer", asked, self._figures.ratio(row, rival))

    def most(self, row: str, what: str, asked: float, measured: float) -> None:
        """`measured` is to stay below `asked`."""
        self.lines.append({"row": row, "what": what, "asked": asked, "measured": measured, "met": measured < asked})


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """All lines that the document's figures allow."""
    figures = Figures(report)
    found = Verdicts(figures)
    _float16(found, figures)
    _quantised(found, figures)
    _wide(found, figures)
    _small(found, figures)
    _everywhere(found, figures)
    return found.lines


def _float16(found: Verdicts, figures: Figures) -> None:
    found.least("ColPali 10K", "of cuBLAS FP16", 0.84, figures.of_matrix("ColPali 10K", "fp16"))
    found.peers("ColPali 10K", 1.4)
    found.least(MANY, "of cuBLAS FP16", 0.84, figures.of_matrix(MANY, "fp16"))
    for peer in (FLASH, LIK):
        found.least(MANY, f"times faster than {peer}", 4.5, figures.ratio(MANY, peer))
    found.least(RAGGED_MANY, "of cuBLAS FP16, real tokens", 0.68, figures.of_matrix(RAGGED_MANY, "fp16"))
    found.least(RAGGED_MANY, f"times faster than {LIK} varlen", 5.0, figures.ratio(RAGGED_MANY, LIK))
    for row, asked in (("textual 10K", 0.86), ("long-doc 10K", 0.93), (RAGGED_ONE, 0.80)):
        found.least(row, "of read bandwidth", asked, figures.of_read(row))


def _quantised(found: Verdicts, figures: Figures) -> None:
    for row in ("ColPali 10K", MANY):
        for granularity, asked in (("token", 1.25), ("document", 1.85), ("corpus", 1.85)):
            place, main = quantised_row_name("INT8", row), quantised_name("INT8", granularity)
            found.least(place, f"{granularity} scale over our FP16", asked, figures.ratio(place, "ours FP16", main), main=main)
        for granularity in GRANULARITIES:
            place, main = quantised_row_name("FP8", row), quantised_name("FP8", granularity)
            found.least(place, f"{granularity} scale over our FP16", 1.7, figures.ratio(place, "ours FP16", main), main=main)
    for count in DEQUANTISED:
        place = f"INT8 or dequantise, B = {count}"
        rival = figures.fastest(place, ("baseline",), part="dequantise")
        if rival is not None:
            main = figures.fastest(place, ("ours",)) or quantised_name("INT8", "document")
            found.least(place, f"{main}: times faster than {rival}", 8.0, figures.ratio(place, rival, main), main=main)


def _wide(found: Verdicts, figures: Figures) -> None:
    for dim in WIDE:
        row = f"wide, d = {dim}"
        rival = figures.fastest(row, ("baseline",), part="naive FP16")
        if rival is not None:
            found.least(row, f"times faster than {rival}", 1.0, figures.ratio(row, rival))
        if dim in (768, 1024, 2048):
            found.least(row, f"times faster than {FLASH}", 1.4, figures.ratio(row, FLASH))


def _small(found: Verdicts, figures: Figures) -> None:
    """Launch-bound calls: GPU time by events, and the two host clocks."""
    clocks = {"idle_median_us": "one call from idle", "call_median_us": "back to back"}
    for rival in ("naive FP16", FLASH, LIK):
        found.least("textual 1K", f"times faster than {rival}, GPU time", 2.5, figures.ratio("textual 1K", rival))
        for key, words in clocks.items():
            row = "host textual 1K"
            found.least(row, f"times faster than {rival}, {words}", 2.5, figures.ratio(row, rival, key=key))
    for count, length in PAIRS:
        row = f"pairs {count} x {length}"
        rival = figures.fastest(row, ("baseline",), part="compiled") or "compiled FP16, default"
        found.least(row, f"times faster than {rival}, GPU time", 1.0, figures.ratio(row, rival))
        for key, words in clocks.items():
            host = f"host {row}"
            rival = figures.fastest(host, ("baseline",), key, "compiled") or "compiled FP16, default"
            found.least(host, f"times faster than {rival}, {words}", 1.0, figures.ratio(host, rival, key=key))


def _everywhere(found: Verdicts, figures: Figures) -> None:
    for count in COUNTS:
        for shape in SHAPES:
            row = f"{shape} {count}"
            rival = figures.fastest(row)
            if rival is not None:
                found.least(row, f"times faster than the fastest rival, {rival}", 1.0, figures.ratio(row, rival))
    largest = max(
        (
            (data["extra_bytes"] + data["kept_bytes"], row, name)
            for row, (_, held) in figures.rows.items()
            for name, data in held["methods"].items()
            if data["kind"] == "ours" and "CUDA graph" not in name
        ),
        default=None,
    )
    if largest is not None:
        found.most(
            largest[1],
            f"peak MB above inputs and outputs, the largest of all rows ({largest[2]})",
            MEMORY / 1e6,
            largest[0] / 1e6,
        )


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The lines as text."""
    shown = [f"\n{'row':34} {'asked':>7} {'measured':>9}  {'met':4} what"]
    for line in lines:
        measured = "-" if line["measured"] is None else f"{line['measured']:.3f}"
        shown.append(f"{line['row']:34} {line['asked']:7.2f} {measured:>9}  {'yes' if line['met'] else 'NO':4} {line['what']}")
    met = sum(line["met"] for line in lines)
    return [*shown, f"{met} of {len(lines)} lines met"]
