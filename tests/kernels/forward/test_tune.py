"""`tune` without a GPU: what it times and takes, where answers are kept, and that nothing is asked of a file where nothing was tuned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import OutOfResources

from maxsim_kernels import Packed, fallback, maxsim, quantize_int8, tune, tuner
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu import geometry, launch
from maxsim_kernels.gpu.forward import choice, dispatch, tuned, tuning
from maxsim_kernels.gpu.forward.tuning import NAMED

HOPPER, AMPERE, BLACKWELL = (geometry.Hardware(found, 132) for found in ((9, 0), (8, 0), (10, 0)))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GENERAL = NAMED["general", "any"]
EXACT = [NAMED["exact", "any"], NAMED["exact 64", "tried"], NAMED["exact 32 x 8", "tried"]]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU by name, a folder of this test's own, nothing said or tuned yet."""
    monkeypatch.setenv("MAXSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 9 (80 GB)")
    monkeypatch.setattr(tuned, "_held", {})
    monkeypatch.setattr(fallback, "_SAID", set())


def call_of(queries: Any, documents: Any, **options: Any) -> Call:
    return validate(queries, documents, Options(**options))


def ones(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


def small(tokens: int = 180, d: int = 16, count: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return call_of(ones(count, 32, d, dtype=dtype), ones(3, tokens, d, dtype=dtype), **options)


def question(call: Call, gpu: geometry.Hardware = HOPPER) -> str:
    asked = choice.asked(call, gpu)
    return tuned.question(call, asked.keys[0], asked.mean)


# Timing


class Bench:
    """Candidates that score by numbers of their tiles, and a clock that was wound up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: Callable[[tuning.Config], float]) -> None:
        self.launched: list[choice.Launch] = []
        self.other_bits: set[tuning.Config] = set()
        self.too_large: set[tuning.Config] = set()
        self.timed = 0

        def launch(call: Call, scores: torch.Tensor, argmax: torch.Tensor | None, chosen: choice.Launch) -> None:
            self.launched.append(chosen)
            if chosen.config in self.too_large:
                raise OutOfResources(300_000, 232_448, "shared memory")
            scores.fill_(1.0)
            if chosen.config in self.other_bits:
                scores[-1, -1] = 1.0 + 2.0**-23
            if argmax is not None:
                argmax.zero_()

        def times(runs: list[Callable[[], None]]) -> list[float]:
            self.timed += 1
            found = []
            for run in runs:
                run()
                found.append(ms(self.launched[-1].config))
            return found

        monkeypatch.setattr(dispatch, "launch", launch)
        monkeypatch.setattr(tuner, "_times", times)


def fastest(call: Call, gpu: geometry.Hardware = HOPPER) -> tuner._Outcome:
    return tuner._fastest(call, choice.asked(call, gpu), gpu)


def test_the_fastest_of_equal_bits_is_taken(monkeypatch) -> None:
    bench = Bench(monkeypatch, lambda config: {64: 0.5, 32: 1.0}[config.tokens] / (2 if config.warps == 8 else 1))
    assert fastest(small()).answer == tuned.Answer(EXACT[1], 0.5, 1.0)  # of equal ones the first
    bench.other_bits = {EXACT[1].config}
    found = fastest(small())
    assert found.answer == tuned.Answer(EXACT[2], 0.5, 1.0)
    assert found.said == "'exact 32 x 8' 0.5 ms, the table's 'exact' 1 ms; 2 timed, 1 left out"
    bench.too_large = {EXACT[2].config}
    assert fastest(small()) == tuner._Outcome(None, "the table's 'exact', nothing else to choose (2 left out)")
    assert bench.timed == 2


def test_other_winners_are_other_bits(monkeypatch) -> None:
    Bench(monkeypatch, lambda config: 1.0 / config.tokens)
    plain = dispatch.launch

    def one_off(call: Call, scores: torch.Tensor, argmax: Any, chosen: choice.Launch) -> None:
        plain(call, scores, argmax, chosen)
        argmax[0, 0, 0] = chosen.config.tokens

    monkeypatch.setattr(dispatch, "launch", one_off)
    found = fastest(small(return_argmax=True))
    assert found.answer is not None
    assert found.answer.row is EXACT[0]  # eight warps take the same tokens, but no less time


def test_small_gains_are_noise_and_the_table_stays(monkeypatch) -> None:
    Bench(monkeypatch, lambda config: 0.98 if config.tokens == 64 else 1.0)
    assert fastest(small()).answer == tuned.Answer(EXACT[0], 1.0, 1.0)


def test_an_error_of_the_tables_own_row_is_not_swallowed(monkeypatch) -> None:
    Bench(monkeypatch, lambda config: 1.0).too_large = {EXACT[0].config}
    with pytest.raises(OutOfResources):
        fastest(small())


def test_candidates_are_rows_of_the_calls_own_kernel(monkeypatch) -> None:
    half = torch.float16
    bench = Bench(monkeypatch, lambda config: 1.0)
    for call, gpu, kernels in (
        (small(count=1, d=128, dtype=half), AMPERE, {"stream"}),
        (small(count=64, d=128, dtype=half), AMPERE, {"general"}),
        (small(count=64, d=128, dtype=half), HOPPER, {"dense"}),
        (
            small(count=64, d=128, dtype=half),
            BLACKWELL,
            {"general", "dense"},
        ),  # no row of its own: the general kernel's time to beat
        (call_of(ones(64, 32, 128, dtype=half), quantize_int8(ones(9, 300, 128, dtype=half))), HOPPER, {"dense"}),
    ):
        bench.launched.clear()
        assert fastest(call, gpu).answer is not None
        assert {one.kernel for one in bench.launched} == kernels
        assert len({one.config for one in bench.launched}) >= 3
        own = choice.choose(call, gpu)
        assert bench.launched[0] == own


def test_a_question_is_answered_once(monkeypatch) -> None:
    bench = Bench(monkeypatch, lambda config: 1.0 / config.tokens)
    calls = [small(180), small(200), small(300), small(180, d=24)]
    found, lines = tuner._answers(iter(calls), HOPPER, {})
    assert list(found) == [question(calls[n]) for n in (0, 2, 3)]
    assert [line.endswith(": known") for line in lines] == [False, True, False, False]
    assert bench.timed == 3
    _, lines = tuner._answers(iter(calls), HOPPER, found)
    assert all(line.endswith(": known") for line in lines)
    assert bench.timed == 3


def test_a_dtype_that_the_gpu_lacks_is_refused() -> None:
    calls = tuner._calls(CPU, 16, torch.float16, ((1, 4),), ((2, 8),), ("fp8",), False)
    with pytest.raises(ValueError, match=r"^forms: got one that this GPU does not run: FP8 needs compute capability 8\.9"):
        tuner._answers(calls, AMPERE, {})


@pytest.mark.parametrize("form", tuner.FORMS)
@pytest.mark.parametrize("winners", [False, True])
def test_calls_are_what_was_described(form, winners) -> None:
    calls = list(tuner._calls(CPU, 16, torch.float16, ((1, 4), (3, 5)), ((7, 33),), (form,), winners))
    assert len(calls) == (12 if form in ("int8", "fp8") else 2)
    for call in calls:
        assert call.winners == winners
        assert (call.document_count, choice.asked(call, HOPPER).mean) == (7, 33)
        assert (call.document_mask is not None, call.document_lengths is not None) == (
            form == "mask", form == "lengths" or call.document_starts is not None,
        )  # fmt: skip
    if form == "packed":
        lengths = calls[0].document_lengths
        assert lengths is not None
        assert int(lengths.min()) < 33 < int(lengths.max())


# Choosing


def test_an_answer_overlays_the_table_for_its_question_alone(monkeypatch) -> None:
    call = small()
    before = choice.choose(call, HOPPER)
    assert before.config == EXACT[0].config
    tuned._held[CPU] = {question(call): EXACT[1]}
    assert choice.choose(call, HOPPER) == choice.Launch("general", EXACT[1].config)
    assert choice.choose(small(130), HOPPER).config == EXACT[1].config  # the same power of two
    for other in (small(300), small(d=24), small(return_argmax=True), small(document_lengths=torch.full((3,), 180))):
        assert choice.choose(other, HOPPER) == before


def test_a_stream_answer_keeps_how_documents_are_dealt() -> None:
    few = call_of(ones(1, 32, 128, dtype=torch.float16), ones(8, 180, 128, dtype=torch.float16))
    row = NAMED["stream", "sm_90"]
    tuned._held[CPU] = {question(few, AMPERE): row}
    found = choice.choose(few, AMPERE)
    assert tuning.numbers(found.config)[:4] == tuning.numbers(row.config)[:4]
    assert found.config.programs == 0  # a program for every document, as the table's own


def test_a_gpu_without_tile_rows_takes_them_where_they_were_faster() -> None:
    call = small(count=64, d=128, dtype=torch.float16)
    assert choice.choose(call, BLACKWELL) == choice.Launch("general", GENERAL.config)
    row = NAMED["dense float", "sm_90"]
    tuned._held[CPU] = {question(call, BLACKWELL): row}
    assert choice.choose(call, BLACKWELL) == choice.Launch("dense", row.config)
    assert choice.choose(small(40, count=64, d=128, dtype=torch.float16), BLACKWELL).kernel == "general"


def test_questions_tell_calls_apart() -> None:
    half = torch.float16
    queries, documents = ones(64, 32, 128, dtype=half), ones(9, 300, 128, dtype=half)
    packed = Packed(documents.flatten(0, 1), torch.arange(10) * 300)
    calls = [
        call_of(queries, documents),
        call_of(queries.bfloat16(), documents.bfloat16()),
        call_of(queries[:2], documents),
        call_of(queries, documents[:, :200]),
        call_of(queries[..., :64], documents[..., :64]),
        call_of(queries, documents, return_argmax=True),
        call_of(queries, documents, document_lengths=torch.full((9,), 300)),
        call_of(queries, documents, document_mask=torch.ones(9, 300, dtype=torch.bool)),
        call_of(queries, packed),
        call_of(Packed(queries.flatten(0, 1), torch.arange(65) * 32), documents),
        call_of(queries, quantize_int8(documents)),
        call_of(queries, quantize_int8(documents, "document")),
        call_of(queries, quantize_int8(documents), quantize_queries=False),
        call_of(queries, quantize_int8(documents, "token", affine=True)),
    ]
    assert len({question(call) for call in calls}) == len(calls)
    assert question(calls[0]) == "dense; float; odd; float16; float16; none; shared; d = 128; tokens <= 512"


# The file


def answer(row: tuning.Row = EXACT[1]) -> dict[str, tuned.Answer]:
    return {question(small()): tuned.Answer(row, 0.5, 1.0)}


def test_answers_are_read_back_by_later_processes(tmp_path) -> None:
    path = tuned.keep(GPU, answer())
    assert path.parent == tmp_path
    assert re.fullmatch(r"tuned-NVIDIA-Test-9-80-GB-triton-[\w.]+-[0-9a-f]{12}\.json", path.name)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    (held,) = tuned.answers(GPU).values()  # this process's
    tuned._held.clear()
    (read,) = tuned.answers(GPU).values()  # another's
    assert read == held
    assert tuning.numbers(read.config) == tuning.numbers(EXACT[1].config)
    assert (read.config.measured, read.config.reason) == ("NVIDIA Test 9 (80 GB) by tune()", "0.5 ms, untuned 1")
    other = {"general; other question": tuned.Answer(GENERAL, 2.0, 2.0)}
    assert tuned.keep(GPU, other) == path  # added to what is there
    assert set(tuned.read(GPU)) == {*answer(), *other}


def test_other_gpus_and_sources_have_other_files(monkeypatch) -> None:
    paths = [tuned.keep(GPU, answer())]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 10")
    assert tuned.read(GPU) == {}
    paths.append(tuned.keep(GPU, answer()))
    monkeypatch.setattr(tuned, "_sources", lambda: "0" * 64)
    assert tuned.read(GPU) == {}
    paths.append(tuned.keep(GPU, answer()))
    monkeypatch.setattr(tuned.triton, "__version__", "99.0")
    assert tuned.read(GPU) == {}
    paths.append(tuned.keep(GPU, answer()))
    assert len(set(paths)) == 4


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda found: [one.pop(name) for one in found["answers"].values()]


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (
        lambda found: found.update(format="maxsim-kernels/tuned/0"),
        r"format: got 'maxsim-kernels/tuned/0', need",
    ),
    "another GPU": (lambda found: found.update(gpu="NVIDIA H200"), r"gpu: got 'NVIDIA H200', need 'NVIDIA Test 9 \(80 GB\)'"),
    "other sources": (lambda found: found.update(sources="0"), "sources: got '0', need"),
    "no answers": (lambda found: found.pop("answers"), 'need an object with "answers"'),
    "a row that is not there": (lambda found: found["answers"].update({"general": {"row": "fast"}}), "need a row of the table"),
    "another kernel's row": (
        lambda found: found["answers"].update({"stream; 64 x 4": {"row": "dense int8", "architecture": "sm_90"}}),
        "need a row of the table",
    ),
    "no times": (_without("ms"), "need two times"),
    "no object": (lambda found: found["answers"].update({"general": 3}), "need a row of the table"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_foreign_file_is_ignored_and_named_once(kind) -> None:
    path = tuned.keep(GPU, answer())
    found = json.loads(path.read_text())
    damage, message = DAMAGE[kind]
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.warns(UserWarning, match=f"^maxsim_kernels: {re.escape(str(path))}: .*{message}.*; the file is ignored"):
        assert tuned.read(GPU) == {}
    assert tuned.read(GPU) == {}  # another warning would be an error


@pytest.mark.parametrize("content", [b"", b'{"format": "maxsim', b"[1, 2]", b"\xff\xfe\x00", b"null"])
def test_a_damaged_file_is_ignored_and_replaced(content) -> None:
    path = tuned.keep(GPU, answer())
    path.write_bytes(content)
    tuned._held.clear()
    with pytest.warns(UserWarning, match=f"^maxsim_kernels: {re.escape(str(path))}: "):
        assert tuned.answers(GPU) == {}
    tuned.keep(GPU, answer())
    assert set(tuned.read(GPU)) == set(answer())


def test_a_write_that_fails_leaves_what_was_there(monkeypatch, tmp_path) -> None:
    path = tuned.keep(GPU, answer())
    before = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(tuned.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tuned.keep(GPU, {"exact; more": tuned.Answer(EXACT[2], 1.0, 1.0)})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert set(tuned.answers(GPU)) == set(answer())


def test_the_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.folder() == tmp_path
    monkeypatch.setenv("MAXSIM_CACHE", "")
    assert tuned.folder() is None
    assert tuned.read(GPU) == {}
    with pytest.raises(RuntimeError, match=r"^tune: got no folder to keep its answers in, need MAXSIM_CACHE or a home folder$"):
        tuned.keep(GPU, answer())
    monkeypatch.delenv("MAXSIM_CACHE")
    assert tuned.folder() == tmp_path / "xdg" / "maxsim_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.folder() == tmp_path / ".cache" / "maxsim_kernels"


# What it costs


def test_nothing_is_read_off_gpus_and_once_on_them(monkeypatch, tmp_path) -> None:
    asked: list[str] = []
    folder = tuned.folder
    monkeypatch.setattr(tuned, "folder", lambda: asked.append("folder") or folder())
    monkeypatch.setattr(tuned, "_sources", lambda: asked.append("digest") or "0" * 64)
    maxsim(torch.ones(1, 4, 16), torch.ones(2, 5, 16))
    for _ in range(3):
        assert choice.choose(small(), HOPPER).config == EXACT[0].config
    assert asked == []
    for _ in range(3):
        assert tuned.answers(GPU) == {}
    assert asked == ["folder"]  # and no digest, where nothing was ever tuned


# Refusals


def test_without_a_gpu_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in (None, "cpu", "cuda", "mps"):
        named = device or "cpu"
        with pytest.raises(RuntimeError, match=f"^tune: got {named} as the device, need a GPU to time kernels on$"):
            tune(device)


def test_other_refusals(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"^forms: got \['training'\], need some of dense, lengths, mask, packed, int8, fp8$"):
        tune(forms=("dense", "training"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuner, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^tune: a CUDA graph is being captured: call tune\(\) before the capture$"):
        tune("cuda:0")
    monkeypatch.setattr(fallback, "HAS_TRITON", False)
    with pytest.raises(RuntimeError, match=r"^tune: Triton is not installed: there are no kernels to time$"):
        tune("cuda:0")


def test_the_whole_command(monkeypatch, tmp_path) -> None:
    """Everything but the GPU itself: what is said, kept, forgotten and chosen afterwards."""
    Bench(monkeypatch, lambda config: 1.0 / config.tokens)
    for name, value in {
        "is_available": lambda: True, "current_device": lambda: 0, "device": lambda place: nullcontext(),
        "synchronize": lambda place: None, "is_initialized": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(geometry, "hardware", lambda device: HOPPER)
    made = tuner._calls
    monkeypatch.setattr(tuner, "_calls", lambda device, *rest: made(CPU, *rest))
    monkeypatch.setattr(launch, "_plans", {"recorded before": object()})

    def said(**more: bool) -> list[str]:
        about: dict[str, Any] = {
            "dim": 16,
            "dtype": torch.float32,
            "queries": ((4, 32),),
            "documents": ((3, 180),),
            "forms": ("dense",),
        }
        return tune(**about, **more).splitlines()

    asked, (path,) = question(small()), [tmp_path / name for name in (said()[-1].removeprefix("kept in "),)]
    assert path.is_file()
    assert launch._plans == {}
    assert tuned.answers(GPU)[asked].name == "exact 64"
    assert said() == [f"{asked}: known"]
    assert said(again=True) == [
        f"{asked}: 'exact 64' {1 / 64:.4g} ms, the table's 'exact' {1 / 32:.4g} ms; 3 timed, 0 left out", f"kept in {path}",
    ]  # fmt: skip
