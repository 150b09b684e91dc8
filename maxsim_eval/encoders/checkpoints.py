"""Where an encoder's checkpoint is: a folder, or a hub id at a commit; and the error where it cannot be had.

A hub id becomes the folder of its snapshot, so that everything reads local files of one commit: first the small files
(configuration, tokenizer), which give name, revision and width; the weights only when something is encoded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsim_eval.errors import DataError, MaxsimEvalError, MissingPackageError, NoModelError, UsageError
from maxsim_eval.parsing import json_of

_GENERIC = {"model", "models", "checkpoint", "snapshot", "main", "transformer", "0_transformer"}
_TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model", "special_tokens_map.json", "*.tiktoken")
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "artifact.metadata")
_NOT_READ = ("onnx", "openvino", "original", "checkpoint-", ".")  # other copies of the weights, training state, hidden folders
_PATIENCE = 2.0  # seconds to wait for the hub
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".metadata", ".safetensors", ".py"}


@dataclass(frozen=True)
class Checkpoint:
    """The files of one version of a model.

    `encoder` is the name that messages use, `shown` what names the model whatever machine it lies on, `revision` the commit
    or, of a folder, a hash of the files that matter. `folder` holds at least the small files.
    """

    encoder: str
    shown: str
    revision: str
    folder: Path
    hub_id: str | None

    def read(self, name: str) -> dict[str, Any] | list[Any] | None:
        """A JSON file of the checkpoint; None where there is none.

        Raises:
            DataError: it is no JSON.
        """
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] | list[Any] = json_of(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise self.refused(f"{name} is no JSON: {error}") from error
        return found

    def settings(self, name: str) -> dict[str, Any]:
        """A JSON object of the checkpoint; empty where there is none. Raises `DataError` for anything else."""
        found = self.read(name)
        if found is not None and not isinstance(found, dict):
            raise self.refused(f"{name} holds a {type(found).__name__}, need a JSON object")
        return found or {}

    def weights(self, *, code: bool = False) -> Path:
        """The folder with the weights in it, downloaded where they are not there; safetensors where they exist.

        `code`: also the checkpoint's own Python files, which a caller runs only where the user trusts them.
        """
        if self.hub_id is None:
            return self.folder
        wanted = (*_SMALL, "*.safetensors", *(("*.py",) if code else ()))
        with _loading(self.encoder, self.hub_id, "weights", quiet=False):  # gigabytes: the client's progress bars stay
            folder = _snapshot(self.hub_id, self.revision, wanted)
            bare = [part for part in (".", *_module_folders(folder)) if not any((folder / part).glob("*.safetensors"))]
            if bare:
                names = [name for part in bare for name in (f"{part}/*.bin", f"{part}/*.bin.index.json")]
                folder = _snapshot(self.hub_id, self.revision, (*wanted, *(name.removeprefix("./") for name in names)))
        return folder

    def has_weights(self) -> bool:
        """Whether weight files are on this machine already."""
        return any(self.folder.rglob("*.safetensors")) or any(self.folder.rglob("*.bin"))

    def refused(self, reason: str) -> NoModelError:
        """The error that says why this checkpoint cannot be used, and what else can be done."""
        return NoModelError(f"encoder {self.encoder}: {reason}", what_to_do(self.encoder, self.hub_id or self.shown))

    @contextmanager
    def loading(self, what: str, verb: str = "loaded") -> Iterator[None]:
        """Quiet loading; whatever libraries raise for a missing or damaged checkpoint becomes a `DataError`."""
        with _loading(self.encoder, self.hub_id or self.shown, what, verb, quiet=verb == "loaded"):
            yield


def find_checkpoint(encoder: str, model: str, revision: str | None = None, *, wide: bool = False) -> Checkpoint:
    """The checkpoint in folder `model`, or the hub's `model`, which may end in `@revision`.

    Args:
        encoder: the encoder's name as the user gave it, for messages.
        revision: branch, tag or commit on the hub, where `model` names none; default main.
        wide: a folder's revision covers the files of every module, of the processor and of the checkpoint's code too.

    Raises:
        UsageError: no model, two revisions, or the revision of a folder. DataError: nothing there, or no network.
    """
    if not model:
        raise UsageError(f"encoder {encoder!r}: need an id or a path after the colon, for example {encoder}/path/to/checkpoint")
    if looks_like_path(model):
        if revision is not None:
            raise UsageError(f"encoder {encoder}: revision {revision!r} of a folder; only models of the hub have revisions")
        return _local(encoder, model, wide)
    hub_id, _, named = model.rpartition("@") if "@" in model else (model, "", "")
    if named and revision not in (None, named):
        raise UsageError(f"encoder {encoder}: two revisions, {named!r} in its name and {revision!r} as an option")
    with _loading(encoder, hub_id, "configuration", quiet=hub_answers()):  # without a network there are no bars to hide
        folder = _snapshot(hub_id, named or revision or "main", _SMALL)
    found = Checkpoint(encoder, hub_id, folder.name, folder, hub_id)
    if not (folder / "config.json").is_file():
        raise found.refused("config.json is missing")
    return found


def _local(encoder: str, model: str, wide: bool) -> Checkpoint:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise NoModelError(f"encoder {encoder}: there is no such folder", what_to_do(encoder, model))
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise NoModelError(
            f"encoder {encoder}: {folder / 'config.json'} is missing: not a checkpoint", what_to_do(encoder, model)
        )
    folder = folder.resolve()
    return Checkpoint(encoder, shown_name(folder), checkpoint_revision(folder, wide=wide), folder, None)


def shown_name(folder: Path) -> str:
    """The name of a checkpoint's folder, without its path, so that a checkpoint that was moved still finds its cache entries."""
    return f"{folder.parent.name}/{folder.name}" if folder.name.lower() in _GENERIC else folder.name


def looks_like_path(model: str) -> bool:
    """Whether this is a folder rather than the id of a model on the hub."""
    return model.startswith((".", "~", "/", "\\")) or model.count("/") > 1 or Path(model).expanduser().exists()


def _snapshot(hub_id: str, revision: str, wanted: tuple[str, ...]) -> Path:
    """The hub's files of these patterns; the folder's name is the commit. Without a network what was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    what: dict[str, Any] = {"revision": revision, "allow_patterns": list(wanted)}
    what["ignore_patterns"] = [f"{start}*/*" for start in _NOT_READ]
    if hub_answers():
        return Path(snapshot_download(hub_id, **what))
    try:
        return Path(snapshot_download(hub_id, local_files_only=True, **what))
    except LocalEntryNotFoundError as error:
        raise OSError(f"{_hub()[0]} cannot be reached, and {hub_id} was not downloaded before") from error


def _hub() -> tuple[str, int]:
    """Host and port of the hub."""
    found = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    return found.hostname or "huggingface.co", found.port or (80 if found.scheme == "http" else 443)


@functools.cache
def hub_answers() -> bool:
    """Whether the hub can be reached; found out in two seconds, where its own client would try for half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE")):
        return True  # a proxy, or offline on purpose: left to the client
    answered: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(OSError), socket.create_connection(_hub(), timeout=_PATIENCE):
            answered.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # looking a name up has no time limit of its own
    asking.start()
    asking.join(_PATIENCE)
    return bool(answered)


def _module_folders(folder: Path) -> list[str]:
    """Folders that `modules.json` names and that hold weights: those of projections."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json_of(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: no JSON: {error}") from error
    return [module["path"] for module in modules if str(module.get("type", "")).endswith("Dense") and module.get("path")]


# Revisions of folders --------------------------------------------------------------------------------------------------


def checkpoint_revision(folder: Path, *, wide: bool = False) -> str:
    """`sha256-` and 32 hex characters over names and contents of a local checkpoint's files."""
    digest = hashlib.sha256()
    for path in _all_files(folder) if wide else _model_files(folder):
        with open(path, "rb") as handle:
            content = hashlib.file_digest(handle, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return f"sha256-{digest.hexdigest()[:32]}"


def _model_files(folder: Path) -> list[Path]:
    """What decides the embeddings of a bare transformer: config, tokenizer, and the weights that would be read."""
    names = {folder / "config.json"}
    for pattern in (*_TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json"):
        names.update(folder.glob(pattern))
    if not any(folder.glob("*.safetensors")):
        names.update(folder.glob("*.bin"))
    return sorted(path for path in names if path.is_file())


def _all_files(folder: Path) -> list[Path]:
    """What can decide the embeddings of a model of several modules, with a processor or with its own code."""
    kept = []
    for path in folder.rglob("*"):
        if any(part.startswith(_NOT_READ) for part in path.relative_to(folder).parts[:-1]) or not path.is_file():
            continue
        if path.suffix in _SUFFIXES or (path.suffix == ".bin" and not any(path.parent.glob("*.safetensors"))):
            kept.append(path)
    return sorted(kept)


# What is said ----------------------------------------------------------------------------------------------------------


def what_to_do(encoder: str, model: str) -> list[str]:
    """What to do where the checkpoint of an encoder cannot be had, the likeliest first; `lexical` reads no pages."""
    prefix = encoder.partition(":")[0].partition("@")[0]
    pages = prefix in ("gve", "colpali")
    prefix = prefix if prefix in ("hf", "gve") else "multi-vector"
    ways = [
        f"--encoder {prefix}:/path/to/{model.rsplit('/', 1)[-1]}, the folder of a downloaded checkpoint",
        "hf download <id> --local-dir <folder>, where there is network access, downloads one",
        "evaluate.py import, for embeddings computed elsewhere",
    ]
    without = "--encoder lexical, which needs no weights" + (" (texts only)" if pages else "")
    return [*ways, without] if pages else [without, *ways]


@contextmanager
def _loading(encoder: str, model: str, what: str, verb: str = "loaded", *, quiet: bool = True) -> Iterator[None]:
    try:
        with _quiet() if quiet else nullcontext():
            yield
    except (MaxsimEvalError, MemoryError):
        raise
    # Transformers, sentence-transformers, tokenizers, the hub's client, torch and a checkpoint's own code raise anything for files
    # that are not there, damaged, of another layout, or written for another version of these libraries: also bare `Exception`.
    except Exception as error:
        if isinstance(error, ImportError) and ("PIL" in str(error) or "pillow" in str(error).lower()):
            raise MissingPackageError(f"encoder {encoder}", "pillow", "encoders") from error
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        reason = reason if len(reason) <= 300 else reason[:300] + " ..."
        raise NoModelError(
            f"encoder {encoder}: its {what} could not be {verb}: {reason}", what_to_do(encoder, model)
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no load report of transformers: what is missing is checked and said here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def require_weights(checkpoint: Checkpoint, missing: list[str]) -> None:
    """Refuse weights that a library would replace by random numbers; `missing` are their names."""
    named = sorted(name for name in missing if "pooler" not in name)  # a pooler's output is never read
    if named:
        raise checkpoint.refused(
            f"{len(named)} weights are missing, first {named[0]!r}: random numbers would take their place. The weight file "
            "belongs to another architecture than config.json says"
        )
