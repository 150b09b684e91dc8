"""What `conform` finds in other libraries' scorers (`examples/peer_scorers.py`), and in ours: for the table of docs/scorers.md.

    python benchmarks/alone/conformance.py --json FILE [--device cuda] [--only flash_maxsim,ours] [--seconds 120]

Each scorer has a process of its own and so many seconds: one that dies, or does not end, is a finding. One whose library is not
installed is left out, and the file says so.
"""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

import peer_scorers

from maxsim_eval.conformance.conforming import conform
from maxsim_eval.environment import resolve_device
from maxsim_kernels import maxsim
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-eval/conformance/1"
HERE = Path(__file__).resolve()
HELPERS = ("rows", "padded")
SCORERS = {
    "ours": maxsim,
    **{
        name: function
        for name, function in inspect.getmembers(peer_scorers, inspect.isfunction)
        if name not in HELPERS and function.__module__ == peer_scorers.__name__
    },
}


def child(name: str, device: str) -> None:
    """Print every check of one scorer."""
    print(json.dumps([asdict(row) for row in conform(SCORERS[name], device)]))  # type: ignore[arg-type]


def found(name: str, device: str, seconds: float) -> tuple[list[dict[str, str]], str]:
    """A scorer's checks; where there are none, the reason."""
    try:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE), "--child", name, device],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], f"did not end within {seconds:g} seconds"
    if ended.returncode < 0:  # its stderr is then a library's own, with folders of this machine in it
        return [], f"its process ended with {signal.Signals(-ended.returncode).name}"
    if ended.returncode:
        return [], f"its process ended with {ended.returncode}: {' '.join(ended.stderr.split())[-300:]}"
    rows = json.loads(ended.stdout.splitlines()[-1])
    missing = {row["found"] for row in rows if "ModuleNotFoundError" in row["found"]}
    asked = {row["verdict"] for row in rows} - {"skipped"}  # one check calls no scorer where memory is short
    return ([], missing.pop()) if len(missing) == 1 and asked == {"refused"} else (rows, "")


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default=",".join(SCORERS), help=f"of {', '.join(SCORERS)}")
    parser.add_argument("--seconds", type=float, default=120, help="that a scorer has (default 120)")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if not set(names) <= set(SCORERS):
        parser.error(f"--only: got {options.only!r}, need some of {', '.join(SCORERS)}")
    device = resolve_device(options.device)
    shown = torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
    report: dict[str, Any] = {"schema": SCHEMA, "device": shown, "torch": torch.__version__, **kernels()}
    report |= {"scorers": {}, "left_out": {}}
    for name in names:
        rows, why = found(name, device, options.seconds)
        if why:
            report["left_out"][name] = why
        else:
            report["scorers"][name] = {row["check"]: [row["verdict"], row["found"]] for row in rows}
        told = [f"{row['verdict']}: {row['check']}, {row['found']}" for row in rows if row["verdict"] in ("bug", "convention")]
        print(f"{name}: {why or '; '.join(told) or 'everything passes'}", flush=True)
        write(options.json, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    else:
        main()
