"""Corpora larger than memory: blocks on their way to the device while others are scored.

blocks.py     blocks of documents, cut into pieces of bounded size
links.py      devices as `transfer.py` sees them
streaming.py  scoring a corpus block by block with a running exact top-k (paper section 'Out-of-core')
transfer.py   a ring of buffers between the host and a device
"""

from maxsim_kernels.streaming.blocks import LazyBlock, LazyCodes
from maxsim_kernels.streaming.streaming import device_blocks, least_budget, stream_topk

__all__ = ["LazyBlock", "LazyCodes", "device_blocks", "least_budget", "stream_topk"]
