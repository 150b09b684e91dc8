"""Which entries an atlas has: names, from a TOML file (`grid.toml`) or given, all checked before anything is evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from maxsim_eval.codecs.names import STEPS, codec_of, names_step
from maxsim_eval.comparison.metrics import parse_metric
from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.first_stage.names import FIRST_STAGES, get_first_stage
from maxsim_eval.parsing import settings_of
from maxsim_eval.scoring.own_functions import PREFIX, find_paths
from maxsim_eval.scoring.paths import REFERENCE, our_paths

_RERANK = re.compile(r"(?P<base>.+)\+rerank-(?P<depth>[1-9]\d{0,8})")
_KEYS = ("within", "metrics", "entries")
Kind = Literal["path", "codec", "first stage", "reranked"]


@dataclass(frozen=True)
class GridEntry:
    """One way of storing or finding: its name, without spaces, and the `kind` of thing that it names.

    `base` and `depth` are set for `<base>+rerank-<depth>` alone: the operator in FP32 reranks the base's first `depth` documents.
    """

    name: str
    kind: Kind
    base: str = ""
    depth: int = 0

    @property
    def control(self) -> bool:
        """Whether it is broken on purpose."""
        return re.split(r"[+(]", self.name)[0] == "control"


@dataclass(frozen=True)
class Grid:
    """What is compared (`entries`, without the reference), by which metrics; a difference of up to `within` does not matter."""

    entries: tuple[GridEntry, ...]
    metrics: tuple[str, ...]
    within: float

    def changed(self, entries: Iterable[str] | None, within: float | None) -> Grid:
        """The grid with other entries or another bound, where they are given."""
        found = self if entries is None else replace(self, entries=entries_of(entries))
        return found if within is None else replace(found, within=_within(within, "within"))


def load_grid(path: Path | str | None = None) -> Grid:
    """Read a grid; None: the packaged one.

    Raises:
        UsageError: unreadable, not TOML, or an invalid key, name, metric or bound.
    """
    return _grid(settings_of("grid", path, "maxsim_eval.atlas", "grid.toml"), f"grid {path or 'grid.toml'}")


def _grid(found: Mapping[str, Any], where: str) -> Grid:
    for key in found:
        if key not in _KEYS:
            raise UnknownNameError(f"key in {where}:", key, _KEYS)
    for key in ("metrics", "entries"):
        names = found.get(key)
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise UsageError(f"{where}: {key} is {names!r}, need a list of names")
    for metric in found["metrics"]:
        parse_metric(metric)
    return Grid(entries_of(found["entries"]), tuple(found["metrics"]), _within(found.get("within", 0.003), where))


def _within(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise UsageError(
            f"{where}: within is {value!r}, need a difference of a metric that does not matter, above 0 and up to 1"
        )
    return float(value)


def entries_of(names: Iterable[str]) -> tuple[GridEntry, ...]:
    """Entries by name, each once, without the reference; a reranked entry's base comes before it. Errors as of `entry_of`."""
    found: dict[str, GridEntry] = {}
    for name in (name.replace(" ", "") for name in names):
        entry = entry_of(name)
        if entry.base:
            found.setdefault(entry.base, entry_of(entry.base))
        found.setdefault(name, entry)
    found.pop(REFERENCE, None)
    if not found:
        raise UsageError("entries: got none, need at least one, as int4 or pool-2+residual-2(centroids=1024)")
    return tuple(found.values())


def entry_of(name: str) -> GridEntry:
    """The entry of a name.

    Raises:
        UnknownNameError, UsageError: no such entry, or a wrong option.
    """
    reranked = _RERANK.fullmatch(name)
    if reranked is not None:
        base = entry_of(reranked["base"])
        if base.kind == "reranked":
            raise UsageError(f"entry {name!r}: reranked twice")
        return GridEntry(name, "reranked", base.name, int(reranked["depth"]))
    if name in our_paths() or name.startswith(PREFIX):
        find_paths([name])
        return GridEntry(name, "path")
    if re.split(r"[:(]", name)[0] in FIRST_STAGES:
        get_first_stage(name)
        return GridEntry(name, "first stage")
    if names_step(name):
        codec_of(name)
        return GridEntry(name, "codec")
    raise UnknownNameError("entry", name, [*our_paths(), *STEPS, *FIRST_STAGES, "<entry>+rerank-100"])
