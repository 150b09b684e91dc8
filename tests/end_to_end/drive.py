"""Evaluations in forked processes, for the tests of resumption and of several ranks: torch is imported once, not once a process.

Run as `python drive.py SCENARIO FOLDER`; prints one JSON object of what happened. The tests say what should have.

The corpus is full of exact ties: a few texts many times over, spread so that equal documents lie in every unit and every share.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # this file is a script

import snowballstemmer  # noqa: F401 - of the lexical encoder, before the first fork
import torch
import torch.distributed

import maxsim_eval.report.console  # noqa: F401
from maxsim_eval.api import evaluate
from maxsim_eval.cli import app
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import CacheError
from maxsim_eval.processes import world
from maxsim_eval.scoring import job, records, stream, units
from maxsim_eval.types import Role
from maxsim_kernels import Packed, pack
from ports import reserved_port

ANIMALS = (
    "red fox runs",
    "blue whale swims",
    "green frog jumps",
    "quiet owl",
    "",
    "grey wolf and red fox",
    "old toad in a pond",
)
QUERIES = ("red fox", "a frog in green", "an owl", "whale", "toad pond", "wolf runs")
DOCUMENTS = 900
COMMAND = ("local", "ties", "--k", "40", "--paths", "fp32,fp16,int8-corpus")
Child = Callable[[int], None]


def prepare(folder: Path) -> None:
    """The collection, and units small enough that it has some thirty."""
    home = folder / "datasets" / "local" / "ties"
    (home / "qrels").mkdir(parents=True, exist_ok=True)
    texts = [f"{ANIMALS[(n * n) % len(ANIMALS)]}{' twice' if n % 11 == 0 else ''}" for n in range(DOCUMENTS)]
    for name, rows in (("corpus", texts), ("queries", QUERIES)):
        lines = (json.dumps({"_id": f"{name[0]}{n}", "text": text}) + "\n" for n, text in enumerate(rows))
        (home / f"{name}.jsonl").write_text("".join(lines))
    judged = "".join(f"q{n}\tc{n}\t1\nq{n}\tc{n * 3 + 7}\t2\n" for n in range(len(QUERIES)))
    (home / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    units.LEAST_BYTES = 34_000
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        app.main(["local", "ties", "--k", "0"])  # refused, after typer has imported what every command would


def fork(work: Child, number: int, folder: Path) -> int:
    """Start `work(number)` in a process of its own: in `folder`, its output in `<number>.out` and `<number>.err` there."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.chdir(folder)
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("default")
        work(number)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:  # noqa: BLE001 (a child must end here whatever happens)
        sys.__stderr__.write(f"Traceback: {error!r}\n")  # type: ignore[union-attr]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(*words: str) -> Child:
    """The command line."""

    def work(number: int) -> None:
        sys.argv = ["evaluate.py", *words]
        app.main(list(words))

    return work


def wait(pids: Sequence[int], limit: float = 60.0) -> list[int | None]:
    """Exit codes; None for a process that was still running after `limit` seconds (it is killed)."""
    end, codes = time.monotonic() + limit, dict.fromkeys(pids, -1000)
    while -1000 in codes.values():
        for pid in [pid for pid, code in codes.items() if code == -1000]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None  # type: ignore[assignment]
        time.sleep(0.005)
    return list(codes.values())


def single(folder: Path, *words: str) -> dict[str, Any]:
    """One ordinary evaluation."""
    pid = fork(command(*words), 0, folder)
    return outcome(folder, wait([pid]))


def begin(count: int, folder: Path, work: Child, change: Child = lambda rank: None) -> list[int]:
    """Ranks as torchrun would start them, without torchrun: its environment; `change(rank)` is called in each first."""
    with reserved_port() as port:

        def rank_of(rank: int) -> None:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            change(rank)
            work(rank)

        return [fork(rank_of, rank, folder) for rank in range(count)]


def outcome(folder: Path, codes: Sequence[int | None]) -> dict[str, Any]:
    """Codes and what each process printed."""
    texts = {name: [(folder / f"{n}.{name}").read_text() for n in range(len(codes))] for name in ("out", "err")}
    return {"codes": list(codes), **texts}


def result(folder: Path, out: str = "out") -> dict[str, Any]:
    """What an evaluation wrote, but for times and places: run files, result.json, and whether parts were left."""
    home = folder / out
    found = json.loads((home / "result.json").read_text())
    for name in ("created", "command", "environment"):
        found.pop(name)
    for path in found["paths"].values():
        for name in ("seconds", "memory"):
            path.pop(name)
    runs = {path.name: path.read_text() for path in sorted((home / "runs").iterdir())}
    return {"result": found, "runs": runs, "left": sorted(path.name for path in home.iterdir())}


def parts(folder: Path, out: str = "out") -> dict[str, int]:
    """Finished units: file -> inode (another one, if it was written again)."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # the command ended and took them away: a part, or the folder being listed
        for path in (folder / out / ".partial").glob("*/[0-9]*.h5"):
            found[f"{path.parent.name}/{path.name}"] = path.stat().st_ino
    return found


def await_parts(pid: int, folder: Path, count: int) -> None:
    """Until so many units are finished, or the process `pid` has ended (it is still to be waited for)."""
    while len(parts(folder)) < count and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)


def kills(folder: Path) -> dict[str, Any]:
    """One evaluation, killed again and again, at random moments and after some parts, then left to end; all of it once more."""
    words = (*COMMAND, "--paths", "fp32,int8-corpus", "--out", "out", "--quiet")
    first, need = single(folder, *words), result(folder)
    shutil.rmtree(folder / "out")
    began = time.monotonic()
    wait([fork(command(*words), 0, folder)])
    whole = time.monotonic() - began
    shutil.rmtree(folder / "out")
    rng, killed, ended, left, rewritten, said, differing = random.Random(5), 0, [], [], [], "", 0
    for attempt in range(20):
        before = parts(folder) if (folder / "out").exists() else {}
        pid = fork(command(*words), 0, folder)
        if attempt % 10 != 9:  # every tenth is left to end
            if attempt % 2:  # in the middle of scoring, however busy the machine is
                await_parts(pid, folder, len(before) + rng.randint(1, 5))
            else:
                time.sleep(rng.uniform(0.0, 0.5) * whole)
            os.kill(pid, signal.SIGKILL)
        (code,) = wait([pid])
        said += (folder / "0.err").read_text()
        if code == -signal.SIGKILL:
            killed += 1
            after = parts(folder) if (folder / "out").exists() else {}
            left.append(len(after))
            rewritten += [(attempt, name) for name, inode in before.items() if after.get(name, inode) != inode]
        else:
            ended.append(code)
            differing += result(folder) != need
            shutil.rmtree(folder / "out")
    return {
        "first": first, "need": need["left"], "killed": killed, "left": left, "rewritten": rewritten, "said": said,
        "ended": ended, "differing": differing,
    }  # fmt: skip


def stopped(folder: Path) -> dict[str, Any]:
    """Ctrl-C in the middle of scoring, then the same command; the same with `--fresh`; a second evaluation at the same time."""
    words = (*COMMAND, "--out", "out", "--quiet")
    single(folder, *words)
    need = result(folder)
    shutil.rmtree(folder / "out")

    def slow(number: int) -> None:
        put = records.Records.put

        def later(self: records.Records, start: int, *rest: Any) -> None:
            time.sleep(30 if start > 400 and self.folder.name == "fp16" else 0)
            put(self, start, *rest)

        records.Records.put = later  # type: ignore[method-assign]
        command(*words)(number)

    pid = fork(slow, 0, folder)
    end = time.monotonic() + 30
    while not any(name.startswith("fp16/") for name in parts(folder)) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)
    second = outcome(folder, wait([fork(command(*words), 1, folder)]) * 2)
    os.kill(pid, signal.SIGINT)
    interrupted = outcome(folder, wait([pid]))
    held = parts(folder)
    scored: dict[str, Any] = {}
    for name, extra in (("again", ()), ("fresh", ("--fresh",))):
        if name == "fresh":  # a copy of the parts, so that there are some to forget
            shutil.copytree(folder / "copy", folder / "out" / ".partial")
        else:
            shutil.copytree(folder / "out" / ".partial", folder / "copy")

        def counting(number: int, extra: tuple[str, ...] = extra) -> None:
            score, count = stream._Stream.score, [0]

            def counted(self: Any, *arguments: Any) -> Any:
                count[0] += 1
                Path("scored").write_text(str(count[0]))
                return score(self, *arguments)

            stream._Stream.score = counted  # type: ignore[method-assign]
            command(*words, *extra)(number)

        ended = outcome(folder, wait([fork(counting, 0, folder)]))
        scored[name] = {**ended, "scored": int((folder / "scored").read_text()), "same": result(folder) == need}
    return {"second": second, "interrupted": interrupted, "held": len(held), **scored}


def ranks(folder: Path) -> dict[str, Any]:
    """The same evaluation by one process and by several ranks."""
    found: dict[str, Any] = {}
    for count in (2, 1, 3):  # two ranks first: one of them encodes while the other waits
        out = f"out{count}"
        words = (*COMMAND, "--out", out)
        if count == 1:
            found["1"] = {**single(folder, *words, "--quiet"), **result(folder, out)}
        else:
            codes = wait(begin(count, folder, command(*words)))
            environment = json.loads((folder / out / "result.json").read_text())["environment"]
            found[str(count)] = {**outcome(folder, codes), **result(folder, out), "environment": environment}
    words = (*COMMAND, "--candidates", "out1/runs/fp32.trec", "--quiet", "--out")
    found["reranked"] = {**single(folder, *words, "again1"), **result(folder, "again1")}
    found["reranked by 2"] = {**outcome(folder, wait(begin(2, folder, command(*words, "again2")))), **result(folder, "again2")}
    # One unit, three ranks; and a follower that reports the whole of a Result to its caller.
    units.LEAST_BYTES = 1 << 30
    found["one unit"] = {
        **outcome(folder, wait(begin(3, folder, command(*COMMAND, "--out", "few", "--quiet")))),
        **result(folder, "few"),
    }

    def calls(rank: int) -> None:
        task = load_task("local", "ties", data_dir="datasets")
        mine = evaluate(task, "lexical", ["fp16"], k=5, out_dir="called", quiet=True)
        print(json.dumps([mine.paths["fp16"].metrics, mine.environment["processes"]]))

    found["called"] = outcome(folder, wait(begin(2, folder, calls)))
    return found


def resumes(folder: Path) -> dict[str, Any]:
    """Two ranks killed in the middle; three, and one, go on from what they left."""
    words = (*COMMAND, "--out", "out", "--quiet")
    single(folder, *words)
    need = result(folder)
    shutil.rmtree(folder / "out")

    def dies(rank: int) -> None:
        put, count = records.Records.put, [0]

        def last(self: records.Records, *rest: Any) -> None:
            count[0] += 1
            if count[0] > 8 + rank:
                os.kill(os.getpid(), signal.SIGKILL)
            put(self, *rest)

        records.Records.put = last  # type: ignore[method-assign]

    codes = wait(begin(2, folder, command(*words), dies))
    held = parts(folder)
    shutil.copytree(folder / "out", folder / "copy")
    three = outcome(folder, wait(begin(3, folder, command(*words))))
    same = result(folder) == need
    shutil.rmtree(folder / "out")
    shutil.copytree(folder / "copy", folder / "out")
    one = single(folder, *words)
    return {"codes": codes, "held": len(held), "three": three, "one": one, "same": [same, result(folder) == need]}


def failures(folder: Path) -> dict[str, Any]:
    """What can go wrong on one rank of three, and in all."""
    words = (*COMMAND, "--paths", "fp32", "--quiet")
    single(folder, *words, "--out", "ready")
    world.SILENCE, world.PATIENCE, job._PATIENCE = 2.0, 4.0, 0.5

    def raises(method: str, error: BaseException) -> None:
        def failing(*_: Any) -> Any:
            raise error

        setattr(stream._Stream, method, failing)

    def unreadable(rank: int) -> None:
        if rank == 1:
            raises("score", CacheError("documents/00001.h5: cannot be read: Input/output error"))

    def breaks(rank: int) -> None:
        if rank == 2:
            raises("_scores", ZeroDivisionError("a bug"))

    def kills_rank(dead: int) -> Child:
        def change(rank: int) -> None:
            if rank == dead:
                stream._Stream.score = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]

        return change

    def elsewhere(rank: int) -> None:
        if rank == 2:
            other = folder / "elsewhere"
            other.mkdir(exist_ok=True)
            (other / "embeddings_cache").symlink_to(folder / "embeddings_cache")
            os.chdir(other)

    def threads(rank: int) -> None:
        torch.set_num_threads(1 + rank)

    def interrupt(rank: int) -> None:
        if rank == 1:
            raises("score", KeyboardInterrupt())

    cases: dict[str, tuple[Child, tuple[str, ...]]] = {
        "unreadable": (unreadable, ()),
        "bug": (breaks, ()),
        "follower killed": (kills_rank(1), ()),
        "leader killed": (kills_rank(0), ()),
        "elsewhere": (elsewhere, ()),
        "threads": (threads, ()),
        "interrupted": (interrupt, ()),
        "usage": (lambda rank: None, ("--k", "0")),
        "no device": (lambda rank: None, ("--device", "cuda")),
        "no data": (lambda rank: None, ("--split", "nothing")),
    }
    found = {}
    for name, (change, extra) in cases.items():
        began = time.monotonic()
        pids = begin(3, folder, command(*words, "--out", name.replace(" ", "-"), *extra), change)
        found[name] = {**outcome(folder, wait(pids)), "seconds": time.monotonic() - began}
    found["nan"] = outcome(folder, wait(begin(2, folder, not_a_number)))
    return found


class Words:
    """One token a word; `abyss` is huge, `zenith` its opposite."""

    name, revision, dim = "words", "1", 4

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {}

    def prepare(self, documents: Sequence[Any]) -> None: ...

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        huge = {"ocean": 1e20, "abyss": -1e20}  # in no other text
        return pack([torch.tensor([[huge.get(word, 1.0)] * 4 for word in text.split()]).reshape(-1, 4) for text in items])


def not_a_number(rank: int) -> None:
    """A NaN score in the share of rank 1, whose process has never loaded the ids."""
    task = load_task("local", "ties", data_dir="datasets")
    documents = list(task.documents)
    documents[700] = "ocean"
    units.LEAST_BYTES = 2000
    queries = list(task.queries)
    queries[3] = "ocean abyss"
    changed = type(task)(**{**task.__dict__, "documents": documents, "queries": queries})
    try:
        evaluate(changed, Words(), ["fp32"], k=5, out_dir="nan", quiet=True)
    except Exception as error:  # noqa: BLE001 (its text is what the test is about)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(3) from None


if __name__ == "__main__":
    place = Path(sys.argv[2]).resolve()
    prepare(place)
    print(
        json.dumps(
            {"kills": kills, "stopped": stopped, "ranks": ranks, "resumes": resumes, "failures": failures}[sys.argv[1]](place)
        )
    )
