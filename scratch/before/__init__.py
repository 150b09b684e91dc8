# ruff: noqa
"""Scratch: kernels as on main before this branch, for `compare.py`."""
