"""The checks on a GPU, each a piece that fits a time limit, and a file that says what passed with which sources.

    python tests/gpu/record.py tests --json tests.json [--processes 14] [--texts DATA/beir/scifact/corpus.jsonl]
                                                                                          the folder but test_gpu_speed.py
    python tests/gpu/record.py tests --json tests.json --files test_gpu_bits,test_gpu_pairs                     these alone
    python tests/gpu/record.py speed --json tests.json                                    that file, with the GPU to itself
    python tests/gpu/record.py sanitizer --json sanitizers.json --tool memcheck [--parts 1,2/8]
    python tests/gpu/record.py soak --json soak.json --minutes 9 --seed 3

A file of tests has an entry a test file: how many cases passed, failed and were skipped, the last two by name; with --texts none may be
skipped for want of SciFact. One of sanitizers has an entry a tool and part, of soaks one a seed. Each entry names the commit and the
digest of the operator's sources, and replaces the one before.
Exit status: 0 all is well, 1 something failed, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # this file is a script
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from measure.session import kernels
from shares import share

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SPEED = "test_gpu_speed.py"
SCHEMA = "maxsim-eval/{}/2"
SUMMARIES = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}
CALLS = r"^(\d+) calls, (\d+) wrong$"


def asked(names: str) -> list[Path]:
    """The test files with these names; without any all but the one of times."""
    named = [HERE / f"{name}.py" for name in names.split(",") if name]
    return named or sorted(path for path in HERE.glob("test_*.py") if path.name != SPEED)


def counted(report: Path) -> dict[str, dict[str, Any]]:
    """What pytest's XML says, by test file."""
    found: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        home = case.get("classname") or case.get("name") or ""  # a file that cannot be imported is a case of no class
        name = next((part for part in reversed(home.split(".")) if part.startswith("test_")), home)
        entry = found.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": [], "skips": []})
        entry["seconds"] = round(entry["seconds"] + float(case.get("time") or 0), 3)
        kind, names = "passed", None
        if case.find("failure") is not None or case.find("error") is not None:
            kind, names = "failed", "failures"
        elif case.find("skipped") is not None:
            kind, names = "skipped", "skips"
        entry[kind] += 1
        if names is not None:
            entry[names].append(str(case.get("name")))
    return found


def tests(paths: list[Path], processes: int, texts: Path | None) -> tuple[dict[str, Any], bool]:
    """Run test files: what passed by file, and whether all did; `texts`: SciFact's, which they must find then."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *map(str, paths),
            f"--junitxml={report}",
            "-q",
            "--continue-on-collection-errors",
            "-p",
            "no:benchmark",  # where that plugin is installed, it warns beside xdist, and a warning is an error here
        ]
        command += ["-n", str(processes)] if processes > 1 and find_spec("xdist") else []
        # Each process compares with a CPU: with all threads of the machine in each they wait for one another.
        threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        if texts is not None:
            environment |= {"MAXSIM_TEST_DATA": str(texts.resolve().parents[2]), "MAXSIM_REQUIRE_DATA": "1"}
        ended = subprocess.run(command, cwd=ROOT, check=False, env=environment).returncode
        found = counted(report) if report.exists() else {}
    for path in paths:
        if path.stem not in found:  # it could not be imported, or the run was cut off
            found[path.stem] = {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0, "failures": ["the whole file"]}
    passed, failed = (sum(one[key] for one in found.values()) for key in ("passed", "failed"))
    return found, ended == 0 and failed == 0 and passed > 0  # without a GPU nothing is collected, which shows nothing


def sanitized(
    tool: str, parts: list[int], count: int, only: str = "", command: list[str] | None = None
) -> tuple[dict[str, Any], bool]:
    """Run parts of sanitize.py under a tool, all at once: what each found, and whether all is well. `only`: as its option."""
    program = command or [program_of(), "--tool", tool, sys.executable, str(HERE / "sanitize.py")]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # files, not pipes: a full pipe would stop a process whose turn to be read is later
        logs = {part: Path(folder) / f"{part}.txt" for part in parts}
        running = []
        for part, log in logs.items():
            with log.open("w", encoding="utf-8") as out:
                asked = [*program, "--part", f"{part}/{count}", "--only", only]
                running.append(subprocess.Popen(asked, stdout=out, stderr=subprocess.STDOUT, env=environment))
        ended = [process.wait() for process in running]
        said = {part: log.read_text(encoding="utf-8", errors="replace") for part, log in logs.items()}
    found, well = dict[str, Any](), True
    for (part, text), code in zip(said.items(), ended, strict=True):
        summary, calls = re.search(SUMMARIES[tool], text), re.search(CALLS, text, re.MULTILINE)
        entry = {
            "exit": code,
            "errors": int(summary[1]) if summary else None,
            "calls": int(calls[1]) if calls else None,
            "wrong": int(calls[2]) if calls else None,
        }
        if code or entry["errors"] != 0 or not entry["calls"] or entry["wrong"]:
            well, entry["said"] = False, text[-2000:]
        name = f"{tool}, part {part}/{count}" + (f" of {only}" if only else "")
        found[name] = entry
        print(f"{name}: {entry['calls']} calls, {entry['wrong']} wrong, {entry['errors']} errors", flush=True)
    return found, well


def program_of() -> str:
    """The sanitizer's program; ends this one where there is none."""
    name = "compute-sanitizer"
    places = [os.path.join(os.environ.get(key, ""), "bin") for key in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda/bin"]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        print(
            f"{name}: not on PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin; it comes with NVIDIA's CUDA toolkit",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return found


def soaked(minutes: float, seed: int) -> tuple[dict[str, Any], bool]:
    """Run soak.py from a seed on."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "soak.json"
        command = [sys.executable, str(HERE / "soak.py"), "--minutes", str(minutes), "--seed", str(seed), "--out", str(out)]
        ended = subprocess.run(command, check=False).returncode
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"exit": ended}
    return {f"seed {seed}": found}, ended == 0


def kept(path: Path, kind: str, part: str, found: dict[str, Any]) -> None:
    """Entries into the file, each with its commit, sources and time."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if report.get("schema") != SCHEMA.format(kind):
        report = {"schema": SCHEMA.format(kind), part: {}}
    about = {**machine(), **kernels(), "measured": datetime.now(UTC).isoformat(timespec="seconds")}
    about["families"] = {name: about["families"][name] for name in ("operator", "scoring", "kernels", "proving")}
    report[part] |= {name: {**entry, **about} for name, entry in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def machine() -> dict[str, Any]:
    """GPU and software, asked in a process of its own: this one leaves the GPU alone."""
    script = (
        "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name()]))"
    )
    version, name = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    return {"gpu": name or "none", "torch": version}


def shares(text: str) -> tuple[list[int], int]:
    """`1,2/8` as parts and their number."""
    names, _, count = text.partition("/")
    parts = [share(f"{name}/{count}")[0] + 1 for name in names.split(",")]
    return parts, int(count)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    made = {name: commands.add_parser(name) for name in ("tests", "speed", "sanitizer", "soak")}
    for command in made.values():
        command.add_argument("--json", type=Path, required=True, help="the file that gets the entries")
    made["tests"].add_argument("--files", default="", metavar="NAME,NAME", help="these files and no others")
    made["tests"].add_argument("--processes", type=int, default=14, help="that share the GPU (default 14; needs pytest-xdist)")
    made["tests"].add_argument(
        "--texts", type=Path, help="SciFact's DATA/beir/scifact/corpus.jsonl; without it its tests are skipped"
    )
    made["sanitizer"].add_argument("--tool", choices=tuple(SUMMARIES), required=True)
    made["sanitizer"].add_argument(
        "--parts", type=shares, default=([1], 1), metavar="K,K/N", help="of sanitize.py, all at once"
    )
    made["sanitizer"].add_argument("--only", default="", help="the cases whose name contains this")
    made["soak"].add_argument("--minutes", type=float, default=9.0)
    made["soak"].add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    work: dict[str, tuple[str, str, Callable[[], tuple[dict[str, Any], bool]]]] = {
        "tests": ("tests", "files", lambda: tests(asked(options.files), options.processes, options.texts)),
        "speed": ("tests", "files", lambda: tests([HERE / SPEED], 1, None)),
        "sanitizer": ("sanitizers", "runs", lambda: sanitized(options.tool, *options.parts, only=options.only)),
        "soak": ("soak", "runs", lambda: soaked(options.minutes, options.seed)),
    }
    kind, part, run = work[options.what]
    found, well = run()
    kept(options.json, kind, part, found)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
