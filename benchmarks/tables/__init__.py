"""Tables of the committed results as Markdown: a table is where its rows come from and a getter for every column.

A package with this file, since an installed PyTables is called `tables` too.

Of docs/benchmarks.md and the READMEs:
cells.py           numbers that remember their file and key, and a table as Markdown
rows.py            rows of the results files: methods by name, the fastest method of a kind
columns.py         sources of tables, getters of columns, and what draws them
paper.py           the paper's forward tables, quantised and wide tokens, traffic, precision, streaming
paper_training.py  the paper's training tables
script.py          tables of forward.py alone
losses.py          where somebody else is faster, and shares of cells
summary.py         who was not timed, the second harness, side studies, the CPU
readme.py          the tables that the READMEs quote
quoted.py          the tables that pages of docs quote of scripts with files of their own
streams.py         the table of streams of docs/scale.md
marks.py           what is written into READMEs and docs between marks
ages.py            which figures are of older kernels

Of one script each:
markdown.py        what the training and Chamfer scripts print in common
training.py        docs/training_figures.md and what training and Chamfer distance are asked to reach
forward_asked.py   what the forward is asked to reach
"""
