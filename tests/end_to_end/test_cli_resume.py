"""Long evaluations: killed or interrupted anywhere they go on from what was finished, and the answer is the same to the last byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from rank_cases import driven

INTERRUPTED, DATA = 130, 3
GO_ON = "interrupted; finished parts are kept, the same command continues\n"


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`drive("kills")`: what that scenario of drive.py gave."""
    return lambda scenario: driven("drive.py", scenario, tmp_path_factory.mktemp(scenario))


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_the_answer_is_the_same(drive: Callable[[str], dict[str, Any]]) -> None:
    found = drive("kills")
    assert (found["first"]["codes"], found["first"]["err"]) == ([0], [""])
    assert found["need"] == ["metrics.csv", "per_query.csv", "report.html", "report.md", "result.json", "runs"], (
        "a finished evaluation leaves no parts"
    )
    assert found["killed"] >= 10  # of 18: a machine that is suddenly less busy ends some before their kill
    assert len(found["ended"]) >= 2
    assert set(found["ended"]) == {0}
    assert found["said"] == "", "a kill leaves nothing that has to be warned of"
    assert found["differing"] == 0, "an evaluation that was killed and resumed gave another run file, metric or parity"
    assert found["rewritten"] == [], "a finished part was computed again"
    resumable = [count for count in found["left"] if 0 < count < max(found["left"])]
    assert len(set(resumable)) >= 4, f"too few of the kills came in the middle of scoring: {found['left']}"


@pytest.mark.slow
def test_ctrl_c_a_second_evaluation_and_fresh(drive: Callable[[str], dict[str, Any]]) -> None:
    found = drive("stopped")
    assert found["interrupted"] == {"codes": [INTERRUPTED], "out": [""], "err": [GO_ON]}
    assert found["second"]["codes"][1] == DATA
    said = r"error: out: another command is writing there \(process \d+ on \S+\); wait until it ends, or choose another --out\n"
    assert re.fullmatch(said, found["second"]["err"][1])
    everything = found["fresh"]["scored"]
    assert 0 < found["held"] < everything
    assert found["again"]["codes"] == found["fresh"]["codes"] == [0]
    assert found["again"]["scored"] == everything - found["held"], "what was finished is not scored again, and only that"
    assert found["again"]["same"]
    assert found["fresh"]["same"]


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on_from_what_two_left(drive: Callable[[str], dict[str, Any]]) -> None:
    found = drive("resumes")
    assert -9 in found["codes"]
    assert set(found["codes"]) <= {-9, DATA}, "one may see that the other is gone before its own end comes"
    assert found["held"] > 4
    assert found["three"]["codes"] == [0, 0, 0]
    assert found["one"]["codes"] == [0]
    assert found["same"] == [True, True]
