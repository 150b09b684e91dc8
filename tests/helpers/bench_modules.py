"""The benchmarks' modules, by short names that differ from each other."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PLACES = {
    "budget": "cases.byte_budget",
    "cases": "cases.forward",
    "clocks": "measure.clocks",
    "figures": "results.file",
    "gradients": "measure.gradient_truth",
    "harness": "run.command",
    "page_cells": "tables.cells",
    "page_forward": "tables.paper",
    "page_kernels": "tables.kernels",
    "page_losses": "tables.losses",
    "page_readme": "tables.readme",
    "page_rows": "tables.rows",
    "page_script": "tables.script",
    "page_summary": "tables.summary",
    "page_training": "tables.training_page",
    "paper_cases": "cases.paper",
    "paper_file": "results.paper_file",
    "paper_inputs": "cases.inputs",
    "paper_memory": "cases.memory",
    "paper_quality": "cases.quality",
    "paper_quantised": "cases.quantised",
    "paper_rivals": "rivals.paper",
    "paper_run": "run.runner",
    "paper_traffic": "cases.traffic",
    "peers": "rivals.peers",
    "rivals": "rivals.torch_rivals",
    "streaming_cases": "out_of_core.cases",
    "streaming_data": "out_of_core.corpora",
    "streaming_measure": "out_of_core.measure",
    "streaming_ranks": "out_of_core.ranks",
    "streaming_rates": "out_of_core.link_rates",
    "streaming_tables": "out_of_core.tables",
    "tables": "tables.markdown",
    "timing": "measure.timing",
    "training_cases": "cases.training",
    "training_parts": "cases.training_parts",
    "training_rivals": "rivals.training",
    "training_tables": "tables.training",
    "truths": "measure.score_truth",
    "verdicts": "tables.forward_asked",
}


def load(names: Iterable[str]) -> SimpleNamespace:
    """A namespace of modules."""
    return SimpleNamespace(**{name: importlib.import_module(PLACES.get(name, name)) for name in names})
