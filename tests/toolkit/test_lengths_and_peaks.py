"""Length histograms, and the peaks of memory of a path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxsim_eval.data.task_facts import length_histogram
from maxsim_eval.processes import peak_memory


def test_short_lengths_have_a_bin_each() -> None:
    found = length_histogram(np.array([0, 3, 3, 5]))
    assert found == {"edges": [0, 1, 2, 3, 4, 5, 6], "counts": [1, 0, 0, 2, 0, 1]}


def test_one_length() -> None:
    assert length_histogram(np.full(7, 32)) == {"edges": list(range(34)), "counts": [0] * 32 + [7]}
    assert length_histogram(np.array([0])) == {"edges": [0, 1], "counts": [1]}
    assert length_histogram(np.array([], np.int64)) == {"edges": [0, 1], "counts": [0]}


def test_a_few_very_long_ones_get_a_bin_of_their_own() -> None:
    lengths = np.concatenate([np.arange(1, 200), [200, 5000]])
    found = length_histogram(lengths)
    assert found["edges"][:3] == [0, 5, 10]
    assert found["edges"][-2:] == [200, 5001]
    assert found["counts"][-1] == 2
    assert len(found["counts"]) == 41


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_numpys(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.poisson(10 ** random.uniform(0, 4), 500) + random.integers(0, 50, 500) * (random.random(500) < 0.01)
    found = length_histogram(lengths)
    counts, _ = np.histogram(lengths, [*found["edges"][:-1], found["edges"][-1] - 0.5])  # numpy's last bin holds its end
    assert found["counts"] == counts.tolist()
    assert sum(found["counts"]) == 500
    assert 1 <= len(found["counts"]) <= 41
    assert sum(count > 0 for count in found["counts"]) > 1


linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is Linux's to tell")


_WATCHED = """
import numpy as np
from maxsim_eval.processes import peak_memory
before = np.ones(40 << 20, np.uint8)  # 40 MiB that are gone when watching begins
del before
watched = peak_memory.start("cpu")
idle = watched()["host_peak_bytes"]
held = np.ones(60 << 20, np.uint8)
del held
found = watched()
assert 55 << 20 <= found["host_peak_bytes"] - idle <= 90 << 20, (idle, found)
assert found["device_peak_bytes"] is None
again = peak_memory.start("cpu")()["host_peak_bytes"]
assert again < found["host_peak_bytes"] - (40 << 20), (again, found)
"""


@linux
def test_the_peak_is_that_of_the_time_between() -> None:
    """In a process of its own: in this one, what earlier tests left may be given back in the middle."""
    subprocess.run([sys.executable, "-c", _WATCHED], check=True)


def test_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "none" / "clear_refs")
    assert peak_memory.start("cpu")() == {"host_peak_bytes": None, "device_peak_bytes": None}
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "clear_refs")
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "status")
    assert peak_memory.start("cpu")()["host_peak_bytes"] is None
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  12 kB\n")
    assert peak_memory.start("cpu")()["host_peak_bytes"] == 12 * 1024


def test_the_largest_of_several_processes() -> None:
    one, other = {"host_peak_bytes": 3, "device_peak_bytes": None}, {"host_peak_bytes": 5, "device_peak_bytes": 7}
    assert peak_memory.largest([one, other]) == {"host_peak_bytes": 5, "device_peak_bytes": None}
    assert peak_memory.largest([other]) == other
