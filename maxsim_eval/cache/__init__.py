"""The HDF5 cache: embeddings encoded once, whole or absent, checked when they are opened.

blocks.py        documents of a cache as blocks that are read when their turn comes: how a corpus larger than memory is scored
converting.py    `convert`: a quantised copy beside a cache entry, shard by shard, in flat memory
copies.py        the quantised copy of a cache entry
copy_shards.py   one quantised copy of a shard
corpus.py        what a path may ask of the whole corpus before its first block: the largest magnitude, found once, by one pass
embeddings.py    token embeddings of a task: from the cache, imported, or encoded now; of the whole task or of a subset of it
entries.py       an entry of the embedding cache: a manifest and its shards in one folder, opened when whole
filling.py       filling an entry of the embedding cache
hdf5.py          HDF5 as the toolkit keeps it
housekeeping.py  what the cache folder holds, and how it is freed: `cache ls`, `cache rm`, `cache gc`
inspecting.py    `inspect`: what a cache entry holds, read block by block
lost_model.py    embeddings that were encoded by a model that is not here, found by what their manifests say
selection.py     some documents of a cache entry, read where they lie
shards.py        one shard of the embedding cache
sides.py         the embedding cache: encode a collection once, keep its tokens in HDF5
stripes.py       stored rows proven while they are read, by the CRC-32 of stripes
"""
