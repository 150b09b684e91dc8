"""One case: a copy of the specimen, one thing in it damaged, one command, and the judgement of how it ended."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from random import Random

from attacks import mutations
from attacks.endings import HANG, LEFTOVERS, REFUSED_2, SILENT, UNFORESEEN, Case, refusal
from attacks.running import HungError, run
from attacks.specimen import Specimen
from attacks.targets import TARGETS, Attack, Target

_LEFT = (".tmp", ".old", ".download")


def attack(name: str, seed: int, specimen: Specimen, scratch: Path) -> Case:
    """The case of that target and seed."""
    rng, target = Random(f"{name}:{seed}"), TARGETS[name]
    home = Path(tempfile.mkdtemp(prefix="case-", dir=scratch))
    began, mutation = time.monotonic(), "?"
    try:
        specimen.copy(home, *target.parts)
        if name == "result":
            shutil.copy(specimen.folder / "out" / "result.json", home / "baseline-result.json")
        file = rng.choice(target.files(home))
        mutation = _damage(rng, target, file)
        ending, said = _ended(rng, name, target, Attack(home, file, mutation, specimen))
    except HungError:
        ending, said = HANG, "did not end in time"
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return Case(name, seed, mutation, ending, said, round(time.monotonic() - began, 3))


def _damage(rng: Random, target: Target, file: Path) -> str:
    kind = rng.random()
    where = file.name
    if kind < 0.05:
        return f"{where}: {mutations.linked(rng, file)}"
    if kind < 0.17:
        return f"{where}: {mutations.place(rng, file, fifo=target.fifo)}"
    for _ in range(10):  # a change may change nothing
        before = file.read_bytes()
        said = rng.choice(target.damages)(rng, file)
        if file.read_bytes() != before:
            break
    return f"{where}: {said}"


def _ended(rng: Random, name: str, target: Target, attack: Attack) -> tuple[str, str]:
    command = target.commands(rng, attack)
    if target.few:
        command = (*command, "--out", "stopped")
    with target.around():
        outcome = run(command, attack.home)
    if target.few and outcome.code == 0:
        (attack.home / "stopped").rename(attack.home / "out")
    left = [path for path in attack.home.rglob("*") if path.name.endswith(_LEFT)]
    if left:
        return LEFTOVERS, f"exit {outcome.code}, {left[0].relative_to(attack.home)}"
    if outcome.code != 0 and not (command[0] == "conform" and outcome.code == 1 and not outcome.err):
        if name == "scorer" and outcome.code == 2 and outcome.err.startswith("error: path python:"):
            return REFUSED_2, ""  # with the function's own traceback
        ending, said = refusal(outcome.code, outcome.out, outcome.err)
        if outcome.code != 1 or ending in (UNFORESEEN,) or command[0] != "gate":
            return ending, said
        judged, why = target.judge(attack, outcome, command)
        return (SILENT, why) if judged == SILENT else (ending, said)
    if "Traceback" in outcome.err or "error: " in outcome.err:
        return UNFORESEEN, f"exit 0 and: {outcome.err[:300]}"
    return target.judge(attack, outcome, command)
