"""Commands killed at a counted write, run again, and compared byte by byte; two at once; limits of the system.

A step is anything that changes the disk: a file opened to be written, renamed, removed, brought to the disk, a folder made. Steps are
counted by an audit hook in the forked process, so a seed names the same moment on every machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from attacks.endings import HANG, LEFTOVERS, RIGHT, SILENT, UNCLEAR, UNFORESEEN, Case, refusal
from attacks.specimen import FEW_BYTES, OF_SET, Specimen, evaluation
from attacks.workers import forked, vm_bytes

_LIMIT = 12.0  # seconds of a command that takes one
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_SAID = {signal.SIGTERM: (143, "terminated (SIGTERM)"), signal.SIGINT: (130, "interrupted")}
STOPPED = (-int(signal.SIGKILL), 143, 130)  # exit codes of a command that was stopped
_GOES_ON = "finished parts are kept, the same command continues"
Tree = dict[str, bytes]


@dataclass(frozen=True)
class Command:
    """What is killed: what it needs of the specimen, its words, where it writes, and whether it must end with 0 without a kill."""

    parts: Sequence[str]
    words: Sequence[str]
    writes: Sequence[str]


_DATA, _CACHE = "datasets", "embeddings_cache"
COMMANDS = {
    "evaluate": Command((_DATA,), evaluation(), (_CACHE, "out")),
    "encode": Command((_DATA,), ("encode", *OF_SET), (_CACHE,)),
    "convert": Command(
        (_DATA, "bare"), ("convert", *OF_SET, "--cache-dir", "bare", "--to", "int8-token,int8-corpus"), ("bare",)
    ),
    "import": Command(
        (_DATA, "imports"),
        ("import", "local", "mine", "imports/e.pt", "--encoder", "mine", "--cache-dir", "cache", "--quiet"),
        ("cache",),
    ),
    "report": Command(("out",), ("report", "out/result.json", "--out", "again"), ("again",)),
    "gate": Command(
        ("out", "baseline.json"),
        ("gate", "out/result.json", "--baseline", "baseline.json", "--update-baseline"),
        ("baseline.json",),
    ),
}
KILLS = tuple(f"kill-{name}" for name in COMMANDS)
PAIRS = tuple(f"pair-{name}" for name in ("evaluate", "encode", "convert", "import", "report"))
FAULTS = tuple(f"fault-{name}" for name in ("evaluate", "encode", "convert", "import", "report"))
ALL = (*KILLS, *PAIRS, *FAULTS)
_expected: dict[str, tuple[Tree, int]] = {}  # of undisturbed commands: what they write, in how many steps


def prepare(specimen: Specimen, scratch: Path) -> None:
    """Run every command undisturbed, before any process is forked that will need the answers."""
    shutil.copytree(specimen.folder / _CACHE, specimen.folder / "bare", ignore=shutil.ignore_patterns("*.int8-*"))
    for name, command in COMMANDS.items():
        home = specimen.copy(Path(tempfile.mkdtemp(dir=scratch)), *command.parts)
        counted = home / ".steps"
        ended = _wait(_start(command, home, 0, _counting(home, counted)))
        assert ended == 0, (home / "0.said").read_text()
        _expected[name] = _tree(home, command), int(counted.read_text())
        shutil.rmtree(home)


def _tree(home: Path, command: Command) -> Tree:
    """What it wrote, but for the figures of time in it; lock files of cache entries stay, so they may be there."""
    found: Tree = {}
    for place in command.writes:
        for path in [home / place, *(home / place).rglob("*")]:
            if path.is_file() and not (path.name == ".lock" and place != "out"):
                found[str(path.relative_to(home))] = _steady(path)
    return found


def _steady(path: Path) -> bytes:
    if path.suffix in (".h5", ".trec") or path.name == "baseline.json":
        return path.read_bytes()
    if path.name == "result.json":
        value = json.loads(path.read_text())
        del value["created"], value["environment"], value["command"]
        for entry in value["paths"].values():
            del entry["seconds"], entry["memory"]
        return json.dumps(value).encode()
    if path.name == "manifest.json":
        return path.read_bytes()
    return b""  # a report shows times: that it is there, and nothing beside it, is what counts


def _start(command: Command, home: Path, number: int, change: Callable[[], None] = lambda: None) -> int:
    """The command in a process of its own, in `home`, what it says in `<number>.said`."""

    def work() -> None:
        from maxsim_eval.cache import sides
        from maxsim_eval.cli.app import main
        from maxsim_eval.scoring import units

        os.chdir(home)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["evaluate.py", *command.words]
        with mock.patch.object(sides, "LEAST", 8), mock.patch.object(units, "LEAST_BYTES", FEW_BYTES):
            change()
            main(list(command.words))

    return forked(work, home / f"{number}.said")


def _wait(pid: int, limit: float = _LIMIT) -> int | None:
    """Its exit code; None if it did not end."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _on_steps(home: Path, step: Callable[[int], None], removals: bool = True) -> None:
    """Call `step(n)` before the n-th thing that changes the disk below `home`."""
    count = 0
    inside = str(home.resolve())

    def one() -> None:
        nonlocal count
        count += 1
        step(count)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            name, mode, flags = given
            writes = (
                flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else any(letter in mode for letter in "wax+")
            )
            if writes and isinstance(name, str | bytes | os.PathLike):
                path = os.path.abspath(os.fsdecode(name))
                if path.startswith(inside) and not path.endswith((".steps", ".said", ".out")):
                    one()
        elif event in ("os.rename", "os.mkdir", "os.truncate") or (event in ("os.remove", "os.rmdir") and removals):
            one()

    fsync = os.fsync

    def synced(descriptor: int) -> None:
        one()
        fsync(descriptor)

    os.fsync = synced
    sys.addaudithook(hook)


def _counting(home: Path, to: Path) -> Callable[[], None]:
    def change() -> None:
        descriptor = os.open(to, os.O_WRONLY | os.O_CREAT)
        _on_steps(home, lambda count: os.pwrite(descriptor, str(count).encode(), 0) and None)

    return change


def _killing(home: Path, at: int, sent: signal.Signals) -> Callable[[], None]:
    def step(count: int) -> None:
        if count == at:
            os.kill(os.getpid(), sent)

    return lambda: _on_steps(home, step)


def _failing(home: Path, at: int, number: int, once: bool) -> Callable[[], None]:
    """The disk fails from that step on, or there alone; what is there can still be removed."""

    def step(count: int) -> None:
        if count == at or (count > at and not once):
            raise OSError(number, os.strerror(number))

    return lambda: _on_steps(home, step, removals=False)


# Cases ----------------------------------------------------------------------------------------------------------------


def attack(name: str, seed: int, specimen: Specimen, scratch: Path) -> Case:
    """The case of that name and seed."""
    kind, _, what = name.partition("-")
    rng, command, began = Random(f"{name}:{seed}"), COMMANDS[what], time.monotonic()
    home = specimen.copy(Path(tempfile.mkdtemp(prefix="kill-", dir=scratch)), *command.parts)
    try:
        how, ending, said = {"kill": _kill, "pair": _pair, "fault": _fault}[kind](rng, what, command, home)
        if ending == RIGHT:
            ending, said = _compared(what, command, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return Case(name, seed, how, ending, said, round(time.monotonic() - began, 3))


Ended = tuple[str, str, str]


def _kill(rng: Random, what: str, command: Command, home: Path) -> Ended:
    """Killed one to three times, then left to end."""
    moments = []
    for number in range(rng.randrange(1, 4)):
        at, sent = rng.randrange(1, _expected[what][1] + 1), rng.choice(SIGNALS)
        code = _wait(_start(command, home, number, _killing(home, at, sent)))
        moments.append(f"{sent.name} at {at} of {_expected[what][1]}: exit {code}")
        if wrong := _badly_stopped(code, sent, (home / f"{number}.said").read_text()):
            return ", ".join(moments), *wrong
    return ", ".join(moments), *_finally(command, home)


def _badly_stopped(code: int | None, sent: signal.Signals, said: str) -> tuple[str, str] | None:
    if code is None:
        return HANG, said[-300:]
    if "Traceback" in said or "Exception ignored" in said:
        return UNFORESEEN, f"exit {code}: {said[-600:]}"
    if code in (0, -signal.SIGKILL):  # it had ended, or resumed with fewer steps
        return None
    need, word = _SAID.get(sent, (None, ""))
    lines = [line for line in said.splitlines() if not line.startswith("warning: ")]
    if code != need or len(lines) != 1 or not lines[0].startswith(word) or _GOES_ON not in lines[0]:
        return UNCLEAR, f"{sent.name}, exit {code}: {said[-600:]}"
    return None


def _finally(command: Command, home: Path) -> tuple[str, str]:
    """The same command once more, undisturbed."""
    code = _wait(_start(command, home, 9))
    said = (home / "9.said").read_text()
    if code is None:
        return HANG, "the command that continues"
    if code or "Traceback" in said:
        return UNFORESEEN, f"the same command does not continue: exit {code}: {said[-600:]}"
    return RIGHT, ""


def _compared(what: str, command: Command, home: Path) -> tuple[str, str]:
    need, found = _expected[what][0], _tree(home, command)
    if more := sorted(set(found) - set(need)):
        return LEFTOVERS, ", ".join(more)[:300]
    if missing := sorted(set(need) - set(found)):
        return SILENT, f"missing: {', '.join(missing)[:300]}"
    other = [name for name in need if found[name] != need[name]]
    return (SILENT, f"other bytes in {', '.join(other)[:300]}") if other else (RIGHT, "")


def _pair(rng: Random, what: str, command: Command, home: Path) -> Ended:
    """Two at once, one of them perhaps killed: one gives the answer, the other too, or it says why not."""
    late, fate = rng.uniform(0, 0.15), rng.choice(("", "", "kill"))
    at = rng.randrange(1, _expected[what][1] + 1)
    how = f"the second {late * 1000:.0f} ms later" + (f", the first killed at {at}" if fate else "")
    pids = [_start(command, home, 0, _killing(home, at, signal.SIGKILL) if fate else lambda: None)]
    time.sleep(late)
    pids.append(_start(command, home, 1))
    codes = [_wait(pid) for pid in pids]
    if None in codes:
        return how, HANG, f"codes {codes}"
    for number, code in enumerate(codes):
        said = (home / f"{number}.said").read_text()
        if code not in (0, 3) and not (fate and number == 0 and code == -signal.SIGKILL):
            return how, UNFORESEEN, f"exit {code}: {said[-600:]}"
        if code == 3 and not refusal(3, "", said)[0].startswith("refused"):
            return how, UNCLEAR, said[-600:]
    if 0 not in codes:
        if not fate:
            return how, UNFORESEEN, f"nobody won: {[(home / f'{number}.said').read_text()[-200:] for number in range(2)]}"
        return how, *_finally(command, home)
    return how, RIGHT, ""


def _fault(rng: Random, what: str, command: Command, home: Path) -> Ended:
    """A limit of the system, then the same command without it."""
    kind = rng.choice(("disk", "disk", "disk", "file size", "memory", "descriptors", "closed", "full"))
    broken = (
        rng.randrange(1, _expected[what][1] + 1),
        rng.choice((errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)),
        rng.random() < 0.5,
    )
    size = rng.randrange(1, 200)
    streams = rng.sample((0, 1, 2), rng.randrange(1, 4))

    def change() -> None:
        limits = {
            "file size": (resource.RLIMIT_FSIZE, size * 500),
            # With less, a thread of Python's own dies before it says that it lives, and `Thread.start` waits for ever.
            "memory": (resource.RLIMIT_AS, vm_bytes() + 30_000_000 + size * 300_000),
            "descriptors": (resource.RLIMIT_NOFILE, 4 + size % 20),
        }
        if kind == "disk":
            _failing(home, *broken)()
        if kind in limits:
            resource.setrlimit(limits[kind][0], (limits[kind][1], resource.getrlimit(limits[kind][0])[1]))
        for number in streams:
            if kind == "closed":
                with contextlib.suppress(OSError):
                    os.close(number)
            elif kind == "full":
                os.dup2(os.open("/dev/full", os.O_RDWR), number)

    of: dict[str, Any] = {"file size": size * 500, "memory": 30_000_000 + size * 300_000, "descriptors": 4 + size % 20}
    of["disk"] = f"at {broken[0]}, {errno.errorcode[broken[1]]}{' once' if broken[2] else ''}"
    code = _wait(_start(command, home, 0, change))
    how = f"{kind} {of.get(kind, streams)}: exit {code}"
    said = (home / "0.said").read_text()
    if code is None:
        return how, HANG, said[-300:]
    if code not in (0, 2, 3):
        return how, UNFORESEEN, f"exit {code}: {said[-900:]}"
    if "Traceback" in said:
        return how, UNFORESEEN, said[-900:]
    if code and kind not in ("closed", "full"):
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        if len(lines) != 1:
            return how, UNCLEAR, said[-600:]
    # A file that grows as the log of what it says does is no part of the answer.
    if left := [path for path in home.rglob("*") if re.search(r"\.tmp$|\.old$|\.download$", path.name)]:
        return how, LEFTOVERS, f"exit {code}: {left[0].relative_to(home)}"
    return how, *_finally(command, home)
