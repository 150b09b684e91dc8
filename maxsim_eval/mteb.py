"""mteb: a model for `mteb.evaluate` that scores by one of our paths, mteb's tasks as Tasks, results in mteb's form.

mteb is an optional package (`pip install 'maxsim-eval[mteb]'`), imported only when something here is used.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxsim_eval.api import evaluate
from maxsim_eval.data.assembling import Part, assemble
from maxsim_eval.data.beir import Judgements
from maxsim_eval.data.items import PackedTexts, Pages
from maxsim_eval.data.trec import read_trec_run, write_trec_run
from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.report.result_json import read_result
from maxsim_eval.scoring.candidates import Candidates, read_candidates
from maxsim_eval.scoring.own_functions import Chosen, find_paths, run_file
from maxsim_eval.types import Encoder, Result, Run, Task

__all__ = ["MaxSimModel", "load_mteb_task", "write_mteb_results"]

SOURCE = "mteb"


class MaxSimModel:
    """A model for `mteb.evaluate` (mteb's `SearchProtocol`): one of our encoders, scored by one path.

    Embeddings go through the cache, so another path of the same task encodes nothing. Of tasks that rerank, only the candidates
    that they list are scored.

    Args:
        encoder, encoder_options, device, cache_dir, memory_budget, quiet: as of `maxsim_eval.evaluate`; mteb's `encode_kwargs` are
            for its own encoders.
        path: the scoring path: a name, or a function of your own (docs/scorers.md).
        name: what mteb calls the model, `organisation/model`; default made from encoder and path.
    """

    def __init__(
        self,
        encoder: Encoder | str,
        path: Chosen = "fp16",
        *,
        name: str | None = None,
        encoder_options: Mapping[str, Any] | None = None,
        device: str = "auto",
        cache_dir: Path | str = "embeddings_cache",
        memory_budget: int | None = None,
        quiet: bool = True,
    ) -> None:
        self._path = next(iter(find_paths((path,))))
        called = encoder if isinstance(encoder, str) else encoder.name
        self._options: dict[str, Any] = {
            "encoder": encoder,
            "paths": (path,),
            "encoder_options": encoder_options,
            "device": device,
            "cache_dir": cache_dir,
            "memory_budget": memory_budget,
            "quiet": quiet,
        }
        revision = None if isinstance(encoder, str) else encoder.revision
        self.mteb_model_meta = _meta(name or f"maxsim-eval/{_plain(called)}-{_plain(self._path)}", revision)
        self._corpus: Any = None

    def index(self, corpus: Any, **_: Any) -> None:
        """Keep the corpus for `search`."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Query id -> document id -> score of the best `top_k` documents, or of the best of its candidates."""
        if self._corpus is None:
            raise UsageError("mteb: search before index; mteb.evaluate calls both")
        asked, corpus = _side(queries, "queries"), _side(self._corpus, "corpus")
        task = Task(
            SOURCE, task_metadata.name, _split(hf_split, hf_subset), asked.ids, asked.items, corpus.ids, corpus.items, qrels={}
        )
        with tempfile.TemporaryDirectory(prefix="maxsim-eval-") as held:
            folder = Path(held)
            candidates, k = None, min(top_k, len(corpus.ids))
            if top_ranked is not None:
                candidates = folder / "candidates.trec"
                k = min(top_k, _write_lists(candidates, top_ranked, asked.ids))
            evaluate(task, k=k, metrics=(), out_dir=folder / "out", candidates=candidates, **self._options)
            run = read_trec_run(folder / "out" / "runs" / run_file(self._path))
        self._corpus = None
        return {query: dict(run.rankings.get(query, ())) for query in asked.ids}


def load_mteb_task(
    task: Any, split: str | None = None, subset: str = "default", *, write_candidates: Path | str | None = None
) -> Task:
    """A retrieval task of mteb as a Task, for `maxsim_eval.evaluate`.

    A task that reranks says which documents each query may retrieve. A Task cannot hold that, so it is written as a TREC
    run, to be given to `evaluate` as `candidates`.

    Args:
        task: a name of mteb's, or a task of your own (`mteb.abstasks.AbsTaskRetrieval`).
        split, subset: as mteb names them; the split may be left out where the task has one.
        write_candidates: of a task that reranks, and of no other: the file to write, which is replaced if it is there.

    Raises:
        UsageError: no retrieval task; a split or subset that is not there; a task that reranks without `write_candidates`, or the
            other way round. DataError: data that cannot be had, or cannot be evaluated. MissingPackageError: mteb is not installed.
    """
    held = _task(task)
    split = split or _only("split", held, list(held.eval_splits))
    data = _data(held, split, subset)
    if held.skip_first_result:
        raise UsageError(
            f"mteb task {held.metadata.name!r}: leaves the first result of every query out, which no path here does"
        )
    lists = data.get("top_ranked")
    if lists is not None and write_candidates is None:
        raise UsageError(
            f"mteb task {held.metadata.name!r}: reranks lists of its own, which have to be handed to the evaluation; need "
            "write_candidates=FILE, the TREC run to write them to, then evaluate(..., candidates=FILE)"
        )
    if lists is None and write_candidates is not None:
        raise UsageError(
            f"mteb task {held.metadata.name!r}: searches its whole corpus and has no lists; leave write_candidates out"
        )
    loaded = _loaded(held, split, subset, data)
    if lists is not None and write_candidates is not None:
        _write_lists(write_candidates, lists, loaded.query_ids)
    return loaded


def _loaded(held: Any, split: str, subset: str, data: Mapping[str, Any]) -> Task:
    qrels = {str(query): {str(name): int(value) for name, value in row.items()} for query, row in data["relevant_docs"].items()}
    return assemble(
        SOURCE,
        held.metadata.name,
        _split(split, subset),
        f"mteb task {held.metadata.name}",
        Judgements({query: row for query, row in qrels.items() if row}),
        _side(data["queries"], "queries"),
        _side(data["corpus"], "corpus"),
        exclude_same_id=held.ignore_identical_ids,
        provenance={"mteb": importlib.import_module("importlib.metadata").version("mteb"), **held.metadata.dataset},
    )


def write_mteb_results(
    folder: Path | str, task: Any, out_dir: Path | str, *, name: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """Write an evaluation of a `load_mteb_task` task in the form of mteb's results; mteb scores the runs itself.

    Args:
        folder: of a report (`result.json`, `runs/`).
        task: the same task; its `eval_splits` must be the split that was evaluated.
        out_dir: a cache of mteb's results (`mteb.ResultCache`): `results/<model>/<revision>/<task>.json`.
        name, revision: what to call the model, `organisation/model`; the path is added to its name.

    Returns:
        path -> mteb's `TaskResult`.

    Raises:
        UsageError: an evaluation of another task or split, of other candidates than the task's, or with fewer documents a query than
            mteb measures. DataError: no runs, or data that cannot be had.
    """
    folder, held = Path(folder), _task(task)
    result = read_result(folder / "result.json")
    _check_whole(result, held)
    split, mteb = _only("split", held, list(held.eval_splits)), _mteb()
    found = {}
    for path, kept in result.paths.items():
        if kept.run is None or not (folder / kept.run).is_file():
            raise DataError(f"{folder}: holds no run of path {path!r}, need the report of an evaluation with out_dir")
        called = f"{name or 'maxsim-eval/' + _plain(str(result.encoder['name']))}-{_plain(path)}"
        model = _Replayed(read_trec_run(folder / kept.run), _meta(called, revision or result.encoder.get("revision") or None))
        scored = mteb.evaluate(
            model,
            held,
            cache=mteb.ResultCache(out_dir),
            overwrite_strategy="always",
            co2_tracker=False,
            show_progress_bar=False,
        )
        found[path] = scored.task_results[0]
        assert split in found[path].scores
    return found


@dataclass
class _Replayed:
    """An existing run as a model for mteb: `search` gives its rankings."""

    run: Run
    mteb_model_meta: Any

    def index(self, corpus: Any, **_: Any) -> None:
        """Do nothing: the run exists already."""

    def search(self, queries: Any, **_: Any) -> dict[str, dict[str, float]]:
        return {str(query): dict(self.run.rankings.get(str(query), ())) for query in queries["id"]}


def _mteb() -> Any:
    try:
        return importlib.import_module("mteb")
    except ModuleNotFoundError as error:
        raise MissingPackageError("maxsim_eval.mteb", error.name or "mteb", "mteb") from None


def _task(task: Any) -> Any:
    mteb = _mteb()
    if isinstance(task, str):
        try:
            task = mteb.get_task(task)
        except KeyError as error:
            raise UsageError(f"mteb: {' '.join(str(error.args[0]).split())}") from None
    if not isinstance(task, importlib.import_module("mteb.abstasks").AbsTaskRetrieval):
        raise UsageError(f"mteb: {type(task).__name__} is no retrieval task (AbsTaskRetrieval)")
    return task


def _data(held: Any, split: str, subset: str) -> Mapping[str, Any]:
    """Queries, corpus, judgements and perhaps lists of a task, loaded."""
    name = held.metadata.name
    try:
        held.load_data()
    except OSError as error:  # of the network, the Hub and the disk
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise DataError(
            f"mteb task {name!r}: its data cannot be loaded ({type(error).__name__}: {first}); need "
            f"{held.metadata.dataset.get('path')!r} from the Hugging Face Hub, or a copy in its cache"
        ) from error
    held.convert_v1_dataset_format_to_v2(num_proc=None)
    for what, wanted, there in (("subset", subset, held.dataset), ("split", split, held.dataset.get(subset, {}))):
        if wanted not in there:
            raise UsageError(f"mteb task {name!r}: no {what} {wanted!r}, only {', '.join(there) or 'none'}")
    data: Mapping[str, Any] = held.dataset[subset][split]
    return data


def _write_lists(file: Path | str, lists: Mapping[str, Sequence[str]], queries: Iterable[str]) -> int:
    """Write the candidates of these queries as a TREC run; the number of different documents."""
    known = {str(query): row for query, row in lists.items()}
    listed = {query: [(str(name), 0.0) for name in known.get(query) or ()] for query in queries}
    write_trec_run(file, Run("mteb", listed, ordered=False))
    return len({name for row in listed.values() for name, _ in row})


def _candidates(held: Any, split: str, subset: str) -> Candidates | None:
    """The candidates of a task that reranks, as an evaluation reads them; None: the whole corpus is searched."""
    if _data(held, split, subset).get("top_ranked") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="maxsim-eval-") as folder:
        file = Path(folder) / "candidates.trec"
        return read_candidates(file, load_mteb_task(held, split, subset, write_candidates=file))


def _meta(name: str, revision: str | None) -> Any:
    _mteb()
    meta = importlib.import_module("mteb.models").ModelMeta
    given = {"name": name, "revision": revision, "model_type": ["late-interaction"], "framework": ["PyTorch"]}
    return meta.create_empty(overwrites={key: value for key, value in given.items() if value is not None})


def _check_whole(result: Result, task: Any) -> None:
    """Refuse an evaluation of another task, or of a part of it: mteb would count what was not searched as not found."""
    split = _only("split", task, list(task.eval_splits))
    got = (result.task["source"], result.task["dataset"], result.task["split"])
    subset = _only("subset", task, list(task.hf_subsets) or ["default"])
    need = (SOURCE, task.metadata.name, _split(split, subset))
    if got != need:
        raise UsageError(f"mteb: got an evaluation of {'/'.join(got)}, need one of {'/'.join(need)}")
    limits = result.task.get("limits")
    if limits:
        raise UsageError(f"mteb: the evaluation left documents or queries out ({limits}), need the whole task")
    deepest = min(max(task.k_values), _longest(result, task, split, subset))
    if result.k < deepest:
        raise UsageError(f"mteb: the evaluation kept {result.k} documents a query, need k={deepest} for mteb's metrics")


def _longest(result: Result, task: Any, split: str, subset: str) -> int:
    """The most documents that a query may retrieve; refuses an evaluation with other candidates than the task's."""
    lists, reranked = _candidates(task, split, subset), result.task.get("candidates")
    if (reranked or {}).get("sha256") != (lists and lists.sha256):
        got = f"of the candidates {reranked['name']!r}" if reranked else "of the whole corpus"
        need = "one of the whole corpus, without candidates"
        if lists is not None:
            need = "one of the lists that the task reranks: load_mteb_task(..., write_candidates=FILE), evaluate(..., candidates=FILE)"
        raise UsageError(f"mteb task {task.metadata.name!r}: got an evaluation {got}, need {need}")
    return int(result.task["documents"]) if lists is None else int(np.diff(lists.offsets).max())


def _only(what: str, task: Any, names: Sequence[str]) -> str:
    if len(names) != 1:
        raise UsageError(f"mteb task {task.metadata.name!r} has {len(names)} {what}s, need one: {', '.join(names)}")
    return names[0]


def _split(split: str, subset: str) -> str:
    return split if subset == "default" else f"{subset}-{split}"


def _plain(name: str) -> str:
    """A name in characters that names of models and of folders may hold."""
    prefix, _, rest = name.partition(":")
    rest = Path(rest).name if rest.startswith((".", "~", "/")) else rest
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, (prefix, rest))))


def _side(rows: Any, what: str) -> Part:
    """Ids and texts or page images of mteb's queries or corpus, by mteb's rules: a title goes before its text, an instruction after
    its query."""
    columns, ids = set(rows.column_names), [str(name) for name in rows["id"]]
    if "image" in columns:
        texts = "text" in columns and any(text for text in rows["text"])
        if texts:
            raise UsageError(f"mteb: the {what} hold texts and images together, need one kind")
        return Part(ids, Pages(ids, _images(rows)), what)
    if "text" not in columns:
        raise UsageError(f"mteb: the {what} hold {', '.join(sorted(columns))}, need text or image")
    before, after = "title" if what == "corpus" else "", "instruction" if what == "queries" else ""
    return Part(ids, PackedTexts([_text(row, before, after, what) for row in rows]), what)


def _text(row: Mapping[str, Any], before: str, after: str, what: str) -> str:
    if not isinstance(row["text"], str):
        raise UsageError(f"mteb: the {what} hold {type(row['text']).__name__} as text (a conversation?), need one text each")
    text = " ".join(filter(None, (row.get(before), row["text"], row.get(after))))
    return text.strip() if what == "corpus" else text


def _images(rows: Any) -> Callable[[int], bytes]:
    """A function: row -> bytes of its image file, not decoded."""
    image = importlib.import_module("datasets").Image
    raw = rows.select_columns(["image"]).cast_column("image", image(decode=False))

    def read(row: int) -> bytes:
        held = raw[row]["image"]
        return held["bytes"] if held["bytes"] is not None else Path(held["path"]).read_bytes()

    return read
