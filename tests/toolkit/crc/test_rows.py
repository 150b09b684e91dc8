"""CRC-32s of rows that were summed one by one: cut anywhere, behind anything; and shards that are written from them."""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crc_cases import as_bytes, entered, summed, sums_of
from filling_cases import SHARDS, assert_right, fill, tokens
from fixtures import interpreted, one_thread  # noqa: F401 - for every test here
from maxsim_eval.crc import summing
from maxsim_eval.crc.summing import Summing
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import CacheError
from maxsim_kernels import Packed
from tiny_checkpoints import SPECIAL, WORDS, bert, stanford

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 90), st.integers(0, 70), st.integers(1, 40), st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 99)
)
def test_sums_give_the_crcs_of_the_bytes(
    count: int, before: int, stripe: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = width * dtype.itemsize
    values = torch.from_numpy(rng.integers(0, 256, count * size, dtype=np.uint8)).view(dtype).view(count, width)
    found, read = entered(values, sums_of(values), stripe, rng.integers(0, 256, (before, size), dtype=np.uint8))
    assert found == read


def test_no_rows_add_nothing() -> None:
    crcs = np.array([7], np.uint32)
    summed(torch.zeros(0, 4)).enter(crcs, 3, 5)
    assert crcs.tolist() == [7]


def told(start: int, stop: int) -> Packed:
    packed = tokens(start, stop)
    return summed(packed.values.contiguous(), packed.lengths.tolist())


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_shard_of_summed_tokens_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("maxsim_eval.cache.stripes.BYTES", 48)  # three tokens
    monkeypatch.setattr("maxsim_eval.cache.stripes._ROWS", 1)
    fill(tmp_path / "one", chunk=2)
    monkeypatch.setattr("maxsim_eval.cache.shards._scan", lambda *_: pytest.fail("looked through again"))
    assert_right(fill(tmp_path / "two", told, chunk=2, at_once=at_once))
    for name in SHARDS:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def changed_at(token: int) -> Callable[[int, int], Packed]:
    """An encoder whose second shard, of twelve tokens, has another bit than was summed."""

    def encode(start: int, stop: int) -> Packed:
        packed = told(start, stop)
        if start == 3:
            packed.values.view(torch.int32)[token, 2] ^= 1
        return packed

    return encode


@pytest.mark.parametrize("token", [0, 1, 10, 11])
def test_tokens_that_changed_on_their_way_are_refused(token: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.cache.shards.stripe_rows", lambda _: 2)
    with pytest.raises(CacheError, match=r"00001\.h5: tokens do not have the CRC-32 that the GPU made of them"):
        fill(tmp_path, changed_at(token))
    assert not (tmp_path / SHARDS[1]).exists()
    assert_right(fill(tmp_path, told))


def test_tokens_that_changed_between_are_refused_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsim_eval.cache.shards.stripe_rows", lambda _: 2)
    entry = fill(tmp_path, changed_at(5))
    with pytest.raises(CacheError, match=r"00001\.h5: .*tokens 4 to 5 do not have the CRC-32 they were written with"):
        entry.verify()


def test_the_kernel_against_zlib(interpreted: Callable[..., None]) -> None:  # noqa: F811
    """Interpreted (`interpreted_rows.py`)."""
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted("rows", "rows", 9, folder="toolkit/crc")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_compiles_without_spills(architecture: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    import record_resources as recorder
    from maxsim_eval.crc import device_rows

    kinds = {"words": torch.int32, "powers": torch.uint32, "sums": torch.int32}
    pointers = {f"{name}_ptr": torch.zeros(1, dtype=dtype) for name, dtype in kinds.items()}
    sizes = {name: getattr(device_rows, name) for name in ("STEP", "LANES", "ROWS", "NEAR")}
    launch = recorder.Launch(device_rows._rows_kernel, {**pointers, "rows": 1000, "width": 384, **sizes}, 4, None)
    used = recorder.resources(recorder.compiled(launch, architecture), tmp_path)
    assert used["spill_bytes"] == 0
    assert used["registers"] <= 128
    assert used["shared"] <= 1 << 10


# In an encoder


@pytest.fixture
def summing_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The oracle in the kernel's place, for windows of any size; how many tokens it was asked for."""
    asked: list[int] = []

    def of(_: Summing, rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows))
        return torch.from_numpy(sums_of(rows).view(np.int32))

    monkeypatch.setattr(Summing, "of", of)
    return asked


@pytest.mark.parametrize("kind", ["hf", "multi-vector"])
def test_an_encoder_hands_its_sums_out(kind: str, tmp_path: Path, summing_here: list[int]) -> None:
    folder = tmp_path / "checkpoint"
    if kind == "hf":
        bert(folder, [*SPECIAL, *WORDS]).save_pretrained(folder)
    else:
        stanford(folder)
    encoder = get_encoder(f"{kind}:{folder}", device="cpu")
    packed: Any = encoder.encode(["glacier melt", "", "the cat . un two", "valley"], "document")
    assert summing_here
    assert packed.sums.tolist() == sums_of(packed.values).tolist()
    assert packed.crc(1, 4) == zlib.crc32(as_bytes(packed.values)[1:4].tobytes())


class _Device:
    """A CUDA device's name, for what only asks for it."""

    type = "cuda"


def test_the_kernel_is_begun_for_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a compiler that fails is said once; tokens are then looked through where they are written."""
    pytest.importorskip("triton", reason="Triton is not installed")

    def refuse(_: Any) -> None:
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(torch.cuda, "device", refuse)
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    one = Summing(_Device())  # type: ignore[arg-type]
    one.expect(summing.MANY - 1)
    assert not begun
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        one.expect(summing.MANY)
        one.expect(summing.MANY)
        (thread,) = begun
        thread.join(60)
    (text,) = [str(each.message) for each in found if issubclass(each.category, RuntimeWarning)]
    assert text.startswith(
        "tokens are looked through on the CPU, and the GPU may have to wait for it: the kernel that sums them failed: no GPU"
    )
    assert one.of(torch.zeros(1 << 20, 32)) is None


def test_few_tokens_are_not_summed() -> None:
    one = Summing(torch.device("cpu"))
    one.expect(1 << 30)
    assert one.of(torch.zeros(1, 2)) is None
    one._row_sums = lambda rows: rows
    assert one.of(torch.zeros(1, 2)) is None
    large = torch.empty(summing._BYTES // 4, 1)
    assert one.of(large) is large
