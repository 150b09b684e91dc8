"""Chamfer distance of two clouds of points: nearest neighbours found by a filter and refined exactly.

chamfer.py         `chamfer_distance`: mean over p of the squared distance to the nearest q, and back; its ops and gradients
filter_kernels.py  the Triton kernels behind `nearest.py` up to the filters
nearest.py         nearest points of two clouds, both ways, and the Chamfer gradient, without the `[N, M]` matrix
refine_kernels.py  the Triton kernels behind `nearest.py` after the filters: refine, sum, gradient
"""
