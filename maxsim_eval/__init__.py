"""Exact MaxSim paths compared end to end: data in, report out.

from maxsim_eval import evaluate, load_task
result = evaluate(load_task("beir", "scifact", data_dir="datasets"), "lexical", ["fp32", "fp16", "int8"])

From the top down; a room imports from those below it, never from those above:

cli/             the command line
studies/         pages and notebooks that show many evaluations together
in_memory.py     `evaluate_embeddings`: embeddings that are in memory, without a dataset or a file
mteb.py          a model for mteb, tasks of mteb evaluated here, results in mteb's form
many.py          `evaluate_datasets`: several datasets with one encoder, and their averages
atlas/           what every way of storing embeddings costs, with verdicts
api.py           `evaluate`: a task, an encoder and scoring paths in, a Result out
subject.py       what is evaluated: settings, the part of a task that is searched, its embeddings
gate/            the quality gate: bounds on what changed, an exit code
report/          a Result as something to read: console, Markdown, HTML, CSV, JSON
planning/        what an evaluation will take: bytes, seconds, whether it fits
comparison/      metrics, intervals, parity with the reference, verdicts
conformance/     whether a scoring function keeps the contract
explain/         which tokens a score comes from
importing/       embeddings that somebody else computed, into the cache
scoring/         scores of a corpus by a path: in units, streamed, resumable
first_stage/     documents found fast, by words or one vector, for MaxSim to rank again
cache/           the HDF5 cache of embeddings
data/            collections: queries, documents, judgements
codecs/          token embeddings in fewer bytes, stored and read again
encoders/        texts and pages to token embeddings
processes/       what several processes share, and how they fail together
crc/             CRC-32s of stored bytes, by arithmetic and on a GPU
types.py         Task, Encoder, Run, Result
ending.py        what a failed command says, and where its traceback goes
bars.py          progress bars
errors.py        what can go wrong, and its exit code
files.py         files written whole or not at all
environment.py   the machine and the software a Result was made on
hashing.py       digests that name cache entries
parsing.py       JSON and TOML to values, or to one error
printing.py      names from outside, made safe to print
quantities.py    sizes and times as people write and read them
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from maxsim_eval.api import evaluate
    from maxsim_eval.data.loading import load_task
    from maxsim_eval.in_memory import evaluate_embeddings
    from maxsim_eval.many import evaluate_datasets
    from maxsim_eval.types import Encoder, PathResult, Result, Run, Task

__all__ = [
    "Encoder",
    "PathResult",
    "Result",
    "Run",
    "Task",
    "__version__",
    "evaluate",
    "evaluate_datasets",
    "evaluate_embeddings",
    "load_task",
]

_HOMES = {
    "evaluate": "maxsim_eval.api",
    "evaluate_datasets": "maxsim_eval.many",
    "evaluate_embeddings": "maxsim_eval.in_memory",
    "load_task": "maxsim_eval.data.loading",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import maxsim_eval` alone must not pull in torch."""
    if name not in __all__:
        raise AttributeError(f"module 'maxsim_eval' has no attribute {name!r}")
    import importlib

    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("maxsim-eval")
    return getattr(importlib.import_module(_HOMES.get(name, "maxsim_eval.types")), name)


def __dir__() -> list[str]:
    """List the public names too, which are imported only on first use."""
    return sorted({*globals(), *__all__})
