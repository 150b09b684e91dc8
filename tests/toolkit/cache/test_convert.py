"""Quantised copies: the codes and scales of quantising at once, to the last bit, however they are cut, written and read."""

from __future__ import annotations

import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from maxsim_eval.cache import converting, stripes
from maxsim_eval.cache.converting import Converted, convert_entry
from maxsim_eval.cache.copies import Quantised, quantised
from maxsim_eval.cache.copy_shards import KINDS, Kind, Tokens
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, device_blocks, pack, quantize_fp8, quantize_int8
from maxsim_kernels.search import residuals_of
from stored_cases import filled

LENGTHS = [5, 0, 40, 1, 7, 12, 3, 0, 0, 9, 30, 2, 0]
DIM = 24
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def packed(dtype: torch.dtype = torch.float16) -> Packed:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randn(length, DIM, generator=generator).mul(length + 1.0).to(dtype) for length in LENGTHS]
    documents[2][7] = 0  # a zero token
    documents[4][0, :5] = 1e-7  # scales among FP16's subnormals
    return pack(documents)


def fill(folder: Path, tokens: Packed, split: int = 5) -> Entry:
    ids = [f"doc-{n}" for n in range(len(tokens))]
    return filled(folder, tokens, ids=ids, key="key-1", provenance={"role": "document"}, documents_per_shard=split)


def convert(entry: Entry, name: str) -> Quantised:
    return convert_entry(entry, name, quiet=True).copy


def at_once(tokens: Packed, kind: Kind) -> Tokens:
    """The whole corpus quantised by one call of the operator."""
    if kind.dtype == "int8":
        return quantize_int8(tokens, kind.granularity, affine=kind.affine)
    return quantize_fp8(tokens, kind.granularity)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def joined(blocks: list[Tokens], kind: Kind) -> dict[str, torch.Tensor]:
    found = {"codes": torch.cat([bits(block.token_values) for block in blocks])}
    for name in kind.columns:
        parts = [getattr(block, name) for block in blocks]
        found[name] = parts[0] if kind.granularity == "corpus" else torch.cat(parts)
        assert all(part.dtype == torch.float16 for part in parts)
        if kind.granularity == "corpus":
            assert all(torch.equal(part, parts[0]) for part in parts)
    return found


def require_same(blocks: list[Tokens], want: Tokens, kind: Kind) -> None:
    got = joined(blocks, kind)
    assert torch.equal(got["codes"], bits(want.token_values))
    for name in kind.columns:
        assert torch.equal(got[name], getattr(want, name)), name
    assert torch.equal(torch.cat([block.codes.lengths for block in blocks]), want.codes.lengths)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_codes_and_scales_are_those_of_quantising_at_once(
    tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converting, "_PIECE_BYTES", 700)  # several pieces a shard
    monkeypatch.setattr(stripes, "BYTES", 11 * DIM)  # pieces and stripes meet nowhere
    monkeypatch.setattr(stripes, "_ROWS", 1)
    tokens, kind = packed(dtype), KINDS[name]
    copy = convert(fill(tmp_path / "entry", tokens), name)
    want = at_once(tokens, kind)
    for options in (
        {},
        {"max_bytes": 1},
        {"max_bytes": 20 * DIM, "readers": 3},
        {"spans": [(0, 4), (4, 4), (4, 11), (11, 13)]},
    ):
        blocks = list(copy.blocks(**options))
        require_same(blocks, want, kind)
        assert {type(block) for block in blocks} == {Int8Tokens if kind.dtype == "int8" else Fp8Tokens}
        assert {block.granularity for block in blocks} == {kind.granularity}
    assert all((block.codes.lengths > 0).sum() <= 1 for block in copy.blocks(max_bytes=1))  # type: ignore[union-attr]
    assert (copy.scale() is not None) == (kind.granularity == "corpus")
    copy.verify()
    assert want.dequantize().values.shape == (sum(LENGTHS), DIM)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["int8-token", "int8-document", "int8-corpus", "fp8-document"])
def test_device_blocks_take_them(tmp_path: Path, name: str) -> None:
    tokens, kind = packed(), KINDS[name]
    copy = convert(fill(tmp_path / "entry", tokens), name)
    blocks = [block for block in device_blocks(copy.blocks(max_bytes=300), "cpu", queries=3) if len(block)]
    require_same(blocks, at_once(tokens, kind), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["int8-token", "int8-document", "int8-document-affine", "fp8-document"])
def test_selection(tmp_path: Path, name: str) -> None:
    tokens, kind = packed(), KINDS[name]
    entry = fill(tmp_path / "entry", tokens)
    convert(entry, name)
    rows = np.array([0, 2, 3, 7, 9, 12])
    found = quantised(Selection(entry, rows), name)
    assert found is not None
    require_same(list(found.blocks(max_bytes=500)), at_once(tokens.select(torch.from_numpy(rows)).compact(), kind), kind)
    require_same(list(found.blocks([(1, 5)])), at_once(tokens.select(torch.from_numpy(rows[1:5])).compact(), kind), kind)


def test_a_corpus_scale_is_not_that_of_a_part(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    convert(entry, "int8-corpus")
    assert quantised(entry, "int8-corpus") is not None
    assert quantised(Selection(entry, np.arange(4)), "int8-corpus") is None


def test_float_shards_are_left_as_they_are(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    before = {path.name: path.read_bytes() for path in entry.folder.glob("*.h5")}
    for name in KINDS:
        convert(entry, name)
    assert {name: (entry.folder / name).read_bytes() for name in before} == before
    again = open_entry(entry.folder, verify=True)
    assert again.stamp() == entry.stamp()


def test_layout_of_the_file(tmp_path: Path) -> None:
    """As embeddings_cache/README.md describes it, and as h5py alone reads it."""
    tokens = packed()
    entry = fill(tmp_path / "entry", tokens)
    convert(entry, "int8-token-affine")
    want = quantize_int8(tokens, "token", affine=True)
    path = entry.folder / "00001.int8-token-affine.h5"
    first, last = (int(tokens.offsets[n]) for n in (5, 10))  # type: ignore[index]
    with h5py.File(path) as file:
        assert set(file) == {"codes", "scales", "offset", "errors", "norms", "running_crc32"}
        assert np.array_equal(file["codes"][:], want.token_values[first:last].numpy())
        assert np.array_equal(file["scales"][:], want.scales[first:last].numpy())
        assert want.offset is not None
        assert np.array_equal(file["offset"][:], want.offset[first:last].numpy())
        beside = residuals_of(tokens, want)
        for name in ("errors", "norms"):
            assert np.array_equal(file[name][:], getattr(beside, name)[5:10].numpy())
            assert file[name].dtype == np.float32
        assert file["codes"].dtype == np.int8
        assert file["codes"].chunks is None
        assert file["scales"].dtype == np.float16
        assert file["running_crc32"].attrs["stripe_tokens"] == stripes.BYTES // DIM
        assert file.attrs["source_sha256"].decode() == entry.shards[1].metadata_sha256
        assert file.attrs["granularity"] == b"token"
        assert file["codes"].id.get_offset() + (last - first) * DIM == path.stat().st_size  # the end of the file


def test_large_codes_lie_on_a_page(tmp_path: Path) -> None:
    tokens = pack([torch.ones(300, DIM, dtype=torch.float16)])
    entry = fill(tmp_path / "entry", tokens)
    convert(entry, "int8-token")
    with h5py.File(entry.folder / "00000.int8-token.h5") as file:
        assert file["codes"].id.get_offset() % 4096 == 0


def test_storage_ratio_of_the_paper(tmp_path: Path) -> None:
    tokens = pack([torch.randn(n, 128).half() for n in (400, 300)])
    entry = fill(tmp_path / "entry", tokens)
    done = convert_entry(entry, "int8-token", quiet=True)
    assert done.ratio == pytest.approx(256 / 130)
    assert f"{done.ratio:.2f}" == "1.97"
    size = (entry.folder / "00000.int8-token.h5").stat().st_size
    assert done.copy.stored_bytes == 700 * 130
    assert done.copy.stored_bytes < size < done.copy.stored_bytes + 3 * 4096  # what the file takes beside is small
    assert convert_entry(entry, "int8-corpus", quiet=True).copy.stored_bytes == 700 * 128 + 2
    assert convert_entry(entry, "int8-document-affine", quiet=True).copy.stored_bytes == 700 * 128 + 2 * 2 * 2


def test_memory_does_not_grow_with_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "_PIECE_BYTES", 64 * DIM * 2)
    seen: list[int] = []
    real = Kind.quantise

    def noted(self: Kind, tokens: Packed, scale: torch.Tensor | None = None) -> Tokens:
        seen.append(len(tokens.values))
        return real(self, tokens, scale)

    monkeypatch.setattr(Kind, "quantise", noted)
    entry = fill(tmp_path / "entry", pack([torch.ones(32, DIM).half()] * 40), split=40)
    convert(entry, "int8-token")
    assert seen == [64] * 20  # one shard of 1280 tokens, never more than a piece of it


def test_corpus_scale_takes_one_pass_and_none_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    real = converting.Corpus.absmax

    def noted(self: converting.Corpus) -> float:
        passes.append(1)
        return real(self)

    monkeypatch.setattr(converting.Corpus, "absmax", noted)
    entry = fill(tmp_path / "entry", packed())
    scale = convert(entry, "int8-corpus").scale()
    assert passes == [1]
    assert scale == float(quantize_int8(packed(), "corpus").scales)
    (entry.folder / "00001.int8-corpus.h5").unlink()
    done = convert_entry(entry, "int8-corpus", quiet=True)
    assert (done.kept, done.written, done.replaced) == (2, 1, 0)
    assert passes == [1]
    require_same(list(done.copy.blocks()), quantize_int8(packed(), "corpus"), KINDS["int8-corpus"])


def test_whole_copy_is_not_written_again(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())

    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in entry.folder.glob("*.int8-token.h5")}

    first = convert_entry(entry, "int8-token", quiet=True)
    before = inodes()
    second = convert_entry(entry, "int8-token", quiet=True)
    assert inodes() == before
    assert [(done.kept, done.written, done.replaced) for done in (first, second)] == [(0, 3, 0), (3, 0, 0)]
    assert isinstance(second, Converted)
    assert second.copy.stamp() == first.copy.stamp()


def test_no_copy_no_reader(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    assert quantised(entry, "int8-token") is None
    with pytest.raises(UnknownNameError, match="int8-token"):
        quantised(entry, "int8-tokens")
    with pytest.raises(UnknownNameError, match="int8-document"):
        convert_entry(entry, "int8-documents")


def test_partial_copy_is_not_used_and_said(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    convert(entry, "int8-token")
    (entry.folder / "00002.int8-token.h5").unlink()
    with pytest.warns(UserWarning, match=r"int8-token copy is partial \(1 of 3 shards are missing\)"):
        assert quantised(entry, "int8-token") is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_bytes": 0}, "max_bytes: got 0"),
        ({"readers": 0}, "readers: got 0"),
        ({"spans": [(0, 14)]}, "documents: got 0 to 14"),
        ({"spans": [(3, 2)]}, "documents: got 3 to 2"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path: Path, options: dict, text: str) -> None:
    copy = convert(fill(tmp_path / "entry", packed()), "int8-token")
    with pytest.raises(UsageError, match=text):
        copy.blocks(**options)


@pytest.mark.parametrize("name", ["int8-token", "int8-token-affine", "int8-document", "int8-corpus", "fp8-document"])
def test_a_value_no_scale_can_hold(tmp_path: Path, name: str) -> None:
    tokens = packed(torch.float32)
    tokens.values[50, 3] = 3e38  # a token of document 4, in the first shard
    entry = fill(tmp_path / "entry", tokens)
    with pytest.raises(DataError, match=r"doc-4|FP16"):
        convert(entry, name)
    assert list(entry.folder.glob("*.tmp")) == []
    assert quantised(entry, name) is None


def test_entry_without_tokens_or_documents(tmp_path: Path) -> None:
    empty = pack([torch.zeros(0, DIM).half()] * 7)
    for name, kind in KINDS.items():
        copy = convert(fill(tmp_path / "empty", empty), name)
        require_same(list(copy.blocks()), at_once(empty, kind), kind)
        copy.verify()
    nothing = fill(tmp_path / "nothing", pack([], dim=DIM, dtype=torch.float16))
    with pytest.raises(DataError, match="holds no documents"):
        convert(nothing, "int8-token")


def test_threads_are_gone_when_reading_stops_early(tmp_path: Path) -> None:
    copy = convert(fill(tmp_path / "entry", packed()), "int8-token")
    blocks = copy.blocks(max_bytes=1, readers=3)
    next(blocks)
    assert any(thread.name.startswith("copy-reader") for thread in threading.enumerate())
    blocks.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("copy-reader") for thread in threading.enumerate())
