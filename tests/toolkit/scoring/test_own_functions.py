"""Users' own functions as scoring paths: the contract of docs/scorers.md, what is refused, and that nothing of an earlier one is kept."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maxsim_eval.api import evaluate
from maxsim_eval.data.trec import read_trec_run
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.scoring import units
from maxsim_eval.scoring.own_functions import ScorerError, find_paths, run_file
from maxsim_eval.types import Task
from maxsim_kernels import Packed
from scorer_cases import NAIVE, Write, naive, run

pytestmark = pytest.mark.slow

# A function that is right ----------------------------------------------------------------------------------------------


def test_a_function_of_ones_own_gets_the_whole_report(demo_home: Path, demo_task: Task, write: Write, here: Path) -> None:
    name = f"python:{write(NAIVE)}:score"
    path_before = list(sys.path)
    result = run(demo_home, demo_task, name, out_dir=here / "out")
    found = result.paths[name]
    assert sys.path == path_before, "the current folder is importable for the user's code alone"
    assert found.parity is not None
    assert found.parity["spearman"]["mean"] == pytest.approx(1, abs=1e-9)
    assert found.parity["overlap"]["@10"] == 1
    assert found.parity["max_abs_error"] < 1e-4
    assert found.parity["reference_reads_same_inputs"] is True
    assert found.metrics == result.paths["fp32"].metrics
    assert re.search(r"your own function|user's own function", found.description)
    assert "source " in found.description
    assert found.run == f"runs/{run_file(name)}"
    assert ":" not in str(found.run)
    ranked = read_trec_run(here / "out" / str(found.run)).rankings
    assert {query: len(row) for query, row in ranked.items()} == {
        query: len(row) for query, row in read_trec_run(demo_home / "out" / "runs" / "fp32.trec").rankings.items()
    }
    assert json.loads((here / "out" / "result.json").read_text())["paths"][name]["parity"]["reference"] == "fp32"


def test_a_pair_of_name_and_function(demo_home: Path, demo_task: Task, here: Path) -> None:
    seen: list[tuple[int, int, torch.dtype, str]] = []

    def watching(queries: Packed, documents: Packed) -> Tensor:
        assert queries.offsets is not None
        assert documents.offsets is not None
        seen.append((len(queries), len(documents), documents.dtype, str(documents.device)))
        return naive(queries, documents)

    result = run(demo_home, demo_task, ("mine", watching), out_dir=here / "out")
    assert list(result.paths) == ["fp32", "mine"]
    assert result.paths["mine"].run == "runs/python-mine.trec"
    assert sum(count for _, count, *_ in seen) == 300
    assert {(queries, dtype, device) for queries, _, dtype, device in seen} == {(40, torch.float32, "cpu")}
    again = run(demo_home, demo_task, out_dir=here / "out")
    assert list(again.paths) == ["fp32"]
    assert sorted(path.name for path in (here / "out" / "runs").iterdir()) == ["fp32.trec"], "the earlier run is gone"


def test_a_wrong_function_is_told_from_the_reference(demo_home: Path, demo_task: Task) -> None:
    def summed(queries: Packed, documents: Packed) -> Tensor:  # a bug: padding of zeros counts as a maximum
        return naive(queries, documents).clamp_min(0) + torch.arange(len(documents)) * 0.05

    parity = run(demo_home, demo_task, ("bug", summed)).paths["bug"].parity
    assert parity is not None
    assert parity["overlap"]["@10"] < 0.9
    assert parity["max_abs_error"] > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scores_are_widened_and_nothing_else(demo_home: Path, demo_task: Task, dtype: torch.dtype) -> None:
    kept: list[Tensor] = []

    def narrow(queries: Packed, documents: Packed) -> Tensor:
        kept.append(naive(queries, documents).to(dtype).requires_grad_())
        return kept[-1]

    evaluate(demo_task, "lexical", [("narrow", narrow)], cache_dir=demo_home / "cache", k=3, quiet=True)
    (scores,) = kept
    path = find_paths([("narrow", lambda *_: scores)])["narrow"]
    nothing = (
        Packed(torch.zeros(0, 4), torch.zeros(41, dtype=torch.int64)),
        Packed(torch.zeros(0, 4), torch.zeros(301, dtype=torch.int64)),
    )
    given = path.score(*nothing)
    assert isinstance(given, Tensor)
    assert given.dtype == torch.float32
    assert torch.equal(given, scores.detach().float())
    assert not given.requires_grad
    assert given.data_ptr() != scores.data_ptr(), "our scores are changed in place; those of the function are its own"


def test_the_answer_does_not_depend_on_blocks_where_the_function_does_not(
    demo_home: Path, demo_task: Task, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def watching(queries: Packed, documents: Packed) -> Tensor:
        sizes.append(len(documents))
        return naive(queries, documents)

    run(demo_home, demo_task, ("mine", watching), out_dir=here / "whole")
    whole, sizes[:] = list(sizes), []
    monkeypatch.setattr(units, "LEAST_BYTES", 400_000)
    run(demo_home, demo_task, ("mine", watching), out_dir=here / "cut", memory_budget=64 << 20)
    assert len(sizes) > len(whole)
    assert sum(sizes) == 300
    same = [(here / out / "runs" / "python-mine.trec").read_bytes() for out in ("whole", "cut")]
    assert same[0] == same[1]


def test_candidates_come_one_query_at_a_time(demo_home: Path, demo_task: Task, here: Path) -> None:
    calls: list[tuple[int, int]] = []

    def watching(queries: Packed, documents: Packed) -> Tensor:
        assert documents.offsets is not None, "views are made whole for the function"
        calls.append((len(queries), len(documents)))
        return naive(queries, documents)

    (here / "few.trec").write_text("q00 Q0 d003 1 2 x\nq00 Q0 d001 2 1 x\nq05 Q0 d001 1 1 x\n")
    with pytest.warns(UserWarning, match="have none"):
        run(demo_home, demo_task, ("mine", watching), candidates=here / "few.trec", out_dir=here / "few", k=2)
    assert sorted(calls) == [(1, 1), (1, 2)]
    full = {
        (query, document): score
        for query, row in read_trec_run(demo_home / "out" / "runs" / "fp32.trec").rankings.items()
        for document, score in row
    }
    ranked = read_trec_run(here / "few" / "runs" / "python-mine.trec").rankings
    assert {query: {document for document, _ in row} for query, row in ranked.items()} == {
        "q00": {"d001", "d003"},
        "q05": {"d001"},
    }
    for query, row in ranked.items():
        for document, score in row:
            assert score == pytest.approx(full[query, document], abs=1e-5)


# A function that is not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "need"),
    [
        (lambda q, d: naive(q, d).T, r"returned float32 \[300, 40\], need a tensor \[40, 300\]"),
        (lambda q, d: naive(q, d)[:, :-1], r"returned float32 \[40, 299\]"),
        (lambda q, d: naive(q, d).double(), r"returned float64 \[40, 300\].*float32, float16 or bfloat16"),
        (lambda q, d: naive(q, d).nan_to_num(neginf=0).long(), "returned int64"),
        (lambda q, d: naive(q, d).tolist(), "returned a list"),
        (lambda q, d: None, "returned a NoneType"),
        (lambda q, d: naive(q, d).to("meta"), "scores on meta, need the documents' device cpu"),
    ],
)
def test_what_is_no_scores_is_refused(demo_home: Path, demo_task: Task, function: Any, need: str) -> None:
    with pytest.raises(ScorerError, match=need) as caught:
        run(demo_home, demo_task, ("mine", function))
    assert str(caught.value).startswith("path mine: its function returned ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_scores_that_are_not_finite_are_named(demo_home: Path, demo_task: Task, value: float, word: str) -> None:
    def spoilt(queries: Packed, documents: Packed) -> Tensor:
        scores = naive(queries, documents)
        scores[7, 41] = value
        return scores

    with pytest.raises(DataError, match=rf"path mine: {word} score for query 'q07' and document 'd041'; its function must"):
        run(demo_home, demo_task, ("mine", spoilt), k=3)


def test_minus_infinity_is_not_retrieved(demo_home: Path, demo_task: Task, here: Path) -> None:
    def some(queries: Packed, documents: Packed) -> Tensor:
        scores = torch.full((len(queries), len(documents)), -torch.inf)
        scores[:, 5] = 1
        return scores

    run(demo_home, demo_task, ("mine", some), out_dir=here / "out")
    ranked = read_trec_run(here / "out" / "runs" / "python-mine.trec").rankings
    assert {tuple(document for document, _ in row) for row in ranked.values()} == {("d005",)}


def test_queries_that_are_changed_in_place_are_refused(demo_home: Path, demo_task: Task) -> None:
    def changing(queries: Packed, documents: Packed) -> Tensor:
        queries.values.mul_(2)
        return naive(queries, documents)

    with pytest.raises(ScorerError, match="changed the queries in place"):
        run(demo_home, demo_task, ("mine", changing))


def hidden_writes(queries: Packed, documents: Packed) -> Tensor:
    scores = naive(queries, documents)
    assert queries.offsets is not None
    for tensor in (queries.values, queries.offsets):
        ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
    return scores


def test_queries_written_to_unseen_reach_no_other_path(demo_home: Path, demo_task: Task) -> None:
    found = run(demo_home, demo_task, ("mine", hidden_writes), "fused-fp32")
    assert found.paths["mine"].metrics == found.paths["fp32"].metrics
    assert found.paths["fused-fp32"].metrics == found.paths["fp32"].metrics


class Panic(BaseException):
    """As pyo3's `PanicException`."""


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Panic("no kernel")], ids=lambda error: type(error).__name__)
def test_a_function_cannot_end_the_program(error: BaseException, demo_home: Path, demo_task: Task, write: Write) -> None:
    def ends(queries: Packed, documents: Packed) -> Tensor:
        raise error

    with pytest.raises(ScorerError, match=f"its function raised(.|\n)*{type(error).__name__}"):
        run(demo_home, demo_task, ("mine", ends))
    with pytest.raises(ScorerError, match=r"importing .* failed(.|\n)*SystemExit"):
        run(demo_home, demo_task, f"python:{write('import sys; sys.exit(0)')}:score")


def test_what_a_function_raises_is_reported_as_its_own(demo_home: Path, demo_task: Task, write: Write) -> None:
    module = write("def inner():\n    raise KeyError('no kernel')\n\ndef score(queries, documents):\n    return inner()\n")
    with pytest.raises(ScorerError) as caught:
        run(demo_home, demo_task, f"python:{module}:score")
    text = str(caught.value)
    assert text.startswith(
        f"path python:{module}:score: its function raised, given 40 queries and 300 documents, torch.float32 on cpu\n"
    )
    assert text.endswith("KeyError: 'no kernel'")
    assert [line.strip() for line in text.splitlines() if "File" in line] == [
        f'File "{Path.cwd() / module}.py", line 5, in score',
        f'File "{Path.cwd() / module}.py", line 2, in inner',
    ], "the user's frames and no others"


def test_ctrl_c_and_memory_are_not_the_functions_errors(demo_home: Path, demo_task: Task) -> None:
    def stops(queries: Packed, documents: Packed) -> Tensor:
        raise KeyboardInterrupt

    def full(queries: Packed, documents: Packed) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(KeyboardInterrupt):
        run(demo_home, demo_task, ("mine", stops))
    with pytest.raises(UsageError, match="path mine: out of GPU memory; a smaller --memory-budget"):
        run(demo_home, demo_task, ("mine", full))
