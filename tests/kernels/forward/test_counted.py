"""Calls that differ from a recorded one in counts alone (`counted.py`), without a GPU: every argument of their launches is compared with
what the whole way, checks and choice included, would pass."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from maxsim_kernels import Packed, api
from maxsim_kernels.checks import Options, tensors_of, validate
from maxsim_kernels.gpu import geometry, launch, plans
from maxsim_kernels.gpu.forward import choice, counted, dispatch, general, tuned

H200 = geometry.Hardware((9, 0), 132)
STREAM = 77
WIDTH = 16
_NUMBERS = 1 << 31  # whatever is larger points to memory
TOKENS = torch.zeros(1, WIDTH, dtype=torch.float16)
Started = tuple[Any, ...]


class FakeCompiled:
    """What Triton returns from a launch: `run` notes what the driver would be given."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, started: list[Started]) -> None:
        self.started = started

    def run(self, grid: int, _y: int, _z: int, stream: int, *arguments: Any) -> None:
        self.started.append((self, grid, stream, arguments[5:]))


@pytest.fixture
def started(monkeypatch) -> Iterator[list[Started]]:
    """Launches, of CPU tensors that pass for a GPU's: everything but the driver is the package's own."""
    found: list[Started] = []

    def compile_and_run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> FakeCompiled:
        compiled = FakeCompiled(found)
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        passed = [given[name] for name in kernel.arg_names]
        compiled.run(*grid, 1, 1, STREAM, *[None] * 5, *(one.data_ptr() if isinstance(one, Tensor) else one for one in passed))
        return compiled

    monkeypatch.setattr(JITFunction, "run", compile_and_run)
    monkeypatch.setattr(launch, "_is_cuda", lambda tensor: True)
    monkeypatch.setattr(plans, "ensure_context", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    for module in (geometry, dispatch, general, counted):
        monkeypatch.setattr(module, "hardware", lambda device: H200)
    monkeypatch.setattr(api, "implementation", lambda call, impl: api.Implementation("triton", "pretended"))
    monkeypatch.setattr(api.ops, "run", dispatch.forward)
    launch.forget()
    yield found
    launch.forget()


def call(queries: Any, documents: Any, **options: Any) -> Any:
    """`maxsim` of tensors that pass for a GPU's."""
    asked = Options(**options)
    inputs = tuple(tensors_of(queries, documents, documents, asked))
    return api._replayed(queries, documents, inputs, asked)


def passed(started: list[Started], run: Callable[[], Any], inputs: list[Tensor]) -> tuple[Any, ...]:
    """The launches of a call, its results' shapes and kinds; pointers by what they point to, scratch memory by when it is met first."""
    before = len(started)
    result = run()
    results = result if isinstance(result, tuple) else (result,)
    names: dict[int, str] = {}
    for kind, tensors in (("input", inputs), ("result", results)):
        names |= {one.data_ptr(): f"{kind} {number}" for number, one in enumerate(tensors) if one.data_ptr()}

    def named(one: Any) -> Any:
        if isinstance(one, TensorDescriptor):
            return named(one.base.data_ptr()), one.shape, one.strides, one.block_shape
        return names.setdefault(one, f"scratch {len(names)}") if type(one) is int and one > _NUMBERS else one

    launches = [(compiled, grid, stream, tuple(map(named, rest))) for compiled, grid, stream, rest in started[before:]]
    return launches, [(tuple(one.shape), one.stride(), one.dtype, one.is_inference()) for one in results]


def compared(started: list[Started], queries: Any, documents: Any, **options: Any) -> int:
    """Run a call as users do and the whole way; how many launches it took."""
    asked = Options(**options)
    inputs = [one for one in tensors_of(queries, documents, documents, asked) if one is not None]
    got = passed(started, partial(call, queries, documents, **options), inputs)
    assert got == passed(started, partial(api._run_checked, queries, documents, asked), inputs)
    return len(got[0])


def ragged(drawn: random.Random, count: int, index: torch.dtype, longest: int) -> Packed:
    """Documents of many lengths, some empty; offsets as they come, some unaligned or with gaps between; or as a view."""
    lengths = torch.tensor([drawn.randint(0, 1) for _ in range(20)]).repeat(count // 20 + 1)[:count] * drawn.randint(0, longest)
    offsets = torch.zeros(2 * count + 3, dtype=index)
    first, step = drawn.choice(((0, 1), (0, 1), (0, 1), (1, 1), (0, 2)))
    offsets = offsets[first : first + step * count + 1 : step]
    offsets[1:] = lengths.cumsum(0)
    packed = Packed(TOKENS.expand(int(offsets[-1]), WIDTH), offsets)
    return packed.select(list(range(count))) if drawn.random() < 0.2 else packed


def dense(drawn: random.Random, count: int, size: int) -> Tensor:
    """Documents as they come: their own, some of a buffer, tokens of a wider one, every second one, unaligned, the first
    tokens of longer ones, or expanded."""
    kind = drawn.randrange(7)
    if kind == 0:
        return torch.empty(count, size, WIDTH, dtype=torch.float16)
    if kind == 1:
        return torch.empty((count + 3) * size, WIDTH, dtype=torch.float16)[2 * size :][: count * size].view(count, size, WIDTH)
    if kind == 2:
        return torch.empty(count, size, 2 * WIDTH, dtype=torch.float16)[:, :, :WIDTH]
    if kind == 3:
        return torch.empty(2 * count, size, WIDTH, dtype=torch.float16)[::2]
    if kind == 4:
        return torch.empty(count * size * WIDTH + 1, dtype=torch.float16)[1:].view(count, size, WIDTH)
    if kind == 5:
        return torch.empty(count, 600, WIDTH, dtype=torch.float16)[:, :size]
    return TOKENS.expand(count, size, WIDTH)


def some_call(drawn: random.Random) -> tuple[Any, Any, dict[str, Any]]:
    """Counts around every bound of the choice, in some dozens of classes; and calls that have no class."""
    if drawn.random() < 0.1:
        return some_large_call(drawn)
    count = drawn.choice((0, 1, 2, 60, 66, 67, 528, 529, 1056, 1057, drawn.randint(1, 1200), drawn.randint(1, 1200)))
    queries: Any = torch.zeros(drawn.choice((32, 32, 32, 33)), 2 * WIDTH, dtype=torch.float16)[:, :WIDTH]
    queries = queries.contiguous() if drawn.random() < 0.8 else queries
    if drawn.random() < 0.1:
        queries = torch.empty(32 * WIDTH + 1, dtype=torch.float16)[1:].view(32, WIDTH)
    options: dict[str, Any] = {}
    if drawn.random() < 0.2:
        queries = torch.zeros(2, 16, WIDTH, dtype=torch.float16)
        if drawn.random() < 0.5:
            options["query_lengths"] = torch.ones(2, dtype=torch.int64)
    elif drawn.random() < 0.05:
        options["query_mask"] = torch.ones(queries.shape[0], dtype=torch.bool)
    if drawn.random() < 0.5:
        documents: Any = ragged(drawn, count, drawn.choice((torch.int32, torch.int64)), drawn.choice((3, 50, 180, 700)))
    else:
        documents = dense(drawn, count, drawn.choice((1, 40, 180, 200, 600)))
        kind = drawn.random()
        if kind < 0.2:
            options["document_lengths"] = torch.ones(count, dtype=torch.int32)
        elif kind < 0.25:
            options["document_mask"] = torch.ones(documents.shape[:2], dtype=torch.bool)
    if drawn.random() < 0.05:
        options["return_argmax"] = True
    return queries, documents, options


def some_large_call(drawn: random.Random) -> tuple[Any, Any, dict[str, Any]]:
    """So many documents that programs take several, where they are short or meet more than 32 rows."""
    count = drawn.choice((8448, 8449, drawn.randint(8000, 9000)))
    queries = torch.zeros(drawn.choice((32, 33)), WIDTH, dtype=torch.float16)
    if drawn.random() < 0.5:
        return queries, TOKENS.expand(count, drawn.choice((40, 180)), WIDTH), {}
    offsets = torch.arange(count + 1) * drawn.randint(1, 100)
    return queries, Packed(TOKENS.expand(int(offsets[-1]), WIDTH), offsets), {}


@pytest.fixture
def served(monkeypatch) -> list[counted.Sizes]:
    """Calls that took the launch of their class."""
    found: list[counted.Sizes] = []
    run = counted.Counted.run

    def noted(self: Any, inputs: Any, sizes: counted.Sizes, device: Any) -> Tensor:
        found.append(sizes)
        return run(self, inputs, sizes, device)

    monkeypatch.setattr(counted.Counted, "run", noted)
    return found


def test_every_argument_is_what_the_whole_way_passes(started, served) -> None:
    """Thousands of random calls; no launch differs in its kernel, its grid or an argument, whether a class serves it or not."""
    drawn = random.Random(23)
    launches = [
        compared(started, queries, documents, **options) for queries, documents, options in map(some_call, [drawn] * 5000)
    ]
    assert len(served) > 1200
    assert len(set(served)) > 600
    assert {bool(one.total) for one in served} == {False, True}
    assert {0, 1, 2} < set(launches)  # nothing to score; most; split documents, masks and winners


def test_calls_that_are_equal_to_the_choice_are_launched_alike() -> None:
    """Of every kind of call that "stream" takes; on GPUs of several sizes, and as `tune` keeps its answers."""
    drawn = random.Random(5)
    kinds = [
        validate(
            torch.zeros(rows, width, dtype=dtype),
            Packed(torch.zeros(1, width, dtype=dtype), torch.tensor([0, 1]))
            if packed
            else torch.zeros(1, 1, width, dtype=dtype),
            Options(),
        )
        for rows in (32, 33)
        for width in (128, 256, 512)
        for packed in (False, True)
        for dtype in (torch.float16,)
    ]
    seen: dict[Any, Any] = {}
    for _ in range(20_000):
        processors, number = drawn.choice((20, 132)), drawn.randrange(len(kinds))
        means = (0, 1, 63, 64, 65, 95, 96, 128, 129, 159, 160, 255, 256, 257, 511, 512, drawn.randint(1, 1300))
        bounds = [times * processors + beyond for times in (4, 8, 64) for beyond in (0, 1)]
        mean, count = drawn.choice(means), drawn.choice((*bounds, drawn.randint(1, 80 * processors)))
        hardware = geometry.Hardware((9, 0), processors)
        found = choice._choose(kinds[number], hardware, count, mean)
        assert found.kernel == "stream"
        asked = tuned.question(kinds[number], choice._keys(kinds[number], hardware, count, mean)[0], mean)
        key = number, processors, choice.stream_class(count, mean, processors)
        assert seen.setdefault(key, (found, asked)) == (found, asked)
    assert len({found for found, _ in seen.values()}) > 5


def test_several_blocks_of_query_rows(started, served, monkeypatch) -> None:
    """No row of the table has so few query rows a program; one that `tune` brings may."""

    def small(asked: Any, hardware: geometry.Hardware) -> choice.Launch:
        name, config = choice.choose(asked, hardware)
        return choice.Launch(name, replace(config, rows=32, programs=programs))

    monkeypatch.setattr(dispatch, "choose", small)
    queries = torch.zeros(4, 16, WIDTH, dtype=torch.float16)
    for programs in (0, 2):
        launch.forget()
        for count in (200, 201, 34, 33, 300, 133, 132, 131):
            compared(started, queries, DOCUMENTS[:count])
            assert started[-1][1] == (count if not programs else min(count, programs * 132 // 2)) * 2
            compared(started, queries, DOCUMENTS[:1, :1].expand(count, 600, WIDTH))
    assert len(served) == 22  # 33 long documents of two blocks are split, 34 are not


def rerank(count: int, **options: Any) -> Any:
    """One query and so many padded documents, which the class of 67 and more serves from the third call on."""
    return call(QUERY, DOCUMENTS[:count], **options)


QUERY = torch.zeros(32, WIDTH, dtype=torch.float16)
DOCUMENTS = torch.zeros(1, 1, WIDTH, dtype=torch.float16).expand(1000, 20, WIDTH)


def test_a_class_is_recorded_at_its_second_call_and_never_again(started, served, monkeypatch) -> None:
    recorded: list[Any] = []
    record = launch.record
    monkeypatch.setattr(launch, "record", lambda key, *rest: recorded.append(key) or record(key, *rest))
    for count in range(100, 200):
        assert rerank(count).shape == (count,)
        assert len(started) == count - 99
    assert (len(recorded), len(served)) == (1, 98)
    for count in range(2):
        rerank(100 + count, return_argmax=True)  # another kernel: no class
    assert len(served) == 98


def test_a_class_whose_launch_no_rule_describes_is_recorded_once(started, served, monkeypatch) -> None:
    """Documents that are split take two launches: signatures that come once are prepared, not recorded, as before."""
    recorded: list[Any] = []
    record = launch.record
    monkeypatch.setattr(launch, "record", lambda key, *rest: recorded.append(key) or record(key, *rest))
    long = DOCUMENTS[:1, :1].expand(60, 2000, WIDTH)
    for count in range(2, 60):
        call(QUERY, long[:count])
    assert len(recorded) == 1
    assert not served


LENGTHS = torch.ones(1000, dtype=torch.int32)
PACKED = Packed(TOKENS.expand(200, WIDTH), torch.arange(201))
WRONG: dict[str, Callable[[], Any]] = {
    "lengths of others": lambda: rerank(300, document_lengths=LENGTHS[:299]),
    "lengths of two dimensions": lambda: rerank(300, document_lengths=LENGTHS[:300, None]),
    "float lengths": lambda: rerank(300, document_lengths=LENGTHS[:300].float()),
    "lengths elsewhere": lambda: rerank(300, document_lengths=LENGTHS[:300].to("meta")),
    "lengths of packed documents": lambda: call(QUERY, PACKED, document_lengths=LENGTHS[:200]),
    "another width": lambda: call(QUERY[:, :8], DOCUMENTS[:300]),
    "another dtype": lambda: call(
        QUERY, TOKENS.float().expand(300, 20, WIDTH).as_strided((300, 20, WIDTH), DOCUMENTS.stride())
    ),
    "elsewhere": lambda: call(
        QUERY, torch.empty_strided((300, 20, WIDTH), DOCUMENTS.stride(), dtype=torch.float16, device="meta")
    ),
    "queries of another dtype": lambda: call(QUERY.float(), DOCUMENTS[:300]),
    "queries elsewhere": lambda: call(QUERY.to("meta"), DOCUMENTS[:300]),
    "one number": lambda: call(QUERY, torch.zeros(())),
    "a matrix": lambda: call(QUERY, DOCUMENTS[:300, 0]),
    "no rows": lambda: call(torch.zeros((), dtype=torch.float16), DOCUMENTS[:300]),
    "an unknown way": lambda: rerank(300, impl="fast"),
    "an unknown gradient": lambda: rerank(300, backward="fast"),
    "mask of others": lambda: rerank(300, document_mask=torch.ones(299, 20, dtype=torch.bool)),
    "query mask of others": lambda: rerank(300, query_mask=torch.ones(31, dtype=torch.bool)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_are_refused_after_right_ones(started, served, what) -> None:
    for count in (200, 201, 202):
        rerank(count)
        rerank(count, document_lengths=LENGTHS[:count])
        call(QUERY, Packed(TOKENS.expand(count, WIDTH), torch.arange(count + 1)))
    assert len(served) == 3
    launches = len(started)
    for _ in range(3):
        with pytest.raises(ValueError, match=r": (got|on) "):
            WRONG[what]()
    assert (len(served), len(started)) == (3, launches)


def test_starts_with_gaps_are_copied_by_the_whole_way(started, served) -> None:
    for count in (200, 201, 202, 203):
        offsets = torch.arange(count + 1).repeat_interleave(2)[::2]
        compared(started, QUERY, Packed(TOKENS.expand(count, WIDTH), offsets))
    assert not served


def test_one_tensor_in_two_roles_is_served_by_what_others_recorded(started, served) -> None:
    for count in (200, 201, 202, 203):
        documents = torch.zeros(count, 32, WIDTH, dtype=torch.float16)
        compared(started, documents[0] if count != 202 else QUERY, documents)
        if count == 202:
            compared(started, QUERY, documents[1:])
    assert len(served) == 2


def test_watched_launches_and_forgotten_ones_are_not_served(started, served, monkeypatch) -> None:
    for count in (200, 201, 202):
        rerank(count)
    with monkeypatch.context() as watching:
        watching.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        rerank(203)
    assert len(served) == 1
    launch.forget()
    rerank(204)
    assert len(served) == 1


def test_classes_are_bounded(started, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_MOST_PLANS", 3)
    for width in range(16, 48):
        for count in (200, 201):
            call(torch.zeros(4, width), torch.zeros(count, 2, width))
        for count in (200, 201):
            call(QUERY[:, :1].expand(32, width), DOCUMENTS[:count, :, :1].expand(count, 20, width))
        assert 0 < len(launch.classes) <= 3


def test_inference_mode_gradients_and_captures(started, served, monkeypatch) -> None:
    """As replayed calls: results of inference mode are its own, a gradient wants winners, and a capture compiles nothing."""
    monkeypatch.setattr(api, "_cuda_inputs", lambda *given: tuple(tensors_of(given[0], given[1], *given[1:])))
    asked = Options()
    for count in (200, 201, 202):
        api.run(QUERY, DOCUMENTS[:count], asked)
    with torch.inference_mode():
        assert api.run(QUERY, DOCUMENTS[:203], asked).is_inference()  # type: ignore[union-attr]
    wanting = QUERY.clone().requires_grad_()
    with torch.no_grad():
        assert not api.run(wanting, DOCUMENTS[:204], asked).requires_grad  # type: ignore[union-attr]
    assert len(served) == 3
    for count in (205, 206, 207):
        assert api.run(wanting, DOCUMENTS[:count].contiguous(), asked).requires_grad  # type: ignore[union-attr]
    assert len(served) == 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    api.run(QUERY, DOCUMENTS[:208], asked)
    assert len(served) == 4


@pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_have_the_dtype_that_the_kernel_writes(started, served, monkeypatch, out) -> None:
    monkeypatch.setattr(api, "_cuda_inputs", lambda *given: tuple(tensors_of(given[0], given[1], *given[1:])))
    for count in (200, 201, 202, 203):
        for asked in (out, torch.float32):
            assert api.run(QUERY, DOCUMENTS[:count], Options(out=asked)).dtype == asked  # type: ignore[union-attr]
    assert len(served) >= 2


def test_threads_do_not_meet(started, served) -> None:
    """Each gets the launch of its own counts."""
    for count in (200, 201):
        rerank(count)
    failed: list[Any] = []

    def many(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(200):
            count = drawn.randint(100, 500)
            if rerank(count).shape != (count,):
                failed.append(count)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed
    assert len(served) == 800
    at = general.ARGUMENTS.index("documents"), general.ARGUMENTS.index("workers")
    assert sorted(one[3][at[0]] for one in started[2:]) == sorted(one.documents for one in served)
    assert all(one[3][at[0]] == one[3][at[1]] == one[1] for one in started[2:])


def test_nobodys_tensors_are_kept(started, served) -> None:
    """Neither by the class, nor by its arguments."""
    for count in (200, 201, 202):
        rerank(count)
    (kept,) = (one for one in launch.classes.values() if one is not None)
    assert not any(isinstance(one, Tensor) for one in kept.arguments)
    assert kept.queries == ()
