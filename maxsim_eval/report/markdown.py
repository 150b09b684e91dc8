"""Markdown that holds text from a Result: nothing in it ends a cell, a line or an element."""

from __future__ import annotations

import re
from collections.abc import Iterable

from maxsim_eval.printing import printable


def cell(text: str) -> str:
    """Text safe inside a Markdown table cell: nothing unseen, no column or line break, no HTML, no markup."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\").replace("|", "\\|")
    text = text.replace("](", "]\\(")  # a link, or an image that is fetched when the page is looked at
    return " ".join(re.sub(r"[`*_~]", r"\\\g<0>", text).split())


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], align: str = "---") -> list[str]:
    """Lines of a table, and an empty one: the first column to the left, the others as `align` says."""
    heads = [cell(column) for column in columns]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + f" {align} |" * (len(heads) - 1)]
    return [*lines, *("| " + " | ".join(cell(one) for one in row) + " |" for row in rows), ""]
