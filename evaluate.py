"""`python evaluate.py beir scifact`: the toolkit's command line, runnable from a checkout with the package installed."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder holds `datasets/` and `kernels/`, which on sys.path could be taken for the packages of those names.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    from maxsim_eval.cli import main

    main()
