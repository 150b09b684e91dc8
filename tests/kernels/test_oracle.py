"""The oracle itself, on examples worked out by hand: a wrong truth would let every other test agree with a wrong operator."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
import truth
from inputs import on_cpu as make
from maxsim_kernels import Int8Tokens, Packed, quantize_fp8, quantize_int8


@pytest.fixture
def example():
    """Two queries of two tokens, three documents of two tokens, d = 2."""
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [-1.0, 2.0]]])
    documents = torch.tensor([[[1.0, 2.0], [3.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]], [[0.5, 0.0], [0.0, 0.5]]])
    return queries, documents


def test_scores_and_argmax(example):
    truth = oracle.maxsim(*example)
    # by hand: query 0 against document 0 is max(1, 3) + max(2, -1)
    assert truth.scores.tolist() == [[5.0, -2.0, 1.0], [6.0, -3.0, 1.5]]
    assert truth.argmax.tolist() == [[[1, 0], [0, 0], [0, 1]], [[0, 0], [0, 0], [0, 1]]]
    assert truth.bound[0].tolist() == pytest.approx([2 * math.sqrt(10), 2 * math.sqrt(2), 1.0])


def test_masks(example):
    queries, documents = example
    truth = oracle.maxsim(
        queries,
        documents,
        query_mask=torch.tensor([[True, False], [False, False]]),
        document_mask=torch.tensor([[True, True], [True, True], [False, True]]),
        document_lengths=torch.tensor([1, 2, 1]),
    )
    assert truth.scores.tolist() == [[1.0, -1.0, -math.inf], [0.0, 0.0, 0.0]]
    assert truth.argmax.tolist() == [[[0, -1], [0, -1], [-1, -1]], [[-1, -1]] * 3]


def test_nan_in_valid_tokens_only(example):
    queries, documents = example
    documents[0, 1] = math.nan
    scores = oracle.maxsim(queries, documents).scores
    assert [math.isnan(score) for score in scores[0]] == [True, False, False]
    assert oracle.maxsim(queries, documents, document_lengths=torch.tensor([1, 2, 2])).scores[0].tolist() == [3.0, -2.0, 1.0]


def test_gradients(example):
    queries, documents = example
    upstream = torch.tensor([[1.0, 0.0, 0.0], [10.0, 0.0, 100.0]])
    dq, dd, _, _ = oracle.gradients(queries, documents, oracle.maxsim(queries, documents), upstream)
    assert dq.tolist() == [[[3.0, -1.0], [1.0, 2.0]], [[60.0, 20.0], [10.0, 70.0]]]
    assert dd.tolist() == [[[0.0, 31.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[100.0, 100.0], [-100.0, 200.0]]]


def test_layouts_agree(example):
    queries, documents = example
    whole = oracle.maxsim(queries, documents).scores
    view = Packed.view(documents.flatten(0, 1), torch.tensor([4, 0]), torch.tensor([2, 2]))
    assert oracle.maxsim(queries, view).scores.tolist() == whole[:, [2, 0]].tolist()
    own = torch.stack([documents[:2], documents[1:]])
    assert oracle.maxsim(queries, own).scores.tolist() == [whole[0, :2].tolist(), whole[1, 1:].tolist()]
    assert oracle.pairs(queries, documents[:2]).scores.tolist() == [whole[0, 0], whole[1, 1]]
    assert oracle.maxsim(queries[1], documents).scores.tolist() == whole[1].tolist()


def test_dequantized():
    codes = torch.tensor([[[1, -2], [3, 4]], [[5, 6], [7, 8]]], dtype=torch.int8)
    per = {"token": [[0.5, 1.0], [2.0, 0.25]], "document": [0.5, 2.0], "corpus": 0.5}
    need = {
        "token": [[[0.5, -1.0], [3.0, 4.0]], [[10.0, 12.0], [1.75, 2.0]]],
        "document": [[[0.5, -1.0], [1.5, 2.0]], [[10.0, 12.0], [14.0, 16.0]]],
        "corpus": [[[0.5, -1.0], [1.5, 2.0]], [[2.5, 3.0], [3.5, 4.0]]],
    }
    for granularity, scales in per.items():
        scale = torch.tensor(scales).half()
        dense = Int8Tokens(codes, scale, granularity=granularity)
        assert oracle.dequantized(dense)[0].tolist() == need[granularity]
        shifted = Int8Tokens(codes, scale, torch.ones_like(scale), granularity)
        assert (oracle.dequantized(shifted)[0] - 1).tolist() == need[granularity]
        rows = Packed(codes.flatten(0, 1), torch.tensor([0, 2, 4]))
        packed = Int8Tokens(rows, scale.flatten() if granularity == "token" else scale, granularity=granularity)
        assert oracle.dequantized(packed)[0].reshape(2, 2, 2).tolist() == need[granularity]


def test_chamfer():
    p, q = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0], [3.0, 2.0]])
    distance, dp, dq = oracle.chamfer(p, q)
    assert distance == pytest.approx((1 + 4) / 2 + (1 + 1 + 4) / 3)  # (0, 0) is 1 from two points
    # (0,0) -> (1,0): 2*(-1)/2; back from (1,0) and (-1,0): 2*(0-1)/3 + 2*(0+1)/3 = 0
    assert dp[0].tolist() == pytest.approx([-1.0, 0.0])
    # (3,0) -> (1,0) and (3,2) are tied at 4, index 0 wins: 2*2/2; back from (3,2): 2*(0-2)/3
    assert dp[1].tolist() == pytest.approx([2.0, -4 / 3])
    assert dq[1].tolist() == pytest.approx([-2 / 3, 0.0])


def test_a_wrong_score_is_noticed(example):
    truth = oracle.maxsim(*example)
    scores = torch.from_numpy(truth.scores).float()
    oracle.check(scores, truth)
    for change in (torch.nextafter(scores[1, 2], torch.tensor(9.0)), torch.tensor(math.nan), torch.tensor(-math.inf)):
        wrong = scores.clone()
        wrong[1, 2] = change
        with pytest.raises(AssertionError, match=r"\(1, 2\)"):
            oracle.check(wrong, truth)
    with pytest.raises(AssertionError, match="float64"):
        oracle.check(scores.double(), truth)
    argmax = torch.from_numpy(truth.argmax).int()
    oracle.check_argmax(argmax, truth)
    argmax[0, 1, 0] = 1  # as good, but not the first
    with pytest.raises(AssertionError, match=r"argmax\[0, 1, 0\]"):
        oracle.check_argmax(argmax, truth)


LAYOUTS = {
    "dense": lambda: (make.grid(3, 5, 24), make.grid(4, 9, 24, seed=1)),
    "one query": lambda: (make.grid(5, 24), make.grid(4, 9, 24, seed=1)),
    "per query": lambda: (make.grid(3, 5, 24), make.grid(3, 4, 9, 24, seed=1)),
    "packed": lambda: (make.packed([2, 5, 0], 24), make.packed([4, 0, 9, 1], 24, seed=1)),
    "view": lambda: (make.grid(3, 5, 24), make.scattered(make.packed([4, 0, 9, 1], 24, seed=1))),
    "int8": lambda: (make.gauss(3, 5, 24), quantize_int8(make.gauss(4, 9, 24, seed=1), "document", affine=True)),
    "fp8": lambda: (make.gauss(3, 5, 24), quantize_fp8(make.packed([4, 0, 9, 1], 24, seed=1))),
}


@pytest.mark.parametrize("masks", ["none", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_truth_of_the_gpu_tests_is_the_same(layout, masks):
    """One product of matrices against loops; the GPU's tests need it for sizes that loops never end."""
    queries, documents = LAYOUTS[layout]()
    options = {}
    if masks == "both" and layout in ("dense", "per query"):
        sides = (("query", queries), ("document", documents))
        options = {key: value for name, held in sides for key, value in make.masks("both", name, *held.shape[:-1]).items()}
    ours = oracle.maxsim(queries, documents, **options)
    theirs = truth.oracle(queries, documents, quantize_queries=False, **options)
    scores = torch.from_numpy(ours.scores)
    torch.testing.assert_close(theirs.scores, scores, rtol=1e-12, atol=1e-12)
    truth.check_argmax(torch.from_numpy(ours.argmax).int(), theirs)
    truth.check_scores(scores.float(), theirs)
    oracle.check_argmax(theirs.argmax.int(), ours, 1e-9)
