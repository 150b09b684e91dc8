"""Ways to damage bytes, lines, JSON and places, each decided by a random number generator alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ODD_NUMBERS = (
    "NaN", "nan", "Infinity", "-inf", "1e999", "-1e999", "-0", "-0.0", "0", "-1", "1.5", "1e308", "1e-400", "9" * 5000,
    "9223372036854775808", "18446744073709551616", "2147483648", "-2147483649", "99999999999999999", "999999999999999999",
    "0x10", "1_000", "٣", "true", "", "1e3", "+1", "01", "2", "3", "1e", "--1",
)  # fmt: skip
CONTROLS = (
    "\0",
    "\x01",
    "\t",
    "\n",
    "\r",
    "\x0b",
    "\x0c",
    "\x1b[2J",
    "\x1c",
    "\x7f",
    "\x85",
    "\u2028",
    "\u00a0",
    "\u202e",
    "\ufeff",
    "\ud800",
)
NOT_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xfe\xff")
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, "", "x", "\ud800", "\x1b[2J\n::error::x", -1, 0, 1, 3, 0.5, -0.0, 1e308, 2**63, [1, 2], {"a": 1},
    "NaN", [[]], "1", [None], 10**17,
)  # fmt: skip
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_@-]{2,}")
Bytes = Callable[[Random, bytes], bytes]


def _span(rng: Random, size: int, most: int = 4096) -> tuple[int, int]:
    start = rng.randrange(size + 1)
    return start, min(size, start + rng.choice((1, 2, 8, 64, 512, most)))


def flip(rng: Random, data: bytes) -> bytes:
    """Some bits the other way round."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(rng: Random, data: bytes) -> bytes:
    """A range of zeros, of ones, or of noise."""
    start, stop = _span(rng, len(data))
    return data[:start] + rng.choice((bytes(stop - start), b"\xff" * (stop - start), rng.randbytes(stop - start))) + data[stop:]


def truncate(rng: Random, data: bytes) -> bytes:
    """The end cut off, by a little or by any amount."""
    return data[: rng.choice((rng.randrange(len(data) + 1), max(len(data) - rng.randrange(1, 64), 0)))]


def extend(rng: Random, data: bytes) -> bytes:
    """Something behind the end."""
    return data + rng.choice((bytes(rng.randrange(1, 5000)), rng.randbytes(100), data))


def repeat(rng: Random, data: bytes) -> bytes:
    """A range twice."""
    start, stop = _span(rng, len(data))
    return data[:stop] + data[start:]


def remove(rng: Random, data: bytes) -> bytes:
    """A range gone."""
    start, stop = _span(rng, len(data))
    return data[:start] + data[stop:]


def swap(rng: Random, data: bytes) -> bytes:
    """Two ranges of one size in each other's place."""
    if len(data) < 4:
        return data[::-1]
    size = rng.choice((1, 8, 64, 512))
    size = min(size, len(data) // 2)
    first = rng.randrange(len(data) - 2 * size + 1)
    second = rng.randrange(first + size, len(data) - size + 1)
    return (
        data[:first]
        + data[second : second + size]
        + data[first + size : second]
        + data[first : first + size]
        + data[second + size :]
    )


def empty(_: Random, __: bytes) -> bytes:
    """Nothing."""
    return b""


BYTES: tuple[Bytes, ...] = (flip, flip, flip, overwrite, overwrite, truncate, extend, repeat, remove, swap, empty)


# Text -----------------------------------------------------------------------------------------------------------------


def _lines(change: Callable[[Random, list[bytes]], list[bytes]]) -> Bytes:
    def changed(rng: Random, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        return b"".join(change(rng, lines)) if lines else data

    changed.__name__ = change.__name__
    return changed


@_lines
def swap_lines(rng: Random, lines: list[bytes]) -> list[bytes]:
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return lines


@_lines
def repeat_line(rng: Random, lines: list[bytes]) -> list[bytes]:
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return lines


@_lines
def remove_line(rng: Random, lines: list[bytes]) -> list[bytes]:
    del lines[rng.randrange(len(lines))]
    return lines


@_lines
def join_lines(rng: Random, lines: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(lines))
    lines[place] = lines[place].rstrip(b"\n")
    return lines


@_lines
def blank_lines(rng: Random, lines: list[bytes]) -> list[bytes]:
    lines.insert(rng.randrange(len(lines) + 1), rng.choice((b"\n", b"  \n", b"\r\n", b"\t\t\n", b"\x0c\n", b"null\n", b"{}\n")))
    return lines


@_lines
def other_ends(rng: Random, lines: list[bytes]) -> list[bytes]:
    end = rng.choice((b"\r\n", b"\r", b" \n", b"\t\n", b"\n\n"))
    return [line.rstrip(b"\n") + end for line in lines]


@_lines
def separators(rng: Random, lines: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(lines))
    lines[place] = lines[place].replace(
        rng.choice((b"\t", b" ", b",", b":")), rng.choice((b"\t", b" ", b"", b"  ", b"\t\t", b";"))
    )
    return lines


def number(rng: Random, data: bytes) -> bytes:
    """One number replaced by an odd one."""
    text = data.decode("utf-8", "surrogateescape")
    found = list(_NUMBER.finditer(text))
    if not found:
        return data
    match = rng.choice(found)
    changed = text[: match.start()] + rng.choice(ODD_NUMBERS) + text[match.end() :]
    return changed.encode("utf-8", "surrogateescape")


def word(rng: Random, data: bytes) -> bytes:
    """A name with another letter, without one, in capitals, replaced by another name of the file, or very long."""
    text = data.decode("utf-8", "surrogateescape")
    found = list(_WORD.finditer(text))
    if not found:
        return data
    match, other = rng.choice(found), rng.choice(found)[0]
    old = match[0]
    new = rng.choice((old + "x", old[1:], old.upper(), other, old * 3000, old[::-1], "__proto__", "é" + old, old + " " + old))
    return (text[: match.start()] + new + text[match.end() :]).encode("utf-8", "surrogateescape")


def control(rng: Random, data: bytes) -> bytes:
    """A control character, a separator or a mark somewhere."""
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(CONTROLS).encode("utf-8", "surrogatepass") + data[place:]


def not_utf8(rng: Random, data: bytes) -> bytes:
    """Bytes that are no UTF-8."""
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(NOT_UTF8) + data[place:]


def nest(rng: Random, data: bytes) -> bytes:
    """Brackets without an end, or another encoding of the whole."""
    place = rng.randrange(len(data) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return data[:place] + b"[" * rng.choice((3, 200, 100_000)) + data[place:]
    if kind == 1:
        return data[:place] + b"[" * 300 + b"]" * 300 + data[place:]
    if kind == 2:
        return b"\xef\xbb\xbf" + data
    return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-16-be")))


TEXT: tuple[Bytes, ...] = (
    number, number, number, number, word, word, control, control, not_utf8, swap_lines, repeat_line, remove_line, join_lines,
    blank_lines, other_ends, separators, nest, flip, flip, overwrite, truncate, repeat, remove, empty,
)  # fmt: skip


# JSON -----------------------------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in rows:
        found += _places(entry, (*path, key))
    return found


def json_value(rng: Random, value: Any) -> str:
    """One entry of a JSON value replaced, renamed, removed, moved, repeated, or made a number that is none; the text of it."""
    # Every depth equally often: else nearly every case would change a per-query figure.
    places = _places(value)
    depth = rng.choice(sorted({len(path) for path in places}))
    *path, key = rng.choice([path for path in places if len(path) == depth])
    holder = value
    for step in path:
        holder = holder[step]
    kind = rng.randrange(7)
    marker = "@@odd@@"
    if kind == 0 and isinstance(holder, dict):
        holder[key + rng.choice(("x", " ", "\n", "\ud800"))] = holder.pop(key)
    elif kind == 1:
        del holder[key]
    elif kind == 2:
        holder[key] = marker
    elif kind == 3:
        entries = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        other = rng.choice(entries)
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 4 and isinstance(holder, dict):
        text = json.dumps({"@@key@@": rng.choice(ODD_VALUES)})[1:-1].replace("@@key@@", json.dumps(key)[1:-1])
        holder["@@twice@@"] = 0
        return json.dumps(value).replace('"@@twice@@": 0', text)
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(value).replace(f'"{marker}"', rng.choice(ODD_NUMBERS[:18]))


def json_entry(rng: Random, data: bytes) -> bytes:
    """`json_value` of a whole file, or of one line of many."""
    try:
        return json_value(rng, json.loads(data)).encode()
    except ValueError:
        lines = data.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        lines[place] = json_value(rng, json.loads(lines[place])).encode() + b"\n"
        return b"".join(lines)


# Places ---------------------------------------------------------------------------------------------------------------


def _folder(_: Random, path: Path) -> None:
    path.mkdir()


def _filled_folder(_: Random, path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


def _dangling(_: Random, path: Path) -> None:
    path.symlink_to("nowhere")


def _circle(_: Random, path: Path) -> None:
    path.symlink_to(path.name)


def _fifo(_: Random, path: Path) -> None:
    os.mkfifo(path)


def _socket(_: Random, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, _short(path) as name:
        made.bind(name)


def _null(_: Random, path: Path) -> None:
    path.symlink_to(os.devnull)


def _gone(_: Random, __: Path) -> None: ...


class _short:  # noqa: N801 - a context manager
    """A name of a file that is short enough for a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> str:
        self.descriptor = os.open(self.path.parent, os.O_RDONLY)
        return f"/proc/self/fd/{self.descriptor}/{self.path.name}"

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


_PLACES = (_folder, _filled_folder, _dangling, _circle, _null, _gone, _socket)


def place(rng: Random, path: Path, *, fifo: bool) -> str:
    """Put something else where the file is; its name. A fifo without a writer only where nobody may wait for one."""
    kind = rng.choice((*_PLACES, _fifo, _fifo) if fifo else _PLACES)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind(rng, path)
    return kind.__name__.strip("_")


def linked(rng: Random, path: Path) -> str:
    """The file itself elsewhere, and a link to it where it was: nothing has changed."""
    target = path.with_name(f"elsewhere-{rng.randrange(10)}")
    path.rename(target)
    path.symlink_to(target)
    return "linked"
