"""`evaluate`: a task, an encoder and paths in, a Result out; every promise of its docstring, on collections one can check by hand."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maxsim_eval
from maxsim_eval import api
from maxsim_eval.api import evaluate
from maxsim_eval.comparison.metrics import DEFAULT_METRICS
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.errors import CacheError, DataError, UnknownNameError, UsageError
from maxsim_eval.report.result_json import from_json
from maxsim_eval.types import Encoder, Result, Role, Task
from maxsim_kernels import Packed, maxsim_reference, pack
from task_cases import small_task

ALL = ("fp32", "fused-fp32", "fp16", "bf16", "int8", "int8-document", "int8-corpus", "fp8")
WIDTH = 8
LOADED = (  # what a loader has said of the task below
    "said while loading",
    "test.tsv: 1 judgements name documents that corpus.jsonl lacks, first 'gone'; they stay, so those documents count as judged and "
    "never retrieved",
)


class Letters:
    """One token a word, from the word's letters; `table` gives a word another vector. Counts what it encodes."""

    name = "letters"
    revision = "1"
    dim = WIDTH

    def __init__(self, table: Mapping[str, list[float]] | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.table, self.dtype = table or {}, dtype
        self.encoded: list[tuple[Role, int]] = []
        self.prepared = 0

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {"role": role, "table": sorted(self.table), "dtype": str(self.dtype)}

    def prepare(self, documents: Sequence[Any]) -> None:
        self.prepared += len(documents)

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        self.encoded.append((role, len(items)))
        return pack([self._tokens(text) for text in items]).to(self.dtype)

    def _tokens(self, text: str) -> torch.Tensor:
        rows = [self.table.get(word) or self._vector(word) for word in text.split()]
        return torch.tensor(rows, dtype=torch.float32).reshape(-1, WIDTH)

    def _vector(self, word: str) -> list[float]:
        return np.random.default_rng([ord(letter) for letter in word]).standard_normal(WIDTH).round(3).tolist()


def task_of(**changes: Any) -> Task:
    documents = ["red fox", "blue whale sea", "", "red fox", "green frog pond lily", "sea", "fox", "red fox"]
    qrels = {"q0": {"d3": 2, "d0": 1, "d6": 0}, "q1": {"d5": 1, "gone": 1}, "q2": {"d4": 1}}
    fields = {"dataset": "animals", "qrels": qrels, "warnings": LOADED, **changes}
    return small_task(["red fox", "sea", "pond lily frog"], documents, **fields)


def run(task: Task, encoder: Encoder | str, folder: Path, paths: Sequence[str] = ("fp32", "fp16"), **options: Any) -> Result:
    options = {"k": 5, "cache_dir": folder / "cache", "quiet": True, **options}
    return evaluate(task, encoder, paths, **options)


def rankings(folder: Path, name: str) -> dict[str, list[str]]:
    read = read_trec_run(folder / "runs" / f"{name}.trec").rankings
    return {query: [document for document, _ in ranking] for query, ranking in read.items()}


def without_times(file: Path) -> dict[str, Any]:
    result = json.loads(file.read_text())
    result.pop("created")
    for path in result["paths"].values():
        for name in ("seconds", "memory"):
            path.pop(name)
    return dict(result)


def test_an_encoder_object_through_all_paths(tmp_path: Path) -> None:
    encoder = Letters()
    result = run(task_of(), encoder, tmp_path, ALL, out_dir=tmp_path / "out", command=["evaluate.py", "x"])
    assert list(result.paths) == list(ALL)
    assert encoder.encoded == [("document", 8), ("query", 3)]
    assert encoder.prepared == 8
    assert result.reference == "fp32"
    assert result.k == 5
    assert result.command == ["evaluate.py", "x"]
    assert result.encoder == {"name": "letters", "revision": "1", "dim": 8, "dtype": "float32", "origin": "encoded"}
    assert [result.task[key] for key in ("source", "dataset", "split")] == ["local", "animals", "test"]
    counts = ("queries", "query_tokens", "documents", "document_tokens", "judged_pairs")
    assert [result.task[key] for key in counts] == [3, 6, 8, 15, 6]
    assert result.task["warnings"] == [
        *LOADED,
        "k is 5: nDCG@10, nDCG@20, Recall@10, Recall@20, Recall@100, MAP@100, MRR@10 look at more documents than that, and count those "
        "that were not kept as not found; need k = 8 for the values that their names stand for",
    ]
    for name in ALL:
        # Ties by document index (d0, d3, d7 are one text), the empty d2 never found, and so on every path.
        assert rankings(tmp_path / "out", name)["q0"][:3] == ["d0", "d3", "d7"], name
        assert all("d2" not in ranking for ranking in rankings(tmp_path / "out", name).values())
        assert (result.paths[name].parity is None) == (name == "fp32")
        assert result.paths[name].run == f"runs/{name}.trec"
    assert from_json((tmp_path / "out" / "result.json").read_text()).paths.keys() == result.paths.keys()


def test_metrics_are_those_of_the_ranking(tmp_path: Path) -> None:
    result = run(task_of(), Letters(), tmp_path, ("fp32",), out_dir=tmp_path / "out")
    found = result.paths["fp32"]
    assert set(found.metrics) == set(DEFAULT_METRICS)
    assert rankings(tmp_path / "out", "fp32")["q0"][:2] == ["d0", "d3"]
    ideal, got = 2 + 1 / np.log2(3), 1 + 2 / np.log2(3)
    assert found.per_query["nDCG@10"]["q0"] == pytest.approx(got / ideal)
    assert found.per_query["Recall@100"] == {"q0": 1.0, "q1": 0.5, "q2": 1.0}  # the document that is not there: never found
    for name, values in found.per_query.items():
        assert set(values) == {"q0", "q1", "q2"}
        assert found.metrics[name] == pytest.approx(sum(values.values()) / 3)


def test_the_fp32_path_is_the_reference_bit_for_bit(tmp_path: Path) -> None:
    task, encoder = task_of(), Letters()
    run(task, encoder, tmp_path, ("fp32",), k=8, out_dir=tmp_path)
    scores = maxsim_reference(encoder.encode(task.queries, "query"), encoder.encode(task.documents, "document"))
    assert isinstance(scores, torch.Tensor)
    for query, ranking in read_trec_run(tmp_path / "runs" / "fp32.trec").rankings.items():
        for document, score in ranking:
            assert score == float(scores[task.query_ids.index(query), task.document_ids.index(document)])


@pytest.mark.filterwarnings("ignore:.*are encoded anew")
def test_parity_says_when_both_read_the_same_inputs(tmp_path: Path) -> None:
    for dtype, rounded in ((torch.float32, set()), (torch.float16, {"fp16"}), (torch.bfloat16, {"bf16"})):
        result = run(task_of(), Letters(dtype=dtype), tmp_path, ALL)
        found = {name for name in ALL[1:] if (result.paths[name].parity or {})["reference_reads_same_inputs"]}
        assert found == {"fused-fp32"} | rounded
        assert result.encoder["dtype"] == str(dtype).removeprefix("torch.")


def test_without_the_reference_there_is_no_parity(tmp_path: Path) -> None:
    result = run(task_of(), Letters(), tmp_path, ("int8", "fp16"))
    assert result.reference is None
    assert list(result.paths) == ["int8", "fp16"]
    assert all(path.parity is None for path in result.paths.values())


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(task_of(), Letters(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert {path.run for path in result.paths.values()} == {None}


def test_a_second_evaluation_encodes_nothing_and_gives_the_same(tmp_path: Path) -> None:
    run(task_of(), Letters(), tmp_path, out_dir=tmp_path / "one")
    again = Letters()
    run(task_of(), again, tmp_path, out_dir=tmp_path / "two")
    assert again.encoded == []
    assert again.prepared == 0
    assert without_times(tmp_path / "one" / "result.json") == without_times(tmp_path / "two" / "result.json")
    for name in ("fp32", "fp16"):
        files = [(tmp_path / folder / "runs" / f"{name}.trec").read_bytes() for folder in ("one", "two")]
        assert files[0] == files[1]


def test_the_same_id_rule_is_applied_and_reported(tmp_path: Path) -> None:
    ids = ["q0", "d1", "d2", "d3", "q2", "d5", "d6", "d7"]  # two documents carry the ids of queries
    task = task_of(document_ids=ids, qrels={"q0": {"d3": 1}, "q1": {"d5": 1}, "q2": {"d1": 1}})
    for exclude in (False, True):
        out = tmp_path / str(exclude)
        result = run(replace(task, exclude_same_id=exclude), Letters(), tmp_path, out_dir=out)
        assert result.task["exclude_same_id"] is exclude
        for name in ("fp32", "fp16"):
            found = rankings(out, name)
            assert ("q0" in found["q0"]) is not exclude
            assert ("q2" in found["q2"]) is not exclude
            assert "q0" in found["q2"] + found["q1"], "the document is excluded for its own query only"
        assert (result.paths["fp16"].parity or {})["mismatched_finite"] == 0


def test_k_beyond_the_corpus_is_clamped_and_said_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = run(task_of(), Letters(), tmp_path, k=100)
    assert [str(warning.message) for warning in said] == ["k was clamped to the 8 documents of the corpus"]
    assert said[0].filename == __file__
    assert result.k == 8
    assert result.task["warnings"] == [*LOADED, "k was clamped to the 8 documents of the corpus"]


def test_k_of_the_corpus_is_not_clamped(tmp_path: Path) -> None:
    assert run(task_of(), Letters(), tmp_path, k=8).task["warnings"] == list(LOADED)


def test_metrics_within_k_are_not_warned_of(tmp_path: Path) -> None:
    result = run(task_of(), Letters(), tmp_path, k=np.int64(5), metrics=["nDCG@5", "MAP", "AnyHit@3"], out_dir=tmp_path / "out")
    assert result.task["warnings"] == list(LOADED)


def test_misfits_of_a_task_made_in_python_are_said(tmp_path: Path) -> None:
    qrels = {"q0": {"d3": 0}, "q1": {"d5": 1, "gone": 1}}
    assert run(task_of(qrels=qrels, warnings=()), Letters(), tmp_path, k=8).task["warnings"] == [
        LOADED[1].replace("test.tsv", "qrels").replace("corpus.jsonl", "document_ids"),
        "qrels: 1 of 2 judged queries have no relevant document, first 'q0'; they count 0 in trec_eval's metrics, and AnyHit@k leaves "
        "them out",
        "qrels: 1 of 3 queries have no judgement, first 'q2'; they are searched, and no metric counts them",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_ids": ["q0", "q1", "q1"]}, "query_ids: 'q1' stands there 2 times, need each id once"),
        ({"document_ids": ["d0", *(f"d{n}" for n in range(7))]}, "document_ids: 'd0' stands there 2 times"),
        ({"document_ids": list(range(8))}, "document_ids: got 0, a int, need texts"),
        ({"document_ids": [f"d\u00a0{n}" for n in range(8)]}, r"out_dir: document id 'd\\xa00' is empty or holds white space"),
        ({"query_ids": ["q0", "q 1", "q2"]}, "out_dir: query id 'q 1' is empty or holds white space"),
        ({"qrels": {"q0": {"d0": 1}, "Q1": {"d1": 1}}}, "1 of 2 judged queries are not among the 3 query_ids, first 'Q1'"),
        ({"qrels": {"q0": {"d0": 0}}}, "none of the 1 judged queries has a relevant document"),
        ({"qrels": {"q0": {"gone": 1}}}, "none of the 1 judged documents is in document_ids"),
        ({"qrels": {"q0": {"d0": float("nan")}}}, "document 'd0': relevance nan, need a whole number"),
    ],
)
def test_a_task_that_would_go_wrong_silently_is_refused_at_once(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run(task_of(), Letters(), tmp_path, out_dir=tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    encoder = Letters()
    with pytest.raises(DataError, match=message):
        run(task_of(**changes), encoder, tmp_path, out_dir=tmp_path / "out")
    assert encoder.encoded == []
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")} == before


def test_without_a_folder_ids_may_hold_white_space(tmp_path: Path) -> None:
    task = task_of(document_ids=[f"d\u00a0{n}" for n in range(8)], qrels={"q0": {"d\u00a00": 1}})
    assert run(task, Letters(), tmp_path, k=8).paths["fp32"].metrics["nDCG@1"] == 1.0


def test_limited_queries_share_the_cache_and_keep_their_scores(tmp_path: Path) -> None:
    whole = run(task_of(), Letters(), tmp_path, out_dir=tmp_path / "whole")
    encoder = Letters()
    some = run(task_of(), encoder, tmp_path, limit_queries=2, out_dir=tmp_path / "some")
    assert encoder.encoded == []
    assert some.task["queries"] == some.task["limits"]["queries"]["after"] == 2
    assert whole.task["limits"] is None
    kept = list(some.paths["fp32"].per_query["nDCG@10"])
    assert some.task["judged_pairs"] == sum(len(task_of().qrels[query]) for query in kept)
    for name in ("fp32", "fp16"):
        everything = rankings(tmp_path / "whole", name)
        assert rankings(tmp_path / "some", name) == {query: everything[query] for query in kept}
    assert run(task_of(), encoder, tmp_path, limit_queries=50).task["queries"] == 3


def test_scores_kept_in_a_scratch_file_give_the_same_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(task_of(), Letters(), tmp_path, ("fp32", "int8"), out_dir=tmp_path / "one")
    monkeypatch.setattr(api, "_IN_MEMORY_BYTES", 0)
    run(task_of(), Letters(), tmp_path, ("fp32", "int8"), out_dir=tmp_path / "two")
    assert without_times(tmp_path / "one" / "result.json") == without_times(tmp_path / "two" / "result.json")


def test_very_many_pairs_are_sampled_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_ALL_PAIRS", 10)
    monkeypatch.setattr(api, "_SAMPLED_QUERIES", 2)
    result = run(task_of(), Letters(), tmp_path)
    parity = result.paths["fp16"].parity or {}
    assert parity["spearman"]["sampled"] is True
    assert parity["spearman"]["queries"] == 2
    assert parity["identical_order"]["queries"] == 3
    assert set(result.paths["fp16"].per_query["nDCG@10"]) == {"q0", "q1", "q2"}


def test_metrics_of_ones_choice(tmp_path: Path) -> None:
    assert set(run(task_of(), Letters(), tmp_path, metrics=["nDCG@3"]).paths["fp32"].metrics) == {"nDCG@3"}
    with pytest.raises(UsageError, match="metric"):
        run(task_of(), Letters(), tmp_path, metrics=["nDGC@3"])


def test_generators_of_paths_and_metrics(tmp_path: Path) -> None:
    paths: Any = (name for name in ("fp32", "fp16"))
    result = run(task_of(), Letters(), tmp_path, paths, metrics=(f"nDCG@{k}" for k in (1, 3)))
    assert [(name, *path.metrics) for name, path in result.paths.items()] == [
        ("fp32", "nDCG@1", "nDCG@3"),
        ("fp16", "nDCG@1", "nDCG@3"),
    ]


@pytest.mark.parametrize("given", [None, (), [torch.zeros(1, WIDTH)]], ids=["nothing", "tuple", "list"])
def test_an_encoder_that_returns_no_tokens(given: Any, tmp_path: Path) -> None:
    encoder = Letters()
    encoder.encode = lambda items, role: given  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=f"encoder 'letters': encode returned {type(given).__name__}, need a Packed"):
        run(task_of(), encoder, tmp_path)


def test_the_package_offers_evaluate_and_load_task(tmp_path: Path) -> None:
    task = maxsim_eval.load_task("demo", "small", data_dir=tmp_path)
    result = maxsim_eval.evaluate(task, "lexical", ["fp32"], k=3, limit_queries=2, cache_dir=tmp_path, quiet=True)
    assert result.task["queries"] == 2
    with pytest.raises(AttributeError, match="evaluat'"):
        maxsim_eval.evaluat  # noqa: B018


def test_empty_documents_only(tmp_path: Path) -> None:
    task = task_of(documents=[""] * 8)
    result = run(task, Letters(), tmp_path, ALL, out_dir=tmp_path / "out")
    assert set(result.paths["int8"].metrics.values()) == {0.0}
    text = (tmp_path / "out" / "result.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["paths"]["fp16"]["parity"]["spearman"]["mean"] is None
    assert (tmp_path / "out" / "runs" / "fp32.trec").read_text() == ""


@pytest.mark.parametrize("what", ["documents", "queries"])
def test_a_task_of_nothing_is_refused_by_name(tmp_path: Path, what: str) -> None:
    ids = {"documents": "document_ids", "queries": "query_ids"}[what]
    with pytest.raises(DataError, match=f"holds no {what}, need at least one"):
        run(replace(task_of(), **{what: [], ids: []}), Letters(), tmp_path)


def test_an_empty_query_finds_the_first_documents(tmp_path: Path) -> None:
    run(task_of(queries=["red fox", "", "frog"]), Letters(), tmp_path, ALL, out_dir=tmp_path)
    for name in ALL:
        assert rankings(tmp_path, name)["q1"] == ["d0", "d1", "d2", "d3", "d4"]


@pytest.mark.parametrize(
    ("paths", "options", "error", "message"),
    [
        ([], {}, UsageError, "paths: got none"),
        (["fp32", "itn8"], {}, UnknownNameError, "unknown path 'itn8'. Did you mean 'int8'"),
        (["fp32"], {"k": 0}, UsageError, "k: got 0, need 1 or more"),
        (["fp32"], {"k": -3}, UsageError, "k: got -3, need 1 or more"),
        (["fp32"], {"limit_queries": 0}, UsageError, "got 0, need 1 or more"),
        (["fp32"], {"k": 2.5}, UsageError, "k: got 2.5, need a whole number"),
        (["fp32"], {"k": True}, UsageError, "k: got True, need a whole number"),
        (["fp32"], {"readers": None}, UsageError, "readers: got None, need a whole number"),
        (["fp32"], {"memory_budget": "8GB"}, UsageError, "memory_budget: got '8GB', need a whole number"),
        (["fp32"], {"limit_documents": 2.5}, UsageError, "limit_documents: got 2.5, need a whole number"),
        ("fp32", {}, UsageError, r"paths: got 'fp32', need a list of names: \['fp32'\]"),
        (["fp32"], {"metrics": "nDCG@10"}, UsageError, r"metrics: got 'nDCG@10', need a list of names: \['nDCG@10'\]"),
        (["fp32"], {"metrics": None}, UsageError, "metrics: got None, need a list of names"),
        (["fp32"], {"device": "gpu"}, UsageError, "device 'gpu' cannot be used"),
        (["fp32"], {"device": "cuda:99"}, UsageError, "device 'cuda:99' cannot be used"),
    ],
)
def test_arguments_that_cannot_work(
    paths: list[str], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(task_of(), Letters(), tmp_path, paths, out_dir=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"metrics": ["nDGC@3"]}, {"limit_queries": 0}], ids=["metrics", "limit_queries"])
def test_arguments_are_checked_before_hours_of_work(options: dict[str, Any], tmp_path: Path) -> None:
    encoder = Letters()
    with pytest.raises(UsageError):
        run(task_of(), encoder, tmp_path, **options)
    assert encoder.encoded == []


def test_an_encoder_whose_weights_are_not_here_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(DataError, match=r"evaluate\.py import, for embeddings computed elsewhere"):
        run(task_of(), "colbertv2", tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("k", [5, 8])
def test_a_score_that_is_no_number_stops_everything_before_anything_is_written(k: int, tmp_path: Path) -> None:
    table = {"fox": [1e20] * WIDTH, "sea": [1e20] * WIDTH, "whale": [-1e20] * WIDTH}
    task = task_of(queries=["red", "sea whale", "frog"])
    with pytest.raises(DataError, match="path fp32: NaN score for query 'q1' and document 'd5'"):
        run(task, Letters(table), tmp_path, ("fp32",), k=k, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_fp16_stops_everything_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="70000 does not fit FP16"):
        run(task_of(), Letters({"lily": [70000.0] * WIDTH}), tmp_path, ("fp32", "fp16"), out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_embeddings_that_are_no_numbers_are_never_stored(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'d4' holds NaN or infinity"):
        run(task_of(), Letters({"lily": [float("nan")] * WIDTH}), tmp_path, out_dir=tmp_path / "out")
    assert not list(tmp_path.rglob("*.h5"))
    assert not (tmp_path / "out").exists()


def test_an_encoder_with_two_widths(tmp_path: Path) -> None:
    class Uneven(Letters):
        def encode(self, items: Sequence[Any], role: Role) -> Packed:
            tokens = super().encode(items, role)
            return tokens if role == "document" else Packed(tokens.values[:, :4].contiguous(), tokens.offsets)  # type: ignore[arg-type]

    with pytest.raises(CacheError, match="dim 4"):
        run(task_of(), Uneven(), tmp_path, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DataError, match=r"out.*cannot be written"):
        run(task_of(), Letters(), tmp_path, out_dir=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a file"


def test_the_environment_names_no_person_and_no_place(tmp_path: Path) -> None:
    result = run(task_of(), Letters(), tmp_path, ("fp32",), out_dir=tmp_path / "out")
    assert {"python", "torch", "threads", "device", "cpu"} <= set(result.environment)
    text = (tmp_path / "out" / "result.json").read_text() + (tmp_path / "out" / "report.md").read_text()
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
