"""`evaluate` of corpora that have several units: where finished ones are kept, what makes them worthless, reranking."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsim_eval import api
from maxsim_eval.api import evaluate
from maxsim_eval.data.trec import read_trec_run, write_trec_run
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.gate.checking import baseline_of, check
from maxsim_eval.processes import agreement
from maxsim_eval.report.result_json import from_json, to_json
from maxsim_eval.report.writing import to_markdown
from maxsim_eval.scoring import job, stream, units
from maxsim_eval.types import Result, Role, Run, Task
from maxsim_kernels import Packed, pack
from task_cases import small_task

pytestmark = pytest.mark.slow

WIDTH = 8
Scored = list[tuple[str, int]]
WRITTEN = ["metrics.csv", "per_query.csv", "report.html", "report.md", "result.json", "runs"]


class Kinds:
    """Exact embeddings, a few kinds of them: ties everywhere."""

    name, revision, dim = "kinds", "1", WIDTH

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {}

    def prepare(self, documents: Sequence[Any]) -> None: ...

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        rows = [np.random.default_rng(int(text)).integers(-4, 5, (int(text) % 7, WIDTH)) / 4 for text in items]
        return pack([torch.from_numpy(row).float() for row in rows])


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LEAST_BYTES", 600)


def task_of(**changes: Any) -> Task:
    qrels = {f"q{n}": {f"d{n * 3}": 1, f"d{n * 7 + 1}": 2} for n in range(5)}
    texts = [str((n * n) % 11 + 20) for n in range(80)]
    return small_task(["13", "5", "8", "27", "4"], texts, **{"dataset": "kinds", "qrels": qrels, **changes})


def candidates(folder: Path, lists: dict[str, list[str]]) -> Path:
    rankings = {query: [(name, float(-place)) for place, name in enumerate(names)] for query, names in lists.items()}
    write_trec_run(folder / "first.trec", Run("bm25", rankings, ordered=False))
    return folder / "first.trec"


def run(folder: Path, out: str | None = "out", paths: Sequence[str] = ("fp32", "int8", "fp16"), **options: Any) -> Result:
    options = {"task": task_of(), "k": 10, **options}
    task = options.pop("task")
    if "candidates" in options:
        options["candidates"] = candidates(folder, options["candidates"])
    where = None if out is None else folder / out
    return evaluate(task, Kinds(), paths, cache_dir=folder / "cache", out_dir=where, quiet=True, **options)


def every_second(first: int) -> dict[str, list[str]]:
    """A list for each query; all lists together hold the whole corpus, whichever document is the first."""
    return {f"q{n}": [f"d{document}" for document in range((n + first) % 2, 80, 2)] for n in range(5)}


def facts(result: Result) -> Any:
    found = json.loads(to_json(result))
    for name in ("created", "environment"):
        found.pop(name)
    for path in found["paths"].values():
        for name in ("seconds", "memory", "run"):
            path.pop(name)
    return found


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Scored:
    """(path, first document) of every unit that is really scored."""
    found: Scored = []
    score = stream._Stream.score

    def watched(self: Any, start: int, *rest: Any) -> Any:
        found.append((self.name, start))
        return score(self, start, *rest)

    monkeypatch.setattr(stream._Stream, "score", watched)
    return found


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when `count` units were scored."""
    score, seen = stream._Stream.score, [0]

    def stopping(self: Any, *arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] > count:
            raise KeyboardInterrupt
        return score(self, *arguments)

    monkeypatch.setattr(stream._Stream, "score", stopping)


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 14, **options: Any) -> set[str]:
    """An evaluation that was stopped; the parts it left."""
    with monkeypatch.context() as patch:
        stop_after(count, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, **options)
    return {f"{path.parent.name}/{path.name}" for path in (folder / "out" / ".partial").glob("*/*.h5")}


def test_parts_are_kept_while_it_runs_and_gone_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: Scored
) -> None:
    need = facts(run(tmp_path, "need"))
    everything = len(scored)
    assert everything % 3 == 0
    assert everything > 24
    held = interrupted(tmp_path, monkeypatch)
    assert len(held) == 14
    assert not (tmp_path / "out" / "result.json").exists()
    scored.clear()
    assert facts(run(tmp_path)) == need
    assert len(scored) == everything - 14
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == WRITTEN
    for name in ("fp32", "int8", "fp16"):
        one, other = ((tmp_path / out / "runs" / f"{name}.trec").read_bytes() for out in ("need", "out"))
        assert one == other


@pytest.mark.parametrize(
    ("name", "before", "options"),
    [
        ("k", {}, {"k": 9}),
        ("queries", {}, {"task": task_of(queries=["13", "5", "8", "27", "3"])}),
        ("documents", {}, {"task": task_of(documents=[str((n * n) % 11 + 21) for n in range(80)])}),
        ("limits", {}, {"limit_queries": 4}),
        ("excluded", {}, {"task": task_of(document_ids=["q1", *(f"d{n}" for n in range(1, 80))], exclude_same_id=True)}),
        ("candidates", {"candidates": every_second(0)}, {"candidates": every_second(1)}),
        ("parity", {"paths": ["fp32"], "count": 5}, {"paths": ["fp32", "int8"]}),
        ("verified", {"verify": False}, {}),
        ("fresh", {}, {"fresh": True}),
    ],
)
def test_parts_of_another_evaluation_are_not_used(
    name: str, before: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: Scored
) -> None:
    need = facts(run(tmp_path, "need", **{key: value for key, value in options.items() if key != "fresh"}))
    everything = len(scored)
    assert interrupted(tmp_path, monkeypatch, **before)
    scored.clear()
    assert facts(run(tmp_path, **options)) == need
    assert len(scored) == everything


def test_what_changes_no_number_does_not_make_parts_worthless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: Scored
) -> None:
    held = interrupted(tmp_path, monkeypatch, paths=("fp32", "int8"))
    scored.clear()
    run(tmp_path, paths=("bf16", "int8", "fp32"), readers=1, memory_budget=64 << 20, metrics=["nDCG@3"], command=["other"])
    done = {f"{path}/{start}" for path, start in scored}
    assert not {name.partition("-")[0] for name in held} & done


@pytest.mark.parametrize("what", ["threads", "torch"])
def test_parts_of_another_machine_are_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: Scored
) -> None:
    interrupted(tmp_path, monkeypatch)
    environment = agreement.environment
    monkeypatch.setattr(agreement, "environment", lambda device: {**environment(device), what: "another"})
    scored.clear()
    run(tmp_path)
    assert scored[0] == ("fp32", 0)


def test_parts_of_another_precision_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: Scored) -> None:
    """TF32 is a setting of torch's, which FP32 products on a GPU follow."""
    interrupted(tmp_path, monkeypatch)
    monkeypatch.setattr(agreement, "_precision", lambda: ["tf32", "none"])
    scored.clear()
    run(tmp_path)
    assert scored[0] == ("fp32", 0)


def test_a_failed_unit_leaves_the_parts_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: Scored) -> None:
    need, everything, leave = facts(run(tmp_path, "need")), len(scored), stream._Unit.leave
    scored.clear()

    def refuse(unit: Any) -> None:
        if len(scored) > 5:
            raise DataError("a unit that cannot be scored")
        leave(unit)

    with monkeypatch.context() as patch:
        patch.setattr(stream._Unit, "leave", refuse)
        with pytest.raises(DataError, match="cannot be scored"):
            run(tmp_path)
    assert len(list((tmp_path / "out").rglob("*.h5"))) == 5
    scored.clear()
    assert facts(run(tmp_path)) == need
    assert len(scored) == everything - 5


def test_a_small_evaluation_writes_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, None, ["fp32"])  # fills the cache, which has a lock of its own
    monkeypatch.setattr(units, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr("maxsim_eval.scoring.records.Records.put", lambda *_: pytest.fail("a record was written"))
    monkeypatch.setattr("filelock.FileLock.acquire", lambda *_, **__: pytest.fail("a lock was taken"))
    run(tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == WRITTEN


def test_leftovers_of_a_large_evaluation_go_with_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    monkeypatch.setattr(units, "LEAST_BYTES", 1 << 20)
    run(tmp_path)
    assert not (tmp_path / "out" / ".partial").exists()


@pytest.mark.parametrize("out", ["out", None])
def test_score_rows_in_files_give_the_same_parity(out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = facts(run(tmp_path, "need"))
    monkeypatch.setattr(api, "_IN_MEMORY_BYTES", 0)
    for least in (600, 1 << 20):
        monkeypatch.setattr(units, "LEAST_BYTES", least)
        assert facts(run(tmp_path, out)) == need


def test_a_full_disk_is_said_and_what_was_kept_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need, fsync = facts(run(tmp_path, "need")), os.fsync

    def full(descriptor: int) -> None:
        if len(list((tmp_path / "out").rglob("[0-9]*.h5"))) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CacheError, match=r"fp32/.*\.h5: the disk is full"):
            run(tmp_path)
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(left) == 6
    assert all(name.endswith(".h5") and not name.startswith(".") for name in left)
    assert facts(run(tmp_path)) == need


def test_nothing_is_kept_for_parity_without_a_second_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    put = job.Records.put
    monkeypatch.setattr(job.Records, "put", lambda self, *rest: (kept.append(rest[3] is not None), put(self, *rest)))
    run(tmp_path, paths=["fp32"])
    assert not any(kept)
    run(tmp_path, paths=["int8", "fp16"])
    assert not any(kept)
    run(tmp_path, paths=["fp32", "fp16"])
    assert sum(kept) > 10


HOLD = "import sys, filelock\nwith filelock.FileLock(sys.argv[1]):\n    print('held', flush=True)\n    sys.stdin.read()"


def test_two_evaluations_do_not_write_one_folder(tmp_path: Path) -> None:
    lock = tmp_path / "out" / ".lock"
    lock.parent.mkdir(parents=True)
    words = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DataError, match="another command is writing there"):
            run(tmp_path)
        other.kill()
    run(tmp_path)


def test_arguments(tmp_path: Path) -> None:
    for options in ({"readers": 0}, {"memory_budget": 0}):
        with pytest.raises(UsageError, match="got 0, need 1 or more"):
            run(tmp_path, **options)


# Reranking ------------------------------------------------------------------------------------------------------------


def test_reranking_everything_is_the_evaluation_itself(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", ("fp32", "int8", "int8-corpus", "fp8"))
    listed = {query: list(task_of().document_ids) for query in task_of().query_ids}
    found = run(tmp_path, "out", ("fp32", "int8", "int8-corpus", "fp8"), candidates=listed)
    assert found.task["candidates"]["pairs"] == 5 * 80
    for name in whole.paths:
        one, other = (read_trec_run(tmp_path / out / "runs" / f"{name}.trec").rankings for out in ("whole", "out"))
        assert one == other, name
        assert found.paths[name].metrics == whole.paths[name].metrics
        assert found.paths[name].parity == whole.paths[name].parity


class Louder(Kinds):
    """One kind of document is much larger than the others, and sets the corpus's scale."""

    name = "louder"

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        return pack(
            [row * (5.0 if text == "24" else 0.37) for row, text in zip(super().encode(items, role), items, strict=True)]
        )


def test_reranking_keeps_the_scale_of_the_corpus(tmp_path: Path) -> None:
    """What one scale for the corpus gives a pair does not depend on which pairs are listed."""
    task, folders = task_of(), {"cache_dir": tmp_path / "cache", "quiet": True}
    evaluate(task, Louder(), ["int8-corpus"], k=80, out_dir=tmp_path / "whole", **folders)
    whole = {query: dict(found) for query, found in read_trec_run(tmp_path / "whole/runs/int8-corpus.trec").rankings.items()}
    quiet = {name for name, text in zip(task.document_ids, task.documents, strict=True) if text != "24"}
    listed = candidates(tmp_path, {query: [name for name in found if name in quiet][:3] for query, found in whole.items()})
    evaluate(task, Louder(), ["int8-corpus"], k=3, out_dir=tmp_path / "out", candidates=listed, **folders)
    for query, ranking in read_trec_run(tmp_path / "out/runs/int8-corpus.trec").rankings.items():
        assert {name: whole[query][name] for name, _ in ranking} == dict(ranking)


def test_other_files_beside_the_runs_stay(tmp_path: Path) -> None:
    (tmp_path / "out" / "runs").mkdir(parents=True)
    kept = [tmp_path / "out" / "runs" / name for name in ("bm25.trec", "notes.txt")]
    for path in kept:
        path.write_text("mine")
    run(tmp_path, paths=("fp16", "int8"))
    run(tmp_path, paths=("fp16",))
    assert [path.read_text() for path in kept] == ["mine", "mine"]
    assert sorted(path.name for path in (tmp_path / "out" / "runs").iterdir()) == ["bm25.trec", "fp16.trec", "notes.txt"]


def test_a_budget_too_small_for_the_corpus_scale_is_a_wrong_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need at least"):
        run(tmp_path, paths=("int8-corpus",), memory_budget=1 << 20)


def test_only_listed_pairs_are_retrieved_and_the_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {f"q{n}": [f"d{(n * 5 + m * m) % 80}" for m in range(9)] for n in range(4)}
    with pytest.warns(UserWarning, match="1 of the task's 5 queries have none"):
        found = run(tmp_path, candidates=lists)
    everything = {query: set(names) for query, names in lists.items()}
    for name in ("fp32", "int8"):
        rankings = read_trec_run(tmp_path / "out" / "runs" / f"{name}.trec").rankings
        assert set(rankings) == set(lists)
        for query, ranking in rankings.items():
            assert {document for document, _ in ranking} <= everything[query]
            assert len(ranking) == 9 - sum(int(task_of().documents[int(name[1:])]) % 7 == 0 for name in everything[query])
    facts_ = found.task["candidates"]
    assert facts_["name"] == "bm25"
    assert facts_["queries_without"] == 1
    assert found.task["documents"] == 80
    assert "RERANKED: 36 candidates of run 'bm25'" in to_markdown(found)
    assert from_json(to_json(found)).task["candidates"] == facts_
    assert (found.paths["int8"].parity or {})["mismatched_finite"] == 0
    with pytest.warns(UserWarning, match="have none"):
        assert interrupted(tmp_path, monkeypatch, 3, candidates=lists)
    with pytest.warns(UserWarning, match="have none"):
        assert facts(run(tmp_path, candidates=lists)) == facts(found)


def test_the_gate_tells_reranking_from_searching(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole")
    every = {query: list(task_of().document_ids) for query in task_of().query_ids}
    some = run(tmp_path, "some", candidates=every)
    other = run(tmp_path, "other", candidates={**every, "q0": every["q0"][1:]})
    for result, baseline, fits in (
        (whole, whole, True), (some, some, True), (whole, some, False), (some, whole, False), (other, some, False)
    ):  # fmt: skip
        (finding,) = [one for one in check(result, baseline_of(baseline)) if one.what == "baseline fits: candidates"]
        assert finding.ok is fits
        assert (finding.found == finding.needed) is fits


def test_a_result_with_candidates_that_are_not_so_is_refused(tmp_path: Path) -> None:
    every = {query: list(task_of().document_ids) for query in task_of().query_ids}
    text = to_json(run(tmp_path, None, ["fp32"], candidates=every))
    found = json.loads(text)
    for wrong in (3, {}, {**found["task"]["candidates"], "sha256": None}, {**found["task"]["candidates"], "pairs": "9"}):
        found["task"]["candidates"] = wrong
        with pytest.raises(DataError, match="candidates"):
            from_json(json.dumps(found))
