"""What a plan is made from: sizes (exact or said to be estimates), rates of real files and operators, free room."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from maxsim_eval.cache.entries import open_entry, write_manifest
from maxsim_eval.cache.filling import fill_entry
from maxsim_eval.cache.selection import Selection
from maxsim_eval.cache.sides import embed
from maxsim_eval.data.loading import load_task
from maxsim_eval.data.subsets import limit_task
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.errors import CacheError, DataError, UnknownNameError
from maxsim_eval.planning import around
from maxsim_eval.planning import rates as measuring
from maxsim_eval.planning import sizes as sizing
from maxsim_eval.planning.costs import Sizes
from maxsim_eval.planning.rates import in_page_cache, measure, places, read_rate, steady
from maxsim_eval.planning.room import available_memory, read_room
from maxsim_eval.planning.sizes import estimate_lengths, find_sizes
from maxsim_eval.scoring.stream import UnitScores
from maxsim_kernels import Packed


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of milliseconds."""
    monkeypatch.setattr(measuring, "SECONDS", 0.02)
    monkeypatch.setattr(around, "SECONDS", 0.02)
    monkeypatch.setattr(measuring, "_CALL", {"cpu": 0.002})
    monkeypatch.setattr(measuring, "_LONG", {"cpu": 0.002})
    monkeypatch.setattr(measuring, "_MADE_UP", {"cpu": 1 << 20})


def entry(folder: Path, documents: int = 40, tokens: int = 64, dim: int = 128) -> Any:
    """An entry of equally long documents, 10 a shard."""

    def encode(start: int, stop: int) -> Packed:
        values = torch.randn((stop - start) * tokens, dim, generator=torch.Generator().manual_seed(start))
        return Packed(values, torch.arange(0, (stop - start) * tokens + 1, tokens))

    return fill_entry(
        folder,
        ids=[f"d{n}" for n in range(documents)],
        key="0" * 16,
        dtype=torch.float32,
        dim=dim,
        provenance={},
        encode=encode,
        documents_per_shard=10,
        quiet=True,
    )


def sizes(**changed: Any) -> Sizes:
    known = {"queries": 4, "documents": 40, "query_tokens": 40, "document_tokens": 2560, "dim": 128, "form": "float32"}
    return Sizes(**{**known, **changed})


# Sizes ------------------------------------------------------------------------------------------------------------------


def found(tmp_path: Path, encoder: str = "lexical", dataset: str = "small", source: str = "demo", **options: Any) -> Any:
    return find_sizes(source, dataset, encoder, data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", quiet=True, **options)


def test_cached_sizes_are_exact(tmp_path: Path) -> None:
    task = load_task("demo", "small", data_dir=tmp_path / "data", quiet=True)
    made = {role: embed(task, role, LexicalEncoder(), tmp_path / "cache", quiet=True) for role in ("query", "document")}
    whole = found(tmp_path)
    assert whole.sizes == Sizes(40, 300, made["query"].tokens, made["document"].tokens, 128, "float32")
    assert whole.notes == ()
    assert whole.entry.folder == made["document"].folder

    kept = limit_task(task, queries=7, documents=100, seed=3)
    part = found(tmp_path, limits={"queries": 7, "documents": 100}, seed=3)
    assert isinstance(part.entry, Selection)
    assert (part.sizes.queries, part.sizes.documents) == (7, 100)
    rows = {name: row for row, name in enumerate(task.document_ids)}
    lengths = made["document"].lengths()
    assert part.sizes.document_tokens == sum(int(lengths[rows[name]]) for name in kept.document_ids)
    assert part.sizes.query_tokens < whole.sizes.query_tokens


def test_what_is_cached_counts_where_the_model_is_gone(tmp_path: Path) -> None:
    task = load_task("demo", "small", data_dir=tmp_path / "data", quiet=True)
    made = {role: embed(task, role, LexicalEncoder(), tmp_path / "cache", quiet=True) for role in ("query", "document")}
    for entry in made.values():
        manifest = json.loads((entry.folder / "manifest.json").read_text())
        del manifest["checksum"]
        manifest["provenance"]["encoder"] = "hf:nobody/no-model"
        write_manifest(entry.folder, manifest)
    whole = found(tmp_path, "hf:nobody/no-model")
    assert whole.sizes == Sizes(40, 300, made["query"].tokens, made["document"].tokens, 128, "float32")
    assert [note.partition("; ")[2][:44] for note in whole.notes] == ["the embeddings that are cached under its nam"]


def test_without_a_cache_tokens_are_estimated_from_words(tmp_path: Path) -> None:
    task = load_task("demo", "small", data_dir=tmp_path / "data", quiet=True)
    guess = found(tmp_path)
    assert not guess.sizes.exact
    assert not guess.sizes.encoded
    assert guess.entry is None
    assert guess.notes[0].startswith("ESTIMATE: documents and queries not in the cache")
    words = [len(text.split()) for text in task.documents]
    assert guess.sizes.document_tokens == sum(min(int(np.ceil(0.42 * count)), 256) for count in words)
    assert not (tmp_path / "cache").exists()

    embed(task, "document", LexicalEncoder(), tmp_path / "cache", quiet=True)
    half = found(tmp_path)  # one side is there: exact for it, and still an estimate
    assert half.entry is not None
    assert half.sizes.document_tokens == half.entry.tokens
    assert half.notes[0].startswith("ESTIMATE: queries not in the cache")


def test_words_are_counted_capped_and_sampled() -> None:
    texts = ["one two three", "", "word " * 1000]
    assert estimate_lengths(texts, 1.5, 300).tolist() == [5, 0, 300]
    assert estimate_lengths(texts, 0, 32).tolist() == [32, 32, 32]
    many = ["a b"] * 45_000
    assert len(estimate_lengths(many, 1, 10)) == 15_000


def test_without_a_dataset_the_card_counts_and_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any) -> None:
        raise AssertionError("a plan must not download")

    monkeypatch.setattr("maxsim_eval.data.loading.fetch", fetch)
    guess = found(tmp_path, "colbertv2", "nq", "beir", limits={"queries": 500})
    assert guess.sizes == Sizes(500, 2_681_468, 16_000, 321_776_160, 128, "float16", "card", exact=False, encoded=False)
    assert "nothing was downloaded" in guess.notes[0]
    assert "import" in guess.notes[1]
    assert found(tmp_path).sizes.documents == 300  # the demo's card; generating it would write
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnknownNameError, match="scifact"):
        found(tmp_path, "lexical", "scifcat", "beir")
    with pytest.raises(UnknownNameError, match="beir"):
        found(tmp_path, "lexical", "nq", "bier")
    with pytest.raises(UnknownNameError, match="lexical"):
        found(tmp_path, "lexicl")
    with pytest.raises(DataError, match="no such folder"):
        found(tmp_path, "lexical", "mine", "local")


def test_a_hub_model_that_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    before = os.environ.get("HF_HUB_OFFLINE")
    guess = found(tmp_path, "hf:nobody/has-this-model")
    assert "could not be loaded" in guess.notes[1]
    assert guess.sizes.dim == 128
    assert os.environ.get("HF_HUB_OFFLINE") == before
    constants = sys.modules.get("huggingface_hub.constants")
    assert constants is not None
    with sizing.offline():
        assert constants.HF_HUB_OFFLINE  # type: ignore[attr-defined]


# Rates ------------------------------------------------------------------------------------------------------------------


def test_places_lie_within_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = entry(tmp_path / "entry")
    for chunk, probes, count in ((8 << 20, 512, 4), (64 << 10, 512, 20), (64 << 10, 4, 4), (64 << 10, 5, 5)):
        monkeypatch.setattr(measuring, "_CHUNK", chunk)
        monkeypatch.setattr(measuring, "_PROBES", probes)
        found = places(held)
        assert len(found) == count
        for path, start in found:
            (shard,) = [shard for shard in held.shards if str(shard.path) == path]
            assert start % 4096 == 0
            assert shard.position <= start < shard.position + 10 * 64 * 512
        assert len({path for path, _ in found}) == 4
    few = Selection(held, np.arange(3, dtype=np.int64))
    assert places(few) == found  # of the whole entry


def test_measurements_are_repeated_until_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SECONDS", 60)
    monkeypatch.setattr(measuring, "_others", lambda: 0.0)
    times = iter([9.0, 3.0, 1.0, 2.0, 2.1, 2.0, 7.0])
    assert steady(lambda: next(times)) == [(2.0, pytest.approx(0.05))]
    assert next(times) == 7.0
    monkeypatch.setattr(measuring, "SECONDS", 0)
    times = iter([1.0, 3.0, 2.0, 7.0])
    assert steady(lambda: next(times)) == [(2.0, 2.0)]  # as it is after the time for it: three times as long, or a third


def test_other_programs_make_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.0, 1000.0, 0.0, 0.001])
    monkeypatch.setattr(measuring, "_others", lambda: next(taken))
    assert steady(lambda: 1.0, lambda: 2.0) == [(1.0, 1.0), (2.0, 1.0)]
    assert steady(lambda: 1.0) == [(1.0, 0.0)]
    monkeypatch.undo()
    ticks = (os.sysconf("SC_CLK_TCK") * seconds for seconds in (40, 5, 15, 7000, 300, 1, 2, 3))
    line = " ".join(map(str, ticks))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"cpu  {line} 0 0\ncpu0 {line} 0 0\n")
    monkeypatch.setattr(measuring.time, "process_time", lambda: 6.5)
    assert measuring._others() == 66 - 6.5  # neither idling, nor waiting for a disk, nor this process's own work is others'


def test_an_entry_gives_every_rate(tmp_path: Path) -> None:
    held = entry(tmp_path / "entry")
    names = ["fp32", "fp16", "int8-corpus"]
    before = sorted(path.name for path in (tmp_path / "entry").iterdir())
    result, resident = measure(sizes(), names, entry=held, lengths=held.lengths(), folder=tmp_path / "entry", k=5)
    assert sorted(path.name for path in (tmp_path / "entry").iterdir()) == before
    assert list(result.paths) == names
    for rate in (result.host, result.topk, result.output):
        assert rate is not None
        assert rate.value > 0
        assert rate.how
    assert result.link is None
    assert resident is None or 0 <= resident <= 1
    for path in result.paths.values():
        assert path.score.value > 1e6  # operations a second: even a slow machine makes more


def test_a_rate_is_work_over_the_seconds_that_an_evaluation_would_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []

    def units(name: str, queries: Packed, corpus: Any, asked: Any, spans: Any, *, keep: bool) -> Any:
        scored.append((len(queries), spans[0][1] - spans[0][0], keep))
        yield UnitScores(0, 0, np.zeros(0), None, {"read": 0.5, "prepare": 0.125, "score": 0.25, "topk": 1.0, "total": 2.0})

    monkeypatch.setattr(measuring, "score_units", units)
    result, _ = measure(sizes(), ["fp16"], entry=None, folder=tmp_path, k=5)
    # The 32 documents of 64 tokens that are a megabyte at once, by 4 queries of 10.
    assert set(scored) == {(4, 32, False)}
    assert result.paths["fp16"].score.value == pytest.approx(2 * 40 * 32 * 64 * 128 / 0.25)
    assert result.paths["fp16"].prepare is not None
    assert result.paths["fp16"].prepare.value == pytest.approx(32 * 64 * 512 / 0.125)
    assert result.host is not None
    assert result.host.value == pytest.approx(32 * 64 * 512 / 0.5)
    assert result.topk is not None
    assert result.topk.value == pytest.approx(4 * 32)


@pytest.mark.slow
def test_a_slice_grows_until_what_every_call_takes_is_little_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's first slice took 50 times its work, and `plan` said hours for minutes."""
    scored = []

    def units(name: str, queries: Packed, corpus: Any, asked: Any, spans: Any, *, keep: bool) -> Any:
        scored.append(spans[0][1] - spans[0][0])
        seconds = 0.025 + 1e-4 * scored[-1]
        yield UnitScores(
            0, 0, np.zeros(0), None, {"read": 0.0, "prepare": 0.0, "score": seconds, "topk": 0.0, "total": seconds}
        )

    monkeypatch.setattr(measuring, "score_units", units)
    monkeypatch.setattr(measuring, "_LONG", {"cpu": 10.0})
    measure(sizes(), ["fp16"], entry=entry(tmp_path / "entry", documents=4096, tokens=64), folder=tmp_path, k=5)
    assert sorted(set(scored)) == [64, 128, 256, 512, 1024, 2048]  # what every call takes is an eighth of the last


def test_page_cache_residence_is_seen(tmp_path: Path) -> None:
    held = entry(tmp_path / "entry")
    for shard in held.shards:
        shard.path.read_bytes()
    now = in_page_cache(places(held))
    if now is None:
        pytest.skip("this file system cannot tell what is in memory")
    assert now == 1.0
    assert in_page_cache([]) is None


def test_reading_from_memory_has_a_rate_everywhere(tmp_path: Path) -> None:
    held = entry(tmp_path / "entry")
    rate = read_rate(places(held), 3, direct=False)
    assert rate is not None
    assert "4 threads" not in rate.how
    assert "1 MB in memory, 3 threads" in rate.how
    assert read_rate([], 3, direct=False) is None


def test_without_an_entry_made_up_documents_are_written_read_and_scored(tmp_path: Path) -> None:
    result, resident = measure(sizes(), ["fp16"], entry=None, folder=tmp_path / "not" / "yet", k=5)
    assert resident is None
    assert result.host is not None
    assert result.output is not None
    assert "written beside the cache" in result.output.how
    assert list(result.paths) == ["fp16"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.os, "access", lambda *_: False)
    result, _ = measure(sizes(), ["fp16"], entry=None, folder=tmp_path, k=5)
    assert (result.disk, result.host, result.output, dict(result.paths)) == (None, None, None, {})


def test_a_full_disk_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = entry(tmp_path / "entry")

    def full(*_: Any, **__: Any) -> Any:
        raise CacheError("the disk is full")

    monkeypatch.setattr(measuring, "fill_entry", full)
    result, _ = measure(sizes(), ["fp16"], entry=held, folder=tmp_path, k=5)
    assert result.output is None
    assert result.host is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry"]


def test_chunked_shards_are_scored_through_hdf5_and_have_no_disk_rate(tmp_path: Path, rechunk: Callable[[Path], None]) -> None:
    folder = entry(tmp_path / "entry").folder
    for path in folder.glob("*.h5"):
        rechunk(path)
    with pytest.warns(UserWarning, match="chunked"):
        held = open_entry(folder)
    result, resident = measure(sizes(), ["fp16"], entry=held, folder=tmp_path, k=5)
    assert resident is None
    assert result.disk is None
    assert result.host is not None


@pytest.fixture
def rechunk() -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            values = file["values"][:]
            del file["values"]
            file.create_dataset("values", data=values, chunks=(64, values.shape[1]))

    return change


def test_nothing_to_measure_gives_no_path_rates(tmp_path: Path) -> None:
    empty = sizes(queries=0, documents=0, query_tokens=0, document_tokens=0)
    result, _ = measure(empty, ["fp16"], entry=None, folder=tmp_path)
    assert dict(result.paths) == {}
    assert result.topk is None


# Before scoring and after it --------------------------------------------------------------------------------------------


def test_a_sample_is_encoded_and_gives_the_sizes(tmp_path: Path) -> None:
    task = load_task("demo", "small", data_dir=tmp_path / "data", quiet=True)
    guess, rate = around.encoding(found(tmp_path))
    assert rate is not None
    assert rate.rate.value > 1
    assert rate.start > 0
    assert guess.notes[0].startswith("ESTIMATE: not in the cache; seconds and tokens are those of a sample")
    exact = {role: embed(task, role, LexicalEncoder(), tmp_path / "cache", quiet=True).tokens for role in ("query", "document")}
    assert guess.sizes.document_tokens == pytest.approx(exact["document"], rel=0.5)
    assert guess.sizes.query_tokens == pytest.approx(exact["query"], rel=0.5)
    cached = found(tmp_path)
    assert around.encoding(cached) == (cached, None)


def test_a_long_encoding_goes_on_at_the_pace_of_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        clock, batches = 0.0, []

        def encode(self, items: list[int], role: str) -> Packed:
            self.batches.append(sorted(items))
            Slow.clock += 10.0 if len(self.batches) == 1 else 0.25 * len(items)  # the model is loaded first
            return Packed(torch.zeros(3 * len(items), 2), torch.arange(0, 3 * len(items) + 1, 3))

    monkeypatch.setattr(around, "SECONDS", 1.5)
    monkeypatch.setattr(around.time, "perf_counter", lambda: Slow.clock)
    first, seconds, pieces = around._encoding(Slow(), range(1000), "document", lambda piece: piece)  # type: ignore[arg-type]
    tried = around._joined(pieces)
    assert [len(batch) for batch in Slow.batches] == [4, 8, 1], "one once more, whose words are known"
    assert (first, seconds) == pytest.approx((10, 0.25 * 996))
    assert (tried.lengths.tolist(), tried.dtype) == ([3] * 12, torch.float32)
    assert tried.values.shape == (36, 2)


@pytest.mark.parametrize("new", [0.0, 0.05, 1.0])
def test_new_words_become_rare(new: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of an item, of which those of its new words fall with the square root of the items so far."""
    known = 0.002
    paces = known + new / np.sqrt(np.arange(1, 200_001))
    asked = []

    def once_more(call: Callable[[], Any]) -> float:
        call()
        first, stop = asked[-1]
        return known * (stop - first)

    monkeypatch.setattr(around, "timed", once_more)
    rest = around._rest(2000, 4000, 200_000, float(paces[2000:4000].sum()), asked.append)
    assert rest == pytest.approx(paces[4000:].sum(), rel=0.01)
    assert asked == [(2000, 2000 + int(around._AGAIN / paces[2000:4000].mean()))]
    assert around._rest(2000, 4000, 4000, 1.0, asked.append) == 0.0


def test_the_pace_of_an_encoding_is_that_of_several_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Several:
        """A call takes 50 ms, whatever the items are; four threads make four in that time."""

        chunk, at_once, expected, clock = 8, 4, 0, 0.0

        def __init__(self) -> None:
            self.together = threading.Barrier(self.at_once, self.passes, timeout=60)

        def passes(self) -> None:
            Several.clock += 0.05

        def expect(self, items: int) -> None:
            self.expected = items

        def encode(self, items: list[int], role: str) -> Packed:
            if threading.current_thread() is threading.main_thread():
                self.passes()
            else:
                self.together.wait()
            return Packed(torch.tensor(items)[:, None].float(), torch.arange(len(items) + 1))

    monkeypatch.setattr(around, "SECONDS", 1.2)
    monkeypatch.setattr(around.time, "perf_counter", lambda: Several.clock)

    def kept(piece: Packed) -> list[float]:
        return piece.values.flatten().tolist()

    _, seconds, tried = around._encoding(encoder := Several(), range(10_000), "document", kept)  # type: ignore[arg-type]
    assert encoder.expected == 10_000
    assert [len(one) for one in tried] == [4, 8] + 3 * 4 * [8]
    assert len({item for one in tried for item in one}) == 4 + 8 + 3 * 4 * 8
    assert seconds == pytest.approx(0.05 + 3 * 0.05 + (10_000 - 4 - 8 - 3 * 4 * 8) / 8 * 0.05 / 4)  # 62 s by the pace of one
    _, seconds, tried = around._encoding(Several(), range(42), "document", kept)  # type: ignore[arg-type]
    assert sorted(item for one in tried for item in one) == list(range(42))
    assert seconds == pytest.approx(0.05 + 0.05)  # all of it was tried: no pace is needed


def test_an_encoder_without_its_weights_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_task("demo", "small", data_dir=tmp_path / "data", quiet=True)

    def encode(*_: Any) -> Packed:
        raise DataError("no weights here")

    monkeypatch.setattr(LexicalEncoder, "encode", encode)
    guess, rate = around.encoding(found(tmp_path))
    assert rate is None
    assert guess.notes[-1] == "no weights here"


def test_comparing_and_finishing_have_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    rate = around.finish_rate(sizes(), ["fp32", "int8"], 5, lambda result, folder: written.append((result, folder)))
    assert rate is not None
    assert rate.value > 1
    result, folder = written[0]
    assert list(result.paths) == ["fp32", "int8"]
    assert result.paths["int8"].parity is not None
    assert not folder.exists()
    assert around.finish_rate(sizes(queries=0), ["fp32"], 5, lambda *_: None) is None
    assert around.compare_rate(1000, "cpu").value > 1
    assert around.compare_rate(1, "cpu").value > 1
    slow = iter([0.5])  # what the first one imports is part of the whole, once
    monkeypatch.setattr(around, "timed", lambda call: next(slow, 0.01))
    started = around.finish_rate(sizes(queries=1000), ["fp32"], 5, lambda *_: None)  # 200 of them are tried
    assert started is not None
    assert 1000 / started.value == pytest.approx(5 * 0.01 + 0.49)


# Room -------------------------------------------------------------------------------------------------------------------


def test_room_of_this_machine(tmp_path: Path) -> None:
    room = read_room(tmp_path / "not" / "yet", tmp_path, "cpu", 0.5)
    assert room.memory is not None
    assert room.memory > room.process > 10**6
    assert room.cache_disk is not None
    assert room.one_disk
    assert (room.gpu, room.gpus, room.in_page_cache) == (None, 0, 0.5)


def test_a_container_has_less_memory(tmp_path: Path) -> None:
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert available_memory(proc, tmp_path) == 3000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 200\nactive_file 50\n")
    assert available_memory(proc, tmp_path) == 3000 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory(proc, tmp_path) == 1000 - 500 + 250
    assert available_memory(tmp_path / "none", tmp_path) is None
