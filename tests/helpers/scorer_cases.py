"""What the tests of users' scorers share: a demo collection, modules written into the current folder, a plain MaxSim."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from maxsim_eval.api import evaluate
from maxsim_eval.types import Result, Task
from maxsim_kernels import Packed

NAIVE = '''
import torch

def score(queries, documents):
    """MaxSim, one pair at a time."""
    rows = []
    for q in range(len(queries)):
        row = []
        for n in range(len(documents)):
            similar = queries[q].float() @ documents[n].float().T
            row.append(similar.max(dim=1).values.sum() if len(documents[n]) else torch.tensor(-torch.inf))
        rows.append(torch.stack(row))
    return torch.stack(rows)
'''
_count = [0]
Write = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Iterator[Write]:
    """`write(source)`: the name of a module of that source in the current folder, one that nobody has imported."""
    before = set(sys.modules)

    def new(source: str, name: str | None = None) -> str:
        _count[0] += 1
        name = name or f"scorers_of_test_{_count[0]}"
        (here / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    yield new
    for name in set(sys.modules) - before:
        if name.startswith("scorers_of_test") or name == "helper_of_scorers":
            del sys.modules[name]


def run(home: Path, task: Task, *paths: Any, **options: Any) -> Result:
    options = {"cache_dir": home / "cache", "quiet": True, "k": 300, **options}
    return evaluate(task, "lexical", ["fp32", *paths], **options)


def naive(queries: Packed, documents: Packed) -> Tensor:
    space: dict[str, Any] = {}
    exec(NAIVE, space)
    found: Tensor = space["score"](queries, documents)
    return found
