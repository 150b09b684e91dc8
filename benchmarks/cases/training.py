"""The rows of the training benchmark: inputs and the methods that take part, built one row at a time.

Tokens are random unit vectors in FP16 from a fixed seed, d = 128, unless a row says otherwise. "ColPali" is 1024 x 1024 tokens,
"ColBERT" 32 x 180. In the ablation winners come from data, so that peers can take part: *random* as everywhere; *hot* gives every
document a first token that beats all others for every query token; *uniform* draws queries and documents from one set of tokens, so
that every document token is chosen equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxsim_kernels import maxsim
from measure.method import Lineup, Options, Row
from measure.names import LAYOUTS, MEMORY_STEPS, STEPS, memory_name, step_name
from measure.work import Work
from rivals import training as rivals
from rivals.training import Problem, summed

DIM = 128
# B of queries and of documents, Lq, Ld
SHAPES = {
    "ColBERT B=32": (32, 32, 180),
    "ColBERT B=128": (128, 32, 180),
    "ColBERT B=512": (512, 32, 180),
    "ColBERT B=1024": (1024, 32, 180),
    "ColPali B=32": (32, 1024, 1024),
    "ColPali B=64": (64, 1024, 1024),
    "ColPali B=128": (128, 1024, 1024),
    "ColPali B=256": (256, 1024, 1024),
}


def sizes(shape: str, options: Options) -> tuple[int, int, int, int]:
    """(B, Lq, Ld, d) of a shape; in a smoke run small ones of the same kind."""
    batch, rows, tokens = SHAPES[shape]
    if not options.smoke:
        return batch, rows, tokens, DIM
    return (max(4, batch // 16), 32, 40, 32) if rows > 32 else (max(4, batch // 64), 16, 24, 32)


class Tokens:
    """Random unit vectors, one stream of numbers a row."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def unit(self, *shape: int) -> Tensor:
        """`shape` of unit vectors, FP32."""
        draft = torch.randn(shape, device=self.device, generator=self.generator)
        return torch.nn.functional.normalize(draft, dim=-1)

    def leaf(self, tokens: Tensor) -> Tensor:
        """The tokens in the row's dtype, requiring a gradient."""
        return tokens.to(self.dtype).requires_grad_()

    def permutation(self, size: int) -> Tensor:
        """0 to size - 1 in random order."""
        return torch.randperm(size, device=self.device, generator=self.generator)


def drawn(kind: str, batch: tuple[int, int], rows: int, tokens: int, dim: int, source: Tokens) -> tuple[Tensor, Tensor]:
    """Queries `[Nq, rows, d]` and documents `[N, tokens, d]` whose winners are of this kind."""
    if kind == "uniform":
        base = source.unit(tokens, dim)
        places = torch.arange(batch[0] * rows, device=source.device).view(batch[0], rows) % tokens
        documents = torch.stack([base[source.permutation(tokens)] for _ in range(batch[1])])
        return base[source.permutation(tokens)][places], documents
    queries, documents = source.unit(batch[0], rows, dim), source.unit(batch[1], tokens, dim)
    if kind == "hot":
        common = source.unit(dim)
        queries = queries + common
        documents[:, 0] = 3 * common
    return queries, documents


def shared(shape: str, options: Options, kind: str = "random", one: bool = False) -> Problem:
    """In-batch documents, or one query against them."""
    batch, rows, tokens, dim = sizes(shape, options)
    source = Tokens(options.device)
    queries, documents = drawn(kind, (1 if one else batch, batch), rows, tokens, dim, source)
    return Problem(source.leaf(queries), source.leaf(documents))


def about(problem: Problem) -> tuple[dict[str, Any], float]:
    """What the file says of a row's shape, and the operations of its forward."""
    queries, documents = problem.queries, problem.documents
    width = queries.shape[-1]
    pairs = queries.shape[0] * {"shared": documents.shape[0], "pairs": 1}.get(problem.layout, documents.shape[1])
    tokens = pairs * documents.shape[-2]
    if problem.values is not None:
        tokens = queries.shape[0] * problem.values.shape[0]
    held = {
        "layout": problem.layout,
        "queries": queries.shape[0],
        "query_tokens": queries.shape[1],
        "documents": documents.shape[0] if problem.layout != "per_query" else documents.shape[1],
        "document_tokens": documents.shape[-2],
        "dim": width,
        "dtype": str(queries.dtype).removeprefix("torch."),
    }
    if queries.is_cuda:
        from maxsim_kernels.gpu.backward.gradients import LIST_BYTES

        held["list_bytes"] = LIST_BYTES
    return held, 2.0 * queries.shape[1] * tokens * width


def row(name: str, problem: Problem, lineups: list[Lineup], **more: Any) -> Row:
    """A row whose methods are those of these lineups."""
    held, operations = about(problem)
    joined = Lineup()
    for lineup in lineups:
        joined.add(lineup)
    work = Work(operations, 0.0) if problem.queries.dtype != torch.float32 else None
    return Row(name, held, joined, work, **{"precision": "high", **more})


def everybody(problem: Problem, options: Options) -> list[Lineup]:
    """Ours and the peers."""
    return [rivals.ours(problem), rivals.flash(problem, options.peers), rivals.lik(problem, options.peers)]


def steps(options: Options) -> Iterator[Row]:
    for shape in STEPS:
        problem = shared(shape, options)
        lineups = [*everybody(problem, options), rivals.naive(problem), rivals.recomputed(problem)]
        yield row(step_name(shape), problem, lineups, busy=shape.startswith("ColBERT"))


def memory(options: Options) -> Iterator[Row]:
    """Peaks alone, with 32-bit winners beside the default, at batches that only fused methods reach."""
    for shape in MEMORY_STEPS:
        problem = shared(shape, options)

        def wide(problem: Problem = problem) -> Tensor:
            return maxsim(problem.queries, problem.documents, return_argmax=True)[0]

        returned = Lineup([problem.method("ours, winners returned (32-bit)", "ours", {"": wide})])
        yield row(memory_name(shape), problem, [returned, *everybody(problem, options)], timed=False)


# Other layouts


def distillation(options: Options) -> Problem:
    """Every query with candidates of its own, KL divergence from random teacher scores."""
    count, rows, tokens, dim = (4, 16, 24, 32) if options.smoke else (32, 32, 180, DIM)
    source = Tokens(options.device)
    queries, documents = source.leaf(source.unit(count, rows, dim)), source.leaf(source.unit(count, count, tokens, dim))
    teacher = torch.randn(count, count, device=options.device, generator=source.generator).log_softmax(1)

    def loss(scores: Tensor) -> Tensor:
        student = scores.float().log_softmax(1)
        return torch.nn.functional.kl_div(student, teacher, reduction="sum", log_target=True)

    return Problem(queries, documents, "per_query", loss=loss)


def pairs(options: Options, count: int, rows: int, tokens: int) -> Problem:
    """Independent pairs; the loss is the sum of scores."""
    size = (6, 32, 40, 32) if options.smoke else (count, rows, tokens, DIM)
    source = Tokens(options.device)
    queries, documents = source.unit(size[0], size[1], size[3]), source.unit(size[0], size[2], size[3])
    return Problem(source.leaf(queries), source.leaf(documents), "pairs", loss=summed)


def packed(options: Options) -> Problem:
    """In-batch negatives on ragged documents."""
    count, rows, shortest, longest, dim = (6, 16, 4, 24, 32) if options.smoke else (512, 32, 16, 240, DIM)
    source = Tokens(options.device)
    lengths = torch.randint(shortest, longest + 1, (count,), device=options.device, generator=source.generator)
    lengths[-1] = longest
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=options.device)
    offsets[1:] = lengths.cumsum(0)
    queries, values = source.unit(count, rows, dim), source.unit(int(offsets[-1]), dim)
    padded = torch.zeros(count, longest, dim, device=options.device)
    padded[torch.arange(longest, device=options.device) < lengths[:, None]] = values
    leaves = (source.leaf(queries), source.leaf(padded))
    return Problem(*leaves, lengths=lengths, values=source.leaf(values), offsets=offsets)


def plain(options: Options, shape: tuple[int, int, int], dim: int, dtype: torch.dtype = torch.float16) -> Problem:
    """In-batch negatives with another d or dtype."""
    batch, rows, tokens = (4, 16, 24) if options.smoke else shape
    source = Tokens(options.device, dtype)
    return Problem(source.leaf(source.unit(batch, rows, dim)), source.leaf(source.unit(batch, tokens, dim)))


def layouts(options: Options) -> Iterator[Row]:
    made: dict[str, Callable[[], Problem]] = {
        "distillation": partial(distillation, options),
        "pairs short": partial(pairs, options, 1024, 32, 180),
        "pairs long": partial(pairs, options, 64, 1024, 1024),
        "packed": partial(packed, options),
        "wide short": partial(plain, options, (128, 32, 180), 768),
        "wide long": partial(plain, options, (32, 1024, 1024), 768),
        "FP32": partial(plain, options, (128, 32, 180), DIM, torch.float32),
    }
    for key, make in made.items():
        problem = make()
        precision = "highest" if key == "FP32" else "high"
        yield row(LAYOUTS[key], problem, [*everybody(problem, options), rivals.naive(problem)], busy=True, precision=precision)
