"""Explaining, and users' functions as paths, on a GPU: the CPU's winners and contributions, blocks on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from maxsim_eval.api import evaluate
from maxsim_eval.data.loading import load_task
from maxsim_eval.explain.explaining import explain_pair
from maxsim_eval.scoring.own_functions import ScorerError
from maxsim_eval.scoring.paths import PATHS
from maxsim_eval.types import Task
from maxsim_kernels import Packed


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    task = load_task("demo", "small", data_dir=folder / "datasets", quiet=True)
    evaluate(task, "lexical", ["fp32"], cache_dir=folder / "cache", quiet=True)
    return folder


@pytest.fixture(scope="module")
def task(home: Path) -> Task:
    return load_task("demo", "small", data_dir=home / "datasets", quiet=True)


def padded(queries: Packed, documents: Packed) -> torch.Tensor:
    tokens = pad_sequence([documents[n].float() for n in range(len(documents))], batch_first=True)
    inside = torch.arange(tokens.shape[1], device=tokens.device) < documents.lengths[:, None]
    rows = []
    for number in range(len(queries)):
        similar = torch.einsum("qd,nld->nql", queries[number].float(), tokens)
        rows.append(similar.masked_fill(~inside[:, None], -torch.inf).amax(dim=2).sum(dim=1))
    return torch.stack(rows)


def test_a_function_gets_blocks_on_the_device(home: Path, task: Task, tmp_path: Path) -> None:
    seen: set[Any] = set()

    def watching(queries: Packed, documents: Packed) -> torch.Tensor:
        seen.add((queries.device.type, documents.device.type, documents.offsets is not None))
        return padded(queries, documents)

    options: dict[str, Any] = {"cache_dir": home / "cache", "quiet": True, "device": "cuda", "out_dir": tmp_path / "out"}
    found = evaluate(task, "lexical", ["fp32", ("mine", watching)], **options).paths["mine"]
    assert seen == {("cuda", "cuda", True)}
    assert found.parity is not None
    assert found.parity["spearman"]["min"] > 0.9999
    with pytest.raises(ScorerError, match="scores on cpu, need the documents' device cuda"):
        evaluate(task, "lexical", [("mine", lambda q, d: padded(q, d).cpu())], **options)


@pytest.mark.parametrize("path", PATHS)
def test_explained_as_on_a_cpu(home: Path, task: Task, path: str) -> None:
    for query, document in (("q07", "d032"), ("q00", "d001")):
        both = [
            explain_pair(task, "lexical", query, document, path=path, cache_dir=home / "cache", device=device, quiet=True)
            for device in ("cpu", "cuda")
        ]
        assert [token.document_position for token in both[0].tokens] == [token.document_position for token in both[1].tokens]
        # FP8 tensor cores keep about 13 bits of a sum of 32 products (docs/kernels.md).
        close = 2e-3 if path == "fp8" else 1e-5
        assert both[1].score == pytest.approx(both[0].score, rel=close)
        assert both[1].total == pytest.approx(both[1].score, rel=close)
