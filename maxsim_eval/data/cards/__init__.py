"""Dataset cards: one small TOML file per dataset, `cards/<source>/<name>.toml`, with what is known about it beforehand.

A card says where a set comes from, what its archive's checksum is, which split is evaluated by convention, how many documents
and queries it must hold (data that changed is noticed), and what the paper measured on it. Adding a set is adding a file; a
local dataset may bring its own as `card.toml` in its folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from maxsim_eval.errors import DataError, UnknownNameError
from maxsim_eval.parsing import toml_of

_FIELDS: dict[str, type] = {
    "name": str,
    "title": str,
    "homepage": str,
    "url": str,
    "repository": str,
    "revision": str,
    "md5": str,
    "split": str,
    "licence": str,
    "documents": int,
    "queries": int,
    "judgements": int,
    "relevance": str,
    "exclude_same_id": bool,
    "dtype": str,
    "metrics": list,
    "subsets": dict,
    "paper": list,
    "paper_caveat": str,
}
_PAPER_FIELDS: dict[str, type] = {
    "encoder": str,
    "path": str,
    "metric": str,
    "value": float,
    "table": str,
    "queries": int,
    "documents": int,
}
_SUBSET_FIELDS: dict[str, type] = {"documents": int, "queries": int, "judgements": int}
_SHAPES = {
    "url": (re.compile(r"https?://\S+"), "an http(s) address"),
    "homepage": (re.compile(r"https?://\S+"), "an http(s) address"),
    "repository": (re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"), "<owner>/<name> of a Hugging Face dataset"),
    "revision": (re.compile(r"[0-9a-f]{40}"), "a commit, 40 hex digits"),
    "md5": (re.compile(r"[0-9a-f]{32}"), "32 hex digits"),
    "split": (re.compile(r"[^/\\\s]+"), "one word without slashes"),
    "dtype": (re.compile(r"float16|bfloat16|float32"), "float16, bfloat16 or float32"),
}


@dataclass(frozen=True)
class PaperFigure:
    """One number the paper gives for a set: `metric` is our name of the paper's own definition (`AnyHit@10`, `nDCG-exp@5`).

    `path`: `fp32` (the paper's baseline), `fused` (its FP16 kernel) or `int8`. `queries` and `documents`: of the paper's run,
    None where it does not say. `table`: the label of the table in the paper.
    """

    encoder: str
    path: str
    metric: str
    value: float
    table: str
    queries: int | None = None
    documents: int | None = None


@dataclass(frozen=True)
class Card:
    """What is known about a dataset beforehand. Empty strings and None mean: not published, or not certain.

    `documents`, `queries` and `judgements` are expected counts, the latter two of the default `split`. `subsets` names the
    parts of a collection (`cqadupstack/android`), each with its own card through `load_card`; the whole cannot be loaded.
    `url` and `md5` are of an archive, `repository` and `revision` of a Hugging Face dataset. `dtype` is what embeddings of the set
    are stored in by default (float16 for large sets; empty: what the encoder yields). `metrics` are those people report, `paper`
    the paper's figures, to be read with `paper_caveat`.
    """

    source: str
    name: str
    title: str
    split: str = "test"
    homepage: str = ""
    url: str = ""
    repository: str = ""
    revision: str = ""
    md5: str = ""
    licence: str = ""
    documents: int | None = None
    queries: int | None = None
    judgements: int | None = None
    relevance: str = ""
    exclude_same_id: bool = False
    dtype: str = ""
    metrics: tuple[str, ...] = ()
    subsets: tuple[str, ...] = ()
    paper: tuple[PaperFigure, ...] = ()
    paper_caveat: str = ""


def _check(where: str, values: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    for key, value in values.items():
        if key not in fields:
            raise DataError(f"card {where}: unknown field {key!r}. Known: {', '.join(fields)}.")
        kind = (int, float) if fields[key] is float else fields[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and fields[key] is not bool):
            raise DataError(f"card {where}: {key} is {value!r}, need {fields[key].__name__}")
        if isinstance(value, int) and value < 0:
            raise DataError(f"card {where}: {key} is {value}, need 0 or more")
        if key in _SHAPES and value != "" and not _SHAPES[key][0].fullmatch(str(value)):
            raise DataError(f"card {where}: {key} is {value!r}, need {_SHAPES[key][1]}")


def _figure(where: str, row: Any) -> PaperFigure:
    if not isinstance(row, dict):
        raise DataError(f"card {where}: {row!r}, need a table")
    _check(where, row, _PAPER_FIELDS)
    missing = [key for key in ("encoder", "path", "metric", "value", "table") if key not in row]
    if missing:
        raise DataError(f"card {where}: {missing[0]!r} is missing")
    if not 0 <= row["value"] <= 1:
        raise DataError(f"card {where}: value is {row['value']}, need 0 to 1")
    return PaperFigure(**{**row, "value": float(row["value"])})


def _parse(source: str, origin: str, text: str) -> tuple[Card, dict[str, dict[str, int]]]:
    try:
        values = toml_of(text)
    except ValueError as error:
        raise DataError(f"card {origin}: not TOML: {error}") from None
    _check(origin, values, _FIELDS)
    for key in ("name", "title"):
        if not values.get(key):
            raise DataError(f"card {origin}: {key!r} is missing")
    subsets = values.pop("subsets", {})
    for part, counts in subsets.items():
        if not isinstance(counts, dict):
            raise DataError(f"card {origin}: subset {part!r} is {counts!r}, need a table of counts")
        _check(f"{origin}, subset {part!r}", counts, _SUBSET_FIELDS)
    metrics = tuple(values.pop("metrics", ()))
    if not all(isinstance(name, str) for name in metrics):
        raise DataError(f"card {origin}: metrics are {list(metrics)!r}, need a list of names")
    figures = (_figure(f"{origin}, paper row {number}", row) for number, row in enumerate(values.pop("paper", ()), start=1))
    card = Card(source=source, subsets=tuple(subsets), metrics=metrics, paper=tuple(figures), **values)
    if card.paper and not card.paper_caveat:
        raise DataError(f"card {origin}: figures of the paper without 'paper_caveat', which says how to read them")
    return card, subsets


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
                paper=(),
                paper_caveat="",
            )
    return cards


def known(source: str) -> list[str]:
    """Names of the datasets of `source` that have a card, parts of collections included, sorted."""
    return sorted(_cards(source))


def public(source: str) -> list[str]:
    """As `known`, without collections that can only be evaluated in their parts."""
    return [name for name, card in sorted(_cards(source).items()) if not card.subsets]


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


def read_card(path: Path, source: str) -> Card:
    """The card in the folder of a local dataset.

    Raises:
        DataError: as `load_card`; or a card with subsets, which a single folder cannot have; or a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"card {path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"card {path}: not UTF-8: {error.reason} at byte {error.start}") from None
    card, subsets = _parse(source, str(path), text)
    if subsets:
        raise DataError(f"card {path}: has subsets, need the card of one dataset")
    return card
