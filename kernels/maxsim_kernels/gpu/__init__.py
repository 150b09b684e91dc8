"""MaxSim on GPUs in Triton: forward, backward, tokens of few bits, certified search, and what their kernels share.

geometry.py  shapes of a launch: padded rows, flat token matrices, how many programs share the documents
keys.py      keys of a running top-k, each step in one launch
launch.py    launching kernels cheaply: a call's launches are recorded once and replayed for every later call of the same signature
plans.py     the launches of one call signature, as they are recorded and as they are replayed
nonzero.py   which tokens are not all zeros, as libraries mark padding
tile_ops.py  pieces shared by the Triton kernels
backward/    gradients: which path takes a call, and the kernels
coded/       scores of tokens in few bits, as they are stored: which kernel takes a call, and the kernels
forward/     scores and winners: which kernel takes a call, and the kernels
search/      certified search: bounds, marks, exact scores of marked pairs, documents by number
"""
