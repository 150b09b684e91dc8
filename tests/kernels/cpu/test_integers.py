"""INT8 products on CPUs whose matrix library gets them wrong, or makes them slowly: scores keep their bits, and `explain` says how."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inputs import on_cpu as cases
from maxsim_kernels import Packed, explain, maxsim, maxsim_pairs, maxsim_reference, pack, quantize_int8, stream_topk
from maxsim_kernels.coded import BitTokens
from maxsim_kernels.cpu import integers
from maxsim_kernels.search import exact_topk

ROOT = Path(__file__).parents[3]
SLOWER, FASTER = "multiplied as floats, which is slower", "which this CPU multiplies faster than integers"
WIDTHS = (2, 24, 33, 1000, 1024, 1100)  # beyond 1024 dimensions sums leave what float32 holds


def forget() -> None:
    for looked in (integers._looked_at, integers._warn, integers._timed):
        looked.cache_clear()


@pytest.fixture
def wrong_products(monkeypatch):
    """A library that adds pairs of products in 16 bits, one factor unsigned, as oneDNN does without VNNI."""

    def saturating(left, right, out=None):
        lifted, total = (left.int() + 128).double(), -128 * right.double().sum(0)
        for at in range(0, left.shape[1], 2):
            pair = lifted[:, at : at + 2] @ right[at : at + 2].double()
            total = total + pair.clamp(-(2**15), 2**15 - 1)
        return total.int() if out is None else out.copy_(total)

    forget()
    monkeypatch.setattr(integers, "product", saturating)
    monkeypatch.setattr(integers, "slow", lambda: False)
    yield
    forget()


def near_one(lengths: list[int], d: int) -> Packed:
    """Tokens around one value, whose codes lie near the end of their range."""
    return pack([1 + 0.05 * cases.gauss(n, d, seed=n) for n in lengths])


def all_scores(d: int) -> list[torch.Tensor]:
    """Every kind of INT8 codes and layout."""
    packed, dense = near_one([3, 0, 70, 1, 5], d), 1 + 0.05 * cases.gauss(4, 9, d)
    queries, found = 1 + 0.05 * cases.gauss(3, 5, d, seed=9), []
    for documents in (packed, dense):
        for granularity in ("token", "document", "corpus"):
            for affine in (False, True):
                codes = quantize_int8(documents, granularity, affine=affine)
                found += [maxsim(queries, codes), *maxsim(queries, codes, return_argmax=True)]
    found.append(maxsim_pairs(queries, quantize_int8(packed.select([0, 1, 2]))))
    bits = torch.randint(0, 256, (79, -(-d // 2)), dtype=torch.uint8, generator=torch.Generator().manual_seed(d))
    found.append(maxsim(queries, BitTokens(packed.with_values(bits), torch.ones(79), 4, d)))
    return found


@pytest.mark.parametrize("d", WIDTHS)
def test_scores_keep_their_bits_where_integer_products_are_wrong(d, wrong_products, monkeypatch):
    with pytest.warns(RuntimeWarning, match=SLOWER) as said:
        floats = all_scores(d)
    assert len(said) == 1, "once a process"
    monkeypatch.undo()
    monkeypatch.setattr(integers, "slow", lambda: False)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where this machine's are wrong too
        as_they_are = all_scores(d)
    for one, other in zip(floats, as_they_are, strict=True):
        assert torch.equal(one.view(torch.int32) if one.is_floating_point() else one, other.view(torch.int32))


@pytest.mark.parametrize("d", WIDTHS)
def test_codes_at_the_ends_of_their_range_are_exact(d, wrong_products):
    """-128 too, which only codes of somebody else have."""
    codes = quantize_int8(near_one([4, 6], d), "token")
    codes.token_values[:, ::3], codes.token_values[:, 1::3] = -128, 127
    queries = torch.full((1, 2, d), 127.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        scores = maxsim(queries, codes)
    expected = maxsim_reference(queries, codes, dtype=torch.float64)
    assert torch.allclose(scores.double(), expected, rtol=2.0**-22, atol=0.0)


def test_the_library_as_it_is_would_be_noticed(wrong_products, monkeypatch):
    """Without the look the answer would be another: the tests above compare what they should."""
    queries, codes = torch.ones(1, 2, 24), quantize_int8(near_one([4, 6], 24))
    monkeypatch.setattr(integers, "right", lambda *_: True)
    wrong = maxsim(queries, codes)
    monkeypatch.setattr(integers, "right", lambda *_: False)
    assert not torch.allclose(maxsim(queries, codes), wrong, rtol=0.01)


def test_a_certified_search_is_exact_there(wrong_products):
    documents = pack([torch.nn.functional.normalize(cases.gauss(6, 64, seed=n).abs(), dim=1) for n in range(300)])
    queries = documents.select(range(0, 300, 20)).compact()
    expected = stream_topk(queries, [documents], 5)
    with pytest.warns(RuntimeWarning, match=SLOWER):
        scores, indices, stats = exact_topk(queries, documents, 5, codes=quantize_int8(documents), most_rescored=1.0)
    assert cases.same_bits(scores, expected[0])
    assert torch.equal(indices, expected[1])
    assert stats.certificate.holds


def test_explain_says_so(wrong_products):
    queries, documents = torch.ones(1, 2, 24), near_one([4, 6], 24)
    with pytest.warns(RuntimeWarning, match=SLOWER):
        assert SLOWER in explain(queries, quantize_int8(documents))
    assert SLOWER not in explain(queries, quantize_int8(documents), quantize_queries=False)
    assert SLOWER not in explain(queries, quantize_int8(documents), impl="reference")
    assert SLOWER not in explain(queries, documents)


def test_slow_integers_are_left_for_floats_without_a_warning(monkeypatch):
    """As on CPUs with AVX2 alone, whose products are right."""
    product = integers.product

    def waiting(*operands):
        time.sleep(0.02)
        return product(*operands)

    queries, documents = torch.ones(1, 2, 24), quantize_int8(near_one([4, 6], 24))
    forget()
    monkeypatch.setattr(integers, "product", waiting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores, said = maxsim(queries, documents), explain(queries, documents)
    assert FASTER in said
    assert SLOWER not in said
    forget()
    monkeypatch.setattr(integers, "product", lambda left, right: (left[:1, :1], right[:1, :1])[0])
    assert not integers.slow()
    monkeypatch.undo()
    forget()
    monkeypatch.setattr(integers, "slow", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert torch.equal(maxsim(queries, documents), scores)


@pytest.mark.slow
def test_sums_beyond_32_bits_are_no_fault_of_this_cpu():
    """131,072 products of -128 by -128 are one more than fits: floats are taken, and nothing is warned of."""
    for d, wider in ((131_071, False), (131_072, True)):
        codes = quantize_int8(near_one([2, 1], d))
        codes.token_values[0] = 127
        queries = torch.ones(1, 2, d)
        with warnings.catch_warnings():
            if not wider:
                warnings.simplefilter("ignore", RuntimeWarning)  # where this machine's products are wrong
            scores, said = maxsim(queries, codes), explain(queries, codes)
        assert ("leave 32-bit integers" in said) is wider
        assert torch.allclose(scores.double(), maxsim_reference(queries, codes, dtype=torch.float64), rtol=1e-6, atol=0.0)


def test_threads_look_once(wrong_products, monkeypatch):
    looks, product = [], integers.product

    def counted(*arguments):
        looks.append(1)
        return product(*arguments)

    monkeypatch.setattr(integers, "product", counted)
    with pytest.warns(RuntimeWarning, match=SLOWER) as said, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: integers.right(64, 500, 128, False), range(20)))
    assert found == [False] * 20
    assert len(said) == len(looks) == 1


def run_without_vnni(isa: str, *arguments: str) -> None:
    """Tests in a process whose oneDNN takes no better instructions; elsewhere than on x86 it is a process as any."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]


@pytest.mark.slow
def test_the_core_without_vnni():
    run_without_vnni(
        "AVX2", "-m", "not slow", "-k", "test_scores and cpu and dtype2 or ends_of_their_range or prunes and document-dtype0 or certified_search",
        "tests/kernels/test_int8.py", "tests/kernels/search/test_exact.py", "tests/kernels/cpu/test_integers.py",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "files"),
    [
        ("AVX2", ("test_int8.py", "test_coded.py", "search/test_same_bits.py", "search/test_bounds.py")),
        ("AVX512_CORE", ("test_int8.py",)),
    ],
)
def test_more_of_int8_without_vnni(isa, files):
    run_without_vnni(isa, "-m", "not slow", *(f"tests/kernels/{file}" for file in files))
