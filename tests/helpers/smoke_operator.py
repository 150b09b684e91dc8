"""The operator's wheel alone: run in an environment that holds nothing but it and what it requires.

python -P tests/helpers/smoke_operator.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

import maxsim_kernels
from maxsim_kernels import (
    chamfer_distance,
    explain,
    maxsim,
    maxsim_pairs,
    maxsim_reference,
    pack,
    quantize_fp8,
    quantize_int8,
    stream_topk,
)

STRANGERS = (
    "maxsim_eval",
    "beir",
    "transformers",
    "sentence_transformers",
    "h5py",
    "datasets",
    "pytrec_eval",
    "scipy",
    "tqdm",
    "typer",
)


def main() -> None:
    """Check where the package comes from, that it came alone, and one answer of every public function."""
    place = Path(str(maxsim_kernels.__file__)).resolve()
    assert Path(sys.prefix).resolve() in place.parents, f"{place} is not in this environment, {sys.prefix}"
    brought = [name for name in STRANGERS if importlib.util.find_spec(name)]
    assert not brought, f"the operator brought {brought}"
    required = {name.split(">")[0].split(";")[0].strip() for name in importlib.metadata.requires("maxsim-kernels") or ()}
    assert required == {"torch", "triton", "numpy"}, required

    torch.manual_seed(0)
    queries = torch.nn.functional.normalize(torch.randn(3, 5, 64), dim=-1).requires_grad_()
    documents = [torch.nn.functional.normalize(torch.randn(n, 64), dim=-1) for n in (7, 1, 30)]
    need = torch.stack([torch.stack([(query @ document.T).amax(1).sum() for document in documents]) for query in queries])
    scores, winners = maxsim(queries, pack(documents), return_argmax=True)
    torch.testing.assert_close(scores, need, atol=1e-5, rtol=0)
    torch.testing.assert_close(maxsim_reference(queries, pack(documents)), need, atol=1e-5, rtol=0)
    assert winners.shape == (3, 3, 5)
    torch.testing.assert_close(maxsim_pairs(queries, pack(documents)), need.diagonal(), atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(scores.sum(), queries)
    torch.testing.assert_close(gradient, torch.autograd.grad(need.sum(), queries)[0], atol=1e-5, rtol=0)
    for codes in (quantize_int8(pack(documents)), quantize_fp8(pack(documents))):
        torch.testing.assert_close(maxsim(queries.detach(), codes), need.detach(), atol=0.2, rtol=0)
    best, indices = stream_topk(queries.detach(), [pack(documents[:2]), pack(documents[2:])], 2)
    torch.testing.assert_close(best, need.detach().topk(2).values, atol=1e-5, rtol=0)
    assert indices.shape == (3, 2)
    assert float(chamfer_distance(documents[0], documents[0])) == 0
    assert "cpu" in explain(queries, pack(documents))
    print(f"maxsim-kernels {importlib.metadata.version('maxsim-kernels')} works alone, with torch {torch.__version__}")


if __name__ == "__main__":
    main()
