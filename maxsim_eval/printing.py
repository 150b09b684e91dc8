"""How names from outside (datasets, ids, paths, files) are shown: on a terminal, in a log that a CI reads, in JSON on a stream.

Such a name may hold anything: line ends, sequences that control a terminal, marks that turn the reading direction, commands that
GitHub and Azure take out of a log (`::error::`, `##[group]`), halves of surrogate pairs. Print one only through these functions.
"""

from __future__ import annotations

import re

from rich.text import Text

# Control characters, line and paragraph separators, marks of direction and other invisible ones, halves of surrogate pairs.
# Not the two joiners (U+200C, U+200D), which words of several languages and emoji are spelt with.
_UNSEEN = (
    "\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_HIDDEN = re.compile(f"[\x00-\x1f{_UNSEEN}]")
# A line that begins with `::` is a command to GitHub's runner, and `##[` is one anywhere (Azure: also `##vso[`). A table may fold a
# name anywhere, so both are broken wherever they stand.
_ANYWHERE = r"(?<=#)#(?=\[|vso\[)"
_COMMAND = re.compile(rf"(?<=:):|{_ANYWHERE}")
_HIDDEN_IN_JSON = re.compile(f"[{_UNSEEN}]|{_ANYWHERE}")


def printable(text: str) -> str:
    """The text on one line, safe to print: invisible characters and commands are written as Python's escapes."""
    text = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return _COMMAND.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def shown(text: str, style: str = "") -> Text:
    """`printable` for rich: no markup, no emoji names."""
    return Text(printable(text), style=style)


def printable_json(text: str) -> str:
    """JSON text, safe to print: the same value, with JSON's escapes for invisible characters and commands; line ends stay."""
    return _HIDDEN_IN_JSON.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def text_of(error: BaseException) -> str:
    """What an error says; its type's name where it says nothing, or fails even at that."""
    try:
        return str(error) or type(error).__name__
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - whatever a foreign `__str__` raises
        return f"{type(error).__name__} (which fails to say what it is)"
