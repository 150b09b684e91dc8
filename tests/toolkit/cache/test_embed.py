"""Keys, names and `embed`: an entry is hit when nothing changed, and never otherwise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from maxsim_eval.cache import sides
from maxsim_eval.cache.entries import Entry
from maxsim_eval.cache.sides import content_hash, embed, entry_folder, entry_key, find_imported, holds_documents
from maxsim_eval.errors import CacheError, UsageError
from maxsim_eval.types import Role, Task
from maxsim_kernels import Packed, pack
from stored_cases import filled
from task_cases import small_task


@dataclass
class LetterEncoder:
    """One token a letter: its code, and what the settings say."""

    name: str = "letters"
    revision: str = "1"
    dim: int = 2
    settings: dict[str, Any] = field(default_factory=lambda: {"code": 1, "max_tokens": {"query": 4, "document": 9}})
    dtype: torch.dtype = torch.float16
    calls: list[tuple[str, int]] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)
    fail_at: int | None = None

    def fingerprint(self, role: Role) -> dict[str, Any]:
        return self.settings

    def prepare(self, documents: Sequence[Any]) -> None:
        self.prepared.append(len(documents))

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        if self.fail_at == len(self.calls):
            raise KeyboardInterrupt
        self.calls.append((role, len(items)))
        rows = [torch.tensor([[ord(letter), float(role == "query")] for letter in text]) for text in items]
        return pack([row.reshape(-1, 2).to(self.dtype) for row in rows], dim=2, dtype=self.dtype)


def task(count: int = 5, **changes: Any) -> Task:
    texts = [f"text {n}" if n % 4 else "" for n in range(count)]
    names = {"dataset": "letters", "query_ids": ["q1", "q2"], "qrels": {"q1": {"d1": 1}, "q2": {"d2": 1}}}
    return small_task(["what", "why"], texts, **{**names, **changes})


def run(cache: Path, made: Task, role: Role = "document", **changes: Any) -> tuple[Entry, LetterEncoder]:
    encoder = LetterEncoder(**changes)
    return embed(made, role, encoder, cache, quiet=True), encoder


@dataclass
class Image:
    """What a PIL image looks like from outside."""

    pixels: bytes = b"\1\2\3\4"
    mode: str = "L"
    size: tuple[int, int] = (2, 2)
    palette: tuple[int, ...] | None = None

    def tobytes(self) -> bytes:
        return self.pixels

    def getpalette(self) -> list[int] | None:
        return None if self.palette is None else list(self.palette)


def test_content_hash_has_no_two_readings() -> None:
    different = [
        (["ab"], ["c"]),
        (["a"], ["bc"]),
        (["a", "b"], ["c", "d"]),
        (["b", "a"], ["c", "d"]),
        (["a", "b"], ["d", "c"]),
        (["a", "b"], ["cd", ""]),
        (["a", "b"], ["", "cd"]),
        ([], []),
        ([""], [""]),
        (["a"], ["image"]),
        (["a"], ["é"]),
        (["a"], ["e\u0301"]),
        (["a"], ["\ud800"]),
        (["a"], [Image()]),
        (["a"], [Image(pixels=b"\1\2\3\5")]),
        (["a"], [Image(mode="P", palette=(0, 1, 2))]),
        (["a"], [Image(mode="P", palette=(0, 1, 3))]),
        (["a"], [Image(size=(4, 1))]),
    ]
    assert len({content_hash(*case) for case in different}) == len(different)
    assert content_hash(("a",), ("b",)) == content_hash(["a"], ["b"])


def test_content_hash_does_not_depend_on_what_is_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Image() if n == 500 else f"text {n} \ud800" for n in range(700)]
    names = [f"d{n}" for n in range(len(items))]
    found = content_hash(names, items)
    monkeypatch.setattr(sides, "_FED", 7)
    assert content_hash(names, items) == found
    running = hashlib.sha256()
    for part in (b"maxsim-eval/content/1", b"2", b"d0", b"text", b"a", b"d1", b"text", b"bc"):
        running.update(len(part).to_bytes(8, "little") + part)
    assert content_hash(["d0", "d1"], ["a", "bc"]) == running.hexdigest()


def test_content_hash_is_stable() -> None:
    # Part of the format: another value would orphan every entry on every disk.
    assert content_hash(["d1", "d2"], ["a text", "ein Text: äöü"])[:16] == "7840f491285c64dd"
    assert entry_key("abc", {"b": [1, 2.5, None], "a": {"x": "ü"}}) == "604d0437562dd0b9"


def test_content_hash_refuses() -> None:
    with pytest.raises(UsageError, match="items: got 1, need one for each of the 2 ids"):
        content_hash(["a", "b"], ["c"])
    with pytest.raises(UsageError, match="item 'b': got int, need a text or a PIL image"):
        content_hash(["a", "b"], ["c", 3])


def test_entry_key() -> None:
    key = entry_key("content", {"model": "m", "length": 32, "nested": {"prompt": "query: "}})
    assert len(key) == 16
    assert int(key, 16) >= 0
    assert key == entry_key("content", {"nested": {"prompt": "query: "}, "length": 32, "model": "m"})
    others = [
        entry_key("other", {"model": "m", "length": 32, "nested": {"prompt": "query: "}}),
        entry_key("content", {"model": "n", "length": 32, "nested": {"prompt": "query: "}}),
        entry_key("content", {"model": "m", "length": 33, "nested": {"prompt": "query: "}}),
        entry_key("content", {"model": "m", "length": 32, "nested": {"prompt": "query:"}}),
        entry_key("content", {"model": "m", "length": 32}),
    ]
    assert len({key, *others}) == 6


def test_entry_folder(tmp_path: Path) -> None:
    plain = entry_folder(tmp_path, "beir", "scifact", "lexical", "document", "0123456789abcdef")
    assert plain == tmp_path / "beir" / "scifact" / "lexical-documents-0123456789abcdef"
    assert entry_folder("c", "beir", "s", "lexical", "query", "k") == Path("c/beir/s/lexical-queries-k")


@pytest.mark.parametrize(
    "name", ["..", "/", "../../up", "hf:/models/a b", "a\\b", "\0", "", "x" * 300, ".hidden", "日本語", "CON:", "-rf"]
)
def test_entry_folder_is_inside_whatever_the_names(tmp_path: Path, name: str) -> None:
    folder = entry_folder(tmp_path, name, name, name, "document", "k")
    assert folder.resolve().relative_to(tmp_path.resolve()).parts == folder.parts[-3:]
    assert not any(part.startswith((".", "-")) for part in folder.parts[-3:])
    folder.mkdir(parents=True)


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_embed_encodes_once(tmp_path: Path, role: Role, dtype: torch.dtype) -> None:
    made = task()
    entry, encoder = run(tmp_path, made, role, dtype=dtype)
    assert encoder.calls == [(role, 2 if role == "query" else 5)]
    assert encoder.prepared == ([5] if role == "query" else [])
    ids, items = (made.query_ids, made.queries) if role == "query" else (made.document_ids, made.documents)
    assert entry.ids() == ids
    expected = LetterEncoder(dtype=dtype).encode(items, role)
    assert torch.equal(entry.load().values, expected.values)
    assert entry.dtype == dtype
    again, encoder = run(tmp_path, made, role, dtype=dtype)
    assert encoder.calls == encoder.prepared == []
    assert again.folder == entry.folder


def test_roles_do_not_mix(tmp_path: Path) -> None:
    made = task(2, query_ids=["d0", "d1"], queries=["", "text 1"])
    documents, _ = run(tmp_path, made, "document")
    queries, _ = run(tmp_path, made, "query")
    assert documents.folder.name.startswith("letters-documents-")
    assert queries.folder.name.startswith("letters-queries-")
    assert documents.manifest["key"] != queries.manifest["key"]


def test_provenance(tmp_path: Path) -> None:
    made = task()
    entry, encoder = run(tmp_path, made)
    provenance = entry.manifest["provenance"]
    assert provenance["packages"].pop("torch")
    assert {"maxsim-eval", "numpy", "h5py"} <= set(provenance.pop("packages"))
    assert provenance == {
        "origin": "encoded",
        "content": content_hash(made.document_ids, made.documents),
        "source": "local",
        "dataset": "letters",
        "role": "document",
        "encoder": "letters",
        "revision": "1",
        "fingerprint": encoder.settings,
    }


@pytest.mark.filterwarnings("ignore:.*are encoded anew")
@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "2"},
        {"name": "other"},
        {"settings": {"code": 2, "max_tokens": {"query": 4, "document": 9}}},
        {"settings": {"code": 1, "max_tokens": {"query": 4, "document": 8}}},
        {"settings": {"code": 1, "max_tokens": {"query": 4, "document": 9}, "prompt": ""}},
    ],
    ids=str,
)
def test_another_encoder_is_another_entry(tmp_path: Path, changes: dict[str, Any]) -> None:
    first, _ = run(tmp_path, task())
    second, encoder = run(tmp_path, task(), **changes)
    assert encoder.calls
    assert first.manifest["key"] != second.manifest["key"]
    assert first.folder != second.folder


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": ["", "text 1", "text 2", "text 3", "x"]},
        {"documents": ["", "text 2", "text 1", "text 3", ""]},
        {"document_ids": ["d0", "d1", "d2", "d3", "x"]},
    ],
    ids=str,
)
def test_other_texts_are_another_entry(tmp_path: Path, changes: dict[str, Any]) -> None:
    first, _ = run(tmp_path, task())
    second, encoder = run(tmp_path, task(**changes))
    assert encoder.calls
    assert first.folder != second.folder


def test_the_split_is_not_in_the_key(tmp_path: Path) -> None:
    first, _ = run(tmp_path, task())
    second, encoder = run(tmp_path, task(split="dev", qrels={"q1": {"d3": 1}}, provenance={"x": 1}))
    assert encoder.calls == []
    assert first.folder == second.folder


@pytest.mark.parametrize("corpus_statistics", [True, False])
def test_corpus_statistics_are_in_the_key_of_queries(tmp_path: Path, corpus_statistics: bool) -> None:
    settings = {"corpus_statistics": corpus_statistics}
    first, _ = run(tmp_path, task(5), "query", settings=settings)
    second, encoder = run(tmp_path, task(6), "query", settings=settings)
    assert bool(encoder.calls) == corpus_statistics
    assert (first.folder != second.folder) == corpus_statistics


def test_chunks_and_resume(tmp_path: Path) -> None:
    made = task(1300)  # shards of 512, chunks of 256
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, made, fail_at=3)
    entry, encoder = run(tmp_path, made)
    assert encoder.calls == [("document", size) for size in (256, 256, 256, 20)]  # the first shard was there
    assert torch.equal(entry.load().values, LetterEncoder().encode(made.documents, "document").values)
    entry, encoder = run(tmp_path / "whole", made)
    assert encoder.calls == [("document", size) for size in (256, 256, 256, 256, 256, 20)]


def test_shards_hold_whole_chunks_of_an_encoder_that_takes_many(tmp_path: Path) -> None:
    encoder = LetterEncoder()
    encoder.chunk = 1100  # type: ignore[attr-defined]
    embed(task(1200), "document", encoder, tmp_path, quiet=True)
    assert encoder.calls == [("document", 1100), ("document", 100)], "nothing is encoded twice, and no chunk is cut by a shard"


def test_few_texts_go_first_where_many_are_worked_on_at_once(tmp_path: Path) -> None:
    @dataclass
    class AtOnce(LetterEncoder):
        at_once: int = 3
        chunk: int = 512
        expected: list[tuple[int, int]] = field(default_factory=list)

        def expect(self, items: int) -> None:
            self.expected.append((items, len(self.calls)))

    encoder = AtOnce()
    found = embed(task(1500), "document", encoder, tmp_path / "at once", quiet=True)
    assert [count for _, count in encoder.calls[:1]] == [128], "all others wait for these"
    assert sorted(count for _, count in encoder.calls[1:]) == [476, 512, 512], (
        "no text is left out, none goes twice but the first"
    )
    assert set(encoder.expected) == {(1500, 0), (1500, 1)}, "before the first, and before the rest"
    alone, _ = run(tmp_path / "alone", task(1500))
    assert torch.equal(found.load().values, alone.load().values)
    side = sides.TaskSide(task(1500), "document", AtOnce(), tmp_path / "side")
    with side.begun() as begun:
        assert side._first is not None
        side.fill(begun, quiet=True)
        assert side._first is None, "no piece, whose memory nobody would give back"


def test_interrupted_before_anything_was_known(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, task(), fail_at=0)
    assert list(tmp_path.rglob("*")) == []


def test_nothing_to_embed(tmp_path: Path) -> None:
    made = task(query_ids=[], queries=[])
    entry, _ = run(tmp_path, made, "query")
    assert (entry.documents, entry.tokens) == (0, 0)
    _, encoder = run(tmp_path, made, "query")
    assert encoder.calls == []


@pytest.mark.usefixtures("every_bar")
def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embed(task(), "query", LetterEncoder(), tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "encode letters: 100%" in captured.err
    assert " queries/s" in captured.err
    embed(task(), "document", LetterEncoder(), tmp_path)
    assert " documents/s" in capsys.readouterr().err
    embed(task(), "document", LetterEncoder(), tmp_path)
    assert capsys.readouterr().err == ""


def import_entry(cache: Path, made: Task, key: str = "f" * 16, **provenance: Any) -> Entry:
    known = {"origin": "imported", "content": content_hash(made.document_ids, made.documents), "encoder": "letters"}
    rows = [torch.full((n, 3), float(n)) for n in range(len(made.documents))]
    folder = entry_folder(cache, "local", "letters", "letters", "document", key)
    return filled(folder, rows, ids=made.document_ids, key=key, provenance={**known, **provenance})


def find(cache: Path, made: Task, name: str = "letters", role: Role = "document") -> Entry | None:
    return find_imported(cache, "local", "letters", name, role, content_hash(made.document_ids, made.documents))


def test_imported_entry_is_used(tmp_path: Path) -> None:
    made = task()
    imported = import_entry(tmp_path, made)
    entry, encoder = run(tmp_path, made)
    assert encoder.calls == []
    assert entry.folder == imported.folder
    assert entry.dim == 3


def test_exact_entry_goes_before_an_imported_one(tmp_path: Path) -> None:
    exact, _ = run(tmp_path, task())
    import_entry(tmp_path, task())
    entry, _ = run(tmp_path, task())
    assert entry.folder == exact.folder


def test_imported_entries_of_something_else_are_not_used(tmp_path: Path) -> None:
    assert find(tmp_path, task()) is None
    import_entry(tmp_path, task(), "1" * 16, content="of other texts")
    import_entry(tmp_path, task(), "2" * 16, origin="encoded")
    import_entry(tmp_path, task(), "3" * 16, encoder="let/ters")
    assert find(tmp_path, task()) is None
    import_entry(tmp_path, task())
    assert find(tmp_path, task()) is not None
    assert find(tmp_path, task(), name="letter") is None
    assert find(tmp_path, task(), role="query") is None
    assert find(tmp_path, task(6)) is None


def test_two_imported_entries_are_not_chosen_between(tmp_path: Path) -> None:
    for key in ("1" * 16, "2" * 16):
        import_entry(tmp_path, task(), key)
    with pytest.raises(CacheError, match=f"{'1' * 16} and .*{'2' * 16}: imported embeddings of the same texts"):
        run(tmp_path, task())


def test_imported_entry_that_is_partial_or_damaged(tmp_path: Path) -> None:
    folder = import_entry(tmp_path, task()).folder
    (folder / "00000.h5").unlink()
    with pytest.raises(CacheError, match="partial"):
        run(tmp_path, task())
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match=r"manifest\.json: damaged"):
        run(tmp_path, task())


def test_damaged_exact_entry_is_refused_not_encoded_again(tmp_path: Path) -> None:
    entry, _ = run(tmp_path, task())
    (entry.folder / "00000.h5").write_bytes(b"x")
    with pytest.raises(CacheError, match=r"00000\.h5: not an HDF5 file"):
        run(tmp_path, task())
    manifest = json.loads((entry.folder / "manifest.json").read_text())
    (entry.folder / "manifest.json").write_text(json.dumps({**manifest, "format": "maxsim-eval/cache/0"}))
    with pytest.raises(CacheError, match=r"'maxsim-eval/cache/0'.*'maxsim-eval/cache/1'"):
        run(tmp_path, task())


def test_an_encoder_whose_width_is_not_what_it_says(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"got dim 2.*need dim 7"):
        run(tmp_path, task(), dim=7)


def test_model_is_not_touched_when_everything_is_cached(tmp_path: Path) -> None:
    class Unloaded(LetterEncoder):
        @property
        def dim(self) -> int:  # type: ignore[override]
            raise AssertionError("asking for dim may load the model")

        @dim.setter
        def dim(self, value: int) -> None: ...

    run(tmp_path, task())
    assert embed(task(), "document", Unloaded(), tmp_path, quiet=True).documents == 5


def test_a_cache_says_whether_it_may_hold_the_documents(tmp_path: Path) -> None:
    """Whole ones by this encoder, of whichever texts: where there are none, what is asked for has to be encoded."""

    def holds(name: str = "letters", dataset: str = "letters") -> bool:
        return holds_documents(tmp_path, "local", dataset, name)

    assert not holds()
    embed(task(), "query", LetterEncoder(), tmp_path, quiet=True)
    assert not holds(), "queries alone"
    with pytest.raises(KeyboardInterrupt):
        embed(task(1200), "document", LetterEncoder(fail_at=3), tmp_path, quiet=True)
    assert not holds(), "only begun"
    entry = embed(task(), "document", LetterEncoder(), tmp_path, quiet=True)
    assert holds()
    assert holds("letters@abc"), "of another revision, maybe"
    assert not holds("others")
    assert not holds(dataset="others")
    entry.shards[0].path.unlink()
    assert not holds()
