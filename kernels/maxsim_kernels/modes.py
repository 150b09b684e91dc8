"""What torch does around a call: transforms and kinds of tensor that the operator refuses, autocast, capture in a CUDA graph.

The fused kernels take pointers. A tensor that stands for something else (a batch under `vmap`, a value with a tangent, a shard) has
none, or one to other numbers; so such calls are refused before anything runs, and before a recorded call is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from maxsim_kernels import fallback
from maxsim_kernels.tokens import FLOAT_DTYPES, Packed

_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None)))
_TRACED = "torch._subclasses"  # module of fake and functional tensors, which the custom ops take


def ordinary(tensors: Iterable[object]) -> bool:
    """Whether each of these is a plain tensor, a parameter or None."""
    return _ORDINARY.issuperset(map(type, tensors))


def transformed() -> bool:
    """Whether a transform of `torch.func` runs, or forward-mode differentiation."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def unusual(tensors: Sequence[Any]) -> bool:
    """Whether `check_tensors` may have something to refuse: a quick look, at every call. The first two tensors are the tokens."""
    if torch.compiler.is_compiling():
        return False
    return transformed() or not ordinary(tensors) or tensors[0].is_neg() or tensors[1].is_neg()


def check_tensors(operator: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse calls under a transform, tensors with a tangent, views yet to be negated, and subclasses of `Tensor` (except `_TRACED`).

    Raises:
        RuntimeError: names the transform. ValueError: names the argument.
    """
    running = torch._C._functorch.peek_interpreter_stack()
    if running is not None:
        raise RuntimeError(
            f"{operator}: called under torch.func's {running.key().name.lower()}, which it does not support; pass whole batches "
            "instead of vmap, and take gradients by torch.autograd"
        )
    dual = forward_ad._current_level >= 0
    for name, tensor in tensors:
        if not ordinary((tensor,)) or tensor.is_neg():
            _refuse_kind(name, type(tensor))
        if dual and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"{operator}: {name} has a forward-mode tangent, and there is no forward-mode derivative")


def foreign(tensor: Tensor) -> bool:
    """Whether this is a subclass of `Tensor` and not one of `_TRACED`: its numbers may lie elsewhere."""
    return not ordinary((tensor,)) and not type(tensor).__module__.startswith(_TRACED)


def _refuse_kind(name: str, kind: type) -> None:
    if kind.__module__.startswith(_TRACED):
        return
    if kind in _ORDINARY:
        raise ValueError(f"{name}: got a view that is yet to be negated, need its .resolve_neg()")
    remedy = "a tensor"
    if issubclass(kind, Tensor):  # one with its own dispatch holds its numbers elsewhere; others hold them themselves
        holds = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        remedy = "a plain torch.Tensor: "
        remedy += "its data by .as_subclass(torch.Tensor)" if holds else "what it stands for (a DTensor's by .to_local())"
    raise ValueError(f"{name}: got a {kind.__module__}.{kind.__qualname__}, need {remedy}")


def under_autocast(queries: Any, documents: Any) -> tuple[Any, Any]:
    """Queries and documents, cast if autocast is on and asks for it; what is no tokens stays, for the checks to refuse.

    Tokens of two dtypes are cast to autocast's, as `torch.matmul` casts its operands. Tokens of one dtype are left as they are, so that
    scores do not depend on where a call stands; `torch.matmul` would cast them, and a warning says so once.
    """
    if not torch._C._is_any_autocast_enabled():
        return queries, documents
    if not (isinstance(queries, Tensor | Packed) and isinstance(documents, Tensor | Packed)):
        return queries, documents
    kind = queries.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return queries, documents
    given, wanted = {queries.dtype, documents.dtype}, torch.get_autocast_dtype(kind)
    if not given <= set(FLOAT_DTYPES) or given == {wanted}:
        return queries, documents
    if len(given) > 1:
        return queries.to(wanted), documents.to(wanted)
    if not torch.compiler.is_compiling():
        here, there = (str(dtype).removeprefix("torch.") for dtype in (queries.dtype, wanted))
        fallback.say_once(
            f"autocast to {there} is on and leaves tokens of {here} as they are, where torch.matmul would cast them; cast them before "
            "the call for its speed, or turn autocast off around it"
        )
    return queries, documents


def capturing() -> bool:
    """Whether this thread's stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
