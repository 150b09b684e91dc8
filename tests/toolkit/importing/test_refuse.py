"""Embedding files that cannot be right: one clear message that names file and key; no code of a file ever runs."""

from __future__ import annotations

import collections
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.importing.importing import read_embeddings

VALUES = torch.arange(24, dtype=torch.float32).reshape(6, 4)
DENSE = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))


def with_value(value: float) -> torch.Tensor:
    dense = DENSE.clone()
    dense[1, 2, 3] = value
    return dense


class RunsCode:
    """What a hostile file holds: unpickled without care it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "the file's code ran"))


TORCH_CASES: dict[str, tuple[Any, str]] = {
    "no dict": (5, r"holds a int, need a list of tensors or a dict"),
    "a tensor of one matrix": (torch.ones(3, 4), r"embeddings: got shape \[3, 4\], need \[N, L, d\]"),
    "numbers in a list": ([0.5, 1.0], r"embeddings\[0\]: got float, need a tensor"),
    "keys that are no text": ({1: DENSE}, r"key 1 is a int"),
    "unknown keys": ({"Q": DENSE, "D": DENSE}, r"holds the keys 'Q', 'D'; need query_embeddings and/or doc_embeddings"),
    "no keys": ({}, r"holds the keys none; need"),
    "a misspelt key": ({"doc_embeddings": DENSE, "doc_lenghts": [1] * 3}, r"'doc_lenghts'. Did you mean 'doc_lengths'"),
    "meta that is no dict": ({"doc_embeddings": DENSE, "meta": [1]}, r"meta: got list, need a dict"),
    "NaN": ({"doc_embeddings": with_value(float("nan"))}, r"doc_embeddings: document in row 1: token 2 holds NaN"),
    "Inf": (
        {"query_embeddings": with_value(float("-inf")), "query_ids": ["a", "b", "c"]},
        r"query_embeddings: query 'b' \(row 1\): token 2 holds an infinite value",
    ),
    "float64 beyond float32": ({"doc_embeddings": [torch.full((2, 4), 1e300, dtype=torch.float64)]}, r"row 0: token 0 .*inf"),
    "mixed widths": (
        {"doc_embeddings": [torch.ones(2, 4), torch.ones(2, 5)], "doc_ids": ["a", "b"]},
        r"mixed embedding widths \[4, 5\].* document 'b' \(row 1\) has 5, those before 4",
    ),
    "mixed dtypes": (
        {"doc_embeddings": [torch.ones(2, 4), torch.ones(2, 4).half()]},
        r"mixed dtypes \[torch.float16, torch.float32\].* document in row 1 has torch.float16",
    ),
    "widths of two roles": (
        {"doc_embeddings": DENSE, "query_embeddings": torch.ones(2, 3, 8)},
        r"mixed embedding widths: queries 8, documents 4",
    ),
    "one vector a document": ({"doc_embeddings": torch.ones(3, 4)}, r"doc_embeddings: got shape \[3, 4\], need \[N, L, d\]"),
    "four axes": ({"doc_embeddings": torch.ones(1, 3, 5, 4)}, r"got shape \[1, 3, 5, 4\]"),
    "chunks among rows": ({"doc_embeddings": [torch.ones(2, 4), DENSE]}, r"item 1: got shape \[3, 5, 4\]"),
    "vectors in a list": ({"doc_embeddings": [torch.ones(4)]}, r"item 0: got shape \[4\]"),
    "a number": ({"doc_embeddings": [torch.tensor(1.0)]}, r"doc_embeddings: item 0: got shape \[\]"),
    "no tensor": ({"doc_embeddings": [[0.5, 1.0]]}, r"doc_embeddings\[0\]\[0\]: got float, need a tensor"),
    "text": ({"doc_embeddings": "x"}, r"doc_embeddings: got str"),
    "width 0": ({"doc_embeddings": torch.ones(2, 3, 0)}, r"need an embedding width of at least 1"),
    "integers": ({"doc_embeddings": torch.ones(2, 3, 4, dtype=torch.int8)}, r"got torch.int8, .*scales"),
    "bool": ({"doc_embeddings": torch.ones(2, 3, 4, dtype=torch.bool)}, r"got torch.bool, need float16"),
    "complex": ({"doc_embeddings": torch.ones(2, 3, 4, dtype=torch.complex64)}, r"got torch.complex64"),
    "fp8": ({"doc_embeddings": torch.ones(2, 3, 4).to(torch.float8_e4m3fn)}, r"got torch.float8_e4m3fn"),
    "sparse": ({"doc_embeddings": DENSE.to_sparse()}, r"need a plain dense tensor"),
    "no documents": ({"doc_embeddings": torch.ones(0, 3, 4)}, r"holds no rows"),
    "an empty list": ({"doc_embeddings": []}, r"holds no rows"),
    "empty chunks": ({"doc_embeddings": [torch.ones(0, 3, 4)]}, r"holds no rows"),
    "no tokens": ({"doc_embeddings": torch.zeros(2, 3, 4)}, r"none of the 2 rows has a token"),
    "length too large": ({"doc_embeddings": DENSE, "doc_lengths": [5, 6, 1]}, r"doc_lengths: row 1: got 6, need 0 to 5"),
    "length negative": (
        {"doc_embeddings": DENSE, "doc_lengths": torch.tensor([5, -1, 1])},
        r"doc_lengths: row 1: got -1, need 0 to 5",
    ),
    "length beyond a chunk": (
        {"doc_embeddings": [DENSE[:1], DENSE[1:, :2]], "doc_lengths": [5, 3, 1]},
        r"doc_lengths: row 1: got 3, need 0 to 2",
    ),
    "count of lengths": ({"doc_embeddings": DENSE, "doc_lengths": [5, 6]}, r"doc_lengths: got 2 lengths, need 3"),
    "lengths no integers": ({"doc_embeddings": DENSE, "doc_lengths": torch.ones(3)}, r"doc_lengths: got torch.float32"),
    "lengths of floats": ({"doc_embeddings": DENSE, "doc_lengths": [1.0, 2.0, 3.0]}, r"doc_lengths: got float, need int"),
    "huge lengths": ({"doc_embeddings": DENSE, "doc_lengths": [1, 2, 2**70]}, r"does not fit 64 bits"),
    "lengths alone": ({"doc_embeddings": DENSE, "query_lengths": [1]}, r"query_lengths: found without embeddings"),
    "mask of another shape": ({"doc_embeddings": DENSE, "doc_mask": torch.ones(3, 4)}, r"doc_mask: chunk 0: got \[3, 4\]"),
    "mask of other values": ({"doc_embeddings": DENSE, "doc_mask": torch.full((3, 5), 2)}, r"other than 0 and 1"),
    "mask of other chunks": ({"doc_embeddings": [DENSE, DENSE], "doc_mask": [torch.ones(3, 5)]}, r"each of its 2 chunks"),
    "mask of a list": ({"doc_embeddings": list(DENSE), "doc_mask": torch.ones(3, 5)}, r"a mask needs a dense layout"),
    "padding that is not zero": (
        {"doc_embeddings": torch.cat([DENSE, torch.ones(3, 2, 4)], 1)},
        r"row 0 ends in repeated rows that are not zero.*doc_lengths",
    ),
    "count of ids": ({"doc_embeddings": DENSE, "meta": {"doc_ids": ["a", "b"]}}, r"meta.doc_ids: got 2 ids, need 3"),
    "duplicate ids": ({"doc_embeddings": DENSE, "doc_ids": ["a", "b", "a"]}, r"doc_ids: duplicate id 'a' \(in 2 rows"),
    "ids equal as text": ({"doc_embeddings": DENSE, "doc_ids": [1, "1", 2]}, r"duplicate id '1'"),
    "an empty id": ({"doc_embeddings": DENSE, "doc_ids": ["a", "", "b"]}, r"row 1 has an empty id"),
    "ids of another kind": ({"doc_embeddings": DENSE, "doc_ids": ["a", None, "b"]}, r"row 1: got NoneType"),
    "ids no list": ({"doc_embeddings": DENSE, "doc_ids": "abc"}, r"doc_ids: got str, need a list"),
    "ids of floats": ({"doc_embeddings": DENSE, "doc_ids": torch.ones(3)}, r"doc_ids: got torch.float32"),
    "two lists of ids": (
        {"doc_embeddings": DENSE, "meta": {"doc_ids": ["a", "b", "c"], "corpus_ids": ["a", "b", "d"]}},
        r"meta.doc_ids and meta.corpus_ids differ",
    ),
    "two names for one thing": (
        {"doc_embeddings": DENSE, "document_embeddings": DENSE},
        r"doc_embeddings and document_embeddings mean the same thing",
    ),
    "two layouts": (
        {"doc_embeddings": DENSE, "doc_values": VALUES, "doc_offsets": [0, 6]},
        r"doc_embeddings and doc_values both hold",
    ),
    "values alone": ({"document_values": VALUES}, r"document_values, need document_values .* with document_offsets"),
    "offsets alone": ({"query_offsets": [0, 1]}, r"query_offsets, need query_values"),
    "no role beside a role": ({"query_embeddings": DENSE, "values": VALUES, "offsets": [0, 6]}, r"values: stands beside"),
    "an unknown role": ({"values": VALUES, "offsets": [0, 6], "role": "passage"}, r"role: got 'passage'"),
    "qrels no dict": ({"doc_embeddings": DENSE, "meta": {"qrels": [("q", "d", 1)]}}, r"meta.qrels: got list"),
    "a row of qrels no dict": ({"doc_embeddings": DENSE, "meta": {"qrels": {"q": ["d"]}}}, r"query 'q': got list"),
    "relevance no integer": (
        {"doc_embeddings": DENSE, "meta": {"qrels": {"q": {"d": 0.5}}}},
        r"query 'q', document 'd': relevance 0.5, need an integer",
    ),
    "a query judged twice": (
        {"doc_embeddings": DENSE, "meta": {"qrels": {"1": {"d": 1}, 1: {"d": 2}}}},
        r"query 1: it, or a document of its, stands there as a number and as text",
    ),
    "a document judged twice": (
        {"doc_embeddings": DENSE, "meta": {"qrels": {"q": {7: 1, "7": 2}}}},
        r"query 'q': it, or a document of its, stands there as a number and as text",
    ),
    "relevance NaN": ({"doc_embeddings": DENSE, "meta": {"qrels": {"q": {"d": float("nan")}}}}, r"relevance nan"),
}

OFFSET_CASES: dict[str, tuple[Any, Any, str]] = {
    "no offsets": (VALUES, None, r"values without offsets"),
    "not from 0": (VALUES, [1, 6], r"offsets: starts at 1, need .* starting at 0"),
    "empty": (VALUES, [], r"offsets: starts at nothing"),
    "falling": (VALUES, [0, 4, 2, 6], r"offsets: decreases after entry 1 \(4 to 2\)"),
    "short": (VALUES, [0, 2, 5], r"offsets: ends at 5, need 6"),
    "beyond": (VALUES, [0, 2, 7], r"offsets: ends at 7, need 6"),
    "floats": (VALUES, [0.5, 6.0], r"offsets: got torch.float64"),
    "two axes": (VALUES, [[0, 6]], r"offsets: got torch.int64 \[1, 2\]"),
    "no rows": (VALUES[:0], [0], r"values: holds no rows"),
    "no tokens": (VALUES[:0], [0, 0], r"values: none of the 1 rows"),
    "three axes": (VALUES.reshape(2, 3, 4), [0, 2], r"values: got shape \[2, 3, 4\], need 2 axes"),
    "integers": (VALUES.to(torch.int64), [0, 6], r"values: got torch.int64"),
    "NaN": (VALUES / VALUES, [0, 6], r"values: document in row 0: token 0 holds NaN"),
}


def refuse(path: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_embeddings(path)
    assert str(path) in str(caught.value) or str(path.with_name(path.stem)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", TORCH_CASES)
def test_torch(tmp_path: Path, case: str) -> None:
    content, match = TORCH_CASES[case]
    torch.save(content, tmp_path / "e.pt")
    refuse(tmp_path / "e.pt", match)


@pytest.mark.parametrize("case", OFFSET_CASES)
@pytest.mark.parametrize("extension", ["npz", "npy", "safetensors"])
def test_values_and_offsets(tmp_path: Path, extension: str, case: str) -> None:
    values, offsets, match = OFFSET_CASES[case]
    path = tmp_path / f"e.{extension}"
    bounds = None if offsets is None else np.array(offsets, dtype=None if offsets else np.int64)
    if extension == "safetensors":
        save_file({"values": values} | ({} if bounds is None else {"offsets": torch.from_numpy(bounds)}), path)
    elif extension == "npz":
        np.savez(path, values=values.numpy(), **({} if bounds is None else {"offsets": bounds}))
    else:
        np.save(path, values.numpy())
        if bounds is None:
            match = r"needs e.offsets.npy beside it"
        else:
            np.save(tmp_path / "e.offsets.npy", bounds)
    refuse(path, match)


def hostile(kind: str, path: Path, target: Path) -> None:
    code = RunsCode(target)
    if kind in ("torch", "old torch"):
        content = {"doc_embeddings": DENSE, "meta": {"x": code}}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "torch")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"doc_embeddings": code}))
    elif kind == "npz":
        np.savez(path, values=VALUES.numpy(), offsets=np.array([0, 6]), ids=np.array([code], dtype=object))
    elif kind == "npy":
        np.save(path, np.array([code], dtype=object), allow_pickle=True)
        np.save(path.with_name(f"{path.stem}.offsets.npy"), np.array([0, 1]))
    elif kind == "npy offsets":
        np.save(path, VALUES.numpy())
        np.save(path.with_name(f"{path.stem}.offsets.npy"), np.array([code], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("torch", "e.pt"),
        ("old torch", "e.pth"),
        ("pickle", "e.bin"),
        ("pickle", "e.pt"),
        ("pickle", "e.npz"),
        ("npz", "e.npz"),
        ("npy", "e.npy"),
        ("npy offsets", "e.npy"),
    ],
)
def test_code_in_a_file_never_runs(tmp_path: Path, kind: str, name: str) -> None:
    target = tmp_path / "ran"
    hostile(kind, tmp_path / name, target)
    refuse(tmp_path / name, r"refused, it holds (the|a) pickled .*can run code|refused, it holds pickled .*can run code")
    assert not target.exists()


def test_the_hostile_file_is_one(tmp_path: Path) -> None:
    """The counter-test: loaded without care, the same file does run its code."""
    hostile("pickle", tmp_path / "e.pkl", tmp_path / "ran")
    pickle.loads((tmp_path / "e.pkl").read_bytes())
    assert (tmp_path / "ran").read_text() == "the file's code ran"


def test_harmless_objects_are_named(tmp_path: Path) -> None:
    torch.save({"doc_embeddings": DENSE, "meta": {"qrels": collections.defaultdict(dict)}}, tmp_path / "e.pt")
    refuse(tmp_path / "e.pt", r"pickled object 'collections.defaultdict'.*docs/import.md")


def test_files_that_are_none(tmp_path: Path) -> None:
    refuse(tmp_path / "missing.pt", r"no such file")
    (tmp_path / "folder.npz").mkdir()
    refuse(tmp_path / "folder.npz", r"the folder holds no embedding file")
    (tmp_path / "empty.safetensors").touch()
    refuse(tmp_path / "empty.safetensors", r"0 bytes")
    refuse(tmp_path / "e.csv", r"'.csv' is not an embedding format; supported: .pt, .pth, .bin, .npz, .npy, .safetensors")
    refuse(tmp_path / "e", r"extension 'missing'")
    refuse(tmp_path / "e.pkl", r"Pickle files are not read: .*can run code")
    with pytest.raises(UsageError, match="role: got 'passage'"):
        read_embeddings(tmp_path / "e.npz", role="passage")  # type: ignore[arg-type]


NPY, SAFETENSORS = r"x.npy: values: cannot be read as a numpy file", r"x.safetensors: cannot be read as safetensors"
BEGINS = r"x.pt: cannot be read as a torch file \(it begins with"
NPZ = r"x.npz: cannot be read as a numpy file"
# Content (a file of that extension, text, a pickle) -> what is said of it under the names of npy, safetensors, pt and npz.
WRONG_NAMES: dict[str, tuple[str, str, str, str]] = {
    "npy": ("", SAFETENSORS, BEGINS, r"x.npz: holds a single array, need an npz archive \(or name it .npy\)"),
    "safetensors": (NPY, "", BEGINS, NPZ),
    "pt": (NPY, SAFETENSORS, "", r"x.npz: x/data.pkl: the archive holds another file, not a numpy array"),
    "npz": (NPY, SAFETENSORS, r"x.pt: cannot be read as a torch file \(damaged, truncated or another format\)", ""),
    "text": (NPY, SAFETENSORS, BEGINS, NPZ),
    "pickle": (NPY, SAFETENSORS, r"x.pt: refused, it holds a pickled object", r"x.npz: refused, it holds pickled"),
}


@pytest.mark.parametrize("content", WRONG_NAMES)
def test_files_under_a_wrong_name(content: str, tmp_path: Path) -> None:
    torch.save({"doc_embeddings": DENSE}, tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", VALUES.numpy())
    np.savez(tmp_path / "x.npz", values=VALUES.numpy(), offsets=np.array([0, 6]))
    save_file({"values": VALUES}, tmp_path / "x.safetensors")
    (tmp_path / "x.text").write_bytes(b"hello " * 50)
    (tmp_path / "x.pickle").write_bytes(b"\x80\x02}q\x00.")
    np.save(tmp_path / "x.offsets.npy", np.array([0, 6]))
    held = (tmp_path / f"x.{content}").read_bytes()
    for extension, match in zip(("npy", "safetensors", "pt", "npz"), WRONG_NAMES[content], strict=True):
        if extension != content:
            (tmp_path / f"x.{extension}").write_bytes(held)
            refuse(tmp_path / f"x.{extension}", match)


def test_a_file_that_memory_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 4.00 TiB")

    np.save(tmp_path / "e.npy", DENSE.numpy())
    monkeypatch.setattr(np.lib.format, "open_memmap", full)
    refuse(tmp_path / "e.npy", r"embeddings: needs more memory than there is: Unable to allocate 4.00 TiB \(MemoryError\)")


def test_text_beside_the_tensors(tmp_path: Path) -> None:
    save_file({"values": VALUES, "offsets": torch.tensor([0, 6])}, tmp_path / "e.safetensors", {"ids": "a,b"})
    refuse(tmp_path / "e.safetensors", r"metadata ids: not JSON")
    np.save(tmp_path / "n.npy", VALUES.numpy())
    np.save(tmp_path / "n.offsets.npy", np.array([0, 6]))
    (tmp_path / "n.ids.txt").write_bytes(b"\xff\xfe")
    refuse(tmp_path / "n.npy", r"n.ids.txt: not UTF-8")
    (tmp_path / "n.ids.txt").write_bytes(b"")
    refuse(tmp_path / "n.npy", r"ids: got 0 ids, need 1")
    np.savez(tmp_path / "z.npz", values=VALUES.numpy().view("V2"), offsets=np.array([0, 6]))
    refuse(tmp_path / "z.npz", r"numpy has no bfloat16")
    np.savez(tmp_path / "z.npz", values=VALUES.numpy().astype("c8"), offsets=np.array([0, 6]))
    refuse(tmp_path / "z.npz", r"got dtype complex64")
    np.savez(tmp_path / "z.npz", values=VALUES.numpy(), offsets=np.array([0, 2**63 + 6], dtype=np.uint64))
    refuse(tmp_path / "z.npz", r"beyond 64 bits")
    np.savez(tmp_path / "z.npz", values=VALUES.numpy(), offsets=np.array([0, 6]), qrels="{")
    refuse(tmp_path / "z.npz", r"qrels: not JSON")
    np.savez(tmp_path / "z.npz", values=VALUES.numpy(), offsets=np.array([0, 6]), ids=np.array([b"\xff"]))
    refuse(tmp_path / "z.npz", r"ids: bytes that are not UTF-8")


@pytest.fixture(params=["e.pt", "old.pt", "e.npz", "small.npz", "e.npy", "e.safetensors"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    if path.suffix == ".pt":
        content = {"doc_embeddings": DENSE, "meta": {"doc_ids": ["a", "b", "c"], "qrels": {"q": {"a": 1}}}}
        torch.save(content, path, _use_new_zipfile_serialization=path.stem == "e")
    elif path.suffix == ".npz":
        save = np.savez if path.stem == "e" else np.savez_compressed
        save(path, values=VALUES.numpy(), offsets=np.array([0, 2, 6]), ids=np.array(["a", "b"]))
    elif path.suffix == ".npy":
        np.save(path, VALUES.numpy())
        np.save(tmp_path / "e.offsets.npy", np.array([0, 2, 6]))
    else:
        save_file({"values": VALUES, "offsets": torch.tensor([0, 2, 6])}, path, {"ids": '["a", "b"]'})
    assert read_embeddings(path).documents is not None
    return path


def test_truncated_files(whole: Path) -> None:
    content = whole.read_bytes()
    for size in sorted({1, 2, 4, 7, *(len(content) * n // 20 for n in range(1, 20)), len(content) - 1}):
        whole.write_bytes(content[:size])
        refuse(whole, r"cannot be read as|refused")


def test_damaged_files(whole: Path) -> None:
    """Whatever bytes change, the answer is embeddings or a `DataError`, never another exception."""
    content = whole.read_bytes()
    draw = random.Random(0)
    for _ in range(120):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        whole.write_bytes(bytes(damaged))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _ = read_embeddings(whole).documents
        except DataError as error:
            assert str(whole.parent) in str(error)  # noqa: PT017
