"""What the toolkit's tests share: tiny random checkpoints, made once. Test files cannot import their neighbours."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Makers of tiny checkpoints (tiny_checkpoints.py)."""
    name = "maxsim_eval_test_tiny_checkpoints"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("tiny_checkpoints.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def checkpoint_of(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint by its layout (stanford, pylate, colpali, colqwen2), made at the first call."""
    made: dict[str, Path] = {}

    def find(layout: str) -> Path:
        if layout not in made:
            made[layout] = tiny.MAKERS[layout](tmp_path_factory.mktemp("hub") / f"tiny-{layout}")
        return made[layout]

    return find
