"""Fast exact MaxSim on CPUs, and its gradients.

backward.py  MaxSim gradients on the CPU from saved winners: a gather for queries, a scatter for documents, accumulated in FP32
forward.py   fast exact MaxSim on the CPU
pairs.py     independent (query, document) pairs on the CPU: batched products over pairs of similar length
tiles.py     the inner part of `cpu.py`: tiles of document tokens, their products with query rows, and segmented maxima
"""
