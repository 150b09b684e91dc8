"""A Result as something to read: console, Markdown, HTML, CSV, JSON.

averages.py     results of several datasets as one table: a column each and their average
comparing.py    the `compare` command: Results and TREC runs of any tool side by side, each against the first
console.py      A Result on a terminal: the headline, the tables, the warnings and the verdicts
csv_files.py    CSV of a Result: `metrics.csv`, a row for each path and metric, `per_query.csv`, one also for each query
html.py         A Result as one self-contained HTML page: tables, plots and everything they need in one file, and no network
html_data.py    what the HTML page's scripts draw from: one compact JSON-able object made from a Result (see `html.py`)
markdown.py     Markdown that holds text from a Result: nothing in it ends a cell, a line or an element
plausible.py    what the figures of a Result can be: a file that holds others was damaged or edited
result_json.py  result to and from JSON, schema `maxsim-eval/result/1` (documented in docs/result.md)
tables.py       the tables of every report, made from a Result alone: rows of text that each report draws in its own way
values.py       values of a Result, found where they may be missing, and written the same way by every report
words.py        A Result in words, for every format: the headline, the verdicts, the facts, the warnings
writing.py      every file of a report: Markdown here; JSON, CSV and the HTML page by their modules; each written whole
"""
