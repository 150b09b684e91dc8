"""Training losses: values and gradients against float64 einsum, degenerate input, autocast, accumulation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import maxsim_kernels
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import Packed, pack
from maxsim_kernels.training import contrastive_loss, distillation_loss, gather_documents

INF = float("inf")


def einsum_scores(queries, documents, q_valid=None, d_valid=None):
    """MaxSim in float64, differentiable: documents `[N, Ld, d]` or `[B, K, Ld, d]`; -inf where a document is empty."""
    per_query = documents.dim() == 4
    products = torch.einsum("qid,qnjd->qnij" if per_query else "qid,njd->qnij", queries, documents)
    if d_valid is not None:
        products = products.masked_fill(~(d_valid if per_query else d_valid.unsqueeze(0)).unsqueeze(2), -INF)
    best = products.amax(3)
    if q_valid is not None:
        best = torch.where(q_valid.unsqueeze(1), best, 0.0)
    return best.sum(2)


def leaves(*tensors, dtype=torch.float64):
    return [each.detach().to(dtype).requires_grad_() for each in tensors]


def close(got, need, dtype=torch.float32):
    """Float32 losses of scores within the contract's bound; gradients rounded once to their dtype."""
    scale = need.abs().max().item() + 1e-30
    bound = 50 * tol.SCORE + (tol.GRADIENT_ROUNDING[dtype] if dtype != torch.float32 else 0)
    difference = (got.double() - need.double()).abs().max().item()
    assert difference <= bound * scale, f"{difference} of {scale}, allowed {bound}"


def compare(loss, reference, inputs, truths, dtype=torch.float32):
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    close(loss, reference)
    for got, need in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(reference, truths), strict=True):
        close(got, need, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("documents_count", "temperature"), [(4, 1.0), (7, 0.3)])
def test_contrastive(impl, dtype, documents_count, temperature):
    queries, documents = leaves(cases.gauss(4, 5, 16), cases.gauss(documents_count, 9, 16, seed=1), dtype=dtype)
    q, d = leaves(queries, documents)
    loss = contrastive_loss(queries, documents, temperature=temperature, impl=impl)
    reference = F.cross_entropy(einsum_scores(q, d) / temperature, torch.arange(4))
    compare(loss, reference, (queries, documents), (q, d), dtype)


def test_contrastive_masks_lengths_and_positives(impl):
    q_valid, lengths = cases.mask(4, 5, keep=0.8), torch.tensor([9, 2, 1, 5, 9, 3])
    d_mask = cases.mask(6, 9, seed=3)
    d_mask[:, 0] = True
    d_valid = d_mask & (torch.arange(9) < lengths.unsqueeze(1))
    queries, documents = leaves(cases.gauss(4, 5, 16), cases.gauss(6, 9, 16, seed=1), dtype=torch.float32)
    q, d = leaves(queries, documents)
    positives = torch.tensor([5, 0, 0, 3])
    options = {"query_mask": q_valid, "document_mask": d_mask, "document_lengths": lengths, "positives": positives}
    reference = F.cross_entropy(einsum_scores(q, d, q_valid, d_valid) / 2, positives)
    compare(contrastive_loss(queries, documents, temperature=2, impl=impl, **options), reference, (queries, documents), (q, d))


def test_contrastive_packed_is_padded(impl):
    rows = [cases.gauss(length, 8, seed=length) for length in (7, 2, 1, 9, 4)]
    asked = [cases.gauss(length, 8, seed=20 + length) for length in (3, 1, 5)]
    documents, queries = pack(rows), pack(asked)
    documents.values.requires_grad_()
    queries.values.requires_grad_()
    loss = contrastive_loss(queries, documents, temperature=0.5, impl=impl)
    padded, lengths = cases.padded(pack(rows))
    padded_queries, query_lengths = cases.padded(pack(asked))
    q, d = leaves(padded_queries.nan_to_num(), padded.nan_to_num())
    q_valid = torch.arange(5) < query_lengths.unsqueeze(1)
    d_valid = torch.arange(9) < lengths.unsqueeze(1)
    reference = F.cross_entropy(einsum_scores(q, d, q_valid, d_valid) / 0.5, torch.arange(3))
    need_q, need_d = torch.autograd.grad(reference, (q, d))
    got_q, got_d = torch.autograd.grad(loss, (queries.values, documents.values))
    close(loss, reference)
    close(got_q, need_q[q_valid])
    close(got_d, need_d[d_valid])


def test_learned_temperature():
    """Its gradient is finite although empty documents score -inf."""
    queries, documents = leaves(cases.gauss(3, 4, 8), cases.gauss(5, 6, 8, seed=1), dtype=torch.float32)
    q, d = leaves(queries, documents)
    (t32,), (t64,) = leaves(torch.tensor(0.7), dtype=torch.float32), leaves(torch.tensor(0.7))
    lengths = torch.tensor([6, 2, 3, 0, 5])
    loss = contrastive_loss(queries, documents, document_lengths=lengths, temperature=t32)
    scores = einsum_scores(q, d, None, torch.arange(6) < lengths.unsqueeze(1))
    reference = F.cross_entropy(scores[:, [0, 1, 2, 4]] / t64, torch.arange(3))
    compare(loss, reference, (queries, documents, t32), (q, d, t64))


def test_contrastive_with_an_empty_positive(impl):
    """It adds 0 and no gradient, the divisor stays: the loss is the other queries' sum over B, and never NaN or infinite."""
    queries, documents = leaves(cases.gauss(3, 4, 8), cases.gauss(3, 6, 8, seed=1), dtype=torch.float32)
    lengths = torch.tensor([6, 0, 3])
    loss = contrastive_loss(queries, documents, document_lengths=lengths, impl=impl)
    dq, dd = torch.autograd.grad(loss, (queries, documents))
    some = contrastive_loss(queries[[0, 2]], documents[[0, 2]], document_lengths=lengths[[0, 2]], impl=impl)
    close(loss, some * 2 / 3)
    assert dq[1].eq(0).all()
    assert dd[1].eq(0).all()
    assert dq.isfinite().all()
    assert dd.isfinite().all()
    nothing = contrastive_loss(queries, documents, document_lengths=torch.zeros(3, dtype=torch.int64), impl=impl)
    assert nothing.item() == 0
    assert all(each.eq(0).all() for each in torch.autograd.grad(nothing, (queries, documents)))


def test_query_without_tokens_is_a_constant(impl):
    queries, documents = leaves(cases.gauss(1, 4, 8), cases.gauss(5, 6, 8, seed=1), dtype=torch.float32)
    loss = contrastive_loss(queries, documents, query_lengths=torch.tensor([0]), impl=impl)
    assert loss.item() == pytest.approx(torch.tensor(5.0).log().item())
    assert all(each.eq(0).all() for each in torch.autograd.grad(loss, (queries, documents)))


def test_nan_is_not_hidden(impl):
    documents = cases.gauss(3, 6, 8, seed=1)
    documents[2, 1, 0] = torch.nan
    queries = cases.gauss(3, 4, 8)
    assert contrastive_loss(queries, documents, impl=impl).isnan()
    assert contrastive_loss(queries, documents, document_lengths=torch.tensor([6, 0, 6]), impl=impl).isnan()
    assert distillation_loss(queries, documents.expand(3, 3, 6, 8), torch.zeros(3, 3), impl=impl).isnan()
    assert distillation_loss(queries, cases.gauss(3, 3, 6, 8), torch.full((3, 3), torch.nan), impl=impl).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation(impl, dtype, temperature):
    queries, documents = leaves(cases.gauss(3, 5, 16), cases.gauss(3, 4, 9, 16, seed=1), dtype=dtype)
    teacher = cases.gauss(3, 4, seed=2, dtype=dtype)
    q, d = leaves(queries, documents)
    loss = distillation_loss(queries, documents, teacher, temperature=temperature, impl=impl)
    student = F.log_softmax(einsum_scores(q, d) / temperature, 1)
    reference = F.kl_div(student, F.softmax(teacher.double() / temperature, 1), reduction="batchmean")
    compare(loss, reference, (queries, documents), (q, d), dtype)


def test_distillation_of_left_out_candidates(impl):
    """Empty documents and masked candidates leave both softmaxes; a teacher's -inf stays, with probability 0."""
    queries, documents = leaves(cases.gauss(4, 5, 8), cases.gauss(4, 3, 6, 8, seed=1), dtype=torch.float32)
    with torch.no_grad():
        documents[1, 2] = torch.nan  # masked: never read
    teacher = cases.gauss(4, 3, seed=2)
    teacher[2, 0], teacher[1, 2] = -INF, torch.nan
    lengths, keep = torch.full((4, 3), 6), torch.ones(4, 3, dtype=torch.int64)
    lengths[0, 1], keep[1, 2] = 0, 0
    lengths[3], keep[3, 0] = torch.tensor([6, 0, 0]), 0  # nothing left
    q, d = leaves(queries, documents.detach().nan_to_num())
    scores, target = einsum_scores(q, d), teacher.double()
    parts = [
        F.kl_div(F.log_softmax(scores[row, who], 0), F.softmax(target[row, who], 0), reduction="sum")
        for row, who in ((0, [0, 2]), (1, [0, 1]), (2, [0, 1, 2]))
    ]
    options = {"document_lengths": lengths, "impl": impl}
    loss = distillation_loss(queries, documents, teacher, candidate_mask=keep, **options)
    compare(loss, sum(parts) / 4, (queries, documents), (q, d))
    same = distillation_loss(queries, documents, teacher, candidate_mask=keep.bool(), **options)
    assert torch.equal(loss, same)
    dq, dd = torch.autograd.grad(same, (queries, documents))
    assert dq[3].eq(0).all()
    assert dd[3].eq(0).all()
    assert dd[1, 2].eq(0).all()


def test_distillation_without_any_target(impl):
    """No candidate, or a teacher that knows none: 0, no gradient, no NaN; so for a query without tokens and masked candidates."""
    queries, documents = leaves(cases.gauss(2, 5, 8), cases.gauss(2, 3, 6, 8, seed=1), dtype=torch.float32)
    none, zeros = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    for teacher, options in (
        (torch.full((2, 3), -INF), {}),
        (zeros, {"candidate_mask": none}),
        (zeros, {"candidate_mask": none, "query_lengths": torch.tensor([0, 5])}),
        (zeros, {"document_mask": torch.zeros(2, 3, 6, dtype=torch.bool)}),
        (torch.tensor([[-INF, 0, 0], [0, -INF, -INF]]), {"document_lengths": torch.tensor([[6, 0, 0], [0, 6, 6]])}),
    ):
        loss = distillation_loss(queries, documents, teacher, impl=impl, **options)
        assert loss.item() == 0
        assert all(each.eq(0).all() for each in torch.autograd.grad(loss, (queries, documents)))


def test_distillation_of_itself_is_zero():
    queries, documents = leaves(cases.gauss(2, 5, 8), cases.gauss(2, 3, 6, 8, seed=1), dtype=torch.float32)
    teacher = maxsim_kernels.maxsim(queries, documents)
    loss = distillation_loss(queries, documents, teacher)
    assert loss.item() == 0
    assert all(each.abs().max() < 1e-6 for each in torch.autograd.grad(loss, (queries, documents))), "the teacher is a constant"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_float32(dtype):
    """The same bits with and without autocast, which would otherwise round scores and softmax to 16 bits."""
    queries, documents = cases.gauss(4, 5, 16, dtype=dtype), cases.gauss(4, 9, 16, seed=1, dtype=dtype).requires_grad_()
    candidates, teacher = cases.gauss(4, 3, 9, 16, dtype=dtype).requires_grad_(), cases.gauss(4, 3, dtype=dtype)

    def step():
        losses = contrastive_loss(queries, documents, temperature=0.1), distillation_loss(queries, candidates, teacher)
        return [*losses, *torch.autograd.grad(sum(losses), (documents, candidates))]

    plain = step()
    with torch.autocast("cpu", dtype=dtype):
        cast = step()
    assert [each.dtype for each in cast] == [torch.float32, torch.float32, dtype, dtype]
    assert all(torch.equal(*each) for each in zip(plain, cast, strict=True))


def test_accumulated_distillation_is_the_whole_batch():
    weight = cases.gauss(8, 8, seed=4).requires_grad_()
    queries, documents, teacher = cases.gauss(6, 5, 8), cases.gauss(6, 3, 9, 8, seed=1), cases.gauss(6, 3, seed=2)
    (whole,) = torch.autograd.grad(distillation_loss(queries @ weight, documents @ weight, teacher), weight)
    for rows in torch.arange(6).chunk(3):
        (distillation_loss(queries[rows] @ weight, documents[rows] @ weight, teacher[rows]) / 3).backward()
    close(weight.grad, whole)


def test_accumulated_contrastive_needs_every_document():
    """Micro-batches of queries against all documents are additive; micro-batches of both sides have other negatives."""
    queries, documents = cases.gauss(6, 5, 8).requires_grad_(), cases.gauss(6, 9, 8, seed=1)
    documents_lengths = torch.tensor([9, 9, 0, 9, 9, 9])  # an empty positive keeps its place in the divisor
    whole = contrastive_loss(queries, documents, document_lengths=documents_lengths)
    parts = [
        contrastive_loss(queries[rows], documents, document_lengths=documents_lengths, positives=rows) / 3
        for rows in torch.arange(6).chunk(3)
    ]
    close(sum(parts), whole)
    split = sum(contrastive_loss(queries[rows], documents[rows]) for rows in torch.arange(6).chunk(3)) / 3
    assert split < whole


def make():
    return {"queries": cases.grid(3, 4, 8), "documents": cases.grid(4, 6, 8, seed=1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(4, 8)}, r"queries: got torch.float32 \[4, 8\], need \[B, Lq, d\] or Packed"),
        ({"queries": torch.zeros(0, 4, 8)}, "queries: got 0 queries, need at least 1"),
        ({"queries": [1]}, "queries: got list, need"),
        ({"documents": torch.zeros(2, 6, 8)}, r"documents: got 2 for 3 queries, need one positive a query \(N >= B\)"),
        ({"documents": torch.zeros(3, 2, 6, 8)}, r"documents: got torch.float32 \[3, 2, 6, 8\], need \[N, Ld, d\] or Packed"),
        ({"documents": torch.zeros(4, 6, 7)}, "documents: got d = 7, need the queries' d = 8"),
        ({"documents": torch.zeros(4, 6, 8).half()}, "documents: got torch.float16, need the queries' dtype"),
        ({"positives": torch.zeros(3)}, r"positives: got torch.float32 \[3\], need int64 \[3\]"),
        ({"positives": torch.zeros(4, dtype=torch.int64)}, r"positives: got torch.int64 \[4\], need int64 \[3\]"),
        ({"positives": torch.tensor([0, 4, 1])}, r"positives: got 0..4, need 0..3"),
        ({"positives": torch.tensor([0, -1, 1])}, r"positives: got -1..1, need 0..3"),
        ({"positives": torch.zeros(3, dtype=torch.int64, device="meta")}, "positives: got a tensor on meta, need one on cpu"),
        ({"temperature": 0}, "temperature: got 0, need a finite number above 0"),
        ({"temperature": float("nan")}, "temperature: got nan, need"),
        ({"temperature": "warm"}, "temperature: got 'warm', need"),
        ({"temperature": torch.ones(1)}, r"temperature: got torch.float32 \[1\] on cpu, need a float \[\] on cpu"),
        ({"impl": "fast"}, "impl: got 'fast', need one of"),
        ({"backward": "fast"}, "backward: got 'fast', need one of"),
        ({"document_lengths": torch.zeros(3, dtype=torch.int64)}, r"document_lengths: got \[3\], need \[4\]"),
    ],
)
def test_contrastive_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        contrastive_loss(**make() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": torch.zeros(3, 6, 8)}, r"documents: got torch.float32 \[3, 6, 8\], need \[3, K, Ld, d\] with K >= 1"),
        ({"documents": torch.zeros(2, 4, 6, 8)}, "documents: got"),
        ({"documents": torch.zeros(3, 0, 6, 8)}, "with K >= 1"),
        ({"documents": Packed(torch.zeros(0, 8), torch.zeros(1, dtype=torch.int64))}, "documents: got Packed"),
        ({"teacher_scores": torch.zeros(3, 5)}, r"teacher_scores: got torch.float32 \[3, 5\], need a floating tensor \[3, 4\]"),
        ({"teacher_scores": torch.zeros(3, 4).long()}, "teacher_scores: got torch.int64"),
        ({"teacher_scores": torch.zeros(3, 4, device="meta")}, "teacher_scores: got a tensor on meta, need one on cpu"),
        ({"teacher_scores": [0.5]}, "teacher_scores: got list"),
        (
            {"candidate_mask": torch.ones(3, 4)},
            r"candidate_mask: got torch.float32 \[3, 4\], need bool or 0/1 integers \[3, 4\]",
        ),
        ({"candidate_mask": torch.ones(3).bool()}, r"candidate_mask: got torch.bool \[3\]"),
        (
            {"candidate_mask": torch.ones(3, 4).bool(), "document_lengths": torch.zeros(3, dtype=torch.int64)},
            r"document_lengths: got torch.int64 \[3\], need \[3, 4\]",
        ),
        ({"temperature": -1.0}, "temperature: got -1.0, need"),
    ],
)
def test_distillation_refuses(change, message):
    arguments = {"queries": cases.grid(3, 4, 8), "documents": cases.grid(3, 4, 6, 8), "teacher_scores": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=message):
        distillation_loss(**arguments | change)


def test_gather_needs_a_process_group():
    with pytest.raises(ValueError, match=r"group: got no initialised process group, need torch.distributed.init_process_group"):
        gather_documents(cases.grid(2, 3, 4))
    with pytest.raises(ValueError, match=r"documents: got Packed, need \[N, \.\.\.\]"):
        gather_documents(pack([cases.grid(2, 3)]))


def test_not_at_the_top_level():
    assert not {"contrastive_loss", "distillation_loss", "gather_documents"} & set(maxsim_kernels.__all__)
