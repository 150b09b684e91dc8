"""Importing into the cache: rows in the task's order, found again by the cache, refused or replaced on purpose only."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsim_eval.cache.entries import Entry, open_entry
from maxsim_eval.cache.sides import content_hash, embed, find_imported
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import CacheError, DataError, UsageError
from maxsim_eval.importing import rows
from maxsim_eval.importing.importing import import_embeddings
from maxsim_eval.types import Role, Task
from maxsim_kernels import Packed, pack
from task_cases import small_task

DIM = 8
QUERY_IDS = ["q1", "q2", "q3"]
DOCUMENT_IDS = [f"d{n}" for n in range(20)]
QRELS = {"q1": {"d3": 1, "d4": 0}, "q3": {"d9": 2}}
NAMES: dict[str, Any] = {"source": "local", "dataset": "toy", "encoder_name": "colbertv2", "quiet": True}


def matrix(name: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Tokens that only depend on the id, so that a row in the wrong place is seen."""
    seed = zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(seed % 6, DIM, generator=generator), dim=1).to(dtype)


def content(queries: list[str] = QUERY_IDS, documents: list[str] = DOCUMENT_IDS, **meta: Any) -> dict[str, Any]:
    return {
        "query_embeddings": [matrix(name) for name in queries],
        "doc_embeddings": [matrix(name) for name in documents],
        "meta": {"qrels": QRELS, "query_ids": queries, "doc_ids": documents} | meta,
    }


def shuffled(names: list[str], seed: int = 0) -> list[str]:
    return [names[n] for n in np.random.default_rng(seed).permutation(len(names))]


@pytest.fixture
def task() -> Task:
    """Its queries are the judged ones: q2 has no judgement."""
    texts = [f"text {n}" for n in range(20)]
    return small_task(["what", "why"], texts, dataset="toy", query_ids=["q1", "q3"], qrels=QRELS)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Entry]]:
    def import_(file: Any, task: Task | None = None, **options: Any) -> dict[str, Entry]:
        folders = {"cache_dir": tmp_path / "cache", "data_dir": tmp_path / "data"}
        if isinstance(file, dict) and any(key.endswith("embeddings") for key in file):
            torch.save(file, tmp_path / "e.pt")
            file = tmp_path / "e.pt"
        return import_embeddings(file, task, **(NAMES | folders | options))

    return import_


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_holds(entry: Entry, names: list[str], dtype: torch.dtype = torch.float16) -> None:
    assert entry.ids() == names
    got = open_entry(entry.folder, verify=True).load()
    assert got.dtype == dtype
    assert got.lengths.tolist() == [len(matrix(name)) for name in names]
    for row, name in enumerate(names):
        assert torch.equal(got[row], matrix(name, dtype)), name
    blocks = list(entry.blocks(max_bytes=100))
    assert torch.equal(torch.cat([block.values for block in blocks]), got.values)


def test_rows_come_into_the_order_of_the_task(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    entries = run(content(shuffled(QUERY_IDS), shuffled(DOCUMENT_IDS)), task, revision="v1")
    assert set(entries) == {"query", "document"}
    assert_holds(entries["query"], ["q1", "q3"])
    assert_holds(entries["document"], DOCUMENT_IDS)
    provenance = entries["query"].manifest["provenance"]
    assert provenance["notes"][-1] == "1 queries without judgements in local/toy (test) were left out"
    empty = [name for name in QUERY_IDS if not len(matrix(name))]
    assert provenance["notes"][:-1] == [
        f"query_embeddings: {len(empty)} of 3 rows have no token; they are kept, and never retrieved"
    ]
    wanted = {"origin": "imported", "encoder": "colbertv2", "revision": "v1", "role": "query", "file": "e.pt"}
    assert wanted.items() <= provenance.items()
    assert provenance["content"] == content_hash(task.query_ids, task.queries)
    assert len(provenance["file_sha256"]) == 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["dense", "chunks", "values"])
def test_every_layout_and_dtype_reaches_the_cache(
    task: Task, run: Callable[..., dict[str, Entry]], layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsim_eval.importing.importing.SHARD_BYTES", 200)
    monkeypatch.setattr("maxsim_eval.importing.importing.CHUNK", 3)
    names = shuffled(DOCUMENT_IDS, 1)
    rows = [matrix(name, dtype) for name in names]
    dense = torch.zeros(20, 6, DIM, dtype=dtype)
    for number, row in enumerate(rows):
        dense[number, : len(row)] = row
    lengths = [len(row) for row in rows]
    file = {
        "dense": {"doc_embeddings": dense, "doc_lengths": lengths},
        "chunks": {"doc_embeddings": list(dense.split(7)), "doc_lengths": lengths},
        "values": {"document_values": pack(rows).values, "document_offsets": pack(rows).offsets, "x_embeddings": 0},
    }[layout]
    entry = run({**file, "meta": {"doc_ids": names}}, task)["document"]
    assert_holds(entry, DOCUMENT_IDS, dtype)
    assert len(list(entry.folder.glob("*.h5"))) > 2


def test_float64_is_stored_as_float32_and_said(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    rows = [matrix(name, torch.float32).double() for name in DOCUMENT_IDS]
    entry = run({"doc_embeddings": rows, "doc_ids": DOCUMENT_IDS}, task)["document"]
    assert_holds(entry, DOCUMENT_IDS, torch.float32)
    assert "float64" in " ".join(entry.manifest["provenance"]["notes"])


def test_without_ids_the_order_is_assumed_and_said(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    file = content(["q1", "q3"])
    del file["meta"]
    entries = run(file, task)
    assert_holds(entries["query"], ["q1", "q3"])
    assert_holds(entries["document"], DOCUMENT_IDS)
    assert "by order alone" in " ".join(entries["document"].manifest["provenance"]["notes"])


class NeverEncodes:
    """An encoder whose embeddings exist already: asking it to encode is the failure this test looks for."""

    name = "colbertv2"
    revision = "v1"
    dim = DIM

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return {"model": "colbertv2"}

    def prepare(self, documents: Any) -> None:
        raise AssertionError("prepare was called")

    def encode(self, items: Any, role: Role) -> Packed:
        raise AssertionError("encode was called")


def test_embed_finds_what_was_imported(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    entries = run(content(), task)
    for role in ("query", "document"):
        found = embed(task, role, NeverEncodes(), tmp_path / "cache", quiet=True)  # type: ignore[arg-type]
        assert found.folder == entries[role].folder
    digest = content_hash(task.document_ids, [*task.documents[:-1], "edited"])
    assert find_imported(tmp_path / "cache", "local", "toy", "colbertv2", "document", digest) is None


def test_a_file_with_ids_and_qrels_becomes_a_dataset(run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    entries = run(content(QUERY_IDS, shuffled(DOCUMENT_IDS)), revision="r")
    folder = tmp_path / "data" / "local" / "toy"
    assert sorted(tree(folder)) == ["corpus.jsonl", "origin.json", "qrels/test.tsv", "queries.jsonl"]
    assert (folder / "qrels/test.tsv").read_text().splitlines()[:2] == ["query-id\tcorpus-id\tscore", "q1\td3\t1"]
    origin = json.loads((folder / "origin.json").read_text())
    assert list(origin["files"]) == ["e.pt"]
    assert (origin["encoder"], origin["revision"]) == ("colbertv2", "r")
    assert not [path for path in folder.parent.iterdir() if path.name != "toy"]
    task = load_task("local", "toy", data_dir=tmp_path / "data")
    assert task.query_ids == ["q1", "q3"]
    assert task.document_ids == shuffled(DOCUMENT_IDS)
    assert task.qrels == QRELS
    assert_holds(entries["query"], ["q1", "q3"])
    assert_holds(entries["document"], shuffled(DOCUMENT_IDS))
    found = embed(task, "document", NeverEncodes(), tmp_path / "cache", quiet=True)
    assert found.folder == entries["document"].folder


def test_a_second_encoder_joins_the_dataset(run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    run(content())
    before = tree(tmp_path / "data")
    other = content(shuffled(QUERY_IDS, 3), shuffled(DOCUMENT_IDS, 3), qrels=QRELS | {"q1": {"d3": 2}})
    entry = run(other, encoder_name="colpali")["document"]
    assert_holds(entry, DOCUMENT_IDS)
    assert tree(tmp_path / "data") == before
    assert "2 judgements differ from those of local/toy" in " ".join(entry.manifest["provenance"]["notes"])


def test_ids_that_need_quotes_in_qrels(run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    names = ['"Weird_Al"_Yankovic', "a'b", "ü/#?"]
    meta = {"qrels": {'"q"': dict.fromkeys(names, 1)}}
    run(content(['"q"'], names, **meta))
    assert load_task("local", "toy", data_dir=tmp_path / "data").qrels == meta["qrels"]


def test_judgements_of_unknown_ids_stay_and_are_said(run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    entry = run(content(qrels=QRELS | {"q1": {"d3": 1, "gone": 1}, "q77": {"d1": 1}}))["query"]
    notes = " ".join(entry.manifest["provenance"]["notes"])
    assert "1 of 3 queries are not among the file's queries" in notes
    assert "1 of 4 judgements name documents that are not in the file" in notes
    assert load_task("local", "toy", data_dir=tmp_path / "data").qrels["q1"] == {"d3": 1, "gone": 1}


@pytest.mark.parametrize(
    ("meta", "match"),
    [
        ({"qrels": None}, r"no dataset 'toy' in .*it has no qrels\. Put the dataset"),
        ({"doc_ids": None, "qrels": None}, r"it has no document ids, no qrels"),
        ({"qrels": {"q1": {"gone": 1}, "q9": {"d1": 1}}}, r"no judgement names a query and a document of the file"),
        ({"qrels": QRELS | {"q2": {"d 7": 1}}}, r"id 'd 7' is empty or holds white space"),
        ({"qrels": {"q1": {"d3": 0}, "q9": {"d1": 1}}}, r"none of the 1 judged queries has a relevant document"),
    ],
)
def test_files_that_cannot_become_a_dataset(
    run: Callable[..., dict[str, Entry]], tmp_path: Path, meta: Mapping[str, Any], match: str
) -> None:
    with pytest.raises(DataError, match=match):
        run(content(**meta))
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "cache").exists()


def test_one_role_cannot_become_a_dataset(run: Callable[..., dict[str, Entry]]) -> None:
    file = content()
    del file["query_embeddings"]
    with pytest.raises(DataError, match=r"it has no query embeddings"):
        run(file)


def test_a_dataset_folder_that_cannot_be_written(
    run: Callable[..., dict[str, Entry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maxsim_eval.data.beir.os.fsync", full)
    with pytest.raises(DataError, match=r"toy: the dataset folder cannot be written: .*No space left"):
        run(content())
    assert list((tmp_path / "data" / "local").iterdir()) == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("queries", "documents", "match"),
    [
        (
            QUERY_IDS,
            DOCUMENT_IDS[:-2],
            r"document ids are not those of local/toy \(test\): 2 of 20 are missing \('d18', 'd19'\)",
        ),
        (QUERY_IDS, [*DOCUMENT_IDS, "x"], r"0 of 20 are missing, 1 are not in the task \('x'\)"),
        (
            ["q1", "q2"],
            DOCUMENT_IDS,
            r"query ids are not those .*: 1 of 2 are missing \('q3'\), 1 are not in the task \('q2'\)",
        ),
    ],
)
def test_ids_of_another_task(
    task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path, queries: list[str], documents: list[str], match: str
) -> None:
    with pytest.raises(DataError, match=match):
        run(content(queries, documents), task)
    assert not (tmp_path / "cache").exists()


def test_counts_without_ids(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    rows = [matrix(name) for name in QUERY_IDS]
    with pytest.raises(DataError, match=r"holds 3 queries without ids, .* has 2 \(those with judgements\).*Save query_ids"):
        run({"query_embeddings": rows}, task)
    with pytest.raises(DataError, match=r"holds 3 documents without ids, .* has 20:.*Save doc_ids"):
        run({"doc_embeddings": rows}, task)


def test_the_same_file_twice_changes_nothing(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    first = run(content(), task)
    before = tree(tmp_path / "cache")
    again = run(tmp_path / "e.pt", task)
    (tmp_path / "e.pt").rename(tmp_path / "renamed.pt")
    renamed = run(tmp_path / "renamed.pt", task, replace=True)
    assert {role: entry.folder for role, entry in first.items()} == {role: entry.folder for role, entry in again.items()}
    assert renamed["query"].folder == first["query"].folder
    assert tree(tmp_path / "cache") == before


def test_another_file_is_refused_or_replaces(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    old = run(content(), task)
    before = tree(tmp_path / "cache")
    other = content(documents=shuffled(DOCUMENT_IDS))
    with pytest.raises(DataError, match=r"already has imported query embeddings of 'colbertv2', from 'e.pt'.*--replace") as e:
        run(other, task)
    assert str(old["query"].folder) in str(e.value)
    assert tree(tmp_path / "cache") == before
    new = run(other, task, replace=True)
    assert_holds(new["document"], DOCUMENT_IDS)
    folders = {entry.folder for entry in new.values()}
    assert set((tmp_path / "cache" / "local" / "toy").iterdir()) == folders
    assert folders.isdisjoint(entry.folder for entry in old.values())
    found = embed(task, "query", NeverEncodes(), tmp_path / "cache", quiet=True)
    assert found.folder == new["query"].folder


def test_other_encoders_roles_and_texts_are_no_rivals(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    run(content(), task)
    run(content(documents=shuffled(DOCUMENT_IDS)), task, encoder_name="colpali")
    edited = changed(task, documents=[*task.documents[:-1], "edited"], queries=["what?", "why?"])
    run(content(documents=shuffled(DOCUMENT_IDS, 5)), edited)


def test_an_interrupted_import_is_continued(
    task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between shards: the old entry stays, the same file goes on where it stopped."""
    old = run(content(), task)
    monkeypatch.setattr("maxsim_eval.importing.importing.SHARD_BYTES", 300)
    torch.save(content(documents=shuffled(DOCUMENT_IDS)), tmp_path / "e.pt")
    take, calls = rows.TokenRows.take, []

    def stopped(self: Any, rows: Any) -> Packed:
        calls.append(len(rows))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return take(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr("maxsim_eval.importing.rows.TokenRows.take", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "e.pt", task, replace=True)
    assert_holds(open_entry(old["document"].folder), DOCUMENT_IDS)
    new = run(tmp_path / "e.pt", task, replace=True)
    assert_holds(new["document"], DOCUMENT_IDS)
    assert not old["document"].folder.exists()
    assert not old["query"].folder.exists()


def test_a_begun_import_of_another_file_is_a_rival(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    entry = run(content(), task)["document"]
    next(entry.folder.glob("*.h5")).unlink()
    with pytest.raises(DataError, match="--replace"):
        run(content(documents=shuffled(DOCUMENT_IDS)), task)
    run(content(documents=shuffled(DOCUMENT_IDS)), task, replace=True)
    assert not entry.folder.exists()


def test_several_files(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    for name, ids in (("a", QUERY_IDS), ("b", DOCUMENT_IDS)):
        rows = pack([matrix(key) for key in ids])
        np.savez(tmp_path / f"{name}.npz", values=rows.values.numpy(), offsets=rows.offsets.numpy(), ids=np.array(ids))
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    with pytest.raises(DataError, match=r"a.npz and .*b.npz: both hold document embeddings"):
        run([a, b], task)
    entries = run({"query": a, "document": b}, task)
    assert_holds(entries["query"], ["q1", "q3"])
    assert_holds(entries["document"], DOCUMENT_IDS)
    queries, documents = a.rename(tmp_path / "queries.npz"), b.rename(tmp_path / "corpus.npz")
    again = run([documents, str(queries)], task, replace=True)
    assert {e.folder for e in again.values()} == {e.folder for e in entries.values()}
    torch.save({"query_embeddings": torch.ones(2, 3, DIM + 1)}, tmp_path / "wide.pt")
    with pytest.raises(DataError, match=r"mixed embedding widths: 8 in .*corpus.npz \(document\), 9 in .*wide.pt"):
        run([documents, tmp_path / "wide.pt"], task)
    with pytest.raises(DataError, match=r"wide.pt: holds no document embeddings"):
        run({"document": tmp_path / "wide.pt"}, task)


def test_one_role_of_a_file_that_holds_both(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    run(content(), task)
    assert set(run({"query": tmp_path / "e.pt"}, task)) == {"query"}
    assert set(run({"query": tmp_path / "e.pt", "document": tmp_path / "e.pt"}, task)) == {"query", "document"}


def test_qrels_of_two_files(run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    file = content()
    torch.save({"doc_embeddings": file["doc_embeddings"], "meta": {"doc_ids": DOCUMENT_IDS}}, tmp_path / "d.pt")
    torch.save({"query_embeddings": file["query_embeddings"], "query_ids": QUERY_IDS, "qrels": QRELS}, tmp_path / "q.pt")
    assert set(run([tmp_path / "d.pt", tmp_path / "q.pt"])) == {"query", "document"}
    torch.save({"doc_embeddings": file["doc_embeddings"], "meta": {"qrels": {"q1": {"d1": 1}}}}, tmp_path / "d.pt")
    with pytest.raises(DataError, match=r"d.pt and .*q.pt: their qrels differ"):
        run([tmp_path / "d.pt", tmp_path / "q.pt"])


def test_siblings_belong_to_the_file(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    """Other ids beside the same npy file are another import."""
    rows = pack([matrix(name) for name in DOCUMENT_IDS])
    np.save(tmp_path / "d.npy", rows.values.numpy())
    np.save(tmp_path / "d.offsets.npy", rows.offsets.numpy())
    (tmp_path / "d.ids.txt").write_text("\n".join(DOCUMENT_IDS))
    assert_holds(run(tmp_path / "d.npy", task)["document"], DOCUMENT_IDS)
    (tmp_path / "d.ids.txt").write_text("\n".join(reversed(DOCUMENT_IDS)))
    with pytest.raises(DataError, match="--replace"):
        run(tmp_path / "d.npy", task)


def test_names_that_cannot_work(
    task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, match in (
        ({"dataset": "../up"}, r"dataset: got '../up'; a new local dataset needs a plain name"),
        ({"dataset": ""}, r"dataset: got an empty name"),
        ({"encoder_name": " "}, r"encoder_name: got an empty name"),
        ({"source": "beir"}, r"source: got 'beir' without a task"),
        ({"dataset": "a/b"}, r"a new local dataset needs a plain name, not a path"),
        ({"dataset": ".."}, r"a new local dataset needs a plain name|corpus"),
    ):
        with pytest.raises(UsageError, match=match):
            run(content(), **options)
    with pytest.raises(UsageError, match=r"task: is local/toy, but source/dataset are local/other"):
        run(content(), task, dataset="other")
    with pytest.raises(UsageError, match=r"got no file"):
        run([], task)
    with pytest.raises(UsageError, match=r"paths: got roles \['passage'\]"):
        run({"passage": tmp_path / "e.pt"}, task)
    assert not (tmp_path / "cache").exists()


def test_a_dataset_of_ir_datasets_is_named_with_its_split(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    task = changed(task, source="irds", dataset="beir/toy", provenance={"id": "beir/toy/test"})
    for dataset in ("beir/toy/test", "beir/toy"):
        assert run(content(), task, source="irds", dataset=dataset)["document"].documents == len(DOCUMENT_IDS)
    with pytest.raises(UsageError, match=r"task: is irds/beir/toy, but source/dataset are irds/beir/toy/dev"):
        run(content(), task, source="irds", dataset="beir/toy/dev")


def test_a_damaged_entry_of_the_same_file(task: Task, run: Callable[..., dict[str, Entry]]) -> None:
    entry = run(content(), task)["document"]
    (entry.folder / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match=r"manifest.json"):
        run(content(), task)


def test_bad_values_write_nothing(task: Task, run: Callable[..., dict[str, Entry]], tmp_path: Path) -> None:
    file = content()
    next(row for row in reversed(file["doc_embeddings"]) if len(row))[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"document 'd\d+' \(row \d+\): token 0 holds NaN"):
        run(file, task)
    assert not (tmp_path / "cache").exists()
