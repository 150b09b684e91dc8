"""Reranking scores on a GPU: the CPU's, for what is listed and nothing else; the same bits whatever the blocks; no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from candidate_cases import Data, cuts, listed_data, scores_of, whole_of
from maxsim_eval.cache.corpus import Corpus
from maxsim_eval.scoring.candidates import pair_scores
from maxsim_eval.scoring.paths import PATHS


@pytest.fixture(scope="module", params=[True, False], ids=["ties", "normal"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return listed_data(tmp_path_factory.mktemp("entry") / "e", grid=request.param)


@pytest.mark.parametrize("name", PATHS)
def test_every_cut_gives_the_same_bits_and_the_scores_of_a_cpu(name: str, data: Data) -> None:
    size = len(data.candidates.union())
    found = scores_of(name, data, [(0, size)], "cuda")
    for spans in cuts(size):
        assert torch.equal(scores_of(name, data, spans, "cuda"), found), f"{len(spans)} blocks"
    need = scores_of(name, data, [(0, size)])
    assert torch.equal(torch.isneginf(found).cpu(), torch.isneginf(need))
    close = 1e-3 if name == "fp8" else 1e-5
    finite = torch.isfinite(need)
    assert torch.allclose(found.cpu()[finite], need[finite], rtol=close, atol=close * 50)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu(data: Data) -> None:
    path, listed = PATHS["fp16"], data.candidates.within(data.candidates.union())
    queries = path.queries(data.queries).to("cuda")
    block: Any = path.documents(whole_of(data.candidates.choose(data.entry)).to("cuda"), Corpus(data.entry, quiet=True))
    pair_scores(path.score, queries, block, listed)
    try:
        torch.cuda.set_sync_debug_mode("error")
        pair_scores(path.score, queries, block, listed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
