"""The rows of `libraries.py`: calls of sentence-transformers, PyLate and colpali-engine, and what they give in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

CHECKED = 48  # documents that are scored in float64
Call = Callable[..., Any]


@dataclass
class Row:
    """One call: its inputs, how it is called by each method, and what it must give."""

    name: str
    library: str
    call: Call  # () -> scores, or the loss after its backward
    truth: Callable[[], tuple[Tensor, list[Tensor]]]
    found: Callable[[Any], tuple[Tensor, list[Tensor]]]  # what a call gave, cut as the truth is
    dtype: torch.dtype
    facts: dict[str, Any]
    # Called before a method's calls: a loss keeps the scoring functions that stood when it was made.
    begin: Callable[[], None] = lambda: None
    methods: dict[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    queries: int = 32
    query_tokens: int = 32
    documents: int = 10_000
    document_tokens: int = 180
    some: int = 2000  # documents of PyLate's rows
    pages: int = 512
    page_tokens: int = 1030
    dim: int = 128
    batches: tuple[int, ...] = (8, 32)
    ways: int = 8


TINY = Sizes(3, 4, 12, 9, 8, 5, 11, 16, (2, 3), 3)


def tokens(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Unit vectors."""
    drawn = torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return nn.functional.normalize(drawn, dim=-1).to(dtype)


def scoring(name: str, library: str, call: Call, inputs: tuple[Any, ...], dtype: torch.dtype, exact: Call, **facts: Any) -> Row:
    """A row that scores: `call(*inputs)`, checked on the first documents against `exact`, which is given float64."""

    def cut(scores: Any) -> tuple[Tensor, list[Tensor]]:
        return scores[..., :CHECKED].double().cpu(), []

    def truth() -> tuple[Tensor, list[Tensor]]:
        return exact().cpu(), []

    return Row(name, library, lambda: call(*inputs), truth, cut, dtype, facts)


def late(module: str, name: str) -> Call:
    """A library's function, looked up when it is called: by then it may be ours."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*given, **named)

    return call


def products(queries: Tensor, documents: Tensor) -> Tensor:
    """`[Nq, n]` of the first documents, float64."""
    held = documents[:CHECKED].double()
    return torch.stack([torch.einsum("sh,bth->bst", query.double(), held).amax(-1).sum(-1) for query in queries])


def training(name: str, library: str, make: Call, step: Call, leaves: list[Tensor], amp: bool, **facts: Any) -> Row:
    """A row that trains: `step(make(), leaves)` gives the loss; its backward fills the gradients of the leaves."""
    made: list[Any] = []

    def begin() -> None:
        made[:] = [make()]

    def call() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast(leaves[0].device.type, dtype=torch.bfloat16, enabled=amp):
            loss = step(made[0], leaves)
        loss.backward()
        return loss.detach()

    def truth() -> tuple[Tensor, list[Tensor]]:
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        loss = step(make(), exact)
        loss.backward()  # not autograd.grad: losses that cache gradients hand them out in a hook
        return loss.detach().cpu(), [one.grad.cpu() for one in exact if one.grad is not None]

    def found(loss: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loss.double().cpu(), [leaf.grad.double().cpu() for leaf in leaves if leaf.grad is not None]

    dtype = torch.bfloat16 if amp else leaves[0].dtype
    return Row(name, library, call, truth, found, dtype, facts, begin)


class Given(nn.Module):
    """A model whose token embeddings are its inputs, so that a step is the loss alone; a cached loss calls it twice, on parts."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = True

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        """Give the embeddings back."""
        return features


def features(embeddings: Tensor) -> dict[str, Tensor]:
    """One column of a batch; the last tokens of every other text are padding."""
    mask = torch.ones(embeddings.shape[:2], dtype=torch.int64, device=embeddings.device)
    mask[::2, -max(1, embeddings.shape[1] // 4) :] = 0
    return {"token_embeddings": embeddings, "attention_mask": mask, "input_ids": mask + 5}


def answers(queries: Tensor, length: int, seed: int) -> Tensor:
    """Documents `[batch, length, d]` that hold something of their query's tokens, each of shorter vectors than the one before.

    Rounded scores of drawn tokens alone are often equal, and a loss that takes the hardest negative then takes any of them.
    """
    batch, count, dim = queries.shape
    held = tokens(str(queries.device), torch.float32, batch, length, dim, seed=seed)
    count = min(count, length)
    held[:, :count] = nn.functional.normalize(held[:, :count] + 0.3 * queries[:, :count].detach().float(), dim=-1)
    size = 0.9 ** torch.arange(batch, device=queries.device)
    return (held * size[:, None, None]).to(queries.dtype)


def columns(device: str, sizes: Sizes, batch: int, ways: int) -> list[Tensor]:
    """Query and `ways` document columns, float32 leaves; the first column answers the query."""
    q = tokens(device, torch.float32, batch, sizes.query_tokens, sizes.dim)
    others = [tokens(device, torch.float32, batch, sizes.document_tokens, sizes.dim, seed=2 + n) for n in range(ways - 1)]
    return [one.requires_grad_() for one in (q, answers(q, sizes.document_tokens, 1), *others)]


def embedded(loss: Any, held: list[Tensor]) -> Tensor:
    """The value of a loss that needs no labels, for these columns."""
    value: Tensor = loss([features(one) for one in held])
    return value


def part(batch: int) -> int:
    """The size of the parts in which a cached loss embeds and scores a batch, small enough for several parts."""
    return max(1, batch // 4)


def rows_of_sentence_transformers(device: str, sizes: Sizes) -> Iterator[Row]:
    """Similarity of 32 queries with 10,000 documents, padded and as lists; four losses."""
    library = "sentence-transformers"
    score = late("sentence_transformers.util.similarity", "maxsim")
    for dtype in (torch.float32, torch.float16):
        q = tokens(device, dtype, sizes.queries, sizes.query_tokens, sizes.dim)
        d = tokens(device, dtype, sizes.documents, sizes.document_tokens, sizes.dim, seed=1)
        name = f"similarity, {str(dtype).removeprefix('torch.')}"
        shape = {"queries": list(q.shape), "documents": list(d.shape)}
        yield scoring(name, library, score, (q, d), dtype, lambda q=q, d=d: products(q, d), **shape)
        lists = list(q), list(d)
        yield scoring(f"{name}, lists", library, score, lists, dtype, lambda q=q, d=d: products(q, d), **shape)
    losses = importlib.import_module("sentence_transformers.multi_vector_encoder.losses")
    for batch, amp in zip(sizes.batches, (False, True), strict=True):
        facts = {"batch": batch, "autocast": amp}
        ranking = {
            "MultipleNegativesRanking": lambda: losses.MultiVectorMultipleNegativesRankingLoss(Given()),
            "CachedMultipleNegativesRanking": lambda batch=batch: losses.CachedMultiVectorMultipleNegativesRankingLoss(
                Given(), mini_batch_size=part(batch)
            ),
        }
        for name, make in ranking.items():
            leaves = columns(device, sizes, batch, 2)
            yield training(f"{name}, batch {batch}", library, make, embedded, leaves, amp, **facts)
        margins = torch.linspace(-3, 3, batch, device=device).view(batch, 1)
        yield training(
            f"MarginMSE, batch {batch}",
            library,
            lambda: losses.MultiVectorMarginMSELoss(Given()),
            lambda loss, held, t=margins: loss([features(one) for one in held], t.to(held[0].dtype)),
            columns(device, sizes, batch, 2),
            amp,
            **facts,
        )
        leaves = columns(device, sizes, batch, sizes.ways)
        teacher = torch.linspace(0, 3, batch * sizes.ways, device=device).view(batch, -1)
        yield training(
            f"DistillKLDiv, batch {batch}",
            library,
            lambda: losses.MultiVectorDistillKLDivLoss(Given()),
            lambda loss, held, t=teacher: loss([features(one) for one in held], t.to(held[0].dtype)),
            leaves,
            amp,
            **facts,
        )


def rows_of_pylate(device: str, sizes: Sizes) -> Iterator[Row]:
    """Scores with masks, candidates a query, the candidates of one query; three losses."""
    for dtype in (torch.float32, torch.float16):
        q = tokens(device, dtype, sizes.queries, sizes.query_tokens, sizes.dim)
        d = tokens(device, dtype, sizes.some, sizes.document_tokens, sizes.dim, seed=1)
        named = str(dtype).removeprefix("torch.")
        shape = {"queries": list(q.shape), "documents": list(d.shape)}
        yield scoring(
            f"colbert_scores, {named}",
            "pylate",
            late("pylate.scores", "colbert_scores"),
            (q, d),
            dtype,
            lambda q=q, d=d: products(q, d),
            **shape,
        )
        yield scoring(
            f"colbert_scores of one query, {named}",
            "pylate",
            late("pylate.scores", "colbert_scores"),
            (q[:1], d),
            dtype,
            lambda q=q, d=d: products(q[:1], d),
            **shape,
        )
        k = max(1, sizes.some // sizes.queries)
        own = d[: k * sizes.queries].unflatten(0, (sizes.queries, k))
        yield scoring(
            f"colbert_kd_scores, {named}",
            "pylate",
            late("pylate.scores", "colbert_kd_scores"),
            (q, own),
            dtype,
            lambda q=q, d=own: torch.cat([products(a[None], b) for a, b in zip(q, d, strict=True)]),
            candidates=list(own.shape),
        )
    losses = importlib.import_module("pylate.losses")
    for batch, amp in zip(sizes.batches, (False, True), strict=True):
        facts = {"batch": batch, "autocast": amp}
        contrastive = {
            "Contrastive": lambda: losses.Contrastive(Given()),
            "CachedContrastive": lambda batch=batch: losses.CachedContrastive(Given(), mini_batch_size=part(batch)),
        }
        for name, make in contrastive.items():
            yield training(f"{name}, batch {batch}", "pylate", make, embedded, columns(device, sizes, batch, 2), amp, **facts)
        teacher = torch.linspace(0, 3, batch * sizes.ways, device=device).view(batch, -1)
        shapes = (batch, sizes.query_tokens), (batch * sizes.ways, sizes.document_tokens)
        leaves = [tokens(device, torch.float32, *shape, sizes.dim, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
        yield training(
            f"Distillation, batch {batch}",
            "pylate",
            lambda: losses.Distillation(Given()),
            lambda loss, held, t=teacher: loss([features(one) for one in held], t.to(held[0].dtype)),
            leaves,
            amp,
            **facts,
        )


def rows_of_colpali_engine(device: str, sizes: Sizes) -> Iterator[Row]:
    """Scores of pages as processors give them; five losses, two of them with explicit negatives."""
    processing = importlib.import_module("colpali_engine.utils.processing_utils").BaseVisualRetrieverProcessor
    dtype = torch.bfloat16
    q = tokens(device, dtype, sizes.queries, sizes.query_tokens, sizes.dim)
    d = tokens(device, dtype, sizes.pages, sizes.page_tokens, sizes.dim, seed=1)
    yield scoring(
        "score_multi_vector, bfloat16",
        "colpali-engine",
        lambda a, b: processing.score_multi_vector(a, b, device=device),
        (list(q), list(d)),
        dtype,
        lambda: products(q, d),
        queries=list(q.shape),
        pages=list(d.shape),
    )
    losses = importlib.import_module("colpali_engine.loss.late_interaction_losses")
    names = ("Loss", "PairwiseCELoss", "SigmoidLoss", "NegativeCELoss", "PairwiseNegativeCELoss")
    for name in (f"Colbert{name}" for name in names):
        make = getattr(losses, name)
        for batch in sizes.batches:
            q = tokens(device, dtype, batch, sizes.query_tokens, sizes.dim)
            leaves = [q.requires_grad_(), answers(q, sizes.page_tokens, 1).requires_grad_()]
            if "Negative" in name:
                # Negatives better than the positives: with differences about 0, a temperature of 0.02 would let rounding decide.
                leaves[1] = (0.6 * leaves[1].detach()).requires_grad_()
                leaves.append(
                    torch.stack([answers(q, sizes.page_tokens, seed) for seed in (2, 3)], 1).detach().requires_grad_()
                )
            yield training(
                f"{name}, batch {batch}",
                "colpali-engine",
                make,
                lambda loss, held: loss(*held),
                leaves,
                False,
                batch=batch,
            )


ROWS: dict[str, Callable[[str, Sizes], Iterator[Row]]] = {
    "sentence-transformers": rows_of_sentence_transformers,
    "pylate": rows_of_pylate,
    "colpali-engine": rows_of_colpali_engine,
}
