"""Who takes part in a training step: our gradient paths, the peers' training entry points, torch through autograd.

Every method makes differentiable scores; a step is `loss(scores)`, backward, with the gradients of the step before dropped first.
"naive" is the paper's listing through autograd: FP16 holds similarities in FP16, "FP32 accumulation" casts the inputs and multiplies
in TF32.
"checkpointed" recomputes blocks of queries in the backward (torch.utils.checkpoint); "chunked" loops over blocks of documents and keeps
only torch's own winners, since a maximum's backward needs no similarities. Block sizes are tried, the fastest is timed.

flash-maxsim chooses its path by the environment variable FLASH_BWD_PATH, which is set around its calls and around nobody else's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from maxsim_kernels import Packed, explain, maxsim, maxsim_pairs
from measure import installed
from measure.gradient_truth import FULL, HALF, ROUNDED, Bound, Truth
from measure.method import Lineup, Method
from measure.names import FLASH, LIK
from measure.session import RefusedError, environment_variable
from measure.timing import Call
from rivals import torch_rivals

VARIABLE = "FLASH_BWD_PATH"
PATHS = ("unified", "atomic", "csr")
FLASH_PATHS = {"unified": "atomic_unified", "csr": "invgrid", "atomic": "atomic", "sparse": "sparse_dd"}
LIK_PATHS = ("auto", "unified", "lowmem")
UNROLLED = 512  # query tokens above which LIK's path lowmem is left out for pairs, and auto, which is lowmem there
WHY_UNROLLED = (
    "compiles for minutes (the kernel of documents' gradients is unrolled over all query tokens, for each of 12 tiles)"
)
BLOCKS = (1 << 29, 1 << 31)  # similarities a block of the recomputing and chunked baselines may hold
Scores = Callable[[], Tensor]


def path(name: str) -> AbstractContextManager[None]:
    """Set flash-maxsim's path for a block; "" leaves the variable alone."""
    return environment_variable(VARIABLE, name) if name else nullcontext()


def in_batch(scores: Tensor) -> Tensor:
    """Cross-entropy with the other documents as negatives, summed: a mean's gradients of 1/B^2 would be lost in FP16."""
    return cross_entropy(scores.float(), torch.arange(scores.shape[0], device=scores.device), reduction="sum")


def summed(scores: Tensor) -> Tensor:
    """The sum of all scores."""
    return scores.float().sum()


@dataclass
class Problem:
    """One row's inputs: leaves that need gradients, the truth about them, the loss of a step.

    `documents` is `[N, Ld, d]`, `[Nq, K, Ld, d]` (layout per_query) or of pairs `[N, Ld, d]`. Ragged documents are held twice, padded
    to `lengths` and packed as `values` with `offsets`.
    """

    queries: Tensor
    documents: Tensor
    layout: str = "shared"
    lengths: Tensor | None = None
    values: Tensor | None = None
    offsets: Tensor | None = None
    loss: Callable[[Tensor], Tensor] = in_batch

    @cached_property
    def truth(self) -> Truth:
        """Winners of a part in FP64."""
        return Truth(
            self.queries, self.documents.detach().unsqueeze(1) if self.layout == "pairs" else self.documents, self.lengths
        )

    @cached_property
    def grad(self) -> Tensor:
        """The upstream gradient that methods are compared with: random normal, `[Nq, N]` float32 (pairs: `[N, 1]`)."""
        others = {"shared": self.documents.shape[0], "pairs": 1}.get(self.layout, self.documents.shape[1])
        generator = torch.Generator(self.queries.device).manual_seed(1)
        return torch.randn(self.queries.shape[0], others, device=self.queries.device, generator=generator)

    @property
    def bound(self) -> Bound:
        """What the inputs' dtype allows."""
        return FULL if self.queries.dtype == torch.float32 else HALF

    def dense(self, document_grad: Tensor) -> Tensor:
        """A method's document gradient in the truth's shape."""
        if self.layout == "pairs":
            return document_grad.unsqueeze(1)
        if self.lengths is None or document_grad.dim() == 3:
            return document_grad
        padded = torch.zeros_like(self.documents, requires_grad=False)
        padded[torch.arange(padded.shape[1], device=padded.device) < self.lengths[:, None]] = document_grad
        return padded

    def compare(self, grad: Tensor, made: tuple[Tensor | None, Tensor | None], bound: Bound | None = None) -> dict[str, Any]:
        """Gradients of queries and documents against the truth for upstream `grad`; raises RefusedError."""
        query_grad, document_grad = made
        dense = None if document_grad is None else self.dense(document_grad)
        return self.truth.compare(grad, query_grad, dense, bound or self.bound)

    def method(
        self,
        name: str,
        kind: str,
        entries: Mapping[str, Scores],
        *,
        documents: Tensor | None = None,
        bound: Bound | None = None,
        variable: str = "",
        alone: bool = False,
        says: str = "",
    ) -> Method:
        """A method that steps by each entry point; `alone`: those make loss (mean cross-entropy) and gradients themselves."""
        leaves = (self.queries, self.documents if documents is None else documents)

        def step(make: Scores) -> Tensor:
            for leaf in leaves:
                leaf.grad = None
            with path(variable):
                if alone:
                    return make()
                loss = self.loss(make())
                loss.backward()
            return loss.detach()

        def check(entry: str) -> dict[str, Any]:
            for leaf in leaves:
                leaf.grad = None
            with path(variable):
                scores = entries[entry]()
                grad = contrast(self.queries, self.documents) if alone else self.grad
                if not alone:
                    if scores.numel() != grad.numel():
                        raise RefusedError(f"wrong: scores {list(scores.shape)}, need {list(grad.shape)}")
                    scores.backward(grad.to(scores.dtype).view(scores.shape))
            return self.compare(grad, (leaves[0].grad, leaves[1].grad), bound)

        calls: dict[str, Call] = {entry: partial(step, make) for entry, make in entries.items()}
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return Method(name, kind, calls, check=check, gradient_bytes=size, says=says)


@torch.no_grad()
def contrast(queries: Tensor, documents: Tensor) -> Tensor:
    """Gradient of the mean in-batch cross-entropy with respect to the scores."""
    scores = maxsim(queries.detach(), documents.detach())
    assert isinstance(scores, Tensor)
    return (torch.softmax(scores.double(), 1) - torch.eye(*scores.shape, device=scores.device)) / scores.shape[0]


def ours(problem: Problem, paths: tuple[str, ...] = ("auto", *PATHS)) -> Lineup:
    """Our public call, each gradient path by name; packed documents where the problem has them."""
    lineup, pairs = Lineup(), problem.layout == "pairs"
    values = problem.documents if problem.values is None else problem.values
    for choice in paths:
        name = "ours" if choice == "auto" else f"ours {choice}"

        def scores(choice: str = choice) -> Tensor:
            held = values if problem.offsets is None else Packed(values, problem.offsets)
            found = (maxsim_pairs if pairs else maxsim)(problem.queries, held, backward=choice)
            assert isinstance(found, Tensor)
            return found

        says = explained(problem, choice)
        if says.startswith("reference"):
            lineup.skipped[name] = f"no fused kernel ({says.splitlines()[0]})"
        else:
            lineup.methods.append(problem.method(name, "ours", {"": scores}, documents=values, says=says))
    return lineup


def explained(problem: Problem, choice: str) -> str:
    """What explain() says of a call, its gradient path too."""
    held: Any = problem.documents
    if problem.values is not None and problem.offsets is not None:
        held = Packed(problem.values, problem.offsets)
    more = {"backward": choice} if "backward" in inspect.signature(explain).parameters else {}
    return explain(problem.queries, held, pairs=problem.layout == "pairs", **more)  # type: ignore[arg-type]


def naive(problem: Problem) -> Lineup:
    """The paper's listing through autograd, in both precisions."""
    lineup, documents = Lineup(), problem.documents
    padding = None
    if problem.lengths is not None:
        padding = torch.arange(documents.shape[1], device=documents.device) >= problem.lengths[:, None]

    def listing(wide: bool) -> Tensor:
        queries, held = (problem.queries.float(), documents.float()) if wide else (problem.queries, documents)
        if problem.layout == "pairs":
            return torch_rivals.score_pairs(queries, held)
        if problem.layout == "per_query":
            return torch.einsum("qid,qnjd->qnij", queries, held).max(3).values.sum(2)
        return torch_rivals.score_queries(queries, held, padding)

    half = problem.queries.dtype != torch.float32
    if half:
        lineup.methods.append(problem.method("naive FP16", "baseline", {"": partial(listing, False)}, bound=ROUNDED))
    name = "naive FP32 accumulation" if half else "naive FP32"
    lineup.methods.append(problem.method(name, "baseline", {"": partial(listing, True)}))
    return lineup


def recomputed(problem: Problem) -> Lineup:
    """Blocks: checkpointed over queries in both precisions, chunked over documents in FP16; shared documents only."""
    lineup, (queries, documents) = Lineup(), (problem.queries, problem.documents)
    rows, tokens = queries[0].shape[0] * documents.shape[0], documents.shape[1]

    def block(part: Tensor, held: Tensor, wide: bool) -> Tensor:
        return torch_rivals.score_queries(part.float(), held.float()) if wide else torch_rivals.score_queries(part, held)

    def checkpointed(size: int, wide: bool) -> Tensor:
        again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(part, documents, wide) for part in queries.split(size)])

    def chunked(size: int) -> Tensor:
        return torch.cat([torch_rivals.score_queries(queries, part) for part in documents.split(size)], 1)

    for name, wide, bound in (("checkpointed FP16", False, ROUNDED), ("checkpointed FP32 accumulation", True, None)):
        entries: dict[str, Scores] = {
            f"{size} queries": partial(checkpointed, size, wide) for size in _sizes(rows * tokens, queries.shape[0])
        }
        lineup.methods.append(problem.method(name, "baseline", entries, bound=bound))
    cells = queries.shape[0] * queries.shape[1] * tokens
    pieces: dict[str, Scores] = {f"{size} documents": partial(chunked, size) for size in _sizes(cells, documents.shape[0])}
    lineup.methods.append(problem.method("chunked FP16", "baseline", pieces, bound=ROUNDED))
    return lineup


def _sizes(cells: int, count: int) -> list[int]:
    """Block sizes for items of `cells` similarities each: several blocks whatever the shape."""
    return sorted({max(1, min(count // 2, most // cells)) for most in BLOCKS})


def flash(problem: Problem, names: tuple[str, ...]) -> Lineup:
    """flash-maxsim's training entry points for a layout, on padded documents where they are ragged."""
    if FLASH not in names:
        return Lineup()
    module = installed.load(FLASH)
    if isinstance(module, str):
        return Lineup([], {FLASH: module})
    lineup, queries, documents = Lineup(), problem.queries, problem.documents
    shared = problem.layout == "shared"
    lengths = None if problem.lengths is None else problem.lengths.int()

    def scores() -> Tensor:
        held = documents.unsqueeze(1) if problem.layout == "pairs" else documents
        found = module.flash_maxsim_batched_train(queries, held, shared_docs=shared, doc_lengths=lengths)
        assert isinstance(found, Tensor)
        return found

    suffix = "" if lengths is None else ", padded"
    for name in ("unified", "csr") if shared else ("atomic", "sparse"):
        method = problem.method(f"{FLASH} {name}{suffix}", "peer", {"": scores}, variable=FLASH_PATHS[name])
        lineup.methods.append(method)
    if shared and lengths is None and queries.shape[1] <= 32:
        step = installed.load(FLASH, ".flash_maxsim_contrastive").colbert_contrastive_step
        entry: Scores = partial(step, queries, documents)
        lineup.methods.append(problem.method(f"{FLASH} fused step", "peer", {"": entry}, alone=True))
    return lineup


def lik(problem: Problem, names: tuple[str, ...]) -> Lineup:
    """late-interaction-kernels' training entry points for a layout, every backward method."""
    if LIK not in names:
        return Lineup()
    module = installed.load(LIK)
    if isinstance(module, str):
        return Lineup([], {LIK: module})
    lineup, queries, documents = Lineup(), problem.queries, problem.documents
    mask = None
    if problem.lengths is not None:
        mask = (torch.arange(documents.shape[1], device=documents.device) < problem.lengths[:, None]).to(torch.int8)
    for name in LIK_PATHS:
        if problem.layout == "pairs":
            if name != "unified" and queries.shape[1] > UNROLLED:  # auto is lowmem there; a shared query is cut into 128 tokens
                lineup.skipped[f"{LIK} {name}"] = WHY_UNROLLED
                continue
            entry: Scores = partial(module.maxsim_pairs, queries, documents, backward=name)
        else:
            entry = partial(module.maxsim, queries, documents, d_mask=mask, backward=name)
        suffix = "" if mask is None else ", padded"
        lineup.methods.append(problem.method(f"{LIK} {name}{suffix}", "peer", {"": entry}))
    if problem.values is not None and problem.offsets is not None:
        count, size, width = queries.shape
        starts = torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=queries.device)
        rest = (starts, problem.offsets.int(), size, documents.shape[1])
        values = problem.values

        def packed() -> Tensor:
            found = module.maxsim_varlen(queries.reshape(-1, width), values, *rest)
            assert isinstance(found, Tensor)
            return found

        lineup.methods.append(problem.method(f"{LIK} varlen", "peer", {"": packed}, documents=values))
    return lineup
