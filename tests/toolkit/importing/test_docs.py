"""docs/import.md: every snippet saves a file that imports, and gives the tokens it was made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from maxsim_eval.importing.file_order import grouped
from maxsim_eval.importing.importing import read_embeddings
from maxsim_kernels import Packed
from places import ROOT

DOCS = ROOT / "docs" / "import.md"
SNIPPETS = re.findall(r"^## (.+?)\n\n```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
EXTENSIONS = {".pt", ".npz", ".npy", ".safetensors"}


def assert_same(packed: Packed | None, want: list[torch.Tensor]) -> None:
    assert packed is not None
    assert packed.lengths.tolist() == [len(row) for row in want]
    for number, row in enumerate(want):
        assert torch.equal(packed[number], row)


def test_every_layout_has_a_snippet() -> None:
    assert len(SNIPPETS) == DOCS.read_text(encoding="utf-8").count("```python") == 9


@pytest.mark.parametrize("code", [code for _, code in SNIPPETS], ids=[title for title, _ in SNIPPETS])
def test_snippet(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(n, 8, generator=generator).half() for n in (3, 5)]
    documents = [torch.randn(n % 7 + 1, 8, generator=generator).half() for n in range(1200)]
    names = {"query_ids": ["q1", "q2"], "document_ids": [f"d{n}" for n in range(1200)], "qrels": {"q1": {"d1": 1}}}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(DOCS), "exec"), {"queries": queries, "documents": documents, **names})
    found = [path for path in tmp_path.iterdir() if path.suffix in EXTENSIONS and ".offsets" not in path.name]
    groups = grouped([*found, *(path for path in tmp_path.iterdir() if path.is_dir())])
    assert groups
    seen = set()
    for group in groups:
        got = read_embeddings(sorted(group) if len(group) > 1 else group[0])
        seen |= set(got.sides)
        if "query" in got.sides:
            assert_same(got.queries, queries)
            assert got.query_ids == names["query_ids"]
        if "document" in got.sides:
            assert_same(got.documents, documents)
            assert got.document_ids == names["document_ids"]
        assert not got.meta["notes"]
    assert "document" in seen
