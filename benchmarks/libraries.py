"""Calls of sentence-transformers, PyLate and colpali-engine, with their own scores and with this operator's, correctness first.

    python benchmarks/libraries.py [--json FILE] [--only sentence-transformers,pylate,colpali-engine] [--rows TEXT] [--tiny]
        [--rounds 31] [--seconds 110]

Every row is one call of a library's own API, once with each backend that the library has and once after `integrations.enable`. A method
takes part only where its scores, or its loss and gradients, are those of the library in float64. Times are whole calls as their caller
sees them (host clock around calls and one wait for the GPU), medians and quartiles of rounds in which the methods take turns; memory is
what a call allocates beyond its inputs at its peak. A library or backend that cannot be imported is left out, and the file says why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cases.libraries import ROWS, TINY, Call, Row, Sizes, tokens
from maxsim_kernels import integrations, maxsim
from measure.session import environment_variable, kernels
from results.file import write

SCHEMA = "maxsim-kernels/libraries/1"
OURS = "ours"
ROUNDS = 31
ROUND_SECONDS = 0.03
# Largest distance of a score from float64's, as a share of the largest score.
SCORE_BOUND = {torch.float32: 3e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Of gradients, some of whose rows a near tie gives to another token: the median row's error as a share of its norm (TF32 counts
# as float32), how far the whole may be too long or too short along the truth, and how much of its norm such rows may change.
ROW_BOUND = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 3e-2}
SLOPE_BOUND, GRADIENT_BOUND = 0.03, 0.25
WORDS = {
    "error": "scores or loss",
    "gradient_row": "the gradient's middle row",
    "gradient_slope": "the gradient's length",
    "gradient_error": "gradients",
}
LEAST_ROW = 1e-3  # of the longest row: shorter ones do not count for the median row's error


class UnfitError(Exception):
    """Why a method does not take part."""


@contextlib.contextmanager
def enabled(library: str) -> Iterator[None]:
    """Score a library's calls with this operator; raises UnfitError where a call was left to the library."""
    with integrations.enable(library):
        yield
        status = integrations.status()[library]
    if status.left or not status.calls:
        raise UnfitError(f"not scored by us, but by the library: {dict(status.left)}")


def import_library(library: str) -> None:
    """Import a library. Where PyLate's or colpali-engine's top module fails, which imports every model, a bare one stands in."""
    package = library.replace("-", "_")
    importlib.metadata.version(library)
    try:
        importlib.import_module(package)
    except ImportError:
        found = importlib.util.find_spec(package)
        if found is None or library == "sentence-transformers":
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        bare = types.ModuleType(package)
        bare.__path__ = list(found.submodule_search_locations or ())
        sys.modules[package] = bare


def backends(library: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """The methods of a library by name: its own backends, ours."""
    ours = {OURS: lambda: enabled(library)}
    if library == "sentence-transformers":
        return {"own": contextlib.nullcontext, **ours}
    name = "PYLATE_SCORES_BACKEND" if library == "pylate" else "COLPALI_SCORES_BACKEND"
    known = {"torch": "own", "lik": "LIK", **({"flash": "flash-maxsim"} if library == "pylate" else {})}
    return {shown: (lambda value=value: environment_variable(name, value)) for value, shown in known.items()} | ours


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def errors(row: Row, truth: tuple[Tensor, list[Tensor]], given: Any) -> dict[str, float]:
    """Errors: of values, as a share of the largest; of gradients (the worst leaf's) as a whole, in length, in the median row."""
    values, gradients = row.found(given)
    found = {"error": float((values - truth[0]).abs().max() / truth[0].abs().max().clamp(min=1e-1))}
    for one, other in zip(gradients, truth[1], strict=True):
        apart, size = one - other, other.norm().clamp(min=1e-12)
        lengths = other.norm(dim=-1).flatten()
        told = lengths > LEAST_ROW * lengths.max()
        middle = (apart.norm(dim=-1).flatten()[told] / lengths[told]).median() if bool(told.any()) else apart.norm()
        worst = {
            "gradient_error": apart.norm() / size,
            "gradient_slope": ((apart * other).sum() / size**2).abs(),
            "gradient_row": middle,
        }
        found |= {name: max(found.get(name, 0.0), float(value)) for name, value in worst.items()}
    return found


def check(row: Row, truth: tuple[Tensor, list[Tensor]], device: str) -> dict[str, Any]:
    """One call: its errors, and the memory that it allocates.

    Raises:
        UnfitError: what it gives is not what the library gives in float64.
    """
    if device != "cpu":
        row.call()  # what is compiled and chosen once
        wait(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    given = row.call()
    wait(device)
    peak = None if device == "cpu" else (torch.cuda.max_memory_allocated() - before) / 2**20
    found = errors(row, truth, given)
    bounds = {"error": SCORE_BOUND[row.dtype], "gradient_error": GRADIENT_BOUND, "gradient_slope": SLOPE_BOUND}
    bounds["gradient_row"] = ROW_BOUND[row.dtype]
    for name, said in WORDS.items():
        if name in found and not found[name] <= bounds[name]:
            raise UnfitError(f"{said} {found[name]:.1e} off, need {bounds[name]:.0e}")
    return {"gradient_error": 0.0, **found, "peak_mib": peak}


def one_round(row: Row, device: str) -> float:
    """Milliseconds a call, of as many as fill a round."""
    row.call()
    wait(device)
    started = time.perf_counter()
    row.call()
    wait(device)
    count = max(1, min(100, int(ROUND_SECONDS / max(time.perf_counter() - started, 1e-6))))
    started = time.perf_counter()
    for _ in range(count):
        row.call()
    wait(device)
    return (time.perf_counter() - started) / count * 1e3


def measure(row: Row, device: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Check and time the methods of one row: milliseconds, memory, and why methods are left out."""
    with row.methods["own"]():  # other backends of the library have no float64
        truth = row.truth()
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, context in row.methods.items():
        try:
            with context():
                row.begin()
                found[name] = check(row, truth, device)
        except Exception as problem:  # noqa: BLE001 - whatever another's code raises is why it is not measured
            left_out[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]
    samples: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds):
        names = list(found)
        for name in names[number % len(names) :] + names[: number % len(names)] if names else ():
            with row.methods[name]():
                row.begin()
                samples[name].append(one_round(row, device))
    for name, times in samples.items():
        low, middle, high = statistics.quantiles(times, n=4)
        found[name] |= {"ms": middle, "low": low, "high": high}
    others = {name: one["ms"] for name, one in found.items() if name != OURS}
    ratio = {name: ms / found[OURS]["ms"] for name, ms in others.items()} if OURS in found else {}
    return {"library": row.library, "row": row.name, **row.facts, "methods": found, "faster": ratio, "left_out": left_out}


def overhead(library: str, device: str) -> dict[str, Any]:
    """Microseconds that a call costs its caller beyond the operator's own call on the same tokens."""
    q, d = tokens(device, torch.float16, 2, 8, 32), tokens(device, torch.float16, 3, 8, 32, seed=1)
    mask = torch.ones(3, 8, device=device).bool() if library == "sentence-transformers" else None
    given = {} if mask is None else {"b_mask": mask}
    place, name = {
        "sentence-transformers": ("sentence_transformers.util.similarity", "maxsim"),
        "pylate": ("pylate.scores.colbert", "colbert_scores"),
        "colpali-engine": ("colpali_engine.utils.maxsim", "maxsim_inbatch"),
    }[library]

    def least(call: Call) -> float:
        times = []
        for _ in range(9):
            wait(device)
            started = time.perf_counter()
            for _ in range(200):
                call()
            times.append((time.perf_counter() - started) / 200 * 1e6)
        return min(times)

    with torch.no_grad():
        direct = least(lambda: maxsim(q, d, document_mask=mask))
        with integrations.enable(library):
            function = getattr(importlib.import_module(place), name)
            patched = least(lambda: function(q, d, **given))
            direct = min(direct, least(lambda: maxsim(q, d, document_mask=mask)))
    return {"library": library, "call": name, "operator_us": direct, "patched_us": patched, "overhead_us": patched - direct}


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    shown = [
        f"{name} {one['ms']:.3f} ms"
        + ("" if one["peak_mib"] is None else f" {one['peak_mib']:.0f} MiB")
        + (f" gradient {one['gradient_row']:.0e} ({one['gradient_error']:.0e})" if "gradient_row" in one else "")
        for name, one in row["methods"].items()
    ]
    ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row["faster"].items())
    return f"{row['library']}, {row['row']}: {'; '.join(shown)}; ours {ratios or 'alone'}" + (
        f"; left out: {row['left_out']}" if row["left_out"] else ""
    )


def main() -> None:
    """Measure what is asked for and there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--only", default=",".join(ROWS), help="comma-separated libraries (default all)")
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of turns (default {ROUNDS})")
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether everything runs")
    parser.add_argument("--seconds", type=float, default=110, help="begin no row after so many (default 110)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    asked = arguments.only.split(",")
    if not set(asked) <= set(ROWS):
        parser.error(f"--only: got {arguments.only!r}, need some of {', '.join(ROWS)}")
    if arguments.rounds < 2:
        parser.error(f"--rounds: got {arguments.rounds}, need 2 or more: the spread is told")
    device, sizes = arguments.device, TINY if arguments.tiny else Sizes()
    gpu = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine()
    document: dict[str, Any] = {"schema": SCHEMA, "device": gpu, "torch": torch.__version__, **kernels()}
    document |= {"versions": {}, "rows": [], "overhead": [], "left_out": {}}
    started = time.monotonic()
    for library in asked:
        try:
            import_library(library)
        except ImportError as problem:  # its absence is one too
            document["left_out"][library] = f"{type(problem).__name__}: {problem}"
            continue
        document["versions"][library] = importlib.metadata.version(library)
        document["overhead"].append(overhead(library, device))
        print(
            "{library} {call}: {overhead_us:.1f} us beyond the operator's {operator_us:.1f}".format(**document["overhead"][-1])
        )
        for row in ROWS[library](device, sizes):
            if arguments.rows not in row.name:
                continue
            if time.monotonic() - started > arguments.seconds:
                document["left_out"][f"{library}, {row.name}"] = f"not begun within {arguments.seconds:.0f} seconds"
                continue
            row.methods = backends(library)
            document["rows"].append(measure(row, device, arguments.rounds))
            print(line(document["rows"][-1]), flush=True)
            write(arguments.json, document)
            if device != "cpu":
                torch.cuda.empty_cache()
    for name, problem in document["left_out"].items():
        print(f"left out: {name}: {problem}")
    write(arguments.json, document)
    if not document["rows"]:
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()
