"""Chamfer distance of two clouds of points: nearest neighbours found by a filter and refined exactly.

chamfer.py         Chamfer distance: mean over p of the squared distance to the nearest q
filter_kernels.py  the Triton kernels behind `nearest.py` up to the filters
nearest.py         nearest points of two clouds, both ways, and the Chamfer gradient, without the `[N
refine_kernels.py  the Triton kernels behind `nearest.py` after the filters: refine, sum, gradient
"""
