"""How long scoring will take, said in one line on stderr before it begins, where that is long enough to be worth knowing.

The same arithmetic and measurements as `evaluate.py plan`, of the operator alone: reading from disks and comparing are not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch

from maxsim_eval.cache.selection import Documents
from maxsim_eval.planning.costs import Rates, Sizes, operations, path_plan
from maxsim_eval.planning.rates import path_rates
from maxsim_eval.printing import printable
from maxsim_eval.quantities import about_text
from maxsim_eval.scoring.candidates import Candidates
from maxsim_eval.scoring.paths import ScoringPath
from maxsim_kernels import Packed

# Below so many operations of one path nothing is measured: they take seconds on any machine that torch runs well on.
LEAST_OPERATIONS = {"cpu": 10**12, "cuda": 10**15}
LEAST_SECONDS = 20.0


def estimate(
    paths: Mapping[str, ScoringPath],
    queries: Packed,
    documents: Documents,
    *,
    device: str,
    k: int,
    processes: int = 1,
    candidates: Candidates | None = None,
    resumed: bool = False,
) -> str | None:
    """The line that says how long scoring will take; None for a small job. Takes a few seconds itself, where it measures.

    Users' own functions and codecs are not run for it, and so not in it. `resumed`: some of it is finished already.
    """
    kind = torch.device(device).type
    lengths = documents.lengths()
    asked = queries.lengths.cpu().numpy().astype(np.int64)
    tokens = int(asked.sum()), int(lengths.sum())
    work = operations(*tokens, queries.dim)
    part = 1.0
    if candidates is not None and work:  # the listed pairs alone
        pairs = np.repeat(asked, np.diff(candidates.offsets)) * lengths[candidates.rows]
        part = 2.0 * queries.dim * float(pairs.sum()) / work
    names = [name for name, path in paths.items() if not path.own and path.codec is None]
    if work * part < LEAST_OPERATIONS[kind] or not names:
        return None
    sizes = Sizes(len(asked), len(lengths), *tokens, queries.dim, documents.manifest["dtype"])
    found, topk, _ = path_rates(sizes, names, documents, device, k, queries)
    rates = Rates(kind, found, topk=topk)
    seconds = {name: (path_plan(name, sizes, rates, cold=0, k=k, processes=processes).seconds or 0) * part for name in names}
    total = sum(seconds.values())
    if total < LEAST_SECONDS:
        return None
    each = ", ".join(f"{name} {about_text(value)}" for name, value in seconds.items())
    left = [name for name, path in paths.items() if path.own]
    own = f"; {', '.join(left)} not counted" if left else ""
    about = f"{'less than' if resumed else 'about'} {about_text(total)}"
    return f"scoring takes {about} at the rates measured now ({each}{own}), beside reading and comparing"


def say_estimate(line: str | None) -> None:
    """One line on stderr; nothing for a small job."""
    if line is not None:
        print(printable(line), file=sys.stderr, flush=True)
