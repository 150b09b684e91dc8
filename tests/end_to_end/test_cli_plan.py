"""`plan`: what it says before, beside what the evaluation says after; how it refuses; that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.cli.plan import SCHEMA
from maxsim_eval.errors import UsageError
from maxsim_eval.planning import rates as measuring
from maxsim_eval.quantities import bytes_of, size_text, time_text

NO, USAGE, DATA = 1, 2, 3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of milliseconds."""
    monkeypatch.setattr(measuring, "_TEMPORARY_BYTES", 16 << 20)
    monkeypatch.setattr(measuring, "_SECONDS", 0.2)
    monkeypatch.setattr(measuring, "_CALL", {"cpu": 0.005})


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
    assert sizes["stored_bytes"] == task["document_tokens"] * 128 * 4 == found["bytes"]["float32"]
    assert found["bytes"]["int8-token"] == task["document_tokens"] * 130
    assert found["fits"] is True
    assert found["kept_rows"] == 40
    assert [path["name"] for path in found["paths"]] == ["fp32", "int8-corpus", "fp16"]
    for path in found["paths"]:
        stages = {stage["name"]: stage for stage in path["stages"]}
        assert stages["score"]["amount"] == 2 * task["query_tokens"] * task["document_tokens"] * 128
        assert stages["score"]["seconds"] == pytest.approx(
            stages["score"]["amount"] / found["rates"]["paths"][path["name"]]["score"]["value"]
        )
        assert ("corpus scale" in stages) == (path["name"] == "int8-corpus")
    known = sum(path["seconds"] for path in found["paths"])
    assert found["total"] == pytest.approx(found["start"] + known + found["compare"])
    assert "nan" not in outcome.out.lower()


def test_people_get_tables_and_a_verdict(demo: Any, cli: Any, tmp_path: Path) -> None:
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    said = " ".join(cli("plan", "demo", cwd=tmp_path).fine().out.split())
    for text in ("Documents in bytes", "Rates measured now", "Seconds (1 process)", "Does it fit?", "bound by", "it fits"):
        assert text in said
    assert "ESTIMATE" not in said
    assert "full scores of 40 queries are kept" in said


def test_an_estimate_says_so_and_nothing_is_made(cli: Any, tmp_path: Path) -> None:
    outcome = cli("plan", "demo", "--quiet", cwd=tmp_path).fine()
    assert "ESTIMATE: demo small is not on this machine" in " ".join(outcome.out.split())
    assert "not known: encoding" in outcome.out
    assert files(tmp_path) == []


def test_a_local_set_is_planned_before_it_is_encoded(collection: Any, cli: Any, tmp_path: Path) -> None:
    folder = collection(tmp_path / "mine")
    found = json.loads(cli("plan", "local", folder, "--limit-queries", "2", "--json", cwd=tmp_path).fine().out)
    assert found["sizes"]["queries"] == 2
    assert found["sizes"]["exact"] is False
    # 3, 3, 0, 3, 3 and 2 words at 0.42 stems a word, each rounded up.
    assert found["sizes"]["document_tokens"] == 2 + 2 + 0 + 2 + 2 + 1
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
