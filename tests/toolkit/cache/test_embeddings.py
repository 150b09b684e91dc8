"""Imported embeddings are used for what was asked, or refused: never under options, a revision or beside a side not their own."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from import_cases import import_sides
from maxsim_eval import api
from maxsim_eval.cache import embeddings as module
from maxsim_eval.cache import sides
from maxsim_eval.cache.embeddings import embeddings
from maxsim_eval.cache.sides import embed
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError, NoModelError, UsageError
from maxsim_eval.types import Encoder, Role
from task_cases import small_task

WIDTH = 8
BOTH: tuple[Role, ...] = ("query", "document")
TASK = small_task(
    ["glacier melt", "two cats"],
    ["the glacier melts", "a valley", "the cat", "two cats, a glacier"],
    dataset="ice",
    qrels={"q0": {"d0": 1}, "q1": {"d2": 1, "d3": 1}},
)
Import = Callable[..., None]


@pytest.fixture
def imports(tmp_path: Path) -> Import:
    """`imports(name, roles, revision=)`: unit vectors, three a row, which no encoder here would give."""

    def run(name: str, roles: Sequence[Role] = BOTH, revision: str = "theirs") -> None:
        rows: dict[Role, torch.Tensor] = {}
        for role in roles:
            generator, count = torch.Generator().manual_seed(0), len(TASK.queries if role == "query" else TASK.documents)
            rows[role] = torch.nn.functional.normalize(torch.randn(count, 3, WIDTH, generator=generator), dim=2)
        import_sides(tmp_path, TASK, name, rows, revision=revision)

    return run


@pytest.fixture
def stan(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny ColBERT checkpoint in a folder `stan`: its encoder is `multi-vector:stan`, whatever path was typed."""
    return Path(shutil.copytree(checkpoint_of("stanford"), tmp_path / "models" / "stan"))


def entries(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "cache").rglob("manifest.json"))


def find(folder: Path, encoder: Encoder | str, **options: Any) -> module.Embeddings:
    return embeddings(TASK, encoder, folder / "cache", quiet=True, **options)


@pytest.mark.parametrize(
    "options", [{"max_document_tokens": 7}, {"document_prompt": "d: "}, {"embedding_dtype": "float16"}], ids=str
)
@pytest.mark.parametrize("roles", [BOTH, ("query",), ("document",)], ids=str)
def test_options_under_a_path_are_refused(
    options: dict[str, Any], roles: Sequence[Role], imports: Import, stan: Path, tmp_path: Path
) -> None:
    imports("multi-vector:stan", roles)
    before = entries(tmp_path)
    (option,) = options
    text = rf"'multi-vector:.*models/stan': its embeddings were imported as 'multi-vector:stan', to which {option} cannot be applied"
    with pytest.raises(UsageError, match=text):
        find(tmp_path, f"multi-vector:{stan}", **options)
    assert entries(tmp_path) == before


def test_without_options_the_result_says_the_revision_of_the_import(imports: Import, stan: Path, tmp_path: Path) -> None:
    imports("multi-vector:stan")
    name = f"multi-vector:{stan}"
    found = find(tmp_path, name, batch_size=2, max_query_tokens=None)
    assert found.encoder["name"] == "multi-vector:stan"
    assert (found.encoder["revision"], found.encoder["origin"]) == ("theirs", "imported")
    assert found.queries.tokens == 2 * 3
    kept = limit_task(TASK, documents=3, queries=None, seed=0)
    some = embeddings(TASK, name, tmp_path / "cache", kept=kept, quiet=True)
    assert some.encoder == found.encoder
    assert some.documents.tokens == 3 * 3


def test_what_was_encoded_with_the_options_is_used_beside_an_import(imports: Import, stan: Path, tmp_path: Path) -> None:
    options = {"max_query_tokens": 9, "max_document_tokens": 7}
    name = f"multi-vector:{stan}"
    encoded = find(tmp_path, name, **options)
    imports("multi-vector:stan")
    again = find(tmp_path, name, **options)
    assert (again.queries.folder, again.documents.folder) == (encoded.queries.folder, encoded.documents.folder)
    assert again.encoder == encoded.encoder
    assert again.encoder["revision"].startswith("sha256-")
    assert again.encoder["origin"] == "encoded"


@pytest.mark.parametrize("named", ["colbertv2@main", "multi-vector:some/model@v1"])
def test_a_revision_in_the_name_is_refused(
    named: str, imports: Import, stan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsim_eval.encoders.checkpoints._snapshot", lambda hub_id, revision, wanted: stan)  # the hub, offline
    owner = named.partition("@")[0]
    imports(owner)
    assert find(tmp_path, owner).encoder["revision"] == "theirs"
    for asked, options in ((named, {}), (named, {"max_query_tokens": None}), (owner, {"revision": "main"})):
        with pytest.raises(UsageError, match=r"embeddings were imported.*to which revision cannot be applied"):
            find(tmp_path, asked, **options)
    imports(named, revision="as named")
    assert find(tmp_path, named).encoder["revision"] == "as named", "imported under this very name: nothing is overridden"


@pytest.mark.parametrize(("role", "missing"), [("query", "document"), ("document", "query")])
@pytest.mark.parametrize("name", ["lexical", "multi-vector:stan", "hf:stan", "mine", "colbertv2"])
def test_one_imported_side_is_refused(name: str, role: Role, missing: str, imports: Import, tmp_path: Path) -> None:
    imports(name, [role])
    before = entries(tmp_path)
    text = rf"encoder '{name}': the {missing} embeddings of local ice were not imported.*--encoder {name}\).*ice/{name.partition(':')[0]}"
    with pytest.raises(DataError, match=text):
        find(tmp_path, name)
    assert entries(tmp_path) == before, "nothing may be encoded first"
    imports(name, BOTH)
    assert find(tmp_path, name).encoder["origin"] == "imported"


def test_one_imported_side_and_options(imports: Import, tmp_path: Path) -> None:
    imports("lexical", ["document"])
    with pytest.raises(
        UsageError, match="'lexical': its embeddings were imported, to which max_document_tokens cannot be applied"
    ):
        find(tmp_path, "lexical", max_document_tokens=7)
    assert entries(tmp_path) == entries(tmp_path)[:1]


@pytest.mark.parametrize(("role", "missing"), [("query", "document"), ("document", "query")])
@pytest.mark.parametrize("encoded", [False, True])
def test_one_imported_side_under_a_path(
    encoded: bool, role: Role, missing: Role, imports: Import, stan: Path, tmp_path: Path
) -> None:
    name = f"multi-vector:{stan}"
    imports("multi-vector:stan", [role])
    if encoded:  # the other side is in the cache, by this encoder: still two origins in one evaluation
        embed(TASK, missing, get_encoder(name), tmp_path / "cache", quiet=True)
    before = entries(tmp_path)
    for encoder in (name, get_encoder(name)):
        with pytest.raises(
            DataError, match=rf"the {missing} embeddings .* were not imported.*evaluate with --encoder multi-vector:stan"
        ):
            find(tmp_path, encoder)
    kept = limit_task(TASK, documents=3, queries=None, seed=0)
    with pytest.raises(DataError, match="one evaluation takes both from one place"):
        embeddings(TASK, name, tmp_path / "cache", kept=kept, quiet=True)
    assert entries(tmp_path) == before
    imports("multi-vector:stan")
    assert find(tmp_path, "multi-vector:stan").encoder["origin"] == "imported", "what the message says to do"


def test_texts_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of texts take seconds a pass: whoever looks into the cache shares what was found."""
    asked: list[int] = []
    original = sides.content_hash

    def counted(ids: Sequence[str], items: Sequence[Any]) -> str:
        asked.append(len(ids))
        return original(ids, items)

    monkeypatch.setattr(sides, "content_hash", counted)
    for _ in range(2):  # encoded, then found
        asked.clear()
        embeddings(TASK, "lexical", tmp_path, quiet=True)
        assert sorted(asked) == [len(TASK.query_ids), len(TASK.document_ids)]


def test_no_model_stays_in_memory_while_scores_are_computed(
    stan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Encoder]] = []
    get, score, alive = module.get_encoder, api.score_job, []

    def watched(*names: Any, **options: Any) -> Encoder:
        encoder = get(*names, **options)
        made.append(weakref.ref(encoder))
        return encoder

    def scored(*given: Any, **options: Any) -> Any:
        alive.extend(one for one in made if one() is not None)
        return score(*given, **options)

    monkeypatch.setattr(module, "get_encoder", watched)
    monkeypatch.setattr(api, "score_job", scored)
    for _ in range(2):  # encoded, then found
        api.evaluate(TASK, f"multi-vector:{stan}", ["fp32"], k=2, cache_dir=tmp_path, quiet=True)
    assert len(made) == 3, "the first time one more, which looks for embeddings in a GPU's precision"
    assert alive == []


# Without the model -------------------------------------------------------------------------------------------------------


def test_what_is_cached_is_used_where_the_model_is_gone(stan: Path, tmp_path: Path) -> None:
    named = f"multi-vector:{stan}"
    part = limit_task(TASK, documents=3)
    before = [find(tmp_path, named), embeddings(TASK, named, tmp_path / "cache", kept=part, quiet=True)]
    shutil.rmtree(stan)
    with pytest.warns(UserWarning, match="there is no such folder; the embeddings that are cached under its name are used: "):
        after = [find(tmp_path, named), embeddings(TASK, named, tmp_path / "cache", kept=part, quiet=True)]
    for one, other in zip(before, after, strict=True):
        assert (one.queries.folder, one.documents.folder) == (other.queries.folder, other.documents.folder)
        assert one.encoder == other.encoder
        assert other.made_by is None
    assert after[1].documents.documents == 3
    with pytest.raises(NoModelError, match="there is no such folder"):
        find(tmp_path, named, embedding_dtype="float16")  # only the model could say whether these are what is there


def test_a_subset_that_was_encoded_alone_is_used_too(stan: Path, tmp_path: Path) -> None:
    named, part = f"multi-vector:{stan}", limit_task(TASK, documents=3)
    before = embeddings(TASK, named, tmp_path / "cache", kept=part, quiet=True)
    shutil.rmtree(stan)
    with pytest.warns(UserWarning, match="are used"):
        after = embeddings(TASK, named, tmp_path / "cache", kept=part, quiet=True)
    assert before.documents.folder == after.documents.folder
    with pytest.raises(NoModelError, match="there is no such folder"):
        find(tmp_path, named)


def test_what_only_the_model_could_tell_apart_is_refused(stan: Path, tmp_path: Path) -> None:
    named = f"multi-vector:{stan}"
    find(tmp_path, named)
    with pytest.warns(UserWarning, match="encoded anew"):
        find(tmp_path, named, embedding_dtype="float16")
    shutil.rmtree(stan)
    with pytest.raises(DataError, match="hold the same texts by it, with other options"):
        find(tmp_path, named)


def test_an_entry_that_was_only_begun_is_not_said_to_hold_them(stan: Path, tmp_path: Path) -> None:
    named = f"multi-vector:{stan}"
    made = find(tmp_path, named)
    for shard in made.documents.folder.glob("*.h5"):
        shard.unlink()
    with pytest.warns(UserWarning, match="encoded anew") as said:
        find(tmp_path, named, embedding_dtype="float16")
    assert ["queries are encoded anew" in str(one.message) for one in said] == [True]
