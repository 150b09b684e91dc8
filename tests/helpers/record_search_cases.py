"""The 10,000 awkward cases of certified search, run and recorded with the sources that they ran on. Minutes; run as

    OMP_NUM_THREADS=2 python tests/helpers/record_search_cases.py [--cases 10000] [--json docs/results/cpu/search_cases.json]

A case that differs from brute force is a failed test: its output is shown and nothing is written. `answers` counts how they were
answered: by the search, which ruled documents out or scored all exactly, by brute force where it gave up, or refused for a NaN.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from places import TESTS
from search_cases import ANSWERS, CPU_KINDS

sys.path.insert(0, str(TESTS.parent / "benchmarks"))  # whose scripts import from a folder of their own

from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-kernels/search-cases/1"
TEST = "tests/kernels/search/test_exact.py"
COMPARED = (
    "scores, indices and ties of exact_topk with stream_topk's, bit for bit, and the certificate; corpora of "
    f"tests/helpers/search_cases.py, {len(CPU_KINDS)} kinds of codes, 3 dtypes, in one piece or two blocks"
)
CASES = 10_000


def ran(cases: int) -> list[tuple[float, dict[str, int]]]:
    """Seconds of each part of the test, whose cases were all equal, and how many were answered how."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST, "-m", "slow", "-k", "thousands"]
        environ = {**os.environ, "MAXSIM_SEARCH_CASES": str(cases)}
        done = subprocess.run([*command, f"--junitxml={found}"], cwd=TESTS.parent, env=environ, check=False)
        if done.returncode:
            problem = "some cases differ from brute force" if found.exists() else "the test did not run"
            raise SystemExit(f"{problem}: nothing written")
        return [
            (float(one.attrib["time"]), {held.attrib["name"]: int(held.attrib["value"]) for held in one.iter("property")})
            for one in ElementTree.parse(found).iter("testcase")
        ]


def report(cases: int, found: list[tuple[float, dict[str, int]]]) -> dict[str, Any]:
    """The file: parts as `test_thousands_of_awkward_cases` cuts them."""
    each = cases // len(found)
    parts = [
        {
            "part": part,
            "seeds": [1000 * (part + 1), 1000 * (part + 1) + each - 1],
            "small_pieces": part % 2 == 1,
            "equal": True,
            "seconds": round(took, 1),
        }
        for part, (took, _) in enumerate(found)
    ]
    about = {"python": sys.version.split()[0], "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {
        "schema": SCHEMA,
        "environment": {**about, **kernels()},
        "command": f"OMP_NUM_THREADS=2 python tests/helpers/record_search_cases.py --cases {cases}",
        "compared": COMPARED,
        "measured": datetime.now(UTC).date().isoformat(),
        "cases": each * len(found),
        "equal": each * len(found),
        "different": 0,
        "answers": {answer: sum(answers[answer] for _, answers in found) for answer in ANSWERS},
        "seconds": round(sum(took for took, _ in found), 1),
        "parts": parts,
    }


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help="a multiple of 10 (default 10000)")
    parser.add_argument("--json", type=Path, default=TESTS.parent / "docs/results/cpu/search_cases.json")
    options = parser.parse_args(arguments)
    write(options.json, report(options.cases, ran(options.cases)))


if __name__ == "__main__":
    main()
