"""No work that nobody asked for: embeddings with other options are named before new ones are made, and no network is soon noticed."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.encoders import checkpoints

DATA = 3


@pytest.fixture
def home(demo: Any, tmp_path: Path) -> Path:
    """A folder with the demo's dataset and embeddings."""
    return Path(demo.copy(tmp_path, "datasets", "embeddings_cache"))


def test_embeddings_with_other_options_are_named_before_new_ones_are_made(home: Path, cli: Any) -> None:
    said = cli("demo", "--max-document-tokens", "20", "--paths", "fp32", "--quiet", cwd=home).fine()
    lines = [line for line in said.err.splitlines() if "encoded anew" in line]
    (line,) = (line for line in lines if "documents are" in line)
    assert line.startswith(
        "warning: demo small: 300 documents are encoded anew, though embeddings_cache/demo/small/lexical-documents-"
    )
    assert "MB) holds them by lexical with other options: " in line
    assert "max_tokens 256 there, 20 here" in line
    assert cli("demo", "--max-document-tokens", "20", "--paths", "fp32", "--quiet", cwd=home).fine().err == ""


def test_a_first_encoding_is_no_surprise(demo: Any, cli: Any, tmp_path: Path) -> None:
    home = demo.copy(tmp_path, "datasets")
    assert cli("demo", "--quiet", "--paths", "fp32", cwd=home).fine().err == ""


def test_a_part_of_the_documents_can_be_encoded(demo: Any, cli: Any, tmp_path: Path) -> None:
    home = demo.copy(tmp_path, "datasets")
    limits = ("--limit-queries", "5", "--limit-documents", "60")
    words = ("encode", "demo", "small", "--encoder", "lexical", *limits, "--json", "--quiet")
    documents, queries = json.loads(cli(*words, cwd=home).fine().out)["entries"]
    assert (documents["rows"], documents["new_shards"], queries["rows"]) == (60, documents["shards"], 40)
    before = {path: path.stat().st_mtime_ns for path in (home / "embeddings_cache").rglob("*.h5")}
    cli("demo", *limits, "--quiet", cwd=home).fine()
    assert {path: path.stat().st_mtime_ns for path in (home / "embeddings_cache").rglob("*.h5")} == before
    cli("encode", "demo", "small", "--encoder", "lexical", "--limit-documents", "0", cwd=home).refused(
        2, "--limit-documents: got 0"
    )
    cli("encode", "demo", "small", "--encoder", "lexical", "--quiet", cwd=home).fine()
    again = json.loads(cli(*words, cwd=home).fine().out)["entries"][0]
    assert (again["rows"], again["new_shards"]) == (300, 0), "the whole corpus is there, and they are rows of it"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up for ever, and nothing answers."""

    def never(*_: object, **__: object) -> None:
        time.sleep(20)
        raise OSError("no network")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.2)
    checkpoints.hub_answers.cache_clear()
    yield
    checkpoints.hub_answers.cache_clear()


@pytest.mark.usefixtures("no_network")
def test_without_a_network_one_message_says_what_is_there(home: Path, cli: Any) -> None:
    pytest.importorskip("sentence_transformers")
    cli("demo", "--quiet", "--paths", "fp32", "--encoder", "hf:none/such", cwd=home)  # what is imported once
    checkpoints.hub_answers.cache_clear()
    began = time.monotonic()
    outcome = cli("demo", "--encoder", "colbertv2", cwd=home)
    assert time.monotonic() - began < 3
    assert (outcome.code, outcome.out) == (DATA, "")
    first, head, *ways = outcome.err.splitlines()
    assert first.startswith("error: encoder colbertv2: its configuration could not be loaded: ")
    assert first.endswith("huggingface.co cannot be reached, and colbert-ir/colbertv2.0 was not downloaded before.")
    assert head == "What can be done, the likeliest first:"
    assert ways[0] == "  --encoder lexical, which needs no weights"
    assert ways[-1] == "  embeddings of demo small that are cached: by lexical"
    assert max(map(len, ways)) < 100


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        checkpoints.hub_answers.cache_clear()
        assert checkpoints.hub_answers()
    checkpoints.hub_answers.cache_clear()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert checkpoints.hub_answers(), "what lies behind a proxy is the client's business"
    checkpoints.hub_answers.cache_clear()
