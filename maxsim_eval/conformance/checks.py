"""The checks: what each gives a function, and what its answer means. A bug breaks the contract of docs/scorers.md; a convention is a
choice that others made differently, which changes rankings only where it says so."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from maxsim_eval.conformance.inputs import BOUND, drawn, gradients, packed, truth
from maxsim_kernels import Packed

Verdict = Literal["pass", "convention", "refused", "bug", "skipped"]
QUERIES = (1, 5, 32)
DOCUMENTS = (33, 1, 130, 7, 2)
DIM = 24
FAR = (70, 2**25 + 8)  # rows, and elements from one to the next: the last lie beyond 2^31


class Scored(NamedTuple):
    """The function under test, as a check may call it: scores `[Nq, N]` checked for their shape, and the device it runs on."""

    scores: Callable[[Packed, Packed], Tensor]
    device: torch.device


Finding = tuple[Verdict, str]
Check = Callable[[Scored], Finding]


def _compare(scored: Scored, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Finding:
    """Scores against the truth: within FP32's rounding, within that of 16 bits, or wrong."""
    right, sizes = truth(queries, documents)
    found = scored.scores(packed(queries, scored.device), packed(documents, scored.device)).detach().cpu().double()
    error = float(((found - right).abs() / sizes.clamp(min=1e-30)).nan_to_num(math.inf, math.inf).max())
    if error <= BOUND:
        return "pass", f"error {error:.0e}"
    if error <= 1e-2:
        return "convention", f"error {error:.0e}: products or sums are rounded to fewer than 24 bits"
    return "bug", f"error {error:.0e} of the scores' size"


def _dtype(dtype: torch.dtype) -> Check:
    def check(scored: Scored) -> Finding:
        return _compare(scored, drawn(QUERIES, DIM, 1, dtype), drawn(DOCUMENTS, DIM, 2, dtype))

    return check


def _shape(queries: Sequence[int], documents: Sequence[int], dim: int) -> Check:
    def check(scored: Scored) -> Finding:
        return _compare(scored, drawn(queries, dim, 3), drawn(documents, dim, 4))

    return check


def _padding(scored: Scored) -> Finding:
    queries, documents = drawn(QUERIES, DIM, 5), [-row for row in drawn(DOCUMENTS, DIM, 6)]
    verdict, text = _compare(scored, queries, documents)
    return (
        (verdict, text)
        if verdict != "bug"
        else ("bug", "padding beats negative similarities: the score depends on other documents")
    )


def _empty_document(scored: Scored) -> Finding:
    queries, documents = drawn(QUERIES, DIM, 7), drawn((3, 0, 5), DIM, 8)
    found = scored.scores(packed(queries, scored.device), packed(documents, scored.device)).cpu().double()
    right, _ = truth(queries, documents)
    if not torch.allclose(found[:, ::2], right[:, ::2], atol=1e-2):
        return "bug", "the documents beside it have other scores"
    if found[:, 1].isnan().any():
        return "bug", "scores NaN"
    value = float(found[0, 1])
    return ("pass", "scores -inf") if value == -math.inf else ("convention", f"scores {value:g}")


def _empty_query(scored: Scored) -> Finding:
    queries, documents = drawn((4, 0, 2), DIM, 9), drawn(DOCUMENTS, DIM, 10)
    found = scored.scores(packed(queries, scored.device), packed(documents, scored.device)).cpu().double()
    right, _ = truth(queries, documents)
    if not torch.allclose(found[::2], right[::2], atol=1e-2):
        return "bug", "the queries beside it have other scores"
    if found[1].eq(0).all():
        return "pass", "scores 0"
    return ("bug", "scores NaN") if found[1].isnan().any() else ("convention", f"scores {float(found[1, 0]):g}")


def _nan(scored: Scored) -> Finding:
    queries, documents = drawn(QUERIES, DIM, 11), drawn(DOCUMENTS, DIM, 12)
    right, _ = truth(queries, documents)
    documents[2][1, 0] = math.nan
    found = scored.scores(packed(queries, scored.device), packed(documents, scored.device)).cpu().double()
    beside = [0, 1, 3, 4]
    if not torch.allclose(found[:, beside], right[:, beside], atol=1e-2):
        return "bug", "a NaN in one document changes the scores of others"
    return ("pass", "its document scores NaN") if found[:, 2].isnan().all() else ("convention", "a NaN in a token is lost")


def _zero_rows(scored: Scored) -> Finding:
    queries, documents = drawn(QUERIES, DIM, 13), [-row for row in drawn((4, 4), DIM, 14)]
    documents[0][2] = 0
    verdict, text = _compare(scored, queries, documents)
    if verdict != "bug":
        return verdict, text
    verdict, _ = _compare(scored, queries, [documents[0][[0, 1, 3]], documents[1]])
    return ("bug", text) if verdict == "bug" else ("convention", "a token of zeros is taken for padding")


def _large(scored: Scored) -> Finding:
    queries, documents = (
        [row * 300 for row in drawn(lengths, DIM, seed)] for lengths, seed in ((QUERIES, 15), (DOCUMENTS, 16))
    )
    for row in documents:
        row[0] *= 1e4  # beyond what float16 holds
    return _compare(scored, queries, documents)


def _strides(scored: Scored) -> Finding:
    queries, documents = drawn(QUERIES, DIM, 17), drawn(DOCUMENTS, DIM, 18)
    sides = []
    for rows in (queries, documents):
        held = packed(rows, scored.device)
        wide = torch.full((held.values.shape[0], 2 * DIM + 3), math.nan, device=scored.device)
        wide[:, 1 : 2 * DIM + 1 : 2] = held.values
        sides.append(held.with_values(wide[:, 1 : 2 * DIM + 1 : 2]))
    right, sizes = truth(queries, documents)
    found = scored.scores(sides[0], sides[1]).cpu().double()
    error = float(((found - right).abs() / sizes).nan_to_num(math.inf).max())
    return ("pass", "") if error <= 1e-2 else ("bug", f"error {error:.0e}: strides are not read")


def _far(scored: Scored) -> Finding:
    """Rows far apart in one buffer, of which a CPU touches only the pages they lie on."""
    count, step = FAR
    need = 2 * count * step
    free = torch.cuda.mem_get_info(scored.device)[0] if scored.device.type == "cuda" else _free_memory()
    if free < need + (1 << 30):
        return "skipped", f"needs {(need + (1 << 30)) / 1e9:.1f} GB of free memory, there are {free / 1e9:.1f}"
    queries = drawn(QUERIES, DIM, 26, torch.float16)
    documents = drawn((20, 1, 30, 7, 12), DIM, 27, torch.float16)
    held = packed(documents, scored.device)
    try:
        buffer = torch.empty(count * step, dtype=torch.float16, device=scored.device)
    except RuntimeError as problem:  # what may be reserved can be less than what is free
        return "skipped", f"{need / 1e9:.1f} GB cannot be reserved: {str(problem).splitlines()[0]}"[:200]
    rows = buffer.view(count, step)[:, :DIM]
    rows.copy_(held.values)
    right, sizes = truth(queries, documents)
    found = scored.scores(packed(queries, scored.device), held.with_values(rows)).cpu().double()
    error = float(((found - right).abs() / sizes).nan_to_num(math.inf).max())
    return ("pass", "") if error <= 1e-2 else ("bug", f"error {error:.0e}: 32-bit offsets")


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # systems that do not say
        return 0


def _determinism(scored: Scored) -> Finding:
    queries, documents = packed(drawn(QUERIES, DIM, 19), scored.device), packed(drawn(DOCUMENTS * 8, DIM, 20), scored.device)
    kept = queries.values.clone(), documents.values.clone()
    first = scored.scores(queries, documents).clone()
    again = [scored.scores(queries, documents).clone() for _ in range(3)]
    if not torch.equal(queries.values, kept[0]) or not torch.equal(documents.values, kept[1]):
        return "bug", "its input is changed"
    same = all(torch.equal(first, one) for one in again)
    return ("pass", "the same bits in 4 calls") if same else ("convention", "other bits in another call")


def _cut(scored: Scored) -> Finding:
    queries, documents = packed(drawn(QUERIES, DIM, 21), scored.device), drawn(DOCUMENTS * 2, DIM, 22)
    whole = scored.scores(queries, packed(documents, scored.device))
    parts = [
        scored.scores(queries, packed(documents[start : start + 3], scored.device)) for start in range(0, len(documents), 3)
    ]
    joined = torch.cat(parts, dim=1)
    if torch.equal(whole, joined):
        return "pass", "the same bits, whole and in parts"
    close = torch.allclose(whole.float(), joined.float(), rtol=1e-2, atol=1e-2)
    return ("convention", "other bits in parts") if close else ("bug", "scores depend on the documents beside them")


def _wanting(scored: Scored, queries: Packed, documents: Packed) -> tuple[Packed, Packed, Tensor]:
    sides = [side.with_values(side.values.detach().clone().requires_grad_()) for side in (queries, documents)]
    return sides[0], sides[1], scored.scores(sides[0], sides[1])


def _gradients(scored: Scored) -> Finding:
    given = packed(drawn(QUERIES, DIM, 23), scored.device), packed(drawn(DOCUMENTS, DIM, 24), scored.device)
    with torch.enable_grad():
        queries, documents, scores = _wanting(scored, *given)
        if not scores.requires_grad:
            return "convention", "none: for scoring only"
        weights = torch.linspace(-1, 1, scores.numel()).view(scores.shape)
        found = torch.autograd.grad((scores.float() * weights.to(scores.device)).sum(), (queries.values, documents.values))
    right = gradients(*given, weights)
    error = max(float((one.cpu().double() - other).abs().max()) for one, other in zip(found, right, strict=True))
    return ("pass", f"error {error:.0e}") if error <= 1e-2 else ("bug", f"error {error:.0e}")


def _ties(scored: Scored) -> Finding:
    query, token = drawn((1, 1), DIM, 25)
    with torch.enable_grad():
        _, documents, scores = _wanting(scored, packed([query], scored.device), packed([token.repeat(4, 1)], scored.device))
        if not scores.requires_grad:
            return "skipped", "no gradients"
        (found,) = torch.autograd.grad(scores.sum(), documents.values)
    share = (found.cpu() @ query[0]) / (query[0] @ query[0])
    if abs(float(share.sum()) - 1) > 1e-2:
        return "bug", f"of equal tokens, gradients add up to {float(share.sum()):.2f}"
    if share[0] > 0.99:
        return "pass", "the first of equal tokens takes the gradient"
    return (
        "convention",
        "equal tokens share the gradient" if share.max() < 0.9 else f"token {int(share.argmax())} takes the gradient",
    )


CHECKS: dict[str, Check] = {
    "float32": _dtype(torch.float32),
    "float16": _dtype(torch.float16),
    "bfloat16": _dtype(torch.bfloat16),
    "one query, one document": _shape((1,), (1,), 1),
    "long queries": _shape((129, 300, 17), (20, 3), DIM),
    "width 100": _shape(QUERIES, DOCUMENTS, 100),
    "width 768": _shape(QUERIES, (40, 3), 768),
    "negative similarities": _padding,
    "document without tokens": _empty_document,
    "query without tokens": _empty_query,
    "NaN in a token": _nan,
    "token of zeros": _zero_rows,
    "large values": _large,
    "strides": _strides,
    "beyond 2^31 elements": _far,
    "determinism": _determinism,
    "corpus in parts": _cut,
    "gradients": _gradients,
    "equal tokens": _ties,
}
