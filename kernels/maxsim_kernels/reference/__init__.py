"""The truth: MaxSim in plain chunked torch that shares no arithmetic with any fast path.

reference.py  `maxsim_reference`: what a call asks for, put together from scores of rows
products.py   scores of rows: matrix products of one shape, maxima, sums, in true precision
rows.py       where the valid tokens of each side lie
"""

from maxsim_kernels.reference.products import true_precision
from maxsim_kernels.reference.reference import maxsim_reference, score

__all__ = ["maxsim_reference", "score", "true_precision"]
