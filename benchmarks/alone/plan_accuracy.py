"""What `plan` says of an evaluation beside what it then takes, phase by phase, on the machine this runs on.

    python benchmarks/alone/plan_accuracy.py --data-dir FOLDER [--json FILE] [--documents 20000] [--queries 300]

SciFact and made-up texts of the lengths that HotpotQA publishes, by the `lexical` encoder and three paths, each with an empty cache and
with a filled one: the plan first, then the command in a process of its own (`rehearsal.py` clocks it). A phase counts as
predicted where the plan's seconds, or its range, come within a factor 1.5 of those measured; phases of less than half a second
are not judged.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from cold_start import ROOT, seconds_of
from measure.session import kernels
from rehearsal import make_texts, planned, predictions, run
from results.file import write

SCHEMA = "maxsim-eval/plan-accuracy/1"
FACTOR, LEAST = 1.5, 0.5


def predicted(phase: dict[str, Any]) -> bool:
    """Whether the plan's seconds or range of a phase come within `FACTOR` of those measured."""
    ratios = phase["planned_over_measured"]
    return phase["measured"] < LEAST or (min(ratios) <= FACTOR and max(ratios) >= 1 / FACTOR)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="a data folder that holds SciFact")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--documents", type=int, default=20_000, help="of made-up texts")
    parser.add_argument("--queries", type=int, default=300)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {
        "schema": SCHEMA, "torch": torch.__version__, "threads": torch.get_num_threads(), **kernels(), "cases": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        make_texts(home / "made" / "hotpotqa", options.documents, options.queries)
        for name, data, dataset in (
            ("SciFact", options.data_dir.resolve(), "scifact"),
            ("made-up texts", home / "made", "hotpotqa"),
        ):
            cache = home / f"cache-{dataset}"
            words = ["beir", dataset, "--encoder", "lexical", "--device", "cpu"]
            words += ["--data-dir", str(data), "--cache-dir", str(cache)]
            seconds_of([sys.executable, str(ROOT / "evaluate.py"), "demo", "--help"])  # what Python compiles, it compiles once
            for state in ("empty cache", "filled cache"):
                said = planned(words, 1)
                found = {"plan": said, **run(words, home / f"out-{dataset}", 1)}
                found["predictions"] = predictions(found)
                found.pop("command")
                report["cases"][f"{name}, {state}"] = found
                print(f"{name}, {state}: {said['answer']} {found['wall']:.1f} s were taken")
                for phase, one in found["predictions"].items():
                    ratios = " to ".join(f"{ratio:.2f}" for ratio in one["planned_over_measured"])
                    print(
                        f"  {phase}: {one['measured']:.2f} s, predicted {ratios} of it{'' if predicted(one) else ': NO'}",
                        flush=True,
                    )
            shutil.rmtree(cache)
    write(options.json, report)


if __name__ == "__main__":
    sys.exit(main())
