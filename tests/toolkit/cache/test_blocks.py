"""Blocks that are read later: the same tokens for every cut, range and order of reading; a file that changed meanwhile is refused."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.cache import hdf5
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.selection import Documents, Selection
from maxsim_eval.cache.shards import Shard
from maxsim_eval.errors import CacheError, UsageError
from maxsim_kernels import Packed
from stored_cases import filled_ragged as fill

RAGGED = [3, 0, 17, 1, 0, 0, 250, 5, 64, 0, 2]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def cut(lengths: list[int], most: int) -> list[list[int]]:
    """Lengths of the documents of every block: as many as fit `most` tokens, one at least."""
    blocks: list[list[int]] = []
    for length in lengths:
        if not blocks or sum(blocks[-1]) + length > most:
            blocks.append([])
        blocks[-1].append(length)
    return blocks


def compress(folder: Path) -> Entry:
    for file in sorted(folder.glob("*.h5")):
        with h5py.File(file, "r+") as handle:
            values = handle["values"][:]
            del handle["values"]
            handle.create_dataset("values", data=values, chunks=(7, values.shape[1]), compression="gzip")
    with pytest.warns(UserWarning, match="chunked or compressed"):
        return open_entry(folder)


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=25),
    whole=st.booleans(),
    bounds=st.tuples(st.integers(0, 25), st.integers(0, 25)),
    per_shard=st.integers(1, 30),
    max_bytes=st.integers(1, 4000),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_any_cut_range_and_part_gives_the_same_tokens(
    documents: list[tuple[int, bool]],
    whole: bool,
    bounds: tuple[int, int],
    per_shard: int,
    max_bytes: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        entry = fill(Path(folder), [length for length, _ in documents], per_shard, 9, dtype)
        rows = np.flatnonzero([whole or chosen for _, chosen in documents]).astype(np.int64)
        source: Documents = entry if whole else Selection(entry, rows)
        start, stop = sorted(min(bound, len(rows)) for bound in bounds)
        expected = entry.load().select(rows[start:stop].tolist()).compact()
        blocks = list(source.lazy_blocks(max_bytes, start, stop))
        parts = []
        for block in blocks:
            assert (block.dim, block.dtype) == (9, dtype)
            assert block.offsets.dtype == torch.int64
            total = int(block.offsets[-1])
            marks = sorted({0, total, *(draw.randint(0, total) for _ in range(3))})
            values = torch.full((total, 9), float("nan"), dtype=dtype)
            pieces = list(pairwise(marks))
            draw.shuffle(pieces)
            for first, last in pieces:
                block.read(first, values[first:last])
            parts.append(values)
    assert torch.equal(torch.cat([torch.empty(0, 9, dtype=dtype), *parts]), expected.values)
    most = max_bytes // (9 * dtype.itemsize)
    assert [np.diff(block.offsets).tolist() for block in blocks] == cut(expected.lengths.tolist(), most)


def test_blocks_do_not_end_where_shards_do(tmp_path: Path) -> None:
    expected = [np.diff(block.offsets).tolist() for block in fill(tmp_path / "one", RAGGED, 20).lazy_blocks(70 * 48)]
    assert expected == cut(RAGGED, 70) == [[3, 0, 17, 1, 0, 0], [250], [5, 64, 0], [2]]
    for per_shard in (1, 2, 3, 5, 7):
        entry = fill(tmp_path / str(per_shard), RAGGED, per_shard)
        assert [np.diff(block.offsets).tolist() for block in entry.lazy_blocks(70 * 48)] == expected


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("selected", [False, True])
def test_many_threads_read_parts_of_the_same_blocks(tmp_path: Path, compressed: bool, selected: bool) -> None:
    lengths = [(37 * n) % 90 for n in range(200)]
    entry = fill(tmp_path / "entry", lengths, 23)
    expected = entry.load()
    source: Documents = entry
    if compressed:
        source = entry = compress(tmp_path / "entry")
    if selected:
        rows = np.flatnonzero(np.arange(200) % 3 != 1)
        source, expected = Selection(entry, rows), expected.select(rows.tolist()).compact()
    blocks = list(source.lazy_blocks(50_000))
    buffers = [torch.full((int(block.offsets[-1]), 24), float("nan"), dtype=torch.float16) for block in blocks]
    jobs = [
        (number, first, min(first + 61, len(buffer)))
        for number, buffer in enumerate(buffers)
        for first in range(0, len(buffer), 61)
    ]
    random.Random(0).shuffle(jobs)
    assert len(blocks) > 3
    assert len(jobs) > 50
    together = threading.Barrier(8)

    def work(worker: int) -> None:
        together.wait(30)
        for number, first, stop in jobs[worker::8]:
            blocks[number].read(first, buffers[number][first:stop])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert torch.equal(torch.cat(buffers), expected.values)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 12), (12, None)])
def test_ranges_that_are_none(tmp_path: Path, start: int, stop: int | None) -> None:
    entry = fill(tmp_path / "entry", RAGGED, 4)
    for source in (entry, Selection(entry, np.arange(11))):
        with pytest.raises(UsageError, match="need a range within 0 to 11"):
            source.lazy_blocks(100, start, stop)
        with pytest.raises(UsageError, match="max_bytes: got 0"):
            source.lazy_blocks(0)


def test_buffers_that_do_not_fit(tmp_path: Path) -> None:
    (block,) = fill(tmp_path / "entry", [5, 7], 2).lazy_blocks(1 << 20)
    for first, out in (
        (0, torch.empty(13, 24, dtype=torch.float16)),
        (10, torch.empty(3, 24, dtype=torch.float16)),
        (-1, torch.empty(2, 24, dtype=torch.float16)),
        (0, torch.empty(2, 25, dtype=torch.float16)),
        (0, torch.empty(2, 24, dtype=torch.bfloat16)),
        (0, torch.empty(2, 48, dtype=torch.float16)[:, ::2]),
    ):
        before = out.clone()
        with pytest.raises(ValueError, match="got"):
            block.read(first, out)
        assert torch.equal(out.nan_to_num(), before.nan_to_num())


def test_stamps_tell_contents_apart(tmp_path: Path) -> None:
    entry = fill(tmp_path / "a", RAGGED, 4)
    assert entry.stamp() == open_entry(tmp_path / "a").stamp() == fill(tmp_path / "b", RAGGED, 4).stamp()
    assert entry.stamp()["key"] == "key"
    assert len(set(entry.stamp()["shards"])) == 3
    assert entry.stamp() != fill(tmp_path / "c", RAGGED[:-1], 4).stamp()
    assert entry.stamp()["shards"] != fill(tmp_path / "d", RAGGED, 4, key="kez").stamp()["shards"]
    rows = np.array([1, 6])
    assert Selection(entry, rows).stamp() == Selection(open_entry(tmp_path / "b"), rows.copy()).stamp()
    assert Selection(entry, rows).stamp() != Selection(entry, np.array([1, 7])).stamp() != entry.stamp()


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def take_place(path: Path, other: Path) -> None:
    os.replace(other, path)


def overwrite(path: Path, other: Path) -> None:
    content = other.read_bytes()
    assert len(content) == path.stat().st_size
    modified = path.stat().st_mtime_ns + 1  # as if the clock had moved on, whatever its steps are
    path.write_bytes(content)
    os.utime(path, ns=(modified, modified))


def grow(path: Path, other: Path) -> None:
    with open(path, "ab") as handle:
        handle.write(b"\0")


def remove(path: Path, other: Path) -> None:
    path.unlink()


def folder_instead(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: list[tuple[Callable[[Path, Path], None], str]] = [
    (truncate, r"changed since it was opened: truncated: \d+ bytes, need \d+"),
    (empty, r"changed since it was opened: truncated: 0 bytes, need \d+"),
    (take_place, "changed since it was opened: another file has taken its place"),
    (overwrite, "changed since it was opened: somebody wrote to it at "),
    (grow, r"changed since it was opened: \d+ bytes, need \d+"),
    (remove, "missing"),
    (folder_instead, "changed since it was opened|cannot be (read|opened)"),
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_shard_that_changed_after_it_was_opened(
    tmp_path: Path, change: Callable[[Path, Path], None], message: str, compressed: bool
) -> None:
    entry = fill(tmp_path / "entry", RAGGED, 6)
    fill(tmp_path / "other", RAGGED, 6, key="kez")  # a valid shard of the same size
    if compressed:
        entry = compress(tmp_path / "entry")
        other = compress(tmp_path / "other").folder
        for file in (*entry.folder.glob("*.h5"), *other.glob("*.h5")):
            os.truncate(file, 60_000)  # gzip gives other sizes: HDF5 ignores what lies behind its end
        entry = open_again(entry.folder)
    blocks = {"whole": list(entry.lazy_blocks(1 << 20)), "rows": list(Selection(entry, np.array([0, 8])).lazy_blocks(99))}
    change(tmp_path / "entry" / "00001.h5", tmp_path / "other" / "00001.h5")
    for found in blocks.values():
        out = torch.empty(int(found[-1].offsets[-1]), 24, dtype=torch.float16)
        with pytest.raises(CacheError, match=rf"00001\.h5: ({message})"):
            found[-1].read(0, out)
    with pytest.raises(CacheError, match=r"00001\.h5"):
        list(entry.blocks())
    with pytest.raises(CacheError, match=r"00001\.h5"):
        entry.load()
    with pytest.raises(CacheError, match=r"00001\.h5"):
        entry.ids()
    first = torch.empty(3, 24, dtype=torch.float16)
    blocks["rows"][0].read(0, first)  # the other shard is as it was
    assert bool(first.isfinite().all())


def open_again(folder: Path) -> Entry:
    with pytest.warns(UserWarning, match="chunked or compressed"):
        return open_entry(folder)


def test_a_shard_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = fill(tmp_path / "entry", [4000], 1)
    path = tmp_path / "entry" / "00000.h5"
    (block,) = entry.lazy_blocks(1 << 20)
    preadv, calls = os.preadv, []

    def slowly(descriptor: int, buffers: list[memoryview], place: int) -> int:
        calls.append(place)
        if len(calls) == 3:
            os.truncate(path, 60_000)
        return preadv(descriptor, [buffers[0][:20_000]], place)

    monkeypatch.setattr(hdf5.os, "preadv", slowly)
    with pytest.raises(CacheError, match=r"00000\.h5: truncated: the file ends \d+ bytes too early"):
        block.read(0, torch.empty(4000, 24, dtype=torch.float16))
    assert len(calls) == 4


def test_short_reads_are_continued_and_writes_meanwhile_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = fill(tmp_path / "entry", [400], 1)
    path, out = tmp_path / "entry" / "00000.h5", torch.empty(400, 24, dtype=torch.float16)
    expected, (block,) = entry.load().values, entry.lazy_blocks(1 << 20)
    preadv = os.preadv
    monkeypatch.setattr(hdf5.os, "preadv", lambda fd, buffers, place: preadv(fd, [buffers[0][:777]], place))
    block.read(0, out)
    assert torch.equal(out, expected)

    def meddled(descriptor: int, buffers: list[memoryview], place: int) -> int:
        os.utime(path, ns=(1, 1))
        return preadv(descriptor, buffers, place)

    monkeypatch.setattr(hdf5.os, "preadv", meddled)
    with pytest.raises(CacheError, match="changed since it was opened: somebody wrote to it"):
        block.read(0, out)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = fill(tmp_path / "entry", [4], 1).lazy_blocks(1 << 20)

    def broken(descriptor: int, buffers: list[memoryview], place: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hdf5.os, "preadv", broken)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(CacheError, match=r"00000\.h5: cannot be read: .*Input/output error"):
        block.read(0, torch.empty(4, 24, dtype=torch.float16))
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before  # nothing stays open


def test_replaced_while_the_entry_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "entry", RAGGED, 20)
    fill(tmp_path / "other", RAGGED, 20, key="kez")
    opened = h5py.File

    def swapped(path: Path, *arguments: object, **options: object) -> h5py.File:
        if Path(path).parent.name == "entry" and (tmp_path / "other" / "00000.h5").exists():
            os.replace(tmp_path / "other" / "00000.h5", path)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(hdf5.h5py, "File", swapped)
    with pytest.raises(CacheError, match=r"00000\.h5: (changed since|not of this entry)"):
        open_entry(tmp_path / "entry")


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = fill(tmp_path / "entry", RAGGED, 6)
    reads: list[tuple[str, list[int], list[int]]] = []
    original = Shard.read_runs

    def spy(self: Shard, firsts: list[int], counts: list[int], out: torch.Tensor, *, proven: bool = False) -> None:
        reads.append((self.path.name, list(firsts), list(counts)))
        original(self, firsts, counts, out, proven=proven)

    monkeypatch.setattr(Shard, "read_runs", spy)
    (block,) = Selection(entry, np.array([0, 2, 5, 7, 8, 10])).lazy_blocks(1 << 20, 1)
    assert reads == []
    block.read(10, torch.empty(20, 24, dtype=torch.float16))  # 7 of the 17 of d2, then d7 and 8 of d8
    assert reads == [("00000.h5", [13], [7]), ("00001.h5", [250], [13])]
    whole: Packed = next(iter(Selection(entry, np.array([0, 3])).blocks()))
    assert reads[2:] == [("00000.h5", [0, 20], [3, 1])]
    assert whole.lengths.tolist() == [3, 1]
