"""What the scripts of `examples/` find on BEIR SciFact, by a library's own scores and by this operator's: losses, rankings, times.

    python benchmarks/alone/examples.py --data-dir FOLDER --json FILE [--only rerank_pylate.py]

Libraries that cannot be installed beside each other take part one by one: `--only` keeps what the file has of the other scripts.
Nothing is written where a script ends with an error, as it does where the two results differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from cold_start import ROOT, said_by
from measure.session import kernels
from results.file import read

SCHEMA = "maxsim-eval/examples/1"
FOLDER = ROOT / "examples"
OPTIONS = {"train_sentence_transformers.py": ("--steps", "12", "--batch", "16"), "rerank_pylate.py": ()}


def found(script: str, data: Path) -> dict[str, Any]:
    """What a script writes of both ways, and what it was run with."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        said_by([sys.executable, str(FOLDER / script), *OPTIONS[script], "--data-dir", str(data), "--json", str(file)])
        held = json.loads(file.read_text(encoding="utf-8"))
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), **kernels()}
    return {"options": " ".join(OPTIONS[script]), **about, "found": held}


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="a data folder that holds SciFact")
    parser.add_argument("--json", type=Path, required=True, help="write the raw figures here")
    parser.add_argument("--only", choices=OPTIONS, help="this script alone")
    options = parser.parse_args(arguments)
    before = read(options.json, SCHEMA)["examples"] if options.only and options.json.exists() else {}
    names = [options.only] if options.only else list(OPTIONS)
    examples = before | {name: found(name, options.data_dir.resolve()) for name in names}
    text = json.dumps({"schema": SCHEMA, "examples": examples}, indent=1)  # all digits: losses differ in the last
    options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
