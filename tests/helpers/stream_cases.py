"""What tests of streams look at."""

from __future__ import annotations

import threading


def readers_alive() -> list[str]:
    """Names of threads that read blocks."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("maxsim-reader")]
