"""Stored values proven where they are scored: CRC-32s by kernels, claims over any cut of a stream, and what damage leads to."""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures import interpreted, one_thread  # noqa: F401 - for every test here
from maxsim_eval.cache.stripes import Claim
from maxsim_eval.crc.devices import can_prove
from maxsim_eval.errors import CacheError
from maxsim_eval.scoring.proving import Proofs, settle
from maxsim_kernels import Int8Tokens, Packed

pytestmark = pytest.mark.slow

ROW = 3


class Crcs:
    """In the place of the kernel: words are numbers of the bytes that it was given."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def remainders(self, ranges: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
        first = len(self.seen)
        self.seen += [ctypes.string_at(start, stop - start) for start, stop in ranges]
        return torch.arange(first, len(self.seen))

    def crc_of(self, word: int, start: int, stop: int) -> int:
        return zlib.crc32(self.seen[word])


@pytest.fixture
def crcs(monkeypatch: pytest.MonkeyPatch) -> Crcs:
    made = Crcs()
    monkeypatch.setitem(sys.modules, "maxsim_eval.crc.device_ranges", made)  # type: ignore[arg-type]
    return made


def blame() -> None:
    raise CacheError("found")


cuts = st.lists(st.integers(0, 30), max_size=5)


@settings(deadline=None, max_examples=200)
@given(cuts, cuts, st.integers(0, 29), st.booleans(), st.booleans())
def test_claims_are_compared_however_blocks_cut_them(
    claimed: list[int], blocks: list[int], changed: int, damaged: bool, quantised: bool
) -> None:
    """All rows are claimed; one of them may change after that."""
    rows = np.random.default_rng(changed).integers(-99, 99, (30, ROW), dtype=np.int8)
    scales = np.random.default_rng(1).random(30).astype(np.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "maxsim_eval.crc.device_ranges", Crcs())  # type: ignore[arg-type]
        proofs = Proofs(torch.device("cpu"))
        ends = sorted({*claimed, 30})
        for column, held in (("codes" if quantised else "values", rows), *((("scales", scales),) if quantised else ())):
            for first, stop in zip([0, *ends], ends, strict=False):
                if first < stop:
                    proofs.claims.add(Claim(column, first, stop, zlib.crc32(held[first:stop].tobytes()), blame))
        if damaged:
            rows[changed, 1] ^= 64
        for first, stop in zip([0, *sorted(blocks)], [*sorted(blocks), 30], strict=True):
            tokens = Packed(torch.from_numpy(rows[first:stop]), torch.tensor([0, stop - first]))
            block = Int8Tokens(tokens, torch.from_numpy(scales[first:stop]), None, "token") if quantised else tokens
            proofs.launch(block)
        launches = proofs.take()
        if damaged:
            with pytest.raises(CacheError, match="found"):
                settle(launches)
        else:
            settle(launches)
        assert proofs.take() == []


def test_claims_that_nobody_proves_are_a_fault(crcs: Crcs) -> None:
    tokens = torch.zeros(4, ROW)
    block = Packed(tokens, torch.tensor([0, 4]))
    proofs = Proofs(torch.device("cpu"))
    proofs.claims.add(Claim("values", 0, 5, 0, blame))
    proofs.launch(block)
    with pytest.raises(AssertionError, match="no block has ended"):
        proofs.take()
    proofs = Proofs(torch.device("cpu"))
    proofs.launch(block)
    proofs.claims.add(Claim("values", 0, 3, 0, blame))
    with pytest.raises(AssertionError, match="has gone by"):
        proofs.launch(block)
    assert len(crcs.seen) == 1


def test_a_cpu_proves_what_it_reads() -> None:
    assert not can_prove(torch.device("cpu"))


@pytest.mark.every_change
def test_crcs_by_kernels(interpreted: Callable[..., None]) -> None:  # noqa: F811
    """The kernel interpreted, against zlib (`interpreted_proving.py`)."""
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted("proving", "ranges", 35, folder="toolkit/scoring")


def test_streams_proven_by_kernels(interpreted: Callable[..., None]) -> None:  # noqa: F811
    """Streams of embeddings and copies, whole and damaged (`interpreted_proving.py`)."""
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted("proving", "streams", 10, folder="toolkit/scoring")


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_compiles_without_spills(architecture: int, tmp_path: Path) -> None:
    """In seconds, too: written out, the products at its end would take Triton minutes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    import record_resources as recorder
    from maxsim_eval.crc import device_ranges

    powers = {"powers_ptr": torch.zeros(1, dtype=torch.uint32)}
    sizes = {"Y": device_ranges.Y, "LANES": device_ranges.LANES, "ROWS": device_ranges.ROWS}
    addresses = dict.fromkeys(device_ranges._ADDRESSES, 1 << 40)
    arguments = {"words_ptr": torch.zeros(1, dtype=torch.int32), "chunks": 100, **addresses, **powers, **sizes}
    launch = recorder.Launch(device_ranges._crc_kernel, arguments, device_ranges.LANES // 32, None)
    used = recorder.resources(recorder.compiled(launch, architecture), tmp_path)
    assert used["spill_bytes"] == 0
    assert used["registers"] <= 128  # four programs and more on a processor
    assert used["shared"] <= 1 << 10
