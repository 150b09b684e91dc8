"""What the toolkit's tests share: tiny random checkpoints and the demo, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny_checkpoints
from maxsim_eval.api import evaluate
from maxsim_eval.data.loading import load_task
from maxsim_eval.scoring.paths import PATHS
from maxsim_eval.types import Task


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint by its layout (stanford, pylate, colpali, colqwen2), made at the first call."""
    made: dict[str, Path] = {}

    def find(layout: str) -> Path:
        if layout not in made:
            made[layout] = tiny_checkpoints.MAKERS[layout](tmp_path_factory.mktemp("hub") / f"tiny-{layout}")
        return made[layout]

    return find


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo evaluated by every path to the last document, with one thread: datasets/, cache/ and out/. For reading only."""
    folder, threads = tmp_path_factory.mktemp("demo"), torch.get_num_threads()
    task = load_task("demo", "small", data_dir=folder / "datasets", quiet=True)
    torch.set_num_threads(1)
    try:
        evaluate(task, "lexical", list(PATHS), cache_dir=folder / "cache", out_dir=folder / "out", k=300, quiet=True)
    finally:
        torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="session")
def demo_task(demo_home: Path) -> Task:
    """The demo: 300 documents with duplicates, empty and very long ones, 40 queries."""
    return load_task("demo", "small", data_dir=demo_home / "datasets", quiet=True)
