"""The table of measurements, `owed.toml`: an entry each, its command, its file, what it takes, in the order in which they would run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "owed.toml"
KEYS = {"name", "command", "file", "seconds", "value", "groups", "entries", "slice", "first", "alone", "gpus", "after"}


@dataclass(frozen=True)
class Measurement:
    """One entry of the table; owed.toml explains the keys."""

    name: str
    command: str
    file: str
    seconds: float
    value: float
    groups: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    first: bool = False
    alone: bool = False
    gpus: int = 1
    after: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """A sort key: correctness comes first, then the most value a second."""
        return (not self.first, -self.value / self.seconds)


def table(path: Path = TABLE) -> list[Measurement]:
    """All measurements, in the order in which they would run.

    Raises:
        ValueError: an entry lacks a key, or has an unknown one.
    """
    found = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["measurement"]:
        lacks = {"name", "command", "file", "seconds", "value"} - set(entry)
        if lacks or set(entry) - KEYS:
            wrong = ", ".join(sorted(lacks or set(entry) - KEYS))
            raise ValueError(
                f"{path}: {entry.get('name')!r} {'lacks' if lacks else 'has'} {wrong}; known: {', '.join(sorted(KEYS))}"
            )
        held = dict(entry)
        if "slice" in held:
            part, count = held.pop("slice")
            held["entries"] = [one.stem for one in test_files()[part - 1 :: count]]
        lists = {key: tuple(held[key]) for key in ("groups", "entries") if key in held}
        found.append(Measurement(**{**held, **lists}))
    return ordered(found)


def ordered(found: Sequence[Measurement]) -> list[Measurement]:
    """Measurements by rank, but each behind the one that it comes `after`."""
    result: list[Measurement] = []
    waiting = sorted(found, key=lambda one: one.rank)
    while waiting:
        placed = {one.name for one in result}
        ready = next((one for one in waiting if not one.after or one.after in placed), None)
        if ready is None:
            raise ValueError(f"{', '.join(one.name for one in waiting)}: come after what is not in the table")
        waiting.remove(ready)
        result.append(ready)
    return result


def test_files() -> list[Path]:
    """The test files that tests/gpu/record.py deals out, in its order."""
    return sorted(path for path in (ROOT / "tests" / "gpu").glob("test_*.py") if path.name != "test_gpu_speed.py")
