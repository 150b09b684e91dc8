"""Measures of ir-measures that its tools cannot compute are refused when they are named, not after everything was scored."""

from __future__ import annotations

import pytest

from maxsim_eval.comparison import measures
from maxsim_eval.comparison.metrics import evaluate_run, known_metrics, parse_metric
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.types import Run

pytest.importorskip("ir_measures", reason="ir-measures is not installed (pip install 'maxsim-eval[measures]')")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("P(rel=0)@5", "relevance_level should be positive"),
        ("Success(rel=0)@1", "relevance_level should be positive"),
        ("AP(rel=99999999999999999999)@5", "TypeError"),
        ("nDCG(gains={1:1e308,2:1e308})@10", "Expected relevance to be integer"),
        ("P(rel=2)@0", "the cutoff is 0, need a whole number from 1 to"),  # trec_eval's C code aborts the process
        ("P(rel=2)@99999999999", "need a whole number from 1 to"),
        ("ERR@0", "the cutoff is 0"),
        ("Judged@0", "the cutoff is 0"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"metric .*{why}"):
        parse_metric(name)


def test_what_can_be_is_computed() -> None:
    found = evaluate_run(Run("r", {"q": [("a", 2.0), ("b", 1.0)]}), {"q": {"b": 1}}, ["Judged@10", "RBP(p=0.8)"])
    assert found["Judged@10"] == {"q": 0.5}
    assert found["RBP(p=0.8)"]["q"] == pytest.approx(0.16)


def test_every_listed_name_can_be_asked_for() -> None:
    listed = known_metrics()
    for name in listed:
        assert parse_metric(name.replace("@k", "@10"))
    assert {"Judged", "Judged@k", "ERR@k", "IPrec@0.1", "Compat"} <= set(listed)
    assert not {"NDCG", "BPref", "alpha_nDCG", "ERR", "IPrec", "INST"} & set(listed)


@pytest.mark.parametrize("error", [TypeError("a"), OverflowError("a")])
def test_a_tool_that_fails_on_the_data_is_an_error_of_data(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    measure = measures.measure_of("Judged@10")
    monkeypatch.setattr("ir_measures.iter_calc", fails)
    with pytest.raises(DataError, match="could not compute it"):
        measures.values_of(measure, {"q": {"a": 1}}, {})
