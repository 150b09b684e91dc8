"""Exact fused MaxSim for late-interaction retrieval: `score(Q, D) = sum_i max_j <Q_i, D_j>`.

From the top down; a module or folder imports only from those below it:

warm.py        `warmup`: compiling ahead
tuner.py       `tune`: which configuration is the fastest on this GPU, measured once and kept
integrations/  makes sentence-transformers, PyLate and colpali-engine score and train with the operator
search/        certified search: the exact top-k of full precision, found by a scan of codes
training.py    contrastive and distillation losses on `maxsim`
streaming/     `stream_topk`: corpora larger than memory
topk.py        a running exact top-k
explaining.py  `explain`: what a call would run, and why
api.py         `maxsim`, `maxsim_pairs`: validates, chooses, runs
autograd.py    gradients of eager GPU calls
ops.py         the custom operators behind them, for torch.compile and autograd
chamfer/       Chamfer distance
gpu/           Triton kernels: forward, backward, tokens of few bits, certified search
cpu/           fast exact CPU paths
reference/     the truth: plain chunked torch that shares no arithmetic with the fast paths
quantize.py    INT8 and FP8 codes of tokens
checks.py      which arguments a call takes
coded.py       BitTokens, ResidualTokens: tokens of 1, 2 or 4 bits a number, as they are stored
modes.py       what surrounds a call: transforms, kinds of tensor, autocast, capture in a CUDA graph
needs.py       errors for bad input: the argument, what was found, what is needed
turns.py       threads of a CPU that each make products of their own
fallback.py    whether Triton is installed; one warning that says why a call runs slower code
tokens.py      Packed, Int8Tokens, Fp8Tokens
"""

from maxsim_kernels.api import maxsim, maxsim_pairs
from maxsim_kernels.chamfer.chamfer import chamfer_distance
from maxsim_kernels.coded import BitTokens, ResidualTokens
from maxsim_kernels.explaining import explain
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.reference import maxsim_reference
from maxsim_kernels.streaming import LazyBlock, LazyCodes, device_blocks, stream_topk
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed, pack
from maxsim_kernels.topk import merge_topk
from maxsim_kernels.tuner import tune
from maxsim_kernels.warm import warmup

__all__ = [
    "BitTokens",
    "Fp8Tokens",
    "Int8Tokens",
    "LazyBlock",
    "LazyCodes",
    "Packed",
    "ResidualTokens",
    "chamfer_distance",
    "device_blocks",
    "explain",
    "maxsim",
    "maxsim_pairs",
    "maxsim_reference",
    "merge_topk",
    "pack",
    "quantize_fp8",
    "quantize_int8",
    "stream_topk",
    "tune",
    "warmup",
]
