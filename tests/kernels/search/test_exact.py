"""`exact_topk` gives brute force's bits: every kind of codes, dtype and awkward corpus, in one piece and in blocks."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
import torch

from inputs import on_cpu as cases
from maxsim_kernels import Packed, maxsim, pack, quantize_fp8, quantize_int8, stream_topk
from maxsim_kernels.search import Residuals, Rows, exact_topk, residuals_of, searching
from maxsim_kernels.search import rows as rows_module
from memory_cases import beyond_inputs
from places import ROOT
from search_cases import ANSWERS, CPU_KINDS, Awkward, Held, about, clustered, coded, same, spread

CASES = int(os.environ.get("MAXSIM_SEARCH_CASES", "1000"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN = re.compile(r"scores: NaN for query (\d+), document (\d+); need finite embeddings")
AWKWARD = Awkward(documents=24, tokens=6, kinds=10, tie=2.0**-22, least_power=-20, most_power=30, tiny=1e-38)
SHARES, CHANCES = (0.0, 0.25, 1.0), (0.03, 0.27, 0.7)  # brute force always, as it is, never


def one_case(seed: int) -> str:
    """Compare with brute force. How it was answered, one of `ANSWERS`: a NaN is refused by both, each by a pair that scores NaN."""
    draw = np.random.default_rng(seed)
    d, dtype = int(draw.choice([1, 2, 5, 16, 64])), DTYPES[draw.integers(3)]
    documents = AWKWARD.corpus(draw, d, dtype)
    queries = AWKWARD.corpus(draw, d, dtype)
    if draw.random() < 0.5 and len(documents.values):  # queries that are document tokens
        queries = queries.with_values(documents.values[draw.integers(0, len(documents.values), len(queries.values))])
    try:
        codes = coded(documents, CPU_KINDS[draw.integers(len(CPU_KINDS))])
    except ValueError:  # values that no scale of this granularity can hold
        codes = quantize_int8(documents)
    options = {"quantize_queries": bool(draw.integers(2)), "most_rescored": float(draw.choice(SHARES, p=CHANCES))}
    k = int(draw.choice([1, 2, 3, 5, 30]))
    cut = int(draw.integers(0, len(documents) + 1))
    sides = documents, codes
    if draw.random() < 0.5:
        spans = [torch.arange(cut), torch.arange(cut, len(documents))]
        blocks = [documents.select(span) for span in spans]
        sides = blocks, [quantize_int8(block) for block in blocks]
    try:
        expected = stream_topk(queries, [documents], k)
    except ValueError:
        with pytest.raises(ValueError, match="scores: NaN") as caught:
            exact_topk(queries, sides[0], k, codes=sides[1], **options)
        named = NAN.fullmatch(str(caught.value))
        assert named is not None, seed
        query, document = map(int, named.groups())  # of several NaN each names the first that it meets
        assert maxsim(queries, documents)[query, document].isnan(), seed
        return "refused"
    scores, indices, stats = exact_topk(queries, sides[0], k, codes=sides[1], **options)
    assert cases.same_bits(scores, expected[0]), seed
    assert torch.equal(indices, expected[1]), seed
    assert stats.certificate.holds, seed
    filled = int((queries.lengths > 0).sum()) * int((documents.lengths > 0).sum())
    if stats.fell_back:
        return "brute force"
    return "pruned" if int(stats.survivors.sum()) < filled else "all rescored"


@pytest.mark.parametrize("part", range(5))
def test_many_awkward_cases(part, monkeypatch):
    monkeypatch.setattr(searching, "_LEAST_DOCUMENTS", 4)  # several pieces in so small a corpus
    monkeypatch.setattr(searching, "_CELLS", 8)
    for seed in range(part * 25, part * 25 + 25):
        one_case(seed)


@pytest.mark.slow
@pytest.mark.every_change(on="cpu")
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_awkward_cases(part, monkeypatch, request):
    """`MAXSIM_SEARCH_CASES=10000` for all that docs/search.md speaks of: minutes."""
    if part % 2:
        monkeypatch.setattr(searching, "_LEAST_DOCUMENTS", 4)
        monkeypatch.setattr(searching, "_CELLS", 8)
    answers = [one_case(seed) for seed in range(1000 * (part + 1), 1000 * (part + 1) + CASES // 10)]
    request.node.user_properties += [(answer, answers.count(answer)) for answer in ANSWERS]  # of which pytest's XML tells
    assert answers.count("brute force") < len(answers) / 2


def test_most_recorded_cases_were_searched():
    """Those that docs/search.md speaks of: brute force would be compared with itself."""
    held = json.loads((ROOT / "docs" / "results" / "cpu" / "search_cases.json").read_text(encoding="utf-8"))
    answers = held["answers"]
    assert sum(answers.values()) == held["equal"] == held["cases"] == 10_000
    assert answers["pruned"] + answers["all rescored"] > 0.6 * held["cases"]
    assert answers["pruned"] > 0.25 * held["cases"]


def pruned_share(seed: int) -> float:
    """The share of pairs of one case that was ruled out, answers being brute force's."""
    draw = np.random.default_rng(seed)
    documents, queries, k = spread(draw, DTYPES[draw.integers(3)])
    codes = quantize_int8(documents, str(draw.choice(["token", "document"])), bool(draw.integers(2)))
    blocks = [(documents, codes)]
    if draw.random() < 0.3:
        cut = int(draw.integers(len(documents)))
        halves = [documents.select(range(cut)).compact(), documents.select(range(cut, len(documents))).compact()]
        blocks = [(half, quantize_int8(half, "document")) for half in halves]
    expected = stream_topk(queries, [documents], k)
    sides = [list(side) for side in zip(*blocks, strict=True)]
    scores, indices, stats = exact_topk(queries, sides[0], k, codes=sides[1], quantize_queries=bool(draw.integers(2)))
    assert cases.same_bits(scores, expected[0]), seed
    assert torch.equal(indices, expected[1]), seed
    assert stats.certificate.holds
    return 1 - float(stats.survivors.sum()) / (len(queries) * len(documents))


def test_cases_of_which_most_is_pruned():
    shares = np.array([pruned_share(seed) for seed in range(25)])
    assert (shares > 0.5).mean() > 0.9


@pytest.mark.slow
@pytest.mark.every_change(on="cpu")
def test_hundreds_of_cases_of_which_most_is_pruned():
    shares = np.array([pruned_share(seed) for seed in range(100, 100 + CASES // 2)])
    assert (shares > 0.5).mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CPU_KINDS)
def test_a_corpus_that_prunes(kind, dtype):
    documents = clustered(600, 64, 3, dtype)
    queries = about(documents, 20, 4)
    codes = coded(documents, kind)
    for quantize_queries in (True, False):
        stats = same(queries, documents, 5, codes, quantize_queries=quantize_queries)
        narrow = kind.split()[0] in ("int8", "affine")
        assert not narrow or stats.fell_back == ""
        assert stats.scanned == 600
        if narrow:
            assert stats.survivors.double().mean() < 60
    stored = residuals_of(documents, codes)
    assert torch.equal(
        same(queries, documents, 5, codes, residuals=stored).survivors, same(queries, documents, 5, codes).survivors
    )


def test_a_rising_threshold_prunes_later_blocks_harder():
    documents = clustered(2000, 32, 5)
    queries = about(documents, 10, 6)
    expected = stream_topk(queries, [documents], 10)
    counts = []
    for size in (2000, 250):
        blocks = [documents.select(torch.arange(first, first + size)) for first in range(0, 2000, size)]
        codes = [quantize_int8(block, "document") for block in blocks]
        # Generators: nothing is held longer than its turn.
        scores, indices, stats = exact_topk(queries, iter(blocks), 10, codes=iter(codes))
        assert cases.same_bits(scores, expected[0])
        assert torch.equal(indices, expected[1])
        counts.append(int(stats.survivors.sum()))
    # With thresholds of their own, 8 blocks would each rescore 10 documents or more for 10 queries.
    assert counts[1] < 8 * 10 * 10 / 2


def test_views_masks_and_one_query():
    documents, d = clustered(300, 24, 7), 24
    codes = quantize_int8(documents)
    dense = cases.gauss(4, 9, d)
    lengths, mask = torch.tensor([9, 0, 3, 1]), cases.mask(4, 9)
    for options in ({}, {"query_lengths": lengths}, {"query_mask": mask}, {"query_lengths": lengths, "query_mask": mask}):
        expected = stream_topk(dense, [documents], 7, **options)
        for held in (documents, cases.scattered(documents)):
            scores, indices, _ = exact_topk(dense, held, 7, codes=codes, **options)
            assert cases.same_bits(scores, expected[0])
            assert torch.equal(indices, expected[1])
    alone = exact_topk(dense[0], documents, 7, codes=codes)
    assert alone[0].shape == alone[1].shape == (7,)
    assert cases.same_bits(alone[0], stream_topk(dense[0], [documents], 7)[0])
    needing = dense.clone().requires_grad_()
    assert not exact_topk(needing, documents, 7, codes=codes)[0].requires_grad


def test_queries_without_tokens_and_documents_without_tokens():
    documents = pack([torch.randn(n, 8) for n in (2, 0, 3, 0, 1)])
    queries = pack([torch.randn(0, 8), torch.randn(2, 8)])
    stats = same(queries, documents, 4, quantize_int8(documents), most_rescored=1.0)
    assert stats.survivors.tolist() == [0, 3]
    same(pack([], dim=8), documents, 4, quantize_int8(documents))
    same(queries, pack([], dim=8), 4, quantize_int8(pack([], dim=8)))


def test_all_equal_falls_back_and_says_so():
    documents = pack([torch.ones(3, 16)] * 50)
    stats = same(pack([torch.ones(2, 16)]), documents, 5, quantize_int8(documents))
    assert stats.fell_back == "1 of 1 pieces by brute force: more than 25% of the pairs could still be among the best"
    assert stats.survivors.tolist() == [50]
    assert stats.rescored_bytes == 50 * 3 * 16 * 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_what_is_not_finite(side, value):
    documents, queries = clustered(200, 16, 8), cases.gauss(3, 4, 16)
    if side == "documents":
        documents.values[documents.starts[[150, 160]], 3] = value
    else:
        queries[1, 2, 5] = value
    codes = quantize_int8(documents)
    answers = []
    for search in (lambda: stream_topk(queries, [documents], 5), lambda: exact_topk(queries, documents, 5, codes=codes)):
        try:
            answers.append([one.tolist() for one in search()[:2]])
        except ValueError as error:
            answers.append([str(error)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("late", [3000, 6000, 8500])
def test_the_nan_that_is_named_is_brute_forces(late):
    """A later query meets it in an early document, the first query in a late one: pieces of both paths decide which is named."""
    draw = torch.Generator().manual_seed(0)
    values, queries = torch.randn(9000, 4, generator=draw), 1e-3 * torch.rand(300, 1, 4, generator=draw)
    values[5], values[late], queries[1, 0, 0] = torch.tensor([torch.inf, 0, 0, 0]), torch.nan, 0
    documents = Packed(values, torch.arange(9001))
    codes = quantize_int8(documents)
    with pytest.raises(ValueError, match=r"scores: NaN for query \d, document") as expected:
        stream_topk(queries, [documents], 3)
    for held in (documents, Held(documents)):
        with pytest.raises(ValueError, match=r"scores: NaN") as found:
            exact_topk(queries, held, 3, codes=codes, residuals=residuals_of(documents, codes))
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_scores_over_codes_that_are_not_finite_say_nothing(scale):
    documents = clustered(600, 64, 3)
    codes = quantize_int8(documents, "document")
    residuals = residuals_of(documents, codes)
    codes.scales[::50] = scale
    for k in (5, 12):
        stats = same(about(documents, 20, 4), documents, k, codes, residuals=residuals)
        assert stats.survivors.double().mean() < 80


def test_wrong_residuals_are_seen_to_matter(monkeypatch):
    """With residuals of nothing the answer is that of the codes: the tests above compare what they should."""
    documents = clustered(400, 16, 9)
    queries = about(documents, 30, 10)
    codes = quantize_fp8(documents)
    none = Residuals(torch.zeros(400), torch.zeros(400))
    expected = stream_topk(queries, [documents], 10)
    found = exact_topk(queries, documents, 10, codes=codes, residuals=none, most_rescored=1.0)
    assert not torch.equal(found[1], expected[1])
    same(queries, documents, 10, codes, most_rescored=1.0)


def test_a_guess_that_is_wrong_changes_nothing(monkeypatch):
    """Above every score nothing is scored at first, far below most documents are: what bounds leave follows in any case."""
    documents = clustered(600, 64, 3)
    queries = about(documents, 20, 4)
    counts = []
    for share in (0.0, 0.1, 1.0, -1e9):
        monkeypatch.setattr(searching, "GUESSED", share)
        counts.append(same(queries, documents, 5, quantize_int8(documents), most_rescored=1.0).survivors.sum())
    assert counts == sorted(counts)
    assert counts[-1] == 20 * 600


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", [1, 1 << 14, 1 << 26])
def test_documents_that_are_read_when_they_are_needed(dtype, read, monkeypatch):
    monkeypatch.setattr(rows_module, "_READ", read)
    documents = clustered(900, 64, 3, dtype)
    queries = about(documents, 20, 4)
    codes = quantize_int8(documents, "document")
    residuals = residuals_of(documents, codes)
    expected = exact_topk(queries, documents, 5, codes=codes)
    held = Held(documents)
    found = exact_topk(queries, held, 5, codes=codes, residuals=residuals)
    assert cases.same_bits(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2].survivors, expected[2].survivors)
    assert found[2].rescored_bytes == expected[2].rescored_bytes
    assert found[2].certificate.holds
    assert held.reads.max() <= 2, "once among the best, or once among those that might be"
    assert (held.reads > 0).sum() < 700, "most are never read"
    spans = [slice(first, first + 300) for first in range(0, 900, 300)]
    blocks = [Held(documents.select(range(span.start, span.stop)).compact()) for span in spans]
    parts = [quantize_int8(block.documents, "document") for block in blocks]
    again = exact_topk(queries, blocks, 5, codes=parts, residuals=[residuals[span] for span in spans])
    assert cases.same_bits(again[0], expected[0])
    assert torch.equal(again[1], expected[1])


def test_brute_force_over_documents_that_are_read():
    documents = Packed(torch.ones(600, 8), torch.arange(0, 601, 2))
    held, codes = Held(documents), quantize_int8(documents)
    found = exact_topk(torch.ones(2, 3, 8), held, 4, codes=codes, residuals=residuals_of(documents, codes))
    assert found[1].tolist() == [[0, 1, 2, 3]] * 2
    assert found[2].fell_back
    nothing = Held(documents.select([]).compact())
    none = exact_topk(
        torch.ones(2, 3, 8), nothing, 1, codes=quantize_int8(nothing.documents), residuals=Residuals(*torch.zeros(2, 0))
    )
    assert none[1].tolist() == [[-1]] * 2


def test_rows_that_cannot_be():
    documents = clustered(20, 8, 1)
    codes = quantize_int8(documents)
    with pytest.raises(ValueError, match="residuals: got none with Rows"):
        exact_topk(torch.ones(1, 1, 8), Held(documents), 1, codes=codes)
    with pytest.raises(ValueError, match=r"lengths: got torch.int32"):
        Rows.__init__(Held(documents), torch.zeros(3, dtype=torch.int32), 8, torch.float32)
    liar = Held(documents)
    liar.documents = clustered(20, 8, 2)
    with pytest.raises(ValueError, match="documents: read gave"):
        exact_topk(torch.ones(1, 1, 8), liar, 1, codes=codes, residuals=residuals_of(documents, codes))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(300, 8, 30000, 5, 0.25), (20, 8, 60000, 10, 0.25), (300, 8, 14000, 5, 0.0)], ids=str)
def test_memory_beyond_inputs_on_a_cpu(shape):
    """Below 256 MB whatever the corpus: bounds of 9 million pairs, or 300 MB of documents once more, would not fit."""
    code = """
        import torch
        from maxsim_kernels import Packed, quantize_int8
        from maxsim_kernels.search import exact_topk
        queries, length, documents, tokens, share = given
        draw = torch.Generator().manual_seed(0)
        topics = torch.nn.functional.normalize(torch.randn(documents // 20, 128, generator=draw), dim=1)
        def about(count, each, noise):
            values = topics.repeat(-(-count // len(topics)), 1)[:count].repeat_interleave(each, 0)
            values += noise * torch.randn(values.shape, generator=draw)
            return Packed(torch.nn.functional.normalize(values, dim=1), torch.arange(count + 1) * each)
        documents, queries = about(documents, tokens, 0.04), about(queries, length, 0.02)
        codes, one = quantize_int8(documents, "document"), documents.select([0]).compact()
        exact_topk(queries, one, 1, codes=quantize_int8(one))
        def call():
            stats = exact_topk(queries, documents, 10, codes=codes, most_rescored=share)[2]
            assert bool(stats.fell_back) == (share == 0), stats.fell_back
    """
    assert beyond_inputs(code, *shape) < 256 << 20


def test_refusals():
    documents = clustered(10, 8, 1)
    codes, queries = quantize_int8(documents), cases.gauss(2, 3, 8)
    halves = [documents.select([0, 1]), documents.select([2, 3])]
    for match, call in {
        r"k: got 0, need 1 or more": lambda: exact_topk(queries, documents, 0, codes=codes),
        r"most_rescored: got 2, need 0 to 1": lambda: exact_topk(queries, documents, 1, codes=codes, most_rescored=2),
        r"codes: got 10 documents of d = 8, need 2": lambda: exact_topk(queries, halves[0], 1, codes=codes),
        r"codes, residuals: got one piece": lambda: exact_topk(queries, halves, 1, codes=codes),
        r"codes, residuals: got blocks": lambda: exact_topk(queries, documents, 1, codes=[codes]),
        r"codes: got no more blocks as block 1": lambda: exact_topk(queries, halves, 1, codes=[quantize_int8(halves[0])]),
        r"documents: got Tensor as block 0, need Packed": lambda: exact_topk(queries, [queries], 1, codes=[codes]),
        r"documents: got no blocks": lambda: exact_topk(queries, [], 1, codes=[]),
        r"residuals: got 2 documents, need 10": lambda: exact_topk(
            queries, documents, 1, codes=codes, residuals=Residuals(torch.zeros(2), torch.zeros(2))
        ),
        r"documents: got torch.float32, need the queries' dtype": lambda: exact_topk(queries.half(), documents, 1, codes=codes),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
