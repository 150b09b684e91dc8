"""The training and Chamfer benchmarks' parts that need no GPU: FP64 truths, methods on the CPU, budget, verdicts, tables, flow."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chamfer
from cases import training as training_cases
from cases import training_parts
from measure import byte_budget, clocks, gradient_truth, installed, session, work
from measure import method as methods_of
from rivals import training as training_rivals
from run import command, runner
from tables import training as training_tables


def row(methods: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = {"methods": methods, "skipped": {}, "operations": 8e11, "bytes": 0, "main": "ours", "host": False}
    return {**data, "about": {}, **more}


def report(rows: dict[str, Any]) -> dict[str, Any]:
    return {"groups": {"g": {"ceilings": {"fp16": 8e14}, "rows": rows}}, "partial": {}}


def problem_of(layout: str) -> Any:
    """A small row of each layout."""
    options = methods_of.Options(torch.device("cpu"), smoke=True)
    made = {
        "shared": lambda: training_cases.shared("ColBERT B=512", options),
        "per_query": lambda: training_cases.distillation(options),
        "pairs": lambda: training_cases.pairs(options, 6, 16, 24),
        "packed": lambda: training_cases.packed(options),
        "float32": lambda: training_cases.plain(options, (4, 16, 24), 32, torch.float32),
    }
    return made[layout]()


def test_byte_budget_of_the_paper() -> None:
    of, shape = byte_budget.budget, byte_budget.Shape
    small, large = (shape(batch, batch, 1024, 1024) for batch in (64, 128))
    assert of(small, "vanilla").similarities == of(small, "vanilla").similarity_gradient == 64**2 * 1024**2 * 4
    assert of(large, "vanilla").similarities == 68_719_476_736  # the paper prints half of it
    assert of(large, "vanilla").total == 2 * 68_719_476_736
    assert of(large, "unified", index_bytes=4).winners == 67_108_864  # the paper's 64 MB
    assert of(large, "unified").winners == 33_554_432
    assert of(large, "unified").scratch == of(large, "atomic").scratch == 128 * 1024 * 128 * 4
    whole = of(large, "csr")
    assert (whole.scratch, whole.source_list) == (0, 4 * 128 * 1024 * 128 + 4 * (128 * 1024 + 1))
    assert of(large, "csr", list_bytes=16 << 20).source_list == pytest.approx(whole.source_list / 4, rel=1e-6)
    assert byte_budget.winner_bytes(65_534) == 2
    assert byte_budget.winner_bytes(65_535) == 4
    with pytest.raises(ValueError, match="path: got 'sorted'"):
        of(small, "sorted")


def test_few_are_chosen_from_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gradient_truth.chosen(5, 10) == [0, 1, 2, 3, 4]
    assert gradient_truth.chosen(100, 10) == [*range(8), *range(92, 100)]
    monkeypatch.setattr(gradient_truth, "CELLS", 30)
    assert gradient_truth.chosen(100, 10) == [0, 1, 99]
    assert gradient_truth.chosen(100, 1000) == [0, 99]


@pytest.mark.parametrize("layout", ["shared", "per_query", "packed"])
def test_gradient_truth_agrees_with_autograd(layout: str) -> None:
    problem = problem_of(layout)
    queries, documents = (held.detach().double().requires_grad_() for held in (problem.queries, problem.documents))
    products = torch.einsum("qid,qnjd->qnij" if layout == "per_query" else "qid,njd->qnij", queries, documents)
    if problem.lengths is not None:
        padding = torch.arange(documents.shape[1]) >= problem.lengths[:, None]
        products = products.masked_fill(padding[None, :, None, :], -torch.inf)
    products.amax(3).sum(2).backward(problem.grad.double())
    assert queries.grad is not None
    assert documents.grad is not None
    exact = gradient_truth.Bound(1 - 1e-12, 1e-12)
    compare = problem.truth.compare
    found = compare(problem.grad, queries.grad, documents.grad, exact)
    assert found["left_out"] == 0
    for spoiled in ("scaled", "moved", "nan", "padding"):
        wrong = documents.grad.clone()
        if spoiled == "scaled":
            wrong[0] *= 1.001
        elif spoiled == "moved":
            wrong[0] = wrong[0].roll(1, -2)
        elif spoiled == "nan":
            wrong[..., -1, -1] = torch.nan
        elif problem.lengths is None:
            continue
        else:
            wrong[0, -1, 0] = 1e-30
        with pytest.raises(session.RefusedError, match="wrong"):
            compare(problem.grad, queries.grad, wrong, exact)
    with pytest.raises(session.RefusedError, match="queries is not finite"):
        compare(problem.grad, queries.grad * torch.inf, None, exact)


def test_rows_that_a_tie_could_change_are_left_out() -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(3, 4, 8), torch.randn(2, 6, 8)
    documents[0, 5] = documents[0, 2] = 10 * queries[0, 0]  # the first query token finds two equal maxima
    truth = gradient_truth.Truth(queries, documents)
    (first,) = [side for side in truth.of_documents if side.number == 0]
    assert first.unsure.nonzero().flatten().tolist() == [2, 5]
    assert bool(truth.of_queries[0].unsure[0])
    assert not bool(truth.of_documents[1].unsure.any())


@pytest.mark.parametrize("layout", ["shared", "per_query", "pairs", "packed", "float32"])
def test_training_methods_are_right_on_the_cpu(layout: str) -> None:
    problem, rivals = problem_of(layout), training_rivals
    methods = [*rivals.ours(problem).methods, *rivals.naive(problem).methods]
    if layout == "shared":
        methods += rivals.recomputed(problem).methods
    names = {method.name for method in methods}
    assert {"ours", "ours unified", "ours atomic", "ours csr"} < names
    for method in methods:
        for entry, call in method.entries.items():
            assert method.check(entry)["cosine"] >= 0.99
            assert call().dim() == 0
        assert method.gradient_bytes > 0
    steps = problem_of(layout)
    (step,) = rivals.ours(steps, ("auto",)).methods
    step.entries[""]()
    leaf = steps.documents if steps.values is None else steps.values
    once = leaf.grad.clone()
    step.entries[""]()
    assert torch.equal(leaf.grad, once), "a step starts without the gradients of the one before"


def test_wrong_training_methods_are_refused() -> None:
    problem = problem_of("shared")
    fused = training_rivals.maxsim
    entries = {
        "scaled": lambda: fused(problem.queries, problem.documents) * 1.02,
        "cut": lambda: fused(problem.queries, problem.documents[:, :-1]),
        "shaped": lambda: fused(problem.queries, problem.documents[:-1]),
        "mean": lambda: problem.documents.mean(1).float() @ problem.queries.float().sum((0, 1)) + problem.grad * 0,
    }
    method = problem.method("somebody", "peer", entries)
    for entry in entries:
        with pytest.raises((session.RefusedError, RuntimeError)):
            method.check(entry)


def test_peers_path_is_set_around_their_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    name, rivals, seen = training_rivals.VARIABLE, training_rivals, []
    problem = problem_of("shared")

    def scores() -> torch.Tensor:
        made = torch.einsum("qid,njd->qnij", problem.queries.float(), problem.documents.float()).amax(3).sum(2)
        made.register_hook(lambda grad: seen.append(os.environ.get(name)))
        return made

    problem.method("peer", "peer", {"": scores}, variable="invgrid").entries[""]()
    assert seen == ["invgrid"]
    assert name not in os.environ
    monkeypatch.setenv(name, "csr")
    with pytest.raises(KeyError), rivals.path("atomic"):
        raise KeyError
    assert os.environ[name] == "csr"


def test_winners_of_every_kind() -> None:
    cases = training_cases
    for kind in training_parts.WINNERS:
        queries, documents = cases.drawn(kind, (6, 6), 8, 24, 32, cases.Tokens(torch.device("cpu")))
        winners = torch.einsum("qid,njd->qnij", queries, documents).argmax(3)
        counts = torch.bincount((winners + 24 * torch.arange(6)[None, :, None]).flatten(), minlength=144).view(6, 24)
        if kind == "hot":
            assert counts[:, 0].tolist() == [48] * 6
        elif kind == "uniform":
            assert counts.eq(2).all()
        else:
            assert counts.max() < 16


def test_rows_time_only_what_is_right() -> None:

    def refuse(_: str) -> dict[str, Any]:
        raise session.RefusedError("wrong: cosine 0.5")

    def fail() -> torch.Tensor:
        raise RuntimeError("no kernel\nmore")

    def wait() -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(())

    lineup = methods_of.Lineup(
        [
            methods_of.Method(
                "ours",
                "ours",
                {"slow": wait, "quick": lambda: torch.zeros(())},
                check=lambda _: {"error": 1e-9},
                gradient_bytes=8,
            ),
            methods_of.Method("bad", "peer", {"": lambda: torch.zeros(())}, check=refuse),
            methods_of.Method("broken", "peer", {"": fail}, check=lambda _: {}),
        ],
        {"absent": "not installed"},
    )
    before = torch.get_float32_matmul_precision()
    found = runner.run_row(
        methods_of.Row("r", {}, lineup, work.Work(8.0, 0.0)), clocks.Bench(torch.device("cpu"), 2), 2, runner.STEPS
    )
    assert torch.get_float32_matmul_precision() == before
    assert set(found["methods"]) == {"ours"}
    assert found["methods"]["ours"]["entry"] == "quick"
    assert found["methods"]["ours"]["median_ms"] < 20
    assert found["skipped"] == {
        "absent": "not installed",
        "bad": "wrong: cosine 0.5",
        "broken": "failed: RuntimeError: no kernel more",
    }
    text = "\n".join(command.lines("r", found))
    assert "cosine 0.5" in text
    assert "quick" in text


def trained(kind: str, ms: float, peak: float, **more: Any) -> dict[str, Any]:
    data = {"kind": kind, "entry": "", "median_ms": ms, "iqr_ms": 0.0, "error": 1e-4, "cosine": 1.0}
    return {**data, "peak_bytes": peak, "strict_bytes": peak + 1e6, **more}


def training_row(methods: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {"queries": 128, "documents": 128, "query_tokens": 1024, "document_tokens": 1024, "dim": 128}
    return row(methods, about=about, floor_ms=5.0, ceilings={"fp16": 8e14}, **more)


def test_training_verdicts_follow_the_figures() -> None:
    peer = "late-interaction-kernels auto"
    methods = {
        "ours": trained("ours", 9.0, 60e6),
        "ours csr": trained("ours", 9.0, 60e6),
        "ours unified": trained("ours", 8.1, 100e6),
        peer: trained("peer", 18.0, 202e6),
        "flash-maxsim unified": trained("peer", 20.0, 134e6),
    }
    name = training_cases.step_name("ColPali B=128")
    found = {line["what"]: line for line in training_tables.verdicts(report({name: training_row(methods)}))}
    speed = found[f"times faster than {peer}, the fastest peer"]
    assert (speed["measured"], speed["met"], speed["aimed"]) == (pytest.approx(2.0), True, True)
    assert found["times the forward floor"]["aimed"]
    assert found["times the forward floor"]["met"] is None
    assert found[f"peak MB, no more than {peer}'s, the fastest peer's with the host"]["asked"] == pytest.approx(202)
    assert found["peak MB, 16-bit winners (the default)"]["met"]
    assert not found["peak MB, 16-bit winners (the default)"]["aimed"]
    assert not found["csr over unified, times faster"]["met"]
    text = training_tables.verdict_table(list(found.values()))
    assert text[-1] == "3 of 4 lines met."
    lost = {peer: trained("peer", 18.0, 202e6)}
    missing = training_tables.verdicts(report({name: training_row(lost, skipped={"ours": "wrong"})}))
    assert missing
    assert not any(line["met"] for line in missing)
    assert training_tables.verdicts(report({})) == []


def test_training_tables_show_losses_and_the_paper() -> None:
    name = training_cases.step_name("ColPali B=128")
    methods = {"ours": trained("ours", 9.0, 60e6), "flash-maxsim csr": trained("peer", 18.0, 2e8)}
    held = training_row(methods, skipped={"naive FP32 accumulation": "failed: OutOfMemoryError"})
    text = "\n".join(training_tables.markdown(report({name: held})))
    assert "| method | ms | x ours | peak GB | peak GB with gradients | row error | 1 - cosine | paper (A100) |" in text
    assert "| flash-maxsim csr | 18 | 2.00 | 0.2 | 0.201 | 1.0e-04 | < 5e-07 | 46.0 (1.03) |" in text
    assert "failed: OutOfMemoryError (paper (A100): OOM)" in text
    assert "137" in text, "S and its gradient at B = 128"
    brief = "\n".join(training_tables.markdown(report({name: held}), True))
    assert "x ours" not in brief
    assert "| flash-maxsim csr | 18 (0.2) |" in brief
    assert "| naive FP32 accumulation | out of memory |" in brief
    assert "| the paper (A100): flash-maxsim csr | 46.0 (1.03) |" in brief
    assert "137" in brief
    assert brief.index("| ours |") < brief.index("| flash-maxsim csr |") < brief.index("| naive FP32")


def test_missing_peers_of_training_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = training_rivals
    monkeypatch.setattr(installed, "PEERS", dict.fromkeys(installed.PEERS, "no_such_module_of_a_peer"))
    for layout in ("shared", "per_query", "pairs", "packed"):
        problem = problem_of(layout)
        for make, name in ((rivals.flash, rivals.FLASH), (rivals.lik, rivals.LIK)):
            lineup = make(problem, (rivals.FLASH, rivals.LIK))
            assert not lineup.methods
            assert "not installed" in lineup.skipped[name]
            assert not make(problem, ()).skipped


@pytest.mark.parametrize(
    ("tool", "groups"), [("training", "steps,memory,parts,ablation,layouts"), ("chamfer", "training,small")]
)
def test_smoke_runs_of_the_commands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    groups: str,
) -> None:
    module, path = importlib.import_module(tool), tmp_path / f"{tool}.json"
    for name, held in (("STEPS", training_cases), ("MEMORY_STEPS", training_cases), ("ABLATION", training_parts)):
        monkeypatch.setattr(held, name, ("ColPali B=64",))
    command.main(module.TOOL, ["--smoke", "--runs", "1", "--only", groups, "--json", str(path), "--peers", "none"])
    first = capsys.readouterr().out
    held = json.loads(path.read_text(encoding="utf-8"))
    assert set(held["groups"]) == set(groups.split(","))
    assert held["partial"] == {}
    every = [data for group in held["groups"].values() for data in group["rows"].values()]
    assert all("ours" in data["main"] and data["main"] in data["methods"] for data in every)
    assert not [why for data in every for why in data["skipped"].values()]
    command.main(module.TOOL, ["--smoke", "--show", str(path)])
    assert capsys.readouterr().out.strip() in first
    command.main(module.TOOL, ["--smoke", "--show", str(path), "--brief"])
    brief = capsys.readouterr().out
    assert "| ours |" in brief
    assert "x ours" not in brief
    with pytest.raises(SystemExit, match="smoke"):
        command.main(module.TOOL, ["--show", str(path)])
    with pytest.raises(SystemExit):
        command.main(module.TOOL, ["--only", "dens"])
    assert "need some of" in capsys.readouterr().err


def test_chamfer_truth_and_marks() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(50, 3), torch.randn(40, 3)
    way = chamfer.one_way(p + 1000, q + 1000)
    full = ((p + 1000).double()[:, None] - (q + 1000).double()[None]).square().sum(2)
    assert torch.equal(way.nearest, full.argmin(1))
    assert torch.allclose(way.distance, full.min(1).values, rtol=1e-9)
    assert not way.unsure.any()
    twice = chamfer.one_way(p, torch.cat([q, q[:1]]))
    assert bool(twice.unsure.any()) == bool((chamfer.one_way(p, q).nearest == 0).any())
    clouds = chamfer.Clouds(chamfer.Truth(p, q), training=True)
    assert not p.requires_grad
    quick = chamfer.one_way(p, q, ties=False)
    assert torch.equal(quick.distance, chamfer.one_way(p, q).distance)
    good = chamfer.method(clouds, "ours", "ours", chamfer.chamfer_distance, training=True).check("")
    assert good["gradient_error"] <= 1e-5
    assert "wrong" not in good
    far = chamfer.method(clouds, "peer", "peer", lambda p, q: chamfer.chamfer_distance(p, q) * 1.01, training=False)
    assert "error 1.0e-02" in far.check("")["wrong"]
    mine = chamfer.method(clouds, "ours", "ours", lambda p, q: chamfer.chamfer_distance(p, q.detach()), training=False)
    assert "wrong" not in mine.check("")
    bent = chamfer.method(clouds, "ours", "ours", lambda p, q: chamfer.chamfer_distance(p * 1.001, q), training=True)
    with pytest.raises(session.RefusedError, match="wrong: error"):
        bent.check("")
    name = chamfer.row_name("10K", 3, training=True)
    methods = {
        "ours": trained("ours", 1.0, 1e6),
        "flash-maxsim train": trained("peer", 2.0, 1e6, wrong="shifted_error 6e-01"),
        "naive, products": trained("baseline", 150.0, 1e9),
    }
    found = report({name: row(methods, floor_ms=None)})
    assert [line["met"] for line in chamfer.verdicts(found)] == [False, True]
    assert "| shifted_error 6e-01 |" in "\n".join(chamfer.markdown(found))
    assert "| flash-maxsim train | 2 (0.001) [m] |" in "\n".join(chamfer.markdown(found, True))


def test_chamfer_rows_share_truth_and_leave_out_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    options = methods_of.Options(torch.device("cpu"), smoke=True)
    truths = [chamfer.drawn(210, dim, options.device) for dim in chamfer.DIMS]
    assert truths[0] is chamfer.drawn(210, 3, options.device)
    once = chamfer.Clouds(truths[0], training=True)
    assert once.truth.ways is chamfer.Clouds(truths[0], training=False).truth.ways
    assert [row.name for row in chamfer.rows(options, chamfer.LARGE, training=True)][:2] == [
        "forward + backward, 10K points, d = 3",
        "forward + backward, 50K points, d = 3",
    ]
    monkeypatch.setattr(chamfer, "DIFFERENCES", 100)
    found = chamfer.lineup(once, options, training=True)
    assert [method.name for method in found.methods] == ["ours", "naive, products"]
    assert found.skipped["naive, differences"].startswith("too slow: about ")

    clock = [0.0]

    def wait(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        clock[0] += 0.001 * len(p)
        return torch.zeros(())

    monkeypatch.setattr(chamfer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert chamfer.estimate(once, wait) == pytest.approx(0.21), "47 of 210 rows, a millisecond each"
    assert clock[0] == pytest.approx(0.055)


def test_the_step_alone_is_checked_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from alone import step

    step.main(["--smoke"])
    assert capsys.readouterr().out == "checked: ours contrastive_loss, ours, ours unified\n"


def test_a_step_with_a_wrong_loss_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from alone import step

    right = step.contrastive_loss
    monkeypatch.setattr(step, "contrastive_loss", lambda *tokens: right(*tokens) + 0.1)
    with pytest.raises(SystemExit, match=r"^ours contrastive_loss: wrong: loss .* off; nothing written"):
        step.main(["--smoke"])
