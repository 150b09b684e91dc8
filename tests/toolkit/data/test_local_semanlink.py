"""examples/local_semanlink.py: a package of bookmarks becomes a folder that `local` reads."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from maxsim_eval.data.loading import load_task
from places import ROOT

spec = importlib.util.spec_from_file_location("local_semanlink", ROOT / "examples" / "local_semanlink.py")
assert spec is not None
assert spec.loader is not None
semanlink = importlib.util.module_from_spec(spec)
spec.loader.exec_module(semanlink)

EMPTY = dict.fromkeys(semanlink.FIELDS, "")
TAGS = {
    "t/deep": {"prefLabel": ["Deep", "learning"]},
    "t/rare": {"prefLabel": ["Rare"]},
    "t/nameless": {"prefLabel": [" "]},
    "t/wide": {"prefLabel": ["Recherche"]},
}


def package(path: Path, files: dict[str, Any]) -> Path:
    """A tar that holds these files as JSON."""
    with tarfile.open(path, "w:gz") as archive:
        for name, held in files.items():
            data = json.dumps(held).encode()
            entry = tarfile.TarInfo(f"{semanlink.DATA}/{name}.json")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def bookmarks() -> list[dict[str, Any]]:
    made = [{**EMPTY, "title": f"Titre  {n}\r\n", "comment": "a\n b", "tag": ["t/deep", "t/deep"]} for n in range(5)]
    made[1] |= {"tag": ["t/deep", "t/wide", "t/nameless"], "arxiv_summary": "été"}
    made.append({**EMPTY, "tag": ["t/wide"]})  # without a word
    made += [{**EMPTY, "comment": f"only {n}", "tag": ["t/wide", "t/nameless"]} for n in range(4)]
    made.append({**EMPTY, "title": "last", "tag": ["t/rare"]})
    return made


def test_a_package_becomes_a_local_collection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "local" / "semanlink"
    held = package(tmp_path / "cherche.tar.gz", {"docs": bookmarks(), "tags": TAGS})
    assert semanlink.main([str(held), "--out", str(out)]) == 0
    assert f"{out}: 10 documents, 2 queries, 10 judged pairs" in capsys.readouterr().out
    task = load_task("local", "semanlink", data_dir=tmp_path, quiet=True)
    assert list(task.query_ids) == ["q0", "q1"]
    assert list(task.queries) == ["Deep learning", "Recherche"]
    assert list(task.document_ids) == ["d0", "d1", "d2", "d3", "d4", "d6", "d7", "d8", "d9", "d10"]
    assert task.documents[1] == "Titre 1 a b été"
    assert task.documents[5] == "only 0"
    assert task.qrels["q0"] == dict.fromkeys(["d0", "d1", "d2", "d3", "d4"], 1)
    assert task.qrels["q1"] == dict.fromkeys(["d1", "d6", "d7", "d8", "d9"], 1)


def test_another_package_is_refused(tmp_path: Path) -> None:
    held = package(tmp_path / "other.tar.gz", {"towns": []})
    with pytest.raises(SystemExit, match=r"other\.tar\.gz: has no .*docs\.json, need the sdist of cherche 2\.2\.1"):
        semanlink.main([str(held), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
