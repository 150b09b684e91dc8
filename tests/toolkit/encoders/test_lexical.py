"""The lexical encoder: the same text gives the same bytes, and real judgements mean something without a model."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from maxsim_eval.data.loading import load_task
from maxsim_eval.data.subsets import limit_queries
from maxsim_eval.encoders.lexical import (
    K1,
    B,
    LexicalEncoder,
    inverse_document_frequency,
    stem_vectors,
)
from maxsim_eval.errors import UsageError
from maxsim_kernels import Packed

TEXTS = [
    "Glaciers carve valleys; glaciers melt.",
    "",
    "the of and",
    "A cat, a CAT and two cats: IL-6 and naïve T-cells (n = 17).",
    "日本 ü\u0301 x_y don't",
]
GOLDEN = {
    "document": "30624c0d3fc350bd6f3be3600fafc074bb39466132c8e8839be26bb6c7bb3e8f",
    "query": "bf1e9ed7532c5527f9e6c3a202a3462817296a6a0b56ba7a6718aeb095fb1a30",
}


def digest(packed: Packed) -> str:
    assert packed.offsets is not None
    data = packed.values.numpy().astype("<f4").tobytes() + packed.offsets.numpy().astype("<i8").tobytes()
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def encoder() -> LexicalEncoder:
    encoder = LexicalEncoder()
    encoder.prepare(TEXTS)
    return encoder


@pytest.mark.parametrize("role", ["document", "query"])
def test_the_bytes_never_change(encoder, role):
    """If this fails on purpose, raise CODE_VERSION: cached embeddings of the old bytes must not be taken for new ones."""
    assert digest(encoder.encode(TEXTS, role)) == GOLDEN[role]


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_process_or_its_hash_seed(encoder):
    code = (
        "import hashlib, sys; from maxsim_eval.encoders.lexical import LexicalEncoder;"
        "e = LexicalEncoder(); v = e.encode(['glaciers carve valleys', 'two cats'], 'document').values;"
        "print(hashlib.sha256(v.numpy().tobytes()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7", "PATH": ""}
    )
    here = encoder.encode(["glaciers carve valleys", "two cats"], "document").values
    assert run.stdout.strip() == hashlib.sha256(here.numpy().tobytes()).hexdigest()


def test_the_bytes_do_not_depend_on_what_was_encoded_before_or_beside(encoder):
    together = encoder.encode(TEXTS, "document")
    for number in (3, 0, 4):
        assert torch.equal(LexicalEncoder().encode([TEXTS[number]], "document").values, together[number])


def test_rows_shapes_and_empty_texts(encoder):
    packed = encoder.encode(TEXTS, "document")
    assert packed.values.dtype == torch.float32
    assert packed.values.shape[1] == encoder.dim == 128
    assert packed.lengths.tolist() == [4, 0, 0, 8, 4]  # distinct stems, stop words dropped
    assert len(encoder.encode([], "document")) == 0
    assert encoder.encode(["", "?!"], "query").lengths.tolist() == [0, 0]


def test_words(encoder):
    assert encoder.token_texts("cafe\u0301 ﬁne", "query") == encoder.token_texts("café fine", "query") == ["café", "fine"]
    assert encoder.token_texts("The CAT's naïve_x T-cells, 3.5 µg", "query") == ["cat", "naïv", "x", "cell", "3", "5", "μg"]


def test_a_document_token_is_as_long_as_its_saturated_term_frequency(encoder):
    packed = encoder.encode(["melt glacier glaciers"], "document")
    saturation = K1 * (1 - B + B * 3 / 150)
    expected = torch.tensor([1 / (1 + saturation), 2 / (2 + saturation)])
    assert torch.allclose(packed.values.norm(dim=1), expected)


def test_a_query_token_is_as_long_as_its_idf(encoder):
    packed = encoder.encode(["glacier unheard"], "query")
    expected = [math.log(1 + (5 - n + 0.5) / (n + 0.5)) for n in (1, 0)]
    assert torch.allclose(packed.values.norm(dim=1), torch.tensor(expected, dtype=torch.float32))


def test_idf_is_correctly_rounded():
    for documents, containing in ((5183, 0), (5183, 17), (8841823, 8841823), (1, 1)):
        exact = math.log1p((documents - containing + 0.5) / (containing + 0.5))
        assert inverse_document_frequency(documents, containing) == pytest.approx(exact, rel=1e-14)


def test_related_words_resemble_each_other_and_others_do_not():
    vectors = stem_vectors(["microstructur", "structur", "banana", "c"])
    assert np.allclose((vectors * vectors).sum(axis=1), 1)
    similar = vectors @ vectors.T
    assert similar[0, 1] > 0.2 > abs(similar[1, 2])
    many = stem_vectors([f"w{n}" for n in range(500)])
    assert abs((many @ many.T - np.eye(500)).mean()) < 0.05


def test_limits_keep_the_first_stems():
    encoder = LexicalEncoder(max_query_tokens=2, max_document_tokens=3)
    text = " ".join(f"word{chr(97 + n)}" for n in range(9))
    encoder.prepare([text])
    assert encoder.encode([text], "query").lengths.tolist() == [2]
    short = encoder.encode([text], "document")
    assert short.lengths.tolist() == [3]
    assert torch.equal(short.values, LexicalEncoder().encode([text], "document").values[:3])
    assert encoder.fingerprint("query")["max_tokens"] == 2


def test_fingerprints_tell_roles_options_and_corpus_dependence_apart():
    encoder = LexicalEncoder()
    query, document = encoder.fingerprint("query"), encoder.fingerprint("document")
    assert query["corpus_statistics"] is True
    assert "corpus_statistics" not in document
    assert query != document
    assert "snowball" in encoder.revision
    assert LexicalEncoder(max_document_tokens=9).fingerprint("document") != document


def test_what_it_refuses(encoder):
    with pytest.raises(UsageError, match="call prepare"):
        LexicalEncoder().encode(["x"], "query")
    with pytest.raises(UsageError, match="item 1 is a bytes"):
        encoder.encode(["x", b"y"], "document")
    with pytest.raises(UsageError, match="max_query_tokens: got 0"):
        LexicalEncoder(max_query_tokens=0)


def test_a_full_word_cache_changes_nothing(encoder, monkeypatch):
    expected = digest(encoder.encode(TEXTS, "document"))
    monkeypatch.setattr("maxsim_eval.encoders.lexical._CACHED_WORDS", 3)
    assert digest(encoder.encode(TEXTS, "document")) == expected
    assert digest(encoder.encode(TEXTS, "document")) == expected


def plain_ndcg(task, encoder) -> dict[str, float]:
    """nDCG@10 and Recall@100 by the plainest means: a matrix product and a maximum per document."""
    import pytrec_eval

    encoder.prepare(task.documents)
    documents, queries = encoder.encode(task.documents, "document"), encoder.encode(task.queries, "query")
    scores = np.full((len(queries), len(documents)), -np.inf, dtype=np.float32)
    ends, filled = documents.offsets.numpy(), np.flatnonzero(documents.lengths.numpy())
    for start in range(0, len(filled), 256):
        block = filled[start : start + 256]
        first, last = ends[block[0]], ends[block[-1] + 1]
        similar = (queries.values @ documents.values[first:last].T).numpy()
        best = np.maximum.reduceat(similar, ends[block] - first, axis=1)
        scores[:, block] = np.add.reduceat(best, queries.offsets.numpy()[:-1], axis=0)
    run = {}
    for row, name in zip(scores, task.query_ids):
        top = np.lexsort((np.arange(len(row)), -row))[:100]
        run[name] = {task.document_ids[i]: float(1000 - rank) for rank, i in enumerate(top)}
    qrels = {name: dict(row) for name, row in task.qrels.items()}
    values = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100"}).evaluate(run).values()
    return {key: sum(value[key] for value in values) / len(qrels) for key in ("ndcg_cut_10", "recall_100")}


def test_the_demo_is_neither_trivial_nor_hopeless(tmp_path):
    figures = plain_ndcg(load_task("demo", "small", data_dir=tmp_path), LexicalEncoder())
    assert 0.5 <= figures["ndcg_cut_10"] <= 0.9


@pytest.mark.slow
@pytest.mark.scifact
def test_quality_and_speed_on_scifact(scifact_data):
    task = load_task("beir", "scifact", data_dir=scifact_data)
    begin = time.process_time()
    encoder = LexicalEncoder()
    packed = encoder.encode(task.documents, "document")
    assert time.process_time() - begin < 60  # about 4 s
    assert packed.values.shape[0] / len(packed) < 110  # scoring cost grows with it
    figures = plain_ndcg(limit_queries(task, 100), encoder)  # of all 300 queries: 0.6853 and 0.9220
    assert figures["ndcg_cut_10"] == pytest.approx(0.7401, abs=0.002)
    assert figures["recall_100"] == pytest.approx(0.9300, abs=0.004)
