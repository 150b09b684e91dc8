"""`maxsim_eval.mteb` and mteb itself: the same task scored by mteb's own model and by ours, results in mteb's files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mteb", reason="mteb is not installed here: test_environments.py runs this file")
import mteb
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

import datasets
import tiny_checkpoints
from maxsim_eval import evaluate
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.mteb import MaxSimModel, load_mteb_task, write_mteb_results
from maxsim_kernels import integrations

K = 300  # the whole corpus


def own_task(demo: Any, *, reranked: bool = False, same: bool = False, name: str = "OwnTask") -> AbsTaskRetrieval:
    """The generated collection as a task of mteb's."""

    class Own(AbsTaskRetrieval):
        ignore_identical_ids = same
        metadata = TaskMetadata(
            name=name,
            description="a task of one's own",
            dataset={"path": "nowhere/at-all", "revision": "1"},
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
            ranked = {query: list(demo.document_ids[n : n + 30]) for n, query in enumerate(demo.query_ids)}
            self.dataset = {
                "default": {
                    "test": {
                        "queries": datasets.Dataset.from_dict({"id": list(demo.query_ids), "text": list(demo.queries)}),
                        "corpus": datasets.Dataset.from_dict(
                            {"id": list(demo.document_ids), "title": [""] * len(demo.documents), "text": list(demo.documents)}
                        ),
                        "relevant_docs": {query: dict(row) for query, row in demo.qrels.items()},
                        "top_ranked": ranked if reranked else None,
                    }
                }
            }
            self.data_loaded = True

    return Own()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_task("demo", "small", data_dir=tmp_path_factory.mktemp("demo"), quiet=True)


def run(model: Any, task: Any, cache: Path) -> dict[str, float]:
    found = mteb.evaluate(
        model, task, cache=mteb.ResultCache(cache), overwrite_strategy="always", co2_tracker=False, show_progress_bar=False
    )
    return found.task_results[0].scores["test"][0]


def test_our_model_in_mteb_is_our_evaluation(demo: Any, tmp_path: Path) -> None:
    found = run(MaxSimModel("lexical", "fp32", cache_dir=tmp_path / "cache"), own_task(demo), tmp_path / "mteb")
    ours = evaluate(load_mteb_task(own_task(demo)), "lexical", ["fp32"], cache_dir=tmp_path / "cache", k=K, quiet=True)
    assert found["main_score"] == pytest.approx(ours.paths["fp32"].metrics["nDCG@10"], abs=2e-5)
    assert found["recall_at_100"] == pytest.approx(ours.paths["fp32"].metrics["Recall@100"], abs=2e-5)
    written = list((tmp_path / "mteb" / "results").glob("maxsim-eval__lexical-fp32/*/OwnTask.json"))
    assert len(written) == 1
    assert json.loads(written[0].read_text())["task_name"] == "OwnTask"


@pytest.mark.parametrize("reranked", [False, True])
def test_the_scores_are_those_of_mteb_with_the_same_model(demo: Any, tmp_path: Path, reranked: bool) -> None:
    from sentence_transformers import MultiVectorEncoder

    folder = tiny_checkpoints.stanford(tmp_path / "model")
    theirs, ours = (
        MultiVectorEncoder(str(folder), device="cpu"),
        MaxSimModel(f"multi-vector:{folder}", "fp32", cache_dir=tmp_path / "cache", device="cpu"),
    )
    scores = [run(model, own_task(demo, reranked=reranked), tmp_path / str(n)) for n, model in enumerate((theirs, ours))]
    for metric in ("ndcg_at_10", "recall_at_100", "map_at_100"):
        assert scores[1][metric] == pytest.approx(scores[0][metric], abs=3e-3), metric


def test_mtebs_own_model_scores_here_while_sentence_transformers_is_enabled(demo: Any, tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(tiny_checkpoints.stanford(tmp_path / "model")), device="cpu")
    own = run(model, own_task(demo), tmp_path / "own")
    with integrations.enable("sentence-transformers"):
        ours = run(model, own_task(demo), tmp_path / "ours")
        assert integrations.status()["sentence-transformers"].calls["maxsim"] > 0
    for metric in ("ndcg_at_10", "recall_at_100", "map_at_100"):
        assert ours[metric] == pytest.approx(own[metric], abs=3e-3), metric


def test_a_task_of_ones_own_by_our_paths_and_its_results_in_mtebs_form(demo: Any, tmp_path: Path) -> None:
    task = load_mteb_task(own_task(demo))
    assert (task.source, task.dataset, task.split) == ("mteb", "OwnTask", "test")
    assert list(task.documents) == [text.strip() for text in demo.documents]
    result = evaluate(
        task, "lexical", ["fp32", "int8"], cache_dir=tmp_path / "cache", k=K, out_dir=tmp_path / "out", quiet=True
    )
    assert result.paths["int8"].parity is not None
    found = write_mteb_results(tmp_path / "out", own_task(demo), tmp_path / "mteb", name="us/lexical")
    for path, one in found.items():
        assert one.get_score() == pytest.approx(result.paths[path].metrics["nDCG@10"], abs=2e-5)
        assert list((tmp_path / "mteb" / "results").glob(f"us__lexical-{path}/*/OwnTask.json"))


def test_a_task_that_reranks_is_scored_by_its_lists_alone(demo: Any, tmp_path: Path) -> None:
    def searched(lists: Path | None, out: str) -> Path:
        options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "k": 1000, "out_dir": tmp_path / out, "quiet": True}
        with pytest.warns(UserWarning, match="k was clamped"):
            evaluate(task, "lexical", ["fp32"], candidates=lists, **options)
        return tmp_path / out

    lists, reranks = tmp_path / "lists.trec", own_task(demo, reranked=True)
    with pytest.raises(UsageError, match=r"'OwnTask': reranks lists of its own.*write_candidates=FILE"):
        load_mteb_task(reranks)
    with pytest.raises(UsageError, match="has no lists; leave write_candidates out"):
        load_mteb_task(own_task(demo), write_candidates=lists)
    task = load_mteb_task(reranks, write_candidates=lists)
    own = run(MaxSimModel("lexical", "fp32", cache_dir=tmp_path / "cache"), own_task(demo, reranked=True), tmp_path / "own")
    written = write_mteb_results(searched(lists, "lists"), own_task(demo, reranked=True), tmp_path / "mteb")
    assert written["fp32"].scores["test"][0]["ndcg_at_10"] == own["ndcg_at_10"] < 0.2
    for folder, other, text in (
        (searched(None, "all"), reranks, r"got an evaluation of the whole corpus, need one of the lists that the task reranks"),
        (tmp_path / "lists", own_task(demo), r"got an evaluation of the candidates 'mteb', need one of the whole corpus"),
    ):
        with pytest.raises(UsageError, match=text):
            write_mteb_results(folder, other, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_data_that_cannot_be_loaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nat all")

    monkeypatch.setattr(AbsTaskRetrieval, "load_data", offline)
    with pytest.raises(
        DataError, match=r"'SciFact': its data cannot be loaded \(ConnectionError: .* the Hub\); need 'mteb/scifact'"
    ):
        load_mteb_task("SciFact")


def test_what_mteb_would_score_wrongly_is_refused(demo: Any, tmp_path: Path) -> None:
    evaluate(
        load_mteb_task(own_task(demo)),
        "lexical",
        ["fp32"],
        cache_dir=tmp_path / "cache",
        k=10,
        out_dir=tmp_path / "out",
        quiet=True,
    )
    with pytest.raises(UsageError, match=r"kept 10 documents a query, need k=\d+ for mteb's metrics"):
        write_mteb_results(tmp_path / "out", own_task(demo), tmp_path / "mteb")
    with pytest.raises(UsageError, match=r"got an evaluation of mteb/OwnTask/test, need one of mteb/Another/test"):
        write_mteb_results(tmp_path / "out", own_task(demo, name="Another"), tmp_path / "mteb")
    assert not (tmp_path / "mteb").exists()
    with pytest.raises(UsageError, match="no split 'dev', only test"):
        load_mteb_task(own_task(demo), split="dev")
    with pytest.raises(UsageError, match="is no retrieval task"):
        load_mteb_task("STS12")
    with pytest.raises(UsageError, match="NoSuchTask"):
        load_mteb_task("NoSuchTask")
    with pytest.raises(UsageError, match="search before index"):
        MaxSimModel("lexical").search([], task_metadata=None, hf_split="", hf_subset="", top_k=1)


def test_identical_ids_are_left_out_where_the_task_says_so(demo: Any) -> None:
    assert load_mteb_task(own_task(demo, same=True)).exclude_same_id


def test_page_images_stay_files_until_they_are_asked_for() -> None:
    from maxsim_eval.mteb import _side

    page = tiny_checkpoints.pages()[0]
    held = io.BytesIO()
    page.save(held, "PNG")
    rows = datasets.Dataset.from_dict({"id": ["a"], "image": [{"bytes": held.getvalue(), "path": None}]}).cast_column(
        "image", datasets.Image()
    )
    part = _side(rows, "corpus")
    assert part.items[0].size == page.size
    assert torch.equal(*(torch.tensor(list(one.tobytes())) for one in (part.items[0], page)))
    with pytest.raises(UsageError, match="the corpus hold texts and images together"):
        _side(rows.add_column("text", ["a"]), "corpus")
    queries = datasets.Dataset.from_dict({"id": ["q"], "text": ["what"], "instruction": ["Answer"]})
    assert list(_side(queries, "queries").items) == ["what Answer"]
