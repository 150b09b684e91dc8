"""What every path of one evaluation is asked: which queries, which documents, how many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from maxsim_eval.scoring.candidates import Candidates
from maxsim_eval.scoring.paths import ScoringPath, our_paths


@dataclass(frozen=True)
class Asked:
    """What every path of one evaluation is asked.

    `excluded[q]` is the index of the document that query q must not retrieve (-1: none). `kept_rows` are the queries whose full
    score rows are kept for parity, in order. `candidates`, numbered as the corpus is, limits what is scored to the pairs it lists.
    `paths` are the scoring paths by name, users' own functions among them.
    """

    query_ids: Sequence[str]
    document_ids: Sequence[str]
    k: int
    excluded: np.ndarray
    kept_rows: np.ndarray
    candidates: Candidates | None = None
    paths: Mapping[str, ScoringPath] = field(default_factory=our_paths)
