"""Peers, and scorers of other libraries: the modules they are imported by, and whether they are installed."""

from __future__ import annotations

import argparse
import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from measure.names import FLASH, LIK

PEERS = {FLASH: "flash_maxsim", LIK: "late_interaction_kernels"}
SCORERS = {"PyLate": "pylate.scores", "colpali-engine": "colpali_engine.utils.processing_utils"}  # of libraries that people use


def load(peer: str, part: str = "") -> Any:
    """A peer's or a scorer's module, or the reason why there is none."""
    try:
        return importlib.import_module((PEERS | SCORERS)[peer] + part)
    except ImportError as error:
        return f"not installed ({error})"


def versions() -> dict[str, str]:
    """Versions of both peers ("not installed" too), and of the scorers that are installed."""
    found = {}
    for peer in (*PEERS, *SCORERS):
        try:
            found[peer] = version(peer)
        except PackageNotFoundError:
            if peer in PEERS:
                found[peer] = "not installed"
    return found


def asked(parser: argparse.ArgumentParser, text: str) -> tuple[str, ...]:
    """The peers of `--peers`: names by comma, or none; ends the program with a usage message for another name."""
    found = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in found if name not in PEERS]
    if unknown:
        parser.error(f"--peers: got {', '.join(unknown)}, need some of {', '.join(PEERS)}, or none")
    return found
