"""Helpers for all tests: where real data is, or why a test that needs it is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from places import ROOT

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network, whatever encoder it names; subprocesses inherit it


def find_shared_data() -> Path | None:
    """The folder with `beir/scifact` and `trec_eval`: MAXSIM_TEST_DATA, else ../shared/data beside the repository."""
    named = os.environ.get("MAXSIM_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data; the test is skipped where there is none."""
    folder = find_shared_data()
    if folder is None:
        pytest.skip("no test data: set MAXSIM_TEST_DATA to a folder that holds beir/scifact and trec_eval")
    return folder


@pytest.fixture(scope="session")
def scifact_data(shared_data: Path) -> Path:
    """A data folder (for --data-dir) in which the BEIR set SciFact is; the test is skipped where it is not."""
    if not (shared_data / "beir" / "scifact" / "corpus.jsonl").is_file():
        pytest.skip(f"no SciFact in {shared_data / 'beir' / 'scifact'}: see datasets/README.md")
    return shared_data / "beir"


@pytest.fixture(autouse=True)
def same_precision() -> Iterator[None]:
    """Float32 products are as precise after a test as before it: the benchmarks' commands lower it for their whole process."""
    settings = [torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    before = [setting.fp32_precision for setting in settings]
    yield
    for setting, value in zip(settings, before, strict=True):
        setting.fp32_precision = value


@pytest.fixture
def every_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars print every line that half a minute would bring, and their last one, however short the work is."""
    monkeypatch.setattr("maxsim_eval.bars.SECONDS", 0.0)
