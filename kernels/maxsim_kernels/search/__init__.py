"""Certified search: the exact top-k of full precision at the price of a scan of codes (docs/search.md).

bounds.py     how far a score over codes can lie from the exact path's: what is stored beside codes, what queries add
exact.py      `exact_topk`: scan, prune, rescore, and the certificate
rescoring.py  exact scores of a few documents, with brute force's bits
rows.py       documents that lie elsewhere, and are read when they are needed
"""

from maxsim_kernels.search.bounds import Residuals, residuals_of
from maxsim_kernels.search.exact import Certificate, Stats, exact_topk
from maxsim_kernels.search.rows import Rows

__all__ = ["Certificate", "Residuals", "Rows", "Stats", "exact_topk", "residuals_of"]
