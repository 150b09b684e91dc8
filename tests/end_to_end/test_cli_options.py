"""Options arrive where they act: what the encoder's model is given, which task of a dataset is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from maxsim_eval.errors import DataError

USAGE, DATA = 2, 3


def test_what_the_model_is_given(collection: Callable[..., Path], cli: Any, tmp_path: Path) -> None:
    """Each is part of the entry's key: `encode` finds what an evaluation with the same options has encoded."""
    collection(tmp_path / "datasets" / "local" / "pets")
    words = [*tiny_checkpoints.SPECIAL, "red", "fox", "blue", "whale", "frog", "owl", "old"]
    tiny_checkpoints.bert(tmp_path / "tiny", words, length=20).save_pretrained(tmp_path / "tiny")
    encoder = ("--encoder", f"hf:{tmp_path / 'tiny'}")
    given = ("--query-prompt", "old fox", "--document-prompt", "owl", "--max-query-tokens", "3", "--max-document-tokens", "5")
    cli("local", "pets", *encoder, *given, "--paths", "fp32", "--k", "6", "--quiet", cwd=tmp_path).fine()
    found = {}
    for manifest in (tmp_path / "embeddings_cache").rglob("manifest.json"):
        provenance = json.loads(manifest.read_text(encoding="utf-8"))["provenance"]
        found[provenance["role"]] = [provenance["fingerprint"][name] for name in ("prompt", "max_tokens")]
    assert found == {"query": ["old fox", 3], "document": ["owl", 5]}
    said = cli("encode", "local", "pets", *encoder, *given, "--quiet", cwd=tmp_path).fine().out
    assert said.count("was in the cache") == 2
    refused = cli("local", "pets", *encoder, "--revision", "r7", cwd=tmp_path)
    refused.refused(USAGE, "revision 'r7' of a folder; only models of the hub have revisions")


@pytest.mark.parametrize("command", ["", "encode", "explain --query q", "atlas"])
def test_which_task_is_loaded(command: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that reads a dataset takes the choices that its source has."""
    asked: list[dict[str, Any]] = []

    def absent(*names: str, **options: Any) -> None:
        asked.append(options)
        raise DataError(f"{' '.join(names)} is not here")

    monkeypatch.setattr("maxsim_eval.data.loading.load_task", absent)
    chosen = ("--queries", "pages", "--rephrase", "2", "--dataset-revision", "r7", "--split", "dev")
    cli(*command.split(), "real-mm-rag", "finreport", *chosen, cwd=tmp_path).refused(DATA, "real-mm-rag finreport is not here")
    (found,) = asked
    assert found.items() >= {"queries": "pages", "rephrase": 2, "revision": "r7", "split": "dev"}.items()
