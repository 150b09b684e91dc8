"""A token's bits do not depend on where in a product it stands, nor on the product's shape, by any of the matrix library's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inputs import on_cpu as cases
from maxsim_kernels import maxsim, pack
from maxsim_kernels.cpu import batches, few, tiles

ROOT = Path(__file__).resolve().parents[3]
TILES = (*few.LEVELS, batches.LONGEST, 16128)


@pytest.mark.parametrize("d", [1, 24, 128, 384, 385, 768])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_every_cell_of_every_shape_has_the_same_bits(d: int, tokens_first: bool) -> None:
    queries, tokens = cases.gauss(tiles.STEP, d, seed=1), cases.gauss(tiles.STEP, d, seed=2)
    need = tiles.product_of(queries, tokens.repeat(5, 1))[:, : tiles.STEP].clone()
    for size in TILES:
        most = 480 if size <= 2016 else 96  # longer tiles are those of few query tokens
        for rows in (*(tiles.NARROW if tokens_first else tiles.NARROW.values()), *range(48, most + 1, 48)):
            asked, held = queries.repeat(-(-rows // tiles.STEP), 1)[:rows], tokens.repeat(size // tiles.STEP, 1)
            found = few._product(asked, held, tokens_first, tiles.multiply).t()
            expected = need.repeat(-(-len(asked) // tiles.STEP), size // tiles.STEP)[: len(asked)]
            assert torch.equal(found, expected), (rows, size)


@pytest.mark.parametrize("d", [24, 384, 600])
def test_neither_other_queries_nor_other_documents_change_a_bit(d: int) -> None:
    """Queries alone and together, documents alone, in small parts and together, of one length and of many."""
    queries = [cases.gauss(n, d, seed=n) for n in (32, 32, 5, 40, 300, 24, 1)]
    ragged = [cases.gauss(n, d, seed=n) for n in (3, 700, 1, 1100, 64, 2, 240, 255, 257, 4100)]
    dense = cases.gauss(30, 60, d)
    together, padded = maxsim(pack(queries), pack(ragged)), maxsim(pack(queries), dense)
    for number, query in enumerate(queries):
        assert cases.same_bits(maxsim(query, pack(ragged)), together[number])
        assert cases.same_bits(maxsim(query, dense), padded[number])
    for first in range(0, len(ragged), 3):
        assert cases.same_bits(maxsim(pack(queries), pack(ragged[first : first + 3])), together[:, first : first + 3])
    assert cases.same_bits(maxsim(pack(queries), dense[7:9]), padded[:, 7:9])
    assert cases.same_bits(maxsim(pack(queries), pack(list(dense))), padded)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["AVX2", "SSE4_2"])
def test_older_processors(kernels: str) -> None:
    """The same by the kernels that MKL has for them: their edges add in other orders than those of AVX-512."""
    files = ("test_orders.py", "test_turns.py", "test_few.py", "../search/test_same_bits.py", "../test_determinism.py")
    chosen = "not test_determinism or (reference and not more_query_tokens_than_one_block)"  # that one takes a minute
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
    environment = os.environ | {"MKL_ENABLE_INSTRUCTIONS": kernels, "OMP_NUM_THREADS": "1"}
    words = [*command, *(str(Path(__file__).parent / file) for file in files)]
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
