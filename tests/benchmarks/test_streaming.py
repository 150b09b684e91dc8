"""The streaming benchmark's parts and flow on a CPU: corpora, exact answers, refusals, rates, verdicts, every row on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streaming
from measure import session
from out_of_core import cases as ooc_cases
from out_of_core import corpora, link_rates
from out_of_core import measure as ooc_measure
from out_of_core import tables as ooc_tables

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    return ooc_measure.Bench(CPU, corpora.TINY, 2, tmp_path)


def corpus_of(lengths: list[int], name: str = "c", chunk: int = 7, seed: int = 3) -> Any:
    return corpora.Corpus(name, torch.tensor(lengths), 4, seed, chunk)


def test_lengths_have_the_mean_asked_for() -> None:
    made = corpora.lognormal(20_000, 120.0, 300, 1)
    assert made.dtype == torch.int64
    assert float(made.double().mean()) == pytest.approx(120, abs=0.1)
    assert int(made.min()) >= 16
    assert int(made.max()) <= 300
    assert float(made.double().std()) > 30
    assert torch.equal(made, corpora.lognormal(20_000, 120.0, 300, 1))


def test_any_part_of_a_corpus_has_the_whole_ones_tokens() -> None:
    corpus = corpus_of([3, 9, 1, 20, 5])
    whole = torch.full((corpus.tokens, 4), torch.nan, dtype=torch.float16)
    corpus.fill(whole, CPU)
    assert torch.allclose(whole.float().norm(dim=1), torch.ones(38), atol=2e-3)
    assert len({tuple(row) for row in whole.tolist()}) == 38
    for start in range(5):
        for stop in range(start, 6):
            part = corpus.part(start, stop).part(0, stop - start)
            mine = torch.full((part.tokens, 4), torch.nan, dtype=torch.float16)
            part.fill(mine, CPU)
            assert torch.equal(mine, whole[int(corpus.offsets[start]) : int(corpus.offsets[stop])])
    shares = corpora.ranges(corpus.offsets, 3)
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == 5


def test_the_arena_makes_a_corpus_only_when_it_holds_another() -> None:
    arena = corpora.Arena(1000, CPU)
    one, other = corpus_of([9, 8]), corpus_of([4, 4], "d", seed=5)
    values = arena.hold(one)
    true = values.clone()
    values[0] = 7
    assert arena.hold(one.part(0, 1))[0, 0] == 7, "what lies there is taken as it is"
    arena.hold(other)
    assert torch.equal(arena.hold(one), true)
    arena.scratch(50).fill_(1)
    assert torch.equal(arena.hold(one), true)
    assert torch.equal(arena.hold(one.part(1, 2)), true[9:])
    with pytest.raises(ValueError, match="arena: got 1600 bytes"):
        arena.hold(corpus_of([200]))


def test_pieces_cycle_through_whole_documents() -> None:
    corpus = corpus_of([3, 9, 1, 20, 5])
    values = torch.arange(corpus.tokens * 4.0).view(-1, 4).half()
    for documents in (1, 4, 5, 6, 13):
        found = list(corpora.pieces(values, corpus.offsets, 12 * 8, documents))
        lengths = [size for piece in found for size in piece.lengths.tolist()]
        assert lengths == [[3, 9, 1, 20, 5][number % 5] for number in range(documents)]
        assert all(len(piece) == 1 or piece.values.nbytes <= 12 * 8 for piece in found)
        rows = torch.cat([piece.values for piece in found])
        assert torch.equal(rows, torch.cat([values] * 3)[: len(rows)])
    assert [len(piece) for piece in corpora.pieces(values, corpus.offsets, 12 * 8)] == [2, 1, 1, 1]


@pytest.mark.parametrize("documents", [3, 7, 20, 26])
def test_expected_is_the_sorted_whole(documents: int) -> None:
    torch.manual_seed(0)
    scores = torch.randint(0, 4, (5, 7)).float()
    whole = torch.cat([scores] * 4, 1)[:, :documents]
    found = ooc_measure.expected(scores, 6, documents)
    for row, values, indices in zip(whole.tolist(), *(held.tolist() for held in found), strict=True):
        order = sorted(range(documents), key=lambda place: (-row[place], place))[:6]
        assert indices == order
        assert values == [row[place] for place in order]


def test_one_bit_or_one_place_is_a_difference() -> None:
    differs = ooc_measure.differs
    scores, indices = torch.tensor([[3.0, 2.0, 2.0]]), torch.tensor([[5, 1, 4]])
    assert differs((scores, indices), (scores.clone(), indices.clone())) == ""
    assert "1 scores and 0 indices" in differs(
        (torch.nextafter(scores, scores + 1).where(scores > 2, scores), indices), (scores, indices)
    )
    assert "0 scores and 2 indices" in differs((scores, torch.tensor([[5, 4, 1]])), (scores, indices))
    assert "of 3" in differs((scores * torch.nan, indices), (scores, indices))


def test_a_stream_that_is_wrong_once_has_no_figures(bench: Any) -> None:
    answer = (torch.ones(2, 3), torch.arange(6).view(2, 3))

    def stream(wrong_at: int) -> Callable[[], Any]:
        calls = iter(range(10))
        return lambda: (answer[0] + (next(calls) == wrong_at), answer[1])

    turned: list[int] = []
    data = ooc_measure.measure(bench, stream(9), answer, lambda: turned.append(1))
    assert data["checked"] == 3
    assert len(data["samples_s"]) == len(turned) == 2
    assert data["memory"]["host_bytes"] >= 0
    for call in range(3):
        with pytest.raises(session.RefusedError, match="wrong: 6 scores"):
            ooc_measure.measure(bench, stream(call), answer)


def test_floor_is_the_larger_of_link_and_memory() -> None:
    floored = ooc_measure.floored
    assert floored({"median_s": 3.0}, 10, 20, 1.5, 1.0)["ratio"] == 2
    assert floored({"median_s": 3.0}, 10, 20, 1.5, 1.0)["bound_by"] == "link"
    assert floored({"median_s": 3.0}, 10, 20, 1.5, 3.0)["bound_by"] == "matrix"


def test_stages_are_told_apart_and_never_counted_twice() -> None:
    stage, union = ooc_measure.stage, ooc_measure.union
    assert stage("Memcpy HtoD (Pinned -> Device)") == "copies to the device"
    assert stage("Memcpy DtoH (Device -> Pageable)") == "other copies"
    assert stage("_packed_kernel") == "maxsim"
    assert stage("void at::native::sbtopk::gatherTopK<long>()") == "top-k and the rest"
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == pytest.approx(3.0)
    assert union([]) == 0


def test_peak_memory_of_a_call_is_seen(bench: Any) -> None:
    with ooc_measure.Watch(bench) as watch:
        held = torch.ones(1 << 26)  # long enough in the making for the last look to come near its end
        del held
    assert watch.found["host_bytes"] > 200e6


def test_link_copies_what_it_is_asked_to(bench: Any) -> None:
    source = torch.arange(10, dtype=torch.uint8)
    link = link_rates.Link(bench, source, 4)
    link()
    assert [held.tolist() for held in link._targets] == [[8, 9, 2, 3], [4, 5, 6, 7]]
    link(13)
    assert [held.tolist() for held in link._targets] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    link(11)
    assert [held.tolist() for held in link._targets] == [[0, 9, 2, 3], [4, 5, 6, 7]]
    assert link.events(5) > 0
    done: list[int] = []
    assert link_rates.by_threads(lambda first, count: done.append(first + count), 33 << 20, 4) > 0
    assert sorted(done) == [16 << 20, 32 << 20, 33 << 20]


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_a_stored_entry_is_cut_to_whole_shards(tmp_path: Path, seconds: float) -> None:
    data = corpora
    corpus = corpus_of([3, 9, 1, 20, 5])
    values = data.Arena(1000, CPU).hold(corpus)
    entry = data.store(tmp_path / "e", values, corpus, 2, seconds)
    assert entry.documents == (5 if seconds > 0 else 2)
    held = entry.load()
    assert torch.equal(held.values, values[: entry.tokens])
    assert torch.equal(held.offsets, corpus.offsets[: entry.documents + 1])
    entry.verify()


def test_codes_in_pieces_are_those_of_the_whole(bench: Any) -> None:
    from maxsim_kernels import Packed, maxsim, quantize_int8

    data = corpora
    corpus = corpus_of([3, 9, 1, 20, 5])
    values = data.Arena(1000, CPU).hold(corpus)
    codes = data.Codes(data.Arena(1000, CPU), corpus, CPU)
    queries = torch.randn(3, 5, 4)
    for granularity in ("token", "document"):
        codes.hold(values, granularity)
        whole = maxsim(queries, quantize_int8(Packed(values, corpus.offsets), granularity))
        assert torch.equal(maxsim(queries, codes.moved()), whole)
        cut = [maxsim(queries, piece) for piece in codes.pieces(12 * 4)]
        assert len(cut) == 4
        assert torch.equal(torch.cat(cut, 1), whole)


def test_ndcg_of_one_judged_document() -> None:
    ranked = torch.tensor([[7, 0, 3], [10, 1, 2], [4, 5, 6]])
    assert corpora.judged(3, 30).tolist() == [0, 10, 20]
    assert ooc_cases.ndcg(ranked, 30) == pytest.approx([0.63093, 1.0, 0.0], abs=1e-5)


# Verdicts and tables


def streamed(median: float, **more: Any) -> dict[str, Any]:
    data = {"documents": 500_000, "queries": 500, "bytes": 15e9, "link_s": 0.3, "memory_s": 0.5, "floor_s": 0.5, "first_s": 0.9}
    memory = {"host_bytes": 1e9, "pinned_bytes": 5e8, "gpu_bytes": 2.0e9, "gpu_free_bytes": 2.1e9}
    return data | {"median_s": median, "ratio": median / 0.5, "memory": memory} | more


def report(**groups: Any) -> dict[str, Any]:
    return {"groups": {name: {"rows": rows} for name, rows in groups.items()}, "partial": {}}


def test_verdicts_follow_the_figures() -> None:
    grown = {"host_bytes": 1e9, "gpu_bytes": 2.2e9, "gpu_free_bytes": 2.1e9}
    held = report(
        hotpotqa={"pinned": streamed(0.6)},
        stored={"written": {"seconds": 9.0}, "4 readers": streamed(1.0, memory={"host_bytes": 5e9})},
        reference={
            "ours, pinned": streamed(0.5),
            "FP32 reference": {"whole_s": 50.0, "same_ndcg_10": True, "documents": 20_000},
        },
        int8={
            "500 queries, FP16": streamed(0.6),
            "32 queries, FP16": streamed(0.32, queries=32),
            "32 queries, INT8, a scale a token": streamed(0.16, queries=32),
        },
        nq={"100000 documents": streamed(0.2), "2680000 documents": streamed(4.5, memory=grown)},
        colpali={"750000 documents": streamed(3.7, link_s=3.6)},
        cpu={"20000 documents": streamed(3.0, memory={"host_bytes": 3e8})},
    )
    held["groups"]["ranks 2"] = {
        "rows": {
            "500 queries, one GPU": streamed(0.6),
            "500 queries, 2 GPUs": {"median_s": 0.32, "times_faster": 1.875},
            "32 queries, 2 GPUs": {"median_s": 0.3, "times_faster": 1.1},
        }
    }
    lines = ooc_tables.verdicts(held)
    found = {(line["row"], line["what"]): line for line in lines}

    def of(row: str, what: str = "") -> Any:
        return next(line for (name, words), line in found.items() if name.startswith(row) and words.startswith(what))

    assert (of("HotpotQA shape, pinned")["measured"], of("HotpotQA shape, pinned")["met"]) == (pytest.approx(1.2), True)
    assert not of("HotpotQA shape, pinned")["aimed"]
    assert of("HotpotQA shape, pinned")["floor_s"] == 0.5
    assert not of("HotpotQA shape, page cache")["met"]
    assert of("HotpotQA shape, FP32 reference", "times")["measured"] == pytest.approx(100)
    assert of("HotpotQA shape, FP32 reference", "metrics")["met"]
    assert of("HotpotQA shape, padded FP32 einsum", "metrics")["met"] is False, "not measured is not met"
    assert of("INT8, 32 queries")["measured"] == pytest.approx(2.0)
    assert of("NQ shape, 2680000", "seconds")["met"]
    assert not of("NQ shape, 2680000", "seconds")["aimed"]
    assert of("NQ shape", "GPU peak")["met"] is False
    assert of("NQ shape", "GPU memory taken")["met"]
    assert of("ColPali, 750000")["aimed"]
    assert of("every stream; most in stored, 4 readers")["met"] is False
    assert of("without a GPU")["met"] is False
    assert of("500 queries, 2 GPUs")["met"]
    assert of("32 queries, 2 GPUs")["met"] is None
    assert ooc_tables.verdicts(report()) == []


def test_tables_of_a_file() -> None:
    held = report(
        hotpotqa={"pinned": streamed(0.6, stages={"maxsim": 0.45})},
        stored={"written": {"seconds": 9.0, "filesystem": "ext4"}, "4 readers": {"documents": 5, "wrong": "wrong: 3 scores"}},
        rates={"pinned copy": {"GB_s": 55.4, "median_s": 1.0}, "library product, FP16": {"GB_s": 0.0, "TFLOP_s": 770.0}},
    )
    text = "\n".join(ooc_tables.markdown(held))
    assert "| HotpotQA shape, pinned | times the floor | <= 1.3 | <= 1.1 | 0.5 | 0.6 | 1.2 | yes | **no** |" in text
    assert "| pinned | 500,000 | 15 | 0.3 | 0.5 | 0.5 | 0.6 | 0.9 | 1.2 | 25 | 8.33e+05 | 2 | 2.1 | 1.5 |" in text
    assert "maxsim 0.45" in text
    assert "| 4 readers | wrong: 3 scores |" in text
    assert "- written: seconds 9, filesystem ext4" in text
    assert "| library product, FP16 | - | 770 |" in text
    brief = "\n".join(ooc_tables.markdown(held, True))
    assert brief.startswith("## Asked and measured")
    assert "2 of 3 lines met." in brief
    assert "filesystem" not in brief


# The command


@pytest.mark.slow
def test_every_row_on_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, main = tmp_path / "s.json", streaming.main
    monkeypatch.setattr(ooc_cases, "REFERENCE_SECONDS", 0.1)
    main(
        [
            "--tiny",
            "--runs",
            "1",
            "--only",
            ",".join(ooc_cases.ROWS),
            "--json",
            str(path),
            "--folder",
            str(tmp_path),
        ]
    )
    first = capsys.readouterr().out
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["schema"] == "maxsim-kernels/streaming/1/tiny"
    assert list(held["groups"]) == list(ooc_cases.ROWS)
    assert held["partial"] == {}
    every = [data for group in held["groups"].values() for data in group["rows"].values()]
    assert not [data["wrong"] for data in every if "wrong" in data]
    assert sum("ratio" in data for data in every) == 29
    assert held["groups"]["nq"]["rows"]["450 documents"]["cycled"] == 3.75
    assert held["groups"]["reference"]["rows"]["FP32 reference"]["same_ndcg_10"] is True
    assert list(tmp_path.iterdir()) == [path], "what was stored is removed"
    main(["--tiny", "--show", str(path)])
    assert capsys.readouterr().out.strip() in first
    main(["--tiny", "--show", str(path), "--brief"])
    assert "### hotpotqa" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="tiny"):
        main(["--show", str(path)])


def test_rows_are_chosen_and_failures_do_not_hide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, path = streaming.main, tmp_path / "s.json"
    for wrong, need in ((["--only", "hotpot"], "got hotpot"), (["--runs", "0"], "1 or more"), (["--ranks"], "need torchrun")):
        with pytest.raises(SystemExit):
            main(["--tiny", *wrong])
        assert need in capsys.readouterr().err
    with pytest.raises(SystemExit, match="measures a CUDA GPU"):
        main(["--only", "hotpotqa"])

    def fails(bench: Any) -> Any:
        yield "first", {"documents": 1}
        raise RuntimeError("out of something")

    monkeypatch.setitem(ooc_cases.ROWS, "nq", (fails, 5.0))
    with pytest.raises(SystemExit) as ended:
        main(["--tiny", "--runs", "1", "--only", "nq,colpali,stored", "--seconds", "60", "--json", str(path)])
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "stored: left out" in said.out
    assert "2 rows failed or were left out" in said.err
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["partial"]["nq"]["failed"] == "RuntimeError: out of something"
    assert held["partial"]["nq"]["rows"] == {"first": {"documents": 1}}
    assert set(held["groups"]) == {"colpali"}


@pytest.mark.slow
def test_two_processes_give_one_processs_answer(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(FOLDER / "streaming.py"),
    ]
    root = FOLDER.parent
    env = {**os.environ, "PYTHONPATH": f"{root / 'kernels'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--ranks", "--tiny", "--runs", "1", "--json", str(path)],
        capture_output=True, text=True, check=False, env=env, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["groups"]["ranks 2"]["rows"]
    assert list(rows) == ["links", "6 queries, one GPU", "6 queries, 2 GPUs", "3 queries, one GPU", "3 queries, 2 GPUs"]
    assert not [data for data in rows.values() if "wrong" in data]
    assert rows["6 queries, 2 GPUs"]["times_faster"] > 0
    assert len(rows["links"]["together_GB_s"]) == 2
