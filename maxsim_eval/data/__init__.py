"""Collections: queries, documents and judgements from files, hubs or a generator.

assembling.py     a Task from its parts: judgements against queries and corpus, counts against the card
beir.py           BEIR-layout folders: `corpus.jsonl`, `queries.jsonl`, `qrels/<split>.tsv`
beir_download.py  fetching a public BEIR archive: download through `beir.util`, checksum, safe extraction, one rename into place
generated.py      the generated collection behind `demo`
irds.py           datasets of the package ir_datasets, by its ids
items.py          what a Task holds without holding it whole in memory: texts in one buffer, page images opened one at a time
loading.py        LOADERS: where a Task comes from
page_folder.py    a folder of page images as a dataset
real_mm_rag.py    REAL-MM-RAG (Wasserman et al., 2025): pages of reports and slides as images, questions in four wordings
subsets.py        subsets of a task: a seeded sample of its queries, then of its documents
task_facts.py     what a Result says of its task: counts, warnings, histograms of lengths
trec.py           TREC runs (`query Q0 document rank score tag`) and judgements (qrels)
cards/            dataset cards: one small TOML file per dataset, `cards/<source>/<name>.toml`
"""
