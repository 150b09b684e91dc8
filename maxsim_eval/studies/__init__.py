"""The pages and notebooks that show many evaluations together.

atlas_page.py  the tables and pictures of docs/atlas.md
fidelity.py    the fidelity study of docs/fidelity.md: what each scoring path costs in ranking quality, on real token embeddings
figures.py     figures and tables of Results for notebooks
samples.py     which Results a notebook draws: those that `MAXSIM_RESULT` names, else small ones made here, offline, in seconds
scale.py       the tables of docs/scale.md: the arithmetic of `costs.py` carried to collections larger than the machines at hand
"""
