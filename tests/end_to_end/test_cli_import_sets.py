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
from PIL import Image

import datasets
from maxsim_eval.cache.sides import content_hash, find_imported
from maxsim_eval.cli.import_ import import_
from maxsim_eval.data.loading import load_task
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


# Which dataset, and which of its queries ------------------------------------------------------------------------------


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """`sets/pg`: three page images; one text query in `test`, two in `dev`, two pages in `pages`. Embeddings beside it."""
    folder = tmp_path / "sets" / "pg"
    (folder / "pages").mkdir(parents=True)
    (folder / "qrels").mkdir()
    for name, colour in (("a", "red"), ("b", "lime"), ("c", "blue")):
        Image.new("RGB", (4, 3), colour).save(folder / "pages" / f"{name}.png")
    (folder / "queries.jsonl").write_text("".join(f'{{"_id": "q{n}", "text": "text {n}"}}\n' for n in range(3)))
    for split, rows in (("test", ["q0 a"]), ("dev", ["q1 b", "q2 c"]), ("pages", ["a b", "b c"])):
        lines = ["query-id corpus-id score", *(f"{row} 1" for row in rows)]
        (folder / "qrels" / f"{split}.tsv").write_text("".join(line.replace(" ", "\t") + "\n" for line in lines))
    saved(tmp_path, "documents", ["a", "b", "c"])
    return tmp_path


def saved(folder: Path, name: str, ids: list[str]) -> None:
    torch.save([tokens(n, 2) for n in range(len(ids))], folder / f"{name}.pt")
    (folder / f"{name}.ids.txt").write_text("\n".join(ids))


def imported_queries(folder: Path, source: str, dataset: str, **options: Any) -> list[str] | None:
    """Ids of the query embeddings that an evaluation of this task would take from the cache; None: it finds none."""
    task = load_task(source, dataset, data_dir=folder / "sets", quiet=True, **options)
    content = content_hash(task.query_ids, task.queries)
    entry = find_imported(folder / "embeddings_cache", task.source, task.dataset, "mine", "query", content)
    return None if entry is None else entry.ids()


def test_the_split_of_a_folder_of_pages(album: Path, command: Callable[..., str]) -> None:
    saved(album, "queries", ["q2", "q1"])
    files = ("queries.pt", "documents.pt", "--encoder", "mine", "--data-dir", "sets")
    with pytest.raises(DataError, match=r"local/pg \(test\): 1 of 1 are missing"):
        command("local", "pg", *files, cwd=album)
    command("local", "pg", *files, "--split", "dev", cwd=album)
    assert imported_queries(album, "local", "pg", split="dev") == ["q1", "q2"]
    assert imported_queries(album, "local", "pg") is None


@pytest.mark.parametrize("absolute", [True, False])
def test_a_folder_of_pages_by_its_path(album: Path, command: Callable[..., str], absolute: bool) -> None:
    saved(album, "queries", ["q0"])
    place = album / "sets" / "pg" if absolute else "./sets/pg/"
    command("local", place, "queries.pt", "documents.pt", "--encoder", "mine", cwd=album)
    assert imported_queries(album, "local", "pg") == ["q0"]
    assert not (album / "datasets").exists()


def test_pages_as_queries(album: Path, command: Callable[..., str]) -> None:
    saved(album, "queries", ["b", "a"])
    files = ("queries.pt", "--encoder", "mine", "--data-dir", "sets")
    command("local", "pg", *files, "--page-queries", cwd=album)
    assert imported_queries(album, "local", "pg", queries="pages") == ["a", "b"]
    with pytest.raises(UsageError, match="source 'demo' has no such option"):
        command("demo", "small", *files, "--page-queries", cwd=album)


def test_pages_as_queries_are_evaluated(album: Path, cli: Any) -> None:
    saved(album, "queries", ["a", "b"])
    chosen = ("local", "pg", "--encoder", "mine", "--data-dir", "sets", "--queries", "pages", "--quiet")
    files = ("queries.pt", "documents.pt", "--encoder", "mine", "--data-dir", "sets")
    cli("import", "local", "pg", *files, "--page-queries", "--quiet", cwd=album).fine()
    result = json.loads(cli(*chosen, "--paths", "fp32", "--k", "3", "--json", cwd=album).fine().out)
    assert (result["task"]["split"], result["task"]["queries"]) == ("pages", 2)
    assert (album / "results" / "local-pg-pages-mine" / "result.json").is_file()
    assert cli("encode", *chosen, cwd=album).fine().out.count("was imported") == 2
    found = json.loads(cli("explain", *chosen, "--query", "a", "--json", cwd=album).fine().out)
    assert {one["split"] for one in found["documents"]} == {"pages"}


def test_a_wording_of_the_questions(
    tmp_path: Path, command: Callable[..., str], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    rows: dict[str, list[Any]] = {
        "id": ["0", "1"],
        "image": [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue")],
        "image_filename": ["a.png", "b.png"],
        "query": ["What is red?", "What is blue?"],
        **{f"rephrase_level_{n}": [f"Which is red? {n}", f"Which is blue? {n}"] for n in (1, 2, 3)},
    }
    kinds = {name: datasets.Image() if name == "image" else datasets.Value("string") for name in rows}
    (tmp_path / "sets" / "finreport").mkdir(parents=True)
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    table.to_parquet(tmp_path / "sets" / "finreport" / "test-00000-of-00001.parquet")
    saved(tmp_path, "queries", ["1", "0"])
    files = ("queries.pt", "--encoder", "mine", "--data-dir", "sets")
    command("real-mm-rag", "finreport", *files, "--rephrase", "2", cwd=tmp_path)
    found = [imported_queries(tmp_path, "real-mm-rag", "finreport", rephrase=level) for level in range(4)]
    assert found == [None, None, ["0", "1"], None]
    saved(tmp_path, "documents", ["a.png", "b.png"])
    command("real-mm-rag", "finreport", "documents.pt", *files[1:], cwd=tmp_path)
    chosen = ("--rephrase", "2", "--paths", "fp32", "--k", "2", "--json", "--quiet")
    result = json.loads(cli("real-mm-rag", "finreport", *files[1:], *chosen, cwd=tmp_path).fine().out)
    assert result["task"]["split"] == "test-rephrase-2"
    command("real-mm-rag", "finreport", *files, cwd=tmp_path)  # another wording is no rival
    assert imported_queries(tmp_path, "real-mm-rag", "finreport") == ["0", "1"]
    with pytest.raises(UsageError, match="rephrase level 4"):
        command("real-mm-rag", "finreport", *files, "--rephrase", "4", cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (("--split", "dev"), DataError, "local dataset 'new': no such folder"),
        (("--page-queries",), DataError, "local dataset 'new': no such folder"),
        (("--rephrase", "1"), UsageError, "rephrase 1: source 'local' has no such option"),
        (("--dataset-revision", "main"), UsageError, "revision 'main': source 'local' has no such option"),
    ],
)
def test_a_dataset_that_is_made_has_no_choices(
    pets: Path, command: Callable[..., str], options: tuple[str, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        command("local", "new", "queries.pt", "pages", "--encoder", "mine", *options, cwd=pets)
    assert not (pets / "datasets" / "local" / "new").exists()


def test_a_folder_of_embeddings_named_as_the_dataset(
    torch_file: Callable[..., Path], command: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    rows = {"d1": tokens(1, 2)}
    torch_file(tmp_path / "new" / "all.pt", {"q1": tokens(2, 1)}, rows, {"q1": {"d1": 1}})
    command("local", "new", "new/all.pt", "--encoder", "mine", cwd=tmp_path)
    assert (tmp_path / "datasets" / "local" / "new" / "corpus.jsonl").is_file()
    with pytest.raises(DataError, match=r"new/corpus\.jsonl: missing"):
        command("local", "./new", "new/all.pt", "--encoder", "mine", "--data-dir", "other", cwd=tmp_path)
