"""What a command did, and whether that is allowed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

RIGHT = "right answer"
CHANGED = "changed input"  # it says something else now, and a second reading of it would be as long as the first
REFUSED_2, REFUSED_3, GATE_NO = "refused, exit 2", "refused, exit 3", "the gate's no"
UNFORESEEN, CRASH, HANG = "traceback or exit 4", "crash", "hang"
SILENT = "silent other answer"
UNCLEAR = "not one clear line"
LEFTOVERS = "leftovers"
# Damaged values of embeddings that are scored all the same.
SILENT_VALUES = "silent damaged values"
FORBID_SILENT_VALUES = True

ALLOWED = (RIGHT, CHANGED, REFUSED_2, REFUSED_3, GATE_NO)
FORBIDDEN = (UNFORESEEN, CRASH, HANG, SILENT, UNCLEAR, LEFTOVERS)
ENDINGS = (*ALLOWED, SILENT_VALUES, *FORBIDDEN)


def forbidden(ending: str) -> bool:
    """Whether no case may end so."""
    return ending in FORBIDDEN or (ending == SILENT_VALUES and FORBID_SILENT_VALUES)


@dataclass(frozen=True)
class Case:
    """One attack: what was attacked with which seed, how, how it ended, and what was said of that."""

    target: str
    seed: int
    mutation: str
    ending: str
    said: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What `--only` takes."""
        return f"{self.target}:{self.seed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e\ud800-\udfff]|^\s*::", re.MULTILINE)
_KEPT = "not written; --accept writes it all the same"  # what the gate says of a baseline beside the checks that failed


def refusal(code: int, out: str, err: str) -> tuple[str, str]:
    """How a command ended that did not end with 0, as far as that can be seen without knowing what it read."""
    last = (err.strip().splitlines() or [""])[-1][:300]
    if "Traceback" in err or code not in (1, 2, 3):
        return UNFORESEEN, f"exit {code}: {last}"
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    if found := _OBEYED.search(out + err):
        return UNCLEAR, f"exit {code}, prints {found[0]!r}: {last}"
    if code == 1:
        named = any(line.startswith("FAIL ") for line in out.splitlines())
        lines = [line for line in lines if not line.endswith(_KEPT)]
        return (GATE_NO, "") if named and not lines else (UNCLEAR, f"exit 1 without a check that failed: {last}")
    if len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) < 15:
        return UNCLEAR, f"exit {code}, {len(lines)} lines: {err[:300]}"
    if len(lines[0]) > 5000:
        return UNCLEAR, f"exit {code}, a line of {len(lines[0])} characters: {lines[0][:150]}"
    if out:
        return UNCLEAR, f"exit {code} after an answer: {out[:100]}"
    return (REFUSED_2 if code == 2 else REFUSED_3), last
