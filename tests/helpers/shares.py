"""Shares of what is run in several parts: `K/N` on a command line."""

from __future__ import annotations

import argparse


def share(text: str) -> tuple[int, int]:
    """`K/N` as (K - 1, N): the first place and the step."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"got {text!r}, need K/N with K from 1 to N, as 1/8")
    return int(part) - 1, int(parts)
