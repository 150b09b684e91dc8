"""How documents are shared out among programs: it follows from shapes alone, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from choice_cases import HOPPER, call_of, pack_of, zeros
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import choice, combine, dispatch, general

H200 = (HOPPER, 132)


@pytest.mark.parametrize("slots", [1, 8, 132, 396])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_documents_are_dealt_out_in_whole_waves(slots, most) -> None:
    for documents, tiles, groups in itertools.product((1, 2, 7, 131, 133, 1000, 100_000), (1, 3, 40), (1, 2, 5, 132, 500)):
        chunks = geometry.chunks_of(documents, tiles, groups, slots, most)
        assert 1 <= chunks <= documents
        assert chunks in {max(1, min(documents, slots * wave // groups)) for wave in range(1, most + 1)}


# documents, tiles, groups, programs a multiprocessor of 132: programs a group that were the fastest, or within 1%, on an H200
MEASURED_WAVES = [
    ((1000, 8, 8, 2), (33,)),  # ColPali, INT8, token scale: a third program would wait, 1.32x
    ((1024, 8, 8, 2), (33,)),
    ((2048, 8, 8, 2), (33, 66)),
    ((512, 2, 16, 4), (33,)),  # 180 tokens, INT8: two programs would leave half of the GPU idle, 1.32x
    ((5000, 2, 16, 4), (33, 66, 132)),
    ((2048, 16, 4, 2), (66, 132, 231)),  # ColPali, FP16
    ((5, 3, 1, 2), (5,)),
]


@pytest.mark.parametrize("line", MEASURED_WAVES, ids=str)
def test_measured_numbers_of_programs(line) -> None:
    (documents, tiles, groups, programs), fastest = line
    assert geometry.chunks_of(documents, tiles, groups, 132 * programs, 4) in fastest


def test_chunks_fill_every_multiprocessor() -> None:
    assert geometry.chunks_of(100_000, 3, 1, 132, 8) % 132 == 0
    assert geometry.chunks_of(133, 3, 132, 132, 1) == 1


def test_only_few_long_documents_are_cut(monkeypatch) -> None:
    monkeypatch.setattr(geometry, "hardware", lambda device: (HOPPER, 132))
    queries = zeros(1, 32, 16)

    def pieces(size: int, programs: int, documents: Any = None) -> int:
        return geometry.pieces_a_document(
            call_of(queries, zeros(1, size, 16) if documents is None else documents), 64, programs
        )

    assert pieces(511, 1) == 1  # short
    assert pieces(512, 67) == 1  # more programs than half the multiprocessors
    assert pieces(512, 66) == 2
    assert pieces(512, 1) == 2  # a piece has four tiles at least
    assert pieces(16384, 1) == 64  # never more than 64
    assert pieces(16384, 30) == 5  # as many as fill the multiprocessors
    assert pieces(0, 1, pack_of(8, 64, 16)) == 2  # packed: the buffer is the bound
    assert pieces(0, 1, pack_of(7, 64, 16)) == 1


@pytest.mark.parametrize("splits", [1, 3])
def test_room_for_maxima_holds_whole_documents_by_fours(splits, monkeypatch) -> None:
    monkeypatch.setattr(combine, "ROWS_BYTES", 4 * 6 * 100)  # a hundred (pieces of) documents of six rows

    def held(pieces: int, rows: int = 6) -> int:
        return combine.row_maxima(rows, pieces, splits, 2, torch.device("cpu"), False).documents

    assert held(30) == 30
    assert held(600) == (100 // splits) // 4 * 4 * splits
    assert held(600, rows=6 * 40) == {1: 2, 3: 3}[splits]  # fewer than four fit
    assert held(600, rows=6 * 1000) == splits


@pytest.mark.parametrize(("queries", "documents", "tokens", "grid"), [
    (40, 100, 180, 40 * 100),
    (84, 100, 63, 84 * 100),
    (85, 100, 63, 85 * 13),  # many and short: dealt to eight programs a multiprocessor
    (85, 100, 64, 85 * 100),
    (65536, 32767, 64, 65536 * 32767),
    (65536, 32768, 64, 65536),  # a grid holds fewer than 2^31 programs
])  # fmt: skip
def test_programs_of_documents_of_each_querys_own(queries, documents, tokens, grid, monkeypatch) -> None:
    launched = []
    monkeypatch.setattr(
        general, "launch", lambda kernel, grid, *arguments, **constants: launched.append((grid, constants["ALONE"]))
    )
    for module in (general, geometry, dispatch):
        monkeypatch.setattr(module, "hardware", lambda device: (HOPPER, 132))
    held = torch.empty((1, 1, tokens, 128), dtype=torch.float16, device="meta").expand(queries, documents, -1, -1)
    call = call_of(torch.empty((queries, 32, 128), dtype=torch.float16, device="meta"), held)
    dispatch.launch(call, torch.empty((queries, documents), device="meta"), None, choice.choose(call, H200))
    assert launched == [(grid, grid == queries * documents)]
