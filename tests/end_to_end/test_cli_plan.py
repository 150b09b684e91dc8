"""`plan`: what it says before, beside what the evaluation says after; how it refuses; that it leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.cli.plan import SCHEMA, Answer, _launching, _parts
from maxsim_eval.errors import UsageError
from maxsim_eval.planning import around
from maxsim_eval.planning import rates as measuring
from maxsim_eval.planning.costs import PathRates, Rate, Rates, Sizes
from maxsim_eval.planning.plan import Room, make_plan
from maxsim_eval.planning.sizes import FoundSizes
from maxsim_eval.quantities import about_text, bytes_of, size_text, time_text

pytestmark = pytest.mark.slow

NO, USAGE, DATA = 1, 2, 3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of milliseconds."""
    monkeypatch.setattr(measuring, "SECONDS", 0.02)
    monkeypatch.setattr(around, "SECONDS", 0.02)
    monkeypatch.setattr(measuring, "_CALL", {"cpu": 0.005})
    monkeypatch.setattr(measuring, "_MADE_UP", {"cpu": 1 << 20})


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_plan_knows_the_sizes_that_the_evaluation_reports(demo: Any, cli: Any, tmp_path: Path) -> None:
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    before = files(tmp_path)
    outcome = cli("plan", "demo", "--paths", "int8-corpus,fp32,fp16", "--k", "7", "--json", cwd=tmp_path).fine()
    assert files(tmp_path) == before
    found = json.loads(outcome.out)
    task, sizes = demo.result["task"], found["sizes"]
    assert found["schema"] == SCHEMA
    for name in ("queries", "documents", "query_tokens", "document_tokens"):
        assert sizes[name] == task[name]
    assert (sizes["exact"], sizes["encoded"], sizes["form"]) == (True, True, "float32")
    assert found["fits"] is True
    assert found["kept_rows"] == 40
    assert [phase["name"] for phase in found["phases"]] == ["start", "fp32", "int8-corpus", "fp16", "compare", "finish"]
    for path in found["phases"][1:4]:
        stages = {stage["name"]: stage for stage in path["stages"]}
        assert stages["score"]["amount"] == 2 * task["query_tokens"] * task["document_tokens"] * 128
        assert stages["score"]["seconds"] == pytest.approx(
            stages["score"]["amount"] / found["rates"]["paths"][path["name"]]["score"]["value"]
        )
        assert ("corpus scale" in stages) == (path["name"] == "int8-corpus")
    assert found["total"] == pytest.approx(sum(phase["seconds"] for phase in found["phases"]))
    assert found["unknown"] == []
    assert "nan" not in outcome.out.lower()


def busy(spread: float) -> Answer:
    """A plan of one path on this machine, whose rate of scoring was so unsteady."""
    sizes = Sizes(queries=10, documents=1000, query_tokens=100, document_tokens=50_000, dim=128, form="float32")
    rate = PathRates(Rate(1e9, "", spread), Rate(1e12, ""))
    rates = Rates("cpu", {"fp32": rate}, disk=Rate(1e8, ""), host=Rate(1e9, ""), topk=Rate(1e9, ""), output=Rate(1e8, ""))
    task = {"source": "demo", "dataset": "small", "split": "test"}
    return Answer(
        FoundSizes(sizes, None, None, task, ()), "lexical", "this machine, cpu", make_plan(sizes, rates, Room(), ["fp32"])
    )


def test_a_busy_machine_s_plan_begins_with_one_figure() -> None:
    assert re.match(r"About [\d.]+ s in all \([\d.]+ to [\d.]+ s: the machine is busy\); ", busy(2.0).sentence())
    assert "busy" not in busy(0.0).sentence()


def test_waiting_and_scoring_are_what_a_path_takes() -> None:
    (path,) = [phase for phase in busy(0.0).plan.phases if phase.name == "fp32"]
    assert path.seconds is not None
    wait, score = (float(text.removesuffix(" s")) for text in _parts(path))
    assert wait + score == pytest.approx(path.seconds, rel=0.06)  # two digits each
    assert score > 0


def test_people_get_the_answer_first_and_few_lines(demo: Any, cli: Any, tmp_path: Path) -> None:
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    lines = cli("plan", "demo", cwd=tmp_path).fine().out.splitlines()
    # Minutes: its start is this process's own, all tests before included.
    assert re.match(r"About [\d.]+( to [\d.]+)? (s|min) in all( \([^)]+\))?; it fits; \w+ takes the most", lines[0])
    assert len(lines) <= 20
    said = " ".join(" ".join(lines).split())
    for text in (
        "on this machine, cpu, measured now",
        "full scores of 40 queries",
        "metrics, statistics, report",
        "needs memory",
    ):
        assert text in said
    assert "ESTIMATE" not in said


def test_what_is_not_cached_is_encoded_in_a_sample(
    demo: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(around, "SECONDS", 60)
    demo.copy(tmp_path, "datasets")
    found = json.loads(cli("plan", "demo", "--json", cwd=tmp_path).fine().out)
    (encode,) = [phase for phase in found["phases"] if phase["name"] == "encode"]
    assert 0 < encode["seconds"] < 60
    assert found["rates"]["encode"]["rate"]["value"] > 0
    assert found["unknown"] == []
    # Every document of so few is tried, so that the estimate is exact.
    assert found["sizes"]["document_tokens"] == demo.result["task"]["document_tokens"]
    assert found["sizes"]["encoded"] is False
    assert not (tmp_path / "embeddings_cache").exists()


def test_an_estimate_says_so_and_nothing_is_made(cli: Any, tmp_path: Path) -> None:
    outcome = cli("plan", "demo", "--quiet", cwd=tmp_path).fine()
    assert "ESTIMATE: demo small is not on this machine" in " ".join(outcome.out.split())
    assert ", without encoding;" in outcome.out
    assert "not known: encode" in outcome.out
    assert files(tmp_path) == []


def test_several_processes_wait_for_their_launcher(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("maxsim_eval.cli.plan._launching", lambda: 100.0)
    asked = ("plan", "beir", "nq", "--encoder", "colbertv2", "--gpu", "h200", "--json", "--gpus")
    one, two = (json.loads(cli(*asked, count, cwd=tmp_path).fine().out)["phases"][0] for count in ("1", "2"))
    assert (one["name"], two["name"]) == ("start", "start")
    assert two["seconds"] > one["seconds"] + 99, "both say what this process took so far, too"


def test_launching_takes_at_least_a_python() -> None:
    assert _launching() > 0.1


def test_a_machine_of_the_table_needs_no_device(cli: Any, tmp_path: Path) -> None:
    asked = ("plan", "beir", "nq", "--encoder", "colbertv2", "--gpu", "h200", "--gpus", "4", "--disk", "3GB/s")
    outcome = cli(*asked, cwd=tmp_path).fine()
    assert "on 4 x h200 (shares measured on one), disk 3 GB/s, memory not known, so every path reads the disk" in outcome.out
    assert len(outcome.out.splitlines()) <= 20
    found = json.loads(cli(*asked, "--ram", "1TB", "--json", cwd=tmp_path).fine().out)
    phases = {phase["name"]: phase["seconds"] for phase in found["phases"]}
    assert 2 * found["sizes"]["query_tokens"] * found["sizes"]["document_tokens"] * 128 / 4 / 22e12 == pytest.approx(
        phases["fp32"], rel=0.1
    )
    assert phases["fp16"] < phases["fp32"] / 10
    assert (found["processes"], found["room"]["gpus"], found["fits"]) == (4, 4, True)
    slow = json.loads(cli(*asked, "--link", "1GB/s", "--ram", "1TB", "--json", cwd=tmp_path).fine().out)
    (half,) = [phase for phase in slow["phases"] if phase["name"] == "fp16"]
    assert half["bound"] == "link"
    other = cli("plan", "beir", "nq", "--gpu", "a100-80gb", "--paths", "fp16,fp8", cwd=tmp_path).fine().out
    assert "from the table, not measured" in other
    assert "How long is not known" in other  # no FP8 products there
    assert files(tmp_path) == []


def test_a_local_set_is_planned_before_it_is_encoded(collection: Any, cli: Any, tmp_path: Path) -> None:
    folder = collection(tmp_path / "mine")
    found = json.loads(cli("plan", "local", folder, "--limit-queries", "2", "--json", cwd=tmp_path).fine().out)
    assert found["sizes"]["queries"] == 2
    assert found["sizes"]["exact"] is False
    assert found["sizes"]["source"] == "sample"
    assert found["notes"][0].startswith("ESTIMATE")
    assert not (tmp_path / "embeddings_cache").exists()


def test_what_does_not_fit_ends_with_no(demo: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maxsim_eval.planning import room

    demo.copy(tmp_path, "datasets", "embeddings_cache")
    monkeypatch.setattr(room, "available_memory", lambda: 1000)
    outcome = cli("plan", "demo", cwd=tmp_path)
    assert outcome.code == NO
    assert "NO, it does not fit: not enough memory" in outcome.out
    found = cli("plan", "demo", "--json", cwd=tmp_path)
    assert found.code == NO
    assert json.loads(found.out)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (("bier", "nq"), USAGE, ["unknown source 'bier'", "beir"]),
        (("beir", "scifcat"), USAGE, ["scifact"]),
        (("beir", "cqadupstack"), USAGE, ["cqadupstack/android"]),
        (("demo", "--paths", "fp7"), USAGE, ["unknown path 'fp7'"]),
        (("demo", "--paths", ","), USAGE, ["--paths: got none"]),
        (("demo", "--k", "0"), USAGE, ["--k: got 0"]),
        (("demo", "--processes", "0"), USAGE, ["--processes: got 0"]),
        (("demo", "--limit-documents", "0"), USAGE, ["--limit-documents: got 0"]),
        (("demo", "--memory-budget", "much"), USAGE, ["'much'", "8GB"]),
        (("demo", "--device", "tpu"), USAGE, ["device 'tpu'"]),
        (("demo", "--gpu", "h2000"), USAGE, ["unknown --gpu 'h2000'", "h200"]),
        (("demo", "--gpu", "h200", "--disk", "3 apples"), USAGE, ["--disk: got '3 apples'", "3GB/s"]),
        (("demo", "--gpu", "h200", "--link", "0"), USAGE, ["--link: got '0'", "3GB/s"]),
        (("demo", "--gpu", "h200", "--ram", "1GB/s"), USAGE, ["--ram: got '1GB/s'", "8GB"]),
        (("demo", "--gpu", "h200", "--gpus", "0"), USAGE, ["--gpus: got 0, need 1"]),
        (("demo", "--gpu", "h200", "--processes", "2"), USAGE, ["--processes: got 2 with --gpu", "--gpus"]),
        (("demo", "--disk", "3GB/s"), USAGE, ["--disk: got '3GB/s' without --gpu"]),
        (("demo", "--encoder", "lexicl"), USAGE, ["unknown encoder 'lexicl'"]),
        (("local", "nowhere"), DATA, ["nowhere", "no such folder"]),
    ],
)
def test_refusals(arguments: tuple[str, ...], code: int, texts: list[str], cli: Any, tmp_path: Path) -> None:
    cli("plan", *arguments, cwd=tmp_path).refused(code, *texts)
    assert files(tmp_path) == []


def test_a_damaged_cache_is_refused(demo: Any, cli: Any, tmp_path: Path) -> None:
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    (manifest,) = (tmp_path / "embeddings_cache").rglob("lexical-documents-*/manifest.json")
    manifest.write_text("{}", encoding="utf-8")
    cli("plan", "demo", cwd=tmp_path).refused(DATA, "manifest.json")


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("1.5 gib", 3 << 29), ("500MB", 5 * 10**8), ("2k", 2000), ("1000000", 10**6), ("7B", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "8 PB", "8GBB", "1e9", "IB", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="need a size"):
        bytes_of(text)


def test_numbers_for_people() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 KB", 116 * 10**9: "116 GB", 26_214_400_000_000: "26.2 TB", None: "unknown"}
    assert {count: size_text(count) for count in sizes} == sizes
    times = {0: "0 s", 0.0021: "2.1 ms", 2.5: "2.5 s", 250: "250 s", 480: "8.0 min", 9000: "2.5 h", None: "unknown"}
    assert {seconds: time_text(seconds) for seconds in times} == times


@pytest.mark.parametrize(
    ("seconds", "more", "text"),
    [
        (0.12345, 0, "0.12 s"),
        (42.3, 0, "42 s"),
        (119, 0, "119 s"),
        (130, 0, "2.2 min"),
        (3000, 0, "50 min"),
        (9000, 0, "2.5 h"),
        (1e6, 0, "12 days"),
        (0, 0, "0 s"),
        (None, 0, "unknown"),
        (40, 4, "40 s"),
        (40, 20, "27 to 60 s"),
        (100, 100, "0.83 to 3.3 min"),
        (0.001, 0.001, "0.0005 to 0.002 s"),
    ],
)
def test_estimates_for_people(seconds: float | None, more: float, text: str) -> None:
    assert about_text(seconds, more) == text
