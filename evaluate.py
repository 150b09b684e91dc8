"""`python evaluate.py beir scifact`: the toolkit's command line, run from a checkout with the packages of that checkout."""

import importlib.util
import sys
from pathlib import Path


def _beside(here: Path) -> str | None:
    """None where Python will import the packages that lie in this checkout, else what is wrong and what mends it."""
    mend = f"run `make install` in {here} and use its .venv/bin/python (or: python -m pip install -e {here}/kernels -e {here})"
    for name, folder in (("maxsim_kernels", here / "kernels"), ("maxsim_eval", here)):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            return f"{name} is not installed for {sys.executable}: {mend}"
        place = Path(found.origin).resolve().parent
        if place != folder / name:
            return (
                f"{here}/evaluate.py would run {name} of another place, {place}: {mend}, or run the evaluate.py of that place"
            )
    return None


if __name__ == "__main__":
    # This folder holds `datasets/` and `kernels/`, which on sys.path could be taken for the packages of those names.
    checkout = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != checkout]
    problem = _beside(checkout)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    from maxsim_eval.cli import main

    main()
