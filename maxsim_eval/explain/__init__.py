"""Which tokens a score comes from.

explaining.py  why a document has its score: the winning document token of every query token, and what each adds to the score
pictures.py    pictures of an `Explanation`
ranking.py     why a query's ranking is as it is: its top hit, its best relevant document, the first that it misses
"""
