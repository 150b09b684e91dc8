"""Certified search: the exact top-k of full precision at the price of a scan of codes (docs/search.md).

bounds.py  how far a score over codes can lie from the exact path's: what is stored beside codes, what queries add
"""

from maxsim_kernels.search.bounds import Residuals, residuals_of

__all__ = ["Residuals", "residuals_of"]
