"""The evaluating commands as data: each source of data with its default dataset and encoder, and its help."""

from __future__ import annotations

from typing import Any

# source -> (default datasets, what the argument is, default encoder, the command's help)
COMMANDS: dict[str, tuple[Any, str, str, str]] = {
    "beir": (
        None,
        "Name of a BEIR set: scifact, nq, hotpotqa, and others.",
        "colbertv2",
        """Evaluate a BEIR set: from the data folder, or downloaded there.

        Example: python evaluate.py beir scifact --encoder lexical --paths fp32,fp16,int8

        Example: python evaluate.py beir scifact nfcorpus fiqa --encoder lexical --latex
        """,
    ),
    "real-mm-rag": (
        None,
        "Name of a REAL-MM-RAG set: finreport, finslides, techreport, techslides.",
        "colpali",
        """Evaluate one of the four REAL-MM-RAG sets (page images).

        Example: python evaluate.py real-mm-rag finreport --encoder colpali
        """,
    ),
    "local": (
        None,
        "Folder in BEIR layout, or of page images: a path, or a name below the data folder.",
        "lexical",
        """Evaluate a dataset of your own: corpus.jsonl (or pages/), queries.jsonl, qrels/<split>.tsv.

        Example: python evaluate.py local my-corpus --encoder hf:/models/my-encoder
        """,
    ),
    "irds": (
        None,
        "Id of the package ir_datasets, with documents, queries and judgements: beir/scifact/test.",
        "colbertv2",
        """Evaluate a dataset of the package ir_datasets, which downloads it into its own folder. Also written irds:beir/scifact/test.

        Example: python evaluate.py irds beir/scifact/test --encoder lexical
        """,
    ),
    "demo": (
        ["small"],
        "Name of the generated collection.",
        "lexical",
        """Generate a small collection with ties, empty and very long documents, and evaluate it. Needs no download.

        Example: python evaluate.py demo
        """,
    ),
}


def default_encoder(source: str) -> str:
    """The encoder that an evaluation of this source takes where none is named; of an unknown source, which is refused later, any."""
    return COMMANDS[source][2] if source in COMMANDS else "lexical"
