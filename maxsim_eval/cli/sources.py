"""The evaluating commands as data: each source of data with its default dataset and encoder, and its help."""

from __future__ import annotations

import inspect
from typing import Any

_REQUIRED = inspect.Parameter.empty


# source -> (default dataset, what the argument is, default encoder, the command's help)
COMMANDS: dict[str, tuple[Any, str, str, str]] = {
    "beir": (
        _REQUIRED,
        "Name of a BEIR set: scifact, nq, hotpotqa, ...",
        "colbertv2",
        """Evaluate a BEIR set: from the data folder, or downloaded there.

        Example: python evaluate.py beir scifact --encoder lexical --paths fp32,fp16,int8
        """,
    ),
    "real-mm-rag": (
        _REQUIRED,
        "Name of a REAL-MM-RAG set: finreport, finslides, techreport, techslides",
        "colpali",
        """Evaluate one of the four REAL-MM-RAG sets (page images).

        Example: python evaluate.py real-mm-rag finreport --encoder colpali
        """,
    ),
    "local": (
        _REQUIRED,
        "Folder in BEIR layout, or of page images: a path, or a name below the data folder.",
        "lexical",
        """Evaluate a dataset of your own: corpus.jsonl (or pages/), queries.jsonl, qrels/<split>.tsv.

        Example: python evaluate.py local my-corpus --encoder hf:/models/my-encoder
        """,
    ),
    "demo": (
        "small",
        "Name of the generated collection.",
        "lexical",
        """Generate a small collection with ties, empty and very long documents, and evaluate it. Needs no download.

        Example: python evaluate.py demo
        """,
    ),
}
