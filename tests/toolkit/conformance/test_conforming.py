"""`conform`: ours passes everything, and a function damaged in one way fails the check that is about it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from maxsim_eval.conformance.checks import CHECKS
from maxsim_eval.conformance.conforming import conform
from maxsim_kernels import Packed, maxsim
from maxsim_kernels.reference import maxsim_reference
from places import ROOT
from scorer_cases import Write, here, write  # noqa: F401 - fixtures

Scorer = Callable[[Packed, Packed], Tensor]
Run = Callable[..., tuple[int, str, str]]


def rows(tokens: Packed) -> list[Tensor]:
    return list(tokens.values.split(tokens.lengths.tolist()))


def padded(queries: Packed, documents: Packed) -> Tensor:
    q, d = (pad_sequence(rows(side), batch_first=True) for side in (queries, documents))
    return torch.einsum("ash,bth->abst", q, d).amax(-1).sum(-1)


def changes(queries: Packed, documents: Packed) -> Tensor:
    found = maxsim(queries, documents)
    documents.values.mul_(2)
    return found


def random(queries: Packed, documents: Packed) -> Tensor:
    found = maxsim(queries, documents)
    return found * (1 + 1e-7 * torch.rand_like(found))


def filled(value: float) -> Scorer:
    def score(queries: Packed, documents: Packed) -> Tensor:
        found = maxsim(queries, documents)
        return found.masked_fill(found == -math.inf, value)

    return score


def normalized(queries: Packed, documents: Packed) -> Tensor:
    found = maxsim(queries, documents)
    return found / found[found.isfinite()].max()


def no_zero_rows(queries: Packed, documents: Packed) -> Tensor:
    from maxsim_kernels import pack

    return maxsim(queries, pack([row[row.any(1)] for row in rows(documents)]))


def half(queries: Packed, documents: Packed) -> Tensor:
    return maxsim(queries.to(torch.float16), documents.to(torch.float16))


def contiguous(queries: Packed, documents: Packed) -> Tensor:
    values = documents.values
    wrong = torch.as_strided(values, values.shape, (values.shape[1], 1), values.storage_offset())
    return maxsim(queries, documents.with_values(wrong))


def wraps(queries: Packed, documents: Packed) -> Tensor:
    values = documents.values
    starts = [number * values.stride(0) % 2**31 for number in range(len(values))]
    read = torch.stack([torch.as_strided(values, (values.shape[1],), (values.stride(1),), start) for start in starts])
    return maxsim(queries, documents.with_values(read))


def verdicts(function: Scorer) -> dict[str, str]:
    return {row.check: row.verdict for row in conform(function)}


def test_ours_passes_every_check() -> None:
    found = conform(maxsim)
    assert [row.check for row in found] == list(CHECKS)
    small = {row.check for row in found if row.verdict == "skipped" and "GB" in row.found}
    assert small <= {"beyond 2^31 elements"}
    assert {row.verdict for row in found if row.check not in small} == {"pass"}, found
    others = verdicts(maxsim_reference)
    assert {name for name, verdict in others.items() if verdict not in ("pass", "skipped")} <= {"corpus in parts"}


DAMAGED: dict[str, tuple[Scorer, dict[str, str]]] = {
    "zeros that pad win": (
        padded,
        {"negative similarities": "bug", "document without tokens": "convention", "equal tokens": "convention"},
    ),
    "scores depend on the block": (normalized, {"corpus in parts": "bug", "float32": "bug"}),
    "input is changed": (changes, {"determinism": "bug"}),
    "other bits each time": (random, {"determinism": "convention", "corpus in parts": "convention", "float32": "pass"}),
    "0 for an empty document": (filled(0.0), {"document without tokens": "convention", "query without tokens": "pass"}),
    "NaN for an empty document": (filled(math.nan), {"document without tokens": "bug"}),
    "zeros are padding": (no_zero_rows, {"token of zeros": "convention", "negative similarities": "pass"}),
    "32-bit offsets": (wraps, {"beyond 2^31 elements": "bug", "float32": "pass"}),
    "float16 inside": (half, {"float32": "convention", "float16": "pass", "large values": "bug"}),
    "strides are not read": (contiguous, {"strides": "bug", "float32": "pass"}),
    "NaN is lost": (lambda q, d: maxsim(q, d.with_values(d.values.nan_to_num())), {"NaN in a token": "convention"}),
    "NaN spreads": (lambda q, d: maxsim(q, d) + 0 * d.values.sum(), {"NaN in a token": "bug"}),
    "no gradient": (lambda q, d: maxsim(q, d).detach(), {"gradients": "convention", "equal tokens": "skipped"}),
    "wrong gradient": (lambda q, d: maxsim(q, d) * 2 - maxsim(q, d).detach(), {"gradients": "bug", "float32": "pass"}),
    "wrong shape": (lambda q, d: maxsim(q, d).T, {"float32": "bug"}),
    "no tensor": (lambda q, d: maxsim(q, d).tolist(), {"float32": "bug"}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_wrong_is_found_where_it_is(case: str) -> None:
    function, expected = DAMAGED[case]
    found = verdicts(function)
    if found["beyond 2^31 elements"] == "skipped" and "beyond 2^31 elements" in expected:
        pytest.skip("a machine with too little memory")
    assert {name: found[name] for name in expected} == expected, found


def test_what_a_function_raises_is_said() -> None:
    def only_float32(queries: Packed, documents: Packed) -> Tensor:
        if documents.dtype != torch.float32:
            raise TypeError("float32 only\nand more")
        return maxsim(queries, documents)

    found = {row.check: row for row in conform(only_float32)}
    assert (found["float16"].verdict, found["float16"].found) == ("refused", "raised TypeError: float32 only")
    assert found["float32"].verdict == "pass"


class UnsaidError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "row"),
    [
        (UnsaidError(), ("refused", "raised UnsaidError: UnsaidError (which fails to say what it is)")),
        (SystemExit(0), ("bug", "raised SystemExit: 0")),
        (GeneratorExit(), ("bug", "raised GeneratorExit: GeneratorExit")),
    ],
)
def test_whatever_is_raised_is_a_row(error: BaseException, row: tuple[str, str]) -> None:
    def fails(queries: Packed, documents: Packed) -> Tensor:
        raise error

    rows = conform(fails)
    assert {(one.verdict, one.found) for one in rows if one.verdict != "skipped"} == {row}


def test_a_peers_scorer_is_found_what_the_docs_say_of_it() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import peer_scorers
    finally:
        sys.path.remove(str(ROOT / "examples"))
    found = {row.check: row for row in conform(peer_scorers.sentence_transformers) if row.verdict not in ("pass", "skipped")}
    assert {row.verdict for row in found.values()} == {"convention"}
    assert set(found) == {"float16", "bfloat16", "document without tokens"}
    assert found["document without tokens"].found == "scores -1e+09"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)`: exit code, output and errors of the command with these words."""
    from maxsim_eval.cli import main

    def ended(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            main(["conform", *words])
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return ended


def test_the_command(write: Write, run: Run) -> None:  # noqa: F811
    name = write(
        "from maxsim_kernels import maxsim\n\ndef score(q, d):\n    return maxsim(q, d)\n\ndef bad(q, d):\n    return maxsim(q, d) + 1\n"
        "\ndef none(q, d):\n    raise ValueError\n"
    )
    code, out, _ = run(f"python:{name}:score")
    assert code == 0
    assert re.search(rf"({len(CHECKS)}|{len(CHECKS) - 1}) pass", out)
    code, out, _ = run(f"python:{name}:bad", "--json")
    assert code == 1
    found = json.loads(out)
    assert found["schema"] == "maxsim-eval/conform/1"
    code, out, _ = run(f"python:{name}:none")
    assert (code, "nothing passed" in out) == (1, True)
    assert found["checks"][0]["verdict"] == "bug"
    for scorer, text in (
        ("fp32", "scorer: got 'fp32', need python:<module>:<function>, as python:my_kernels:score"),
        (f"python:{name}:nobody", f"unknown function of {name} 'nobody'. Known: bad, maxsim, none, score."),
        ("python:nobodys:score", "path python:nobodys:score: no module 'nobodys' in the current folder or on PYTHONPATH."),
    ):
        assert run(scorer) == (2, "", f"error: {text}\n")


@pytest.mark.parametrize(
    ("gpu", "device", "need"),
    [(False, "cuda", "cpu; there is no CUDA GPU"), (False, "tpu", "cpu; there is no CUDA GPU"), (True, "tpu", "cpu, or cuda")],
)
def test_a_device_that_is_not_there_is_refused(
    gpu: bool, device: str, need: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert run("python:math:fsum", "--device", device) == (2, "", f"error: --device: got '{device}', need {need}\n")
