"""Small stand-ins for what PyLate's own tests fetch by name: folders that its loaders find from the working folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_checkpoints import SPECIAL, WORDS, bert

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DATASET = "lightonai/lighton-ms-marco-mini"
CANDIDATES = 3


def pylate(folder: Path) -> None:
    """A random BERT and a dataset of its four tables under the names that the tests load."""
    model = folder / MODEL
    model.mkdir(parents=True)
    bert(model, [*SPECIAL, *WORDS], length=200).save_pretrained(model)
    tables = _tables()
    data = folder / DATASET
    data.mkdir(parents=True)
    parts = []
    for name, rows in tables.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        parts.append(f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}.jsonl\n")
    (data / "README.md").write_text(f"---\nconfigs:\n{''.join(parts)}---\n", encoding="utf-8")


def _tables() -> dict[str, list[dict[str, Any]]]:
    texts = [f"{first} {second}" for first in WORDS[:4] for second in WORDS[4:8]]
    queries = [{"query_id": number, "text": text} for number, text in enumerate(texts[:4])]
    documents = [{"document_id": number, "text": f"{text} a ."} for number, text in enumerate(texts)]
    triplets = [
        {"query": query["text"], "positive": documents[number]["text"], "negative": documents[-1 - number]["text"]}
        for number, query in enumerate(queries)
    ]
    train = [
        {
            "query_id": number,
            "document_ids": list(range(number, number + CANDIDATES)),
            "scores": [0.9, 0.5, 0.1][:CANDIDATES],
        }
        for number in range(len(queries))
    ]
    return {"triplet": triplets, "train": train, "queries": queries, "documents": documents}
