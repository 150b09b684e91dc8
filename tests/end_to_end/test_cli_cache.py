"""The cache's commands: encode fills it, inspect shows it, convert writes copies, cache ls, rm and gc keep it tidy."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import filelock
import pytest

from maxsim_eval.cache import housekeeping
from maxsim_eval.cache.entries import open_entry, write_manifest
from maxsim_eval.cli import app as command_line
from maxsim_eval.cli.cache import cache, convert, encode, inspect
from maxsim_eval.encoders.lexical import LexicalEncoder
from maxsim_eval.encoders.names import OPTIONS
from maxsim_eval.errors import CacheError
from maxsim_eval.files import host

Cli = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def commands() -> Iterator[None]:
    """The command line with these commands, where it does not have them yet."""
    app = command_line.app
    known = [command.callback for command in app.registered_commands]
    added = [command for command in (encode, inspect, convert) if command not in known]
    groups = [group.typer_instance for group in app.registered_groups]
    for command in added:
        app.command()(command)
    if cache not in groups:
        app.add_typer(cache)
    yield
    app.registered_commands = [command for command in app.registered_commands if command.callback not in added]
    app.registered_groups = [group for group in app.registered_groups if group.typer_instance in groups]


@pytest.fixture
def home(demo: Any, tmp_path: Path) -> Path:
    """A folder with the demo's dataset and embeddings."""
    return demo.copy(tmp_path, "datasets", "embeddings_cache")


def entry_of(home: Path, role: str = "documents") -> Path:
    return next((home / "embeddings_cache" / "demo" / "small").glob(f"lexical-{role}-*"))


def files(folder: Path) -> dict[str, int]:
    """Path -> inode of all that is kept."""
    return {
        str(path.relative_to(folder)): path.stat().st_ino
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


# encode ---------------------------------------------------------------------------------------------------------------


def test_encode_makes_what_an_evaluation_reads(cli: Cli, demo: Any, tmp_path: Path) -> None:
    said = cli("encode", "demo", "small", "--encoder", "lexical", "--quiet", cwd=tmp_path).fine()
    assert said.err == ""
    documents, queries, _ = said.out.splitlines()
    assert documents.startswith(
        "documents: 300 rows, 15,665 tokens, d = 128, float32; new shards: 1 of 1: embeddings_cache/demo"
    )
    assert queries.startswith("queries: 40 rows, 242 tokens, d = 128, float32; new shards: 1 of 1: ")
    made = files(tmp_path / "embeddings_cache")
    assert list(made) == list(files(demo.folder / "embeddings_cache"))  # the keys of an evaluation
    cli("demo", "--paths", "fp32", "--quiet", cwd=tmp_path).fine()
    again = cli("encode", "demo", "small", "--encoder", "lexical", "--json", "--quiet", cwd=tmp_path).fine()
    assert files(tmp_path / "embeddings_cache") == made
    entries = json.loads(again.out)["entries"]
    assert [(entry["role"], entry["new_shards"], entry["shards"]) for entry in entries] == [
        ("documents", 0, 1),
        ("queries", 0, 1),
    ]


def test_interrupted_encode_goes_on(
    cli: Cli, collection: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = collection(
        tmp_path / "set", corpus={f"d{n}": f"word{n % 7} and fox {n}" for n in range(1200)}, qrels=[("q1", "d1", 1)]
    )
    command = ("encode", "local", folder, "--encoder", "lexical", "--quiet")
    real, seen = LexicalEncoder.encode, []

    def stopping(self: LexicalEncoder, items: Any, role: Any) -> Any:
        seen.append(len(items))
        if sum(seen) > 700:
            raise KeyboardInterrupt
        return real(self, items, role)

    monkeypatch.setattr(LexicalEncoder, "encode", stopping)
    stopped = cli(*command, cwd=tmp_path)
    assert stopped.code == 130
    assert "the same command continues" in stopped.err
    finished = files(tmp_path / "embeddings_cache")
    assert [Path(name).name for name in finished] == ["00000.h5", "manifest.json"]
    counted: list[tuple[str, int]] = []

    def noted(self: LexicalEncoder, items: Any, role: Any) -> Any:
        counted.append((role, len(items)))
        return real(self, items, role)

    monkeypatch.setattr(LexicalEncoder, "encode", noted)
    said = cli(*command, cwd=tmp_path).fine().out
    # What the finished shard holds is not again.
    assert sum(count for role, count in counted if role == "document") == 1200 - 512
    assert "documents: 1,200 rows" in said
    assert "; new shards: 2 of 3: " in said
    assert finished.items() <= files(tmp_path / "embeddings_cache").items()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("demo", "small", "--encoder", "lexical", "--batch-size", "0"), 2, "--batch-size: got 0"),
        (("demo", "small", "--encoder", "lexical", "--device", "tpu"), 2, "device 'tpu'"),
        (("demo", "small", "--encoder", "lexicl"), 2, "'lexical'"),
        (("demo", "small", "--encoder", "lexical", "--dtype", "float16"), 2, "'dtype' means nothing to it"),
        (("demos", "small", "--encoder", "lexical"), 2, "'demo'"),
        (("local", "nowhere", "--encoder", "lexical"), 3, "nowhere"),
    ],
)
def test_encode_refuses(cli: Cli, clean: Callable[[Path], None], tmp_path: Path, words: tuple, code: int, text: str) -> None:
    cli("encode", *words, "--quiet", cwd=tmp_path).refused(code, text)
    clean(tmp_path)
    assert not (tmp_path / "embeddings_cache").exists()


# convert and inspect --------------------------------------------------------------------------------------------------


def test_inspect_lists_the_length_of_every_document(cli: Cli, home: Path) -> None:
    """Patches a page, by its id."""
    entry = open_entry(entry_of(home))
    out = cli("inspect", "demo", "small", "--role", "document", "--lengths", "--quiet", cwd=home).fine().out
    assert out.splitlines() == [f"{name}\t{count}" for name, count in zip(entry.ids(), entry.lengths(), strict=True)]
    assert len(set(entry.lengths().tolist())) > 5
    cli("inspect", "demo", "small", "--lengths", "--json", cwd=home).refused(2, "--lengths", "need it alone")


def test_convert_and_inspect(cli: Cli, home: Path) -> None:
    words = ("convert", "demo", "small", "--to", "int8-token, int8-corpus", "--quiet")
    token, corpus, folder = cli(*words, cwd=home).fine().out.splitlines()
    assert token.startswith(
        "int8-token: 15,665 tokens, 2.04 MB beside 8.02 MB of float32: 3.94x smaller (shards: 1 written, 0 stale"
    )
    assert corpus.startswith("int8-corpus: 15,665 tokens, 2.01 MB")
    assert home / folder == entry_of(home)
    before = files(home)
    assert "(shards: 0 written, 0 stale replaced, 1 kept)" in cli(*words, cwd=home).fine().out
    assert files(home) == before
    found = json.loads(cli("inspect", folder, "--verify", "--json", "--quiet", cwd=home).fine().out)
    assert (found["documents"], found["tokens"], found["dim"], found["verified"]) == (300, 15665, 128, True)
    assert [copy["kind"] for copy in found["copies"]] == ["int8-token", "int8-corpus"]
    assert found["provenance"]["encoder"] == "lexical"
    both = json.loads(cli("inspect", "demo", "small", "--json", "--quiet", cwd=home).fine().out)
    assert [one["provenance"]["role"] for one in both] == ["document", "query"]
    text = cli("inspect", "demo", "small", "--role", "document", "--encoder", "lexical", "--quiet", cwd=home).fine().out
    assert "15,665 of 128 x float32" in text
    assert "int8-token" in text


def test_convert_json(cli: Cli, home: Path) -> None:
    words = ("convert", entry_of(home), "--to", "fp8-document", "--json", "--quiet")
    (copy,) = json.loads(cli(*words, cwd=home).fine().out)["copies"]
    entry = open_entry(entry_of(home))
    assert (copy["kind"], copy["written"], copy["bytes"]) == ("fp8-document", 1, entry.tokens * 128 + entry.documents * 2)


def test_damage_is_said(cli: Cli, home: Path) -> None:
    cli("convert", "demo", "small", "--to", "int8-token", "--quiet", cwd=home).fine()
    copy = entry_of(home) / "00000.int8-token.h5"
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    cli("inspect", "demo", "small", "--quiet", cwd=home).fine()
    cli("inspect", "demo", "small", "--verify", "--quiet", cwd=home).refused(3, copy.name, "CRC-32")
    copy.write_bytes(content[:3000])
    cli("convert", "demo", "small", "--to", "int8-token", "--quiet", cwd=home).refused(3, copy.name)
    assert copy.read_bytes() == content[:3000]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("convert", "demo", "small", "--to", "int9"), 2, "unknown quantised copy 'int9'"),
        (("convert", "demo", "small", "--to", ","), 2, "--to: got none"),
        (("convert", "embeddings_cache", "--to", "int8-token"), 2, "name the folder of one"),
        (("convert", "demo", "large", "--to", "int8-token"), 3, "It holds demo small"),
        (
            ("convert", "demo", "small", "--role", "query", "--to", "int8-token"),
            2,
            "holds queries, which no path reads from a copy",
        ),
        (("convert", "demo", "small", "--encoder", "gve", "--to", "int8-token"), 3, "There are lexical (document)"),
        (("inspect", "nowhere"), 3, "no such folder"),
        (("inspect", "datasets"), 3, "no cache entry"),
        (("inspect", "a", "b", "c"), 2, "got 3 arguments"),
        (("inspect", "demo", "small", "--role", "both"), 2, "--role"),
    ],
)
def test_convert_and_inspect_refuse(cli: Cli, home: Path, words: tuple, code: int, text: str) -> None:
    before = files(home)
    cli(*words, "--quiet", cwd=home).refused(code, text)
    assert files(home) == before


# cache ----------------------------------------------------------------------------------------------------------------


def test_convert_takes_the_path_that_reads_the_copy(home: Path, cli: Any) -> None:
    said = json.loads(cli("convert", "demo", "small", "--to", "int8,fp8,int8-token", "--json", "--quiet", cwd=home).fine().out)
    assert [copy["kind"] for copy in said["copies"]] == ["int8-token", "fp8-document"]


@pytest.mark.parametrize("typed", ["hf:{}/my-encoder", "hf:my-encoder", "hf:./my-encoder/", "multi-vector:my-encoder"])
def test_entries_are_removed_by_the_encoder_s_name_as_typed(typed: str, home: Path, cli: Any) -> None:
    (home / "my-encoder").mkdir()
    folder = entry_of(home, "documents")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["provenance"]["encoder"] = "hf:my-encoder"
    write_manifest(folder, manifest)
    outcome = cli("cache", "rm", "demo", "small", "--encoder", typed.format(home), "--yes", cwd=home)
    assert outcome.code == (3 if typed.startswith("multi") else 0), outcome.err
    assert folder.exists() == typed.startswith("multi")


def test_ls(cli: Cli, home: Path) -> None:
    cli("convert", "demo", "small", "--to", "int8-token", "--quiet", cwd=home).fine()
    (entry_of(home, "queries") / "00000.h5").unlink()
    broken = home / "embeddings_cache" / "local" / "x" / "y-documents-0"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("{}")
    text = cli("cache", "ls", cwd=home).fine().out
    assert "3 entries, " in text
    assert "1 of 1 shards missing" in text
    rows = json.loads(cli("cache", "ls", "--json", cwd=home).fine().out)["entries"]
    documents, queries, damaged = sorted(rows, key=lambda row: (row["source"], row["role"]))
    assert Path(documents["folder"]).name == entry_of(home).name
    assert documents["file_bytes"] == sum(path.stat().st_size for path in entry_of(home).iterdir())
    wanted = {"source": "demo", "dataset": "small", "encoder": "lexical", "role": "document", "documents": 300, "tokens": 15665}
    assert wanted.items() <= documents.items()
    assert (documents["copies"], documents["state"], documents["missing"]) == (["int8-token"], "complete", 0)
    assert 0 <= documents["age_seconds"] < 3600
    assert (queries["tokens"], queries["missing"]) == (None, 1)
    assert "manifest.json: not a manifest" in damaged["problem"]


def test_ls_of_nothing(cli: Cli, tmp_path: Path) -> None:
    assert cli("cache", "ls", cwd=tmp_path).fine().out == "0 entries, 0.00 MB in embeddings_cache\n"


def test_rm_asks_and_removes(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(home)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert cli("cache", "rm", "demo", "small", cwd=home).fine().out == "nothing was removed\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    nobody = cli("cache", "rm", "demo", "small", cwd=home)
    assert nobody.code == 2
    assert "need --yes" in nobody.err
    assert files(home) == before
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "1 entries removed" in cli("cache", "rm", "demo", "small", "--role", "query", cwd=home).fine().out
    assert [path.name for path in (home / "embeddings_cache" / "demo" / "small").iterdir()] == [entry_of(home).name]
    cli("cache", "rm", entry_of(home), "--yes", cwd=home).fine()
    assert list((home / "embeddings_cache" / "demo" / "small").iterdir()) == []
    assert files(home / "datasets")


def test_rm_leaves_everything_else_alone(cli: Cli, home: Path, tmp_path: Path) -> None:
    cache_dir = home / "embeddings_cache"
    outside = tmp_path / "elsewhere" / "demo" / "small"
    shutil.copytree(entry_of(home), outside / "lexical-documents-1")
    linked = cache_dir / "demo" / "small" / "linked-documents-1"
    linked.symlink_to(outside / "lexical-documents-1", target_is_directory=True)
    other = cache_dir / "a" / "b" / "c"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text('{"format": "somebody else"}')
    (cache_dir / "a" / "b" / "bare").mkdir()
    before = files(home)
    for folder, text in (
        (outside / "lexical-documents-1", "not an entry of embeddings_cache"),
        (linked, "is a link, and what it points to is not removed"),
        (other, "not a manifest of the embedding cache"),
        (cache_dir / "a" / "b" / "bare", "no cache entry"),
        (home / "datasets", "no cache entry"),
    ):
        refused = cli("cache", "rm", folder, "--yes", cwd=home)
        assert (refused.code, text in refused.err) == (3, True), refused.err
    assert files(home) == before
    with filelock.FileLock(entry_of(home, "queries") / ".lock"):
        refused = cli("cache", "rm", entry_of(home, "queries"), "--yes", cwd=home)
        assert (refused.code, "another process is writing" in refused.err) == (3, True)
    assert files(home) == before


def test_gc(cli: Cli, home: Path) -> None:
    clean = ("cache", "gc", "--json")
    assert json.loads(cli(*clean, cwd=home).fine().out)["garbage"] == []
    entry, queries = entry_of(home), entry_of(home, "queries")
    leftover = entry / ".00000.h5.99999.tmp"
    leftover.write_bytes(b"half")
    (entry / ".somebodys.tmp").mkdir()  # no writer of ours makes folders in an entry: it is left alone
    (queries / "00000.h5").unlink()
    done = subprocess.run([sys.executable, "-S", "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = entry.parent / f".gone-documents-1.{host()}-{int(done.stdout)}.old"
    alive = entry.parent / f".going-documents-1.{host()}-{os.getpid()}.old"
    load = home / "datasets" / "beir" / f".nq.{host()}-{int(done.stdout)}.download"
    for folder in (dead, alive, load):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    before = files(home)
    found = json.loads(cli(*clean, cwd=home).fine().out)
    assert {Path(row["path"]).name for row in found["garbage"]} == {leftover.name, dead.name, load.name}
    assert (found["removed"], found["freed_bytes"]) == (False, 0)
    assert "3 to remove" in cli("cache", "gc", cwd=home).fine().out
    assert files(home) == before
    with filelock.FileLock(entry / ".lock"):
        locked = cli("cache", "gc", "--yes", cwd=home).fine()
    assert f"{entry.name}: another process is writing it" in locked.err
    assert leftover.exists()
    assert not dead.exists()
    assert not load.exists()
    partial = json.loads(cli(*clean, "--partial", "--yes", cwd=home).fine().out)
    assert {Path(row["path"]).name for row in partial["garbage"]} == {leftover.name, queries.name}
    assert not leftover.exists()
    assert not queries.exists()
    assert alive.exists()
    assert (entry / "00000.h5").exists()


def test_gc_says_which_locks_cannot_be_opened(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "_acquire", refused)
    found = cli("cache", "gc", cwd=home).fine()
    assert f"{entry_of(home).name}: Read-only file system" in found.err


def test_a_folder_here_does_not_hide_entries_of_its_name(cli: Cli, home: Path) -> None:
    (home / "demo").mkdir()
    assert "300" in cli("inspect", "demo", "--role", "document", cwd=home).fine().out


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_a_cache_folder_that_is_none(cli: Cli, home: Path, command: str) -> None:
    (home / "file").write_text("")
    cli("cache", command, "--cache-dir", "file", cwd=home).refused(3, "file: is no folder")


@pytest.mark.parametrize("seen", ["list", "stat"])
def test_what_goes_while_it_is_looked_at(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    """A writer's temporary file, and an entry that another process removes, seen and gone when they are looked at."""
    entry, queries = entry_of(home), entry_of(home, "queries")
    monkeypatch.setattr(housekeeping, "entry_folders", lambda cache_dir: sorted([entry, queries]))
    documents = sum(path.stat().st_size for path in entry.iterdir())
    listdir, walk = os.listdir, os.walk

    def names(folder: Any = ".") -> list[str]:
        if Path(folder) == queries and queries.exists():
            found = listdir(folder) if seen == "stat" else []
            shutil.rmtree(queries)
            return found or listdir(folder)
        return [*listdir(folder), ".00000.h5.99999.tmp"]

    monkeypatch.setattr(os, "listdir", names)
    (row,) = json.loads(cli("cache", "ls", "--json", cwd=home).fine().out)["entries"]
    assert (row["role"], row["tokens"], row["file_bytes"], row["state"]) == ("document", 15665, documents, "complete")
    found = json.loads(cli("cache", "gc", "--partial", "--yes", "--json", cwd=home).fine().out)
    assert (found["garbage"], found["freed_bytes"]) == ([], 0)
    assert not queries.exists()

    def walked(top: Any) -> Iterator[Any]:
        for folder, below, files_ in walk(top):
            yield folder, below, [*files_, ".00000.h5.99999.tmp"]

    monkeypatch.setattr(os, "walk", walked)
    cli("cache", "rm", entry, "--yes", cwd=home).fine()
    assert not entry.exists()


def test_entries_of_ir_datasets_are_found_by_the_id_of_the_evaluation(home: Path) -> None:
    folder = entry_of(home)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["provenance"] |= {"source": "irds", "dataset": "beir/toy"}
    write_manifest(folder, manifest)
    cache_dir = home / "embeddings_cache"
    for dataset in ("beir/toy", "beir/toy/test", "beir/toy/dev/judged"):
        assert housekeeping.chosen(cache_dir, ["irds", dataset], what="inspect") == [folder]
    for dataset in ("beir/toys", "beir", "toy"):
        with pytest.raises(CacheError, match="holds no embeddings of irds"):
            housekeeping.chosen(cache_dir, ["irds", dataset], what="inspect")


def test_garbage_that_is_gone_when_it_is_to_be_removed(home: Path) -> None:
    cache_dir, queries = home / "embeddings_cache", entry_of(home, "queries")
    (queries / ".00000.h5.99999.tmp").write_bytes(b"half")
    (entry_of(home) / "00000.h5").unlink()
    old = queries.parent / f".gone-documents-1.{host()}-999999999.old"
    old.mkdir()
    found, problems = housekeeping.find_garbage(cache_dir, partial=True)
    assert (len(found), problems) == (3, [])
    shutil.rmtree(queries.parent)  # all of it by somebody else
    assert housekeeping.collect(cache_dir, found) == 0
    assert not queries.parent.exists()


def test_encode_has_every_option_of_an_encoder() -> None:
    named = set(signature(encode).parameters)
    assert set(OPTIONS) <= named, set(OPTIONS) - named


def test_every_command_has_an_example() -> None:
    for command in (encode, inspect, convert, *(one.callback for one in cache.registered_commands)):
        assert "Example: python evaluate.py" in (command.__doc__ or ""), command
