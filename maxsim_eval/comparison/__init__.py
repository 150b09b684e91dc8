"""Runs against judgements and against the reference: metrics, intervals, parity, verdicts.

assessing.py   from rankings to what a Result says of each path
bounds.py      what the bounds of a path's class say of it: findings, which the gate counts and the verdicts name
measures.py    measures that trec_eval lacks (`ERR@20`, `RBP(p=0.8)`), by ir-measures where it is installed
metrics.py     retrieval metrics per query: trec_eval's through pytrec_eval, under ir-measures' names, and the paper's own
parity.py      how far a scoring path is from the reference path: the `parity` object of a Result
ranks.py       ranks of a row of scores, by the CPU or a GPU, and Spearman's correlation of two
rankings.py    how far a path's rankings are from the reference's
scores.py      how far a path's scores are from the reference's: rank correlation, score errors and their histogram
statistics.py  do two paths differ, and by how much at most: intervals, tests and verdicts on per-query metric values
texts.py       the texts of the queries and documents that a report shows, shortened
thresholds.py  the gate's thresholds: the TOML file, packaged (`thresholds.toml`) or one's own
ties.py        what equal scores hide
verdicts.py    which difference matters, by path and metric, and what the statistics say of every compared path
"""
