"""Figures over many queries and documents have the same bits for any number of threads: torchrun gives each process one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from maxsim_eval.comparison.statistics import bootstrap_interval

FIGURES = """
import numpy as np
from maxsim_eval.comparison.scores import spearman
from maxsim_eval.comparison.statistics import bootstrap_interval
random = np.random.default_rng(0)
for documents in (1_000_003, 1_200_000):  # BLAS adds long rows in as many parts as there are threads
    scores = random.normal(size=documents).astype(np.float32)
    print(spearman(scores, scores + random.normal(size=documents).astype(np.float32) * 1e-3).hex())
differences = np.where(random.random((2500, 30)) < 0.3, random.normal(0, 0.1, (2500, 30)), 0)
print(bootstrap_interval(differences, resamples=1000).tobytes().hex())
"""


def figures(threads: int) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", FIGURES], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.slow
def test_threads_change_no_bit() -> None:
    alone = figures(1)
    assert len(alone) == 3
    assert alone == figures(2)


def test_an_interval_does_not_depend_on_what_is_compared_beside_it() -> None:
    random = np.random.default_rng(0)
    columns = np.where(random.random((300, 30)) < 0.3, random.normal(0, 0.1, (300, 30)), 0)
    together = bootstrap_interval(columns)
    for column in range(0, 30, 7):
        assert bootstrap_interval(columns[:, column]).tolist() == together[:, column].tolist()
    assert bootstrap_interval(columns[:, :10]).tolist() == together[:, :10].tolist()


def test_numbers_of_any_size_keep_their_precision() -> None:
    differences = np.random.default_rng(1).normal(size=50)
    plain = bootstrap_interval(differences)
    for scale in (1e-200, 1e-9, 1e9, 1e200):
        assert np.allclose(bootstrap_interval(differences * scale) / scale, plain, rtol=1e-14, atol=0)
    assert bootstrap_interval([5e-324, 0.0, 0.0]).tolist() == [0.0, 0.0], "smaller than anything that is measured"
    mixed = np.array([1.0, *np.random.default_rng(2).normal(0, 1e-12, 30)])
    drawn = np.random.default_rng(0).integers(0, 31, (10_000, 31))
    theirs = np.array([mixed[rows].mean() for rows in drawn])
    found = bootstrap_interval(mixed)
    assert theirs.min() <= found[0] <= found[1] <= theirs.max()
