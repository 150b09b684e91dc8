"""Token rows, their task and checks, which the tests of imported sets share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.importing.importing import import_embeddings
from maxsim_eval.types import Role, Task
from maxsim_kernels import Packed

DIM = 8
LENGTHS = [3, 1, 0, 5, 2, 4, 6, 1, 2, 3, 4, 5]
IDS = [f"d{n}" for n in range(len(LENGTHS))]
QRELS = {"q1": {"d3": 1}, "q2": {"d9": 2}}
Run = Callable[..., dict[str, Entry]]


def tokens(lengths: list[int], dtype: torch.dtype = torch.float16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.functional.normalize(torch.randn(n, DIM, generator=generator), dim=1).to(dtype) for n in lengths]


DOCUMENTS = tokens(LENGTHS)


def padded(rows: list[torch.Tensor], size: int, fill: float = 0.0, left: bool = False) -> torch.Tensor:
    dense = torch.full((len(rows), size, DIM), fill, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        start = size - len(row) if left else 0
        dense[number, start : start + len(row)] = row
    return dense


def assert_rows(got: Packed | None, want: list[torch.Tensor]) -> None:
    assert got is not None
    assert got.dtype == want[0].dtype
    assert got.lengths.tolist() == [len(row) for row in want]
    for number, row in enumerate(want):
        assert torch.equal(got[number], row), f"row {number}"


@pytest.fixture
def task() -> Task:
    return Task("local", "toy", "test", ["q1", "q2"], ["what", "why"], IDS, [f"text {n}" for n in IDS], QRELS)


@pytest.fixture
def run(tmp_path: Path, task: Task) -> Run:
    def import_(paths: Any, **options: Any) -> dict[str, Entry]:
        folders = {"cache_dir": tmp_path / "cache", "data_dir": tmp_path / "data"}
        names = {"source": "local", "dataset": "toy", "encoder_name": "colpali", "quiet": True}
        return import_embeddings(paths, **{"task": task, **names, **folders, **options})

    return import_


def import_sides(
    folder: Path, task: Task, encoder_name: str, rows: Mapping[Role, Sequence[torch.Tensor]], **options: Any
) -> dict[str, Entry]:
    """Tokens of every text of a task's sides, written as files of the paper's layout and imported into `folder / "cache"`."""
    for role, tokens in rows.items():
        kind, ids = ("query", task.query_ids) if role == "query" else ("doc", task.document_ids)
        torch.save({f"{kind}_embeddings": list(tokens), "meta": {f"{kind}_ids": list(ids)}}, folder / f"{role}.pt")
    return import_embeddings(
        {role: folder / f"{role}.pt" for role in rows},
        task,
        source=task.source,
        dataset=task.dataset,
        encoder_name=encoder_name,
        cache_dir=folder / "cache",
        data_dir=folder / "data",
        quiet=True,
        **options,
    )


def assert_holds(entry: Entry, ids: list[str] = IDS, rows: list[torch.Tensor] = DOCUMENTS) -> None:
    assert entry.ids() == ids
    assert_rows(open_entry(entry.folder, verify=True).load(), rows)
