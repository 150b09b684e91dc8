"""The attack: thousands of damaged files and killed commands, and how each of them ended.

python tests/attack/attack.py --cases 5000 --kills 300 --json counts.json
python tests/attack/attack.py --only documents:17        # one case, with everything it says
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import torch
import torch._dynamo  # the first call of a user's function imports it, which took seconds in every forked process
import tqdm

from attacks import endings, fuzzing, killing, specimen, workers
from attacks.endings import Case
from attacks.targets import TARGETS
from maxsim_eval.environment import versions


def main() -> None:
    """Run what is asked for; exit 1 where a case ended as none may."""
    given = _arguments()
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # no thread of its own: this process forks
    scratch = Path(tempfile.mkdtemp(prefix="attack-", dir=given.scratch))
    began = time.monotonic()
    try:
        (scratch / "specimen").mkdir()
        found = specimen.build(scratch / "specimen")
        if given.kills or given.pairs or given.faults or (given.only or "").partition(":")[0] in killing.ALL:
            killing.prepare(found, scratch)
        if given.only:
            target, _, seed = given.only.partition(":")
            cases = [_work(found)(target, int(seed), scratch)]
            print(json.dumps(cases[0].to_json(), indent=2))
        else:
            cases = list(_bar(_jobs(given), _work(found), scratch, given.workers))
            _report(cases, given, time.monotonic() - began)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(any(endings.forbidden(case.ending) for case in cases))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="damaged files, spread over all targets")
    parser.add_argument("--kills", type=int, default=0, help="killed commands, spread over all of them")
    parser.add_argument("--pairs", type=int, default=0, help="two commands at once on one folder")
    parser.add_argument("--faults", type=int, default=0, help="commands under a limit of the system, or without a stream")
    parser.add_argument("--first", type=int, default=0, help="the first seed of every target")
    parser.add_argument("--targets", default="", help=f"comma-separated; default: all of {', '.join([*TARGETS, *killing.ALL])}")
    parser.add_argument("--only", metavar="TARGET:SEED", help="one case, in this process")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", help="a folder for the copies (default: the system's for temporary files)")
    parser.add_argument("--json", type=Path, help="write the counts")
    return parser.parse_args()


def _jobs(given: argparse.Namespace) -> list[workers.Job]:
    chosen = [name for name in given.targets.split(",") if name]
    jobs: list[workers.Job] = []
    asked = ((given.cases, TARGETS), (given.kills, killing.KILLS), (given.pairs, killing.PAIRS), (given.faults, killing.FAULTS))
    for count, names in asked:
        mine = [name for name in names if not chosen or name in chosen]
        jobs += [(mine[place % len(mine)], given.first + place // len(mine)) for place in range(count if mine else 0)]
    return jobs


def _work(found: specimen.Specimen) -> workers.Work:
    def work(name: str, seed: int, scratch: Path) -> Case:
        attack = killing.attack if name in killing.ALL else fuzzing.attack
        return attack(name, seed, found, scratch)

    return work


def _bar(jobs: Sequence[workers.Job], work: workers.Work, scratch: Path, count: int) -> Iterator[Case]:
    bad = 0
    with tqdm.tqdm(total=len(jobs), desc="attack", unit=" cases", smoothing=0.02) as bar:
        for case in workers.run_all(jobs, work, scratch, count):
            if endings.forbidden(case.ending):
                bad += 1
                bar.write(f"{case.name}: {case.ending} ({case.mutation}): {case.said}", file=sys.stderr)
            bar.set_postfix(forbidden=bad, refresh=False)
            bar.update()
            yield case


def _revision() -> str:
    """The commit that was attacked, and whether files differ from it."""
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _report(cases: Sequence[Case], given: argparse.Namespace, seconds: float) -> None:
    counts = workers.summary(cases)
    total = {ending: sum(row.get(ending, 0) for row in counts.values()) for ending in endings.ENDINGS}
    for target, row in sorted(counts.items()):
        print(f"{target:12} " + ", ".join(f"{row[ending]} {ending}" for ending in endings.ENDINGS if ending in row))
    print(f"{'all':12} " + ", ".join(f"{count} {ending}" for ending, count in total.items() if count))
    if given.json:
        held = [case.to_json() for case in cases if case.ending not in endings.ALLOWED]
        for case in held:
            del case["seconds"]
        document = {
            "schema": "maxsim-eval/attack/1",
            "cases": sum(case.target in TARGETS for case in cases),
            "kills": sum(case.target in killing.KILLS for case in cases),
            "killed": sum(case.mutation.count(f"exit {code}") for case in cases for code in killing.STOPPED),
            "pairs": sum(case.target in killing.PAIRS for case in cases),
            "faults": sum(case.target in killing.FAULTS for case in cases),
            "revision": _revision(),
            "versions": versions(),
            "first_seed": given.first,
            "seconds": round(seconds),
            "endings": total,
            "forbidden": sum(endings.forbidden(case.ending) for case in cases),
            "targets": {name: counts[name] for name in [*TARGETS, *killing.ALL] if name in counts},
            "to_look_at": sorted(held, key=lambda case: (case["target"], case["seed"])),
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
