"""Reading embedding files: every layout of every format gives the same tokens, and what was inferred is said."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from import_cases import assert_rows
from maxsim_eval.importing.importing import read_embeddings
from maxsim_kernels import pack

DIM = 8
LENGTHS = [3, 1, 0, 5, 2]
IDS = ["d7", "d3", "9", "ä b", "d1"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def tokens(lengths: list[int], dtype: torch.dtype = torch.float16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, DIM, generator=generator).to(dtype) for n in lengths]


def padded(rows: list[torch.Tensor], size: int | None = None, fill: float = 0.0) -> torch.Tensor:
    dense = torch.full((len(rows), size or max(map(len, rows)), DIM), fill, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        dense[number, : len(row)] = row
    return dense


def saved(path: Path, **content: Any) -> Path:
    torch.save(content, path)
    return path


DOCUMENTS = tokens(LENGTHS)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
LAYOUTS: dict[str, Callable[[list[torch.Tensor]], dict[str, Any]]] = {
    "list": lambda rows: {"doc_embeddings": rows},
    "list and lengths": lambda rows: {"doc_embeddings": [padded([r], 6, 9.0)[0] for r in rows], "doc_lengths": LENGTHS},
    "dense, lengths": lambda rows: {"doc_embeddings": padded(rows, 7, 5.0), "doc_lengths": torch.tensor(LENGTHS)},
    "dense, int32 lengths": lambda rows: {
        "document_embeddings": padded(rows, 7, float("nan")),
        "document_lengths": torch.tensor(LENGTHS, dtype=torch.int32),
    },
    "dense, mask": lambda rows: {"doc_embeddings": padded(rows, fill=5.0), "doc_mask": MASK},
    "dense, integer mask and lengths": lambda rows: {
        "doc_embeddings": padded(rows, fill=5.0),
        "doc_mask": torch.ones(5, 5, dtype=torch.int64),
        "doc_lengths": LENGTHS,
    },
    "dense, zeros": lambda rows: {"doc_embeddings": padded(rows, 7)},
    "chunks, zeros": lambda rows: {"doc_embeddings": [padded(rows[:2]), padded(rows[2:], 9)]},
    "chunks, lengths": lambda rows: {
        "doc_embeddings": [padded(rows[:2], 4, 1.0), padded(rows[2:], 9, 2.0)],
        "doc_lengths": LENGTHS,
    },
    "chunks, chunked lengths": lambda rows: {
        "doc_embeddings": [padded(rows[:2], 4, 1.0), padded(rows[2:], 9, 2.0)],
        "doc_lengths": [torch.tensor(LENGTHS[:2]), torch.tensor(LENGTHS[2:])],
    },
    "chunks, one mask": lambda rows: {
        "doc_embeddings": [padded(rows[:2], 5, 1.0), padded(rows[2:], 5, 2.0)],
        "doc_mask": MASK,
    },
    "chunks, masks": lambda rows: {
        "doc_embeddings": [padded(rows[:2], 3, 1.0), padded(rows[2:], 5, 2.0)],
        "doc_mask": [MASK[:2, :3], MASK[2:]],
    },
    "lists in a list": lambda rows: {"doc_embeddings": [rows[:2], rows[2:]], "doc_lengths": [LENGTHS[:2], LENGTHS[2:]]},
    "tuple": lambda rows: {"corpus_embeddings": tuple(rows)},
    "packed": lambda rows: {"document_values": pack(rows).values, "document_offsets": pack(rows).offsets},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_layouts(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    rows = tokens(LENGTHS, dtype)
    got = read_embeddings(saved(tmp_path / "e.pt", **LAYOUTS[layout](rows), meta={"doc_ids": IDS}))
    assert_rows(got.documents, rows)
    assert got.document_ids == IDS
    assert got.queries is None
    assert got.query_ids is None
    assert got.qrels is None


def test_layout_of_the_paper(tmp_path: Path) -> None:
    """Queries as a list of equal sizes, documents in chunks without lengths, `passage_ids`, integers as ids."""
    queries, documents = tokens([4, 4], seed=1), tokens([6] * 5, seed=2)
    meta = {
        "qrels": {"0": {"11": 1, "13": 2}, 1: {12: 1.0}},
        "query_ids": [0, 1],
        "passage_ids": torch.arange(10, 15),
        "model": "colbertv2",
    }
    chunks = [torch.stack(documents[:2]), torch.stack(documents[2:])]
    got = read_embeddings(saved(tmp_path / "e.pt", query_embeddings=queries, doc_embeddings=chunks, meta=meta))
    assert_rows(got.queries, queries)
    assert_rows(got.documents, documents)
    assert got.query_ids == ["0", "1"]
    assert got.document_ids == ["10", "11", "12", "13", "14"]
    assert got.qrels == {"0": {"11": 1, "13": 2}, "1": {"12": 1}}
    assert got.meta["model"] == "colbertv2"
    assert set(got.meta) == {"model", "notes"}
    assert "every position was taken as a token" in " ".join(got.meta["notes"])


def test_dense_queries_with_lengths(tmp_path: Path) -> None:
    queries = tokens([2, 4], seed=3)
    got = read_embeddings(
        saved(tmp_path / "e.pth", query_embeddings=padded(queries, 6, 3.0), query_lengths=torch.tensor([2, 4]))
    )
    assert_rows(got.queries, queries)
    assert got.documents is None
    assert got.meta["notes"] == []


def test_mask_with_holes_keeps_only_its_tokens(tmp_path: Path) -> None:
    dense = padded(tokens([4, 4]), fill=1.0)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]])
    got = read_embeddings(saved(tmp_path / "e.pt", doc_embeddings=dense, doc_mask=mask))
    assert_rows(got.documents, [dense[0, [0, 2]], dense[1, [3]]])


def test_trailing_zeros_are_padding_and_said(tmp_path: Path) -> None:
    rows = tokens([3, 5, 2])
    rows[1][2] = 0  # a zero row inside a document is a token
    got = read_embeddings(saved(tmp_path / "e.pt", doc_embeddings=padded(rows, 5)))
    assert_rows(got.documents, rows)
    padding, inside = got.meta["notes"]
    assert padding == "doc_embeddings: no doc_lengths: trailing all-zero rows of 2 of 3 rows were taken as padding"
    assert "ImportWarning: 1 of 10 tokens are exactly zero (first: document in row 1 of e.pt, token 2) and were kept" in inside


def test_constant_documents_are_not_padding(tmp_path: Path) -> None:
    got = read_embeddings(saved(tmp_path / "e.pt", doc_embeddings=torch.ones(2, 4, DIM)))
    assert got.documents is not None
    assert got.documents.lengths.tolist() == [4, 4]


def test_dense_layout_is_a_view(tmp_path: Path) -> None:
    """One plain chunk is not copied: the tokens stay in the mapped file."""
    path = saved(tmp_path / "e.pt", doc_embeddings=padded(tokens([3, 6]), 6), doc_lengths=[3, 6])
    got = read_embeddings(path).documents
    assert got is not None
    assert got.offsets is None
    assert got.values.shape == (12, DIM)


def test_float64_is_converted_and_said(tmp_path: Path) -> None:
    rows = tokens(LENGTHS, torch.float64)
    for layout in ("dense, zeros", "list", "packed", "chunks, zeros"):
        got = read_embeddings(saved(tmp_path / "e.pt", **LAYOUTS[layout](rows)))
        assert_rows(got.documents, [row.float() for row in rows])
        assert [n for n in got.meta["notes"] if "ImportWarning" in n and "float64" in n and "float32" in n]


def test_strided_and_shared_tensors(tmp_path: Path) -> None:
    base = torch.randn(DIM, 3, 5).half()
    dense = base.permute(1, 2, 0)
    got = read_embeddings(saved(tmp_path / "e.pt", doc_embeddings=dense, query_embeddings=[dense[0], dense[0, 1:3]]))
    assert_rows(got.documents, list(dense))
    assert_rows(got.queries, [dense[0], dense[0, 1:3]])


def test_old_and_recompressed_torch_files(tmp_path: Path) -> None:
    """Files that cannot be mapped are loaded instead: torch's format before 1.6, and a zip somebody compressed."""
    rows = tokens(LENGTHS)
    torch.save({"doc_embeddings": rows}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_rows(read_embeddings(tmp_path / "old.pt").documents, rows)
    torch.save({"doc_embeddings": rows}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    assert_rows(read_embeddings(tmp_path / "small.pt").documents, rows)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4", np.float64])
def test_npz_two_roles(tmp_path: Path, dtype: Any) -> None:
    queries, documents = pack(tokens([2, 3], torch.float32)), pack(tokens(LENGTHS, torch.float32, 1))
    np.savez(
        tmp_path / "e.npz",
        query_values=queries.values.numpy().astype(dtype),
        query_offsets=queries.offsets.numpy(),
        query_ids=np.array(["q1", "q2"]),
        document_values=documents.values.numpy().astype(dtype),
        document_offsets=documents.offsets.numpy().astype(np.uint32),
        document_ids=np.array([name.encode() for name in IDS]),
        qrels=json.dumps({"q1": {"d3": 1}}),
    )
    got = read_embeddings(tmp_path / "e.npz")
    want = torch.float16 if dtype is np.float16 else torch.float32
    assert_rows(got.queries, [row.to(want) for row in tokens([2, 3], torch.float32)])
    assert_rows(got.documents, [row.to(want) for row in tokens(LENGTHS, torch.float32, 1)])
    assert (got.query_ids, got.document_ids) == (["q1", "q2"], IDS)
    assert got.qrels == {"q1": {"d3": 1}}


def test_npz_of_dense_embeddings(tmp_path: Path) -> None:
    np.savez(tmp_path / "e.npz", doc_embeddings=padded(DOCUMENTS, 7, 5.0).numpy(), doc_lengths=np.array(LENGTHS))
    assert_rows(read_embeddings(tmp_path / "e.npz").documents, DOCUMENTS)


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("nq-queries", "query", False),
        ("queries", "query", False),
        ("documents", "document", False),
        ("corpus_1", "document", False),
        ("embeddings", "document", True),
    ],
)
@pytest.mark.parametrize("extension", ["npz", "npy", "safetensors"])
def test_values_and_offsets(tmp_path: Path, extension: str, name: str, role: str, said: bool) -> None:
    """A file without a role: the caller's word, else its name, else documents; what was assumed is said."""
    path = tmp_path / f"{name}.{extension}"
    packed = pack(DOCUMENTS)
    if extension == "npz":
        np.savez(path, values=packed.values.numpy(), offsets=packed.offsets.numpy(), ids=np.array(IDS))
    elif extension == "npy":
        np.save(path, packed.values.numpy())
        np.save(tmp_path / f"{name}.offsets.npy", packed.offsets.numpy())
        (tmp_path / f"{name}.ids.txt").write_text("\n".join(IDS) + "\n", encoding="utf-8")
    else:
        save_file({"values": packed.values, "offsets": packed.offsets}, path, {"ids": json.dumps(IDS)})
    got = read_embeddings(path)
    assert_rows(got.queries if role == "query" else got.documents, DOCUMENTS)
    assert (got.query_ids if role == "query" else got.document_ids) == IDS
    assert any("taken as" in note for note in got.meta["notes"]) is said
    other = "document" if role == "query" else "query"
    asked = read_embeddings(path, role=other)  # type: ignore[arg-type]
    assert set(asked.sides) == {other}


def test_npy_without_ids_and_in_fortran_order(tmp_path: Path) -> None:
    packed = pack(DOCUMENTS)
    np.save(tmp_path / "d.npy", np.asfortranarray(packed.values.numpy()))
    np.save(tmp_path / "d.offsets.npy", packed.offsets.numpy().astype(np.int32))
    got = read_embeddings(tmp_path / "d.npy")
    assert_rows(got.documents, DOCUMENTS)
    assert got.document_ids is None
    assert [file.name for file in got.sides["document"].files] == ["d.npy", "d.offsets.npy"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_two_roles(tmp_path: Path, dtype: torch.dtype) -> None:
    queries, documents = pack(tokens([2, 3], dtype)), pack(tokens(LENGTHS, dtype, 1))
    content = {
        "query_values": queries.values,
        "query_offsets": queries.offsets,
        "document_values": documents.values,
        "document_offsets": documents.offsets.to(torch.int32),
    }
    meta = {"query_ids": json.dumps(["a", "b"]), "qrels": json.dumps({"a": {"d7": 1}}), "model": "x"}
    save_file(content, tmp_path / "e.safetensors", meta)
    (tmp_path / "e.document_ids.txt").write_text("\r\n".join(IDS), encoding="utf-8", newline="")
    got = read_embeddings(tmp_path / "e.safetensors")
    assert_rows(got.queries, tokens([2, 3], dtype))
    assert_rows(got.documents, tokens(LENGTHS, dtype, 1))
    assert (got.query_ids, got.document_ids) == (["a", "b"], IDS)
    assert got.qrels == {"a": {"d7": 1}}
    assert got.meta["model"] == "x"


def test_unknown_ids_in_qrels_are_counted(tmp_path: Path) -> None:
    meta = {
        "qrels": {"q1": {"d7": 1, "nope": 1}, "q2": {"d3": 0}, "q9": {"gone": 2}},
        "query_ids": ["q1", "q2"],
        "doc_ids": IDS,
    }
    path = saved(tmp_path / "e.pt", query_embeddings=tokens([1, 2]), doc_embeddings=DOCUMENTS, meta=meta)
    notes = " ".join(read_embeddings(path).meta["notes"])
    assert "1 of 3 queries are not among the file's queries (first: 'q9')" in notes
    assert "2 of 4 judgements name documents that are not in the file (first: 'nope')" in notes


def test_keys_that_are_not_used_are_said(tmp_path: Path) -> None:
    got = read_embeddings(saved(tmp_path / "e.pt", doc_embeddings=DOCUMENTS, doc_texts=["a"] * 5, seed=1))
    assert got.meta["notes"][0] == "keys that were not used: 'doc_texts', 'seed'"
    assert got.meta["notes"][1:] == ["doc_embeddings: 1 of 5 rows have no token; they are kept, and never retrieved"]


def test_reading_is_deterministic_and_leaves_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "e.pt", doc_embeddings=padded(DOCUMENTS, 7))
    before = path.read_bytes()
    first, second = read_embeddings(path).documents, read_embeddings(str(path)).documents
    assert first is not None
    assert second is not None
    first.values.zero_()  # a private mapping
    assert_rows(second, DOCUMENTS)
    assert path.read_bytes() == before


def test_many_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking works slice by slice; a file far larger than one slice gives the same."""
    for module in ("rows", "token_checks"):
        monkeypatch.setattr(f"maxsim_eval.importing.{module}.SLICE_TOKENS", 7)
    rows = tokens([n % 11 for n in range(200)])
    for layout in ({"doc_embeddings": padded(rows)}, {"doc_embeddings": rows}):
        assert_rows(read_embeddings(saved(tmp_path / "e.pt", **layout)).documents, rows)
    rows[150][3] = float("inf")
    stream = io.BytesIO()
    torch.save({"doc_embeddings": rows}, stream)
    (tmp_path / "e.pt").write_bytes(stream.getvalue())
    with pytest.raises(Exception, match=r"document in row 150: token 3 holds an infinite value"):
        read_embeddings(tmp_path / "e.pt")
