"""docs/atlas.md says what its JSON holds, and its pictures are drawn from it."""

from __future__ import annotations

import pytest

from maxsim_eval.atlas.grid import load_grid
from maxsim_eval.atlas.picture import to_svg
from maxsim_eval.atlas.writing import read_atlas
from maxsim_eval.studies.atlas_page import NAMES, all_tables, json_of, main
from maxsim_eval.studies.scale import fill
from places import ROOT

PAGE = ROOT / "docs" / "atlas.md"
FOLDER = ROOT / "docs" / "results" / "cpu"


def test_the_page_holds_these_tables():
    text = PAGE.read_text(encoding="utf-8")
    atlases = {name: read_atlas(json_of(name, FOLDER)) for name in NAMES}
    assert fill(text, all_tables(atlases)) == text, "run: python -m maxsim_eval.studies.atlas_page --write docs/atlas.md"


@pytest.mark.parametrize("name", NAMES)
def test_they_are_of_the_packaged_grid(name):
    made = read_atlas(json_of(name, FOLDER))
    assert [row.name for row in made.rows] == ["fp32", *(entry.name for entry in load_grid().entries)]
    assert not any(row.error for row in made.rows)
    assert made.task["queries"] == 300
    (smallest,) = [row for row in made.rows if row == made.smallest()]
    assert f"**{smallest.name} is the smallest storage" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_are_those_of_the_page(name):
    held = (ROOT / "docs" / "pictures" / f"atlas_{name}.svg").read_text(encoding="utf-8")
    assert held.count("<path") == (to_svg(read_atlas(json_of(name, FOLDER))) + "\n").count("<path")
    assert f"pictures/atlas_{name}.svg" in PAGE.read_text(encoding="utf-8")


def test_tables_are_printed(capsys):
    main(["--folder", str(FOLDER)])
    assert "smallest storage that is equivalent" in capsys.readouterr().out
