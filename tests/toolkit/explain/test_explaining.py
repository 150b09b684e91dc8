"""Explaining one pair: winners and contributions against brute force, the score of a full evaluation, and what is read for it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_checkpoints as tiny
from fixtures import one_thread  # noqa: F401 - for every test here
from maxsim_eval.api import evaluate
from maxsim_eval.cache.converting import convert_entry
from maxsim_eval.cache.embeddings import cached_embeddings
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.shards import Shard
from maxsim_eval.cache.sides import embed
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.explain.explaining import explain_pair
from maxsim_eval.explain.ranking import explain_query
from maxsim_eval.importing.importing import import_embeddings
from maxsim_eval.scoring.paths import PATHS, our_paths
from maxsim_eval.types import PatchGrid, Task
from maxsim_kernels import Packed, pack
from task_cases import small_task

PAIRS = [("q07", "d032"), ("q00", "d001"), ("q13", "d250"), ("q39", "d299")]


def stored(task: Task, home: Path, query: str, document: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = cached_embeddings(task, "lexical", home / "cache")
    whole = next(iter(found.documents.blocks(1 << 40)))
    return found.queries.load()[task.query_ids.index(query)], whole[task.document_ids.index(document)]


# Numbers ---------------------------------------------------------------------------------------------------------------


class HalfDocuments(LexicalEncoder):
    """`lexical`, with documents in float16: a certified path over them as stored rounds the queries, one in FP32 does not."""

    name = "half-documents"

    def encode(self, items: Sequence[Any], role: Any) -> Packed:
        return super().encode(items, role).to(torch.float16 if role == "document" else torch.float32)


@pytest.fixture(scope="module")
def copied(demo_task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with every quantised copy that a path reads, evaluated by every path: cache/ and out/."""
    home = tmp_path_factory.mktemp("copied")
    options: dict[str, Any] = {"cache_dir": home / "cache", "quiet": True}
    evaluate(demo_task, HalfDocuments(), ["fp32"], **options)
    entry = cached_embeddings(demo_task, HalfDocuments(), home / "cache").documents
    assert isinstance(entry, Entry)
    for kind in {path.copy for path in our_paths().values() if path.copy is not None}:
        convert_entry(entry, kind, quiet=True)
    evaluate(demo_task, HalfDocuments(), list(our_paths()), out_dir=home / "out", k=300, **options)
    return home


@pytest.mark.parametrize("path", our_paths())
def test_beside_copies_the_score_is_still_that_of_the_evaluation(copied: Path, demo_task: Task, path: str) -> None:
    ranked = {query: dict(row) for query, row in read_trec_run(copied / "out" / "runs" / f"{path}.trec").rankings.items()}
    options: dict[str, Any] = {"path": path, "cache_dir": copied / "cache", "quiet": True}
    for query, document in PAIRS:
        assert explain_pair(demo_task, HalfDocuments(), query, document, **options).score == ranked[query][document]
    for one in explain_query(demo_task, HalfDocuments(), "q07", **options).documents:
        assert one.explanation.score == ranked["q07"][one.explanation.document]


@pytest.mark.parametrize("path", PATHS)
def test_the_score_is_that_of_the_evaluation_and_the_contributions_are_it(demo_home: Path, demo_task: Task, path: str) -> None:
    ranked = {query: dict(row) for query, row in read_trec_run(demo_home / "out" / "runs" / f"{path}.trec").rankings.items()}
    best = [(query, next(iter(ranked[query]))) for query in ("q03", "q21")]
    for query, document in (*PAIRS, *best):
        found = explain_pair(demo_task, "lexical", query, document, path=path, cache_dir=demo_home / "cache", quiet=True)
        assert found.score == ranked[query][document], "another score than the evaluation's"
        norm = 2e-6 * len(found.tokens) * max(abs(token.contribution or 0) for token in found.tokens)
        assert found.total == pytest.approx(found.score, abs=max(norm, 1e-6))
        assert sum(token.share or 0 for token in found.tokens) == pytest.approx(1, abs=1e-5)


def test_winners_and_contributions_are_those_of_brute_force(demo_home: Path, demo_task: Task) -> None:
    for query, document in PAIRS:
        asked, held = stored(demo_task, demo_home, query, document)
        products = asked.double().numpy() @ held.double().numpy().T
        found = explain_pair(demo_task, "lexical", query, document, cache_dir=demo_home / "cache")
        assert [token.document_position for token in found.tokens] == products.argmax(axis=1).tolist()
        np.testing.assert_allclose([token.contribution or 0 for token in found.tokens], products.max(axis=1), rtol=1e-6)
        np.testing.assert_allclose(found.similarities, products, atol=1e-5)
        assert found.score == pytest.approx(products.max(axis=1).sum(), rel=1e-6)
        assert found.document_tokens == len(held)


def test_texts_are_the_stems_and_equal_ones_win(demo_home: Path, demo_task: Task) -> None:
    found = explain_pair(demo_task, "lexical", "q07", "d032", cache_dir=demo_home / "cache")
    assert (found.query_text, found.document_text) == (demo_task.queries[7], demo_task.documents[32])
    assert [token.text for token in found.tokens][:3] == ["len", "lighthous", "keeper"]
    same = [token for token in found.tokens if token.document_text == token.text]
    assert len(same) >= 3
    assert min(token.contribution or 0 for token in same) > max(
        token.contribution or 0 for token in found.tokens if token not in same
    )
    assert found.relevance == demo_task.qrels["q07"].get("d032")
    assert found.notes == ()


def test_queries_and_documents_without_tokens(tmp_path: Path) -> None:
    task = small_task(["fox", "of the"], ["red fox", "", "the of"])
    evaluate(task, "lexical", ["fp32"], k=3, cache_dir=tmp_path, quiet=True)
    empty = explain_pair(task, "lexical", "q0", "d1", cache_dir=tmp_path)
    assert empty.score is None
    assert [(token.contribution, token.share, token.document_position) for token in empty.tokens] == [(None, None, None)]
    assert empty.notes == ("the document has no tokens: it is not retrieved",)
    assert json.dumps(empty.as_json(), allow_nan=False)
    for path in PATHS:
        nothing = explain_pair(task, "lexical", "q1", "d0", path=path, cache_dir=tmp_path)
        assert (nothing.score, nothing.tokens, nothing.total) == (0.0, (), 0.0)


def test_a_subset_has_the_scores_of_the_whole(demo_home: Path, demo_task: Task) -> None:
    options: dict[str, Any] = {"cache_dir": demo_home / "cache", "quiet": True}
    whole = explain_pair(demo_task, "lexical", "q07", "d032", **options)
    found = [
        explain_pair(demo_task, "lexical", "q07", document, limit_documents=290, **options).score
        for document in ("d032", "d000", "d299")
        if document in limit_task(demo_task, queries=None, documents=290, seed=0).document_ids
    ]
    assert len(found) >= 2
    assert whole.score in found


def test_json_holds_what_was_found(demo_home: Path, demo_task: Task) -> None:
    found = explain_pair(demo_task, "lexical", "q07", "d032", path="int8", cache_dir=demo_home / "cache")
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert plain["schema"] == "maxsim-eval/explain/1"
    assert plain["score"] == found.score
    assert plain["sum_of_contributions"] == found.total
    assert [token["document_position"] for token in plain["tokens"]] == [token.document_position for token in found.tokens]
    assert plain["patches"] is None
    assert plain["encoder"]["name"] == "lexical"


# Reading ---------------------------------------------------------------------------------------------------------------


def test_only_two_rows_are_read_and_nothing_is_encoded(
    demo_home: Path, demo_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, whole = Shard.read_runs, [0]

    def counted(self: Shard, firsts: Sequence[int], counts: Sequence[int], out: torch.Tensor, *, proven: bool = False) -> None:
        whole[0] += sum(counts)
        read(self, firsts, counts, out, proven=proven)

    def never(*_: Any) -> Packed:
        raise AssertionError("encoded")

    monkeypatch.setattr(Shard, "read_runs", counted)
    monkeypatch.setattr(LexicalEncoder, "encode", never)
    found = explain_pair(demo_task, "lexical", "q07", "d032", path="int8", cache_dir=demo_home / "cache")
    assert whole[0] == len(found.tokens) + found.document_tokens


def test_what_is_not_in_the_cache_is_not_made(demo_task: Task, demo_home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no complete embeddings of the queries and documents of demo small by encoder 'lexical'.*encode demo"
    ):
        explain_pair(demo_task, "lexical", "q07", "d032", cache_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    options = {"max_document_tokens": 7}
    with pytest.raises(DataError, match="no complete embeddings of the documents of demo small"):
        explain_pair(demo_task, "lexical", "q07", "d032", cache_dir=demo_home / "cache", encoder_options=options)
    embed(demo_task, "document", get_encoder("lexical"), tmp_path / "half", quiet=True)
    with pytest.raises(DataError, match="no complete embeddings of the queries of demo small"):
        explain_pair(demo_task, "lexical", "q07", "d032", cache_dir=tmp_path / "half")


def test_a_quantised_copy_gives_the_same(demo_home: Path, demo_task: Task, tmp_path: Path) -> None:
    shutil.copytree(demo_home / "cache", tmp_path / "cache")
    entry = cached_embeddings(demo_task, "lexical", tmp_path / "cache").documents
    assert isinstance(entry, Entry)
    for path, kind in (
        ("int8", "int8-token"),
        ("int8-document", "int8-document"),
        ("int8-corpus", "int8-corpus"),
        ("fp8", "fp8-document"),
    ):
        before = explain_pair(demo_task, "lexical", "q07", "d032", path=path, cache_dir=tmp_path / "cache", quiet=True)
        convert_entry(entry, kind, quiet=True)
        after = explain_pair(demo_task, "lexical", "q07", "d032", path=path, cache_dir=tmp_path / "cache", quiet=True)
        assert after.tokens == before.tokens
        assert after.score == before.score


@pytest.mark.parametrize(
    ("query", "document", "text"),
    [
        ("Q07", "d032", "no query 'Q07' among the 40 here. Did you mean 'q07'?"),
        ("q07", "x", "no document 'x' among the 300 here. The first ids are 'd000', 'd001', 'd002'."),
    ],
)
def test_unknown_ids(demo_home: Path, demo_task: Task, query: str, document: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain_pair(demo_task, "lexical", query, document, cache_dir=demo_home / "cache")
    assert str(caught.value) == text


def test_paths_that_cannot_be_explained(demo_home: Path, demo_task: Task) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'fp16'"):
        explain_pair(demo_task, "lexical", "q07", "d032", path="fp61", cache_dir=demo_home / "cache")
    with pytest.raises(UsageError, match="gives scores alone, no winners"):
        explain_pair(demo_task, "lexical", "q07", "d032", path="python:math:fsum", cache_dir=demo_home / "cache")


# Encoders --------------------------------------------------------------------------------------------------------------


def test_imported_embeddings_have_positions_alone(tmp_path: Path) -> None:
    task = small_task(["red fox"], ["red fox runs", "a whale"])
    rng = torch.Generator().manual_seed(0)
    sides = {
        "query": {"q0": torch.randn(3, 4, generator=rng)},
        "document": {"d0": torch.randn(5, 4, generator=rng), "d1": torch.randn(2, 4, generator=rng)},
    }
    torch.save(
        {
            "query_embeddings": sides["query"]["q0"][None],
            "query_lengths": torch.tensor([3]),
            "doc_embeddings": list(sides["document"].values()),
            "meta": {"query_ids": ["q0"], "doc_ids": ["d0", "d1"]},
        },
        tmp_path / "mine.pt",
    )
    import_embeddings(
        [tmp_path / "mine.pt"],
        task,
        source="local",
        dataset="small",
        encoder_name="mine",
        cache_dir=tmp_path / "cache",
        data_dir=tmp_path,
        quiet=True,
    )
    found = explain_pair(task, "mine", "q0", "d0", cache_dir=tmp_path / "cache")
    assert [(token.text, token.document_text) for token in found.tokens] == [(None, None)] * 3
    assert [note for note in found.notes if "imported" in note] == list(found.notes)
    assert len(found.notes) == 1
    products = sides["query"]["q0"] @ sides["document"]["d0"].T
    assert [token.document_position for token in found.tokens] == products.argmax(dim=1).tolist()
    assert found.score == pytest.approx(float(products.max(dim=1).values.sum()), rel=1e-6)


@pytest.mark.parametrize("layout", ["stanford", "pylate"])
def test_texts_of_multi_vector_tokens_are_those_that_were_kept(checkpoint_of: Callable[[str], Path], layout: str) -> None:
    encoder: Any = get_encoder(f"multi-vector:{checkpoint_of(layout)}", device="cpu")
    marks = {"stanford": ("[unused0]", "[unused1]"), "pylate": ("[Q]", "[D]")}[layout]
    for text in ("Glacier, melts.", "cat", "two the unknown glacier valley melt cat " * 9, "", "..."):
        for role, mark in zip(("query", "document"), marks):
            found = encoder.token_texts(text, role)
            assert len(found) == int(encoder.encode([text], role).lengths[0]), (text, role)
            if text.strip():
                assert found[:2] == ["[CLS]", mark]
    assert encoder.token_texts("glacier, melts", "document") == ["[CLS]", marks[1], "glacier", "melt", "##s", "[SEP]"]


def test_no_weights_no_texts(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_of("stanford"), tmp_path / "tiny")
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    encoder: Any = get_encoder(f"multi-vector:{folder}", device="cpu")
    assert encoder.token_texts("glacier", "query") is None


def test_texts_of_hf_tokens(minilm: Path) -> None:
    encoder: Any = get_encoder(f"hf:{minilm}", device="cpu", max_document_tokens=6)
    assert encoder.token_texts("Glaciers melt", "query") == ["glaciers", "melt"]
    for text in ("unbelievably longish wordpieces, and more of them", "", "  ", "[SEP] x"):
        for role in ("query", "document"):
            assert len(encoder.token_texts(text, role)) == int(encoder.encode([text], role).lengths[0])


def test_a_whole_pair_by_real_weights(minilm: Path, tmp_path: Path) -> None:
    task = small_task(["who gives money"], ["The bank of a river is muddy.", "The bank gives money."])
    name = f"hf:{minilm}"
    evaluate(task, name, ["fp32"], k=2, cache_dir=tmp_path, quiet=True)
    found = explain_pair(task, name, "q0", "d1", cache_dir=tmp_path)
    winners = {token.text: token.document_text for token in found.tokens}
    assert winners["gives"] == "gives"
    assert winners["money"] == "money"
    assert math.isclose(found.total, found.score or 0, rel_tol=1e-5)


# Pages -----------------------------------------------------------------------------------------------------------------


def page_task(asked: Sequence[str] = ("what melts?",)) -> Task:
    return small_task(asked, tiny.pages())


@pytest.mark.parametrize("layout", ["colpali", "colqwen2"])
def test_the_heat_map_of_a_page_is_what_its_patches_add(
    checkpoint_of: Callable[[str], Path], layout: str, tmp_path: Path
) -> None:
    name, task = f"multi-vector:{checkpoint_of(layout)}", page_task()
    evaluate(task, name, ["fp32"], k=5, cache_dir=tmp_path, quiet=True)
    for number, page in enumerate(task.documents):
        found = explain_pair(task, name, "q0", f"d{number}", cache_dir=tmp_path)
        grid = found.patches
        assert grid is not None
        assert found.grid_from == "processor"
        assert found.page is page
        if layout == "colqwen2":
            assert (grid.rows > grid.columns) == (page.size[1] > page.size[0] and grid.rows != grid.columns)
        heat = found.patch_map()
        assert heat.shape == (grid.rows, grid.columns)
        expected = np.zeros(grid.patches)
        outside = 0.0
        for token in found.tokens:
            assert token.document_position is not None
            assert token.contribution is not None
            place = token.document_position - grid.first
            if 0 <= place < grid.patches:
                expected[place] += token.contribution
                assert token.document_text == "<patch>"
            else:
                outside += token.contribution
                assert token.document_text != "<patch>"
        np.testing.assert_allclose(heat.ravel(), expected, atol=1e-6)
        assert float(heat.sum()) + outside == pytest.approx(found.score, abs=1e-4)
        for row in (0, len(found.tokens) - 1):
            np.testing.assert_array_equal(
                found.patch_map(row).ravel(), found.similarities[row, grid.first : grid.first + grid.patches]
            )
        assert np.asarray(found.as_json()["patches"]["contributions"]).shape == heat.shape
    with pytest.raises(UsageError, match="query token: got"):
        found.patch_map(10_000)


class Patches:
    """Pages as as many random tokens as it is told; it knows no grid."""

    name, revision, dim = "patches", "1", 4

    def __init__(self, count: int) -> None:
        self.count = count

    def fingerprint(self, role: str) -> dict[str, Any]:
        return {"count": self.count}

    def prepare(self, documents: Sequence[Any]) -> None: ...

    def encode(self, items: Sequence[Any], role: str) -> Packed:
        return pack([torch.randn(self.count, 4, generator=torch.Generator().manual_seed(n)) for n, _ in enumerate(items)])


def test_a_square_number_of_tokens_is_a_square_grid_and_says_so(tmp_path: Path) -> None:
    task = page_task()
    evaluate(task, Patches(16), ["fp32"], k=5, cache_dir=tmp_path, quiet=True)
    found = explain_pair(task, Patches(16), "q0", "d1", cache_dir=tmp_path)
    assert (found.patches, found.grid_from) == (PatchGrid(4, 4, 0), "square")
    assert any("taken for 4 x 4 patches" in note for note in found.notes)
    assert sum("positions are given alone" in note for note in found.notes) == 2
    given = explain_pair(task, Patches(16), "q0", "d1", cache_dir=tmp_path, grid=PatchGrid(3, 5, 1))
    assert (given.patches, given.grid_from) == (PatchGrid(3, 5, 1), "given")
    assert not any("taken for" in note for note in given.notes)
    for grid in (PatchGrid(4, 5), PatchGrid(3, 5, 2), PatchGrid(0, 3), PatchGrid(2, 2, -1)):
        with pytest.raises(UsageError, match="but the page has 16 tokens"):
            explain_pair(task, Patches(16), "q0", "d1", cache_dir=tmp_path, grid=grid)


def test_another_number_is_no_grid_and_says_so(tmp_path: Path) -> None:
    task = page_task()
    evaluate(task, Patches(17), ["fp32"], k=5, cache_dir=tmp_path, quiet=True)
    found = explain_pair(task, Patches(17), "q0", "d1", cache_dir=tmp_path)
    assert found.patches is None
    assert any("no heat map: the page has 17 tokens" in note and "--grid" in note for note in found.notes)
    with pytest.raises(UsageError, match="which document tokens are patches"):
        found.patch_map()
    with pytest.raises(UsageError, match="is a text, which has no patches"):
        explain_pair(small_task(["fox"], ["a fox"]), Patches(17), "q0", "d0", cache_dir=_cached(tmp_path), grid=PatchGrid(1, 1))


def _cached(folder: Path) -> Path:
    evaluate(small_task(["fox"], ["a fox"]), Patches(17), ["fp32"], k=1, cache_dir=folder / "texts", quiet=True)
    return folder / "texts"
