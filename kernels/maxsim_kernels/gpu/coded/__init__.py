"""Scores of tokens in few bits, as they are stored: which kernel takes a call, and the kernels.

choice.py     which kernel takes a call, in which configuration
coded.py      codes are unpacked in registers, again for every tile of query rows
once.py       residual tokens and many query rows: each token is decoded once
unpacking.py  tokens in few bits as kernels read them
"""
