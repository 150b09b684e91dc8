"""benchmarks/libraries.py on a CPU: every row of the library that is installed here, and who is left out and why."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import libraries
from cases.libraries import TINY, Row, products, scoring, tokens
from maxsim_kernels import integrations, maxsim


def row() -> Row:
    q, d = tokens("cpu", torch.float32, 2, 3, 8), tokens("cpu", torch.float32, 5, 4, 8, seed=1)
    return scoring("made up", "none", maxsim, (q, d), torch.float32, lambda: products(q, d))


def test_only_who_gives_the_right_scores_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = row()
    right = made.call

    @contextlib.contextmanager
    def off(factor: float) -> Any:
        made.call = lambda: right() * factor
        yield
        made.call = right

    def absent() -> Any:
        raise ImportError("no such kernels\nhere")

    made.methods = {"own": contextlib.nullcontext, "ours": lambda: off(1.001), "wrong": lambda: off(1.1), "absent": absent}
    found = libraries.measure(made, "cpu", rounds=2)
    assert set(found["methods"]) == {"own", "ours"}
    assert found["methods"]["ours"]["error"] == pytest.approx(1e-3, rel=1e-2)
    assert found["left_out"] == {
        "wrong": "UnfitError: scores or loss 1.0e-01 off, need 3e-03",
        "absent": "ImportError: no such kernels here",
    }
    assert set(found["faster"]) == {"own"}
    assert "left out" in libraries.line(found)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda gradient: gradient * 1.2, "middle row"),
        (lambda gradient: gradient * 0.9, "middle row"),
        (lambda gradient: gradient + 0.02 * gradient.roll(1, 0), ""),
        (lambda gradient: torch.cat((gradient[:1], gradient[1:].roll(1, 0))), "middle row"),
        (lambda gradient: torch.cat((gradient[:1] * 1.5, gradient[1:])), "length"),
    ],
)
def test_a_gradient_is_right_but_for_moved_rows(spoil: Any, said: str) -> None:
    """A tenth off everywhere is refused, though less than what moved winners may do to the whole."""
    true = tokens("cpu", torch.float64, 9, 8)
    made = row()
    made.dtype, made.call = torch.bfloat16, lambda: None
    made.found = lambda _: (torch.ones(1), [spoil(true)])
    if not said:
        assert libraries.check(made, (torch.ones(1), [true]), "cpu")["gradient_row"] == pytest.approx(0.02, rel=0.1)
        return
    with pytest.raises(libraries.UnfitError, match=said):
        libraries.check(made, (torch.ones(1), [true]), "cpu")


def test_what_the_library_scored_itself_is_not_taken_for_ours() -> None:
    from sentence_transformers.util import similarity

    q = tokens("cpu", torch.float64, 2, 3, 8)
    left = pytest.raises(libraries.UnfitError, match=r"not scored by us, but by the library: \{'torch.float64 queries': 2\}")
    with left, libraries.enabled("sentence-transformers"):
        similarity.maxsim(q, q)
    with pytest.raises(libraries.UnfitError, match="not scored by us"), libraries.enabled("sentence-transformers"):
        pass
    assert not integrations.status()["sentence-transformers"].enabled


@pytest.mark.slow
def test_every_row_of_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(libraries, "ROUND_SECONDS", 0.0)
    words = ["--tiny", "--rounds", "2", "--device", "cpu", "--only", "sentence-transformers", "--json"]
    monkeypatch.setattr(sys, "argv", ["libraries.py", *words, str(tmp_path / "a.json")])
    libraries.main()
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found["rows"]) == 4 + 4 * len(TINY.batches)
    for one in found["rows"]:
        assert set(one["methods"]) == {"own", "ours"}, one
    assert "sentence-transformers, similarity, float16, lists: own" in capsys.readouterr().out
