"""ENCODERS: how an encoder's name becomes an encoder. A new one is a function and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.hf import HfEncoder
from maxsim_eval.lexical import LexicalEncoder
from maxsim_eval.types import Encoder

OPTIONS = ("device", "batch_size", "max_query_tokens", "max_document_tokens")


def _lexical(argument: str, **options: Any) -> Encoder:
    if argument:
        raise UsageError(f"encoder 'lexical:{argument}': lexical has no variants; its name is 'lexical'")
    kept = {key: value for key, value in options.items() if key in ("max_query_tokens", "max_document_tokens")}
    return LexicalEncoder(**kept)  # device and batch size make no difference to it


def _hf(argument: str, **options: Any) -> Encoder:
    return HfEncoder(argument, **options)


ENCODERS: dict[str, Callable[..., Encoder]] = {"lexical": _lexical, "hf": _hf}
"""Prefix of the name (before the colon) -> `(rest of the name, **options) -> Encoder`."""

NOT_RUN_HERE: dict[str, str] = {
    "colbertv2": "ColBERTv2",
    "colpali": "ColPali",
    "gve": "GVE",
    "multi-vector": "multi-vector checkpoints",
}
"""Names of encoders whose embeddings can be imported and cached but whose weights this version cannot run itself."""


def get_encoder(name: str, **options: Any) -> Encoder:
    """The encoder called `name`: `lexical` or `hf:<id or path>`.

    Args:
        options: device, batch_size, max_query_tokens, max_document_tokens; None means the encoder's default. An encoder
            for which an option means nothing ignores it (`lexical`: device, batch_size).

    Raises:
        UnknownNameError: no such encoder; the message offers the nearest names.
        UsageError: an encoder that can only be imported (`colbertv2`, `colpali`, `gve`, `multi-vector:<id>`), an unknown
            option, or an option out of range.
        DataError, MissingPackageError: the encoder's model or package is not there.
    """
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        raise UsageError(f"encoder {name!r}: unknown option {unknown[0]!r}. Known: {', '.join(OPTIONS)}.")
    prefix, _, argument = name.partition(":")
    if prefix in NOT_RUN_HERE:
        raise UsageError(
            f"encoder {name!r}: this version cannot run {NOT_RUN_HERE[prefix]} itself, and the cache holds no embeddings of "
            "it for this dataset. Options: import embeddings computed elsewhere (evaluate.py import ...), use --encoder "
            "lexical (no weights needed), or --encoder hf:<id or path> (any transformer checkpoint)."
        )
    if prefix not in ENCODERS:
        known = [*ENCODERS, *NOT_RUN_HERE]
        if "/" in name:
            known.append(f"hf:{name}")  # a bare hub id or path: its likely meaning
        raise UnknownNameError("encoder", name, known)
    return ENCODERS[prefix](argument, **{key: value for key, value in options.items() if value is not None})
