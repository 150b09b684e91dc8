"""Certified search on GPUs: what bounds, marks, scores and fetches documents without the host waiting in between.

bounds.py     the queries' part of the bounds, and intervals of scores as marks need them
fetching.py   documents by number out of device memory or pinned host memory, end to end
survivors.py  exact scores of marked pairs, document by document, with the products of brute force
"""
