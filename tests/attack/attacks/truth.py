"""Plain second readings of the files, which say what a command that succeeds must have answered.

Nothing here calls the toolkit but for the lexical encoder's vectors of a text. A reading that gives up raises: then the command
must not have succeeded either.
"""

from __future__ import annotations

import csv
import fnmatch
import itertools
import json
import math
import re
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from maxsim_eval.encoders.lexical import LexicalEncoder

Qrels = dict[str, dict[str, int]]
Ranking = dict[str, list[tuple[str, float]]]


def lines(path: Path) -> list[str]:
    """Lines that are not blank."""
    rows = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [text.rstrip("\r") for text in (row.decode() for row in rows) if text.strip()]


def texts(path: Path, titled: bool) -> dict[str, str]:
    """Id -> text of a JSONL file."""
    found: dict[str, str] = {}
    for line in lines(path):
        row = json.loads(line)
        name = str(row["_id"]) if type(row["_id"]) is int else row["_id"]
        if name in found or not isinstance(name, str) or not isinstance(row["text"], str):
            raise ValueError(f"{name!r} is there twice, or no text")
        title = (row.get("title") or "") if titled else ""
        found[name] = f"{title} {row['text']}".strip() if titled else row["text"]
    return found


def beir_qrels(path: Path) -> Qrels:
    """Judgements of a dataset: the later of two holds."""
    found: Qrels = {}
    for line in lines(path)[1:]:
        fields = next(csv.reader([line], delimiter="\t")) if '"' in line else line.split("\t")
        query, document, grade = (field.strip() for field in fields)
        found.setdefault(query, {})[document] = int(grade)
    return found


def columns(line: str) -> list[str]:
    """As C's `isspace` tells them apart."""
    return [column.decode() for column in line.encode().split()]


def trec_qrels(path: Path) -> Qrels:
    """Judgements of four columns."""
    found: Qrels = {}
    for line in lines(path):
        query, _, document, grade = columns(line)
        found.setdefault(query, {})[document] = int(grade)
    return found


def trec_run(path: Path) -> Ranking:
    """A run as trec_eval orders it; ours by its ranks."""
    rows = [columns(line)[:6] for line in lines(path)]
    own = rows[0][5].startswith("maxsim-eval/")
    found: dict[str, list[tuple[str, int, float]]] = {}
    for query, _, document, rank, score, _ in rows:
        if not math.isnan(float(score)):
            found.setdefault(query, []).append((document, int(rank) if own else 0, float(score)))
    with np.errstate(over="ignore"):
        for entries in found.values():
            if own:
                entries.sort(key=lambda entry: entry[1])
            else:
                entries.sort(key=lambda entry: (float(np.float32(entry[2])), entry[0]), reverse=True)
    return {query: [(document, score) for document, _, score in entries] for query, entries in found.items()}


# Metrics --------------------------------------------------------------------------------------------------------------


def _ndcg(grades: list[int], ideal: list[int], cut: int) -> float:
    def gain(row: list[int]) -> float:
        return math.fsum(max(grade, 0) / math.log2(place + 2) for place, grade in enumerate(row[:cut]))

    best = gain(sorted(ideal, reverse=True))
    return gain(grades) / best if best else 0.0


def _recall(grades: list[int], ideal: list[int], cut: int) -> float:
    relevant = sum(grade > 0 for grade in ideal)
    return sum(grade > 0 for grade in grades[:cut]) / relevant if relevant else 0.0


def _map(grades: list[int], ideal: list[int], cut: int) -> float:
    relevant, hits, total = sum(grade > 0 for grade in ideal), 0, 0.0
    for place, grade in enumerate(grades[:cut]):
        hits += grade > 0
        total += hits / (place + 1) if grade > 0 else 0.0
    return total / relevant if relevant else 0.0


MEASURES: dict[str, Callable[[list[int], list[int], int], float]] = {"nDCG": _ndcg, "Recall": _recall, "MAP": _map}


def metrics(qrels: Qrels, ranking: Ranking, names: Sequence[str]) -> dict[str, float]:
    """Means over the judged queries; one that retrieved nothing scores 0."""
    found = {}
    for name in names:
        measure, _, cut = name.partition("@")
        values = []
        for query, row in qrels.items():
            grades = [row.get(document, 0) for document, _ in ranking.get(query, [])]
            values.append(MEASURES[measure](grades, list(row.values()), int(cut)))
        found[name] = math.fsum(values) / len(values)
    return found


def differing(got: Mapping[str, Any], need: Mapping[str, float]) -> str:
    """The first metric that is not as needed; nothing: ""."""
    for name, value in need.items():
        if got.get(name) is None or abs(got[name] - value) > 1e-7:
            return f"{name} is {got.get(name)}, a second reading gives {value}"
    return ""


# Evaluations ----------------------------------------------------------------------------------------------------------


def _scores(queries: Sequence[str], documents: Sequence[str]) -> np.ndarray:
    encoder = LexicalEncoder()
    encoder.prepare(documents)
    asked, held = encoder.encode(queries, "query"), encoder.encode(documents, "document")
    found = np.zeros((len(queries), len(documents)))
    for row in range(len(queries)):
        for column in range(len(documents)):
            products = asked[row].double().numpy() @ held[column].double().numpy().T
            # A question without tokens scores 0 everywhere; a document without tokens is found by no other.
            found[row, column] = products.max(axis=1).sum() if products.shape[1] else -math.inf if len(products) else 0.0
    return found


def wrong_evaluation(home: Path, out: Path, k: int, names: Sequence[str]) -> str:
    """What is wrong with an evaluation of the dataset's files as they are now; nothing: ""."""
    place = home / "datasets" / "local" / "mine"
    corpus, asked = texts(place / "corpus.jsonl", True), texts(place / "queries.jsonl", False)
    qrels = {query: row for query, row in beir_qrels(place / "qrels" / "test.tsv").items() if query in asked}
    rows = [query for query in asked if query in qrels]
    scores, ids = _scores([asked[query] for query in rows], list(corpus.values())), list(corpus)
    found = json.loads((out / "result.json").read_text())
    for path in found["paths"]:
        ranking = trec_run(out / "runs" / f"{path}.trec")
        if said := differing(found["paths"][path]["metrics"], metrics(qrels, ranking, names)):
            return f"{path}: {said}"
    ranking = trec_run(out / "runs" / "fp32.trec")
    for query, need in zip(rows, scores, strict=True):
        listed = ranking.get(query, [])
        values = {name: score for name, score in zip(ids, need, strict=True) if score > -math.inf}  # without tokens: not found
        if len({document for document, _ in listed}) != min(k, len(values)):
            return f"{query}: {len(listed)} documents, need {min(k, len(values))}"
        mine = [values[document] for document, _ in listed]
        if not np.allclose([score for _, score in listed], mine, rtol=1e-4, atol=1e-4):
            return f"{query}: other scores than the texts give"
        rest = [score for document, score in values.items() if document not in dict(listed)]
        if any(low > high + 1e-4 for high, low in itertools.pairwise(mine)) or max(rest, default=-math.inf) > mine[-1] + 1e-4:
            return f"{query}: another order than the texts give"
    return ""


# The gate -------------------------------------------------------------------------------------------------------------


def gate_says(result: Any, baseline: Any, bounds: Mapping[str, Any]) -> bool:
    """Whether the gate passes."""
    fits = all(result["task"][key] == baseline["task"][key] for key in ("source", "dataset", "split", "queries", "documents"))
    fits &= all(result["task"].get(key) == baseline["task"][key] for key in baseline["task"])
    fits &= all(
        result["encoder"].get(key) == baseline["encoder"][key]
        for key in ("name", "revision", "dim")
        if key in baseline["encoder"]
    )
    fits &= result["k"] == baseline["k"] and result.get("reference", "fp32") == baseline["reference"]
    fits &= all(name in result["paths"] for name in baseline["paths"])
    for key in ("limits", "candidates"):
        fits &= (result["task"].get(key) is None) == (baseline["task"].get(key) is None)
    if not fits:
        return False
    reference = baseline["reference"]
    mine, before = result["paths"][reference]["metrics"], baseline["paths"][reference]
    if any(not mine[name] >= before[name] - bound - 1e-9 for name, bound in bounds["fall"].items()):
        return False
    for name, path in result["paths"].items():
        if name != reference:
            of = [
                entry for entry in bounds["classes"].values() if any(fnmatch.fnmatchcase(name, text) for text in entry["paths"])
            ]
            if not of or not _within(path["metrics"], mine, path["parity"], of[0]):
                return False
    return True


def _within(values: Any, reference: Any, parity: Any, bounds: Mapping[str, Any]) -> bool:
    least = [(parity["spearman"][key], bounds[f"spearman_{key}"]) for key in ("mean", "min") if f"spearman_{key}" in bounds]
    least += [(parity["overlap"][cut], bound) for cut, bound in bounds.get("overlap", {}).items()]
    most = [(abs(values[name] - reference[name]), bound) for name, bound in bounds.get("delta", {}).items()]
    most += [(parity[key], bounds[key]) for key in ("max_rel_error", "max_abs_error", "mismatched_finite") if key in bounds]
    most += [(parity["spearman"]["constant_in_one"], bounds["constant_in_one"])] if "constant_in_one" in bounds else []
    # type(): True and "1" are no numbers
    if any(type(value) not in (int, float) for value, _ in least + most):
        return False
    return all(value >= bound - 1e-9 for value, bound in least) and all(value <= bound + 1e-9 for value, bound in most)


def bounds(path: Path) -> dict[str, Any]:
    """A TOML file of thresholds."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


# Imports --------------------------------------------------------------------------------------------------------------

Rows = list[np.ndarray]


def _cut(content: Mapping[str, Any], role: str) -> Rows:
    if f"{role}_offsets" in content:
        values = content[f"{role}_values"]
        ends = [int(end) for end in content[f"{role}_offsets"]]
        if ends[0] or ends[-1] != len(values):
            raise ValueError("offsets of something else")
        return [values[first:last] for first, last in itertools.pairwise(ends)]
    values = content[f"{role}_embeddings"]
    if isinstance(values, list):
        return [np.asarray(row) for row in values]
    values = np.asarray(values)
    return [row[: int(length)] for row, length in zip(values, content[f"{role}_lengths"], strict=True)]


def _without_padding(row: np.ndarray) -> np.ndarray:
    """Trailing rows that are exactly zero are padding where nothing says the lengths."""
    held = np.flatnonzero(row.any(axis=1))
    return row[: held[-1] + 1] if len(held) else row[:0]


def imported(files: Path, name: str) -> dict[str, Rows]:
    """Role -> tokens of every item, as the files say."""
    if name == "e.pt":
        content = torch.load(files / name, weights_only=True)
        ids = {"query": content["meta"]["query_ids"], "doc": content["meta"]["doc_ids"]}
        rows = {role: dict(zip(ids[role], _cut(content, role), strict=True)) for role in ids}
        order = {"query": sorted(ids["query"]), "doc": sorted(ids["doc"], key=lambda text: int(re.sub("[^0-9]", "", text)))}
        return {role: [rows[role][item] for item in order[role]] for role in ids}
    if name == "documents.npy":
        ends = np.load(files / "documents.offsets.npy")
        content = {"doc_values": np.load(files / name), "doc_offsets": ends}
        return {"doc": _cut(content, "doc"), "query": [_without_padding(row) for row in np.load(files / "queries.npy")]}
    content = dict(np.load(files / name)) if name.endswith("npz") else safetensors.numpy.load_file(files / name)
    return {role: _cut(content, role) for role in ("query", "doc")}


def zip_is_whole(path: Path) -> bool:
    """Whether every member of an archive has the checksum that stands beside it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # noqa: BLE001 (whatever is wrong with it)
        return False
