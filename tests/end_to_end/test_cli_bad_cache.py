"""Cache entries that are damaged, truncated, foreign or of another version are refused with their path, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

DATA = 3


@pytest.fixture
def cached(demo: Any, tmp_path: Path) -> Path:
    """A folder with the demo's data and cache."""
    return Path(demo.copy(tmp_path, "datasets", "embeddings_cache"))


def entry(folder: Path, role: str) -> Path:
    (found,) = (folder / "embeddings_cache" / "demo" / "small").glob(f"*-{role}-*")
    return found


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(cli: Any, clean: Callable[[Path], None], folder: Path, *texts: str) -> None:
    """The demo must be refused, and neither repair nor delete anything on its own."""
    before = snapshot(folder)
    cli("demo", "--quiet", cwd=folder).refused(DATA, *texts)
    clean(folder)
    assert snapshot(folder) == before


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("role", ["documents", "queries"])
def test_a_flipped_byte_in_the_ids(role: str, cached: Path, cli: Any, clean: Any) -> None:
    shard = entry(cached, role) / "00000.h5"
    flip(shard, shard.read_bytes().index(b"d007" if role == "documents" else b"q07") + 2)
    refused(cli, clean, cached, str(shard.relative_to(cached)), "damaged", "Remove the file")


def test_a_flipped_byte_in_the_offsets(cached: Path, cli: Any, clean: Any) -> None:
    shard = entry(cached, "documents") / "00000.h5"
    with h5py.File(shard) as file:
        position = file["offsets"].id.get_offset() + 8 * 150
    flip(shard, position)
    refused(cli, clean, cached, str(shard.relative_to(cached)), "damaged")


def test_a_flipped_byte_at_the_start(cached: Path, cli: Any, clean: Any) -> None:
    shard = entry(cached, "documents") / "00000.h5"
    flip(shard, 1)
    refused(cli, clean, cached, str(shard.relative_to(cached)), "not an HDF5 file")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_a_truncated_shard(keep: float, cached: Path, cli: Any, clean: Any) -> None:
    shard = entry(cached, "documents") / "00000.h5"
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep)])
    refused(cli, clean, cached, str(shard.relative_to(cached)))


def test_a_flipped_byte_in_the_manifest(cached: Path, cli: Any, clean: Any) -> None:
    manifest = entry(cached, "documents") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"dim": 128', b'"dim": 129'))
    refused(cli, clean, cached, str(manifest.relative_to(cached)), "damaged or edited")


def test_a_truncated_manifest(cached: Path, cli: Any, clean: Any) -> None:
    manifest = entry(cached, "documents") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    refused(cli, clean, cached, str(manifest.relative_to(cached)), "damaged")


def test_the_manifest_of_another_encoder(cached: Path, cli: Any, clean: Any) -> None:
    documents, queries = entry(cached, "documents"), entry(cached, "queries")
    shutil.copy(queries / "manifest.json", documents / "manifest.json")
    refused(cli, clean, cached, str(documents.relative_to(cached)), "key")


def test_the_shards_of_another_entry(cached: Path, cli: Any, clean: Any) -> None:
    documents, queries = entry(cached, "documents"), entry(cached, "queries")
    shutil.copy(queries / "00000.h5", documents / "00000.h5")
    refused(cli, clean, cached, str((documents / "00000.h5").relative_to(cached)))


@pytest.mark.parametrize("version", ["maxsim-eval/cache/2", "maxsim-eval/cache/0"])
def test_another_format_version(version: str, cached: Path, cli: Any, clean: Any) -> None:
    manifest = entry(cached, "documents") / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**content, "format": version}), encoding="utf-8")
    refused(cli, clean, cached, str(manifest.relative_to(cached)), repr(version), "'maxsim-eval/cache/1'")


def test_another_format_version_of_a_shard(cached: Path, cli: Any, clean: Any) -> None:
    shard = entry(cached, "documents") / "00000.h5"
    with h5py.File(shard, "r+") as file:
        file.attrs["format"] = "maxsim-eval/cache/2"
    refused(cli, clean, cached, str(shard.relative_to(cached)), "'maxsim-eval/cache/2'", "'maxsim-eval/cache/1'")


def test_what_the_message_says_helps(demo: Any, cached: Path, cli: Any) -> None:
    shard = entry(cached, "documents") / "00000.h5"
    good = shard.read_bytes()
    flip(shard, good.index(b"d007"))
    outcome = cli("demo", "--quiet", cwd=cached)
    assert "Remove the file to encode its documents again" in outcome.err
    shard.unlink()
    cli("demo", "--quiet", cwd=cached).fine()
    with h5py.File(shard) as file:
        ids = file["ids"][:].tolist()
    assert ids[7] == b"d007"
    result = json.loads((cached / "results" / "demo-small-lexical" / "result.json").read_text(encoding="utf-8"))
    assert result["paths"]["int8"]["metrics"] == demo.result["paths"]["int8"]["metrics"]


def test_an_edited_text_is_another_entry(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    corpus = {"d1": "red fox", "d2": "blue whale", "d4": "green frog"}
    qrels = (("q1", "d1", 1), ("q2", "d4", 1))
    options = ("local", "pets", "--paths", "fp32", "--k", "3", "--quiet")
    for text in ("green frog", "green frogs"):
        shutil.rmtree(tmp_path / "datasets", ignore_errors=True)
        collection(tmp_path / "datasets" / "local" / "pets", {**corpus, "d4": text}, qrels=qrels)
        cli(*options, cwd=tmp_path).fine()
    entries = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "embeddings_cache" / "local" / "pets").iterdir())
    assert entries == ["lexical-documents", "lexical-documents", "lexical-queries", "lexical-queries"]


@pytest.mark.parametrize("role", ["documents", "queries"])
@pytest.mark.parametrize("size", [1, 4096])
def test_damaged_values_are_not_scored(role: str, size: int, cached: Path, cli: Any, clean: Any) -> None:
    shard = entry(cached, role) / "00000.h5"
    data = bytearray(shard.read_bytes())
    data[-size:] = bytes(byte ^ 4 for byte in data[-size:])  # values are the end of a file
    shard.write_bytes(data)
    refused(cli, clean, cached, str(shard.relative_to(cached)), "damaged: tokens", "CRC-32", "Remove the file to encode")
    cli("demo", "--quiet", "--no-verify", cwd=cached).fine()
    report = cached / "results" / "demo-small-lexical"
    assert any("values not verified" in line for line in json.loads((report / "result.json").read_text())["task"]["warnings"])
    assert "values not verified" in (report / "report.md").read_text()
    shutil.rmtree(report)
    refused(cli, clean, cached, "CRC-32")  # and damaged it stays, for whoever looks


def test_damaged_codes_are_not_scored(cached: Path, cli: Any, clean: Any) -> None:
    folder = entry(cached, "documents")
    cli("convert", folder, "--to", "int8-token", "--quiet", cwd=cached).fine()
    flip(folder / "00000.int8-token.h5", -100)
    refused(cli, clean, cached, "00000.int8-token.h5", "damaged: tokens", "CRC-32", "run `evaluate.py convert` again")
