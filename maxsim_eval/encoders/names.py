"""ENCODERS: how an encoder's name becomes an encoder. A new one is a function and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxsim_eval.encoders.gve import GveEncoder
from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
from maxsim_eval.errors import UnknownNameError, UsageError
from maxsim_eval.types import Encoder

OPTIONS = (
    "device",
    "batch_size",
    "dtype",
    "embedding_dtype",
    "max_query_tokens",
    "max_document_tokens",
    "query_prompt",
    "document_prompt",
    "revision",
    "trust_remote_code",
)
_NO_DIFFERENCE = ("device", "batch_size")  # to embeddings that no model computes
ONE_DTYPE = ("lexical",)  # encoders that have no choice of dtypes

COLBERTV2 = "colbert-ir/colbertv2.0"
COLBERTV2_REVISION = "c1e84128e85ef755c096a95bdb06b47793b13acf"
COLPALI = "vidore/colpali-v1.2-hf"  # transformers' own layout of vidore/colpali-v1.2
COLPALI_REVISION = "main"  # no commit of it is certain here; the one that main means is recorded and part of the key


def _lexical(argument: str, **options: Any) -> Encoder:
    if argument:
        raise UsageError(f"encoder 'lexical:{argument}': lexical has no variants; its name is 'lexical'")
    kept = {key: value for key, value in options.items() if key not in _NO_DIFFERENCE}
    for option in kept:
        if option not in ("max_query_tokens", "max_document_tokens"):
            raise UsageError(f"encoder 'lexical': option {option!r} means nothing to it; it runs no model")
    return LexicalEncoder(**kept)


def _hf(argument: str, **options: Any) -> Encoder:
    return HfEncoder(argument, **_without_code("hf", options))


def _multi_vector(argument: str, **options: Any) -> Encoder:
    return MultiVectorEncoder(argument, **_without_code("multi-vector", options))


def _colbertv2(argument: str, **options: Any) -> Encoder:
    return _named("colbertv2", argument, COLBERTV2, {"revision": COLBERTV2_REVISION, **options})


def _colpali(argument: str, **options: Any) -> Encoder:
    return _named("colpali", argument, COLPALI, {"revision": COLPALI_REVISION, "dtype": "bfloat16", **options})


def _named(name: str, argument: str, model: str, options: dict[str, Any]) -> Encoder:
    if argument:
        raise UsageError(f"encoder '{name}:{argument}': {name} has no variants; for another model use multi-vector:{argument}")
    return MultiVectorEncoder(model, name=name, **_without_code(name, options))


def _gve(argument: str, **options: Any) -> Encoder:
    return GveEncoder(argument, **options) if argument else GveEncoder(name="gve", **options)


def _without_code(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options without `trust_remote_code`, which only `gve` has."""
    if options.pop("trust_remote_code", False):
        raise UsageError(f"encoder {name!r}: trust_remote_code is for gve only; {name} never runs code of a checkpoint")
    return options


ENCODERS: dict[str, Callable[..., Encoder]] = {
    "lexical": _lexical,
    "hf": _hf,
    "multi-vector": _multi_vector,
    "colbertv2": _colbertv2,
    "colpali": _colpali,
    "gve": _gve,
}
"""Prefix of the name (before the colon) -> `(rest of the name, **options) -> Encoder`."""


def get_encoder(name: str, *, default_dtype: str | None = None, **options: Any) -> Encoder:
    """The encoder called `name`.

    `lexical`; `hf:<id or path>` (any transformer); `multi-vector:<id or path>` (any late-interaction checkpoint that
    sentence-transformers loads); `colbertv2` and `colpali`, which are names of two of those; `gve` or `gve:<id or path>`.
    A hub id may end in `@<branch, tag or commit>`, and so may `colbertv2`, `colpali` and `gve`.

    Args:
        default_dtype: what embeddings are stored in where the options name neither a dtype nor an embedding_dtype, and the
            encoder has a choice (`lexical` has none); None: the encoder's own.
        options: the names in `OPTIONS`; None means the encoder's default. device (not where scores are computed: where the
            model runs) and batch_size make no difference to what is cached; all others but trust_remote_code do. `lexical`
            ignores device and batch_size. An option that means nothing to an encoder is refused.

    Raises:
        UnknownNameError: no such encoder; the message offers the nearest names.
        UsageError: an unknown option, or an option out of range.
        DataError, MissingPackageError: the encoder's model or package is not there; the message says what to do.
    """
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        raise UsageError(f"encoder {name!r}: unknown option {unknown[0]!r}. Known: {', '.join(OPTIONS)}.")
    given = {key: value for key, value in options.items() if value is not None}
    prefix, _, argument = name.partition(":")
    if prefix not in ENCODERS and prefix.partition("@")[0] in ("colbertv2", "colpali", "gve"):
        prefix, _, revision = prefix.partition("@")
        if argument or not revision:
            raise UsageError(f"encoder {name!r}: need {prefix}@<branch, tag or commit>")
        if given.get("revision", revision) != revision:
            raise UsageError(f"encoder {name!r}: two revisions, that of its name and {given['revision']!r} as an option")
        given["revision"] = revision
    if prefix not in ENCODERS:
        known = list(ENCODERS)
        if "/" in name:
            known += [f"hf:{name}", f"multi-vector:{name}"]  # a bare hub id or path: its likely meanings
        raise UnknownNameError("encoder", name, known)
    if default_dtype is not None and prefix not in ONE_DTYPE and not given.keys() & {"dtype", "embedding_dtype"}:
        given["embedding_dtype"] = default_dtype
    return ENCODERS[prefix](argument, **given)
