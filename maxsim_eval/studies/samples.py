"""Which Results a notebook draws: those that `MAXSIM_RESULT` names, else small ones made here, offline, in seconds.

The pages are a stand-in of REAL-MM-RAG: its layout (questions, each written for one page) and ColPali's token width (d = 128, unit
tokens), with embeddings that are generated. Their figures say nothing of a model, and their names say that they are generated.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.api import evaluate
from maxsim_eval.comparison.metrics import DEFAULT_METRICS
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import MissingPackageError
from maxsim_eval.report.result_json import read_result
from maxsim_eval.studies.fidelity import PATHS as EVERY_FORMAT
from maxsim_eval.studies.fidelity import default_encoder
from maxsim_eval.types import Result, Role, Task
from maxsim_kernels import Packed, pack

VARIABLE = "MAXSIM_RESULT"
DATA_VARIABLE = "MAXSIM_TEST_DATA"
_SETS = {"generated-reports": (120, 96), "generated-slides": (110, 48)}  # pages, and most patches of one
_QUERIES = 60
_LIMITS = {"limit_queries": 30, "limit_documents": 100}  # of SciFact, where a model has to encode it
Make = Callable[[], Sequence[Result]]


def results(make: Make) -> list[Result]:
    """The Results that `MAXSIM_RESULT` names, or those that `make` makes.

    The variable holds one or more files or folders of reports, divided as in PATH (`:`; on Windows `;`).

    Raises:
        DataError: a file that cannot be read as a Result.
    """
    named = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    if not named:
        return list(make())
    return [read_result(path / "result.json" if path.is_dir() else path) for path in named]


def small_beir() -> list[Result]:
    """The generated demo collection with lexical embeddings: nothing to download."""
    return [_demo(("fp32", "fused-fp32", "fp16", "bf16", "int8"))]


def small_pages() -> list[Result]:
    """The stand-in of REAL-MM-RAG: two generated sets of pages."""
    metrics = (*DEFAULT_METRICS, "AnyHit@10")
    with tempfile.TemporaryDirectory() as folder:
        return [
            evaluate(
                _pages_task(name, pages),
                GeneratedPages(most),
                ("fp32", "fp16", "int8"),
                cache_dir=folder,
                metrics=metrics,
                quiet=True,
            )
            for name, (pages, most) in _SETS.items()
        ]


def small_formats() -> list[Result]:
    """Every number format: on a part of SciFact with MiniLM's own weights where both are found, else on the demo.

    SciFact is looked for in `MAXSIM_TEST_DATA`, `datasets` and `../shared/data`, below the current folder and its parent.
    """
    here = Path.cwd()
    places = [base / part for base in (here, here.parent) for part in ("datasets", "../shared/data")]
    named = os.environ.get(DATA_VARIABLE)
    found = next(
        (
            folder
            for place in ([Path(named)] if named else places)
            for folder in (place / "beir", place)
            if (folder / "scifact" / "corpus.jsonl").is_file()
        ),
        None,
    )
    try:
        encoder = default_encoder()
    except MissingPackageError:
        found = None
    if found is None:
        return [_demo(EVERY_FORMAT)]
    task = load_task("beir", "scifact", data_dir=found, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        return [evaluate(task, encoder, EVERY_FORMAT, cache_dir=folder, quiet=True, **_LIMITS)]  # type: ignore[arg-type]


def _demo(paths: Sequence[str]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        task = load_task("demo", "small", data_dir=folder, quiet=True)
        return evaluate(task, "lexical", paths, cache_dir=Path(folder) / "cache", quiet=True)


def _pages_task(name: str, pages: int) -> Task:
    ids = [f"{name}-{number:03d}" for number in range(pages)]
    asked = [ids[number * pages // _QUERIES] for number in range(_QUERIES)]
    queries = [f"question {number} about {page}" for number, page in enumerate(asked)]
    names = [f"q{number:02d}" for number in range(_QUERIES)]
    return Task(
        source="generated",
        dataset=name,
        split="test",
        query_ids=names,
        queries=queries,
        document_ids=ids,
        documents=ids,
        qrels={query: {page: 1} for query, page in zip(names, asked)},
        warnings=("generated pages and questions in the layout of REAL-MM-RAG: no figure of a model",),
    )


class GeneratedPages:
    """Token embeddings drawn from the text itself: a page is patches around a few themes, a question noisy patches of its page.

    Args:
        most: patches that a page has at most, and twice what it has at least.
    """

    name, revision, dim = "generated-pages", "1", 128
    _NOISE = 4.5  # of a question's tokens: retrieval is neither perfect nor hopeless

    def __init__(self, most: int) -> None:
        self.most = most

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """What decides the embeddings, as `Encoder.fingerprint` asks for it."""
        return {"code": 1, "most": self.most, "noise": self._NOISE}

    def prepare(self, documents: Sequence[Any]) -> None:
        """Nothing: a page depends on its name alone."""

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """`Packed` float32 of unit tokens, `[tokens, 128]` an item."""
        return pack([self._page(item) if role == "document" else self._question(item) for item in items])

    def _page(self, name: str) -> torch.Tensor:
        random = _generator(name)
        patches = int(torch.randint(self.most // 2, self.most + 1, (), generator=random))
        shared = torch.randn(6, self.dim, generator=_generator("themes"))  # pages of one report resemble each other
        own = torch.randn(4, self.dim, generator=random)
        themes = torch.cat([shared, own])[torch.randint(0, 10, (patches,), generator=random)]
        return torch.nn.functional.normalize(themes + torch.randn(patches, self.dim, generator=random), dim=1)

    def _question(self, text: str) -> torch.Tensor:
        random = _generator(text)
        page = self._page(text.rpartition(" ")[2])
        tokens = page[torch.randint(0, len(page), (int(torch.randint(10, 21, (), generator=random)),), generator=random)]
        noise = torch.nn.functional.normalize(torch.randn(tokens.shape, generator=random), dim=1)
        return torch.nn.functional.normalize(tokens + self._NOISE * noise, dim=1)


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))
