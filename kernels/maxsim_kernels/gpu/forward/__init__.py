"""Scores and winners on GPUs: which kernel takes a call, and the kernels.

choice.py       which kernel takes a call, in which configuration: pure, from shapes, dtypes, strides and the hardware
combine.py      merging row maxima into scores
counted.py      plans by class of shape: calls that differ from a recorded one in counts alone
dense.py        fused MaxSim forward for many query rows
dispatch.py     launching the kernel that takes a call
empties.py      scores of empty documents, where a call names them
general.py      the kernel for every layout
query_codes.py  query codes on the fly: one pass that turns float query tokens into INT8 or FP8 codes and one scale a token
tile_tables.py  the tile tables of ragged documents: where each tile of tokens lies, built on the device without waiting for it
tile_walk.py    what a walk over document tiles reads beside tokens
tuned.py        what `tune` found on this machine's GPUs: a file in the user's cache folder, read once a process
tuning.py       launch configurations of the Triton kernels: frozen data, a reason on every row, and the calls each serves
unaligned.py    rows that cannot be read 16 bytes at a time, and another tile for them
wide.py         fused MaxSim forward for wide embeddings (split-d)
"""
