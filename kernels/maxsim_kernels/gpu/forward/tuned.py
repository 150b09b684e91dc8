"""What `tune` found on this machine's GPUs: rows of the table, kept in a file of the user's cache folder and read once a process.

The folder is `MAXSIM_CACHE` (empty: nothing is read), else `maxsim_kernels` in `XDG_CACHE_HOME` or `~/.cache`. A file belongs to
one GPU model, Triton version and digest of the kernels' sources, which its name and its head hold: another version looks for
another file. It maps questions (`question`) to names of rows, so nothing in it can make a kernel take numbers that were never
compiled. A file that cannot be read so is named in one warning and otherwise ignored. A replayed call (`launch.py`) asks for
nothing here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from maxsim_kernels import fallback
from maxsim_kernels.checks import Call
from maxsim_kernels.gpu.forward.tuning import NAMED, Key, Row

FORMAT = "maxsim-kernels/tuned/1"
Answers = dict[str, Row]
_held: dict[torch.device, Answers] = {}  # by device, from the first call that asks


@dataclass(frozen=True)
class Answer:
    """The row that was fastest for a question, and medians in ms: its own, and those of the table's own row."""

    row: Row
    ms: float
    before: float

    def as_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {"row": self.row.name, "architecture": self.row.architecture, "ms": self.ms, "before": self.before}


def question(call: Call, key: Key, mean: int) -> str:
    """The text that an answer is kept under: the key, and what else of a call decides how long its kernel takes.

    d counts as it is, documents' mean length (0: not known) by the power of two that holds it.
    """
    dtypes = [str(one.dtype).removeprefix("torch.") for one in (call.queries, call.documents)]
    parts = [key.kernel, key.operands, key.size, "narrow" * key.narrow, *dtypes, call.granularity, call.layout]
    parts += ["float queries" * (not call.quantize_queries), "affine" * (call.offset is not None), "winners" * call.winners]
    parts += ["packed" * (call.document_starts is not None), "packed queries" * (call.query_starts is not None)]
    parts += ["mask" * (call.document_mask is not None), "lengths" * (call.document_lengths is not None)]
    tokens = f"tokens <= {1 << (mean - 1).bit_length()}" if mean else "tokens unknown"
    return "; ".join([*filter(None, parts), f"d = {call.queries.shape[-1]}", tokens])


def answers(device: torch.device) -> Answers:
    """Rows by question of a device; none where nothing was tuned, or off GPUs."""
    held = _held.get(device)
    if held is None:
        held = _held[device] = _rows(device, read(device)) if device.type == "cuda" else {}
    return held


def _rows(device: torch.device, found: dict[str, Answer]) -> Answers:
    place = f"{torch.cuda.get_device_name(device)} by tune()" if found else ""
    return {
        asked: replace(
            one.row, config=replace(one.row.config, measured=place, reason=f"{one.ms:.4g} ms, untuned {one.before:.4g}")
        )
        for asked, one in found.items()
    }


def folder() -> Path | None:
    """Where files are kept; None: nowhere."""
    named = os.environ.get("MAXSIM_CACHE")
    if named is not None:
        return Path(named).expanduser() if named else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # raises nothing
    return Path(home) / "maxsim_kernels" if os.path.isabs(home) else None


def head(device: torch.device) -> dict[str, str]:
    """What a file belongs to; its head holds it."""
    name = torch.cuda.get_device_name(device)
    return {"format": FORMAT, "gpu": name, "triton": triton.__version__, "sources": _sources()}


def _sources() -> str:
    """Digest of the kernels' sources."""
    here, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _path(place: Path, about: dict[str, str]) -> Path:
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", about["gpu"]).strip("-")
    return place / f"tuned-{gpu}-triton-{about['triton']}-{about['sources'][:12]}.json"


def read(device: torch.device) -> dict[str, Answer]:
    """The answers in the file of a device; empty where there is none or, with one warning, where it cannot be read."""
    place = folder()
    # Most users never tune: one look at the folder, and no digest.
    if place is None or not place.is_dir() or not any(place.glob("tuned-*.json")):
        return {}
    about = head(device)
    path = _path(place, about)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        return _ignored(path, str(error))
    return _parsed(path, text, about)


def _parsed(path: Path, text: str, about: dict[str, str]) -> dict[str, Answer]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return _ignored(path, f"no JSON ({error})")
    if not isinstance(found, dict) or not isinstance(found.get("answers"), dict):
        return _ignored(path, 'need an object with "answers"')
    for name, value in about.items():
        if found.get(name) != value:
            return _ignored(path, f"{name}: got {found.get(name)!r}, need {value!r}")
    answers = {}
    for asked, one in found["answers"].items():
        row = NAMED.get((str(one.get("row")), str(one.get("architecture")))) if isinstance(one, dict) else None
        if row is None or row.keys[0].kernel not in ("general", "exact", asked.split("; ")[0]):
            return _ignored(path, f"{asked!r}: got {one!r}, need a row of the table")
        if not all(isinstance(one.get(name), float) for name in ("ms", "before")):
            return _ignored(path, f"{asked!r}: got {one!r}, need two times")
        answers[asked] = Answer(row, one["ms"], one["before"])
    return answers


def _ignored(path: Path, why: str) -> dict[str, Answer]:
    fallback.say_once(f"{path}: {why}; the file is ignored and the table's configurations are taken: remove it, or tune() anew")
    return {}


def keep(device: torch.device, found: dict[str, Answer]) -> Path:
    """Add answers to the device's file, whole or not at all, and take them from now on in this process."""
    place = folder()
    if place is None:
        raise RuntimeError("tune: got no folder to keep its answers in, need MAXSIM_CACHE or a home folder")
    about = head(device)
    path = _path(place, about)
    place.mkdir(parents=True, exist_ok=True)
    every = read(device) | found
    whole = about | {"answers": {asked: one.as_json() for asked, one in sorted(every.items())}}
    number, name = tempfile.mkstemp(dir=place, prefix=".tuned-", suffix=".json")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as out:
            json.dump(whole, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _held[device] = _rows(device, every)
    return path
