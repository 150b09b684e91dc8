"""Exact MaxSim paths compared end to end: data in, report out.

from maxsim_eval import evaluate, load_task
result = evaluate(load_task("beir", "scifact", data_dir="datasets"), "lexical", ["fp32", "fp16", "int8"])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxsim_eval.api import evaluate
    from maxsim_eval.data.loading import load_task
    from maxsim_eval.types import Encoder, PathResult, Result, Run, Task

__all__ = ["Encoder", "PathResult", "Result", "Run", "Task", "evaluate", "load_task"]

_HOMES = {"evaluate": "maxsim_eval.api", "load_task": "maxsim_eval.data.loading"}


def __getattr__(name: str) -> Any:
    """Import on first use: `import maxsim_eval` alone must not pull in torch."""
    if name not in __all__:
        raise AttributeError(f"module 'maxsim_eval' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "maxsim_eval.types")), name)
