"""Reranking scores: the path's own for what is listed and nothing else, with the same bits whatever the blocks."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from candidate_cases import DOCUMENTS, QUERIES, Data, cuts, listed_data, scores_of, whole_of
from fixtures import one_thread  # noqa: F401 - for every test here
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.selection import Selection
from maxsim_eval.scoring import candidates as module
from maxsim_eval.scoring.candidates import Candidates, pair_scores
from maxsim_eval.scoring.paths import PATHS
from maxsim_kernels import BitTokens, Packed, ResidualTokens, maxsim, maxsim_reference, pack, quantize_int8
from maxsim_kernels.topk import TopK
from scoring_cases import of_sets

EMPTY_QUERY = 2


@pytest.fixture(scope="module", params=[True, False], ids=["ties", "normal"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return listed_data(tmp_path_factory.mktemp("entry") / "e", grid=request.param)


def full_scores(name: str, data: Data) -> Tensor:
    path = PATHS[name]
    whole = data.entry.load()
    full = path.score(path.queries(data.queries), path.documents(whole, Corpus(data.entry, quiet=True)))
    assert isinstance(full, Tensor)
    return full


def listed_alone(full: Tensor, candidates: Candidates) -> Tensor:
    """`[Nq, M]`: columns of the union, -inf where a pair is not listed."""
    mask = torch.zeros(full.shape, dtype=torch.bool)
    for query, rows in enumerate(candidates.of(range(candidates.queries))):
        mask[query, torch.from_numpy(rows)] = True
    return full.masked_fill(~mask, -torch.inf)[:, torch.from_numpy(candidates.union())]


def bound(data: Data) -> Tensor:
    """`[Nq, 1]`: what the contract lets two scores of one pair differ by (2e-6 of the norms each)."""
    largest = float(data.entry.load().values.norm(dim=1).max())
    norms = [float(data.queries[n].norm(dim=1).sum()) for n in range(QUERIES)]
    return torch.tensor(norms).unsqueeze(1) * (2 * 2e-6 * largest)


@pytest.mark.parametrize("name", PATHS)
def test_listed_pairs_have_the_paths_own_scores(name: str, data: Data) -> None:
    need = listed_alone(full_scores(name, data), data.candidates)
    found = scores_of(name, data, [(0, len(data.candidates.union()))])
    assert torch.equal(torch.isneginf(found), torch.isneginf(need))
    finite = torch.isfinite(need)
    error = (found - need).abs().masked_fill(~finite, 0)
    assert (error <= bound(data)).all()
    if data.grid and not name.startswith(("int8", "fp8")):
        assert torch.equal(found, need), "numbers that are exact everywhere"


@pytest.mark.parametrize("name", PATHS)
def test_every_cut_gives_the_same_bits(name: str, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(data.candidates.union())
    found = scores_of(name, data, [(0, size)])
    for spans in cuts(size):
        assert scores_of(name, data, spans).numpy().tobytes() == found.numpy().tobytes(), f"{len(spans)} blocks"
    monkeypatch.setattr(module, "_MOST_PAIRS", 3)
    assert scores_of(name, data, [(0, size)]).numpy().tobytes() == found.numpy().tobytes(), "a few pairs a call"


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("k", [3, DOCUMENTS])
def test_the_ranking_is_that_of_the_listed_documents(name: str, k: int, data: Data) -> None:
    """As sorting the listed scores of everything at once: descending, ties by the document's place in the corpus."""
    union, size = data.candidates.union(), len(data.candidates.union())
    # Where numbers are not exact, the order of scores that nearly tie is that of the pairs' own bits.
    need = listed_alone(full_scores(name, data), data.candidates) if data.grid else scores_of(name, data, [(0, size)])
    for spans in cuts(size):
        best = TopK(QUERIES, k)
        scores = scores_of(name, data, spans)
        for start, stop in spans:
            best.add(scores[:, start:stop])
        for query, row in enumerate(need.tolist()):
            order = sorted((n for n in range(size) if row[n] != -math.inf), key=lambda n, row=row: (-row[n], n))[:k]  # type: ignore[misc]
            found = [n for n in best.indices[query].tolist() if n >= 0]
            assert found == order, f"query {query}"
            listed = set(data.candidates.of([query])[0].tolist())
            assert {int(union[n]) for n in found} <= listed
            if query == EMPTY_QUERY:
                assert len(found) == min(k, len(listed)), "a query without tokens scores 0 everywhere"


def test_duplicates_have_equal_bits(data: Data) -> None:
    union = data.candidates.union().tolist()
    for name in PATHS:
        scores = scores_of(name, data, [(0, len(union))])[0]
        for group in ((1, 2, 12, 59), (26, 30, 31)):
            assert len({float(scores[union.index(n)]) for n in group}) == 1, name


def test_a_limited_corpus_is_a_selection_of_a_selection(data: Data) -> None:
    rows = np.arange(0, DOCUMENTS, 2)
    chosen = of_sets([{3, 5}, {0, 29}]).choose(Selection(data.entry, rows))
    assert chosen.entry is data.entry
    assert chosen.rows.tolist() == [0, 6, 10, 58]
    assert torch.equal(whole_of(chosen).values, data.entry.load().select([0, 6, 10, 58]).compact().values)


def test_only_listed_documents_are_read(data: Data) -> None:
    chosen = of_sets([{3, 5}, set(), {5}]).choose(data.entry)
    lengths = data.entry.lengths()
    assert chosen.tokens == int(lengths[3] + lengths[5]) > 0
    assert sum(block.values.shape[0] for block in chosen.blocks(1 << 30)) == chosen.tokens


def test_a_block_is_one_call(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    real = module.maxsim_pairs

    def counted(queries: Packed, documents: Packed) -> object:
        sizes.append((len(queries), len(documents)))
        return real(queries, documents)

    monkeypatch.setattr(module, "maxsim_pairs", counted)
    union = len(data.candidates.union())
    scores_of("fp16", data, [(0, union)])
    assert sizes == [(data.candidates.pairs, data.candidates.pairs)]
    sizes.clear()
    scores_of("int8", data, [(0, 10), (10, union)])
    assert len(sizes) == 2
    assert sum(one for one, _ in sizes) == data.candidates.pairs
    sizes.clear()
    scores_of("fp32", data, [(0, union)])
    assert not sizes, "the reference must not be the fused operator"


def test_blocks_without_a_pair_and_corpora_without_documents() -> None:
    queries, documents = pack([torch.ones(2, 4)] * 2), pack([torch.ones(3, 4)] * 5)
    nothing = of_sets([set(), {4}])
    for score in (maxsim, maxsim_reference):
        assert pair_scores(score, queries, documents.select([0, 1]).compact(), nothing).tolist() == [[-math.inf] * 2] * 2
        assert pair_scores(score, queries, documents.select([0, 1]).compact(), nothing, 3).tolist()[1] == [-math.inf, 8.0]
        assert pair_scores(score, queries, pack([], dim=4), nothing).shape == (2, 0)


def test_arguments_that_do_not_fit_are_refused() -> None:
    queries, documents = pack([torch.ones(2, 4)] * 2), pack([torch.ones(3, 4)] * 5)
    with pytest.raises(ValueError, match="queries: got 2, need the 1"):
        pair_scores(maxsim, queries, documents, of_sets([{0}]))
    with pytest.raises(ValueError, match="dense codes"):
        pair_scores(maxsim, queries, quantize_int8(torch.ones(5, 3, 4)), of_sets([{0}, {1}]))


def test_affine_codes_and_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    documents = pack([torch.randn(n, 8, generator=generator) for n in (3, 0, 5, 2)])
    queries = pack([torch.randn(4, 8, generator=generator) for _ in range(2)])
    listed = of_sets([{0, 1, 2}, {2, 3}])
    for granularity in ("token", "document", "corpus"):
        codes = quantize_int8(documents, granularity, affine=True)
        full = maxsim(queries, codes)
        assert isinstance(full, Tensor)
        found = pair_scores(maxsim, queries, codes, listed)
        assert torch.allclose(found, listed_alone(full, listed), atol=1e-4)
    documents.values[3] = math.nan  # of document 2
    for score in (maxsim, maxsim_reference):
        bad = torch.isnan(pair_scores(score, queries, documents, listed))
        assert bad.tolist() == [[False, False, True, False], [False, False, True, False]]


def test_tokens_of_few_bits_and_options_of_the_operator() -> None:
    """What codecs give on a GPU goes through `maxsim_pairs` too, with the options that the path's operator has."""
    generator = torch.Generator().manual_seed(0)
    rows = pack([torch.randint(0, 256, (n, 4), dtype=torch.uint8, generator=generator) for n in (3, 0, 5, 2)])
    queries = pack([torch.randn(4, 16, generator=generator) for _ in range(2)])
    listed = of_sets([{0, 1, 2}, {2, 3}])
    residuals = ResidualTokens(
        rows, torch.zeros(10, dtype=torch.int32), torch.randn(1, 16, generator=generator), torch.arange(4.0)
    )
    for documents in (BitTokens(rows, torch.rand(10, generator=generator).half(), 2, 16), residuals):
        for score in (maxsim, partial(maxsim, quantize_queries=False)):
            full = score(queries, documents)
            assert isinstance(full, Tensor)
            assert torch.allclose(pair_scores(score, queries, documents, listed), listed_alone(full, listed), atol=1e-4)
