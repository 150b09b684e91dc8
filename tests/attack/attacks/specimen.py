"""A finished tiny collection, as small as everything that is attacked can be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy
import torch

from attacks.running import Outcome, run

WORDS = (
    "red",
    "fox",
    "runs",
    "blue",
    "whale",
    "swims",
    "green",
    "frog",
    "jumps",
    "quiet",
    "owl",
    "wolf",
    "old",
    "toad",
    "pond",
    "night",
)
DOCUMENTS, K = 24, 24
QUERIES = {"q1": "red fox", "q2": "frog in green", "q3": "an owl at night", "q4": "old stones"}
METRICS = "nDCG@10,Recall@10,Recall@100,MAP@100"
PATHS = ("fp32", "fp16", "int8")
OF_SET = ("local", "mine", "--encoder", "lexical", "--quiet")
EVALUATE = ("local", "mine", "--encoder", "lexical", "--k", str(K), "--metrics", METRICS, "--out", "out", "--quiet")
QRELS = Path("datasets/local/mine/qrels/test.tsv")
CORPUS, ASKED = Path("datasets/local/mine/corpus.jsonl"), Path("datasets/local/mine/queries.jsonl")
ATLAS = ("atlas", *OF_SET, "--entries", "int8,int4,bm25+rerank-5", "--k", str(K), "--out", "atlas", "--json")
FEW_BYTES = 4000  # of a unit, so that there are several


def evaluation(paths: Sequence[str] = PATHS) -> tuple[str, ...]:
    """The evaluation whose answer is known."""
    return (*EVALUATE, "--paths", ",".join(paths))


def runs_of(out: Path) -> dict[str, bytes]:
    """The rankings that an evaluation wrote."""
    return {path.name: path.read_bytes() for path in sorted((out / "runs").iterdir())}


def metrics_of(out: Path) -> dict[str, Any]:
    """The figures that an evaluation wrote."""
    paths = json.loads((out / "result.json").read_text(encoding="utf-8"))["paths"]
    return {name: [entry["metrics"], entry["per_query"], entry.get("parity")] for name, entry in paths.items()}


@dataclass(frozen=True)
class Specimen:
    """The folder of everything, and what an undisturbed evaluation of it answers."""

    folder: Path
    runs: dict[str, bytes]
    metrics: dict[str, Any]

    def copy(self, target: Path, *parts: str) -> Path:
        """A copy of some of it to work on."""
        for part in parts:
            source, made = self.folder / part, target / part
            made.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, made)
            else:
                shutil.copy(source, made)
        return target

    def entry(self, home: Path, role: str) -> Path:
        """The folder of the stored queries or documents."""
        (found,) = (home / "embeddings_cache" / "local" / "mine").glob(f"lexical-{role}-*")
        return found

    def wrong(self, out: Path, paths: Sequence[str] = PATHS) -> str:
        """What of an evaluation's answer is not as undisturbed; nothing: ""."""
        runs, metrics = runs_of(out), metrics_of(out)
        for path in paths:
            if runs.get(f"{path}.trec") != self.runs[f"{path}.trec"]:
                return f"another ranking of {path}"
            if metrics[path][:2] != self.metrics[path][:2]:
                return f"other metrics of {path}"
        return ""


def _texts() -> list[str]:
    """Some alike, one empty; fixed, since seeds of cases name them."""
    rng = np.random.default_rng(11)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(2, 6))) for _ in range(DOCUMENTS)]
    texts[3], texts[9] = "", texts[2]
    return texts


def write_collection(folder: Path) -> None:
    """Texts and judgements in BEIR layout."""
    (folder / QRELS).parent.mkdir(parents=True)
    corpus = {f"d{number}": text for number, text in enumerate(_texts())}
    for place, texts in ((CORPUS, corpus), (ASKED, QUERIES)):
        lines = [json.dumps({"_id": name, "title": "", "text": text}) + "\n" for name, text in texts.items()]
        (folder / place).write_text("".join(lines))
    judged = [
        (query, f"d{(place * 7 + step * 3) % DOCUMENTS}", step % 3) for place, query in enumerate(QUERIES) for step in range(5)
    ]
    (folder / QRELS).write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{s}\n" for q, d, s in judged))
    (folder / "qrels.txt").write_text("".join(f"{q} 0 {d} {s}\n" for q, d, s in judged))


def _write_imports(folder: Path) -> None:
    rng = np.random.default_rng(5)
    documents = [rng.standard_normal((1 + place % 4, 8)).astype(np.float32) for place in range(DOCUMENTS)]
    queries = [rng.standard_normal((2 + place % 2, 8)).astype(np.float32) for place in range(len(QUERIES))]
    folder.mkdir()

    def padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.array([len(row) for row in rows])
        dense = np.zeros((len(rows), lengths.max(), 8), np.float32)
        for place, row in enumerate(rows):
            dense[place, : len(row)] = row
        return dense, lengths

    (q, q_lengths), (d, d_lengths) = padded(queries), padded(documents)
    np.savez(folder / "e.npz", query_embeddings=q, query_lengths=q_lengths, doc_embeddings=d, doc_lengths=d_lengths)
    np.savez_compressed(folder / "z.npz", query_embeddings=q, query_lengths=q_lengths, doc_embeddings=d, doc_lengths=d_lengths)
    meta = {"query_ids": list(QUERIES), "doc_ids": [f"d{place}" for place in range(DOCUMENTS)]}
    content = {"query_embeddings": torch.from_numpy(q), "query_lengths": torch.from_numpy(q_lengths)}
    torch.save({**content, "doc_embeddings": [torch.from_numpy(row) for row in documents], "meta": meta}, folder / "e.pt")
    packed = {"query_values": np.concatenate(queries), "query_offsets": np.cumsum([0, *q_lengths])}
    packed |= {"doc_values": np.concatenate(documents), "doc_offsets": np.cumsum([0, *d_lengths])}
    safetensors.numpy.save_file(packed, folder / "e.safetensors")
    np.save(folder / "documents.npy", packed["doc_values"])
    np.save(folder / "documents.offsets.npy", packed["doc_offsets"])
    np.save(folder / "queries.npy", q[:, :2])
    (folder / "ids.txt").write_text("".join(f"d{place}\n" for place in range(DOCUMENTS)))


def fine(*words: str | Path, cwd: Path) -> Outcome:
    """A command that must end well."""
    outcome = run(words, cwd, 120)
    assert outcome.code == 0, outcome.err
    return outcome


def build(folder: Path) -> Specimen:
    """Everything that is attacked: stored embeddings in several shards, copies, a result, a baseline, parts, files to import."""
    import maxsim_eval.api
    from maxsim_eval.cache import sides
    from maxsim_eval.comparison import thresholds
    from maxsim_eval.scoring import units

    write_collection(folder)
    _write_imports(folder / "imports")
    with mock.patch.object(sides, "LEAST", 8):
        fine("encode", *OF_SET, cwd=folder)
    fine(*evaluation(), cwd=folder)  # before there are copies: what they answer must be the same
    first = runs_of(folder / "out")
    assert len(list((folder / "embeddings_cache").rglob("0000?.h5"))) == 4, "several shards"
    fine("convert", *OF_SET, "--to", "int8-token,int8-corpus", cwd=folder)
    fine(*evaluation(), cwd=folder)
    assert runs_of(folder / "out") == first
    fine("gate", "out/result.json", "--baseline", "baseline.json", "--update-baseline", cwd=folder)
    shutil.copy(Path(thresholds.__file__).parents[1] / thresholds.DEFAULT_THRESHOLDS, folder / "bounds.toml")
    lines = (folder / "out" / "runs" / "fp16.trec").read_text().replace("maxsim-eval/", "other-").splitlines()
    fine(*ATLAS, cwd=folder)
    (folder / "scorer.py").write_text("# a user's own function\n")
    (folder / "other.trec").write_text("".join(line + "\n" for place, line in enumerate(lines) if place % 5))
    with (
        mock.patch.object(units, "LEAST_BYTES", FEW_BYTES),
        mock.patch.object(maxsim_eval.api, "_write", side_effect=KeyboardInterrupt),
    ):
        assert run([*evaluation(), "--out", "stopped"], folder).code == 130
    assert len(list((folder / "stopped" / ".partial").rglob("*.h5"))) > len(PATHS)
    return Specimen(folder, first, metrics_of(folder / "out"))
