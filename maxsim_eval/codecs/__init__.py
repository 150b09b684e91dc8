"""Ways of storing token embeddings in fewer bytes, as names: `int4`, `rotate+sign`, `pool-2+residual-2(centroids=1024)`, `pca-64`.

A codec is steps joined by `+`: any number that change the tokens (`shaping.py`, `thinning.py`), then at most one that stores their
numbers (`scalar.py`, `trained.py`; FP16 where none is named). Scored is what a reader of the stored bytes would get: every codec
encodes to packed bytes and decodes them. Docs and definitions: docs/atlas.md.

From the top down:

names.py      the registry, and `codec_of`: a name to a Codec
codec.py      Codec: steps in a row, fitted on a sample of the corpus; bytes by arithmetic
shaping.py    rotate, dims, pca: other coordinates, for queries too
thinning.py   pool, prune: fewer tokens of a document
pooling.py    pool's work by processes that stay from block to block
scalar.py     fp16, int8, int4, int2, sign, control: each number by itself
trained.py    residual (ColBERTv2), pq: numbers by codebooks that a sample of the corpus trained
steps.py      what a step is
bits.py       codes of few bits, packed into bytes
"""
