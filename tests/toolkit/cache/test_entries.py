"""The cache's entries: what goes in comes out, for every dtype, shape and block size; the file format is what its README says."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.shards import FORMAT, _all_finite
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_kernels import Packed
from stored_cases import filled
from stored_cases import ragged as tokens

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
RAGGED = [3, 0, 17, 1, 0, 0, 250, 5, 64, 0, 2]


def fill(folder: Path, packed: Packed, **options) -> Entry:
    return filled(folder, packed, **{"key": "0123456789abcdef", "provenance": {"origin": "test"}, **options})


def assert_same(entry: Entry, packed: Packed) -> None:
    loaded = entry.load()
    assert loaded.dtype == packed.dtype
    assert torch.equal(loaded.values, packed.values)
    assert torch.equal(loaded.lengths, packed.lengths.long())
    assert entry.lengths().dtype == np.int64
    assert entry.lengths().tolist() == packed.lengths.tolist()
    assert (entry.documents, entry.tokens, entry.dim, entry.dtype) == (
        len(packed),
        packed.values.shape[0],
        packed.dim,
        packed.dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_shard", [1, 4, 11, None])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, per_shard: int | None) -> None:
    packed = tokens(RAGGED, dtype=dtype)
    entry = fill(tmp_path / "entry", packed, documents_per_shard=per_shard)
    assert_same(entry, packed)
    reopened = open_entry(tmp_path / "entry", verify=True)
    assert_same(reopened, packed)
    assert reopened.ids() == [f"d{n}" for n in range(11)]
    assert reopened.manifest["provenance"] == {"origin": "test"}


def test_bits_survive(tmp_path: Path) -> None:
    # Denormals, negative zero and the largest numbers, as bits.
    bits = torch.tensor([[0x0001, 0x8000, 0x7F7F, 0xFF7F, 0x0080, 0x3F80]], dtype=torch.int32).to(torch.uint16)
    packed = Packed(bits.view(torch.bfloat16), torch.tensor([0, 1]))
    loaded = fill(tmp_path / "entry", packed).load().values
    assert torch.equal(loaded.view(torch.int16), packed.values.view(torch.int16))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1]], ids=str)
def test_nothing_to_store(tmp_path: Path, lengths: list[int]) -> None:
    packed = tokens(lengths)
    entry = fill(tmp_path / "entry", packed)
    assert_same(entry, packed)
    blocks = list(entry.blocks())
    assert sum(len(block) for block in blocks) == len(lengths)
    open_entry(tmp_path / "entry", verify=True)
    assert len(list((tmp_path / "entry").glob("*.h5"))) == (1 if lengths else 0)


def test_views_other_strides_and_gradients_are_stored_by_value(tmp_path: Path) -> None:
    wide = torch.randn(40, 48)
    values = wide[:, ::2].requires_grad_()
    packed = Packed.view(values, torch.tensor([30, 0, 7]), torch.tensor([10, 5, 0], dtype=torch.int64))
    loaded = fill(tmp_path / "entry", packed).load()
    assert torch.equal(loaded.values, torch.cat([wide[30:40, ::2], wide[:5, ::2]]))
    assert loaded.lengths.tolist() == [10, 5, 0]


def test_ids_are_any_text(tmp_path: Path) -> None:
    ids = ["", "ä" * 100, "a b\tc", "日本語", "'\"\\", " x "]
    entry = fill(tmp_path / "entry", tokens([1] * 6), ids=ids, documents_per_shard=4)
    assert entry.ids() == ids


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", "x" * 5000], ids=["NUL", "surrogate", "long"])
def test_ids_that_cannot_be_stored(tmp_path: Path, bad: str) -> None:
    with pytest.raises(DataError, match="id "):
        fill(tmp_path / "entry", tokens([1, 1]), ids=["ok", bad])
    assert not (tmp_path / "entry").exists()


@pytest.mark.parametrize("max_bytes", [1, 48, 49, 480, 5000, 1 << 20])
def test_blocks_are_whole_documents_in_order(tmp_path: Path, max_bytes: int) -> None:
    packed = tokens(RAGGED)  # 48 bytes a token
    entry = fill(tmp_path / "entry", packed, documents_per_shard=5)
    blocks = list(entry.blocks(max_bytes))
    assert torch.equal(torch.cat([block.values for block in blocks]), packed.values)
    assert [int(length) for block in blocks for length in block.lengths] == RAGGED
    for block in blocks:
        assert block.offsets is not None
        assert int(block.offsets[0]) == 0
        assert block.values.nbytes <= max_bytes or int((block.lengths > 0).sum()) == 1
    if max_bytes == 1 << 20:
        assert len(blocks) == 1  # blocks do not end where shards do


def test_blocks_own_their_memory(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", tokens(RAGGED))
    first, second = entry.blocks(), entry.blocks()
    next(first).values.zero_()
    assert bool(next(second).values.any())


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_blocks_of_no_bytes(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(UsageError, match="max_bytes"):
        fill(tmp_path / "entry", tokens([1])).blocks(max_bytes)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=25),
    per_shard=st.integers(1, 30),
    chunk=st.integers(1, 30),
    max_bytes=st.integers(1, 4000),
    dim=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_any_cut_gives_the_same_tokens(
    lengths: list[int], per_shard: int, chunk: int, max_bytes: int, dim: int, dtype: torch.dtype
) -> None:
    packed = tokens(lengths, dim, dtype)
    with tempfile.TemporaryDirectory() as folder:
        entry = fill(Path(folder), packed, documents_per_shard=per_shard, chunk=chunk)
        assert_same(entry, packed)
        blocks = list(entry.blocks(max_bytes))
        entry.verify()
    values = torch.cat([torch.empty(0, dim, dtype=dtype), *(block.values for block in blocks)])
    assert torch.equal(values, packed.values)
    assert [int(length) for block in blocks for length in block.lengths] == lengths


@pytest.mark.parametrize(("count", "first"), [(511, 511), (513, 512), (512 * 64 + 1, 513), (65536 * 64 + 1, 65536)])
def test_default_documents_per_shard(tmp_path: Path, count: int, first: int) -> None:
    class StopError(Exception):
        pass

    def encode(start: int, stop: int) -> Packed:
        raise StopError

    with pytest.raises(StopError):
        fill(tmp_path, tokens([]), ids=["x"] * count, encode=encode)
    boundaries = json.loads((tmp_path / "manifest.json").read_text())["boundaries"]
    assert boundaries[:2] == [0, first]
    assert boundaries[-1] == count


def test_format_on_disk(tmp_path: Path) -> None:
    packed = tokens([100] * 6, dtype=torch.bfloat16)
    fill(tmp_path / "entry", packed, documents_per_shard=4)
    assert sorted(os.listdir(tmp_path / "entry")) == [".lock", "00000.h5", "00001.h5", "manifest.json"]
    manifest = json.loads((tmp_path / "entry" / "manifest.json").read_text())
    assert manifest["format"] == FORMAT == "maxsim-eval/cache/1"
    assert manifest["key"] == "0123456789abcdef"
    assert manifest["boundaries"] == [0, 4, 6]
    assert (manifest["documents"], manifest["dim"], manifest["dtype"]) == (6, 24, "bfloat16")
    path = tmp_path / "entry" / "00000.h5"
    with h5py.File(path) as file:
        values = file["values"]
        assert values.dtype == np.uint16
        assert values.chunks is None
        assert values.id.get_offset() % 4096 == 0
        assert values.id.get_offset() + values.nbytes == path.stat().st_size  # the end: nothing has to be moved for them
        assert torch.equal(torch.from_numpy(values[:]).view(torch.bfloat16), packed.values[:400])
        assert file["offsets"].dtype == np.int64
        assert file["offsets"][:].tolist() == [0, 100, 200, 300, 400]
        assert file["ids"].asstr()[:].tolist() == ["d0", "d1", "d2", "d3"]
        assert file["running_crc32"].attrs["stripe_tokens"] == (16 << 10) // 48
        attributes = dict(file.attrs)
    assert attributes["format"].decode() == FORMAT
    assert attributes["dtype"].decode() == "bfloat16"
    assert (attributes["shard"], attributes["start"], attributes["stop"], attributes["dim"]) == (0, 0, 4, 24)


def test_stripes_cross_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.cache.stripes.BYTES", 1000)  # 20 tokens of 48 bytes
    monkeypatch.setattr("maxsim_eval.cache.stripes._ROWS", 1)
    packed = tokens(RAGGED)
    entry = fill(tmp_path / "entry", packed, chunk=2)
    entry.verify()
    assert len(entry.shards[0].crcs) == -(-sum(RAGGED) // 20)


def rewrite(path: Path, **storage) -> None:
    """The same shard with its values stored another way, as h5repack would."""
    other = path.with_suffix(".new")
    with h5py.File(path) as source, h5py.File(other, "w") as target:
        target.attrs.update(source.attrs)
        for name in ("offsets", "ids", "running_crc32"):
            source.copy(name, target)
        target.create_dataset("values", data=source["values"][:], **storage)
    other.replace(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compressed_shard_is_read_with_one_warning(tmp_path: Path, dtype: torch.dtype) -> None:
    packed = tokens(RAGGED, dtype=dtype)
    fill(tmp_path / "entry", packed, documents_per_shard=4)
    for number in (0, 2):
        rewrite(tmp_path / "entry" / f"0000{number}.h5", chunks=(7, 24), compression="gzip")
    with pytest.warns(UserWarning, match=r"2 shards \(00000.h5, ...\) are chunked or compressed") as caught:
        entry = open_entry(tmp_path / "entry", verify=True)
    assert len(caught) == 1
    assert_same(entry, packed)
    assert torch.equal(torch.cat([block.values for block in entry.blocks(500)]), packed.values)


def test_arguments_that_cannot_work(tmp_path: Path) -> None:
    for name, bad in {"dtype": torch.float64, "dim": 0, "documents_per_shard": 0, "chunk": 0}.items():
        with pytest.raises(UsageError, match=name):
            fill(tmp_path / "e", tokens([1, 2]), **{name: bad})
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tokens([1, 2, 3]), "gave 3 embeddings for documents 0 to 2"),
        (tokens([1]), "gave 1 embeddings for documents 0 to 2"),
        (tokens([1, 2], dim=8), "got dim 8"),
        (tokens([1, 2], dtype=torch.float32), "torch.float32"),
    ],
    ids=["more", "fewer", "dim", "dtype"],
)
def test_embeddings_that_are_not_what_was_promised(tmp_path: Path, given: Packed, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        fill(tmp_path / "entry", tokens([1, 2]), encode=lambda start, stop: given)
    assert not list((tmp_path / "entry").glob("*.h5"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_embeddings_are_refused_with_the_document(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    packed = tokens([3, 0, 4, 0, 0, 2], dtype=dtype)
    packed.values[5, 7] = bad
    with pytest.raises(DataError, match="token 2 of 'd2' holds NaN or infinity"):
        fill(tmp_path / "entry", packed, chunk=1)
    assert sorted(os.listdir(tmp_path / "entry")) == [".lock", "manifest.json"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_non_finite_number_is_found_wherever_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    for place in [*range(0, 1000, 13), 999]:
        values = torch.randn(40, 25).to(dtype)
        values.view(-1)[place] = float("nan")
        with pytest.raises(DataError, match=f"of 'd{place // 25}' holds NaN"):
            fill(tmp_path / "entry", Packed(values, torch.arange(41)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_infinity_and_nan_is_found_by_its_bits(dtype: torch.dtype) -> None:
    """All 65,536 halves; of float32, the halves' bits in its upper and lower part."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    every = bits.to(torch.int16).view(dtype) if dtype.itemsize == 2 else torch.cat([bits << 16, bits]).view(dtype)
    finite = torch.isfinite(every)
    assert _all_finite(every[finite].reshape(1, -1))
    assert not any(_all_finite(value.reshape(1, 1)) for value in torch.cat([every[every.isinf()], every[~finite][::3]]))
    assert _all_finite(every[:0].reshape(0, 4))
