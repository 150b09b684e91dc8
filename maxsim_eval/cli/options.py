"""Options that several commands share, in groups, and how a command gets them: `with_options`; and what to do with them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from maxsim_eval.errors import UsageError

DataDir = Annotated[Path, typer.Option(help="Folder of datasets (BEIR layout).")]
CacheDir = Annotated[Path, typer.Option(help="Folder of the HDF5 embedding cache.")]
Split = Annotated[str | None, typer.Option(help="Split of the judgements. Default: test (a card may say otherwise).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print every table of the report.")]
Brief = Annotated[bool, typer.Option("--quiet", help="No progress bars, and one line a path.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no tables.")]
NoBars = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]

DATA = Path("datasets")
CACHE = Path("embeddings_cache")
PATHS = "fp32,fp16,int8"
READERS = 8
MOST = 2**63 - 1  # the largest count or seed: manifests and results hold 64-bit numbers


def within_64_bits(param: typer.CallbackParam, value: int | None) -> int | None:
    """An option's callback: refuses a number that results could not hold. Not typer's `min` and `max`, which `--help` would show."""
    if value is not None and abs(value) > MOST:
        raise UsageError(f"{param.opts[0]}: got {str(value)[:40]}, need a number from {-MOST} to {MOST}")
    return value


Group = Mapping[str, tuple[Any, Any]]
"""Parameter name -> its annotation (as typer takes it) and default."""


def collection(dataset: Any = inspect.Parameter.empty) -> Group:
    """The arguments that name a collection; `dataset`: the default of the second, where there is one."""
    return {
        "source": (Annotated[str, typer.Argument(help="beir, real-mm-rag, local, demo or irds.")], inspect.Parameter.empty),
        "dataset": (Annotated[str, typer.Argument(help="Name of the dataset (local: or its path).")], dataset),
    }


PLACES: Group = {"data_dir": (DataDir, DATA), "cache_dir": (CacheDir, CACHE)}
RESULTS: Group = {"as_json": (AsJson, False), "verbose": (Verbose, False), "quiet": (Brief, False)}
ANSWERS: Group = {"as_json": (AsJson, False), "quiet": (Quiet, False)}

SOURCES: Mapping[str, Group] = {
    "beir": {},
    "demo": {},
    "irds": {},
    "local": {
        "queries": (Annotated[str | None, typer.Option(help="text or pages: what is asked, in a folder of page images.")], None)
    },
    "real-mm-rag": {
        "queries": (Annotated[str | None, typer.Option(help="text or pages: what is asked.")], None),
        "rephrase": (Annotated[int | None, typer.Option(help="Wording of the questions: 0 (as written) to 3.")], None),
        "dataset_revision": (Annotated[str | None, typer.Option(help="Commit of the dataset's repository.")], None),
    },
}
"""What a source's loader takes beyond the split."""

OF_SOURCES: Group = {name: option for options in SOURCES.values() for name, option in options.items()}
"""What any of them takes, for commands whose source is an argument."""

MODEL: Group = {
    "batch_size": (
        Annotated[int | None, typer.Option(help="Texts or images that the encoder's model takes at a time.")],
        None,
    ),
    "dtype": (Annotated[str | None, typer.Option(help="What the model computes in: float32, float16, bfloat16.")], None),
    "embedding_dtype": (
        Annotated[
            str | None, typer.Option(help="What is stored: float32, float16, bfloat16. Default: as --dtype, or the card's.")
        ],
        None,
    ),
    "max_query_tokens": (Annotated[int | None, typer.Option(help="Longest query.")], None),
    "max_document_tokens": (Annotated[int | None, typer.Option(help="Longest document.")], None),
    "query_prompt": (Annotated[str | None, typer.Option(help="Put before every query.")], None),
    "document_prompt": (Annotated[str | None, typer.Option(help="Put before every document.")], None),
    "revision": (Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")], None),
    "trust_remote_code": (
        Annotated[bool, typer.Option("--trust-remote-code", help="gve: run the checkpoint's own code.")],
        False,
    ),
}
"""The encoder's options, `encoders.names.OPTIONS` but for the device; all but the batch size and trust make another cache entry."""

LIMITS: Group = {
    "limit_queries": (Annotated[int | None, typer.Option(help="Score only this many judged queries (a seeded sample).")], None),
    "limit_documents": (
        Annotated[
            int | None,
            typer.Option(help="Search only this many documents: all judged for the queries, the rest a seeded sample."),
        ],
        None,
    ),
    "limit_seed": (
        Annotated[
            int,
            typer.Option(callback=within_64_bits, help="Seed of both samples: it and the ids alone decide what is drawn."),
        ],
        0,
    ),
}

SCORING: Group = {
    "paths": (
        Annotated[
            str,
            typer.Option(
                help="Comma-separated: fp32, fused-fp32, fp16, bf16, int8, int8-document, int8-corpus, fp8, exact-int8, "
                "exact-int8-fp32, a codec (docs/atlas.md), or a function of your own as python:<module>:<function> (docs/scorers.md)."
            ),
        ],
        PATHS,
    ),
    "k": (Annotated[int, typer.Option("--k", help="Documents kept for each query.")], 100),
    "metrics": (
        Annotated[
            str | None, typer.Option(help="Comma-separated, as nDCG@10,R@100,AnyHit@10 (docs/result.md). Default: a set.")
        ],
        None,
    ),
    "device": (
        Annotated[
            str,
            typer.Option(
                help="Where texts are encoded and scores computed: auto, cpu, cuda, cuda:1, ... (torchrun: no number)"
            ),
        ],
        "auto",
    ),
    **LIMITS,
    "candidates": (
        Annotated[
            str | None,
            typer.Option(help="Rerank: score only the pairs that a TREC run lists, or bm25, bm25:1000, single, fde."),
        ],
        None,
    ),
    "memory_budget": (
        Annotated[
            str | None,
            typer.Option(help="GPU memory for documents on their way and their scores, as 8GB. Default: up to 2GiB."),
        ],
        None,
    ),
    "readers": (Annotated[int, typer.Option(help="Threads that read the cache, in each process.")], READERS),
    "verify": (
        Annotated[
            bool, typer.Option("--verify/--no-verify", help="Check stored values by their checksums while they are read.")
        ],
        True,
    ),
    "fresh": (Annotated[bool, typer.Option("--fresh", help="Forget the finished parts of an interrupted evaluation.")], False),
}


def encoder_option(default: str | None = None) -> Group:
    """`--encoder`, with the source's own default; without one in commands for any source, which ask `sources.default_encoder`."""
    text = "lexical, colbertv2, colpali, gve, multi-vector:<id or path>, hf:<id or path>, or the name embeddings were imported under."
    text += "" if default else " Default: the evaluation's."
    return {"encoder": (Annotated[str if default else str | None, typer.Option("--encoder", help=text)], default)}


def with_options(command: Callable[..., None], arguments: Group, *groups: Group) -> Callable[..., None]:
    """Give a command that takes keywords a signature of arguments and options, which is what typer reads.

    `inspect.Parameter.empty` as the default of an argument makes it a required one.
    """
    parameters = {}
    for kind, group in (
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, arguments),
        *((inspect.Parameter.KEYWORD_ONLY, g) for g in groups),
    ):
        for name, (annotation, default) in group.items():
            parameters[name] = inspect.Parameter(name, kind, default=default, annotation=annotation)
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return command


def loading_options(given: dict[str, Any], names: Group = OF_SOURCES) -> dict[str, Any]:
    """Take the sources' own options out of `given`, by the names that `load_task` has for them."""
    loaders = {"dataset_revision": "revision"}
    return {loaders.get(name, name): given.pop(name) for name in names}


def model_options(given: dict[str, Any]) -> dict[str, Any]:
    """Take the encoder's options out of `given`; those that were not named stay out."""
    taken = {name: given.pop(name) for name in MODEL}
    require_counts(taken, "batch_size", "max_query_tokens", "max_document_tokens")
    return {name: value for name, value in taken.items() if value is not None and value is not False}


def require_counts(given: Mapping[str, Any], *names: str) -> None:
    """Refuse options below 1 or beyond 64 bits, by a `UsageError`."""
    for name in names:
        if given[name] is not None and not 1 <= given[name] <= MOST:
            more = "" if given[name] < 1 else f", and {MOST} at most"
            raise UsageError(f"--{name.replace('_', '-')}: got {str(given[name])[:40]}, need 1 or more{more}")


def names_of(text: str | None) -> tuple[str, ...]:
    """The names that commas separate; commas in parentheses belong to a name."""
    return tuple(name.strip() for name in re.split(r",(?![^(]*\))", text or "") if name.strip())


def metric_names(text: str | None) -> tuple[str, ...]:
    """The names of `--metrics`; none where the option was not given."""
    names = names_of(text)
    if text is not None and not names:
        raise UsageError(f"--metrics: got {text!r}, which names none; need some, as nDCG@10,R@100,AP,RR@10")
    return names


def command_line() -> list[str]:
    """The command as it was given, without the folder the program lies in."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
