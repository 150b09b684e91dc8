"""The studies of docs/fidelity.md and docs/atlas.md, measured anew, into files that record which sources they are of.

    python benchmarks/alone/studies.py fidelity --data-dir FOLDER [--cache-dir FOLDER] [--json FILE]
    python benchmarks/alone/studies.py atlas --data-dir FOLDER [--cache-dir FOLDER] [--folder FOLDER]

The options are those of `maxsim_eval.studies.fidelity` and `maxsim_eval.studies.atlas_page`, which measure. Results of an earlier
evaluation could be of other sources, so `--out` is always a new folder here; the cache of embeddings is used.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is a script in a folder of its own

from maxsim_eval.files import write_text
from maxsim_eval.report.result_json import dump_json, load_json
from maxsim_eval.studies import atlas_page, fidelity
from measure.session import kernels


def stamp(path: Path) -> None:
    """Add the revision and the digests of today's sources to a study's file."""
    found = load_json(path.read_bytes(), str(path))
    write_text(path, dump_json({**found, **kernels()}) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("fidelity", "atlas"))
    parser.add_argument("--json", type=Path, default=fidelity.JSON, help="the file of fidelity")
    parser.add_argument("--folder", type=Path, default=atlas_page.FOLDER, help="the folder of the files of atlas")
    options, others = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as out:
        asked = ["--measure", "--out", out, *others]
        if options.study == "fidelity":
            fidelity.main([*asked, "--json", str(options.json)])
            stamp(options.json)
        else:
            atlas_page.main([*asked, "--folder", str(options.folder)])
            for name in atlas_page.NAMES:
                stamp(atlas_page.json_of(name, options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
