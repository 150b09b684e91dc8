"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_certified.py evaluation

Certified paths as they run on a GPU, with its search's kernels interpreted on CPU tensors: codes flow from the copy, full precision of
what is left is read by number, and run files are those of full precision.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick_interpreter  # noqa: F401 - kernels run under it
import torch
from test_certified import COUNT, NAME, WIDE, WIDTH, asked_of, brute, cut, entry_of, run_of, scored_by

from maxsim_eval.cache.copies import quantised
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.cache.selection import Selection
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.scoring import certified
from maxsim_eval.scoring.records import Records
from maxsim_eval.scoring.scoring import score_path
from maxsim_kernels import Packed, pack
from maxsim_kernels.search import device
from maxsim_kernels.search.queries import Queries
from maxsim_kernels.search.trust import Trust

CHECKED: list[str] = []
BUDGETS: list[int | None] = [None]


def begin(queries: Packed, k: int, *, memory_budget: int | None = None) -> Any:
    """The search of a GPU, where the queries are."""
    return device.DeviceSearch(Queries(queries), k, most_rescored=1.0, memory_budget=BUDGETS[-1], watched=True)


def same(documents: Any, folder: Path, excluded: Any = (-1, -1, -1, -1), name: str = NAME, **options: Any) -> Any:
    asked = asked_of(excluded)
    found = scored_by(name, documents, asked, **options)
    assert run_of(found, asked, folder / "run") == brute(documents, asked, folder / "brute", name)
    CHECKED.append("same")
    return found.counts


def evaluation() -> None:
    folder = Path(tempfile.mkdtemp())
    certified.begin_search = begin
    certified._BLOCK_BYTES = certified._LAZY_BYTES = 60 * WIDTH
    device.looked_at = lambda form, alone: Trust("", False)
    device._LEAST_DOCUMENTS, device._CELLS = 32, 64
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        entry = entry_of(folder / str(dtype), dtype)
        for size, searched in ((COUNT, 150), (13, 150), (64, 1 << 20)):
            certified._SEARCHED_BYTES = {"cpu": searched * WIDTH}
            same(entry, folder, (3, 149, -1, 77), units=cut(size))
        counts = same(entry, folder, units=cut(COUNT))
        assert counts["code_bytes"] == entry.tokens * WIDTH
        assert counts["pieces"] > 3
        assert counts["survivors"] < 4 * COUNT / 3
        assert counts["row_bytes"] <= entry.tokens * WIDTH * dtype.itemsize
        BUDGETS.append(1 << 26)
        same(entry, folder, units=cut(64))
        BUDGETS.pop()
        same(entry, folder, (3, 149, -1, 77), WIDE, units=cut(64))
    same(Selection(entry, np.arange(1, COUNT, 2, dtype=np.int64)), folder, units=[(0, 30), (30, 75)])
    for _ in range(2):
        with Records(folder / "records", {}) as records:
            same(entry, folder, units=cut(25), records=records)
        for start in (25, 125):
            (folder / "records" / f"{start}-{start + 25}.h5").unlink()
    refusals(folder)


def refusals(folder: Path) -> None:
    for value in (1e6, -1e6):
        large = entry_of(folder / f"large {value}", torch.float32, {45: torch.full((2, WIDTH), value)})
        corpus = Corpus(large, quiet=True, copies={NAME: quantised(large, "int8-document")})  # type: ignore[dict-item]
        with pytest.raises(DataError, match=f"path {NAME}: infinite score for query 'q0' and document 'd045'"):
            score_path(NAME, pack([torch.full((1, WIDTH), 1e35)] * 4), corpus, asked_of())
        CHECKED.append("refused")
    BUDGETS.append(1000)
    with pytest.raises(UsageError, match=f"path {NAME}: memory_budget: got 1000 bytes, need at least"):
        same(large, folder)
    CHECKED.append("refused")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"evaluation": evaluation}[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
