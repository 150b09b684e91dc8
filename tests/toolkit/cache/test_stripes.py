"""Values proven while they are read: any run of rows, any damage, any way of reading; the first damaged stripe is named."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.cache import hdf5, shards, stripes
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.cache.stripes import Claim, Claims, Stripes, add_crcs, running
from maxsim_eval.errors import CacheError
from maxsim_kernels import Packed
from stored_cases import filled, ragged


class Stored:
    """Rows of a file that lies in memory, and how many bytes of it were read."""

    def __init__(self, rows: int, row: int, stripe: int) -> None:
        self.data = np.random.default_rng(rows).integers(0, 256, (rows, row), dtype=np.uint8)
        self.read_bytes = 0
        crcs = [zlib.crc32(self.data[: first + stripe]) for first in range(0, rows, stripe)]
        self.stripes = Stripes(Path("a.h5"), rows, row, stripe, np.array(crcs, np.uint32), self.fetch, "Remove it.")

    def fetch(self, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        flat, row = self.data.reshape(-1), self.data.shape[1]
        for first, targets in parts:
            place = first * row
            for target in targets:
                self.read_bytes += len(target)
                target[:] = flat[place : place + len(target)].data
                place += len(target)

    def read(self, runs: list[tuple[int, int]], *, checked: bool = True) -> bytes:
        out = bytearray(sum(count for _, count in runs) * self.data.shape[1])
        self.stripes.read([first for first, _ in runs], [count for _, count in runs], memoryview(out), checked=checked)
        return bytes(out)

    def claim(self, runs: list[tuple[int, int]]) -> tuple[bytes, list[Claim]]:
        """Runs that are read as they are, and what they must be."""
        claims = Claims()
        for first, count in runs:
            place = claims.room(count)
            if count >= self.stripes.least_claimed:
                claims.add(self.stripes.claim("rows", place, first, count))
            else:
                self.read([(first, count)])
        out = self.read(runs, checked=False)
        return out, claims.take(1 << 40)

    def wrong(self, out: bytes, claims: list[Claim]) -> list[Claim]:
        row = self.data.shape[1]
        return [claim for claim in claims if zlib.crc32(out[claim.first * row : claim.stop * row]) != claim.crc]

    def rows(self, runs: list[tuple[int, int]]) -> bytes:
        return b"".join(self.data[first : first + count].tobytes() for first, count in runs)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Stored, list[tuple[int, int]]]:
    rows, row, stripe = draw(st.integers(0, 200)), draw(st.integers(1, 9)), draw(st.integers(1, 70))
    run = st.tuples(st.integers(0, rows), st.integers(0, rows)).map(lambda ends: (min(ends), abs(ends[1] - ends[0])))
    return Stored(rows, row, stripe), draw(st.lists(run, max_size=6))  # in any order, over each other too


@settings(deadline=None, max_examples=300)
@given(layouts(), st.booleans(), st.integers(0, 40))
def test_what_was_written_is_read(made: tuple[Stored, list[tuple[int, int]]], checked: bool, small: int) -> None:
    stored, runs = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "_SMALL_BYTES", small)
        assert stored.read(runs, checked=checked) == stored.rows(runs)
    assert sum(stored.stripes.verify()) == len(stored.data)


def damaged(stored: Stored, runs: list[tuple[int, int]], data: st.DataObject) -> str | None:
    """Change a byte of what is read: how whoever reads it must say so; None where nothing is read."""
    touched = sorted({row for first, count in runs for row in range(first, first + count)})
    if not touched:
        return None
    row, column = data.draw(st.sampled_from(touched)), data.draw(st.integers(0, stored.data.shape[1] - 1))
    stored.data[row, column] ^= data.draw(st.integers(1, 255))
    first = row // stored.stripes.stripe * stored.stripes.stripe
    return rf"a\.h5: damaged: tokens {first} to \d+ do not have the CRC-32.*Remove it"


@settings(deadline=None, max_examples=300)
@given(layouts(), st.data())
def test_any_changed_byte_of_what_is_read_is_found(made: tuple[Stored, list[tuple[int, int]]], data: st.DataObject) -> None:
    stored, runs = made
    message = damaged(stored, runs, data)
    if message is None:
        return
    with pytest.raises(CacheError, match=message):
        stored.read(runs)
    stored.read(runs, checked=False)


@settings(deadline=None, max_examples=300)
@given(layouts(), st.data())
def test_what_a_read_leaves_to_others_is_claimed(made: tuple[Stored, list[tuple[int, int]]], data: st.DataObject) -> None:
    stored, runs = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "_SMALL_BYTES", data.draw(st.sampled_from([0, 40])))
        out, claims = stored.claim(runs)
        assert out == stored.rows(runs)
        assert stored.wrong(out, claims) == []
        assert all(one.stop <= other.first for one, other in pairwise(claims))
        message = damaged(stored, runs, data)
        if message is None:
            return
        with pytest.raises(CacheError, match=message):
            stored.wrong(*stored.claim(runs))[0].blame()


def test_a_long_run_is_claimed_and_what_it_is_short_of_whole_stripes_is_not_read_twice() -> None:
    stored = Stored(10_000, 400, 100)  # 4 MB: more than is read at once
    stored.read_bytes = 0
    out, (claim,) = stored.claim([(150, 9_000)])
    assert (claim.first, claim.stop, claim.crc) == (0, 9_000, zlib.crc32(out))
    assert stored.read_bytes == 9_100 * 400
    assert stored.claim([(150, 5_000)])[1] == [], "short: proven when it is read"
    stored.data[120] ^= 1  # in a stripe that the run begins in
    out, (claim,) = stored.claim([(150, 9_000)])
    assert claim.crc != zlib.crc32(out)
    with pytest.raises(CacheError, match="tokens 100 to 199 do not have"):
        claim.blame()


def test_no_stripe_is_read_twice_and_little_beside_what_is_asked() -> None:
    stored = Stored(10_000, 4, 100)
    stored.read([(first, 10) for first in range(5, 9_990, 50)])
    assert stored.read_bytes == 10_000 * 4
    stored.read_bytes = 0
    stored.read([(150, 5_000)])
    assert stored.read_bytes == 5_100 * 4


def test_a_disk_that_reads_differently_each_time_is_named() -> None:
    stored, fetch = Stored(100, 4, 10), []

    def once_wrong(parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        fetch.append(1)
        stored.fetch(parts)

    held = stored.data.copy()
    stored.data[55] ^= 1

    def repaired(parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        once_wrong(parts)
        stored.data[:] = held

    object.__setattr__(stored.stripes, "fetch", repaired)
    with pytest.raises(CacheError, match=r"tokens 50 to 59 had another CRC-32 .* read again: the disk"):
        stored.read([(52, 6)])


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 9))
def test_checksums_of_pieces_are_those_of_stripes(sizes: list[int], stripe: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (sum(sizes), 3), dtype=np.uint8)
    crcs = np.zeros(-(-len(rows) // stripe), np.uint32)
    first = 0
    for size in sizes:
        add_crcs(crcs, rows[first : first + size], first, stripe)
        first += size
    assert crcs.tolist() == [zlib.crc32(rows[: place + stripe]) for place in range(0, len(rows), stripe)]
    single = np.array([zlib.crc32(rows[place : place + stripe]) for place in range(0, len(rows), stripe)], np.uint32)
    assert running(single, stripe * 3, ((len(rows) - 1) % stripe + 1) * 3).tolist() == crcs.tolist()


# In a cache ---------------------------------------------------------------------------------------------------------

LENGTHS = [5, 0, 7, 3, 9, 4, 0, 6, 8, 2]


def tokens() -> Packed:
    return ragged(LENGTHS, 16)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """One shard, stripes of 10 tokens."""
    monkeypatch.setattr("maxsim_eval.cache.stripes.BYTES", 320)
    monkeypatch.setattr("maxsim_eval.cache.stripes._ROWS", 1)
    return filled(tmp_path / "entry", tokens())


def damage(entry: Entry, token: int, size: int = 1) -> Entry:
    """The entry opened again, with zeros where tokens were."""
    path = entry.shards[0].path
    assert entry.shards[0].position is not None
    content = bytearray(path.read_bytes())
    place = entry.shards[0].position + token * 32
    content[place : place + 32 * size] = bytes(32 * size)
    path.write_bytes(content)
    return open_entry(entry.folder)


WAYS = {
    "load": lambda entry: entry.load(),
    "blocks": lambda entry: list(entry.blocks(200)),
    "part of a block": lambda entry: [
        block.read(1, torch.empty(len(block.offsets) and int(block.offsets[-1]) - 1, 16, dtype=torch.float16))
        for block in entry.lazy_blocks(1 << 20)
    ],
    "selection": lambda entry: list(Selection(entry, np.array([3, 4, 8])).blocks()),
    "shard": lambda entry: entry.shards[0].read(15, torch.empty(9, 16, dtype=torch.float16)),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_reading_gives_damaged_values(entry: Entry, way: str) -> None:
    WAYS[way](entry)
    damaged = damage(entry, 17, 3)
    with pytest.raises(CacheError, match=r"00000\.h5: damaged: tokens 10 to 19 do not have the CRC-32"):
        WAYS[way](damaged)
    WAYS[way](damaged.unchecked())
    assert list(Selection(damaged, np.array([9])).blocks()), "what is whole is read all the same"


def test_chunked_files_are_checked_too(entry: Entry) -> None:
    path = entry.shards[0].path
    with h5py.File(path, "r+") as file:
        held = file["values"][:]
        held[17] = 0
        del file["values"]
        file.create_dataset("values", data=held, chunks=(8, 16), compression="gzip")
    with pytest.warns(UserWarning, match="chunked or compressed"):
        found = open_entry(entry.folder)
    with pytest.raises(CacheError, match="tokens 10 to 19 do not have the CRC-32"):
        found.load()
    rest = found.shards[0]
    out = torch.empty(12, 16, dtype=torch.float16)
    rest.read_runs([22, 40], [8, 4], out)
    assert torch.equal(out, torch.cat([tokens().values[22:30], tokens().values[40:44]]))


def test_files_with_a_checksum_for_each_stripe_are_read_and_checked(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions of before wrote them."""
    path, whole = entry.shards[0].path, entry.load().values
    single = [zlib.crc32(whole[first : first + 10].numpy().tobytes()) for first in range(0, len(whole), 10)]
    spec, ids = entry.shards[0].spec, [one.encode() for one in entry.ids()]
    monkeypatch.setattr(shards, "_RUNNING", "crc32")
    image, position, _ = shards._image(spec, entry.shards[0].offsets, ids, np.array(single, np.uint32), 10)
    path.write_bytes(bytes(image).ljust(position, b"\0") + whole.numpy().tobytes())
    with h5py.File(path) as file:
        assert "crc32" in file
    monkeypatch.undo()
    before = open_entry(entry.folder)
    assert torch.equal(before.load().values, whole)
    assert sum(before.shards[0].verify()) == len(whole)
    with pytest.raises(CacheError, match=r"00000\.h5: damaged: tokens 10 to 19 do not have the CRC-32"):
        damage(before, 17).load()


@pytest.mark.parametrize("most", [1, 5, 1 << 20])
def test_many_buffers_are_filled_by_few_calls_that_may_fall_short(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 9_000, dtype=np.uint8).tobytes()
    path = tmp_path / "values"
    path.write_bytes(data)
    real, calls = os.preadv, []

    def short(descriptor: int, buffers: Sequence[memoryview], place: int) -> int:
        calls.append(len(buffers))
        return real(descriptor, [buffers[0][:most]] if most < len(buffers[0]) else buffers, place)

    monkeypatch.setattr(os, "preadv", short)
    out = memoryview(bytearray(3 * 2_500))
    buffers = [out[first : first + 3] for first in range(0, len(out), 3)]
    hdf5.read_at(path, hdf5.Stamp.of(path.stat()), [(7, buffers[:2_000]), (7 + 6_000, buffers[2_000:])])
    assert bytes(out) == data[7 : 7 + len(out)]
    assert max(calls) <= 1_024
    with pytest.raises(CacheError, match=r"truncated: the file ends 2 bytes too early, need 9000 bytes"):
        hdf5.read_at(path, hdf5.Stamp.of(path.stat()), [(8_998, [out[:4]])])
