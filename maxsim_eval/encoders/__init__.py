"""Texts and pages to token embeddings: which encoders there are, and each of them.

checkpoints.py    where an encoder's checkpoint is: a folder, or a hub id at a commit; and the error where it cannot be had
gve.py            the `gve` encoder: Granite Vision Embedding, pages and text queries, by the checkpoint's own code
hf.py             the `hf:<id or path>` encoder
lexical.py        the `lexical` encoder: token embeddings from the words themselves, without any weights
memory.py         memory that runs out: halved batches, said once
model_encoder.py  what every encoder that runs a model shares
multi_vector.py   the `multi-vector:<id or path>` encoder
names.py          ENCODERS: how an encoder's name becomes an encoder
piece_process.py  a process that turns texts into word pieces, started by readers.py
readers.py        processes that read texts while a GPU is kept busy
refused_items.py  errors that know which item a model encoder cannot encode, or gives NaN for
staging.py        tokens from a GPU to ordinary memory
text_batches.py   runs texts through a model, in batches limited by their tokens
token_texts.py    what tokens stand for: word pieces by a tokenizer, patches of a page by a processor
unpadded.py       runs concatenated texts through a transformer, without padding
word_pieces.py    many texts to word pieces by the tokenizer's own Rust
"""
