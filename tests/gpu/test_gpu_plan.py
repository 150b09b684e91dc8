"""`plan` on a GPU: the link and every path have a rate, and streaming fits."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("h5py")

from maxsim_eval.planning.costs import Sizes
from maxsim_eval.planning.plan import make_plan
from maxsim_eval.planning.rates import measure
from maxsim_eval.planning.room import read_room
from maxsim_eval.scoring.paths import PATHS


def test_every_rate_is_measured(tmp_path: Path) -> None:
    sizes = Sizes(500, 500_000, 16_000, 60_000_000, 128, "float16")
    rates, resident = measure(sizes, list(PATHS), entry=None, folder=tmp_path, device="cuda")
    assert resident is None
    assert rates.link is not None
    assert 1e9 < rates.link.value < 1e12
    assert list(rates.paths) == list(PATHS)
    fastest = max(rates.paths, key=lambda name: rates.paths[name].score.value)
    assert fastest != "fp32"
    made = make_plan(sizes, rates, read_room(tmp_path, tmp_path, "cuda"), list(PATHS))
    assert made.total is not None
    assert {check.what: check.ok for check in made.checks}["GPU memory"] is True
    assert all("link" in [stage.name for stage in path.stages] for path in made.phases if path.stages)
