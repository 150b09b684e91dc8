"""Scores of a corpus by a path: in units, streamed, resumable, the same bits however the work is cut.

asked.py          what every path of one evaluation is asked
certified.py      paths that certify: the exact top-k of the stored embeddings through a scan of their INT8 copy
candidates.py     reranking: the (query, document) pairs of an existing run are scored, and only their documents are read
compressed.py     codecs as scoring paths: documents are stored in fewer bytes and decoded while they are scored
finite.py         scores that are no finite numbers: which pair, why, and what can be done
job.py            what the processes of an evaluation share, and the scoring of all paths by it
own_functions.py  scoring paths by name, and a user's own function as one
paths.py          scoring paths: how token embeddings become scores
proving.py        stored values proven on the GPU that scores them
records.py        what an evaluation has finished, kept on disk so that an interrupted one goes on where it stopped
scoring.py        scoring a corpus by one path
sources.py        where the documents of a path come from: the embeddings, or a quantised copy
stream.py         one path over many units of documents, in one stream
units.py          how an evaluation is divided
"""
