"""Embeddings in chunks, read one file at a time: every layout, any order, continued, and sets that cannot be right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from import_cases import DOCUMENTS, IDS, QRELS, Run, assert_holds, assert_rows, padded, tokens
from maxsim_eval.cache import filling
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.importing import many_files
from maxsim_eval.importing.importing import read_embeddings
from maxsim_kernels import pack

CHUNKS: dict[str, Callable[[list[torch.Tensor], list[str]], Any]] = {
    "lists": lambda rows, ids: rows,
    "padded": lambda rows, ids: padded(rows, 9),
    "padded, lengths": lambda rows, ids: {"embeddings": padded(rows, 9, 4.0), "lengths": [len(row) for row in rows]},
    "padded, mask, ids": lambda rows, ids: {
        "doc_embeddings": padded(rows, 7, 4.0, left=True),
        "doc_mask": torch.arange(7) >= torch.tensor([7 - len(row) for row in rows])[:, None],
        "doc_ids": ids,
    },
    "packed": lambda rows, ids: {"values": pack(rows).values, "offsets": pack(rows).offsets, "meta": {"doc_ids": ids}},
}


def chunks(folder: Path, layout: str, sizes: tuple[int, ...] = (2, 5, 1, 4), names: str = "chunk_{}.pt") -> list[Path]:
    """Numbered without zeros in front, from 8 on: a shell lists them in another order."""
    folder.mkdir(exist_ok=True)
    files, start = [], 0
    for number, size in enumerate(sizes, start=8):
        files.append(folder / names.format(number))
        torch.save(CHUNKS[layout](DOCUMENTS[start : start + size], IDS[start : start + size]), files[-1])
        start += size
    return files


@pytest.mark.parametrize("layout", CHUNKS)
@pytest.mark.parametrize("way", ["folder", "files", "role"])
def test_chunks(layout: str, way: str, run: Run, tmp_path: Path) -> None:
    files = sorted(chunks(tmp_path / "documents", layout), key=str)
    assert [file.stem for file in files] == ["chunk_10", "chunk_11", "chunk_8", "chunk_9"]
    paths = {"folder": tmp_path / "documents", "files": files, "role": {"document": files}}[way]
    entry = run(paths)["document"]
    assert_holds(entry)
    provenance = entry.manifest["provenance"]
    assert provenance["files"] == 4
    assert provenance["file"] == ("documents" if way == "folder" else "chunk_8.pt to chunk_11.pt (4 files)")
    notes = " ".join(provenance["notes"])
    assert ("by order alone" in notes) is ("ids" not in layout and layout != "packed")
    assert ("the order of their numbers; that order was taken" in notes) is (way != "folder")
    assert ("taken as padding (so, or with other numbers, in " in notes) is (layout == "padded")


def test_chunks_in_another_order_than_the_task(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards, each with rows of several chunks; every chunk is opened once for each shard at most."""
    shuffled = [IDS[n] for n in np.random.default_rng(0).permutation(12)]
    rows = [DOCUMENTS[IDS.index(name)] for name in shuffled]
    for number in range(3):
        part = slice(4 * number, 4 * number + 4)
        torch.save({"embeddings": rows[part], "ids": shuffled[part]}, tmp_path / f"docs_{number}.pt")
    monkeypatch.setattr("maxsim_eval.importing.importing.SHARD_BYTES", 4 * 48)
    opened: list[str] = []
    real = many_files.open_table

    def counted(path: Path) -> Any:
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(many_files, "open_table", counted)
    entry = run(sorted(tmp_path.glob("docs_*.pt")))["document"]
    assert_holds(entry)
    shards = len(list(entry.folder.glob("*.h5")))
    assert shards > 2
    assert len(opened) <= 1 + 3 + 3 * shards


def test_chunks_with_a_file_of_ids(run: Run, tmp_path: Path) -> None:
    files = chunks(tmp_path / "x", "lists")
    (tmp_path / "names.txt").write_text("\n".join(IDS))
    assert_holds(run(files, ids={"document": tmp_path / "names.txt"})["document"])
    (tmp_path / "names.txt").write_text("\n".join(IDS[:-1]))
    with pytest.raises(DataError, match=r"names.txt: ids: got 11 ids, need 12"):
        run(files, ids={"document": tmp_path / "names.txt"})
    with pytest.raises(UsageError, match=r"ids: got a file of query ids, but no embeddings of that role"):
        run(files, ids={"query": tmp_path / "names.txt"})
    with pytest.raises(DataError, match=r"none.txt: the file of ids cannot be read: No such file"):
        run(files, ids={"document": tmp_path / "none.txt"})


def test_the_same_chunks_elsewhere_are_the_same_import(run: Run, tmp_path: Path) -> None:
    chunks(tmp_path / "a", "padded")
    first = run(tmp_path / "a")["document"]
    (tmp_path / "a").rename(tmp_path / "b")
    assert run(tmp_path / "b")["document"].folder == first.folder
    for file in (tmp_path / "b").iterdir():
        file.rename(file.with_name(file.name.replace("chunk", "part")))
    assert run(sorted((tmp_path / "b").iterdir()))["document"].folder == first.folder
    chunks(tmp_path / "d", "padded", (3, 4, 1, 4))
    with pytest.raises(DataError, match=r"already has imported document embeddings .* from 'a'.*--replace"):
        run(tmp_path / "d")


def test_an_interrupted_import_of_chunks_is_continued(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.importing.importing.SHARD_BYTES", 100)
    files = chunks(tmp_path / "x", "lists")
    real, written = filling.write_shard, list[Path]()

    def write_two(path: Path, *rest: Any) -> int:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(filling, "write_shard", write_two)
        with pytest.raises(KeyboardInterrupt):
            run(files)
    finished = {path: path.stat().st_mtime_ns for path in written}
    assert len(finished) == 2
    entry = run(files)["document"]
    assert_holds(entry)
    assert {path: path.stat().st_mtime_ns for path in written} == finished, "finished shards are not written again"


def test_a_chunk_that_changes_while_it_is_imported(tmp_path: Path) -> None:
    files = chunks(tmp_path / "x", "lists")
    rows = read_embeddings(files, quiet=True).sides["document"].rows
    assert_rows(rows.span(7, 8), DOCUMENTS[7:8])
    torch.save(tokens([1, 1], seed=1), files[0])
    with pytest.raises(DataError, match=r"chunk_8.pt: changed while it was imported"):
        rows.span(0, 1)
    files[3].unlink()
    with pytest.raises(DataError, match=r"chunk_11.pt: cannot be read: No such file"):
        rows.span(8, 9)


def bad_chunk(content: Any) -> Callable[[list[Path]], Any]:
    return lambda files: torch.save(content, files[2])


BAD_CHUNKS: dict[str, tuple[Callable[[list[Path]], Any], str]] = {
    "NaN": (bad_chunk([DOCUMENTS[0], DOCUMENTS[0] * torch.nan]), r"chunk_10.pt: .*document in row 1: token 0 holds NaN"),
    "another width": (bad_chunk([torch.ones(2, 9).half()]), r"chunk_10.pt: .*mixed embedding widths.* 9, chunk_8.pt has 8"),
    "another dtype": (bad_chunk([torch.ones(2, 8)]), r"chunk_10.pt: .*mixed dtypes.*float32, chunk_8.pt has torch.float16"),
    "no rows": (bad_chunk([]), r"chunk_10.pt: embeddings: holds no rows"),
    "ids in some": (bad_chunk({"embeddings": DOCUMENTS[:1], "ids": ["a"]}), r"chunk_10.pt: .*has ids, the files before it have none"),
    "other qrels": (
        lambda files: [torch.save({"embeddings": DOCUMENTS[:1], "qrels": {"q1": {"d3": n}}}, files[n]) for n in (0, 2)],
        r"chunk_10.pt: its qrels differ from those of a file before it",
    ),
    "another role": (bad_chunk({"query_embeddings": DOCUMENTS[:1]}), r"chunk_10.pt: holds query embeddings, in a set of document"),
    "numpy in a torch file": (
        bad_chunk([np.ones((2, 8), np.float16)]),
        r"chunk_10.pt: refused, it holds the pickled object 'numpy.*python -c 'import torch; rows = torch.load\(\"chunk_10.pt\"",
    ),
    "truncated": (lambda files: files[2].write_bytes(files[2].read_bytes()[:400]), r"chunk_10.pt: .*damaged or truncated"),
    "missing": (lambda files: files[2].unlink(), r"chunk_10.pt: no such file"),
    "a row too many": (bad_chunk(DOCUMENTS[:2]), r"holds 13 documents without ids, .* has 12"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CHUNKS)
def test_bad_chunks(case: str, run: Run, tmp_path: Path) -> None:
    files = chunks(tmp_path / "x", "lists")
    spoil, match = BAD_CHUNKS[case]
    spoil(files)
    with pytest.raises(DataError, match=match) as e:
        run(files)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "cache").exists()


def test_orders_that_cannot_be_known(tmp_path: Path) -> None:
    files = chunks(tmp_path / "x", "lists")
    files[1].rename(tmp_path / "x" / "chunk_08.pt")
    with pytest.raises(DataError, match=r"the number 8 stands in two names"):
        read_embeddings(tmp_path / "x", quiet=True)
    with pytest.raises(DataError, match=r"chunk_8.pt: named twice"):
        read_embeddings([files[0], files[0]], quiet=True)
    with pytest.raises(DataError, match=r"a folder among chunks"):
        read_embeddings([files[0], tmp_path / "x"], quiet=True)
    with pytest.raises(UsageError, match=r"got no file"):
        read_embeddings([], quiet=True)


def test_a_missing_number_is_said(tmp_path: Path) -> None:
    files = chunks(tmp_path / "x", "lists")
    files[2].unlink()
    got = read_embeddings(tmp_path / "x", quiet=True)
    assert any("chunk" not in note and "9 is followed by 11" in note for note in got.meta["notes"])
    assert "is followed by" not in " ".join(read_embeddings(files[:2], quiet=True).meta["notes"])


def test_queries_and_chunks_make_a_dataset(run: Run, tmp_path: Path) -> None:
    files = chunks(tmp_path / "x", "packed")
    queries = tokens([2, 4], seed=5)
    torch.save({"query_embeddings": queries, "meta": {"query_ids": ["q1", "q2"], "qrels": QRELS}}, tmp_path / "q.pt")
    entries = run([tmp_path / "q.pt", *files], task=None)
    assert_holds(entries["document"])
    assert_holds(entries["query"], ["q1", "q2"], queries)
    origin = json.loads((tmp_path / "data" / "local" / "toy" / "origin.json").read_text())
    assert list(origin["files"]) == ["q.pt", "chunk_8.pt to chunk_11.pt (4 files)"]


def test_two_files_of_two_roles_are_no_chunks(run: Run, tmp_path: Path) -> None:
    torch.save({"query_embeddings": tokens([2, 4], seed=5)}, tmp_path / "part_1.pt")
    torch.save({"doc_embeddings": DOCUMENTS}, tmp_path / "part_2.pt")
    assert set(run([tmp_path / "part_1.pt", tmp_path / "part_2.pt"])) == {"query", "document"}
