"""A folder of one embedding file a document: names as ids, numbered files with a file of ids, pages; and folders that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from import_cases import DIM, DOCUMENTS, IDS, Run, assert_holds, assert_rows, tokens
from maxsim_eval.errors import DataError
from maxsim_eval.importing.importing import read_embeddings
from maxsim_eval.types import Task


def write(path: Path, row: torch.Tensor) -> None:
    """One document as the file's extension says."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, row.numpy())
    elif path.suffix == ".npz":
        np.savez_compressed(path, row.numpy())
    elif path.suffix == ".safetensors":
        save_file({"image_embeds": row}, path)
    else:
        torch.save(row, path)


def folder_of(folder: Path, names: list[str], rows: list[torch.Tensor] = DOCUMENTS, extension: str = ".pt") -> Path:
    for name, row in zip(names, rows, strict=True):
        write(folder / f"{name}{extension}", row)
    return folder


@pytest.mark.parametrize("extension", [".pt", ".npy", ".npz", ".safetensors"])
def test_the_names_of_files_are_ids(extension: str, run: Run, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "documents", IDS, extension=extension)
    (folder / "README.md").write_text("x")
    (folder / ".hidden").write_text("x")
    got = read_embeddings(folder, quiet=True)
    assert got.document_ids == IDS, "numbers in names in their own order"
    assert_rows(got.documents, DOCUMENTS)
    entry = run(folder)["document"]
    assert_holds(entry)
    notes = " ".join(entry.manifest["provenance"]["notes"])
    assert "1 files of documents were not read: 'README.md'" in notes
    assert "1 of 12 rows have no token" in notes
    assert entry.manifest["provenance"]["files"] == 12
    assert entry.manifest["provenance"]["file"] == "documents"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_a_folder(dtype: torch.dtype, run: Run, tmp_path: Path) -> None:
    rows = [row.to(dtype) for row in DOCUMENTS]
    entry = run(folder_of(tmp_path / "corpus", IDS, rows))["document"]
    assert_holds(entry, rows=[row.to(dtype if dtype != torch.float64 else torch.float32) for row in rows])
    said = [note for note in entry.manifest["provenance"]["notes"] if "float64" in note]
    assert len(said) == (dtype == torch.float64), "said once, not for every file"
    assert not said or "in 12 files" in said[0]


def test_a_file_of_a_folder_may_have_a_mask_or_a_batch_axis(tmp_path: Path) -> None:
    rows = tokens([4, 3, 5])
    for number, row in enumerate(rows):
        content: dict[str, Any] = {"embeddings": torch.cat([row, torch.ones(2, DIM).half()]), "mask": torch.ones(len(row) + 2)}
        content["mask"][len(row) :] = 0
        torch.save(content, tmp_path / f"p{number}.pt")
    assert_rows(read_embeddings(tmp_path, quiet=True).documents, rows)
    for number, row in enumerate(rows):
        torch.save({"embeddings": torch.cat([row, row]), "lengths": len(row)}, tmp_path / f"p{number}.pt")
    assert_rows(read_embeddings(tmp_path, quiet=True).documents, rows)
    for number, row in enumerate(rows):
        torch.save(row[None], tmp_path / f"p{number}.pt")  # a batch of one page
    got = read_embeddings(tmp_path, quiet=True)
    assert_rows(got.documents, rows)
    assert got.document_ids == ["p0", "p1", "p2"]


@pytest.mark.parametrize("first", [0, 1])
def test_numbered_files_with_a_file_of_ids(first: int, run: Run, tmp_path: Path) -> None:
    """Ids that no file can be called, in lines; 10 comes behind 9 and not behind 1."""
    names = [f"page_{n}" for n in range(first, first + 12)]
    folder = folder_of(tmp_path / "pages", names)
    ids = [f"report/2024?page={n}" for n in range(12)]
    (folder / "ids.txt").write_text("\n".join(ids) + "\n")
    got = read_embeddings(folder, quiet=True)
    assert got.document_ids == ids
    assert_rows(got.documents, DOCUMENTS)
    (folder / "ids.txt").unlink()
    (tmp_path / "order.txt").write_text("\n".join(reversed(IDS)))
    entry = run(folder, ids={"document": tmp_path / "order.txt"})["document"]
    assert_holds(entry, rows=list(reversed(DOCUMENTS)))


def test_page_images(tmp_path: Path, run: Run) -> None:
    """The ids of pages are the names of their images; `x_page_1.png.pt` is the page `x_page_1.png`."""
    ids = [f"ibm_report_page_{n}.png" for n in range(3)]
    images = [Image.new("RGB", (2, 2), (n, 0, 0)) for n in range(3)]
    rows = tokens([1030, 1030, 1031], torch.bfloat16)
    task = Task("real-mm-rag", "FinReport", "test", ["q"], ["text"], ids, images, {"q": {ids[1]: 1}})
    folder_of(tmp_path / "pages", ids, rows)
    entry = run(tmp_path / "pages", task=task, source="real-mm-rag", dataset="FinReport")["document"]
    assert_holds(entry, ids, rows)
    assert entry.lengths().tolist() == [1030, 1030, 1031]


def test_the_role_of_a_folder(tmp_path: Path) -> None:
    for name, role, said in (("query_embeddings", "query", 0), ("pages", "document", 0), ("x", "document", 1)):
        got = read_embeddings(folder_of(tmp_path / name, ["a", "q1"], tokens([2, 3])), quiet=True)
        assert list(got.sides) == [role]
        assert sum("taken as documents" in note for note in got.meta["notes"]) == said
    assert list(read_embeddings(tmp_path / "x", role="query", quiet=True).sides) == ["query"]


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "NaN": (
        lambda folder: write(folder / "d5.npy", torch.full((2, DIM), torch.nan).half()),
        r"d5.npy: embeddings: document 'd5' \(row 0\): token 0 holds NaN",
    ),
    "another width": (
        lambda folder: write(folder / "d5.npy", torch.ones(2, 9).half()),
        r"d5.npy: embeddings: mixed embedding widths: document 'd5' \(row 0\) has 9, d0.npy has 8",
    ),
    "another dtype": (
        lambda folder: write(folder / "d5.npy", torch.ones(2, DIM)),
        r"d5.npy: embeddings: mixed dtypes: document 'd5' \(row 0\) has torch.float32, d0.npy has torch.float16",
    ),
    "integers": (lambda folder: np.save(folder / "d5.npy", np.ones((2, DIM), np.int8)), r"d5.npy: .*scales"),
    "one vector": (lambda folder: np.save(folder / "d5.npy", np.ones(DIM, np.float16)), r"d5.npy: .*got shape \[8\]"),
    "a number": (lambda folder: np.save(folder / "d5.npy", np.float16(1)), r"d5.npy: embeddings: got shape \[\]"),
    "an empty file": (lambda folder: (folder / "d5.npy").write_bytes(b""), r"d5.npy: the file is empty"),
    "a truncated file": (lambda folder: (folder / "d5.npy").write_bytes(b"\x93NUMPY\x01"), r"d5.npy: .*truncated"),
    "pickled code": (
        lambda folder: np.save(folder / "d5.npy", np.array([np.ones(3), None], object), allow_pickle=True),
        r"d5.npy: .*refused, it holds pickled",
    ),
    "a pickle": (lambda folder: (folder / "d5.pkl").write_bytes(b"\x80\x04"), r"d5.pkl: .*Pickle files are not read"),
    "two files of one name": (
        lambda folder: (folder / "d5.NPY").write_bytes((folder / "d5.npy").read_bytes()),
        r"documents: two files are called 'd5', need one for each document",
    ),
    "several formats": (lambda folder: write(folder / "d12.pt", torch.ones(1, DIM)), r"several formats \(.npy, .pt\)"),
    "a folder": (lambda folder: (folder / "inner").mkdir(), r"holds folders \('inner'\), need only files"),
    "a chunk among them": (
        lambda folder: np.save(folder / "more.npy", np.ones((2, 3, DIM), np.float16)),
        r"more.npy: holds 2 rows, so it is a chunk, but the files of .* differ in more than one number",
    ),
    "a document too many": (lambda folder: write(folder / "d12.npy", DOCUMENTS[0]), r"1 are not in the task \('d12'\)"),
    "a document too few": (
        lambda folder: (folder / "d7.npy").unlink(),
        r"1 of 12 are missing \('d7'\).*The ids were taken from the names of the files",
    ),
    "an id that is no UTF-8": (
        lambda folder: Path(f"{folder}/d\udcff.npy").write_bytes((folder / "d5.npy").read_bytes()),
        r"half a surrogate pair",
    ),
    "ids for other files": (  # numbered d0 to d11: the lines name them, and x is no id of the task
        lambda folder: (folder / "ids.txt").write_text("\n".join(["x", *IDS[1:]])),
        r"1 of 12 are missing \('d0'\), 1 are not in the task \('x'\).*lines of ids.txt",
    ),
    "the numbers in another order": (
        lambda folder: (folder / "ids.txt").write_text("\n".join(reversed(IDS))),
        r"ids.txt: ids: names the numbered files in another order",
    ),
    "too few ids": (lambda folder: (folder / "ids.txt").write_text("d1\nd2"), r"ids.txt: ids: holds 2 ids for 12 files"),
    "ids that are paths": (
        lambda folder: [(folder / "ids.txt").write_text("\n".join([*IDS[:-1], "../secret"])), (folder / "d11.npy").rename(folder / "secret.npy")],
        r"ids.txt: ids: id '../secret' is a path, not the name of a file .* no other file is read",
    ),
    "ids of other names": (
        lambda folder: [(folder / "ids.txt").write_text("\n".join([*IDS[:-1], "z"])), (folder / "d11.npy").rename(folder / "y.npy")],
        r"holds 12 ids for 12 files, of which 1 have no file \('z'\)",
    ),
    "duplicate ids": (lambda folder: (folder / "ids.txt").write_text("\n".join([*IDS[:-1], "d0"])), r"duplicate id 'd0'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders(case: str, run: Run, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "documents", IDS, extension=".npy")
    spoil, match = BAD_FOLDERS[case]
    spoil(folder)
    with pytest.raises(DataError, match=match) as e:
        run(folder)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "cache").exists()


def test_a_file_of_ids_outside_is_never_followed(tmp_path: Path) -> None:
    """A path as an id reads nothing, even where a file lies there."""
    write(tmp_path / "secret.pt", torch.ones(2, DIM))
    folder = folder_of(tmp_path / "documents", ["a", "b"], tokens([1, 2]))
    (folder / "ids.txt").write_text("a\n../secret")
    with pytest.raises(DataError, match=r"'../secret' is a path"):
        read_embeddings(folder, quiet=True)


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no embedding file"):
        read_embeddings(tmp_path, quiet=True)
    folder_of(tmp_path / "e", ["a", "b"], [torch.ones(0, DIM)] * 2)
    with pytest.raises(DataError, match=r"none of the 2 rows has a token"):
        read_embeddings(tmp_path / "e", quiet=True)
