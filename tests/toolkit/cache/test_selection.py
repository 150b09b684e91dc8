"""Rows of a cache entry read where they lie: the same tokens as selecting from the whole, and no others are read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.cache.shards import Shard
from maxsim_eval.errors import CacheError, UsageError
from maxsim_kernels import Packed
from stored_cases import filled_ragged as fill

RAGGED = [3, 0, 17, 1, 0, 0, 250, 5, 64, 0, 2]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def joined(blocks: list[Packed], entry: Entry) -> tuple[torch.Tensor, list[int]]:
    values = torch.cat([torch.empty(0, entry.dim, dtype=entry.dtype), *(block.values for block in blocks)])
    return values, [int(length) for block in blocks for length in block.lengths]


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=25),
    per_shard=st.integers(1, 30),
    max_bytes=st.integers(1, 4000),
    dtype=st.sampled_from(DTYPES),
)
def test_any_rows_and_any_cut_give_the_tokens_of_these_rows(
    documents: list[tuple[int, bool]], per_shard: int, max_bytes: int, dtype: torch.dtype
) -> None:
    rows = np.flatnonzero([chosen for _, chosen in documents]).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        entry = fill(Path(folder), [length for length, _ in documents], per_shard, 9, dtype)
        chosen = Selection(entry, rows)
        blocks = list(chosen.blocks(max_bytes))
        expected = entry.load().select(rows.tolist()).compact()
    values, lengths = joined(blocks, entry)
    assert torch.equal(values, expected.values)
    assert lengths == expected.lengths.tolist() == chosen.lengths().tolist()
    assert (chosen.documents, chosen.tokens, chosen.dim, chosen.dtype) == (len(rows), len(values), 9, dtype)
    for block in blocks:
        assert block.offsets is not None  # packed end to end, as every path takes it
        assert block.values.nbytes <= max_bytes or int((block.lengths > 0).sum()) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_only_the_chosen_tokens_are_read_and_neighbours_at_once(
    chunked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = fill(tmp_path / "entry", RAGGED, 6)
    if chunked:
        for file in sorted((tmp_path / "entry").glob("*.h5")):
            with h5py.File(file, "r+") as handle:
                values = handle["values"][:]
                del handle["values"]
                handle.create_dataset("values", data=values, chunks=(7, 24), compression="gzip")
        with pytest.warns(UserWarning, match="chunked or compressed"):
            entry = open_entry(tmp_path / "entry")
    reads: list[tuple[int, int]] = []
    original = Shard.read_runs

    def spy(self: Shard, firsts: list[int], counts: list[int], out: torch.Tensor, *, proven: bool = False) -> None:
        reads.extend(zip(firsts, counts, strict=True))
        original(self, firsts, counts, out, proven=proven)

    monkeypatch.setattr(Shard, "read_runs", spy)
    rows = np.array([0, 3, 5, 7, 8, 10])
    values, lengths = joined(list(Selection(entry, rows).blocks()), entry)
    # Shards of 21 and 321 tokens: the 17 of d2 and the 250 of d6 are left out; d7 to d10 follow each other (d9 is empty).
    assert reads == [(0, 3), (20, 1), (250, 71)]
    monkeypatch.undo()
    assert torch.equal(values, entry.load().select(rows.tolist()).compact().values)
    assert lengths == [RAGGED[row] for row in rows]


def test_it_stands_for_the_entry_it_reads(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", RAGGED, 4)
    chosen = Selection(entry, np.array([1, 6]))
    assert (chosen.folder, chosen.manifest) == (entry.folder, entry.manifest)
    nothing = Selection(entry, np.array([], np.int64))
    assert (nothing.documents, nothing.tokens, list(nothing.blocks())) == (0, 0, [])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([0, 11]), r"within 0\.\.10"),
        (np.array([-1, 2]), "within"),
        (np.array([2, 2]), "each once"),
        (np.array([3, 2]), "ascending"),
        (np.array([0.0]), "got float64"),
        (np.array([[0]]), r"\[1, 1\], need 1-D int64"),
    ],
)
def test_rows_that_are_none(rows: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Selection(fill(tmp_path / "entry", RAGGED, 4), rows)


def test_bad_blocks_and_a_file_that_ended_early(tmp_path: Path) -> None:
    chosen = Selection(fill(tmp_path / "entry", RAGGED, 20), np.array([10]))
    with pytest.raises(UsageError, match="max_bytes: got 0"):
        chosen.blocks(0)
    file = tmp_path / "entry" / "00000.h5"
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    with pytest.raises(CacheError, match="truncated"):
        list(chosen.blocks())
