"""Quantised copies that are damaged, foreign or stale are refused by name; writers that die or run out of disk leave nothing half."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
import h5py
import numpy as np
import pytest
import torch

from maxsim_eval.cache import converting, copy_shards
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.copies import Quantised, quantised
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.housekeeping import collect, find_garbage
from maxsim_eval.errors import CacheError
from maxsim_kernels import Packed, quantize_int8
from stored_cases import FullDisk, filled, ragged

LENGTHS = [5, 0, 40, 1, 7, 12, 3, 4, 6]
DIM = 16
SPLIT = 3
KIND = "int8-token"


def packed(seed: int = 0) -> Packed:
    return ragged(LENGTHS, DIM, seed=seed)


def fill(folder: Path, tokens: Packed | None = None, key: str = "key-1") -> Entry:
    ids = [f"doc-{n}" for n in range(len(LENGTHS))]
    return filled(folder, packed() if tokens is None else tokens, ids=ids, key=key, documents_per_shard=SPLIT)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    """An entry with its `int8-token` and `int8-corpus` copies, three shards each."""
    made = fill(tmp_path / "cache" / "local" / "set" / "entry")
    for name in (KIND, "int8-corpus"):
        convert_entry(made, name, quiet=True)
    return made


def read(entry: Entry, name: str = KIND) -> Quantised:
    found = quantised(entry, name)
    assert found is not None
    return found


def require_right(entry: Entry, tokens: Packed, name: str = KIND) -> None:
    granularity = name.partition("-")[2]
    want = quantize_int8(tokens, granularity)  # type: ignore[arg-type]
    blocks = list(read(entry, name).blocks())
    assert torch.equal(torch.cat([block.token_values for block in blocks]), want.token_values)
    if granularity == "token":
        assert torch.equal(torch.cat([block.scales for block in blocks]), want.scales)


def flip(path: Path, place: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["codes", "scales"])
def test_flipped_bit_in_codes_or_scales_is_found_by_verify(entry: Entry, name: str) -> None:
    copy = entry.folder / f"00001.{KIND}.h5"
    with h5py.File(copy) as file:
        place = file[name].id.get_offset()
    flip(copy, place + 3)
    found = read(entry)
    with pytest.raises(CacheError, match=r"00001\.int8-token\.h5: damaged: tokens 0 to 19 do not have the CRC-32"):
        found.verify()


@pytest.mark.parametrize("name", [KIND, "int8-corpus"])
def test_any_flipped_bit_is_found_or_harmless(entry: Entry, name: str) -> None:
    whole = [(block.token_values, block.scales) for block in read(entry, name).blocks()]
    copy = entry.folder / f"00000.{name}.h5"
    content, refused = copy.read_bytes(), 0
    for place in range(0, len(content), 17):
        copy.write_bytes(content)
        flip(copy, place, bit=place % 8)
        try:
            found = read(entry, name)
            found.verify()
        except CacheError as error:
            assert str(copy) in str(error)  # noqa: PT017 (whether it raises depends on the place)
            refused += 1
            continue
        for block, (codes, scales) in zip(found.blocks(), whole, strict=True):
            assert torch.equal(block.token_values, codes)
            assert torch.equal(block.scales, scales)
    assert refused > 40


@pytest.mark.parametrize("size", [0, 4, 40, 500, 1500, -1], ids=str)
def test_truncated(entry: Entry, size: int) -> None:
    copy = entry.folder / f"00001.{KIND}.h5"
    copy.write_bytes(copy.read_bytes()[:size])
    with pytest.raises(CacheError, match=r"00001\.int8-token\.h5: (truncated|not an HDF5 file|cannot be opened)") as caught:
        quantised(entry, KIND)
    assert "Remove the file" in str(caught.value)
    with pytest.raises(CacheError, match=r"00001\.int8-token\.h5"):  # nothing is repaired silently
        convert_entry(entry, KIND, quiet=True)
    copy.unlink()
    assert convert_entry(entry, KIND, quiet=True).written == 1
    require_right(entry, packed())


def edit_scale(file: h5py.File) -> None:
    file["scales"][...] = 1


def edit_attribute(file: h5py.File) -> None:
    file.attrs["entry_sha256"] = b"0" * 64


def array_of_checksums(file: h5py.File) -> None:
    file.attrs["metadata_sha256"] = np.arange(2)


def compress(file: h5py.File) -> None:
    codes = file["codes"][:]
    del file["codes"]
    file.create_dataset("codes", data=codes, chunks=True)


def widen(file: h5py.File) -> None:
    codes = file["codes"][:]
    del file["codes"]
    file["codes"] = codes.astype(np.int16)


def later(file: h5py.File) -> None:
    file.attrs["format"] = np.bytes_(b"maxsim-eval/quantised/4")


def strip(file: h5py.File) -> None:
    del file["running_crc32"]


def without_codes(file: h5py.File) -> None:
    del file["codes"]


def empty(file: h5py.File) -> None:
    for name in list(file):
        del file[name]
    for name in list(file.attrs):
        del file.attrs[name]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (edit_scale, "do not have the checksum"),
        (edit_attribute, "do not have the checksum"),
        (array_of_checksums, "do not have the checksum"),
        (compress, "chunked or compressed"),
        (widen, "damaged: holds"),
        (later, "stale: format 'maxsim-eval/quantised/4', this version"),
        (strip, "HDF5 cannot read it"),
        (without_codes, "HDF5 cannot read it"),
        (empty, "no quantised shard"),
    ],
)
def test_edited(entry: Entry, change: Callable[[h5py.File], None], text: str) -> None:
    copy = entry.folder / "00001.int8-corpus.h5"
    with h5py.File(copy, "r+") as file:
        change(file)
    with pytest.raises(CacheError, match=r"00001\.int8-corpus\.h5: ") as caught:
        quantised(entry, "int8-corpus")
    assert text in str(caught.value)


def test_foreign(entry: Entry, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", key="key-2")
    convert_entry(other, KIND, quiet=True)
    copy = entry.folder / f"00001.{KIND}.h5"
    good = copy.read_bytes()
    for source, text in (
        (other.folder / copy.name, "key is 'key-2', need 'key-1'"),
        (entry.folder / f"00002.{KIND}.h5", "shard is 2, need 1"),
        (entry.folder / "00001.int8-corpus.h5", "granularity is 'corpus', need 'token'"),
        (entry.folder / "00001.h5", "no quantised shard"),
    ):
        shutil.copy(source, copy)
        with pytest.raises(CacheError, match=r"00001\.int8-token\.h5") as caught:
            quantised(entry, KIND)
        assert text in str(caught.value)
    copy.write_bytes(good)
    require_right(entry, packed())
    shutil.copy(entry.folder / "00000.h5", other.folder / "00000.h5")
    with pytest.raises(CacheError, match="key"):
        open_entry(other.folder)


def change_middle_shard(entry: Entry) -> tuple[Entry, Packed]:
    """The same documents encoded to other values, in the shard in the middle."""
    (entry.folder / "00001.h5").unlink()
    new = fill(entry.folder, packed(seed=1))
    first, last = int(packed().offsets[SPLIT]), int(packed().offsets[2 * SPLIT])  # type: ignore[index]
    values = packed().values.clone()
    values[first:last] = packed(seed=1).values[first:last]
    return new, packed().with_values(values)


def test_stale_copies_are_refused_and_replaced(entry: Entry) -> None:
    new, tokens = change_middle_shard(entry)
    with pytest.raises(CacheError, match=r"00001\.int8-token\.h5: stale: 00001\.h5 has changed"):
        quantised(new, KIND)
    # A corpus scale comes from all shards: the copies of those that did not change are stale too.
    with pytest.raises(CacheError, match=r"00000\.int8-corpus\.h5: stale: the entry has changed"):
        quantised(new, "int8-corpus")
    done = convert_entry(new, KIND, quiet=True)
    assert (done.kept, done.written, done.replaced) == (2, 0, 1)
    done = convert_entry(new, "int8-corpus", quiet=True)
    assert (done.kept, done.written, done.replaced) == (0, 0, 3)
    for name in (KIND, "int8-corpus"):
        require_right(new, tokens, name)


def test_gc_removes_stale_copies_alone(entry: Entry) -> None:
    cache = entry.folder.parents[2]
    assert find_garbage(cache) == ([], [])
    new, _ = change_middle_shard(entry)
    found, problems = find_garbage(cache)
    stale = [f"0000{n}.int8-corpus.h5" for n in range(3)]
    assert sorted(item.path.name for item in found) == sorted(["00001.int8-token.h5", *stale])
    assert problems == []
    shutil.copy(found[0].path, entry.folder / "x")
    os.replace(entry.folder / "x", found[0].path)  # another file has that name by now
    assert collect(cache, found) == sum(item.file_bytes for item in found[1:])
    left = {path.name for path in entry.folder.glob("*.h5")}
    assert left == {found[0].path.name, "00000.h5", "00001.h5", "00002.h5", "00000.int8-token.h5", "00002.int8-token.h5"}
    new.verify()


def test_same_values_encoded_again_keep_their_copy(entry: Entry) -> None:
    (entry.folder / "00001.h5").unlink()
    require_right(fill(entry.folder), packed())


def test_changed_behind_the_reader(entry: Entry) -> None:
    found = read(entry)
    copy = entry.folder / f"00002.{KIND}.h5"
    content = copy.read_bytes()
    copy.write_bytes(content)  # the same bytes, written later
    with pytest.raises(CacheError, match=r"00002\.int8-token\.h5: changed since it was opened: somebody wrote to it"):
        list(found.blocks())
    copy.unlink()
    with pytest.raises(CacheError, match=r"00002\.int8-token\.h5: missing"):
        list(found.blocks())


@pytest.mark.parametrize("room", [0, 100, 600], ids=str)  # in the codes, or in the header behind them
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    made = fill(tmp_path / "entry")

    def opened(path: Path, mode: str) -> object:
        return FullDisk(path, room) if ".00001." in path.name else open(path, mode)

    monkeypatch.setattr(copy_shards, "open", opened, raising=False)
    with pytest.raises(CacheError, match=r"00001\.int8-token\.h5: the disk is full .* finished copies are kept"):
        convert_entry(made, KIND, quiet=True)
    monkeypatch.undo()
    copies = [path.name for path in sorted(made.folder.iterdir()) if path.name.endswith((".tmp", f".{KIND}.h5"))]
    assert copies == [f"00000.{KIND}.h5"]
    assert convert_entry(made, KIND, quiet=True).kept == 1
    require_right(made, packed())


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fill(tmp_path / "entry")
    need = sum(LENGTHS) * (DIM + 2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(converting.shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    with pytest.raises(CacheError, match="nothing was written"):
        convert_entry(made, KIND, quiet=True)
    assert quantised(made, KIND) is None
    monkeypatch.setattr(converting.shutil, "disk_usage", lambda path: usage._replace(free=need))
    assert convert_entry(made, KIND, quiet=True).written == 3


def test_lock_held_by_another(entry: Entry) -> None:
    with filelock.FileLock(entry.folder / ".lock"), pytest.raises(CacheError, match="another process is writing"):
        convert_entry(entry, "int8-document", quiet=True, lock_timeout=0.1)
    assert quantised(entry, "int8-document") is None


CHILD = """
import os, signal, sys
from pathlib import Path
from maxsim_eval.cache.entries import open_entry
from maxsim_eval.cache import converting
from maxsim_eval.cache import copy_shards as quantised_shards

add, seen = quantised_shards.add_crcs, []
def die(*arguments):
    seen.append(1)
    if len(seen) == 2:  # in the middle of the second shard
        os.kill(os.getpid(), signal.SIGKILL)
    add(*arguments)
quantised_shards.add_crcs = die
converting.convert_entry(open_entry(Path(sys.argv[1])), "int8-corpus", quiet=True)
"""


def written(path: Path) -> tuple[int, ...]:
    """What changes when a file is written, and not when it is read."""
    found = path.stat()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def test_killed_in_the_middle_and_continued(tmp_path: Path) -> None:
    made = fill(tmp_path / "entry")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(made.folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = sorted(path.name for path in made.folder.iterdir() if "int8" in path.name)
    assert len(names) == 2
    assert names[0].startswith(".00001.int8-corpus.h5.")
    assert names[1] == "00000.int8-corpus.h5"
    before = written(made.folder / names[1])
    with pytest.warns(UserWarning, match="partial"):
        assert quantised(made, "int8-corpus") is None
    after = convert_entry(made, "int8-corpus", quiet=True)
    assert (after.kept, after.written, after.replaced) == (1, 2, 0)
    assert written(made.folder / names[1]) == before
    assert list(made.folder.glob(".*.tmp")) == []
    require_right(made, packed(), "int8-corpus")
