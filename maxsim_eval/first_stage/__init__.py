"""First stages: documents found fast, by words or by one vector each, for MaxSim to rank again.

names.py   the registry: `bm25`, `single`, `fde(repetitions=20)`
bm25.py    BM25 over the texts, by bm25s
fde.py     MUVERA's fixed-dimensional encodings of the token vectors
single.py  the mean of the token vectors
stage.py   what a first stage takes and gives; the best of a matrix of scores
"""
