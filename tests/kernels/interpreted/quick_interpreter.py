"""Triton's interpreter without what took most of its time; import it before kernels run, under TRITON_INTERPRET=1.

Triton 3.7 reduces with a combine function one number at a time, patches the whole language at every call of a device function, builds a
table of types, a shape and a type of that shape for every value, looks at types and at every axis before each operation, and does integer
arithmetic twice to see whether it overflowed (no compiled kernel does, and small shapes cannot). Here a reduction combines whole slices,
in the same order, and maxima without Triton's language in between; operands of one type and shape go as they are. The first reduction of
every kind (combine function, shapes, axis) and the first pair of shapes are done both ways and must give the same bits. Everything else
is Triton's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, reduce
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from maxsim_kernels.gpu.tile_ops import keep_nan, larger

ReduceOps = interpreter.ReduceOps
one_at_a_time = ReduceOps.generic_reduce
patch, patch_nothing = interpreter._patch_lang, interpreter._LangPatchScope
numpy_type = lru_cache(interpreter._get_np_dtype)
MAXIMA = {(keep_nan.fn, tl.float32), (larger.fn, tl.int32)}  # what both come down to is `np.maximum`
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

    if (reduction.combine_fn.fn, inputs[0].dtype) in MAXIMA:
        kept = [reduce(np.maximum, rows[0])]
    else:
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

    @cache
    def names_of(fn: Any) -> set[int]:
        return {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}

    def patched(fn: Any) -> Any:
        names = names_of(fn)
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


def same_block(cls: Any, element: Any, shape: Any) -> Any:
    """The block type of an element's type and a shape: one object, however often it is asked for."""
    if len(BLOCKS) > MOST:  # pointers' types are made anew for every launch
        BLOCKS.clear()
    sizes = getattr(shape, "values", shape)  # of the language's own tuples
    key = (id(element), *[one.value if isinstance(one, tl.constexpr) else one for one in sizes])
    found = BLOCKS.get(key)
    if found is None:
        found = object.__new__(cls)
        block(found, element, shape)
        BLOCKS[key] = found  # it holds its element's type, so that no other has that number meanwhile
    return found


def tensor_of_a_type(made: Any, handle: Any, kind: Any) -> None:
    """`tl.tensor(handle, kind)`, whose shape and dtype the type has kept."""
    known = kind.__dict__.get("tensors")
    if known is None:
        tensor(made, handle, kind)
        kind.tensors = (made.shape, made.numel, made.dtype)
        return
    made.handle, made.type = handle, kind
    made.shape, made.numel, made.dtype = known


def checked(semantic: Any, left: Any, right: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
    """`binary_op_type_checking_impl`: operands of one type keep it; a number beside a tensor is made once for each type."""
    if type(left) is tl.tensor:
        if type(right) is tl.tensor:
            kind = left.type.scalar
            if right.type.scalar is kind and not named.get("div_or_mod") and not kind.is_ptr():
                return same_shape(semantic, left, right)
        elif type(right) in NUMBERS:
            return with_number(semantic, left, right, flags, named)
    return check(semantic, left, right, *flags, **named)


def with_number(semantic: Any, left: Any, right: Any, flags: tuple[bool, ...], named: dict[str, bool]) -> tuple[Any, Any]:
    """The same of a tensor and a number of Python's, where the tensor stays as it is."""
    key = (id(left.type), type(right), repr(right), flags, *named.items())
    known = CONSTANTS.get(key)
    if known is None:
        if len(CONSTANTS) > MOST:
            CONSTANTS.clear()
        kept, made = check(semantic, left, right, *flags, **named)
        if kept is not left:
            return kept, made
        known = CONSTANTS[key] = (left.type, made)  # the type too, so that no other has its number meanwhile
    return left, known[1]


def same_shape(semantic: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """`broadcast_impl_value`, by NumPy's rules, which are the same."""
    if left.type is right.type:
        return left, right
    blocks = left.type.is_block(), right.type.is_block()
    shapes = tuple(one.handle.data.shape if block else () for one, block in zip((left, right), blocks, strict=True))
    if shapes[0] == shapes[1]:
        return left, right
    shape = np.broadcast_shapes(*shapes)
    found = tuple(
        one if held == shape else spread(semantic, one, shape, block)
        for one, held, block in zip((left, right), shapes, blocks, strict=True)
    )
    if shapes not in COMPARED:
        COMPARED.add(shapes)
        for mine, theirs in zip(found, broadcast(semantic, left, right), strict=True):
            assert mine.type == theirs.type, (shapes, mine.type, theirs.type)
            assert mine.handle.data.tobytes() == theirs.handle.data.tobytes(), shapes
            assert mine.handle.data.dtype == theirs.handle.data.dtype, shapes
    return found[0], found[1]


def spread(semantic: Any, one: Any, shape: tuple[int, ...], block: bool) -> Any:
    """A tensor in this shape: a view of a block, a new array for a scalar."""
    data, kind = one.handle.data, one.handle.dtype
    data = np.broadcast_to(data, shape) if block else np.full(shape, data, interpreter._get_np_dtype(kind))
    return semantic.tensor(interpreter.TensorHandle(data, kind), tl.block_type(one.type.scalar, list(shape)))


def same_type(semantic: Any, source: Any, kind: Any, *rounding: Any) -> Any:
    """`cast`, which compares types by their names, where it is the tensor's own."""
    return source if source.type.scalar is kind.scalar else convert(semantic, source, kind, *rounding)


def patch_attribute(thing: Any, name: str, member: Any, _: Any, scope: Any) -> None:
    """`_patch_attr`: the language's functions take the interpreter's semantics, whatever they are given."""

    inner = getattr(member, "__wrapped__", member)  # behind a check that semantics are given

    def called(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*arguments, **named)

    scope.set_attr(thing, name, called)


BLOCKS: dict[tuple[Any, ...], Any] = {}
CONSTANTS: dict[tuple[Any, ...], Any] = {}
NUMBERS = (int, float, bool)
MOST = 10_000
block, tensor = tl.block_type.__init__, tl.tensor.__init__
tl.block_type.__new__, tl.block_type.__init__ = same_block, lambda *_: None
tl.tensor.__init__ = tensor_of_a_type
cast = interpreter.InterpreterBuilder.create_fp_trunc
interpreter.InterpreterBuilder.create_fp_trunc = rounded
interpreter.InterpreterBuilder.create_fma = multiply_add
ReduceOps.generic_reduce = reduce_and_compare
interpreter._patch_lang = patch_once(patch)
interpreter._get_np_dtype = lambda kind: np.dtype(np.uint64) if kind.scalar.is_ptr() else numpy_type(kind.scalar)
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
semantics = type(interpreter.interpreter_semantic)
check, broadcast, convert = semantics.binary_op_type_checking_impl, semantics.broadcast_impl_value, semantics.cast
semantics.binary_op_type_checking_impl, semantics.broadcast_impl_value, semantics.cast = checked, same_shape, same_type
interpreter._patch_attr = patch_attribute
