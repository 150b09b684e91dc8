"""Processes that turn texts into word pieces while a GPU is kept busy: lists of ids are Python's work, under the lock of launching.

They are begun when many texts have been read, and take texts as soon as they are ready: until then, and for few texts or without a
GPU, the caller reads them itself. Each speaks to one thread at a time, in whole arrays (`piece_process.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.environment import cores
from maxsim_eval.errors import MaxsimEvalError

BEGIN = 4096  # texts after which processes pay
_MOST = 6  # one reads 0.8M tokens/s, a GPU takes 2M
_PROGRAM = Path(__file__).with_name("piece_process.py")


class ReaderError(MaxsimEvalError):
    """A process that reads texts has ended."""


class Readers:
    """Processes with one tokenizer; 0 where there are few cores."""

    def __init__(self, most: int | None = None) -> None:
        self.most = min(_MOST, cores() // 2) if most is None else most
        self._texts = 0
        self._ready: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self._lock, self._begun, self._answering = threading.Lock(), False, threading.Event()

    def ready(self, tokenizer: Any, texts: int) -> bool:
        """Whether they take so many texts; begins them when enough were asked for."""
        with self._lock:
            self._texts += texts
            if self._texts > BEGIN and self.most and not self._begun:
                self._begun = True
                self._begin(tokenizer)
        return self._answering.is_set()

    def pieces(self, truncation: Any, special: bool, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """What `piece_process.pieces` gives, when they are ready.

        Raises:
            ReaderError: a process ended in the midst of it. What the tokenizer raises.
        """
        processes = [self._ready.get()]
        with contextlib.suppress(queue.Empty):  # those that are free share the texts: nothing waits long for the first of them
            while len(processes) < self.most:
                processes.append(self._ready.get_nowait())
        each = -(-len(texts) // len(processes))
        try:
            parts = [(process, texts[n * each : (n + 1) * each]) for n, process in enumerate(processes)]
            for process, some in parts:
                _tell(process, (truncation, special, some))
            found = [_answer(process) for process, _ in parts]
        except BaseException:
            for process in processes:
                process.kill()  # what it may still answer must not be taken for the answer to something else
            raise
        finally:
            for process in processes:
                self._ready.put(process)
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return np.concatenate([ids for ids, _ in found]), np.concatenate([lengths for _, lengths in found])

    def _begin(self, tokenizer: Any) -> None:
        try:
            made = tokenizer.to_str()
        except Exception as error:  # of the Rust library, which has no other kind
            if "cannot be serialized" not in str(error):
                raise
            return  # parts written in Python stay in this process
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        for _ in range(self.most):
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                process_group=0,  # Ctrl-C is for the command, which ends its processes by ending their input
            )
            weakref.finalize(self, _end, process)
            threading.Thread(target=self._greet, args=(process, made), daemon=True).start()

    def _greet(self, process: subprocess.Popen[bytes], made: str) -> None:
        with contextlib.suppress(ReaderError):  # it could not begin, and said why: texts are read without it
            _tell(process, made)
            _answer(process)
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
