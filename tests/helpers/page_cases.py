"""Looking things up in docs/benchmarks.md: its tables by name, a cell by row and column, what a pointer of the map points at."""

from __future__ import annotations

from typing import Any

import page
from tables import cells


def shown(book: Any) -> dict[str, Any]:
    """The page's tables by name."""
    return dict(page.named(page.sections(book)))


def text_at(table: Any, row: str, head: str) -> str:
    """The text of a cell."""
    (found,) = [held for held in table.rows if cells.text_of(held[0]) == row]
    return str(cells.text_of(found[list(table.heads).index(head)]))


def figure(found: Any, keys: list[str]) -> Any:
    """What stands at these keys (`tables.cells.keys_of`) of a results file."""
    for key in keys:
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found
