"""What `inspect` says of an entry is what numpy finds in its values; reading is flat, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from maxsim_eval.cache import inspecting
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.inspecting import inspect_entry
from maxsim_eval.errors import CacheError
from maxsim_kernels import Packed, pack, quantize_int8
from stored_cases import filled

LENGTHS = [5, 0, 40, 1, 7, 12, 3, 130, 0, 9]
DIM = 16
PROVENANCE = {
    "encoder": "letters",
    "revision": "r1",
    "source": "local",
    "dataset": "set",
    "role": "document",
    "origin": "encoded",
}


def packed(dtype: torch.dtype = torch.float16) -> Packed:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.nn.functional.normalize(torch.randn(n, DIM, generator=generator), dim=1) for n in LENGTHS]
    documents[2][3] = 0
    documents[2][5] *= 3
    documents[7][:10] *= 1.01
    return pack([document.to(dtype) for document in documents])


def fill(folder: Path, tokens: Packed) -> Entry:
    ids = [f"doc-{n}" for n in range(len(tokens))]
    return filled(folder, tokens, ids=ids, key="key-1", provenance=PROVENANCE, documents_per_shard=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_counts_are_those_of_numpy(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "_BLOCK_BYTES", 900)
    tokens = packed(dtype)
    entry = fill(tmp_path / "entry", tokens)
    found = inspect_entry(entry.folder, quiet=True)
    values = tokens.values.double().numpy()
    norms = np.sqrt((values**2).sum(1))
    assert found.norms is not None
    assert found.norms["min"] == pytest.approx(norms.min(), rel=1e-6, abs=1e-9)
    assert found.norms["mean"] == pytest.approx(norms.mean(), rel=1e-6)
    assert found.norms["max"] == pytest.approx(norms.max(), rel=1e-6)
    assert found.norms["near_one"] == pytest.approx((np.abs(norms - 1) <= 1e-3).mean(), abs=0.01)
    assert (found.documents, found.tokens, found.dim, found.shards) == (10, 207, DIM, 3)
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert (found.zero_tokens, found.nan_values, found.inf_values) == (1, 0, 0)
    assert found.lengths == {"min": 0, "mean": 20.7, "median": 6.0, "p95": np.percentile(LENGTHS, 95), "max": 130, "empty": 2}
    assert found.histogram == (
        (0, 0, 2),
        (1, 1, 1),
        (2, 3, 1),
        (4, 7, 2),
        (8, 15, 2),
        (16, 31, 0),
        (32, 63, 1),
        (64, 127, 0),
        (128, 255, 1),
    )
    assert found.provenance == PROVENANCE
    assert found.value_bytes == 207 * DIM * dtype.itemsize
    assert found.file_bytes == sum(path.stat().st_size for path in entry.folder.glob("*.h5"))
    assert found.verified is False


def test_copies_are_described(tmp_path: Path) -> None:
    tokens = packed()
    entry = fill(tmp_path / "entry", tokens)
    for name in ("int8-token", "int8-document", "int8-corpus"):
        convert_entry(entry, name, quiet=True)
    (entry.folder / "00001.int8-document.h5").unlink()
    damaged = entry.folder / "00002.int8-corpus.h5"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    token, document, corpus = inspect_entry(entry.folder, quiet=True).copies
    scales = quantize_int8(tokens, "token").scales
    assert token.scales == (float(scales.min()), float(scales.max()))
    assert (token.kind, token.granularity, token.affine, token.shards, token.state) == (
        "int8-token",
        "token",
        False,
        3,
        "complete",
    )
    assert token.ratio == pytest.approx(2 * DIM / (DIM + 2))
    assert document.shards == 2
    assert document.state.startswith("partial")
    assert "00002.int8-corpus.h5: truncated" in corpus.state
    with pytest.raises(CacheError, match="truncated"):
        inspect_entry(entry.folder, verify=True, quiet=True)


def test_scales_of_empty_documents_are_left_out(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    convert_entry(entry, "int8-document", quiet=True)
    (copy,) = inspect_entry(entry.folder, quiet=True).copies
    scales = quantize_int8(packed(), "document").scales[torch.tensor(LENGTHS) > 0]
    assert copy.scales == (float(scales.min()), float(scales.max()))


@pytest.mark.parametrize("name", ["00001.h5", "00001.int8-token.h5"])
def test_verify_reads_entry_and_copies(tmp_path: Path, name: str) -> None:
    entry = fill(tmp_path / "entry", packed())
    convert_entry(entry, "int8-token", quiet=True)
    assert inspect_entry(entry.folder, verify=True, quiet=True).verified is True
    path = entry.folder / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 4  # values, and codes, are the end of a file
    path.write_bytes(content)
    if "int8" in name:
        inspect_entry(entry.folder, quiet=True)  # described, not refused: only its scales are read
    with pytest.raises(CacheError, match=f"{name}: damaged: tokens 0 to 151 do not have"):
        inspect_entry(entry.folder, verify=True, quiet=True)


def test_nan_and_infinity_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No writer of ours stores them; another's file may hold them."""
    tokens = packed(torch.float32)
    tokens.values[3, :4] = torch.nan
    tokens.values[9, 1] = -torch.inf
    tokens.values[50, 2] = 1e30  # its square is no FP32 number; it is finite all the same
    monkeypatch.setattr("maxsim_eval.cache.shards._all_finite", lambda *_: True)  # a writer without the check
    try:
        entry = fill(tmp_path / "entry", tokens)
    finally:
        monkeypatch.undo()
    found = inspect_entry(entry.folder, quiet=True)
    assert (found.nan_values, found.inf_values) == (4, 1)
    assert found.norms is not None
    assert found.norms["max"] == pytest.approx(1e30)
    json.dumps(found.as_json(), allow_nan=False)


def test_partial_entry_is_refused(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    (entry.folder / "00001.h5").unlink()
    with pytest.raises(CacheError, match=r"partial: 1 of 3 shards are missing"):
        inspect_entry(entry.folder)


def test_entry_without_documents(tmp_path: Path) -> None:
    found = inspect_entry(fill(tmp_path / "entry", pack([], dim=DIM, dtype=torch.float16)).folder, quiet=True)
    assert (found.documents, found.tokens, found.norms, found.histogram, found.lengths) == (0, 0, None, (), {})
    found.render(Console(quiet=True))
    json.dumps(found.as_json(), allow_nan=False)


def test_render_says_what_json_says(tmp_path: Path) -> None:
    entry = fill(tmp_path / "entry", packed())
    convert_entry(entry, "int8-token", quiet=True)
    found = inspect_entry(entry.folder, quiet=True)
    console = Console(width=200)
    with console.capture() as captured:
        found.render(console)
    text = captured.get()
    assert str(open_entry(entry.folder).folder) in text.replace("\n", "")
    for part in (
        "letters r1 (encoded)",
        "10 in 3 shards",
        "207 of 16 x float16",
        "128 to 255",
        "int8-token",
        "1.78x",
        "complete",
    ):
        assert part in text, part
    assert found.as_json()["schema"] == "maxsim-eval/inspect/1"


def test_queries_are_called_queries_and_one_shard_is_one(tmp_path: Path) -> None:
    found = inspect_entry(fill(tmp_path / "entry", packed()).folder, quiet=True)
    console = Console(width=200)
    with console.capture() as captured:
        replace(found, provenance={**found.provenance, "role": "query"}, shards=1).render(console)
    lines = [line.split() for line in captured.get().splitlines()]
    assert any(words[:5] == ["queries", "10", "in", "1", "shard,"] for words in lines)
    assert ["tokens", "queries"] in lines
    assert not any("documents" in words for words in lines)
