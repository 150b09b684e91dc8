"""alone/changing.py on a CPU: its shapes, its truth, and the compiled calls, which are traced once for all shapes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alone import changing
from maxsim_kernels import Packed

DIM = 64  # no number of tokens below: torch.compile takes sizes that are equal once for equal always


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "dense"])
def test_compiled_calls_take_new_shapes_without_a_new_graph(ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(
        torch, "compile", lambda function, real=torch.compile, **how: real(function, backend="aot_eager", **how)
    )
    query = torch.nn.functional.normalize(torch.randn(4, DIM), dim=1)
    shapes: list[Packed | torch.Tensor] = []
    for count in (5, 7, 11, 6):
        lengths = torch.randint(1, 6, (count,))
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        shapes.append(Packed(torch.randn(int(offsets[-1]), DIM), offsets) if ragged else torch.randn(count, 9, DIM))
    for name, way in changing.compiled_ways(query, ragged).items():
        before = changing.counters["stats"]["unique_graphs"]
        for one in shapes:
            apart = (way((one, None)).double().flatten() - changing.exact(query, one)).abs().max()
            assert float(apart) < 1e-5, name
        assert changing.counters["stats"]["unique_graphs"] - before == 1, name
    torch.compiler.reset()
