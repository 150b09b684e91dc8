"""Grids: the packaged one, what a file may not hold, entries by name."""

from __future__ import annotations

import math

import pytest

from maxsim_eval.atlas.grid import entries_of, load_grid
from maxsim_eval.errors import UnknownNameError, UsageError


def test_the_packaged_grid_is_large_and_can_be_read():
    grid = load_grid()
    assert len(grid.entries) >= 20
    assert grid.within == 0.003
    assert any(entry.control for entry in grid.entries)
    assert math.isclose(grid.changed(None, 0.01).within, 0.01)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("entries = ['int9']\nmetrics = ['nDCG@10']", UnknownNameError, "unknown entry 'int9'. Did you mean 'int8'"),
        ("entries = ['bm52+rerank-10']\nmetrics = ['nDCG@10']", UnknownNameError, "Did you mean 'bm25'"),
        ("entries = ['int4+rerank-10+rerank-5']\nmetrics = ['nDCG@10']", UsageError, "reranked twice"),
        ("entries = ['int4+rerank-0']\nmetrics = ['nDCG@10']", UnknownNameError, "codec step 'rerank-0'"),
        ("entries = []\nmetrics = ['nDCG@10']", UsageError, "entries is .*need a list of names"),
        ("entries = ['fp32']\nmetrics = ['nDCG@10']", UsageError, "entries: got none"),
        ("entries = ['int4']\nmetrics = ['nDGC@10']", UsageError, "nDGC"),
        ("entries = ['int4']", UsageError, "metrics is None"),
        ("entrys = ['int4']", UnknownNameError, "Did you mean 'entries'"),
        ("entries = ['int4']\nmetrics = ['nDCG@10']\nwithin = 2", UsageError, "within is 2, need a difference"),
        ("entries = [", UsageError, "not valid TOML"),
    ],
)
def test_grids_that_cannot_be(tmp_path, text, error, match):
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(error, match=match):
        load_grid(tmp_path / "grid.toml")


def test_a_grid_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read"):
        load_grid(tmp_path / "none.toml")


def test_entries_are_there_once_and_bases_before():
    assert [entry.name for entry in entries_of(["bm25 + rerank-5", "int4", "bm25", "int4", "fp32"])] == [
        "bm25",
        "bm25+rerank-5",
        "int4",
    ]
