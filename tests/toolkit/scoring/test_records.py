"""Finished units on disk: what comes back is what was put, or nothing; whatever was killed, damaged, foreign or out of space."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

from maxsim_eval import files
from maxsim_eval.errors import CacheError
from maxsim_eval.scoring.records import Record, Records, ScoreRows, StoredScores
from scoring_cases import numbers

PRINT = {"k": 10, "path": "fp16", "stamps": ["a", "b"]}
UNITS = [(0, 40), (40, 41), (41, 300)]


def write(folder: Path, units: list[tuple[int, int]] = UNITS, **fingerprint: object) -> Records:
    with Records(folder, {**PRINT, **fingerprint}) as records:
        for start, stop in units:
            records.put(start, stop, *numbers(start, stop), {"total": start / 7})
    return records


def assert_right(record: Record | None, start: int, stop: int) -> None:
    assert record is not None
    keys, scores = numbers(start, stop)
    assert (record.start, record.stop) == (start, stop)
    assert record.keys.dtype == np.int64
    assert np.array_equal(record.keys, keys)
    assert record.cost == {"total": start / 7}
    assert record.scores is not None
    assert record.scores.shape == scores.shape
    assert_rows(ScoreRows([record.scores]), scores)


def assert_rows(found: ScoreRows, scores: np.ndarray) -> None:
    assert (found.shape, found.ndim, len(found)) == (scores.shape, 2, len(scores))
    for span in (np.s_[:], np.s_[1:2], np.s_[-2:], np.s_[2:99], np.s_[3:3]):
        assert found[span].dtype == np.float32
        assert np.array_equal(found[span].view(np.int32), scores[span].view(np.int32))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / ".partial" / "fp16"
    write(folder)
    assert names(folder) == ["0-40.h5", "40-41.h5", "41-300.h5"]
    records = Records(folder, dict(reversed(PRINT.items())))  # the order of keys is no difference
    for start, stop in UNITS:
        assert_right(records.get(start, stop), start, stop)
    assert_rows(records.rows(UNITS), np.concatenate([numbers(*unit)[1] for unit in UNITS], 1))
    assert records.get(0, 41) is None
    with h5py.File(folder / "41-300.h5") as file:  # a plain HDF5 file for anybody
        assert np.array_equal(file["keys"][:], numbers(41, 300)[0])
        assert np.array_equal(file["scores"][:], numbers(41, 300)[1])
        assert file["scores"].chunks is None
        assert file["scores"].id.get_offset() + file["scores"].nbytes == (folder / "41-300.h5").stat().st_size


def test_without_score_rows_and_with_empty_arrays(tmp_path: Path) -> None:
    empty = np.zeros((0, 10), np.int64)
    with Records(tmp_path, PRINT) as records:
        records.put(0, 5, numbers(0, 5)[0], None, {})
        records.put(5, 9, empty, np.zeros((0, 4), np.float32), {"a": 1.5})
        keys, scores = numbers(9, 29)
        records.put(9, 29, np.asfortranarray(keys), np.asfortranarray(scores), {})
    first, second, third = (records.get(*unit) for unit in ((0, 5), (5, 9), (9, 29)))
    assert first is not None
    assert first.scores is None
    assert second is not None
    assert second.keys.shape == (0, 10)
    assert second.scores is not None
    assert second.scores.shape == (0, 4)
    assert third is not None
    assert third.scores is not None
    assert np.array_equal(third.keys, keys)
    assert_rows(ScoreRows([third.scores]), scores)
    with pytest.raises(CacheError, match=r"0-5\.h5: no score rows of this evaluation"):
        records.rows([(0, 5)])


def test_a_record_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    write(tmp_path)
    keys, scores = numbers(1, 41)
    with Records(tmp_path, PRINT) as records:
        records.put(0, 40, keys, scores, {"total": 9})
    record = records.get(0, 40)
    assert record is not None
    assert np.array_equal(record.keys, keys)


@pytest.mark.parametrize("change", [{"k": 11}, {"stamps": ["a"]}, {"more": None}])
def test_foreign_records_are_not_used(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path)
    other = Records(tmp_path, {**PRINT, **change})
    assert [other.get(*unit) for unit in UNITS] == [None] * 3  # without a warning: warnings are errors here
    with pytest.raises(CacheError, match="no score rows of this evaluation"):
        other.rows(UNITS)


def test_a_fingerprint_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        Records(tmp_path, {"a": float("nan")})


def test_any_flipped_bit_gives_nothing_or_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, [(0, 40)])
    path = tmp_path / "0-40.h5"
    content, refused = path.read_bytes(), 0
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            record = Records(tmp_path, PRINT).get(0, 40)
        if record is None:
            refused += 1
            assert all(str(path) in str(warning.message) for warning in said)
        else:
            assert_right(record, 0, 40)
    assert refused > len(content) / 7 / 3  # keys and scores alone are more than that


@pytest.mark.parametrize("size", [0, 5, 8, 100, 1000, -1], ids=str)
def test_a_truncated_record_is_scored_again(tmp_path: Path, size: int) -> None:
    write(tmp_path)
    path = tmp_path / "41-300.h5"
    path.write_bytes(path.read_bytes()[:size])
    records = Records(tmp_path, PRINT)
    with pytest.warns(UserWarning, match=r"41-300\.h5: .*Its documents are scored again"):
        assert records.get(41, 300) is None
    assert_right(records.get(0, 40), 0, 40)
    write(tmp_path, [(41, 300)])
    assert_right(records.get(41, 300), 41, 300)


def test_a_record_under_another_name(tmp_path: Path) -> None:
    write(tmp_path)
    os.replace(tmp_path / "0-40.h5", tmp_path / "100-140.h5")
    with pytest.warns(UserWarning, match=r"100-140\.h5: damaged: its keys do not have the range"):
        assert Records(tmp_path, PRINT).get(100, 140) is None


@pytest.mark.parametrize(
    "storage", [{"chunks": (1, 40)}, {"data": np.zeros((3, 40), np.float64)}, {"data": np.zeros(40, "<f4")}]
)
def test_scores_that_lie_otherwise(tmp_path: Path, storage: dict[str, object]) -> None:
    write(tmp_path)
    with h5py.File(tmp_path / "0-40.h5", "r+") as file:
        values = file["scores"][:]
        del file["scores"]
        file.create_dataset("scores", **{"data": values, **storage})
    with pytest.warns(UserWarning, match=r"0-40\.h5: damaged"):
        assert Records(tmp_path, PRINT).get(0, 40) is None


def test_a_record_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    records = write(tmp_path)
    rows = records.rows(UNITS)
    write(tmp_path, [(0, 40)])  # another process scored it again
    with pytest.raises(CacheError, match=r"0-40\.h5: changed since it was opened"):
        rows[1:2]
    path = tmp_path / "40-41.h5"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"40-41\.h5: damaged: scores of row 2 do not have the CRC-32"):
        records.rows(UNITS)[1:3]


def test_score_rows_of_files_and_of_memory(tmp_path: Path) -> None:
    records = write(tmp_path)
    parts: list[np.ndarray | StoredScores] = [numbers(*unit)[1] for unit in UNITS]
    whole = np.concatenate([numbers(*unit)[1] for unit in UNITS], 1)
    record = records.get(*UNITS[1])
    assert record is not None
    assert record.scores is not None
    parts[1] = record.scores
    rows = ScoreRows(parts)
    assert_rows(rows, whole)
    rows[:1][:] = 7  # rows are a copy
    assert_rows(rows, whole)
    with pytest.raises(ValueError, match="a step of 2, need 1"):
        rows[::2]
    with pytest.raises(ValueError, match=r"got \[2, 3\] rows"):
        ScoreRows([whole, whole[:2]])
    assert ScoreRows([]).shape == (0, 0)


def test_hundreds_of_units_need_no_open_files(tmp_path: Path) -> None:
    units = [(n, n + 1) for n in range(300)]
    records = write(tmp_path, units)
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    before = len(os.listdir("/proc/self/fd"))
    rows = records.rows(units)
    assert_rows(rows, np.concatenate([numbers(*unit)[1] for unit in units], 1))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("keys", "scores", "message"),
    [
        (np.zeros((7, 10), np.int32), None, "keys: got int32"),
        (np.zeros(7, np.int64), None, "keys: got int64"),
        (
            np.zeros((7, 10), np.int64),
            np.zeros((3, 39), np.float32),
            r"scores: got float32 \[3, 39\], need float32 \[rows, 40\]",
        ),
        (np.zeros((7, 10), np.int64), np.zeros((3, 40)), "scores: got float64"),
    ],
)
def test_arrays_that_cannot_be_kept(tmp_path: Path, keys: np.ndarray, scores: np.ndarray | None, message: str) -> None:
    with Records(tmp_path / "new", PRINT) as records, pytest.raises(ValueError, match=message):
        records.put(0, 40, keys, scores, {})
    assert not (tmp_path / "new").exists()


def test_closed_is_closed(tmp_path: Path) -> None:
    records = write(tmp_path)
    records.close()
    with pytest.raises(ValueError, match="closed"):
        records.put(0, 40, *numbers(0, 40), {})


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    kept = [".keep.tmp", ".a.json.12-xyz.tmp", "a.json", "b.12-0123abcd.tmp"]
    for name in (*kept, ".a.json.12-0123abcd.tmp", ".fp32.trec.7-deadbeef.tmp"):
        (tmp_path / name).touch()
    files.remove_temporaries(tmp_path)
    files.remove_temporaries(tmp_path / "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    with files.atomic_path(tmp_path / "x") as temporary:
        temporary.touch()
        assert files._TEMPORARY.fullmatch(temporary.name)
