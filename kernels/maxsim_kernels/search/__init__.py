"""Certified search: the exact top-k of full precision at the price of a scan of codes (docs/search.md).

ahead.py      what a GPU's searches leave to the next: the scan of one that comes again is queued first
bounds.py     how far a score over codes can lie from the exact path's: what is stored beside codes, what queries add
device.py     the search on a GPU, queued without waiting
exact.py      `exact_topk`: what it is given checked, block by block; `begin_search`: the search alone
fetching.py   documents by number for a GPU, wherever they lie
queries.py    queries as a GPU's kernels take them
rescoring.py  exact scores of a few documents on a CPU, with brute force's bits
rows.py       documents and codes that lie elsewhere, and are read when they are needed
scanning.py   codes of a search on a GPU, wherever they lie
searching.py  `Search`: scan, prune, rescore, and the certificate, on a CPU
trust.py      how exact a GPU's products are taken to be, and the test of them
"""

from maxsim_kernels.search.bounds import Residuals, residuals_of
from maxsim_kernels.search.exact import begin_search, exact_topk, why_no_search
from maxsim_kernels.search.rows import Rows, StreamedCodes
from maxsim_kernels.search.searching import Certificate, Search, Stats

__all__ = [
    "Certificate",
    "Residuals",
    "Rows",
    "Search",
    "Stats",
    "StreamedCodes",
    "begin_search",
    "exact_topk",
    "residuals_of",
    "why_no_search",
]
