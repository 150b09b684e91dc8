"""Several processes, one evaluation: `torchrun --nproc-per-node 8 evaluate.py ...` on one machine or many.

The leader (rank 0) loads, merges, writes and speaks; every rank encodes shards of documents that are not in the cache and scores its
share. Nothing here touches torch.distributed without torchrun's environment.

Waiting is done on the store, never inside a collective: a rank says that it has arrived, looks every few milliseconds whether all
others have, and enters a collective (gloo between CPUs, NCCL between GPUs) only then. So while ranks wait for each other, for hours if
need be, a failure is noticed within a second: the rank that fails writes who and why to the store before it leaves, and one that dies
without a word is missed by its signs of life.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from maxsim_eval.environment import resolve_device
from maxsim_eval.errors import EXIT_DATA, EXIT_INTERRUPTED, MaxsimEvalError, UsageError
from maxsim_eval.printing import printable
from maxsim_eval.processes.failures import (
    CONTINUES,
    LOST,
    Ended,
    Failure,
    JoinError,
    RankError,
    Terminated,
    failure_of,
    first_failure,
    line_of,
)

BEAT = 0.5  # seconds between two signs of life
SILENCE = 120.0  # a process that gave none for so long counts as dead: longer than any call that holds Python's lock
GRACE = 60.0  # the main thread looks for failures between blocks; a process that does not for so long ends itself
PATIENCE = 10.0  # how long others leave it to the leader to say what happened
TIMEOUT = 300.0  # to find each other, and for a collective that all have reached


class World:
    """The processes of an evaluation. This class is the one process of an ordinary run: it is the leader and waits for nobody."""

    rank = 0
    size = 1
    note = ""  # what this rank wants the leader to know of its progress
    idle: Callable[[], None] | None = None  # called now and then while this rank waits for others

    def __init__(self) -> None:
        self._drawn: dict[str, int] = {}

    @property
    def leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def device(self, device: str) -> str:
        """The device of this rank where the command says `device`."""
        return device

    def check(self) -> None:
        """Raise `RankError` where another rank has failed; costs nothing, call it between blocks."""

    def share(self, value: Any) -> Any:
        """The leader's value, on every rank (pickled on its way): others wait for it, and their own argument is ignored."""
        return value

    def tell(self, value: Any) -> Any:
        """As `share`, of a JSON-able value; but the leader does not wait until the others ask for it."""
        return value

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return value

    def reduce(self, keys: Tensor, merge: Callable[[Sequence[Tensor]], Tensor]) -> Tensor | None:
        """All ranks' keys merged, on the leader; None elsewhere. Keys are of one shape and dtype everywhere."""
        return keys

    def collect(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank, on every rank."""
        return [value]

    def draw(self, name: str) -> int:
        """The next of 0, 1, 2, ... under this name; each number is given to one call only, over all ranks."""
        self._drawn[name] = self._drawn.get(name, -1) + 1
        return self._drawn[name]

    def notes(self) -> list[str]:
        """The latest note of every other rank; on the leader only."""
        return []


_joined: World | None = None
_store: Any = None
_rounds = 0


def several() -> bool:
    """Whether torchrun (or what sets its environment) started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or "1") > 1


def follower() -> bool:
    """Whether this is one of several processes, and not the one that speaks."""
    return several() and os.environ["RANK"] != "0"


@contextlib.contextmanager
def joined(device: str = "auto", speak: Callable[[str], None] | None = None) -> Iterator[World]:
    """Join the processes that torchrun started, and leave them at the end of the block; a block inside it has the same World.

    Args:
        device: as the command names it; `auto` is what it means on this machine, `cuda` becomes `cuda:<LOCAL_RANK>`.
        speak: prints the one message of a failure: on the leader, elsewhere only where the leader says nothing in time. The process
            then ends with the failure's exit code. None raises instead: `RankError` on the ranks that did not fail.

    Raises:
        UsageError: a device that cannot work. JoinError: no way to the other ranks. RankError: another rank failed or died.
    """
    global _joined  # noqa: PLW0603
    if _joined is not None or not several():
        yield _joined or World()
        return
    try:
        device = resolve_device(device, quiet=follower()) if device == "auto" else device
        _joined = world = _Group(device.startswith("cuda"))
    except JoinError as error:
        if speak is None:
            raise
        speak(f"error: {printable(str(error))}")
        raise Ended(error.exit_code) from None
    try:
        with _terminated(world):
            world.take(device)
            yield world
    except BaseException as error:
        code = world.failed(error, speak)
        if speak is None or not isinstance(error, MaxsimEvalError | KeyboardInterrupt | SystemExit | OSError):
            raise
        raise Ended(code) from None
    else:
        world.leave(PATIENCE)
    finally:
        _joined = None


@contextlib.contextmanager
def _terminated(world: World) -> Iterator[None]:
    """On the leader SIGTERM raises `Terminated` in the block, so that it can say why it ends; other ranks just end."""
    if not world.leader or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Terminated(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Group(World):
    """One of several processes."""

    def __init__(self, gpus: bool) -> None:
        global _store, _rounds  # noqa: PLW0603
        import torch.distributed as dist

        super().__init__()
        if dist.is_initialized():
            raise JoinError("torch.distributed: already in use in this process; evaluate where it is not, or without torchrun")
        try:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            if not 0 <= self.rank < self.size:
                raise ValueError(f"RANK is {self.rank}, need less than WORLD_SIZE, {self.size}")
            limit = datetime.timedelta(seconds=TIMEOUT)
            if _store is None:
                _store, _, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
            _rounds += 1
            self._store: Any = dist.PrefixStore(f"maxsim-eval/{_rounds}", _store)
            self._nccl = gpus and torch.cuda.is_available()
            backend = "cpu:gloo,cuda:nccl" if self._nccl else "gloo"
            group = dist.PrefixStore("group", self._store)
            dist.init_process_group(backend, store=group, rank=self.rank, world_size=self.size, timeout=limit)
        except (ValueError, RuntimeError) as error:
            who = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
            raise JoinError(f"{who}: the processes cannot find each other: {line_of(error)}") from error
        self._dist = dist
        self._device = "cpu"
        self._meetings = self._told = 0
        self._failure: Failure | None = None
        self._notes: dict[int, str] = {}
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="maxsim-eval watch", daemon=True)
        self._watcher.start()

    def take(self, device: str) -> None:
        """Take this rank's own device."""
        if not device.startswith("cuda"):
            self._device = device
            return
        if device != "cuda":
            raise UsageError(f"device {device!r} with {self.size} processes: need 'cuda', each takes the one of its LOCAL_RANK")
        if self.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"LOCAL_RANK is {self.local_rank}, and this machine has {torch.cuda.device_count()} CUDA devices; "
                "need at most one process a device (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(self.local_rank)
        self._device = f"cuda:{self.local_rank}"

    def device(self, device: str) -> str:
        return self._device

    def check(self) -> None:
        if self._failure is not None:
            raise RankError(self._failure, self.size)

    def draw(self, name: str) -> int:
        with self._talking():
            return int(self._store.add(f"drawn/{name}", 1)) - 1

    def notes(self) -> list[str]:
        return list(self._notes.values())

    def share(self, value: Any) -> Any:
        box = [value if self.leader else None]
        self._meet()
        with self._talking(-1 if self.leader else 0):
            self._dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def tell(self, value: Any) -> Any:
        name, self._told = f"told/{self._told}", self._told + 1
        if self.leader:
            with self._talking():
                self._store.set(name, json.dumps(value))
            return value
        self._wait([name])
        with self._talking():
            return json.loads(self._store.get(name))

    def largest(self, value: float) -> float:
        return max(self.collect(value), key=lambda one: (math.isnan(one), one))

    def collect(self, value: Any) -> list[Any]:
        number = self._meetings
        self._store.set(f"value/{number}/{self.rank}", json.dumps(value))
        self._meet()
        with self._talking():
            return [json.loads(self._store.get(f"value/{number}/{rank}")) for rank in range(self.size)]

    def reduce(self, keys: Tensor, merge: Callable[[Sequence[Tensor]], Tensor]) -> Tensor | None:
        self._meet()
        if self._nccl:
            keys = keys.to(self._device)
        if not self.leader:
            with self._talking():
                self._dist.send(keys.contiguous(), 0)
            return None
        for rank in range(1, self.size):  # one after the other: two sets of keys are held, however many ranks there are
            theirs = torch.empty_like(keys)
            with self._talking(rank):
                self._dist.recv(theirs, rank)
            keys = merge([keys, theirs])
        return keys

    def _meet(self) -> None:
        """Wait until every rank is here."""
        number, self._meetings = self._meetings, self._meetings + 1
        with self._talking():
            self._store.set(f"at/{number}/{self.rank}", "")
        self._wait([f"at/{number}/{rank}" for rank in range(self.size)])

    def _wait(self, keys: list[str]) -> None:
        pause = 0.002
        while True:
            self.check()
            with self._talking():
                if self._store.check(keys):
                    return
            if self.idle is not None:
                self.idle()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    @contextlib.contextmanager
    def _talking(self, rank: int = 0) -> Iterator[None]:
        """Turn what breaks while this rank talks to another (-1: to all) into a `RankError` about that one."""
        try:
            yield
        except RuntimeError as error:
            end = time.monotonic() + 4 * BEAT  # who failed, and why, may be on its way
            while self._failure is None and time.monotonic() < end:
                time.sleep(0.05)
            if self._failure is None:
                self._failure = Failure(rank, LOST, EXIT_DATA)
                with contextlib.suppress(RuntimeError):
                    self._failure = first_failure(self._store, self._failure)
            raise RankError(self._failure, self.size) from error

    def _watch(self) -> None:
        """Give signs of life, watch for those of others and for a recorded failure; runs in a thread of its own."""
        heard = dict.fromkeys(range(1, self.size) if self.leader else (0,), (b"", time.monotonic()))
        beat = 0
        try:
            store: Any = self._store.clone()  # a connection of its own: calls on one wait for each other
            while self._failure is None and not self._stop.wait(BEAT):
                beat += 1
                store.set(f"beat/{self.rank}", f"{beat} {self.note}")
                if store.check(["failed"]):
                    self._failure = Failure(**json.loads(store.get("failed")))
                    break
                for rank, (last, when) in heard.items():
                    said = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
                    if said != last:
                        heard[rank] = (said, time.monotonic())
                        self._notes[rank] = said.decode().partition(" ")[2]
                    elif time.monotonic() - when > SILENCE and not store.check([f"left/{rank}"]):
                        died = f"gave no sign of life for {SILENCE:g} s: its process was killed or its machine is gone; {CONTINUES}"
                        self._failure = first_failure(store, Failure(rank, died, EXIT_DATA))
        except RuntimeError:
            if not self._stop.is_set() and self._failure is None:
                self._failure = Failure(0, LOST, EXIT_DATA)
        if self._failure is not None and not self._stop.wait(GRACE):
            # The main thread is held in a call that does not come back, such as a collective with the dead.
            if self.leader:
                print(f"error: {RankError(self._failure, self.size)}", file=sys.__stderr__, flush=True)
            os._exit(self._failure.code)

    def failed(self, error: BaseException, speak: Callable[[str], None] | None) -> int:
        """Tell the others what ended this rank, see to it that it is said once, and leave; gives the exit code."""
        mine = failure_of(error, self.rank)
        found = self._failure
        store_lost = False
        if not isinstance(error, RankError | Terminated):
            try:
                found = first_failure(self._store, mine)
            except RuntimeError:
                store_lost = True
        found = self._failure = found or mine
        text = str(RankError(found, self.size)) if not isinstance(error, Terminated) else found.text
        line = found.text if found.code == EXIT_INTERRUPTED else f"error: {text}"
        if self.leader:
            if speak is not None:
                speak(line)
            self.leave(0.0 if isinstance(error, Terminated) else PATIENCE / 2, said=True)
        else:
            if not (store_lost or self._is_said()) and speak is not None:
                speak(line)
            self.leave(0.0)
        return found.code

    def _is_said(self) -> bool:
        """Whether the leader says, in time, what happened."""
        end = time.monotonic() + PATIENCE
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end:
                if self._store.check(["said"]):
                    return True
                time.sleep(0.05)
        return False

    def leave(self, patience: float, *, said: bool = False) -> None:
        """Stop watching and close what is open; the leader, in whose process the store may live, goes last."""
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # whoever has gone already is not waited for
            if said:
                self._store.set("said", "")
            self._store.set(f"left/{self.rank}", "")
            end = time.monotonic() + patience
            others = [f"left/{rank}" for rank in range(1, self.size)]
            while self.leader and time.monotonic() < end and not self._store.check(others):
                time.sleep(0.02)
        self._watcher.join(timeout=2 * BEAT)
        with contextlib.suppress(RuntimeError):
            self._dist.destroy_process_group()
