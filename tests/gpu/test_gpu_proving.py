"""Stored values proven on the GPU that scores them: CRC-32s of any range, the same scores as without, and damage refused by file and stripe."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("h5py")
pytest.importorskip("triton", reason="Triton is not installed")

from crc_cases import entered
from maxsim_eval.cache import stripes
from maxsim_eval.cache.entries import Entry
from maxsim_eval.crc import device_ranges, device_rows
from maxsim_eval.scoring import stream
from proving_cases import DAMAGES, Damage, refused, same, scored, stored

COUNT, WIDTH = 6000, 128
UNITS = [(0, 1500), (1500, 4100), (4100, COUNT)]


@pytest.mark.parametrize("size", [1 << 10, 1 << 20, (1 << 26) + 3])
def test_crcs_are_those_of_zlib(size: int) -> None:
    rng = np.random.default_rng(size)
    data = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    held, there = data.numpy(), data.cuda()
    row = 4 * device_ranges.LANES
    cuts = [(first, first + length) for first in range(4) for length in (*range(9), 511, 512, 513)]
    cuts += [(first, size - last) for first in range(4) for last in range(4)]
    cuts += [(row + first, edge * row + last) for edge in (2, 33, 257, 513, 1000) for first, last in ((0, 0), (3, 1), (1, 2))]
    cuts += [(min(pair), max(pair)) for pair in rng.integers(0, size + 1, (40, 2)).tolist()]
    cuts = [(first, last) for first, last in cuts if last <= size]
    base = there.data_ptr()
    words = device_ranges.remainders([(base + first, base + last) for first, last in cuts], there.device).cpu().numpy()
    found = [device_ranges.crc_of(word, base + first, base + last) for (first, last), word in zip(cuts, words, strict=True)]
    assert found == [zlib.crc32(held[first:last]) for first, last in cuts]


@pytest.mark.parametrize("shape", [(1, 2), (229_001, 768), (70_000, 128), (2_000_000, 2)], ids=str)
def test_rows_that_are_summed_have_the_crcs_of_their_bytes(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, device="cuda").half()
    sums = device_rows.row_sums(values)
    assert sums is not None
    before = np.random.default_rng(0).integers(0, 256, (77, 2 * shape[1]), dtype=np.uint8)
    found, read = entered(values.cpu(), sums.cpu().numpy().view(np.uint32), 128, before)
    assert found == read


@pytest.fixture(scope="module", params=[(torch.float16, WIDTH), (torch.float32, 37)], ids=str)
def entry(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Entry:
    dtype, width = request.param
    return stored(tmp_path_factory.mktemp("cache") / "entry", COUNT, 61, width, dtype)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranges each launch was for; short runs are left to the GPU too."""
    monkeypatch.setattr(stripes, "_SMALL_BYTES", 0)
    seen: list[int] = []
    real = device_ranges.remainders

    def counted(ranges: Any, device: torch.device) -> torch.Tensor:
        seen.append(len(ranges))
        return real(ranges, device)

    monkeypatch.setattr(device_ranges, "remainders", counted)
    return seen


@pytest.mark.parametrize("budget", [None, 400 << 20])
@pytest.mark.parametrize("name", ["fp32", "fp16", "int8", "int8-document"])
def test_scores_are_those_of_values_that_a_cpu_proves(
    entry: Entry, name: str, budget: int | None, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scored(entry, name, "cuda", UNITS, budget=budget)
    assert len(launches) >= len(UNITS)
    launches.clear()
    same(scored(entry.unchecked(), name, "cuda", UNITS, budget=budget), found)
    monkeypatch.setattr(stream, "can_prove", lambda _: False)
    same(scored(entry, name, "cuda", UNITS, budget=budget), found)
    assert launches == []


@pytest.mark.parametrize("budget", [None, 400 << 20])
@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_refused(entry: Entry, damage: Damage, budget: int | None, launches: list[int], tmp_path: Path) -> None:
    name, _, _, _, nan = damage
    if nan and entry.dtype != torch.float16:
        pytest.skip("what is changed is an FP16 number")
    refused(entry.folder, damage, "cuda", UNITS, tmp_path / "records", budget=budget)
    assert launches, name
