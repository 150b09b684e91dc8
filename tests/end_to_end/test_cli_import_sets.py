"""`import` of folders, chunks and saved lists, up to an evaluation that loads no model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from maxsim_eval.cli_import import import_
from maxsim_eval.errors import DataError, UsageError

WIDTH = 16
DOCUMENTS = [f"d{n}" for n in range(1, 7)]  # those of the fixture `collection`
LENGTHS = [3, 2, 0, 4, 3, 1]


def tokens(seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(size, WIDTH, generator=generator), dim=1).bfloat16()


@pytest.fixture
def pets(collection: Callable[..., Path], tmp_path: Path) -> Path:
    """A dataset, document embeddings in a folder, query embeddings as a saved list (each query: its relevant document's)."""
    collection(tmp_path / "datasets" / "local" / "pets")
    (tmp_path / "pages").mkdir()
    rows = {name: tokens(n, size) for n, (name, size) in enumerate(zip(DOCUMENTS, LENGTHS, strict=True))}
    rows["d5"] = rows["d1"]
    for name, row in rows.items():
        torch.save(row, tmp_path / "pages" / f"{name}.pt")
    torch.save([rows["d1"], rows["d4"], rows["d6"]], tmp_path / "queries.pt")
    (tmp_path / "queries.ids.txt").write_text("q1\nq2\nq3\n")
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`command(arguments, cwd=folder)`: the command alone, errors as exceptions."""
    app = typer.Typer()
    app.command()(import_)

    def run(*arguments: str | Path, cwd: Path) -> str:
        with contextlib.chdir(cwd):
            app([*map(str, arguments), "--quiet"], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_a_folder_and_a_list_to_a_result(pets: Path, cli: Any) -> None:
    said = cli("import", "local", "pets", "queries.pt", "pages", "--encoder", "mine", "--quiet", cwd=pets).fine()
    assert "documents: 6 rows, 13 tokens, d = 16, torch.bfloat16" in said.out
    assert "1 of 6 rows have no token" in said.out
    cli("local", "pets", "--encoder", "mine", "--paths", "fp32,bf16", "--k", "6", "--quiet", cwd=pets).fine()
    (file,) = pets.rglob("result.json")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["encoder"]["origin"] == "imported"
    assert result["paths"]["fp32"]["metrics"]["MRR@10"] == 1.0


def test_chunks_by_option(pets: Path, command: Callable[..., str]) -> None:
    rows = [torch.load(pets / "pages" / f"{name}.pt", weights_only=True) for name in DOCUMENTS]
    torch.save(rows[:4], pets / "a_1.pt")
    torch.save(rows[4:], pets / "a_2.pt")
    (pets / "ids.txt").write_text("\n".join(DOCUMENTS))
    options = ("--documents", "a_1.pt", "--documents", "a_2.pt", "--document-ids", "ids.txt", "--queries", "queries.pt")
    out = command("local", "pets", *options, "--encoder", "mine", cwd=pets)
    assert "documents: 6 rows, 13 tokens" in out
    assert "queries: 3 rows, 8 tokens" in out
    assert "by order alone" not in out


def test_zeros_and_norms_by_option(pets: Path, command: Callable[..., str]) -> None:
    row = torch.load(pets / "pages" / "d1.pt", weights_only=True)
    torch.save(torch.cat([torch.zeros(2, WIDTH).bfloat16(), row * 3]), pets / "pages" / "d1.pt")
    with pytest.raises(DataError, match=r"pages: document embeddings: 5 of 15 tokens are no unit vectors"):
        command("local", "pets", "pages", "--encoder", "mine", "--require-normalised", cwd=pets)
    with pytest.raises(DataError, match=r"pages: document embeddings: 3 of 13 tokens are no unit vectors"):
        command("local", "pets", "pages", "--encoder", "mine", "--require-normalised", "--drop-zero-tokens", cwd=pets)
    assert not (pets / "embeddings_cache").exists()
    with pytest.warns(UserWarning, match=r"3 of 13 tokens are no unit vectors .*'colpali' stands for unit vectors"):
        out = command("local", "pets", "pages", "--encoder", "colpali", "--drop-zero-tokens", cwd=pets)
    assert "  note: embeddings: 2 all-zero tokens were dropped, as asked\n" in out


def test_options_that_cannot_be(pets: Path, command: Callable[..., str]) -> None:
    for options, text in (
        (("pages", "--queries", "queries.pt"), "one way or the other"),
        ((), "got no file"),
        (("pages", "--query-ids", "queries.ids.txt"), "got a file of query ids, but no embeddings of that role"),
    ):
        with pytest.raises(UsageError, match=text):
            command("local", "pets", *options, "--encoder", "mine", cwd=pets)
    assert not (pets / "embeddings_cache").exists()
