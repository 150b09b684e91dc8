"""Fast exact MaxSim on CPUs, and its gradients.

backward.py  MaxSim gradients on the CPU from saved winners: a gather for queries, a scatter for documents, accumulated in FP32
batches.py   maxima of documents, or pieces of them, with query tokens of their own each: batched products of a few shapes
corpus.py    documents as rows of a matrix: cut into tiles, in order of length, read, and pieces put together
few.py       one tile for few documents, where it has the bits of whole ones
forward.py   shared and per-query documents: planning, and the sums of the tiles' maxima
integers.py  products of INT8 codes, exact on every processor: a look at the library's, and floats where it is wrong or slow
pairs.py     independent (query, document) pairs on the CPU: batched products over pairs of similar length
some.py      some of the pairs of queries and documents: a document meets only the tokens of the queries that it is for
tiles.py     the inner part of `forward.py`: products of query rows with tiles of document tokens, and their maxima
"""
