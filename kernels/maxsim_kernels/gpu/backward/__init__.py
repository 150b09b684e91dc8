"""Gradients on GPUs: which path takes a call, and the kernels.

contrast.py      in-batch-negatives cross-entropy of scores, its mean, and its gradient with respect to the scores
gradients.py     gradients of MaxSim from saved winners on the GPU: unified, atomic, csr (paper section 'Inverse-Grid Update')
inverse_grid.py  the inverse grid: for every document token, the query tokens that chose it
kernels.py       the Triton kernels of the gradients, from saved winners (paper section 'Inverse-Grid Update')
path_choice.py   which backward path a call takes: from its arguments, the environment and torch's deterministic mode
saved.py         what a forward left for its gradients, with shapes spelled out, and how many programs share it
"""
