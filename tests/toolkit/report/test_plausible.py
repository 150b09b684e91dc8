"""Figures that cannot be are refused where a Result is read; what is only unusual is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from maxsim_eval.errors import DataError
from maxsim_eval.gate.checking import baseline_of, check_baseline
from maxsim_eval.report.result_json import from_json, to_json
from report_results import full


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(to_json(full()))
    change(document)
    return json.dumps(document)


def of_int8(change: Callable[[dict[str, Any]], object]) -> str:
    return edited(lambda document: change(document["paths"]["int8"]))


def zeros(path: dict[str, Any]) -> None:
    path["per_query"]["nDCG@10"] = dict.fromkeys(path["per_query"]["nDCG@10"], 0.0)


IMPOSSIBLE: dict[str, tuple[str, str]] = {
    "a rank correlation of 2": (
        of_int8(lambda path: path["parity"]["spearman"].update(mean=2.0)),
        r"'spearman' 'mean' is 2, need a number from -1 to 1",
    ),
    "an overlap of 1e300": (
        of_int8(lambda path: path["parity"]["overlap"].update({"@10": 1e300})),
        r"'overlap' '@10' is 1e\+300",
    ),
    "an error of -5": (
        of_int8(lambda path: path["parity"].update(max_rel_error=-5)),
        "'max_rel_error' is -5, need a number of 0",
    ),
    "-1 constant queries": (
        of_int8(lambda path: path["parity"]["spearman"].update(constant_in_one=-1)),
        "'constant_in_one' is -1",
    ),
    "nDCG of 7": (
        of_int8(lambda path: path["metrics"].update({"nDCG@10": 7.0})),
        "'metrics' 'nDCG@10' is 7, need .* from 0 to 1",
    ),
    "nDCG of a query of -1": (
        of_int8(lambda path: path["per_query"]["nDCG@10"].update(q1=-1.0)),
        "'per_query' 'nDCG@10': 'q1' is -1",
    ),
    "zeros beside a mean": (of_int8(zeros), "the mean of its queries is 0; need the same"),
    "another reference": (
        of_int8(lambda path: path["parity"].update(reference="fp16")),
        "'reference' is \"fp16\", need .*'fp32'",
    ),
    "a key twice": (edited(lambda _: None).replace('"k": ', '"k": 3, "k": ', 1), "holds the key 'k' twice"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_is_refused(case: str) -> None:
    text, message = IMPOSSIBLE[case]
    with pytest.raises(DataError, match=message):
        from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path["metrics"].update({"NumRet": 100.0}),  # a measure that is no share
        lambda path: path["per_query"].update({"Other@10": {"q1": -3.0}}),
        lambda path: path["metrics"].update({"nDCG@10": None}),
        lambda path: path["parity"].update(spearman=None, overlap=[], max_rel_error=None, reference=None),
    ],
)
def test_what_is_not_known_is_not_judged(change: Callable[[dict[str, Any]], object]) -> None:
    assert from_json(of_int8(change)).paths["int8"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda held: held["task"].update(judged_pair=held["task"].pop("queries")),
            "'judged_pair'. Did you mean 'judged_pairs'",
        ),
        (lambda held: held["encoder"].update(revison="1"), "'encoder': holds 'revison'. Did you mean 'revision'"),
        (lambda held: held.update(K=3), "holds 'K'"),
        (lambda held: held["paths"]["fp32"].update({"nDCG@10": -5.0}), "'nDCG@10' is -5, need a number from 0 to 1"),
    ],
)
def test_keys_and_means_of_a_baseline(change: Callable[[dict[str, Any]], object], message: str) -> None:
    baseline = json.loads(json.dumps(baseline_of(full())))
    check_baseline(baseline)
    change(baseline)
    with pytest.raises(DataError, match=message):
        check_baseline(baseline)
