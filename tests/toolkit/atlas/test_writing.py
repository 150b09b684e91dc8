"""Files of an atlas: those that cannot be written, and those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxsim_eval.atlas import Atlas, Row
from maxsim_eval.atlas.writing import read_atlas
from maxsim_eval.errors import DataError


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'maxsim-eval[atlas]'")
    (tmp_path / "file").touch()
    made = Atlas({}, {}, [Row("fp32", "path", "")], ["nDCG@10"], 0.003, 1, 0.95, {})
    with pytest.raises(DataError, match=r"file/x: the atlas cannot be written \(Not a directory\)"):
        made.report(tmp_path / "file" / "x")


@pytest.mark.parametrize(
    ("text", "match"),
    [("{}", "need the schema"), ("[", "not valid JSON"), ('{"schema": "maxsim-eval/atlas/1"}', "not a whole")],
)
def test_files_that_are_no_atlas(tmp_path: Path, text: str, match: str):
    (tmp_path / "atlas.json").write_text(text)
    with pytest.raises(DataError, match=match):
        read_atlas(tmp_path / "atlas.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_atlas(tmp_path / "none.json")
