"""What the tests of the atlas share: the demo in a folder of each file's own, and the options of every call."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxsim_eval import load_task
from maxsim_eval.types import Task


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("atlas")


@pytest.fixture(scope="module")
def task(place: Path) -> Task:
    return load_task("demo", "small", data_dir=place / "datasets", quiet=True)


@pytest.fixture(scope="module")
def options(place: Path) -> dict:
    return {"cache_dir": place / "cache", "device": "cpu", "quiet": True}
