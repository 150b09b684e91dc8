"""TREC run and qrels files: round trips, the order rule, and every kind of damaged file."""

from __future__ import annotations

import errno
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.data.beir import read_judgements
from maxsim_eval.data.trec import ranked, read_qrels, read_trec_run, write_trec_run
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.gate.checking import load_baseline, load_thresholds
from maxsim_eval.report.result_json import read_result
from maxsim_eval.types import Run


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_our_file_has_six_columns_and_ranks_from_one(tmp_path: Path) -> None:
    run = Run("fp16", {"q1": [("d2", float(np.float32(0.1))), ("d1", -3.0)], "q2": [], "q3": [("d9", 2.5e10)]})
    write_trec_run(tmp_path / "runs" / "fp16.trec", run)
    assert (tmp_path / "runs" / "fp16.trec").read_text() == (
        "q1 Q0 d2 1 0.1 maxsim-eval/fp16\nq1 Q0 d1 2 -3.0 maxsim-eval/fp16\nq3 Q0 d9 1 2.5e+10 maxsim-eval/fp16\n"
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["fp16.trec"]


def test_rank_column_is_authoritative_in_our_files(tmp_path: Path) -> None:
    tied = Run("x", {"q": [("a", 1.0), ("b", 1.0), ("c", 1.0)]})
    write_trec_run(tmp_path / "x", tied)
    assert read_trec_run(tmp_path / "x") == tied
    lines = (tmp_path / "x").read_text().splitlines()
    write(tmp_path / "shuffled", "\n".join(lines[::-1]))
    assert read_trec_run(tmp_path / "shuffled") == tied
    by_score = read_trec_run(tmp_path / "x", ordered=False)
    assert not by_score.ordered
    assert ranked(by_score, "q") == ["c", "b", "a"]  # trec_eval's ties


def test_foreign_files_are_ordered_by_score(tmp_path: Path) -> None:
    path = write(tmp_path / "run", "\ufeffq Q0 a 1 1.0 bm25\r\n\r\nq\tQ0  b 1 2e0 bm25 more columns\r\nr Q0 a 7 -inf bm25")
    run = read_trec_run(path)
    assert run == Run("bm25", {"q": [("a", 1.0), ("b", 2.0)], "r": [("a", -math.inf)]}, ordered=False)
    assert ranked(run, "q") == ["b", "a"]
    assert ranked(run, "absent") == []
    assert ranked(read_trec_run(write(path, "q Q0 a 2 1 x\nq Q0 b 1 0 x"), ordered=True), "q") == ["b", "a"]


def test_foreign_run_round_trip_keeps_scores_and_order(tmp_path: Path) -> None:
    run = Run("bm25", {"q": [("a", 0.1), ("b", 1 / 3), ("c", math.inf), ("d", 0.1)]}, ordered=False)
    write_trec_run(tmp_path / "run", run)
    again = read_trec_run(tmp_path / "run")
    assert not again.ordered
    assert again.rankings["q"] == [("c", math.inf), ("b", 1 / 3), ("d", 0.1), ("a", 0.1)]
    assert ranked(again, "q") == ranked(run, "q")


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs", "Z", "Cc")), min_size=1),
        st.floats(width=32, allow_nan=False),
        min_size=1,
    )
)
def test_every_float32_and_id_round_trips(tmp_path_factory: pytest.TempPathFactory, scores: dict[str, float]) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    run = Run("x", {"q": list(scores.items())})
    write_trec_run(path, run)
    again = read_trec_run(path)
    assert again == run
    assert [math.copysign(1, s) for _, s in again.rankings["q"]] == [math.copysign(1, s) for s in scores.values()]
    longest = max(len(line.split()[4]) for line in path.read_text().splitlines())
    assert longest <= 15


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("x", {"q": [("a b", 1.0)]}), "document id 'a b'"),
        (Run("x", {"q\t1": [("a", 1.0)]}), "query id"),
        (Run("x", {"q": [("", 1.0)]}), "document id ''"),
        (Run("x", {"q": [("a\u00a0b", 1.0)]}), "white space"),
        (Run("x", {"q": [("a\ud800", 1.0)]}), "not valid Unicode"),
        (Run("x y", {"q": [("a", 1.0)]}), "run name"),
        (Run("x", {"q": [("a", 1.0), ("b", math.nan)]}), "query 'q', document 'b': the score is NaN"),
        (Run("x", {"q": [("a", 1.0), ("a", 0.0)]}), "'a' twice"),
    ],
)
def test_unwritable_runs_leave_nothing(tmp_path: Path, run: Run, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_trec_run(tmp_path / "run", run)
    assert list(tmp_path.iterdir()) == []


def test_foreign_run_cannot_take_our_tag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another"):
        write_trec_run(tmp_path / "run", Run("maxsim-eval/x", {"q": [("a", 1.0)]}, ordered=False))


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"run: the run cannot be written \(No space left"):
        write_trec_run(path, Run("x", {"q": [("a", 1.0)]}))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no result line"),
        ("\n \n", "holds no result line"),
        ("q Q0 a 1 1.0 t\nq Q0 b 2 0.5\n", r"run:2: 5 columns, need 6"),
        ("q Q0 a 1 one t", r"run:1: score 'one' is not a number"),
        ("q Q0 a 1 1_0 t", "score '1_0' is not a number"),
        ("q Q0 a 1 \u0661 t", "is not a number"),
        ("q Q0 a 1 0x1p3 t", "is not a number"),
        ("q Q0 a 1 nan t", r"run:1: query 'q', document 'a': the score is NaN"),
        ("q Q0 a 1 1 t\nr Q0 a 1 1 t\nq Q0 a 2 0 t", r"run:3: query 'q' lists document 'a' twice"),
        ("q Q0 a first 1 maxsim-eval/x", r"run:1: rank 'first' is not a whole number"),
        ("q Q0 a 1 1 maxsim-eval/x\nq Q0 b 1 0 maxsim-eval/x", r"run:2: query 'q' has rank 1 twice"),
        ("q Q0 a 1 1 maxsim-eval/x\nq Q0 b 2 0 maxsim-eval/y", r"run:2: tag 'maxsim-eval/y' after"),
        ("q Q0 a 1 1 bm25\nq Q0 b 2 0 maxsim-eval/y", r"run:2: tag 'maxsim-eval/y' after"),
        (b"q Q0 a 1 1 t\nq Q0 \xff 2 0 t", r"run:2: not UTF-8"),
        ("q Q0 a\0 1 1 t", r"run:1: holds a NUL"),
    ],
)
def test_damaged_run_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_trec_run(write(tmp_path / "run", text))


def test_columns_are_told_apart_by_ascii_white_space(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("q1\tQ0 d\u3000a 1 9.0 x\nq\u00a02 Q0 d\u2003b\x1cc 1 8.0 x\n", encoding="utf-8")
    assert read_trec_run(tmp_path / "r").rankings == {"q1": [("d\u3000a", 9.0)], "q\u00a02": [("d\u2003b\x1cc", 8.0)]}
    (tmp_path / "q").write_text("q\u00a02 0 d\u2003b 1\n", encoding="utf-8")
    assert read_qrels(tmp_path / "q") == {"q\u00a02": {"d\u2003b": 1}}
    (tmp_path / "r").write_text("q1 Q0 d a 1 9.0 x\n")
    with pytest.raises(DataError, match=r"r:1: (score|rank) '\w+' is not a number|r:1: rank 'a' is not a number"):
        read_trec_run(tmp_path / "r")


@pytest.mark.timeout(60)
@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no endless file")
def test_files_without_an_end_are_one_message() -> None:
    for read in (read_trec_run, read_qrels):
        with pytest.raises(DataError, match=r"/dev/zero:1: no line ends within 1,048,576 bytes"):
            read("/dev/zero")
    for whole in (read_result, load_baseline):
        with pytest.raises(DataError, match=r"/dev/zero: cannot be read .*no file, and holds more than"):
            whole("/dev/zero")
    with pytest.raises(UsageError, match="no file, and holds more than"):
        load_thresholds("/dev/zero")


def test_missing_files(tmp_path: Path) -> None:
    for read in (read_trec_run, read_qrels):
        with pytest.raises(DataError, match=r"absent: cannot be read \(No such file"):
            read(tmp_path / "absent")
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path)


def test_qrels_of_both_layouts(tmp_path: Path) -> None:
    expected = {"1": {"a": 1, "b": -1}, "2": {"a": 2}}
    trec = write(tmp_path / "trec", "1 0 a 1\n1 0 b -1\r\n\n2 0 a 2\n1 0 a 1\n")
    beir = write(tmp_path / "beir", "query-id\tcorpus-id\tscore\n1\ta\t1\n1\tb\t-1\n2\ta\t2\n")
    assert read_qrels(trec) == read_qrels(beir) == expected
    assert read_qrels(write(tmp_path / "spaces", "query-id\tcorpus-id\tscore\n1\tan id\t1\n")) == {"1": {"an id": 1}}
    assert read_qrels(write(tmp_path / "tabs", "1\t0\ta\t1\n")) == {"1": {"a": 1}}


def test_ids_that_beir_quotes_are_those_of_the_dataset(tmp_path: Path) -> None:
    text = 'query-id\tcorpus-id\tscore\nq0\t"<dbpedia:""Weird_Al""_Yankovic>"\t1\n'
    file = write(tmp_path / "test.tsv", text)
    assert read_qrels(file) == read_judgements(file).qrels == {"q0": {'<dbpedia:"Weird_Al"_Yankovic>': 1}}
    with pytest.raises(DataError, match=r"test\.tsv:2: .*broken quoting"):
        read_qrels(write(file, text.replace('>"', ">")))


@pytest.mark.parametrize("first", ["q0\td0\t1.0", "q9\td9\thigh", "corpus-id\tquery-id\tscore"])
def test_a_first_line_that_is_no_header_is_no_judgement_lost(tmp_path: Path, first: str) -> None:
    with pytest.raises(DataError, match=r"test\.tsv:1: the first line is .*need the header query-id<tab>corpus-id<tab>score"):
        read_qrels(write(tmp_path / "test.tsv", f"{first}\nq1\td7\t1\n"))


@pytest.mark.parametrize("reader", [read_qrels, lambda path: read_judgements(path).qrels])
def test_a_grade_that_trec_eval_cannot_count_by_is_refused_where_it_stands(tmp_path: Path, reader: Any) -> None:
    text = "query-id\tcorpus-id\tscore\nq\ta\t{}\n"
    assert reader(write(tmp_path / "most.tsv", text.format(10_000))) == {"q": {"a": 10_000}}
    with pytest.raises(DataError, match=r"more\.tsv:2: relevance 10001, need a whole number from -10000 to 10000"):
        reader(write(tmp_path / "more.tsv", text.format(10_001)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no judgement"),
        ("query-id\tcorpus-id\tscore\n", "holds no judgement"),
        ("1\ta\t1\n", r"qrels:1: a judgement stands where BEIR's header must be"),
        ("1 0 a\n", r"qrels:1: 3 columns, need 4"),
        ("1 0 a 1\n1 0 b\n", r"qrels:2: 3 columns, need 4"),
        ("query-id\tcorpus-id\tscore\n1\ta\n", r"qrels:2: 2 columns, need 3"),
        ("query-id\tcorpus-id\tscore\n1\t\t1\n", r"qrels:2: an empty id"),
        ("1 0 a high\n", r"qrels:1: relevance 'high' is not a whole number"),
        ("1 0 a 0.5\n", "not a whole number"),
        ("1 0 a 0\n2 0 b -1\n", r"qrels: none of the 2 judged queries has a relevant document"),
    ],
)
def test_damaged_qrels(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_qrels(write(tmp_path / "qrels", text))


def test_of_conflicting_judgements_the_later_holds_and_is_warned_of(tmp_path: Path) -> None:
    file = write(tmp_path / "qrels", "1 0 a 1\n1 0 a 2\n1 0 a 2\n2 0 b 0\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert read_qrels(file) == {"1": {"a": 2}, "2": {"b": 0}}
    assert [str(one.message).partition(": ")[2] for one in said] == [
        "1 pairs are judged twice with different scores; the later score was taken",
        "1 of 2 judged queries have no relevant document, first '2'; they count 0 in trec_eval's metrics, and AnyHit@k "
        "leaves them out",
    ]
