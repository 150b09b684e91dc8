"""Unambiguous bytes for values: what every hash and checksum of the toolkit is taken over."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any

_LENGTH = struct.Struct("<Q").pack


def feed(running: Any, parts: Iterable[bytes]) -> None:
    """Feed byte strings to a hash, each behind its length, so that ('ab', 'c') and ('a', 'bc') differ."""
    parts = list(parts)
    running.update(b"".join(chain.from_iterable(zip(map(_LENGTH, map(len, parts)), parts, strict=True))))


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces; NaN, infinity and what is no JSON raise."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 of `canonical(value)`, as hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()
