"""Processes that turn texts into word pieces beside a busy GPU: making lists of ids holds Python's lock, which launching needs.

They are begun when many texts have been read, and take texts as soon as they are ready: until then, and for few texts or without a
GPU, the caller tokenizes them itself. Each is asked for a few texts at a time, and answers in whole arrays (`piece_process.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.environment import cores
from maxsim_eval.errors import MaxsimEvalError

BEGIN = 2048  # texts from which on processes pay
_MOST = 10  # one reads 0.25 to 0.8M tokens/s beside others, a GPU takes 2M
_AT_ONCE = 128  # texts of a request: few, so that all processes share a window and the first is soon ready
_PROGRAM = Path(__file__).with_name("piece_process.py")


class ReaderError(MaxsimEvalError):
    """A process that reads texts has ended."""


class Readers:
    """Processes with one tokenizer; at most 10, none where there is one core."""

    def __init__(self, most: int | None = None) -> None:
        self.most = min(_MOST, cores() * 5 // 8) if most is None else most
        self._texts = 0
        self._ready: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self._asking: ThreadPoolExecutor | None = None  # serves requests in order of arrival, from whichever thread
        self._lock, self._begun, self._answering = threading.Lock(), False, threading.Event()

    def expect(self, texts: int) -> None:
        """Announce that `texts` texts will come: the processes are begun with the first of them, while the model is loaded."""
        with self._lock:
            self._texts = max(self._texts, texts)

    def ready(self, tokenizer: Any, texts: int) -> bool:
        """Whether a process takes texts now. Counts `texts`, and begins the processes once these or those expected are enough."""
        with self._lock:
            self._texts += texts
            if self._texts >= BEGIN and self.most and not self._begun:
                self._begun = True
                self._begin(tokenizer)
        return self._answering.is_set()

    def pieces(self, truncation: Any, special: bool, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `piece_process.pieces`; only after `ready` gave True.

        Raises:
            ReaderError: a process ended meanwhile. Also whatever the tokenizer raises.
        """
        assert self._asking is not None
        some = [(truncation, special, texts[begin : begin + _AT_ONCE]) for begin in range(0, len(texts), _AT_ONCE)]
        found = list(self._asking.map(self._ask, some))
        return np.concatenate([ids for ids, _ in found]), np.concatenate([lengths for _, lengths in found])

    def _ask(self, request: tuple[Any, bool, list[str]]) -> tuple[np.ndarray, np.ndarray]:
        """One process's answer; there are no more threads that ask than processes."""
        process = self._ready.get()
        try:
            _tell(process, request)
            answer = _answer(process)
        finally:
            self._ready.put(process)  # also one that ended: whoever asks it next gets the error
        if isinstance(answer, Exception):
            raise answer
        found: tuple[np.ndarray, np.ndarray] = answer
        return found

    def _begin(self, tokenizer: Any) -> None:
        try:
            made = tokenizer.to_str()
        except Exception as error:  # the Rust library raises bare Exception
            if "cannot be serialized" not in str(error):
                raise
            return  # a tokenizer with parts in Python stays in this process
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        self._asking = ThreadPoolExecutor(self.most, "ask-reader")
        weakref.finalize(self, self._asking.shutdown, wait=False)
        for _ in range(self.most):
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                process_group=0,  # Ctrl-C is for the command, which ends its processes by ending their input
            )
            end = weakref.finalize(self, _end, process)
            threading.Thread(target=self._greet, args=(process, made, end), daemon=True).start()

    def _greet(self, process: subprocess.Popen[bytes], made: str, end: Any) -> None:
        try:
            _tell(process, made)
            _answer(process)
        except ReaderError:
            if end.alive:  # else this command ends, and has ended it
                status = process.wait()
                warnings.warn(
                    f"a process that turns texts into word pieces did not begin (exit status {status}, its reason above); texts are "
                    "read without it, and the GPU may have to wait for them",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        self._ready.put(process)
        self._answering.set()


def _tell(process: subprocess.Popen[bytes], request: Any) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(request, process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
    except OSError as error:
        raise _ended(process) from error


def _answer(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise _ended(process) from error


def _ended(process: subprocess.Popen[bytes]) -> ReaderError:
    return ReaderError(
        f"a process that turns texts into word pieces ended (exit status {process.wait()}): killed, or out of memory; the same "
        "command continues with what is not in the cache yet"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it holds nothing that could be lost
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
