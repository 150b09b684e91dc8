"""Files and streams that somebody broke on purpose: one line and exit 2 or 3, never Python's own 1, nothing a terminal or CI obeys."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from places import ROOT

USAGE, DATA, UNFORESEEN = 2, 3, 4
LEXICAL = ("--encoder", "lexical", "--paths", "fp32,int8", "--k", "3", "--quiet")
COMMAND = "x\n::error::all is lost\x1b[2J"
SAFE = r"x\n:\x3aerror:\x3aall is lost\x1b[2J"
DIGITS = "9" * 5000
BRACKETS = "[" * 100_000


def rewritten(source: Path, target: Path, change: Callable[[str], str]) -> Path:
    target.write_text(change(source.read_text(encoding="utf-8")), encoding="utf-8")
    return target


@pytest.fixture
def result(demo: Any, tmp_path: Path) -> Callable[[Callable[[str], str]], Path]:
    """`result(change)`: the demo's result.json, its text changed."""
    return lambda change: rewritten(demo.results / "result.json", tmp_path / "changed.json", change)


def obeyed(text: str) -> list[str]:
    """Lines that GitHub's runner takes for commands, and lines with sequences for a terminal."""
    return [line for line in text.splitlines() if line.lstrip().startswith("::") or "\x1b" in line or "\r" in line]


# Names ----------------------------------------------------------------------------------------------------------------


def test_the_gate_prints_names_that_nothing_obeys(result: Any, cli: Any, tmp_path: Path) -> None:
    file = result(lambda text: text.replace('"int8"', json.dumps(COMMAND)))
    baseline = tmp_path / "baseline.json"
    cli("gate", file, "--baseline", baseline, "--update-baseline", "--accept", cwd=tmp_path).fine()
    summary = tmp_path / "summary.md"
    outcome = cli("gate", file, "--baseline", baseline, "--verbose", "--summary", summary, cwd=tmp_path)
    assert SAFE in outcome.out
    assert obeyed(outcome.out + outcome.err) == []
    assert obeyed(summary.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("command", ["report", "gate"])
def test_json_for_a_pipe_holds_the_same_names(command: str, result: Any, cli: Any, tmp_path: Path) -> None:
    file = result(lambda text: text.replace('"int8"', json.dumps(COMMAND)))
    more = ("--baseline", tmp_path / "baseline.json") if command == "gate" else ()
    if more:
        cli(command, file, *more, "--update-baseline", "--accept", cwd=tmp_path).fine()
    outcome = cli(command, file, *more, "--json", cwd=tmp_path)
    assert obeyed(outcome.out) == []
    assert COMMAND in names_in(json.loads(outcome.out))


def names_in(value: Any) -> str:
    """Every text of a JSON value, one after the other."""
    if isinstance(value, dict):
        return "".join(key + names_in(entry) for key, entry in value.items())
    return "".join(map(names_in, value)) if isinstance(value, list) else str(value)


def test_inspect_prints_names_that_nothing_obeys(demo: Any, cli: Any, tmp_path: Path) -> None:
    home = demo.copy(tmp_path, "embeddings_cache")
    (entry,) = (path.parent for path in (home / "embeddings_cache").rglob("manifest.json") if "documents" in str(path))
    odd = entry.with_name("documents\x1b[2J")
    entry.rename(odd)
    assert obeyed((outcome := cli("inspect", odd, "--lengths", cwd=tmp_path)).out + outcome.err) == []


def test_a_name_as_long_as_a_file_does_not_fill_the_screen(demo: Any, cli: Any, tmp_path: Path) -> None:
    run = tmp_path / "long.trec"
    run.write_text(f"q1 Q0 d1 1 1.0 maxsim-eval/a\nq1 Q0 d2 2 0.5 {'x' * 50_000}\n")
    outcome = cli("metrics", "--qrels", demo.folder / "datasets/demo/small/qrels/test.tsv", run, cwd=tmp_path)
    outcome.refused(DATA, "long.trec:2: tag 'xxx", "characters) ...", "need one run a file")
    assert len(outcome.err) < 4100


# Values that are none -------------------------------------------------------------------------------------------------

ODD_JSON = {
    "digits": lambda text: text.replace('"queries": 40', f'"queries": {DIGITS}'),
    "brackets": lambda text: text.replace('"queries": 40', f'"queries": {BRACKETS}{"]" * 100_000}'),
    "brackets, open": lambda _: BRACKETS,
    "infinity": lambda text: text.replace('"queries": 40', '"queries": 1e999'),
    "not utf-8": lambda text: text[:100] + "\udcff",
}


@pytest.mark.parametrize("damage", ODD_JSON)
@pytest.mark.parametrize("command", ["report", "gate", "baseline"])
def test_json_that_python_gives_up_on(damage: str, command: str, demo: Any, cli: Any, tmp_path: Path) -> None:
    good, bad = demo.results / "result.json", tmp_path / "changed.json"
    bad.write_text(ODD_JSON[damage](good.read_text(encoding="utf-8")), encoding="utf-8", errors="surrogateescape")
    words = {
        "report": ("report", bad),
        "gate": ("gate", bad, "--baseline", good),
        "baseline": ("gate", good, "--baseline", bad),
    }
    cli(*words[command], cwd=tmp_path).refused(DATA, "changed.json")


def test_numbers_and_letters_at_the_edge_are_reported(result: Any, cli: Any, tmp_path: Path) -> None:
    def change(text: str) -> str:
        value = json.loads(text)
        path = value["paths"]["int8"]
        path["metrics"] = {f"Mine {name}": 1e308 for name in path["metrics"]}  # of a measure that is no share
        path["per_query"] = {f"Mine {name}": dict.fromkeys(values, 1e308) for name, values in path["per_query"].items()}
        value["task"]["dataset"] = "half \ud800"
        return json.dumps(value)

    cli("report", result(change), "--out", tmp_path / "out", cwd=tmp_path).fine()
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_toml_that_python_gives_up_on(demo: Any, cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "bounds.toml"
    for text in (f"a = {DIGITS}", f"a = {BRACKETS}", "a = 0x" + "f" * 5000):
        file.write_text(text)
        words = ("gate", demo.results / "result.json", "--thresholds", file)
        cli(*words, "--baseline", tmp_path / "none.json", cwd=tmp_path).refused(USAGE, "bounds.toml")


@pytest.mark.parametrize(
    "line", [f'{{"_id": {DIGITS}}}', f'{{"_id": "d", "text": {BRACKETS}', f'{{"_id": "d", "text": {DIGITS}}}']
)
def test_jsonl_that_python_gives_up_on(line: str, collection: Any, cli: Any, tmp_path: Path) -> None:
    folder = collection(tmp_path / "datasets" / "local" / "mine")
    with open(folder / "corpus.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    cli("local", "mine", *LEXICAL, cwd=tmp_path).refused(DATA, "corpus.jsonl:7")


@pytest.mark.parametrize("size", ["9" * 400 + "GB", "1e9GB", "0.0000001"])
def test_budgets_that_are_no_size(size: str, cli: Any, tmp_path: Path) -> None:
    outcome = cli("demo", "--memory-budget", size, cwd=tmp_path)
    outcome.refused(USAGE, "need a size as 8GB, 500MB or 2GiB")
    assert len(outcome.err) < 300


# Files whose checksums fit and whose contents do not ------------------------------------------------------------------


def documents_of(home: Path) -> Path:
    (entry,) = {path.parent for path in (home / "embeddings_cache").rglob("*.h5") if "documents" in path.parent.name}
    return entry


def evaluated(home: Path, cli: Any) -> Any:
    return cli("demo", "--quiet", "--fresh", cwd=home)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("documents", "many"), ("boundaries", [0, "x"]), ("boundaries", 5), ("boundaries", [0, 3, 2]), ("dim", 0), ("dim", [1]),
        ("dtype", "float64"), ("dtype", {}), ("provenance", []), ("documents_per_shard", None), ("ids", 5), ("boundaries", []),
    ],
)  # fmt: skip
def test_a_manifest_whose_checksum_fits(name: str, value: object, demo: Any, cli: Any, tmp_path: Path) -> None:
    from maxsim_eval.hashing import digest

    home = demo.copy(tmp_path / "home", "datasets", "embeddings_cache")
    file = documents_of(home.parent / "home") / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    manifest[name] = value
    file.write_text(json.dumps({**manifest, "checksum": digest(manifest)}))
    evaluated(tmp_path / "home", cli).refused(DATA, "manifest.json", name, "need")


@pytest.mark.parametrize("name", ["values", "offsets", "ids", "running_crc32"])
def test_a_group_where_a_dataset_must_be(name: str, demo: Any, cli: Any, tmp_path: Path) -> None:
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    shard = min(documents_of(tmp_path).glob("*.h5"))
    with h5py.File(shard, "r+") as file:
        assert name in file, sorted(file)
        del file[name]
        file.create_group(name)
    evaluated(tmp_path, cli).refused(DATA, shard.name)


# Archives -------------------------------------------------------------------------------------------------------------


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def members(path: Path, change: Callable[[zipfile.ZipInfo, bytes], tuple[zipfile.ZipInfo, bytes]]) -> None:
    with zipfile.ZipFile(path) as archive:
        held = [change(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in held:
            archive.writestr(info, data)


def patched(path: Path, at: int, value: int) -> None:
    """A field of every local and central header set."""
    data = bytearray(path.read_bytes())
    for sign, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        place = data.find(sign)
        while place >= 0:
            data[place + at + shift : place + at + shift + 2] = value.to_bytes(2, "little")
            place = data.find(sign, place + 1)
    path.write_bytes(bytes(data))


def imported(path: Path, cli: Any, folder: Path) -> Any:
    return cli("import", "local", "mine", path, "--encoder", "mine", "--quiet", cwd=folder)


@pytest.mark.parametrize("field", [(6, 1), (8, 77), (4, 9999)], ids=["encrypted", "unknown method", "unknown version"])
@pytest.mark.parametrize("suffix", ["npz", "pt"])
def test_zip_members_that_cannot_be_read(
    field: tuple[int, int], suffix: str, cli: Any, tmp_path: Path, torch_file: Any
) -> None:
    import torch

    file = tmp_path / f"e.{suffix}"
    if suffix == "npz":
        npz(file, query_embeddings=np.ones((2, 3, 4), np.float32), query_lengths=np.array([3, 3]))
    else:
        torch_file(file, {"q": torch.ones(3, 4)}, {"d": torch.ones(2, 4)})
    patched(file, *field)
    outcome = imported(file, cli, tmp_path)
    if field[0] != 4 or suffix == "npz":  # torch does not look at the version
        outcome.refused(DATA, file.name)


def test_a_corrupt_member(cli: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = npz(tmp_path / "e.npz", query_embeddings=rng.random((50, 30, 4), np.float32), query_lengths=np.full(50, 30))
    data = bytearray(file.read_bytes())
    data[2000:2600] = bytes(600)
    file.write_bytes(bytes(data))
    imported(file, cli, tmp_path).refused(DATA, "e.npz")


def test_a_small_archive_that_unpacks_to_more_than_there_is(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maxsim_eval.importing import formats

    monkeypatch.setattr(formats, "available_memory", lambda: 1 << 20)
    file = npz(tmp_path / "e.npz", doc_embeddings=np.zeros((400, 30, 128), np.float32), doc_lengths=np.full(400, 30))
    assert file.stat().st_size < 50_000
    imported(file, cli, tmp_path).refused(DATA, "e.npz", "unpacks to 6.15 MB", "doc_embeddings", "are free")


def test_a_header_that_says_more_than_there_is(cli: Any, tmp_path: Path) -> None:
    file = npz(tmp_path / "e.npz", doc_embeddings=np.zeros((4, 3, 4), np.float32), doc_lengths=np.full(4, 3))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"shape": (10**9, 30, 128), "fortran_order": False, "descr": "<f4"})
    members(file, lambda info, data: (info, head.getvalue() + bytes(64)) if "embeddings" in info.filename else (info, data))
    imported(file, cli, tmp_path).refused(DATA, "e.npz", "header says")


# Memory, streams, and what nobody foresaw -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("no 5 GB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 GB")])
@pytest.mark.parametrize("place", ["maxsim_eval.api.evaluate_settings", "maxsim_eval.importing.importing.import_embeddings"])
def test_memory_that_is_not_there(
    error: Exception, place: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(place, fails)
    file = npz(tmp_path / "e.npz", doc_embeddings=np.zeros((4, 3, 4), np.float32), doc_lengths=np.full(4, 3))
    outcome = cli("demo", "--quiet", cwd=tmp_path) if "api" in place else imported(file, cli, tmp_path)
    outcome.refused(DATA, "not enough memory", str(error)[:20])


def test_what_nobody_foresaw(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a\nbug\x1b[2J")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("maxsim_eval.api.evaluate_settings", fails)
    outcome = cli("demo", "--quiet", cwd=tmp_path)
    outcome.refused(UNFORESEEN, "unforeseen: ZeroDivisionError: a", "Please report it")
    (log,) = tmp_path.glob("maxsim-eval-*.log")
    assert str(log) in outcome.err
    assert "in fails" in log.read_text()


class Panic(BaseException):
    """As pyo3's `PanicException`."""


class UnsaidError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(1), GeneratorExit(), Panic("a"), UnsaidError()], ids=repr)
def test_no_exception_of_others_ends_as_an_answer(
    error: BaseException, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("maxsim_eval.api.evaluate_settings", fails)
    cli("demo", "--quiet", cwd=tmp_path).refused(UNFORESEEN, f"unforeseen: {type(error).__name__}", "Please report it")


@pytest.mark.parametrize(
    "words", ["explain demo small --query q07", "report results/demo-small-lexical/result.json --json", "--help"]
)
def test_a_closed_pipe_ends_a_command_without_a_word(words: str, demo: Any) -> None:
    """As `| head` does: by SIGPIPE's exit code."""
    command = f"exec {sys.executable} {ROOT / 'evaluate.py'} {words}"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            ["sh", "-c", command], cwd=demo.folder, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow  # three fresh processes
def test_streams_that_are_closed_or_full_do_not_cost_the_report(demo: Any, tmp_path: Path) -> None:
    demo.copy(tmp_path, "datasets", "embeddings_cache")
    words = f"{sys.executable} {ROOT / 'evaluate.py'} demo --out"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, streams, code in (("closed", "2>&-", 0), ("full", "2>/dev/full", 0), ("answers", ">/dev/full", DATA)):
        command = f"exec {words} {name} {streams}"
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert (tmp_path / name / "result.json").is_file()
        if code:
            assert done.stderr.strip().splitlines()[-1] == "error: standard output: cannot be written (No space left on device)"
