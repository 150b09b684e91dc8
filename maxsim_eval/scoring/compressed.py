"""Codecs (`maxsim_eval.codecs`) as scoring paths: documents are stored in fewer bytes and decoded while they are scored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.selection import Documents, choose
from maxsim_eval.codecs.codec import Codec, Fitted
from maxsim_eval.codecs.names import codec_of
from maxsim_eval.hashing import canonical, feed
from maxsim_eval.scoring.paths import ScoringPath
from maxsim_kernels import Packed, maxsim

_SEED = 0
_COPIES = 6  # of a block in FP32, that encoding and decoding it takes: tokens, products, codes, decoded tokens
_BLOCK = 64 << 20


@cache
def codec_path(name: str) -> ScoringPath:
    """The path of a codec, not yet fitted to a corpus; errors as of `codecs.names.codec_of`."""
    codec = codec_of(name)
    score = maxsim if codec.coder.int8_queries else partial(maxsim, quantize_queries=False)
    return ScoringPath(codec.description, _unfitted, _unfitted, score, _COPIES, codec=codec)


def _unfitted(*_: object) -> Packed:
    raise AssertionError("a codec is fitted to the corpus before it is used")


def fitted_path(path: ScoringPath, state: Mapping[str, Tensor]) -> ScoringPath:
    """The path with what its codec learned of a corpus."""
    assert path.codec is not None
    fitted = Fitted(path.codec, state)
    return replace(path, queries=fitted.queries, documents=lambda block, _, first: fitted.documents(block, first))


def fit(codec: Codec, corpus: Corpus) -> dict[str, Tensor]:
    """What the codec learns of the whole corpus, by a sample that depends on the corpus alone; errors as of `Codec.fit`."""
    documents = corpus.entry if corpus.scaled is None else corpus.scaled
    words = corpus.words if corpus.scaled is None else None
    return codec.fit(lambda tokens: sample(documents, tokens), documents.dim, documents.tokens, words)


def sample(documents: Documents, tokens: int) -> Packed:
    """A seeded choice of documents with `tokens` tokens or more in all (else all documents), in order; float32, on the CPU."""
    lengths = documents.lengths()
    order = np.random.default_rng(_SEED).permutation(len(lengths))
    count = int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1
    chosen = choose(documents, np.sort(order[:count]))
    blocks = [block.to(torch.float32) for block in chosen.blocks(_BLOCK)]
    values = torch.cat([block.values for block in blocks]) if blocks else torch.empty(0, documents.dim)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen.lengths())])
    return Packed(values, torch.from_numpy(offsets))


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of what a codec learned."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        feed(found, [canonical([name, list(value.shape), str(value.dtype)]), value.numpy().tobytes()])
    return found.hexdigest()


def document_bytes(codec: Codec, state: Mapping[str, Tensor], documents: Documents) -> float:
    """Bytes that a document takes as stored by the codec, its share of the codebooks included: the mean."""
    kept = int(codec.lengths(documents.lengths()).sum())
    return (kept * codec.token_bytes(documents.dim, state) + codec.shared_bytes(state)) / max(1, documents.documents)
