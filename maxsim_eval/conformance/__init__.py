"""Whether a function that scores keeps the contract of MaxSim: bugs told from conventions.

conforming.py  `conform`: every check on one function
checks.py      the checks: what each gives a function, and what its answer means
inputs.py      inputs of the checks and their truth, plain products in float64
"""
