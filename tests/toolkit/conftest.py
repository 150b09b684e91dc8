"""What the toolkit's tests share: tiny random checkpoints, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_checkpoints


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint by its layout (stanford, pylate, colpali, colqwen2), made at the first call."""
    made: dict[str, Path] = {}

    def find(layout: str) -> Path:
        if layout not in made:
            made[layout] = tiny_checkpoints.MAKERS[layout](tmp_path_factory.mktemp("hub") / f"tiny-{layout}")
        return made[layout]

    return find
