"""`tune`: which configuration of the table is the fastest on this GPU, measured once and kept (`gpu/forward/tuned.py`).

Everything of `gpu/` is imported where it is used: it needs Triton, which importing this package must not.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maxsim_kernels import fallback
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.modes import capturing
from maxsim_kernels.quantize import quantize_fp8, quantize_int8
from maxsim_kernels.tokens import Granularity, Packed

if TYPE_CHECKING:
    from maxsim_kernels.gpu.forward.choice import Asked, Launch
    from maxsim_kernels.gpu.forward.tuned import Answer
    from maxsim_kernels.gpu.geometry import Hardware

FORMS = ("dense", "lengths", "mask", "packed", "int8", "fp8")
_GRANULARITIES: tuple[Granularity, ...] = ("token", "document", "corpus")
_RUNS, _WARM = 15, 3  # of every candidate, in turns
# Zeroed before each run: more than any L2 holds, and enough to keep the GPU busy while the host launches the run.
_FLUSH_BYTES, _FLUSHES = 256 << 20, 4
_WORTH = 0.97  # of the table's own time, which a configuration must beat; a smaller gain is noise


def tune(
    device: torch.device | str | None = None,
    *,
    dim: int = 128,
    dtype: torch.dtype = torch.float16,
    queries: Sequence[tuple[int, int]] = ((1, 32), (64, 32), (1, 1024)),
    documents: Sequence[tuple[int, int]] = ((1000, 180), (1000, 1024)),
    forms: Sequence[str] = ("dense", "packed"),
    return_argmax: bool = False,
    again: bool = False,
) -> str:
    """Time the table's configurations on this GPU for the calls described, and keep the fastest for this and later processes.

    Answers are kept in a file in `MAXSIM_CACHE`, else in `maxsim_kernels` of `XDG_CACHE_HOME` or `~/.cache`, by the GPU's name,
    Triton's version, the kernels' sources, the kind of call, d, and documents' mean length up to a power of two. `MAXSIM_CACHE=`
    (empty) turns them off. No score changes by a bit: a configuration whose scores or winners differ from the table's own is left
    out (FP8 products in tiles of other shapes may differ). Only this call times anything.

    Args:
        device: the GPU; the current one by default.
        dim, dtype: of the embeddings.
        queries: (queries, tokens a query) of each kind of call.
        documents: (documents, tokens each, in the mean where they are ragged).
        forms: which of "dense", "lengths", "mask" (of padding), "packed", "int8" (all three granularities, dense and packed), "fp8".
        return_argmax: calls with winners instead of calls without.
        again: measure what is already known, too.

    Returns:
        What was found: a line for each kind of call, and where it is kept.

    Raises:
        RuntimeError: without a GPU or Triton, while a CUDA graph is captured, or with nowhere to keep the answers.
        ValueError: an unknown form.
    """
    unknown = set(forms) - set(FORMS)
    if unknown:
        raise ValueError(f"forms: got {sorted(unknown)}, need some of {', '.join(FORMS)}")
    place = _timed_on(device)
    from maxsim_kernels.gpu.forward import tuned
    from maxsim_kernels.gpu.geometry import hardware
    from maxsim_kernels.gpu.launch import forget

    if tuned.folder() is None:
        raise RuntimeError("tune: got no folder to keep its answers in, need MAXSIM_CACHE or a home folder")
    known = {} if again else tuned.read(place)
    with torch.cuda.device(place), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # real calls will warn of what falls back
        calls = _calls(place, dim, dtype, queries, documents, forms, return_argmax)
        found, lines = _answers(calls, hardware(place), known)
        torch.cuda.synchronize(place)
    if found:
        lines.append(f"kept in {tuned.keep(place, found)}")
        forget()  # launches that were recorded with what the table said
    return "\n".join(lines)


def _timed_on(device: torch.device | str | None) -> torch.device:
    """The GPU to time on, with its number; `RuntimeError` where nothing can be timed."""
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if place.type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError(f"tune: got {place} as the device, need a GPU to time kernels on")
    if not fallback.HAS_TRITON:
        raise RuntimeError("tune: Triton is not installed: there are no kernels to time")
    if capturing():
        raise RuntimeError("tune: a CUDA graph is being captured: call tune() before the capture")
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def _answers(calls: Iterator[Call], gpu: Hardware, known: dict[str, Answer]) -> tuple[dict[str, Answer], list[str]]:
    """The new answers by question, and a line to print for every kind of call."""
    from maxsim_kernels.gpu.forward import choice, dispatch, tuned

    found: dict[str, Answer] = {}
    lines = []
    for call in calls:
        refused = dispatch.supported(call, gpu[0])
        if refused:
            raise ValueError(f"forms: got one that this GPU does not run: {refused}")
        asked = choice.asked(call, gpu)
        question = tuned.question(call, asked.keys[0], asked.mean)
        if question in known or question in found:
            lines.append(f"{question}: known")
            continue
        outcome = _fastest(call, asked, gpu)
        if outcome.answer is not None:
            found[question] = outcome.answer
        lines.append(f"{question}: {outcome.said}")
    return found, lines


@dataclass(frozen=True)
class _Outcome:
    answer: Answer | None
    said: str


def _fastest(call: Call, asked: Asked, gpu: Hardware) -> _Outcome:
    """Time the candidates of a call that give the bits of the table's own row."""
    from maxsim_kernels.gpu.forward import choice, tuned, tuning

    own = next(row for row in (tuning.row_of(one, gpu[0]) for one in asked.keys) if row is not None)
    rows = [own]
    rows += [row for row in tuning.candidates(asked.keys[0]) if tuning.numbers(row.config) != tuning.numbers(own.config)]
    launches = [choice.as_launched(call, row, gpu[1], asked.documents, asked.mean) for row in rows]
    need, fit = _results(call, launches[0]), [0]
    for number, launch in enumerate(launches[1:], 1):
        try:
            got = _results(call, launch)
        except _unfit():
            continue
        if all(_same(one, other) for one, other in zip(got, need)):
            fit.append(number)
    left_out = len(rows) - len(fit)
    if len(fit) == 1:
        return _Outcome(None, f"the table's {own.name!r}, nothing else to choose ({left_out} left out)")
    times = _times([_runner(call, launches[number]) for number in fit])
    before = times[0]
    best, ms = min(zip(fit, times), key=lambda pair: pair[1])
    if ms > _WORTH * before:
        best, ms = 0, before
    said = f"{rows[best].name!r} {ms:.4g} ms, the table's {own.name!r} {before:.4g} ms; {len(fit)} timed, {left_out} left out"
    return _Outcome(tuned.Answer(rows[best], ms, before), said)


def _outputs(call: Call) -> tuple[Tensor, Tensor | None]:
    device = call.queries.device
    scores = torch.full((call.query_count, call.document_count), torch.nan, dtype=torch.float32, device=device)
    if not call.winners:
        return scores, None
    return scores, torch.full((*scores.shape, call.queries.shape[1]), -7, dtype=torch.int32, device=device)


def _runner(call: Call, launch: Launch) -> Callable[[], None]:
    from maxsim_kernels.gpu.forward import dispatch

    scores, argmax = _outputs(call)
    return lambda: dispatch.launch(call, scores, argmax, launch)


def _unfit() -> tuple[type[Exception], ...]:
    """What launching a configuration raises if this GPU has no room for it."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError


def _results(call: Call, launch: Launch) -> tuple[Tensor, ...]:
    """Scores, and winners where they are wanted."""
    from maxsim_kernels.gpu.forward import dispatch

    scores, argmax = _outputs(call)
    dispatch.launch(call, scores, argmax, launch)
    return (scores,) if argmax is None else (scores, argmax)


def _same(one: Tensor, other: Tensor) -> bool:
    """The same bits, NaN included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _times(runs: list[Callable[[], None]]) -> list[float]:
    """Medians in ms, the runs in turns, each with nothing of its inputs left in the L2 cache."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for run in runs * _WARM:
        run()
    taken: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(_RUNS):
        for run, held in zip(runs, taken):
            for _ in range(_FLUSHES):
                flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            held.append((begin, end))
        torch.cuda.synchronize()
    return [statistics.median(begin.elapsed_time(end) for begin, end in held) for held in taken]


def _calls(
    device: torch.device,
    dim: int,
    dtype: torch.dtype,
    queries: Sequence[tuple[int, int]],
    documents: Sequence[tuple[int, int]],
    forms: Sequence[str],
    winners: bool,
) -> Iterator[Call]:
    """One call of every kind described, on numbers of many magnitudes, so that another order of additions shows."""
    random = torch.Generator(device).manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        values = torch.randn(*shape, dim, generator=random, device=device, dtype=dtype)
        for _ in range(2):
            values *= torch.randn(*shape, dim, generator=random, device=device, dtype=dtype)
        return values

    for count, length in documents:
        apart = torch.randint(0, length // 2 + 1, (count // 2,), generator=random, device=device)
        lengths = torch.full((count,), length, device=device)
        lengths[: len(apart)] += apart  # in pairs, so that the mean is what was asked for
        lengths[len(apart) : 2 * len(apart)] -= apart
        dense = tokens(count, length)
        packed = Packed(tokens(count * length), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
        inside = lengths.clamp(max=length)
        for shape in queries:
            asked = tokens(*shape)
            for form in forms:
                options = Options(return_argmax=winners)
                if form in ("dense", "packed"):
                    yield validate(asked, dense if form == "dense" else packed, options)
                elif form == "lengths":
                    yield validate(asked, dense, options._replace(document_lengths=inside))
                elif form == "mask":
                    mask = torch.arange(length, device=device) < inside[:, None]
                    yield validate(asked, dense, options._replace(document_mask=mask))
                else:
                    quantize = quantize_int8 if form == "int8" else quantize_fp8
                    for granularity in _GRANULARITIES:
                        for held in (dense, packed):
                            yield validate(asked, quantize(held, granularity), options)
