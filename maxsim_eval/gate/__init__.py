"""The quality gate: bounds on what changed, an exit code, a report of it.

baselines.py  the gate's baseline: what a Result must not fall below, as a small JSON file that is committed
checking.py   the gate: a fresh Result against a committed baseline and thresholds; any failed finding means a non-zero exit
report.py     what people see of the gate
"""
