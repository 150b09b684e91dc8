"""What every encoder that runs a model shares: its options, batches of pages, and how tokens are handed out."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from maxsim_eval.encoders.memory import Halving
from maxsim_eval.encoders.readers import Readers
from maxsim_eval.encoders.refused_items import not_finite
from maxsim_eval.encoders.text_batches import TextBatches
from maxsim_eval.environment import resolve_device
from maxsim_eval.errors import MissingPackageError, UsageError
from maxsim_eval.types import Role
from maxsim_kernels import Packed, pack

GPU_CHUNK = 1024  # texts of one `encode` call on a GPU: sorted by length together
DTYPE_ON = {"cpu": "float32", "cuda": "float16"}  # what late-interaction models of texts are trained and served in on a GPU
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TEXTS = 32  # texts in one batch of a library or processor, which cannot be batched by tokens
PAGE_BATCH_SIZE = 4  # page images: about a thousand tokens each
Kind = Literal["text", "page"]


def require(module: str, encoder: str, package: str) -> None:
    """Raise `MissingPackageError` where a module is not installed; imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackageError(f"encoder {encoder}", package, "encoders")


def find_dtype(option: str, dtype: str) -> torch.dtype:
    """The torch dtype of a name; `UsageError` names the option."""
    if dtype not in DTYPES:
        raise UsageError(f"{option}: got {dtype!r}, need {', '.join(DTYPES)}")
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` of `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def kind_of(item: Any, name: str, number: int) -> Kind:
    """Whether an item is a text or a page (a PIL image); `UsageError` for anything else."""
    if isinstance(item, str):
        return "text"
    if all(hasattr(item, attribute) for attribute in ("mode", "size", "tobytes", "convert")):
        return "page"
    raise UsageError(f"{name} reads texts and PIL images; item {number} is a {type(item).__name__}")


def size_of(item: Any) -> int:
    """The size that items are sorted by: characters of a text, pixels of a page."""
    return len(item) if isinstance(item, str) else item.size[0] * item.size[1]


def describe(item: Any) -> str:
    """One item, for a message about memory."""
    return (
        f"one text of {len(item)} characters" if isinstance(item, str) else f"one page of {item.size[0]}x{item.size[1]} pixels"
    )


class Batches:
    """Runs a model over items in batches of similar size; the number in a batch is halved, with one warning, when memory runs out."""

    def __init__(self, name: str, device: torch.device, size: int, what: str) -> None:
        self.size = size
        self._halving = Halving(name, device, what)

    def run(
        self,
        places: Sequence[int],
        length: Callable[[int], int],
        forward: Callable[[list[int]], Sequence[torch.Tensor]],
        one: Callable[[int], str],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Pairs of place and tokens `[tokens, dim]` on the CPU, in no useful order.

        Args:
            places: which items; `length` of one sorts them, the longest first, so that memory fails early.
            forward: tokens of a batch of places, one tensor each, padding removed.
            one: describes a single item, for the message when not even it fits.

        Raises:
            UsageError: no memory for one item alone.
        """
        order = sorted(places, key=lambda place: (-length(place), place))
        start = 0
        while start < len(order):
            batch = order[start : start + self.size]
            try:
                with torch.inference_mode():
                    rows = [tokens.cpu() for tokens in forward(batch)]
            except RuntimeError as error:
                self._halving.check(error, len(batch), lambda: one(batch[0]))  # noqa: B023 (called at once)
                rows = []
            if not rows:  # outside the except clause, whose traceback keeps the failed batch's tensors
                self._halving.halve(len(batch), depth=3)
                self.size = len(batch) // 2
                continue
            yield from zip(batch, rows, strict=True)
            start += len(batch)


class ModelEncoder:
    """Base of the encoders that run a model: options every one of them has, and how its tokens are handed out.

    Args:
        name: the encoder's name in caches and reports.
        device: where the model runs: auto (a CUDA device that works, else the CPU), cpu, cuda, cuda:<number>. Results are on the CPU.
        batch_size: the most items in one forward pass; None: texts up to `text_batches.TOKENS` tokens, 4 pages. Halved, with
            one warning, when memory runs out.
        dtype: what the model computes in: float32, float16 or bfloat16; None: what `dtype_on` says for the kind of device.
        embedding_dtype: what its embeddings are stored in; None: as `dtype`.
        max_query_tokens, max_document_tokens: None: the encoder's or checkpoint's own limits.
        query_prompt, document_prompt: text before every query or document; None: the checkpoint's own.

    Raises:
        UsageError: an option out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "auto",
        batch_size: int | None = None,
        dtype: str | None = None,
        embedding_dtype: str | None = None,
        max_query_tokens: int | None = None,
        max_document_tokens: int | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        dtype_on: Mapping[str, str] = DTYPE_ON,
    ) -> None:
        self.name = name
        self.device = torch.device(resolve_device(device, quiet=True))
        self.model_dtype = find_dtype("dtype", dtype or dtype_on[self.device.type])
        # Default dtypes of other kinds of device that differ from this one's; none where a dtype was asked for.
        self.other_dtypes = [] if dtype else sorted(set(dtype_on.values()) - {dtype_name(self.model_dtype)})
        self.dtype = self.model_dtype if embedding_dtype is None else find_dtype("embedding_dtype", embedding_dtype)
        self.asked_tokens: dict[Role, int | None] = {"query": max_query_tokens, "document": max_document_tokens}
        for role, tokens in self.asked_tokens.items():
            if tokens is not None and tokens < 1:
                raise UsageError(f"max_{role}_tokens: got {tokens}, need 1 or more")
        self.prompts: dict[Role, str | None] = {"query": query_prompt, "document": document_prompt}
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size: got {batch_size}, need 1 or more")
        self.texts = TextBatches(name, self.device, batch_size, self.model_dtype, self.dtype)
        self.batches: dict[Kind, Batches] = {
            "text": Batches(name, self.device, batch_size or TEXTS, "texts"),
            "page": Batches(name, self.device, batch_size or PAGE_BATCH_SIZE, "pages"),
        }
        gpu = self.device.type == "cuda"
        self.at_once = 6 if gpu else 1  # `encode` calls at a time: one or two each tokenize, run on the GPU, copy back
        self.chunk = GPU_CHUNK if gpu else None
        self.readers = Readers() if gpu else None
        # A tokenizer and a model serve one thread at a time, and the model is loaded once.
        self.reading, self.running, self.loading = threading.Lock(), threading.Lock(), threading.Lock()

    def prepare(self, documents: Sequence[Any]) -> None:
        """Nothing: the embeddings do not depend on the corpus."""

    def expect(self, items: int) -> None:
        """Announce that `items` items will be encoded, a few of them first: what starts slowly can start with those."""
        if self.readers is not None:
            self.readers.expect(items)
            self.texts.expect(items)

    def in_batches(
        self, kind: Kind, items: Sequence[Any], places: Sequence[int], forward: Callable[[list[int]], Sequence[torch.Tensor]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """`Batches.run` over items whose length is known without a tokenizer: characters of texts, pixels of pages."""
        return self.batches[kind].run(
            places, lambda place: size_of(items[place]), forward, lambda place: describe(items[place])
        )

    def hand_out(self, rows: Sequence[torch.Tensor], dim: int) -> Packed:
        """Tokens of all items as one `Packed` in the embeddings' dtype, on the CPU.

        Raises:
            ItemError: NaN or infinity, as half precision gives where a model's activations, or what is stored of them, pass 65,504.
        """
        packed = pack([row.to(self.dtype) for row in rows], dim=dim, dtype=self.dtype)
        finite = torch.isfinite(packed.values).all(dim=1)
        if not bool(finite.all()):
            first = int(torch.nonzero(~finite)[0])
            item = int((packed.lengths.cumsum(0) <= first).sum())
            largest = float(rows[item].abs().max())
            raise not_finite(self.name, item, len(rows), largest, self.model_dtype, self.dtype)
        return packed


def sort_kinds(items: Sequence[Any], name: str) -> dict[Kind, list[int]]:
    """Places of the texts and of the pages among items; empty and blank texts are in neither: they have no tokens."""
    places: dict[Kind, list[int]] = {"text": [], "page": []}
    for number, item in enumerate(items):
        kind = kind_of(item, name, number)
        if kind == "page" or item.strip():
            places[kind].append(number)
    return places
