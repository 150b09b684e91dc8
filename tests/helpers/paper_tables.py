"""Names of the paper's tables that docs/benchmarks.md shows, by what measures them."""

from __future__ import annotations

# benchmarks/paper.py
FORWARD = (
    *("fwd", "fwd_abs", "fwd_chunked", "nocg", "twoaxis", "chunked_sweep", "op_abl", "multiquery", "varlen", "int8", "int8_B"),
    *("fat_emb_cliff", "splitd_perf", "traffic", "mem", "precision"),
)
# The other scripts of benchmarks/.
OTHERS = ("ooc", "train", "bwd_abl", "bwd_breakdown", "bwd_mem", "training_parity", "chamfer")
