"""The entries of an atlas, evaluated one by one, each kept as soon as it is finished, under `<out>/entries/`.

An entry that an earlier call finished is read back, unless something that it depends on has changed, or its files are not as they
were written (SHA-256). The finished parts of an interrupted entry are not scored again (`api.evaluate`). An entry that cannot be
evaluated says why, and the others go on.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.api import evaluate
from maxsim_eval.atlas.grid import GridEntry
from maxsim_eval.cache.embeddings import Embeddings
from maxsim_eval.comparison.metrics import evaluate_run, means
from maxsim_eval.comparison.ties import mean_bounds
from maxsim_eval.data.trec import read_trec_run, write_trec_run
from maxsim_eval.environment import versions
from maxsim_eval.errors import DataError, MaxsimEvalError, UsageError
from maxsim_eval.files import delete, open_regular, write_text, writing
from maxsim_eval.first_stage.names import get_first_stage
from maxsim_eval.first_stage.stage import Texts, Tokens
from maxsim_eval.hashing import digest
from maxsim_eval.report.csv_files import CSV_FILES
from maxsim_eval.report.result_json import dump_json, load_json
from maxsim_eval.scoring.own_functions import find_paths, run_file
from maxsim_eval.scoring.paths import our_paths
from maxsim_eval.types import Run, Task
from maxsim_kernels import Packed

FORMAT = 4
RERANKER = "fused-fp32"  # not the reference path, which is made to be trusted and is slow
FOREIGN = "run:"  # before the name of a run that another engine made


@dataclass(frozen=True)
class Finished:
    """What evaluating an entry gave.

    Args:
        run: its ranking.
        per_query, metrics, ties: as of a `PathResult`.
        seconds: `search` (scores and the best of them), `store` (storing, reading back, learning), for all queries.
        document_bytes: mean bytes of a document, with everything that answering needs; None: not known.
        description: of the entry, in one line.
    """

    run: Run
    per_query: Mapping[str, Mapping[str, float]]
    metrics: Mapping[str, float]
    ties: Mapping[str, Any] | None
    seconds: Mapping[str, float]
    document_bytes: float | None
    description: str

    @property
    def depth(self) -> int:
        """Documents of its longest ranking."""
        return max(map(len, self.run.rankings.values()), default=0)


@dataclass(frozen=True)
class Setting:
    """What all entries have in common; `task` is the kept part of the `whole` task, `queries` the tokens of its queries."""

    whole: Task
    task: Task
    queries: Packed
    encoder: Any
    found: Embeddings
    metrics: Sequence[str]
    k: int
    folder: Path
    device: str
    options: Mapping[str, Any]  # further ones of `evaluate`
    quiet: bool
    done: dict[str, Finished] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Bytes of a stored token, as the cache holds it."""
        return self.found.documents.dim * self.found.documents.dtype.itemsize

    def identity(self, entry: GridEntry) -> str:
        """Digest of everything that an entry's answer depends on; what is reranked is done already, or failed."""
        base = self.done.get(entry.base)
        own = find_paths([entry.name])[entry.name].source if entry.kind == "path" and entry.name not in our_paths() else None
        facts = {
            "format": FORMAT,
            "entry": entry.name,
            "source": own,
            "base": None if base is None else _digest_of(base.run),
            "documents": self.found.documents.stamp(),
            "queries": self.found.queries.stamp(),
            "asked": list(self.task.query_ids),
            "qrels": {query: dict(row) for query, row in self.task.qrels.items()},
            "exclude_same_id": self.task.exclude_same_id,
            "k": self.k,
            "metrics": list(self.metrics),
            "device": self.device,
            "versions": versions(),
        }
        return digest(facts)


def _digest_of(run: Run) -> str:
    """Digest of rankings with scores; a query without results is left out, as from the run file that is read back."""
    found = {query: [(document, repr(score)) for document, score in ranking] for query, ranking in run.rankings.items()}
    return digest({query: digest(ranking) for query, ranking in found.items() if ranking})


def finished(entry: GridEntry, setting: Setting) -> Finished | str:
    """The result of an entry, read back or evaluated now; where it cannot be evaluated, the reason as text."""
    folder = setting.folder / "entries" / _slug(entry.name)
    identity = setting.identity(entry)
    _cut_links(folder)
    found = _kept(folder, identity)
    if found is None:
        try:
            found = _MAKERS[entry.kind](entry, setting, folder)
        except MaxsimEvalError as error:
            return str(error)
        _keep(found, folder, identity)
    setting.done[entry.name] = found
    return found


def read_foreign(paths: Sequence[Path | str], task: Task) -> list[Run]:
    """Read runs of other engines, each named by its file, and keep the rankings of the task's queries.

    Raises:
        UsageError: two files of one name: their rows could not be told apart. DataError: no such run, or it ranks none of these
            queries.
    """
    names = [f"{FOREIGN}{Path(path).stem}" for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        files = " and ".join(str(path) for path, name in zip(paths, names, strict=True) if name == twice)
        raise UsageError(f"runs: {files} would share the name {twice}, need files of different names")
    return [_read_foreign(path, name, task) for path, name in zip(paths, names, strict=True)]


def _read_foreign(path: Path | str, name: str, task: Task) -> Run:
    run = read_trec_run(path)
    known = set(task.query_ids)
    rankings = {query: _allowed(query, ranking, task) for query, ranking in run.rankings.items() if query in known}
    if not any(rankings.values()):
        raise DataError(f"{path}: ranks none of the {len(known)} queries of {task.source} {task.dataset}")
    return replace(run, name=name, rankings=rankings)


def _allowed(query: str, ranking: Iterable[tuple[str, float]], task: Task) -> list[tuple[str, float]]:
    """A ranking as scoring paths give it: where the task says so, without the document whose id is the query's."""
    return [(document, score) for document, score in ranking if not task.exclude_same_id or document != query]


def foreign(run: Run, setting: Setting) -> tuple[GridEntry, Finished]:
    """A run of another engine, as an entry."""
    found = _of_run(run, setting, {}, None, "a run of another engine")
    setting.done[run.name] = found
    return GridEntry(run.name, "path"), found


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")


# Kinds ------------------------------------------------------------------------------------------------------------------


def _scored(entry: GridEntry, setting: Setting, folder: Path) -> Finished:
    """A scoring path or a codec over the whole corpus."""
    return _evaluated(entry.name, setting, folder, setting.k, None)


def _evaluated(path: str, setting: Setting, folder: Path, k: int, candidates: Path | None) -> Finished:
    result = evaluate(
        setting.whole,
        setting.encoder,
        [path],
        k=k,
        metrics=setting.metrics,
        candidates=candidates,
        out_dir=folder,
        device=setting.device,
        quiet=setting.quiet,
        **setting.options,
    ).paths[path]
    for name in ("report.html", "report.md", "result.json", *CSV_FILES):  # the atlas is the report
        (folder / name).unlink(missing_ok=True)
    seconds = result.seconds
    return Finished(
        run=read_trec_run(folder / "runs" / run_file(path)),
        per_query=result.per_query,
        metrics=result.metrics,
        ties=result.tie_bounds,
        seconds={"search": seconds["score"] + seconds["topk"], "store": seconds["prepare"]},
        document_bytes=(result.memory or {}).get("document_bytes"),
        description=result.description,
    )


def _first_stage(entry: GridEntry, setting: Setting, folder: Path) -> Finished:
    """A first stage by itself."""
    stage, task = get_first_stage(entry.name), setting.task
    if stage.reads == "texts":
        source: Texts | Tokens = Texts(task.queries, task.documents)
    else:
        source = Tokens(setting.queries, setting.found.documents)
    spare = int(task.exclude_same_id)  # one more: the document that a query must not retrieve may be among its best
    found = stage.search(source, setting.k + spare, device=setting.device, quiet=setting.quiet)
    rankings = {}
    for row, query in enumerate(task.query_ids):
        kept = found.indices[row] >= 0
        documents = (task.document_ids[place] for place in found.indices[row][kept])
        pairs = zip(documents, found.scores[row][kept].astype(np.float32).tolist(), strict=True)
        rankings[query] = _allowed(query, pairs, task)[: setting.k]
    seconds = {"search": found.seconds["search"], "store": found.seconds["index"]}
    size = found.stored_bytes / max(1, len(task.document_ids))
    return _of_run(Run(entry.name, rankings, ordered=True), setting, seconds, size, stage.description)


def _reranked(entry: GridEntry, setting: Setting, folder: Path) -> Finished:
    """An entry's first documents, ranked again in full precision: what is lost even then was never found by the entry."""
    base = setting.done.get(entry.base)
    if base is None:
        raise DataError(f"{entry.name}: {entry.base} gave nothing to rerank")
    if entry.depth > setting.k and not entry.base.startswith(FOREIGN):
        raise DataError(f"{entry.name}: only the first {setting.k} documents of {entry.base} are kept, need --k {entry.depth}")
    first = {query: list(ranking)[: entry.depth] for query, ranking in base.run.rankings.items()}
    candidates = folder / "candidates.trec"
    write_trec_run(candidates, replace(base.run, rankings=first))
    found = _evaluated(RERANKER, setting, folder, entry.depth, candidates)
    tokens = setting.found.documents.lengths().mean() * setting.token_bytes
    return replace(
        found,
        run=replace(found.run, name=entry.name),
        seconds={"search": base.seconds.get("search", 0.0) + found.seconds["search"], "store": base.seconds.get("store", 0.0)},
        document_bytes=None if base.document_bytes is None else base.document_bytes + float(tokens),
        description=f"the first {entry.depth} of {entry.base}, ranked by {RERANKER}",
    )


_MAKERS: Mapping[str, Callable[[GridEntry, Setting, Path], Finished]] = {
    "path": _scored,
    "codec": _scored,
    "first stage": _first_stage,
    "reranked": _reranked,
}


def _of_run(run: Run, setting: Setting, seconds: Mapping[str, float], size: float | None, description: str) -> Finished:
    per_query = evaluate_run(run, setting.task.qrels, setting.metrics)
    ties = mean_bounds(run, setting.task.qrels, per_query)
    return Finished(run, per_query, means(per_query), ties, seconds, size, description)


# Keeping ----------------------------------------------------------------------------------------------------------------

_FACTS = ("per_query", "metrics", "ties", "seconds", "document_bytes", "description")
_RUN, _ENTRY = "run.trec", "entry.json"


def _cut_links(folder: Path) -> None:
    """Remove a link, not its target, in the place of an entry's folder or of its runs: nothing is to be written elsewhere.

    Raises:
        DataError: the folder of all entries is a link, or a link cannot be removed.
    """
    if folder.parent.is_symlink():
        raise DataError(
            f"{folder.parent}: is a link, need a folder of this atlas's own; remove the link, or choose another --out"
        )
    for place in (folder, folder / "runs"):
        if place.is_symlink():
            with writing(place):
                delete(place)
            _anew(place, "was a link, which is removed")


def _anew(place: Path | str, why: str) -> None:
    warnings.warn(f"{place}: {why}; the entry is evaluated anew", stacklevel=4)


def _keep(found: Finished, folder: Path, identity: str) -> None:
    """Write the run, then entry.json, with checksums of both: once that is there, the entry is complete."""
    write_trec_run(folder / _RUN, found.run)
    facts = {name: getattr(found, name) for name in _FACTS}
    facts = {"identity": identity, "run": found.run.name, "run_sha256": _sha256(folder / _RUN), **facts}
    write_text(folder / _ENTRY, dump_json({**facts, "sha256": digest(facts)}) + "\n")


def _sha256(path: Path) -> str:
    with open_regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _kept(folder: Path, identity: str) -> Finished | None:
    """What an earlier call finished; None: nothing, one of another identity or, with a warning, damaged or unreadable files."""
    try:
        return _read(folder, identity)
    except OSError as error:
        _anew(error.filename or folder, f"cannot be read ({error.strerror or error})")
    except DataError as error:
        _anew(folder, f"is damaged ({error})")
    return None


def _read(folder: Path, identity: str) -> Finished | None:
    place, path = folder / _ENTRY, folder / _RUN
    if not os.path.lexists(place):
        return None
    with open_regular(place) as handle:
        facts = load_json(handle.read(), str(place))
    if isinstance(facts, dict) and facts.get("identity", identity) != identity:
        return None  # of something else, or of an earlier version
    if not isinstance(facts, dict) or facts.pop("sha256", None) != digest(facts):
        raise DataError(f"{_ENTRY} is not as it was written: its SHA-256 differs")
    if _sha256(path) != facts["run_sha256"]:
        raise DataError(f"{_RUN} is not as it was written: its SHA-256 differs")
    run = read_trec_run(path, ordered=True)
    return Finished(run=replace(run, name=facts["run"]), **{name: facts[name] for name in _FACTS})
