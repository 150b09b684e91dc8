"""Random calls for an hour: shapes, dtypes, layouts, streams and threads, each compared with float64; stops at the first that disagrees.

    python tests/gpu/soak.py --minutes 60 --seed 1 --out soak.json
    python tests/gpu/soak.py --only 123456                        # one case again, by the seed that a mismatch names
    python tests/gpu/soak.py --device cpu --cases 200              # small cases, without a GPU

Several threads take cases in turn, each on a stream of its own; memory that torch hands out uninitialised is filled with NaN; a silent
detour through plain torch is an error. The cases are `tests/helpers/soak_cases.py`'s. `--out` gets counts by kind and, where one
disagreed, its seed. Exit status: 0 all agreed, 1 one did not, 2 nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # this file is a script

import soak_cases
from fixtures import poisoned_memory
from maxsim_kernels import fallback

SAY_SECONDS = 60.0
RETRIES, PAUSE_SECONDS = 5, 4.0
KEPT_BYTES = 8 << 30  # what a soak may hold between cases: the truth of a large one takes up to 77 GB, and others run beside it
Result = TypeVar("Result")


def with_room(run: Callable[[], Result]) -> Result:
    """What `run` returns; where others on the GPU have left it no memory, it is run again when some cases of theirs ended."""
    for _ in range(RETRIES):
        try:
            return run()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        time.sleep(PAUSE_SECONDS)
    return run()


@dataclass
class Soak:
    """What the threads share."""

    device: str
    size: soak_cases.Size
    seed: int
    cases: int
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, Any] | None = None
    taken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> int | None:
        """The seed of the next case; None where it is enough."""
        with self.lock:
            if self.wrong is not None or self.taken >= self.cases or time.monotonic() >= self.until:
                return None
            self.taken += 1
            return self.seed + self.taken - 1

    def run(self, seed: int) -> None:
        """One case, counted or noted as wrong."""
        about = f"seed {seed}"
        try:
            case = with_room(lambda: soak_cases.case_of(seed, self.device, self.size))
            about = str(case)
            with_room(case.check)
            if self.device == "cuda":
                torch.cuda.current_stream().synchronize()
                if torch.cuda.memory_reserved() > KEPT_BYTES:
                    torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001 - whatever a call raises is a finding
            with self.lock:
                self.wrong = self.wrong or {"seed": seed, "case": about, "error": f"{type(error).__name__}: {error}"}
            return
        with self.lock:
            self.counts[case.kind] += 1

    def work(self) -> None:
        """A thread: cases on a stream of its own until it is enough."""
        with torch.cuda.stream(torch.cuda.Stream()) if self.device == "cuda" else nullcontext():
            while (seed := self.next()) is not None:
                self.run(seed)

    def report(self, seconds: float) -> dict[str, Any]:
        """What `--out` gets."""
        import triton

        gpu = torch.cuda.get_device_name() if self.device == "cuda" else "none"
        software = {"torch": torch.__version__, "triton": triton.__version__}
        counted = dict(sorted(self.counts.items()))
        return {"gpu": gpu, **software, "seed": self.seed, "seconds": round(seconds, 1), "cases": sum(counted.values()),
                "wrong": self.wrong, "counts": counted}  # fmt: skip


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=1 << 62, help="at most so many")
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the next has the next number")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small cases on the CPU paths")
    parser.add_argument("--only", type=int, metavar="SEED", help="this case alone")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    return parser.parse_args(given)


def _until_done(soak: Soak, threads: int) -> None:
    """Run the threads, and say now and then how far they are."""
    workers = [threading.Thread(target=soak.work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    said = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        for worker in workers:
            worker.join(0.2)
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            print(f"{sum(soak.counts.values())} cases agree", flush=True)


def main(given: list[str] | None = None) -> int:
    """Run cases; the exit status."""
    options = _arguments(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs an NVIDIA GPU, or --device cpu")
        return 2
    os.environ["MAXSIM_CACHE"] = ""  # the table is looked at, not what somebody tuned on this machine
    warnings.filterwarnings("error", message="maxsim_kernels")
    fallback._SAID.clear()
    size = soak_cases.LARGE if options.device == "cuda" else soak_cases.SMALL
    first, most = (options.seed, options.cases) if options.only is None else (options.only, 1)
    begun = time.monotonic()
    soak = Soak(options.device, size, first, most, begun + 60 * options.minutes)
    with poisoned_memory():
        if options.only is None:
            _until_done(soak, options.threads)
        else:
            print(soak_cases.case_of(first, options.device, size), flush=True)
            soak.work()
    report = soak.report(time.monotonic() - begun)
    if options.out is not None:
        beside = options.out.with_name(f".{options.out.name}.part")
        beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        beside.replace(options.out)
    if soak.wrong is not None:
        print(f"WRONG {soak.wrong['case']}: {soak.wrong['error']}\nagain: --only {soak.wrong['seed']}")
        return 1
    print(f"{report['cases']} cases agree, {len(soak.counts)} kinds, {report['seconds']} s")
    return 0 if report["cases"] else 2


if __name__ == "__main__":
    sys.exit(main())
