"""The lists that PyLate and colpali-engine give, saved: zero padding, pickles and their conversion; norms of any embeddings."""

from __future__ import annotations

import contextlib
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from import_cases import DIM, DOCUMENTS, IDS, Run, assert_holds, assert_rows, padded, tokens
from maxsim_eval.errors import DataError
from maxsim_eval.importing.importing import read_embeddings


def test_a_saved_list(run: Run, tmp_path: Path) -> None:
    """`torch.save(embeddings)` of PyLate (tensors) or colpali-engine (bfloat16): role by name, ids beside it."""
    rows = [row.bfloat16() for row in DOCUMENTS]
    torch.save(rows, tmp_path / "documents.pt")
    (tmp_path / "documents.ids.txt").write_text("\n".join(reversed(IDS)))
    torch.save([row.bfloat16() for row in tokens([32, 32], seed=3)], tmp_path / "queries.pt")
    entries = run([tmp_path / "queries.pt", tmp_path / "documents.pt"])
    assert_holds(entries["document"], rows=list(reversed(rows)))
    assert entries["query"].lengths().tolist() == [32, 32]


def test_a_saved_array(tmp_path: Path) -> None:
    """Queries of one length: numpy makes `[N, L, d]` of the list."""
    rows = tokens([4, 4, 4], torch.float32)
    np.save(tmp_path / "queries.npy", [row.numpy() for row in rows])
    got = read_embeddings(tmp_path / "queries.npy", quiet=True)
    assert_rows(got.queries, rows)


@pytest.mark.parametrize("left", [False, True])
def test_zeros_are_never_dropped_in_silence(left: bool, run: Run, tmp_path: Path) -> None:
    """Padding rows as colpali-engine leaves them in its lists: kept and said loudly, or dropped as asked."""
    rows = tokens([3, 5, 2] * 4, torch.bfloat16)
    torch.save(list(padded(rows, 6, left=left)), tmp_path / "documents.pt")
    with pytest.warns(UserWarning, match=r"32 of 72 tokens are exactly zero \(first: document in row 0 of .*drop-zero-tokens"):
        kept = run(tmp_path / "documents.pt")["document"]
    assert kept.lengths().tolist() == [6] * 12
    assert kept.manifest["provenance"]["norms"]["zero_tokens"] == 32
    with pytest.raises(DataError, match="--replace"):
        run(tmp_path / "documents.pt", drop_zero_tokens=True)  # other tokens: another entry
    dropped = run(tmp_path / "documents.pt", drop_zero_tokens=True, replace=True)["document"]
    assert_holds(dropped, rows=rows)
    assert "32 all-zero tokens were dropped, as asked" in " ".join(dropped.manifest["provenance"]["notes"])


def test_left_padding_of_a_padded_tensor(run: Run, tmp_path: Path) -> None:
    rows = tokens([3, 5, 2] * 4)
    for number in range(2):
        torch.save(padded(rows[6 * number : 6 * number + 6], 6, left=True), tmp_path / f"pages_{number}.pt")
    files = [tmp_path / "pages_0.pt", tmp_path / "pages_1.pt"]
    entry = run(files, drop_zero_tokens=True)["document"]
    assert_holds(entry, rows=rows)
    assert "32 all-zero tokens were dropped, as asked" in " ".join(entry.manifest["provenance"]["notes"])


OBJECTS: dict[str, Callable[[Path, list[np.ndarray]], Any]] = {
    "e.pkl": lambda path, rows: path.write_bytes(pickle.dumps(rows)),
    "e.npy": lambda path, rows: np.save(path, np.array(rows, object), allow_pickle=True),
    "e.pt": lambda path, rows: torch.save(rows, path),
    "it's $HOME.bin": lambda path, rows: path.write_bytes(pickle.dumps(rows)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_conversion_that_a_refusal_names_works(name: str, tmp_path: Path) -> None:
    rows = [row.numpy() for row in tokens([3, 2, 4], torch.float32)]
    OBJECTS[name](tmp_path / name, rows)
    with pytest.raises(DataError, match=r"refused|Pickle files are not read") as e:
        read_embeddings(tmp_path / name, quiet=True)
    _, command = str(e.value).split("is converted where it was made, by: python ")
    if "$" in name:  # as a shell reads it
        subprocess.run(f"{shlex.quote(sys.executable)} {command}", shell=True, cwd=tmp_path, check=True, timeout=60)
    else:
        with contextlib.chdir(tmp_path):
            exec(shlex.split(command)[1], {})
    converted = tmp_path / name.replace(".pt", ".tensors.pt").replace(".pkl", ".pt").replace(".npy", ".pt").replace(
        ".bin", ".pt"
    )
    assert_rows(read_embeddings(converted, quiet=True).documents, [torch.from_numpy(row) for row in rows])


# Norms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_unit_vectors_of_any_dtype_pass(dtype: torch.dtype, run: Run, tmp_path: Path) -> None:
    rows = [row.to(dtype) for row in DOCUMENTS]
    torch.save(rows, tmp_path / "documents.pt")
    entry = run(tmp_path / "documents.pt", require_normalised=True)["document"]
    norms = entry.manifest["provenance"]["norms"]
    assert 0.98 < norms["smallest"] <= 1 <= norms["largest"] < 1.02
    assert (norms["zero_tokens"], norms["not_unit_tokens"]) == (0, 0)


def test_unnormalised_embeddings_are_said_or_refused(run: Run, tmp_path: Path) -> None:
    rows = [row * (4 if n == 3 else 1) for n, row in enumerate(DOCUMENTS)]
    torch.save({"doc_embeddings": rows, "doc_ids": IDS}, tmp_path / "e.pt")
    text = r"5 of 36 tokens are no unit vectors \(norms .* to 4.*, 0 zero; first: document 'd3' \(row 3\) of e.pt, token 0"
    with pytest.raises(DataError, match=rf"e.pt: document embeddings: {text}.*--require-normalised was given"):
        run(tmp_path / "e.pt", require_normalised=True, encoder_name="mine")
    assert not (tmp_path / "cache").exists()
    with pytest.warns(UserWarning, match=rf"{text}.*'colpali' stands for unit vectors"):
        entry = run(tmp_path / "e.pt")["document"]
    assert any("ImportWarning" in note and "unit vectors" in note for note in entry.manifest["provenance"]["notes"])
    entry = run(tmp_path / "e.pt", encoder_name="mine")["document"]  # promises nothing: recorded only
    assert not any("unit vectors" in note for note in entry.manifest["provenance"]["notes"])
    assert entry.manifest["provenance"]["norms"]["not_unit_tokens"] == 5


def test_zeros_are_no_unit_vectors(run: Run, tmp_path: Path) -> None:
    torch.save([torch.cat([row, torch.zeros(1, DIM).half()]) for row in DOCUMENTS], tmp_path / "documents.pt")
    with pytest.raises(DataError, match=r"12 of 48 tokens are no unit vectors"):
        run(tmp_path / "documents.pt", require_normalised=True)
    run(tmp_path / "documents.pt", require_normalised=True, drop_zero_tokens=True)


def test_norms_beyond_float32(tmp_path: Path) -> None:
    """Tiny is not zero, large is not infinite."""
    torch.save([torch.full((1, DIM), 1e-30), torch.full((1, DIM), 1e30), torch.zeros(1, DIM)], tmp_path / "documents.pt")
    norms = read_embeddings(tmp_path / "documents.pt", quiet=True).sides["document"].norms
    assert (norms.tokens, norms.zeros, norms.off_unit) == (3, 1, 2)
    assert norms.low == pytest.approx(1e-30 * DIM**0.5)
    assert norms.high == pytest.approx(1e30 * DIM**0.5)
