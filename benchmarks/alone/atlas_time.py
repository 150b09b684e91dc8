"""How long the whole command `evaluate.py atlas` takes with its default grid, once the embeddings are cached.

    python benchmarks/alone/atlas_time.py --json FILE --data-dir FOLDER [--encoder lexical]

SciFact is encoded, and then the command started twice, with an output folder of its own each: the first start on a machine compiles
kernels and makes a cache of fonts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from cold_start import seconds_of
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-eval/atlas-time/1"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="write the raw figures here")
    parser.add_argument("--data-dir", type=Path, required=True, help="the folder that has SciFact")
    parser.add_argument("--encoder", default="lexical")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        words = ["beir", "scifact", "--encoder", options.encoder, "--data-dir", str(options.data_dir), "--quiet"]
        words += ["--cache-dir", str(Path(folder) / "cache")]
        seconds_of([sys.executable, "evaluate.py", "encode", *words])
        starts = ([sys.executable, "evaluate.py", "atlas", *words, "--out", str(Path(folder) / name)] for name in ("1", "2"))
        first, second = map(seconds_of, starts)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"encoder": options.encoder, "device": device, "cores": len(os.sched_getaffinity(0)), **kernels()}
    write(options.json, {"schema": SCHEMA, **about, "first_s": first, "second_s": second})
    print(f"{options.encoder}: {first:.1f} s, started again {second:.1f} s", flush=True)


if __name__ == "__main__":
    main()
