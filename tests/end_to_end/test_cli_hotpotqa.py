"""`evaluate.py beir hotpotqa` with no flag at all: a small set in HotpotQA's layout, ColBERTv2's embeddings imported or missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DATA = 3
WIDTH, QUERY_TOKENS, MOST, CHUNK = 128, 32, 180, 16  # ColBERTv2's: every query is filled up to 32 tokens
DOCUMENTS = {str(4_100_000 + 37 * n): f"Paragraph {n}" for n in range(60)}
HOPS = {f"5a8b57f25542995d1e6f13{n:02d}": (n, 59 - 2 * n) for n in range(8)}  # a question needs two paragraphs
STRANGER = "5ae0000000000000000000ff"  # a question of another split: no judgement in test


def unit(values: np.ndarray) -> torch.Tensor:
    """FP16 unit vectors."""
    return torch.nn.functional.normalize(torch.from_numpy(values.astype(np.float32)), dim=1).half()


def document_tokens() -> dict[str, torch.Tensor]:
    """1 to 180 tokens a paragraph, unit vectors."""
    random = np.random.default_rng(0)
    lengths = [1, MOST, *random.integers(20, MOST, len(DOCUMENTS) - 2)]
    return {name: unit(random.standard_normal((n, WIDTH))) for name, n in zip(DOCUMENTS, lengths, strict=True)}


def query_tokens(documents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """32 tokens a question, close to tokens of its two paragraphs; the last question's second paragraph cannot be found."""
    random = np.random.default_rng(1)
    names, found = list(documents), {}
    for query, hops in HOPS.items():
        seen = hops[:1] if query == last() else hops
        sources = [documents[names[hop]].numpy() for hop in seen]
        rows = [sources[n % len(sources)][random.integers(len(sources[n % len(sources)]))] for n in range(QUERY_TOKENS)]
        found[query] = unit(np.stack(rows) + 0.02 * random.standard_normal((QUERY_TOKENS, WIDTH)))
    return found | {STRANGER: unit(random.standard_normal((QUERY_TOKENS, WIDTH)))}


def last() -> str:
    return list(HOPS)[-1]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def hotpotqa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `datasets/beir/hotpotqa` as BEIR's archive has it, and no checkpoint anywhere near."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "datasets" / "beir" / "hotpotqa"
    (folder / "qrels").mkdir(parents=True)
    source = "https://en.wikipedia.org/wiki?curid="
    corpus = [
        {"_id": name, "title": title, "text": f"{title} is about a place.", "metadata": {"url": source + name}}
        for name, title in DOCUMENTS.items()
    ]
    write_lines(folder / "corpus.jsonl", corpus)
    queries = [{"_id": name, "text": f"What joins {name}?", "metadata": {"answer": "yes"}} for name in (*HOPS, STRANGER)]
    write_lines(folder / "queries.jsonl", queries)
    names = list(DOCUMENTS)
    rows = [f"{query}\t{names[hop]}\t1\n" for query, hops in HOPS.items() for hop in hops]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows), encoding="utf-8")
    (folder / "qrels" / "dev.tsv").write_text(f"query-id\tcorpus-id\tscore\n{STRANGER}\t{names[3]}\t1\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def saved(hotpotqa: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Embeddings as a ColBERTv2 job leaves them: one file of queries, padded chunks of documents in the job's own order."""
    documents = document_tokens()
    queries = query_tokens(documents)
    torch.save({"query_embeddings": torch.stack(list(queries.values())), "query_ids": list(queries)}, hotpotqa / "queries.pt")
    shuffled = [list(documents)[n] for n in np.random.default_rng(2).permutation(len(documents))]
    for number, start in enumerate(range(0, len(shuffled), CHUNK)):
        names = shuffled[start : start + CHUNK]
        rows = [documents[name] for name in names]
        chunk = {
            "doc_embeddings": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "doc_lengths": torch.tensor([len(row) for row in rows]),
            "doc_ids": names,
        }
        torch.save(chunk, hotpotqa / f"documents_{number:03d}.pt")
    return {"query": queries, "document": documents}


def reference_ranking(saved: dict[str, dict[str, torch.Tensor]], query: str) -> list[tuple[str, float]]:
    """MaxSim of one query in FP64, best first."""
    tokens = saved["query"][query].double()
    scores = {name: float((tokens @ rows.double().T).amax(1).sum()) for name, rows in saved["document"].items()}
    return sorted(scores.items(), key=lambda pair: -pair[1])


def test_imported_then_evaluated_without_a_flag(hotpotqa: Path, saved: Any, cli: Any) -> None:
    chunks = sorted(path.name for path in hotpotqa.glob("documents_*.pt"))
    said = cli("import", "beir", "hotpotqa", "queries.pt", *chunks, "--encoder", "colbertv2", cwd=hotpotqa).fine()
    assert "queries: 8 rows, 256 tokens, d = 128, torch.float16" in said.out
    tokens = sum(len(rows) for rows in saved["document"].values())
    assert f"documents: 60 rows, {tokens} tokens, d = 128, torch.float16" in said.out
    assert "1 queries without judgements in beir/hotpotqa (test) were left out" in said.out

    outcome = cli("beir", "hotpotqa", cwd=hotpotqa).fine()
    folder = hotpotqa / "results" / "beir-hotpotqa-colbertv2"
    assert "results/beir-hotpotqa-colbertv2/report.html" in outcome.out
    assert (folder / "report.md").is_file()
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["command"] == ["evaluate.py", "beir", "hotpotqa"]
    assert result["encoder"] == {"name": "colbertv2", "revision": "", "dim": 128, "dtype": "float16", "origin": "imported"}
    counts = ("queries", "query_tokens", "documents", "document_tokens", "judged_pairs")
    assert [result["task"][key] for key in counts] == [8, 256, 60, tokens, 16]
    assert any("5233329" in text.replace(",", "") for text in result["task"]["warnings"]), "this is not the set of the card"
    assert list(result["paths"]) == ["fp32", "fp16", "int8"]
    assert result["reference"] == "fp32"
    check_rankings(folder, saved)
    check_metrics(result)
    check_parity(result)


def check_rankings(folder: Path, saved: Any) -> None:
    lines = [line.split() for line in (folder / "runs" / "fp32.trec").read_text(encoding="utf-8").splitlines()]
    for query in HOPS:
        rows = [(row[2], float(row[4])) for row in lines if row[0] == query]
        expected = reference_ranking(saved, query)
        assert [name for name, _ in rows] == [name for name, _ in expected], query
        assert [score for _, score in rows] == pytest.approx([score for _, score in expected], rel=1e-5)


def check_metrics(result: dict[str, Any]) -> None:
    """Both paragraphs of a question lead its ranking, but for the last question, which finds one of its two."""
    for name, path in result["paths"].items():
        assert set(path["per_query"]["nDCG@10"]) == set(HOPS), name
        for query in HOPS:
            whole = query != last()
            assert (path["per_query"]["nDCG@10"][query] == pytest.approx(1.0)) is whole, (name, query)
            assert path["per_query"]["MRR@10"][query] == 1.0
        assert path["per_query"]["Recall@100"][last()] == 1.0, "60 documents: all are retrieved"
        assert path["metrics"]["nDCG@10"] == pytest.approx(sum(path["per_query"]["nDCG@10"].values()) / 8)


def check_parity(result: dict[str, Any]) -> None:
    assert "parity" not in result["paths"]["fp32"]
    half, whole = (result["paths"][name]["parity"] for name in ("fp16", "int8"))
    assert half["reference_reads_same_inputs"] is True, "FP16 is what was imported"
    assert whole["reference_reads_same_inputs"] is False
    for parity in (half, whole):
        assert parity["mismatched_finite"] == 0
        assert parity["spearman"]["mean"] > 0.99
    assert result["paths"]["int8"]["metrics"]["nDCG@10"] == pytest.approx(
        result["paths"]["fp32"]["metrics"]["nDCG@10"], abs=0.02
    )


def test_without_embeddings_or_weights_it_says_what_to_do(hotpotqa: Path, cli: Any, clean: Any) -> None:
    outcome = cli("beir", "hotpotqa", cwd=hotpotqa)
    assert outcome.code == DATA
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    _, begun, error = outcome.err.partition("error: ")
    assert begun
    assert all(line.startswith("  ") for line in error.splitlines()[2:]), "the last thing said"
    for text in (
        "encoder colbertv2",
        "could not be loaded",
        "--encoder multi-vector:/path/to/colbertv2.0",
        "hf download",
        "evaluate.py import",
        "--encoder lexical",
    ):
        assert text in error, error
    clean(hotpotqa)
    assert not (hotpotqa / "embeddings_cache").exists()
    assert not (hotpotqa / "results").exists()
    cli("beir", "hotpotqa", "--encoder", "lexical", cwd=hotpotqa).fine()  # one of the ways it names


def test_with_only_the_documents_imported_it_says_which_side_is_missing(
    hotpotqa: Path, saved: Any, cli: Any, clean: Any
) -> None:
    chunks = sorted(path.name for path in hotpotqa.glob("documents_*.pt"))
    cli("import", "beir", "hotpotqa", *chunks, "--encoder", "colbertv2", "--quiet", cwd=hotpotqa).fine()
    outcome = cli("beir", "hotpotqa", cwd=hotpotqa)
    assert outcome.code == DATA
    assert "the query embeddings of beir hotpotqa were not imported" in outcome.err
    assert "evaluate.py import beir hotpotqa FILE --encoder colbertv2" in outcome.err
    clean(hotpotqa)
