"""Embeddings that somebody else computed, checked and put into the cache.

file_order.py    which files are parts of one thing, and in which order
formats.py       opening embedding files: torch, npz, npy and safetensors become one `FileTable` of tensors, lists and strings
ids.py           ids and judgements as embedding files hold them: lists, integer tensors, files of ids, dicts
importing.py     precomputed token embeddings into the cache
local.py         a local dataset from embeddings alone: ids and judgements of the file, texts empty, in BEIR layout
many_files.py    embeddings in many files, one open at a time
origins.py       what embeddings were imported from: names and SHA-256 of files and sets of files, for keys and provenance
rows.py          token embeddings as files hold them (dense, chunked, list, packed), read a few documents at a time
tables.py        from the keys of an embedding file to queries, documents, ids and judgements
token_checks.py  the single pass over every token of an import: finite? norm? exactly zero?
"""
