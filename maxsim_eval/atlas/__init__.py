"""The fidelity atlas: what does every way of storing token embeddings cost, with a verdict. `evaluate.py atlas`, docs/atlas.md.

From the top down:

atlas.py        `atlas`: a task, an encoder and a grid in; an Atlas out
writing.py      an Atlas as HTML, Markdown, CSV and JSON, and back
picture.py      change in quality against bytes and against time, as SVG
page.py         the words and tables of an Atlas
judging.py      verdicts over the whole grid, Pareto fronts, what is smallest
attribution.py  what a ranking loses by its candidates, its scores, its length and its ties
running.py      entries evaluated one by one: kept as they are finished, none lost because another failed
grid.py         which entries there are: a TOML file, names
"""

from maxsim_eval.atlas.atlas import atlas
from maxsim_eval.atlas.judging import Atlas, Row

__all__ = ["Atlas", "Row", "atlas"]
