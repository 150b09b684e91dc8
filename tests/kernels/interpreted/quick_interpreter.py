"""Triton's interpreter without what took most of its time; import it before kernels run, under TRITON_INTERPRET=1.

Triton 3.7 reduces with a combine function one number at a time, patches the whole language at every call of a device function, builds a
table of types for every value, and does integer arithmetic twice to see whether it overflowed (no compiled kernel does, and small shapes
cannot). Here a reduction combines whole slices, in the same order; the first one of every kind (combine function, shapes, axis) is done
both ways and must give the same bits. Everything else is Triton's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

ReduceOps = interpreter.ReduceOps
one_at_a_time = ReduceOps.generic_reduce
patch, patch_nothing = interpreter._patch_lang, interpreter._LangPatchScope
numpy_type = lru_cache(interpreter._get_np_dtype)
COMPARED: set[tuple[Any, ...]] = set()


def reduce_slices(reduction: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """`ReduceOps.generic_reduce`: the combine function on slices along the axis, first to last, for all rows together."""
    inputs, axis = reduction.unravel(tensors, reduction.axis)
    shape = inputs[0].handle.data.shape
    rest = shape[:axis] + shape[axis + 1 :]
    rows = [np.moveaxis(one.handle.data, axis, 0).reshape(shape[axis], -1) for one in inputs]

    def wrapped(values: list[Any]) -> list[Any]:
        return [reduction.to_tensor(value, one.dtype) for value, one in zip(values, inputs, strict=True)]

    def plain(found: Any, row: Any) -> Any:
        data = found.handle.data if isinstance(found, tl.core.tensor) else found
        return np.broadcast_to(data, row[0].shape).astype(row.dtype)

    kept = [row[0] for row in rows]
    for place in range(1, shape[axis]):
        found = reduction.combine_fn.fn(*wrapped(kept), *wrapped([row[place] for row in rows]))
        kept = [plain(*pair) for pair in zip(found if isinstance(found, tuple) else (found,), rows, strict=True)]
    if reduction.keep_dims:
        rest = (1,) * len(shape) if reduction.axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
    return wrapped([value.reshape(rest) if rest else value.item() for value in kept])


def reduce_and_compare(reduction: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """`reduce_slices`; the first time that it meets a kind of reduction, Triton's own way too."""
    found = reduce_slices(reduction, tensors)
    kind = (
        reduction.combine_fn.fn,
        reduction.axis,
        reduction.keep_dims,
        *((str(one.dtype), one.handle.data.shape) for one in tensors),
    )
    if kind not in COMPARED:
        COMPARED.add(kind)
        for mine, theirs in zip(found, one_at_a_time(reduction, tensors), strict=True):
            assert mine.type == theirs.type, (kind, mine.type, theirs.type)
            assert mine.handle.data.tobytes() == theirs.handle.data.tobytes(), kind
    return found


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang` for a launch, which restores it at its end; calls of device functions in between patch what is new to them."""
    done: set[int] = set()

    def patched(fn: Any) -> Any:
        names = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if names <= done:
            return patch_nothing()
        launch = not done
        done.update(names)
        scope = patch(fn)
        if launch:
            restore = scope.restore

            def end() -> None:
                done.clear()
                restore()

            scope.restore = end
        return scope

    return patched


def multiply_add(_: Any, x: Any, y: Any, z: Any) -> Any:
    """`tl.fma` rounds once, as a GPU does; Triton's interpreter rounds the product too. FP64 holds the product of two FP32 numbers."""
    assert z.data.dtype == np.float32
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
    return interpreter.TensorHandle(wide.astype(np.float32), z.dtype.scalar)


def rounded(builder: Any, source: Any, kind: Any) -> Any:
    """FP32 as bfloat16, to the nearest as a GPU rounds it; Triton's interpreter cuts off what does not fit."""
    if kind.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
        return cast(builder, source, kind)
    bits = torch.from_numpy(np.atleast_1d(source.data)).to(torch.bfloat16).view(torch.int16).numpy()
    return interpreter.TensorHandle(bits.view(np.uint16).reshape(np.shape(source.data)), kind.scalar)


cast = interpreter.InterpreterBuilder.create_fp_trunc
interpreter.InterpreterBuilder.create_fp_trunc = rounded
interpreter.InterpreterBuilder.create_fma = multiply_add
ReduceOps.generic_reduce = reduce_and_compare
interpreter._patch_lang = patch_once(patch)
interpreter._get_np_dtype = lambda kind: np.dtype(np.uint64) if kind.scalar.is_ptr() else numpy_type(kind.scalar)
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
