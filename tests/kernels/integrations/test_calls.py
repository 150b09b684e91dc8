"""`calls.score`: what a call of a library asks the operator for, and that it changes nothing of torch's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from maxsim_kernels.integrations import calls
from maxsim_kernels.integrations.patching import Library

TOKENS = torch.ones(2, 3, 4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every call."""
    found: list[Any] = []
    own = calls.run

    def run(queries: Tensor, documents: Tensor, options: Any) -> Any:
        found.append((queries.dtype, options.fp32))
        return own(queries, documents, options)

    monkeypatch.setattr(calls, "run", run)
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_float32_may_use_tf32_unless_it_is_to_be_exact(asked: list[Any], exact: bool) -> None:
    library = Library("made-up", "made_up", (), ())
    library.exact = exact
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        calls.score(library, TOKENS.to(dtype), TOKENS.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        calls.score(library, TOKENS, TOKENS)
    fast = None if exact else "tf32"
    assert asked == [(torch.float32, fast), (torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, None)]


def test_overlapping_threads_leave_torchs_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A enters, B enters, A leaves, B leaves: the order in which a setting that is saved and restored stays changed."""
    library = Library("made-up", "made_up", (), ())
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision, torch.get_float32_matmul_precision()
    second, first_left, seen = threading.Event(), threading.Event(), []
    own = calls.run

    def run(queries: Tensor, documents: Tensor, options: Any) -> Any:
        seen.append((setting.fp32_precision, options.fp32))
        if threading.current_thread().name == "A":
            assert second.wait(20)
        else:
            second.set()
            assert first_left.wait(20)
        return own(queries, documents, options)

    monkeypatch.setattr(calls, "run", run)
    threads = [threading.Thread(target=calls.score, args=(library, TOKENS, TOKENS), name=name) for name in "AB"]
    for thread in threads:
        thread.start()
    threads[0].join(20)
    first_left.set()
    threads[1].join(20)
    assert seen == [(before[0], "tf32")] * 2
    assert (setting.fp32_precision, torch.get_float32_matmul_precision()) == before


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (TOKENS.as_subclass(type("Marked", (Tensor,), {})), "a Marked, a subclass of Tensor"),
        (torch.complex(TOKENS, TOKENS).conj().imag, "a view that is yet to be negated"),
    ],
)
def test_what_the_operator_refuses_stays_the_librarys(given: Tensor, reason: str) -> None:
    assert calls.untaken(given, TOKENS) == calls.untaken(TOKENS, given) == reason
    assert calls.untaken(TOKENS, torch.nn.Parameter(TOKENS)) == ""
