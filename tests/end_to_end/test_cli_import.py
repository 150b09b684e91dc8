"""Precomputed embeddings: `import`, then evaluation under the encoder's name, without any model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import torch

USAGE, DATA = 2, 3
WIDTH = 24


def tokens(size: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """`[size, WIDTH]` unit vectors."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal((size, WIDTH)).astype(np.float32))
    return torch.nn.functional.normalize(values, dim=1).to(dtype)


@pytest.fixture
def precomputed(torch_file: Callable[..., Path], tmp_path: Path) -> Path:
    """12 ragged documents (one empty, two equal) and 3 queries that repeat a document's tokens."""
    documents = {f"doc{n}": tokens(0 if n == 4 else 2 + n % 5, n) for n in range(12)}
    documents["doc9"] = documents["doc2"]
    queries = {f"query{n}": documents[f"doc{n}"][:2] for n in (2, 5, 7)}
    qrels = {"query2": {"doc9": 2, "doc2": 1}, "query5": {"doc5": 1, "doc0": 0}, "query7": {"doc7": 1}}
    return torch_file(tmp_path / "precomputed.pt", queries, documents, qrels)


def result_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("result.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def test_a_file_alone_becomes_a_local_dataset(precomputed: Path, cli: Any, tmp_path: Path) -> None:
    said = cli(
        "import", "local", "mine", precomputed, "--encoder", "colbertv2", "--revision", "r7", "--quiet", cwd=tmp_path
    ).fine()
    assert "queries: 3 rows, 6 tokens, d = 24, torch.float16" in said.out
    assert "documents: 12 rows" in said.out
    assert said.err == ""
    local = tmp_path / "datasets" / "local" / "mine"
    assert sorted(path.name for path in local.iterdir()) == ["corpus.jsonl", "origin.json", "qrels", "queries.jsonl"]
    paths = "fp32,fused-fp32,fp16,bf16,int8,int8-document,int8-corpus,fp8"
    cli("local", "mine", "--encoder", "colbertv2", "--paths", paths, "--k", "12", "--quiet", cwd=tmp_path).fine()
    result = result_of(tmp_path)
    assert result["encoder"] == {"name": "colbertv2", "revision": "r7", "dim": 24, "dtype": "float16", "origin": "imported"}
    for name, path in result["paths"].items():
        assert path["metrics"]["MRR@10"] == 1.0, name
        rows = (tmp_path / "results" / "local-mine-colbertv2" / "runs" / f"{name}.trec").read_text().splitlines()
        assert [row.split()[2] for row in rows[:2]] == ["doc2", "doc9"], "equal documents: the first in the corpus wins"
        assert len(rows) == 3 * 11, "the empty document is not retrieved"
    assert result["paths"]["fp16"]["parity"]["reference_reads_same_inputs"] is True
    assert result["paths"]["int8"]["parity"]["reference_reads_same_inputs"] is False


def test_other_encoders_do_not_see_what_was_imported(precomputed: Path, cli: Any, tmp_path: Path) -> None:
    cli("import", "local", "mine", precomputed, "--encoder", "colbertv2", "--quiet", cwd=tmp_path).fine()
    outcome = cli("local", "mine", "--encoder", "colpali", "--quiet", cwd=tmp_path)
    outcome.refused(DATA, "encoder colpali", "evaluate.py import", ways=True)
    cli("local", "mine", "--encoder", "colbertv3", "--quiet", cwd=tmp_path).refused(USAGE, "Did you mean", "colbertv2")
    assert not list(tmp_path.rglob("result.json"))


def test_embeddings_of_the_demos_texts(demo: Any, torch_file: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    folder = demo.copy(tmp_path, "datasets")
    data = folder / "datasets" / "demo" / "small"
    ids = {
        name: [json.loads(line)["_id"] for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("corpus", "queries")
    }
    documents = {name: tokens(1 + n % 3, n, torch.float32) for n, name in enumerate(ids["corpus"])}
    queries = {name: tokens(2, 1000 + n, torch.float32) for n, name in enumerate(ids["queries"])}  # one without judgements
    shuffled = dict(sorted(documents.items(), key=lambda item: hash(item[1].sum().item())))
    file = torch_file(tmp_path / "mine.pt", queries, shuffled)
    said = cli("import", "demo", "small", file, "--encoder", "mine", "--quiet", cwd=folder).fine()
    assert "queries: 40 rows" in said.out
    assert "1 queries without judgements in demo/small (test) were left out" in said.out
    cli("demo", "--encoder", "mine", "--quiet", "--k", "20", cwd=folder).fine()
    result = result_of(folder)
    assert result["encoder"]["name"] == "mine"
    assert result["task"]["document_tokens"] == sum(len(rows) for rows in documents.values())
    # One document by hand: the row found its own document although the file has another order.
    row = next(line.split() for line in open_lines(folder) if line.startswith("q00 ") and line.split()[3] == "1")
    score = (queries["q00"] @ documents[row[2]].T).amax(1).sum().item()
    assert float(row[4]) == pytest.approx(score, rel=1e-5)
    cli("demo", "--quiet", "--paths", "fp32", "--out", "lexical", cwd=folder).fine()  # the built-in encoder is still itself
    again = json.loads((folder / "lexical" / "result.json").read_text(encoding="utf-8"))
    assert again["paths"]["fp32"]["metrics"] == demo.result["paths"]["fp32"]["metrics"]


def open_lines(folder: Path) -> list[str]:
    (run,) = folder.rglob("fp32.trec")
    return run.read_text(encoding="utf-8").splitlines()


def test_only_one_side(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    collection(tmp_path / "datasets" / "local" / "pets")
    lengths = [2, 1, 0, 3, 2, 1]
    values = torch.cat([tokens(size, n, torch.float32) for n, size in enumerate(lengths)]).numpy()
    np.savez(tmp_path / "documents.npz", values=values, offsets=np.cumsum([0, *lengths]))
    said = cli("import", "local", "pets", "documents.npz", "--encoder", "mine", "--quiet", cwd=tmp_path).fine()
    assert "note: " in said.out
    assert "by order alone" in said.out
    outcome = cli("local", "pets", "--encoder", "mine", "--quiet", cwd=tmp_path)
    outcome.refused(DATA, "'mine'", "query embeddings", "import them too")
    assert not list(tmp_path.rglob("result.json"))


def test_a_second_file_needs_replace(precomputed: Path, torch_file: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    options = ("import", "local", "mine", "--encoder", "colbertv2", "--quiet")
    cli(*options, precomputed, cwd=tmp_path).fine()
    cli(*options, precomputed, cwd=tmp_path).fine()  # the same file: nothing to do
    content = torch.load(precomputed, weights_only=True)
    content["doc_embeddings"][3] = content["doc_embeddings"][3] * 0.5
    torch.save(content, tmp_path / "other.pt")
    cli(*options, "other.pt", cwd=tmp_path).refused(DATA, "--replace")
    cli(*options, "other.pt", "--replace", cwd=tmp_path).fine()
    entries = list((tmp_path / "embeddings_cache" / "local" / "mine").glob("*-documents-*"))
    assert len(entries) == 1


def test_what_somebody_writes_is_not_replaced(precomputed: Path, cli: Any, tmp_path: Path) -> None:
    options = ("import", "local", "mine", "--encoder", "colbertv2", "--quiet")
    cli(*options, precomputed, cwd=tmp_path).fine()
    folder = tmp_path / "embeddings_cache" / "local" / "mine"
    (old,) = folder.glob("*-queries-*")
    content = torch.load(precomputed, weights_only=True)
    content["query_embeddings"] = -content["query_embeddings"]
    torch.save(content, tmp_path / "other.pt")
    with filelock.FileLock(old / ".lock"):
        refused = cli(*options, "other.pt", "--replace", cwd=tmp_path)
        refused.refused(DATA, "the new embeddings are stored", old.name, "another process is writing")
        assert len(list(folder.glob("*-queries-*"))) == 2
    cli(*options, "other.pt", "--replace", cwd=tmp_path).fine()
    (new,) = folder.glob("*-queries-*")
    assert new != old


def test_a_bad_file_changes_nothing(precomputed: Path, cli: Any, tmp_path: Path) -> None:
    content = torch.load(precomputed, weights_only=True)
    content["doc_embeddings"][3][0, 0] = torch.nan
    torch.save(content, tmp_path / "nan.pt")
    precomputed.rename(tmp_path / "good.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:2000])
    for name, text in (("nan.pt", "'doc3'"), ("cut.pt", "damaged"), ("none.pt", "no such file")):
        cli("import", "local", "mine", name, "--encoder", "mine", "--quiet", cwd=tmp_path).refused(DATA, name, text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.pt", "good.pt", "nan.pt"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("import", "local", "mine", "--encoder", "x"), "got no file"),
        (("import", "local", "mine", "a.pt", "--queries", "b.pt", "--encoder", "x"), "one way or the other"),
        (("import", "loacl", "mine", "a.pt", "--encoder", "x"), "Did you mean 'local'"),
        (("import", "beir", "scifct", "a.pt", "--encoder", "x"), "Did you mean 'scifact'"),
        (("import", "local", "mine", "precomputed.pt", "--encoder", " "), "empty name"),
    ],
)
def test_arguments_that_cannot_work(arguments: tuple[str, ...], text: str, precomputed: Path, cli: Any, tmp_path: Path) -> None:
    cli(*arguments, cwd=tmp_path).refused(USAGE, text)
    assert [path.name for path in tmp_path.iterdir()] == ["precomputed.pt"]


def large(tmp_path: Path, torch_file: Callable[..., Path], cli: Any) -> Path:
    """Imported embeddings with components of 1e20: finite, and too large for nearly everything."""
    big = torch.full((1, WIDTH), 1e20)
    documents = {"a": torch.ones(2, WIDTH), "b": big, "c": torch.ones(1, WIDTH)}
    queries = {"q": torch.cat([big, -big]), "r": torch.ones(2, WIDTH)}
    file = torch_file(tmp_path / "big.pt", queries, documents, {"q": {"a": 1}, "r": {"a": 1}})
    cli("import", "local", "big", file, "--encoder", "big", "--quiet", cwd=tmp_path).fine()
    return tmp_path


def test_a_nan_score_names_query_and_document(torch_file: Callable[..., Path], cli: Any, clean: Any, tmp_path: Path) -> None:
    folder = large(tmp_path, torch_file, cli)
    options = ("local", "big", "--encoder", "big", "--k", "3", "--quiet", "--paths")
    text = "path fp32: NaN score for query 'q' and document 'b'"
    cli(*options, "fp32,int8", cwd=folder).refused(
        DATA, text, "the embeddings are finite, but with components up to 1e+20", "normalise them"
    )
    clean(folder)
    assert not (folder / "results").exists()


@pytest.mark.parametrize("path", ["fp32", "fused-fp32", "bf16"])
def test_an_infinite_score_is_refused(path: str, torch_file: Callable[..., Path], cli: Any, clean: Any, tmp_path: Path) -> None:
    big = torch.full((2, WIDTH), 3e19)
    ones = torch.ones(2, WIDTH)
    file = torch_file(tmp_path / "big.pt", {"q": big, "r": ones}, {"a": ones, "b": big}, {"q": {"a": 1}, "r": {"a": 1}})
    cli("import", "local", "big", file, "--encoder", "big", "--quiet", cwd=tmp_path).fine()
    said = ("infinite score for query 'q' and document 'b'", "the embeddings are finite", "up to 3e+19", "scale them")
    options = ("local", "big", "--encoder", "big", "--k", "2", "--quiet", "--paths", path)
    cli(*options, cwd=tmp_path).refused(DATA, f"path {path}", *said)
    cli(*options, cwd=tmp_path).refused(DATA, *said)  # nothing of the first try is taken up
    clean(tmp_path)


def test_what_does_not_fit_fp16_is_refused(torch_file: Callable[..., Path], cli: Any, clean: Any, tmp_path: Path) -> None:
    folder = large(tmp_path, torch_file, cli)
    cli("local", "big", "--encoder", "big", "--k", "3", "--quiet", "--paths", "fp16", cwd=folder).refused(
        DATA, "FP16", "use bf16"
    )
    clean(folder)


@pytest.mark.parametrize("path", ["int8-document", "int8-corpus", "fp8", "fused-fp32"])
def test_what_no_scale_can_hold_is_refused(
    path: str, torch_file: Callable[..., Path], cli: Any, clean: Any, tmp_path: Path
) -> None:
    folder = large(tmp_path, torch_file, cli)
    cli("local", "big", "--encoder", "big", "--k", "3", "--quiet", "--paths", path, cwd=folder).refused(DATA, path)
    clean(folder)
