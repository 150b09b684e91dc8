"""Many cases in forked processes, so that a crash or a hang costs one case.

The process that forks has imported everything and has built the specimen, so a worker begins within milliseconds. A worker says which
case it begins, then how it ended; one that dies is replaced, and the case it had begun is the crash.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attacks.endings import CRASH, HANG, UNFORESEEN, Case
from attacks.running import LIMIT

Job = tuple[str, int]
_PATIENCE = 6 * LIMIT  # a command that does not even heed the alarm is killed after this
_ROOM = 3 << 30  # bytes that a case may ask for beyond what this process has
_CASES = 100  # of one worker: what a library leaks must not reach too many
Work = Callable[[str, int, Path], Case]


def forked(work: Callable[[], None], said: Path) -> int:
    """Start `work()` in a process of its own; what it answers goes into that file with `.out` behind its name, what it says into it."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        # Makes torch's pool anew, here and once: two threads that find it gone after a fork race for it.
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name, descriptor in ((f"{said}.out", 1), (said, 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:  # noqa: BLE001 (a child must end here whatever happens)
        with contextlib.suppress(Exception):
            traceback.print_exc(file=open(said, "a"))  # noqa: SIM115
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


class _Worker:
    def __init__(self, jobs: Sequence[Job], work: Work, scratch: Path) -> None:
        self.jobs, self.buffer, self.begun = list(jobs), b"", None
        self.said = Path(tempfile.mkstemp(prefix="said-", dir=scratch)[1])
        self.pipe, write = os.pipe()
        self.deadline = time.monotonic() + _PATIENCE
        self.killed = False

        def works() -> None:
            os.setpgid(0, 0)  # a Ctrl-C is the parent's; and what a case has started ends with its worker
            os.close(self.pipe)
            limits = vm_bytes() + _ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limits, limits))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for name, seed in jobs:
                os.write(write, json.dumps([name, seed]).encode() + b"\n")
                case = work(name, seed, scratch)
                os.write(write, json.dumps(case.to_json()).encode() + b"\n")

        self.pid = forked(works, self.said)
        os.close(write)

    def heard(self) -> Iterator[Case]:
        """Cases that have ended; of a worker that died, the one that it was at."""
        data = os.read(self.pipe, 1 << 20)
        self.deadline = time.monotonic() + _PATIENCE
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in map(json.loads, lines):
            if isinstance(line, list):
                self.begun = tuple(line)
            else:
                self.jobs.remove(self.begun)
                self.begun = None
                yield Case(**line)
        if data:
            return
        os.close(self.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.jobs and self.begun is None:
            raise RuntimeError(f"a worker ended with {code} between two cases: {self.said.read_text()[-2000:]}")
        if self.jobs:
            self.jobs.remove(self.begun)
            how = HANG if self.killed else CRASH if code < 0 else UNFORESEEN
            yield Case(*self.begun, "?", how, f"exit {code}: {self.said.read_text(errors='replace')[-1500:]}")
        self.pid = 0

    def hurry(self) -> None:
        """End it if it has said nothing for too long."""
        if time.monotonic() > self.deadline and not self.killed:
            self.killed = True
            self.end()

    def end(self) -> None:
        """Kill it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def vm_bytes() -> int:
    """Address space of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 1 << 18
    return pages * resource.getpagesize()


def run_all(jobs: Sequence[Job], work: Work, scratch: Path, workers: int) -> Iterator[Case]:
    """Every job, in any order; ends when all have ended."""
    waiting = [list(jobs[start : start + _CASES]) for start in range(0, len(jobs), _CASES)][::-1]
    running: dict[int, _Worker] = {}
    gc.freeze()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                worker = _Worker(waiting.pop(), work, scratch)
                running[worker.pipe] = worker
            for pipe in select.select(list(running), [], [], 1.0)[0]:
                worker = running[pipe]
                yield from worker.heard()
                if not worker.pid:
                    del running[pipe]
                    if worker.jobs:
                        waiting.append(worker.jobs)
            for worker in running.values():
                worker.hurry()
    finally:
        gc.unfreeze()
        for worker in running.values():
            worker.end()
            os.waitpid(worker.pid, 0)


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """Target -> ending -> how many."""
    found: dict[str, dict[str, int]] = {}
    for case in cases:
        row = found.setdefault(case.target, {})
        row[case.ending] = row.get(case.ending, 0) + 1
    return found
