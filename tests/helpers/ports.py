"""A port of this machine for a server that a test starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that no process is given by chance while the block runs, nor while a child forked in it does.

    It stays bound, but is not listened at: who asks for this port and sets SO_REUSEADDR, as torch's store does, gets it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
