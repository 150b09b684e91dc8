"""Dataset cards: one small TOML file per dataset, `cards/<source>/<name>.toml`, with what is known about it beforehand.

A card says where a set comes from, what its archive's checksum is, which split is evaluated by convention, and how many
documents and queries it must hold: data that changed is noticed. Adding a set is adding a file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from maxsim_eval.errors import DataError, UnknownNameError

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "title": str,
    "homepage": str,
    "url": str,
    "md5": str,
    "split": str,
    "licence": str,
    "documents": int,
    "queries": int,
    "judgements": int,
    "relevance": str,
    "exclude_same_id": bool,
    "metrics": list,
    "subsets": dict,
}


@dataclass(frozen=True)
class Card:
    """What is known about a dataset beforehand. Empty strings and None mean: not published, or not certain.

    `documents`, `queries` and `judgements` are expected counts, the latter two of the default `split`. `subsets` names the
    parts of a collection (`cqadupstack/android`), each with its own card through `load_card`; the whole cannot be loaded.
    """

    source: str
    name: str
    title: str
    split: str = "test"
    homepage: str = ""
    url: str = ""
    md5: str = ""
    licence: str = ""
    documents: int | None = None
    queries: int | None = None
    judgements: int | None = None
    relevance: str = ""
    exclude_same_id: bool = False
    metrics: tuple[str, ...] = ()
    subsets: tuple[str, ...] = ()


def _parse(source: str, origin: str, text: str) -> tuple[Card, dict[str, dict[str, Any]]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"card {origin}: not TOML: {error}") from None
    for key, value in values.items():
        if key not in _FIELDS:
            raise DataError(f"card {origin}: unknown field {key!r}. Known: {', '.join(_FIELDS)}.")
        if not isinstance(value, _FIELDS[key]) or (isinstance(value, bool) and _FIELDS[key] is int):
            raise DataError(f"card {origin}: {key} is {value!r}, need {_FIELDS[key]}")
    for key in ("name", "title"):
        if not values.get(key):
            raise DataError(f"card {origin}: {key!r} is missing")
    subsets = values.pop("subsets", {})
    values["metrics"] = tuple(values.get("metrics", ()))
    return Card(source=source, subsets=tuple(subsets), **values), subsets


@cache
def _cards(source: str) -> dict[str, Card]:
    folder = resources.files(__package__) / source
    cards: dict[str, Card] = {}
    if not folder.is_dir():
        return cards
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if not file.name.endswith(".toml"):
            continue
        card, subsets = _parse(source, f"{source}/{file.name}", file.read_text(encoding="utf-8"))
        if file.name != f"{card.name}.toml":
            raise DataError(f"card {source}/{file.name}: its name is {card.name!r}, need the name of the file")
        cards[card.name] = card
        for part, counts in subsets.items():
            cards[f"{card.name}/{part}"] = replace(
                card,
                name=f"{card.name}/{part}",
                title=f"{card.title}: {part}",
                documents=counts.get("documents"),
                queries=counts.get("queries"),
                judgements=counts.get("judgements"),
                subsets=(),
            )
    return cards


def known(source: str) -> list[str]:
    """Names of the datasets of `source` that have a card, parts of collections included, sorted."""
    return sorted(_cards(source))


def load_card(source: str, name: str) -> Card:
    """The card of one dataset.

    Raises:
        UnknownNameError: no such card; the message offers the nearest names.
        DataError: a card file that is not TOML or has unknown, missing or mistyped fields.
    """
    cards = _cards(source)
    if name not in cards:
        raise UnknownNameError(f"{source} dataset", name, cards)
    return cards[name]
