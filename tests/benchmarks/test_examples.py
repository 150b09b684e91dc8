"""`benchmarks/alone/examples.py`: what a script of examples/ writes is kept with its sources, one script at a time too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alone import examples
from tables import ages

SCRIPT = """
import json, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(words["--json"]).write_text(json.dumps({"steps": words.get("--steps"), "data": words["--data-dir"], "loss": 2.4535028934}))
sys.exit("differ" if "broken" in words["--data-dir"] else 0)
"""


def test_scripts_are_kept_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    for name in examples.OPTIONS:
        assert (examples.ROOT / "examples" / name).is_file()
        (tmp_path / name).write_text(SCRIPT, encoding="utf-8")
    file = tmp_path / "found.json"

    def measured(data: str, *more: str) -> dict[str, dict[str, object]]:
        examples.main(["--data-dir", data, "--json", str(file), *more])
        return json.loads(file.read_text(encoding="utf-8"))["examples"]  # type: ignore[no-any-return]

    first = measured("/sets")
    assert [one["found"] for one in first.values()] == [
        {"steps": steps, "data": "/sets", "loss": 2.4535028934} for steps in ("12", None)
    ]
    again = measured("/others", "--only", "rerank_pylate.py")
    assert again["train_sentence_transformers.py"] == first["train_sentence_transformers.py"]
    assert again["rerank_pylate.py"]["found"] == {"steps": None, "data": "/others", "loss": 2.4535028934}
    assert {"revision", "measured", "families", "torch"} <= set(again["rerank_pylate.py"])
    assert [keys[1] for keys in ages.rows(json.loads(file.read_text(encoding="utf-8")))] == list(examples.OPTIONS)
    with pytest.raises(SystemExit, match="exit 1"):
        measured("/broken")
    assert json.loads(file.read_text(encoding="utf-8"))["examples"] == again
