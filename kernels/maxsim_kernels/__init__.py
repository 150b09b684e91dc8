"""Exact fused MaxSim for late-interaction retrieval: `score(Q, D) = sum_i max_j <Q_i, D_j>`."""

from maxsim_kernels.api import explain, maxsim, maxsim_pairs
from maxsim_kernels.chamfer import chamfer_distance
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.reference import maxsim_reference
from maxsim_kernels.streaming import LazyBlock, device_blocks, stream_topk
from maxsim_kernels.tokens import Fp8Tokens, Int8Tokens, Packed, pack
from maxsim_kernels.topk import merge_topk
from maxsim_kernels.warm import warmup

__all__ = [
    "Fp8Tokens",
    "Int8Tokens",
    "LazyBlock",
    "Packed",
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
    "warmup",
]
