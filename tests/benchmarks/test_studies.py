"""Files of the toolkit's studies say which sources they are of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alone import studies
from measure.session import kernels


def measured(arguments: list[str], names: tuple[str, ...], folder: Path) -> None:
    """What a study does: it evaluates in a folder of its own, which holds nothing yet, and writes its files."""
    out = Path(arguments[arguments.index("--out") + 1])
    assert "--measure" in arguments
    assert list(out.iterdir()) == []
    for name in names:
        (folder / name).write_text('{"schema": "maxsim-eval-atlas/1", "value": 0.123456789012345}', encoding="utf-8")


@pytest.mark.parametrize(
    ("study", "names"), [("fidelity", ("f.json",)), ("atlas", ("atlas_scifact_minilm.json", "atlas_scifact_lexical.json"))]
)
def test_a_study_is_of_todays_sources(
    study: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    for module in (studies.fidelity, studies.atlas_page):
        monkeypatch.setattr(module, "main", lambda given: (asked.append(given), measured(given, names, tmp_path)))
    place = ["--json", str(tmp_path / "f.json")] if study == "fidelity" else ["--folder", str(tmp_path)]
    assert studies.main([study, "--data-dir", "sets", *place]) == 0
    assert asked[0][asked[0].index("--data-dir") + 1] == "sets"
    assert asked[0][-2:] == place
    for name in names:
        found = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        assert found == {"schema": "maxsim-eval-atlas/1", "value": 0.123456789012345, **kernels()}
