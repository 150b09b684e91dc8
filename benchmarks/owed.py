"""What has to be measured again on an NVIDIA GPU, most valuable first, and the runs of it within the time there is.

    python benchmarks/owed.py --list                                what is owed, why, and what each takes
    python benchmarks/owed.py --seconds 1800 --out owed             run it, one after the other, as far as the time goes
    python benchmarks/owed.py --at-once 4 --seconds 600 --out owed  on four GPUs at once, what does not wait for the host
    python benchmarks/owed.py --take owed                           put what was measured into docs/results
    python benchmarks/page.py                                       and write the pages anew

`owed.toml` holds every measurement behind the pages: its command, its file, what it takes. One is owed where its file or group is not
there, or where the sources behind it are no longer those that the file recorded; of a slice of the test files those alone run that are
owed. Correctness comes first (tests/gpu, the sanitizers), then most value a second. Each runs in a process group of its own with a
limit of its own, and none is begun that does not fit. What ended well in `--out` with these sources is skipped, so the same command
continues; what failed there is tried again last. Logs and `owed.json`, which says how each ended, lie in `--out`.

At once, every GPU has a process with a share of the CPUs and a folder of its own in `--out` (`lane-0`, ...); what waits for the host
(`alone`), takes several GPUs or comes after another measurement is left for a call without `--at-once`.

Exit status: 0 nothing is owed any more, 1 something failed, 2 it could not be run, 3 something did not fit and is still owed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure.session import digest_of_all
from measure.sources import PACKAGE
from results.file import write
from run import lanes
from run.measurements import ROOT, TABLE, Measurement, table
from tables import ages
from tables.cells import FIGURES, OPERATOR, Book

RESULTS = ROOT / "docs" / "results"
JOURNAL = "owed.json"
NEEDED = ("maxsim-eval", "maxsim-kernels", "pytest", "pytest-xdist")
LONGER, LEAST_MORE = 1.5, 60.0  # a measurement may take so many times its known seconds, or so many more if that is longer
LEAST_SECONDS = 40.0  # of a few test files: what starting takes, and compilations
UNSTEADY = 0.5  # of a median, between its quartiles: the machine was not at rest


# What is owed


def why_owed(one: Measurement, book: Book) -> str:
    """Why something has to be measured, by the book's files; empty where it was, with today's sources."""
    found = book.file(one.file)
    if found is None:
        return "not measured"
    rows, lost = list(_rows(one, found)), _lost(one, found)
    if lost:
        return f"lacks {', '.join(lost[:3])}{' and others' if len(lost) > 3 else ''}"
    old = [keys for keys in rows if ages.is_older(book, one.file, keys)]
    if not old:
        return ""
    if all(not ages.about(found, keys).get("families") for keys in old):
        return "recorded no sources"
    return "sources changed" if len(old) == len(rows) else f"sources changed for {len(old)} of {len(rows)} rows"


def _rows(one: Measurement, found: dict[str, Any]) -> Iterator[list[str]]:
    """Keys of the rows that a measurement gives, in its file."""
    for group in one.groups:
        yield from (["groups", group, "rows", row] for row in (found.get("groups") or {}).get(group, {}).get("rows", {}))
    yield from (keys for entry in one.entries for keys in _entries(entry, found))
    if not (one.groups or one.entries):
        yield from list(ages.rows(found)) or [[]]


def _entries(entry: str, found: dict[str, Any]) -> list[list[str]]:
    """Keys of the part of this name, else of those whose names begin with it."""
    parts = [part for part in ages.PARTS if isinstance(found.get(part), dict)]
    held = [[part, entry] for part in parts if entry in found[part]]
    held = held or [[part, name] for part in parts for name in found[part] if name.startswith(entry)]
    return held or ([[entry]] if entry in found else [])


def _lost(one: Measurement, found: dict[str, Any]) -> list[str]:
    """A measurement's groups and entries that its file lacks."""
    groups = [group for group in one.groups if not (found.get("groups") or {}).get(group, {}).get("rows")]
    return groups + [entry for entry in one.entries if not _entries(entry, found)]


def _ran(one: Measurement, book: Book) -> dict[str, Any] | None:
    """What the book's file says of each test file; None: the measurement is not told which to run."""
    return (book.file(one.file) or {}).get("files", {}) if "{files}" in one.command else None


def narrowed(one: Measurement, book: Book) -> Measurement:
    """Of a measurement that is told which test files to run: those that the book's file lacks or has of other sources."""
    recorded = _ran(one, book) or {}
    old = tuple(name for name in one.entries if name not in recorded or ages.is_older(book, one.file, ["files", name]))
    if not old or not set(one.entries) <= set(recorded):
        return one
    takes = {name: recorded[name]["seconds"] for name in one.entries}
    share = sum(takes[name] for name in old) / max(sum(takes.values()), 1e-9)
    return replace(one, entries=old, seconds=max(LEAST_SECONDS, one.seconds * share))


def owed(found: Sequence[Measurement], out: Path | None, results: Path = RESULTS) -> list[tuple[Measurement, str]]:
    """What has to be measured and why, in the order in which it would run; what failed in `out` comes last."""
    committed = Book(results, FIGURES)
    before = [(Book(folder, FIGURES), journal(folder)) for folder in folders(out)]
    left, failed = [], []
    for whole in found:
        why, one = why_owed(whole, committed), narrowed(whole, committed)
        if not why:
            continue
        runs = [(held, ended[one.name]) for held, ended in before if one.name in ended]
        if any(run["exit"] == 0 and not why_owed(one, held) for held, run in runs):
            continue
        bad = [run["exit"] for _, run in runs if run["exit"] != 0 and run.get("sources") == digest_of_all()]
        if bad:
            failed.append((one, f"ended with {bad[-1]} here before"))
        else:
            left.append((one, why))
    return left + failed


def folders(out: Path | None) -> list[Path]:
    """The folders that a call writes to: `out` and those of its lanes."""
    return [] if out is None else [out, *sorted(out.glob("lane-*"))]


def journal(out: Path) -> dict[str, Any]:
    """How each measurement that was run in a folder ended, by name."""
    path = out / JOURNAL
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


# Running


def command(one: Measurement, out: Path, texts: Path | None) -> list[str]:
    """The command line of a measurement, with this Python in place of `python` and `torchrun`."""
    known = {"json": str(out / one.file), "texts": str(texts), "data": str(texts and texts.parents[2])}
    known["files"] = ",".join(one.entries)
    words = [word.format(**known) for word in shlex.split(one.command)]
    beside = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}
    return [*beside.get(words[0], words[:1]), *words[1:]]


def lacking(one: Measurement, gpus: int, texts: Path | None, done: set[str]) -> str:
    """What this machine or call lacks for a measurement; empty: nothing."""
    if one.gpus > gpus:
        return f"needs {one.gpus} GPU{'s' if one.gpus > 1 else ''}, here {gpus}"
    if ("{texts}" in one.command or "{data}" in one.command) and texts is None:
        return "needs --texts"
    read = [word.format(data=texts.parents[2]) for word in shlex.split(one.command) if texts and "{data}" in word]
    if missing := [path for path in read if not Path(path).exists()]:
        return f"needs {missing[0]}"
    return f"comes after {one.after!r}" if one.after and one.after not in done else ""


def aside(path: Path) -> None:
    """Move a file of other sources away: `results/file.py` would refuse to add to it."""
    if path.exists():
        recorded = (json.loads(path.read_text(encoding="utf-8")).get("identity") or {}).get("sources")
        if recorded not in (None, digest_of_all()):
            path.replace(path.with_name(f"{path.stem}.{recorded}.json"))


def run(one: Measurement, out: Path, texts: Path | None, limit: float) -> dict[str, Any]:
    """Run one measurement in a process group of its own; returns how it ended."""
    log = out / "logs" / f"{''.join(letter if letter.isalnum() else '_' for letter in one.name)}.log"
    for folder in (log.parent, (out / one.file).parent):
        folder.mkdir(parents=True, exist_ok=True)
    aside(out / one.file)
    began = time.perf_counter()
    paths = [str(ROOT), str(OPERATOR.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command(one, out, texts), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = "its limit"
        finally:  # Ctrl-C too: nothing is left on the GPU
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {
        "exit": code,
        "seconds": round(time.perf_counter() - began, 1),
        "limit": round(limit),
        "log": str(log.relative_to(out)),
    }


def work(todo: Sequence[tuple[Measurement, str]], options: argparse.Namespace, done: set[str]) -> tuple[list[str], list[str]]:
    """Run what fits into the time; returns the names of what failed, and of what is still owed."""
    ending, failed, left = time.perf_counter() + options.seconds, [], []
    options.out.mkdir(parents=True, exist_ok=True)
    ended = journal(options.out)
    for one, _ in todo:
        remaining = ending - time.perf_counter()
        lacks = lacking(one, options.gpus, options.texts, done)
        if lacks or one.seconds > remaining:
            left.append(one.name)
            print(
                f"{one.name}: left out, {lacks or f'takes {one.seconds:.0f} s, {max(0, remaining):.0f} are left'}", flush=True
            )
            continue
        limit = min(remaining, max(LONGER * one.seconds, one.seconds + LEAST_MORE))
        here = run(one, options.out, options.texts, limit)
        ended[one.name] = {**here, "sources": digest_of_all()}
        write(options.out / JOURNAL, ended)
        why = why_owed(one, Book(options.out, FIGURES))
        if here["exit"] == 0 and not why:
            done.add(one.name)
            print(f"{one.name}: done in {here['seconds']:.0f} s ({one.seconds:.0f} known)", flush=True)
            continue
        failed.append(one.name)
        last = (options.out / here["log"]).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        how = f"ended with {here['exit']}" if here["exit"] != 0 else f"wrote a file that {why}"
        print(f"{one.name}: {how} after {here['seconds']:.0f} s: {' '.join(last)[:160]}", flush=True)
    return failed, left


def at_once(todo: Sequence[tuple[Measurement, str]], options: argparse.Namespace) -> int:
    """Deal out what may run beside others, and run it on several GPUs; returns the exit status, as of a call on one."""
    takes = {one.name: one.seconds for one, _ in todo if not (one.alone or one.after) and one.gpus <= 1}
    dealt = [names for names in lanes.dealt(takes, options.at_once, options.seconds) if names]
    outs = [options.out / f"lane-{number}" for number in range(len(dealt))]
    more = ["--seconds", options.seconds, "--results", options.results, "--gpus", 1]
    more += ["--texts", options.texts] if options.texts else []
    commands = [
        [sys.executable, __file__, *map(str, ["--table", table, "--out", out, *more])]
        for table, out in zip(lanes.tables(options.table, dealt, outs), outs, strict=True)
    ]
    exits = lanes.run(commands, outs)
    left = [one.name for one, _ in todo if not any(one.name in names for names in dealt)]
    print(f"{sum(map(len, dealt))} dealt to {len(dealt)} GPUs; left: {', '.join(left) or 'nothing'}", flush=True)
    return 1 if any(code not in (0, 3) for code in exits) else 3 if left or 3 in exits else 0


# Into docs/results


def taken(one: Measurement, new: dict[str, Any], old: dict[str, Any] | None) -> dict[str, Any]:
    """The committed file, its groups and entries replaced by those that were measured now.

    Raises:
        ValueError: the two are of different GPUs.
    """
    if not (one.groups or one.entries):
        return new
    old = (
        {key: held for key, held in new.items() if key not in ("groups", "partial", "verdicts", *ages.PARTS)}
        if old is None
        else old
    )
    gpus = [(found.get("identity") or {}).get("gpu") for found in (new, old)]
    if None not in gpus and gpus[0] != gpus[1]:
        raise ValueError(
            f"{one.file}: measured on {gpus[0]}, the committed file on {gpus[1]}; take its rows into a file of their own"
        )
    made = {**old, **{key: new[key] for key in ("schema", "identity") if key in new}}
    made.pop("verdicts", None)  # they follow from the rows, of one run or of several
    for group in one.groups:
        made["groups"] = {**made.get("groups", {}), group: new["groups"][group]}
        made["partial"] = {name: held for name, held in (made.get("partial") or {}).items() if name != group}
    if "environments" in new:
        made["environments"] = {**old.get("environments", {}), **new["environments"]}
    for entry in one.entries:
        for keys in _entries(entry, new):
            if len(keys) == 1:
                return new  # a file whose parts share one record of its sources: not to be mixed
            made[keys[0]] = {**made.get(keys[0], {}), keys[1]: new[keys[0]][keys[1]]}
    return made


def take(found: Sequence[Measurement], out: Path, results: Path) -> int:
    """Put everything that ended well in `out` into `results`; returns how many files were written."""
    written = set()
    runs = [(folder, one) for folder in folders(out) for one in found]
    for folder, whole in runs:
        held = Book(folder, FIGURES)
        ran = _ran(whole, held)  # some of a slice's files, maybe
        one = whole if ran is None else replace(whole, entries=tuple(name for name in whole.entries if name in ran))
        if journal(folder).get(one.name, {}).get("exit") != 0 or why_owed(one, held):
            continue
        path = results / one.file
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        old = old if old is None or old.get("schema") == held.file(one.file).get("schema") else None
        write(path, taken(one, held.file(one.file), old))
        written.add(one.file)
        print(f"{one.name}: into {one.file}")
        if loose := list(unsteady(held.file(one.file))):
            shown = ", ".join(loose[:3]) + (" and others" if len(loose) > 3 else "")
            print(f"  unsteady: quartiles further apart than half of the median: {shown}; look before this is committed")
    return len(written)


def unsteady(found: Any, *keys: str) -> Iterator[str]:
    """Our methods, as `row: method`, whose quartiles are further apart than half of their median."""
    if not isinstance(found, dict):
        return
    for name, value in found.items():
        ours = name.startswith("median_") and bool(keys) and keys[-1].startswith("ours")
        if ours and found.get(name.replace("median", "iqr"), 0.0) > UNSTEADY * value:
            yield f"{keys[-3] if len(keys) > 2 else ''}: {keys[-1]}".removeprefix(": ")
        yield from unsteady(value, *keys, name)


# The command


def visible() -> int:
    """How many NVIDIA GPUs this machine has."""
    if shutil.which("nvidia-smi") is None:
        return 0
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in said.splitlines())


def shown(todo: Sequence[tuple[Measurement, str]], count: int) -> list[str]:
    """What is owed, a line each."""
    lines = [f"{one.seconds:6.0f} s  {one.name:32} {one.file:42} {why}" for one, why in todo]
    total = sum(one.seconds for one, _ in todo)
    return [
        *lines,
        f"{len(todo)} of {count} measurements of {PACKAGE} and the toolkit are owed, about {total / 60:.0f} minutes",
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what is owed, in order, and end")
    parser.add_argument("--seconds", type=float, help="run what is owed for so long at most")
    parser.add_argument("--out", type=Path, help="the folder for files, logs and what was done")
    parser.add_argument("--take", type=Path, metavar="OUT", help="put what a run measured into docs/results and end")
    parser.add_argument("--only", default="", help="only measurements whose name holds one of these, by comma")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="on so many GPUs at once (default 1)")
    parser.add_argument("--texts", type=Path, help="a BEIR corpus.jsonl, for what encodes texts")
    parser.add_argument("--gpus", type=int, default=visible(), help="GPUs that may be used (default: those of nvidia-smi)")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table of measurements")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another folder than docs/results")
    options = parser.parse_args(arguments)
    parts = [part for part in options.only.split(",") if part]
    everything = table(options.table)
    found = [one for one in everything if not parts or any(part in one.name for part in parts)]
    if not found:
        parser.error(f"--only: got {options.only!r}, which no such measurement's name holds; --list prints them")
    if options.take is not None:
        return 0 if take(found, options.take, options.results) else 1
    owing = owed(everything, options.out, options.results)
    asked = {one.name for one in found}
    todo = [(one, why) for one, why in owing if one.name in asked]
    if options.list:
        print("\n".join(shown(todo, len(found))))
        return 0
    if options.seconds is None or options.out is None:
        parser.error("need --list, --take OUT, or --seconds N and --out OUT")
    if not options.gpus and any(one.gpus for one, _ in todo):
        print(
            "owed.py runs on a machine with an NVIDIA GPU, and nvidia-smi names none here; --list needs none", file=sys.stderr
        )
        return 2
    if lacks := [name for name in NEEDED if not list(importlib.metadata.distributions(name=name))]:
        print(
            f"owed.py needs {', '.join(lacks)} installed for {sys.executable}, not only on PYTHONPATH (make install)",
            file=sys.stderr,
        )
        return 2
    if options.at_once > 1:
        return at_once(todo, options)
    done = {one.name for one in everything} - {one.name for one, _ in owing}
    failed, left = work(todo, options, done)
    print(
        f"{len(todo) - len(failed) - len(left)} done, {len(failed)} failed, {len(left)} still owed; --take {options.out} keeps them"
    )
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
