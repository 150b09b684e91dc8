"""A card may say what embeddings of its set are stored in: the default of encoding, part of the key, replaced by an option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from import_cases import import_sides
from maxsim_eval.api import evaluate
from maxsim_eval.cache.embeddings import Embeddings, embeddings
from maxsim_eval.data.cards import known, load_card, read_card
from maxsim_eval.data.loading import load_task
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.encoders.model_encoder import ModelEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError
from maxsim_eval.planning.sizes import find_sizes
from maxsim_eval.types import Role, Task

LARGE = 500_000  # documents
TEXTS = ["glacier melt", "a valley", "the two cats", "cat", ""]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "local" / "ice"
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", TEXTS), ("queries", ["melt", "two cats"])):
        lines = (json.dumps({"_id": f"{name[0]}{n}", "text": text}) + "\n" for n, text in enumerate(texts))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tc0\t1\nq1\tc2\t1\n")
    (folder / "card.toml").write_text('name = "ice"\ntitle = "Ice"\ndtype = "float16"\n')
    return tmp_path / "data"


@pytest.fixture
def task(data: Path) -> Task:
    return load_task("local", "ice", data_dir=data, quiet=True)


@pytest.fixture
def name(checkpoint_of: Callable[[str], Path]) -> str:
    return f"multi-vector:{checkpoint_of('stanford')}"


def stored(found: Embeddings) -> set[torch.dtype]:
    return {found.documents.dtype, found.queries.dtype}


def test_large_public_sets_are_stored_in_half_precision() -> None:
    for dataset in known("beir"):
        card = load_card("beir", dataset)
        assert card.documents is not None
        assert card.dtype == ("float16" if card.documents >= LARGE and not card.subsets else ""), dataset
    assert load_card("real-mm-rag", "finreport").dtype == ""


def test_a_card_with_another_dtype_is_refused(data: Path) -> None:
    card = data / "local" / "ice" / "card.toml"
    for wrong in ('"int8"', '"half"', "16", '"float16 "'):
        card.write_text(f'name = "ice"\ntitle = "Ice"\ndtype = {wrong}\n')
        with pytest.raises(DataError, match=r"dtype is .*, need (float16, bfloat16 or float32|str)"):
            read_card(card, "local")


def test_it_is_the_default_and_part_of_the_key(task: Task, name: str, tmp_path: Path) -> None:
    assert task.dtype == "float16"
    by_card = embeddings(task, name, tmp_path / "cache", quiet=True)
    assert stored(by_card) == {torch.float16}
    assert by_card.encoder["dtype"] == "float16"
    asked = embeddings(task, name, tmp_path / "cache", quiet=True, embedding_dtype="float16", dtype=None)
    assert (asked.documents.folder, asked.queries.folder) == (by_card.documents.folder, by_card.queries.folder)
    exact = get_encoder(name).encode(task.documents, "document")
    assert torch.equal(by_card.documents.load().values, exact.values.half()), "computed in float32, rounded once"  # type: ignore[union-attr]
    kept = limit_task(task, documents=3, seed=0)
    assert stored(embeddings(task, name, tmp_path / "other", kept=kept, quiet=True)) == {torch.float16}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"embedding_dtype": "float32"}, torch.float32),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"embedding_dtype": "bfloat16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_an_option_replaces_it(options: dict[str, Any], dtype: torch.dtype, task: Task, name: str, tmp_path: Path) -> None:
    by_card = embeddings(task, name, tmp_path, quiet=True)
    with pytest.warns(UserWarning, match="are encoded anew"):
        asked = embeddings(task, name, tmp_path, quiet=True, **options)
    assert stored(asked) == {dtype}
    assert asked.documents.folder != by_card.documents.folder


def test_an_encoder_that_has_no_choice_keeps_its_dtype(task: Task, name: str, tmp_path: Path) -> None:
    assert stored(embeddings(task, "lexical", tmp_path, quiet=True)) == {torch.float32}
    mine = get_encoder(name)
    assert stored(embeddings(task, mine, tmp_path, quiet=True)) == {torch.float32}, "an encoder that was made is as it was made"


def test_values_that_only_the_stored_dtype_cannot_hold_are_told_apart() -> None:
    rows = [torch.ones(2, 3), torch.tensor([[1.0, -70000.0, 0.0]])]
    with pytest.raises(
        DataError, match=r"x: item 1 of 2 has values up to 7e\+04, which float16 cannot hold; store --embedding-"
    ):
        ModelEncoder("x", embedding_dtype="float16").hand_out(rows, 3)
    with pytest.raises(DataError, match="x: the model gave NaN or infinity for item 1 of 2 in float32"):
        ModelEncoder("x", embedding_dtype="float16").hand_out([rows[0], rows[1] * torch.inf], 3)
    assert ModelEncoder("x").hand_out(rows, 3).values[2, 1] == -70000.0


def test_imported_embeddings_are_used_as_they_are(task: Task, tmp_path: Path) -> None:
    rows: dict[Role, Any] = {"query": [torch.eye(4)] * 2, "document": [torch.eye(4)] * 5}
    import_sides(tmp_path, task, "colbertv2", rows)
    found = embeddings(task, "colbertv2", tmp_path / "cache", quiet=True)
    assert stored(found) == {torch.float32}
    assert found.encoder["origin"] == "imported"


def test_the_report_says_that_the_reference_reads_the_same_inputs(task: Task, name: str, tmp_path: Path) -> None:
    found = evaluate(task, name, ["fp32", "fp16", "int8"], k=3, cache_dir=tmp_path, quiet=True)
    assert found.encoder["dtype"] == "float16"
    for path, same in (("fp16", True), ("int8", False)):
        parity = found.paths[path].parity
        assert parity is not None
        assert parity["reference_reads_same_inputs"] is same


def test_a_plan_counts_in_it(data: Path, task: Task, name: str, tmp_path: Path) -> None:
    def sizes(encoder: str) -> Any:
        return find_sizes("local", "ice", encoder, data_dir=data, cache_dir=tmp_path / "cache", quiet=True).sizes

    before = sizes(name)
    assert (before.form, before.encoded) == ("float16", False)
    assert sizes("lexical").form == "float32"
    embeddings(task, name, tmp_path / "cache", quiet=True)
    after = sizes(name)
    assert (after.form, after.encoded, after.exact) == ("float16", True, True), "what the card's dtype has encoded is found"
    by_card = find_sizes("beir", "nq", "colbertv2", data_dir=data, cache_dir=tmp_path / "cache", quiet=True)
    assert by_card.sizes.form == "float16"
    by_card = find_sizes("beir", "scifact", "colbertv2", data_dir=data, cache_dir=tmp_path / "cache", quiet=True)
    assert by_card.sizes.form == "float32"
    pinned = find_sizes("beir", "scifact", "colbertv2@main", data_dir=data, cache_dir=tmp_path / "cache", quiet=True)
    assert pinned.sizes == by_card.sizes, "a revision is no other kind of encoder"
