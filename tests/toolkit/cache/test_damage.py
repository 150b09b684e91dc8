"""Files that are damaged, truncated, partial or foreign: each is refused with its path and the reason, and left as it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.errors import CacheError
from maxsim_kernels import Packed
from stored_cases import filled, ragged

LENGTHS = [5, 0, 40, 1, 7, 12, 3]
SPLIT = 4  # documents a shard
IDS = [f"doc-{n}" for n in range(len(LENGTHS))]


def never(start: int, stop: int) -> Packed:
    raise AssertionError("nothing may be encoded")


def fill(folder: Path, **options) -> Entry:
    return filled(folder, ragged(LENGTHS, 16), **{"ids": IDS, "key": "key-1", "documents_per_shard": SPLIT, **options})


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    fill(tmp_path / "entry")
    return tmp_path / "entry"


def values_position(path: Path) -> int:
    with h5py.File(path) as file:
        return file["values"].id.get_offset()


def flip(path: Path, place: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["manifest.json", "00001.h5"])
def test_a_named_pipe_is_not_waited_for(entry: Path, name: str) -> None:
    (entry / name).unlink()
    os.mkfifo(entry / name)
    with pytest.raises(CacheError, match=f"{name}: cannot be .*: .*is no regular file"):
        open_entry(entry)


def test_flipped_bit_in_values_is_found_by_verify(entry: Path) -> None:
    shard = entry / "00001.h5"
    flip(shard, values_position(shard) + 100)
    opened = open_entry(entry)  # metadata is right
    assert opened.tokens == sum(LENGTHS)
    for check in (opened.verify, lambda: open_entry(entry, verify=True)):
        with pytest.raises(CacheError, match=r"00001\.h5: damaged: tokens 0 to 21 do not have the CRC-32"):
            check()


def test_verify_names_the_stripe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.cache.stripes.BYTES", 320)  # 10 tokens of 32 bytes
    monkeypatch.setattr("maxsim_eval.cache.stripes._ROWS", 1)
    fill(tmp_path / "entry")
    shard = tmp_path / "entry" / "00000.h5"
    flip(shard, values_position(shard) + 32 * 27)
    with pytest.raises(CacheError, match="tokens 20 to 29 do not"):
        open_entry(tmp_path / "entry").verify()


def test_any_flipped_bit_is_found_or_harmless(entry: Path) -> None:
    whole, shard = open_entry(entry).load(), entry / "00001.h5"
    content = shard.read_bytes()
    refused_at_open = 0
    for place in range(0, len(content), 11):
        shard.write_bytes(content)
        flip(shard, place, bit=place % 8)
        try:
            opened = open_entry(entry)
        except CacheError as error:
            assert str(shard) in str(error)  # noqa: PT017 (whether it raises depends on the place)
            refused_at_open += 1
            continue
        try:
            opened.verify()
        except CacheError:
            continue
        assert torch.equal(opened.load().values, whole.values)
        assert opened.ids() == IDS
    assert refused_at_open > 50


@pytest.mark.parametrize("name", ["offsets", "ids", "running_crc32"])
def test_flipped_bit_in_metadata_is_found_at_open(entry: Path, name: str) -> None:
    shard = entry / "00000.h5"
    with h5py.File(shard) as file:
        place = file[name].id.get_offset()
    flip(shard, place, bit=0)
    with pytest.raises(CacheError, match=r"00000\.h5: damaged: offsets, ids or attributes do not have the checksum"):
        open_entry(entry)


@pytest.mark.parametrize("size", [0, 4, 8, 40, 500, 1500, -1], ids=str)
def test_truncated(entry: Path, size: int) -> None:
    shard = entry / "00001.h5"
    content = shard.read_bytes()
    shard.write_bytes(content[:size])
    with pytest.raises(CacheError, match=r"00001\.h5: (truncated|not an HDF5 file|cannot be opened)") as caught:
        open_entry(entry)
    assert "Remove the file" in str(caught.value)
    assert size < 500 or "truncated" in str(caught.value)


def test_truncated_behind_the_library(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_entry(entry)
    shard = entry / "00001.h5"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CacheError, match=r"00001\.h5: changed since it was opened: truncated: \d+ bytes, need \d+"):
        list(opened.blocks())
    shard.unlink()
    for read in (opened.load, opened.ids):
        with pytest.raises(CacheError, match=r"00001\.h5: (cannot be opened|missing)"):
            read()


def test_not_an_hdf5_file(entry: Path) -> None:
    (entry / "00001.h5").write_text("not embeddings at all")
    with pytest.raises(CacheError, match=r"00001\.h5: not an HDF5 file \(begins with b'not embe'\)"):
        open_entry(entry)


def test_hdf5_file_of_something_else(entry: Path) -> None:
    with h5py.File(entry / "00001.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(CacheError, match=r"00001\.h5: an HDF5 file, but no embedding shard"):
        open_entry(entry)


def remove_values(file: h5py.File) -> None:
    del file["values"]


def other_values(file: h5py.File) -> None:
    del file["values"]
    file["values"] = np.zeros((52, 16), np.float32)


def flat_values(file: h5py.File) -> None:
    del file["values"]
    file["values"] = np.zeros(52, np.float16)


def long_strings(file: h5py.File) -> None:
    ids = file["ids"].asstr()[:]
    del file["ids"]
    file["ids"] = ids


def extra_attribute(file: h5py.File) -> None:
    file.attrs["colour"] = "red"


def array_attribute(file: h5py.File) -> None:
    file.attrs["key"] = np.arange(3)


def array_of_checksums(file: h5py.File) -> None:
    file.attrs["metadata_sha256"] = np.arange(2)


def moved(file: h5py.File) -> None:
    file.attrs["start"] = 1


@pytest.mark.parametrize(
    "change",
    [remove_values, other_values, flat_values, long_strings, extra_attribute, array_attribute, array_of_checksums, moved],
)
def test_shard_with_another_structure(entry: Path, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(entry / "00001.h5", "r+") as file:
        change(file)
    with pytest.raises(CacheError, match=r"00001\.h5: damaged"):
        open_entry(entry)


def test_shard_of_another_format_version(entry: Path) -> None:
    with h5py.File(entry / "00001.h5", "r+") as file:
        file.attrs["format"] = "maxsim-eval/cache/7"
    with pytest.raises(CacheError, match=r"00001\.h5: format 'maxsim-eval/cache/7'.*reads 'maxsim-eval/cache/1'"):
        open_entry(entry)


def test_shard_of_another_place(entry: Path) -> None:
    shutil.copy(entry / "00000.h5", entry / "00001.h5")
    with pytest.raises(CacheError, match=r"00001\.h5: not of this entry: shard is 0, need 1"):
        open_entry(entry)


def test_shard_of_another_entry(tmp_path: Path, entry: Path) -> None:
    fill(tmp_path / "other", key="key-2")
    shutil.copy(tmp_path / "other" / "00001.h5", entry / "00001.h5")
    with pytest.raises(CacheError, match=r"00001\.h5: not of this entry: key is 'key-2', need 'key-1'"):
        open_entry(entry)


def test_shards_with_other_ids(tmp_path: Path, entry: Path) -> None:
    fill(tmp_path / "other", ids=IDS[::-1])
    shutil.copy(tmp_path / "other" / "00001.h5", entry / "00001.h5")
    with pytest.raises(CacheError, match=r"the ids in its shards are not those of manifest\.json"):
        open_entry(entry)
    (entry / "00000.h5").unlink()
    with pytest.raises(CacheError, match=r"00001\.h5: its ids are not those of documents 4 to 7"):
        fill(entry, encode=never)


def test_partial_entry_names_what_is_missing(entry: Path) -> None:
    (entry / "00001.h5").unlink()
    with pytest.raises(CacheError, match=r"partial: 1 of 2 shards are missing \(00001\.h5\)"):
        open_entry(entry)


def test_many_missing_shards(tmp_path: Path) -> None:
    fill(tmp_path, documents_per_shard=1)
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    with pytest.raises(CacheError, match=r"7 of 7 shards are missing \(00000.h5, .*00004.h5, \.\.\.\)"):
        open_entry(tmp_path)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_no_entry(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CacheError, match=r"manifest\.json: missing"):
        open_entry(tmp_path / folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged: no JSON"),
        ("\x80", "not a manifest|damaged"),
        ("[]", "not a manifest"),
        ('{"format": 1}', "not a manifest"),
        ('{"format": "maxsim-eval/cache/2"}', "format 'maxsim-eval/cache/2'.*reads 'maxsim-eval/cache/1'"),
        ('{"format": "maxsim-eval/cache/1"}', "damaged or edited"),
    ],
)
def test_manifest_that_cannot_be_used(entry: Path, text: str, message: str) -> None:
    (entry / "manifest.json").write_text(text)
    for use in (open_entry, lambda folder: fill(folder, encode=never)):
        with pytest.raises(CacheError, match=f"manifest.json: ({message})"):
            use(entry)


def test_edited_manifest(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["provenance"]["origin"] = "somewhere else"
    (entry / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CacheError, match="damaged or edited"):
        open_entry(entry)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"key": "key-2"}, "key is 'key-1', need 'key-2'"),
        ({"ids": [*IDS[:-1], "other"]}, "hash of the ids is"),
        ({"ids": IDS[::-1]}, "hash of the ids is"),
        ({"ids": IDS[:-1]}, "documents is 7, need 6"),
        ({"dim": 8}, "dim is 16, need 8"),
        ({"dtype": torch.bfloat16}, "dtype is 'float16', need 'bfloat16'"),
    ],
)
def test_entry_for_something_else(entry: Path, complete: bool, other: dict, message: str) -> None:
    if not complete:
        (entry / "00001.h5").unlink()
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    with pytest.raises(CacheError, match=f"manifest.json: an entry for something else: {message}"):
        fill(entry, encode=never, **other)
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before


@pytest.mark.parametrize("complete", [True, False])
def test_damaged_shard_is_refused_before_anything_is_encoded(entry: Path, complete: bool) -> None:
    if not complete:
        (entry / "00001.h5").unlink()
    (entry / "00000.h5").write_bytes(b"")
    with pytest.raises(CacheError, match=r"00000\.h5: not an HDF5 file"):
        fill(entry, encode=never)
    assert (entry / "00000.h5").stat().st_size == 0
