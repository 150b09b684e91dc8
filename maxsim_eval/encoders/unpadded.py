"""Runs concatenated texts through a transformer unpadded: attention stays within each text, by torch's variable-length kernel.

A model takes part when its kind is known (`FIRST_POSITION`), it computes in half precision, and the GPU has the kernel. Its attention
is then one registered with transformers, which looks up here where the texts of the thread's batch end; outside `unpadded` it is
the usual one. Beside the padding this saves the padding masks, each of which makes the host wait for the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "maxsim_eval_unpadded"
# Kinds of encoders whose tokens meet in attention alone -> whether positions begin behind the padding's id (True) or at 0.
FIRST_POSITION = {"bert": False, "electra": False, "roberta": True, "xlm-roberta": True, "camembert": True}
_HEAD = 256  # the widest head of the kernel, in steps of 8
_batch = threading.local()  # `ends` of the batch that a thread runs, while it runs one


@dataclass(frozen=True)
class Ends:
    """Where each of b texts begins, and the last one ends: `[b + 1]` int32 on the device; and the tokens of the longest."""

    places: Tensor
    longest: int


def first_position(model: Any, device: torch.device, dtype: torch.dtype) -> int | None:
    """Make a transformers model read unpadded texts; the position of a text's first token. None: it can only read padded ones."""
    config = getattr(model, "config", None)
    known = FIRST_POSITION.get(getattr(config, "model_type", ""))
    if config is None or known is None or config.is_decoder or not _has_kernel(device, dtype):
        return None
    if config.hidden_size // config.num_attention_heads not in range(8, _HEAD + 1, 8):
        return None
    _register()
    model.set_attn_implementation(NAME)
    return before_first(config)


def before_first(config: Any) -> int:
    """Number of positions before a text's first token: the padding's id + 1 for models that count so, else 0."""
    padding = getattr(config, "pad_token_id", None)
    behind_padding = FIRST_POSITION.get(getattr(config, "model_type", ""), False)
    return int(padding) + 1 if behind_padding and padding is not None else 0


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def unpadded(ends: Ends) -> Iterator[None]:
    """In the block, models that this thread runs are given one row of concatenated texts, described by `ends`."""
    _batch.ends = ends
    try:
        yield
    finally:
        del _batch.ends


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of `[b, heads, l, d]` -> `[b, l, heads, d]`, as transformers asks for it."""
    ends: Ends | None = getattr(_batch, "ends", None)
    if ends is None:
        from transformers import AttentionInterface

        usual: tuple[Tensor, None] = AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
        return usual
    found = _attention(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), ends)
    return found[None], None


def _attention(query: Tensor, key: Tensor, value: Tensor, ends: Ends) -> Tensor:
    """Of queries, keys and values `[tokens, heads, d]`, scaled by one over the root of d as all these models do."""
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(query, key, value, ends.places, ends.places, ends.longest, ends.longest)
    assert isinstance(found, Tensor)
    return found


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    """The mask of a batch; unpadded texts need none."""
    if hasattr(_batch, "ends"):
        return None
    from transformers.masking_utils import AttentionMaskInterface

    found: Tensor | None = AttentionMaskInterface()["sdpa"](*arguments, **options)
    return found
