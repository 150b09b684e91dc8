"""The command line: one module for each command, and what they share.

app.py       the command line: `python evaluate.py beir scifact`, also installed as `maxsim-eval`
atlas.py     the command `atlas`: what every way of storing embeddings costs, with verdicts
bench.py     the command `bench`: one table of the paper, measured here by the scripts of `benchmarks/`, and shown
cache.py     the commands of the embedding cache: `encode`, `inspect`, `convert` and `cache ls | rm | gc`
conform.py   the command `conform`: whether a function that scores keeps the contract, bugs told from conventions
evaluate.py  the evaluating commands, one a source of data: `beir`, `local`, `real-mm-rag`, `irds`, `demo`
explain.py   the command `explain`: which document tokens a score comes from, as a table, as JSON and as a picture
gate.py      the command `gate`: a Result against a committed baseline and thresholds, for a CI
import_.py   the command `import`: token embeddings that were computed elsewhere, checked and put into the cache
metrics.py   the command `metrics`: metrics of TREC runs of any tool, with what was counted, and paired tests
options.py   options that several commands share, in groups, and how a command gets them: `with_options`
output.py    what commands print: answers to stdout, everything else to stderr, colours only where somebody looks at them
plan.py      the command `plan`: what an evaluation will take on this machine, before anything long starts
sources.py   the evaluating commands as data: each source of data with its default dataset and encoder, and its help
streams.py   standard streams that may be closed, full or read by nobody
"""

import os

# Before torch is loaded: threads that spin for the next piece of work take the cores from whatever else runs on them, themselves
# included (SciFact beside other work on two cores: 9 to 14 seconds instead of 31 to 137). A few microseconds of it are worth having:
# small products follow each other so fast that sleeping between them costs a third of their time.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from maxsim_eval.cli.app import main

__all__ = ["main"]
