"""Pictures of explanations: what is in them, that they are whole files that need nothing else, and what is refused."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.explain.explaining import Explanation, TokenMatch
from maxsim_eval.explain.pictures import check_picture, token_text, winner_text, write_picture
from maxsim_eval.types import PatchGrid

pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'maxsim-eval[pictures]'")


def explained(
    texts: Sequence[str | None], winners: Sequence[int | None], *, page: Any = None, count: int = 9, **more: Any
) -> Explanation:
    values = [
        None if winner is None else 0.25 * (number + 1) * (-1 if number == 2 else 1) for number, winner in enumerate(winners)
    ]
    total = sum(value or 0 for value in values)
    tokens = tuple(
        TokenMatch(
            n,
            text,
            value,
            None if value is None or not total else value / total,
            winner,
            None if page or winner is None else f"held{winner}",
        )
        for n, (text, winner, value) in enumerate(zip(texts, winners, values))
    )
    return Explanation(
        source="local", dataset="small", split="test", encoder={"name": "mine"}, path="fp32", query="q<1>", document="d&1",
        query_text="who?", document_text=None if page else "<b>text</b>", relevance=1, score=total, tokens=tokens, document_tokens=count,
        notes=("a < note",), page=page, similarities=np.linspace(-1, 1, len(tokens) * count, dtype=np.float32).reshape(-1, count), **more,
    )  # fmt: skip


TEXTS = ["fox", "$x_1$", "\x00\n", None, "名前", "  "]
WINNERS = [3, 0, 8, 1, None, 2]


def texts_in(svg: bytes) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_svg_says_every_token_its_winner_and_the_score(tmp_path: Path) -> None:
    found = explained(TEXTS, WINNERS)
    write_picture(found, tmp_path / "a.svg")
    content = (tmp_path / "a.svg").read_bytes()
    said = texts_in(content)
    for label in ("0 fox", "1 $x_1$", "2 \\x00\\n", "3", "4 名前", "5 '  '", "3 held3", "8 held8", "none"):
        assert label in said, label
    assert any("query q<1>, document d&1, path fp32" in text for text in said)
    write_picture(found, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_bytes() == content, "the same pair gives the same file"
    assert b"http" not in re.sub(
        rb'xmlns(:\w+)?="[^"]*"|"http://www.w3.org/[^"]*"|<!DOCTYPE[^>]*>|<metadata>.*?</metadata>',
        b"",
        content,
        flags=re.DOTALL,
    )


def test_bars_are_as_long_as_the_contributions(tmp_path: Path) -> None:
    found = explained(["a", "b", "c"], [0, 1, 2])
    write_picture(found, tmp_path / "a.svg")
    paths = re.findall(
        r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) [\d.]+ \nL [\d.]+ [\d.]+ \nL [\d.]+ [\d.]+ \nz', (tmp_path / "a.svg").read_text()
    )
    widths = [float(right) - float(left) for left, right in paths]
    bars = [width for width in widths if width != 0][-3:]
    values = np.array([token.contribution or 0 for token in found.tokens])
    np.testing.assert_allclose(np.array(bars) / bars[0], values / values[0], rtol=1e-3)


def test_png_is_an_image(tmp_path: Path) -> None:
    write_picture(explained(["a", "b"], [0, 1]), tmp_path / "a.PNG")
    with Image.open(io.BytesIO((tmp_path / "a.PNG").read_bytes())) as image:
        image.load()
        assert image.format == "PNG"
        assert len(set(np.asarray(image.convert("L")).ravel())) > 10


BLUE = (120, 160, 255)


def page() -> Image.Image:
    return Image.new("RGB", (60, 40), BLUE)


def test_the_heat_map_lies_over_the_page_patch_by_patch(tmp_path: Path) -> None:
    grid = PatchGrid(2, 3, 1)
    found = explained(["a", "b"], [6, 1], page=page(), count=8, patches=grid, grid_from="processor")
    np.testing.assert_array_equal(found.patch_map(), [[0.5, 0, 0], [0, 0, 0.25]])
    write_picture(found, tmp_path / "a.svg")
    said = texts_in((tmp_path / "a.svg").read_bytes())
    assert "what each patch adds to the score" in said
    assert "6 (patch 2, 3)" in said
    assert "1 (patch 1, 1)" in said
    write_picture(found, tmp_path / "b.svg", token=1)
    assert "similarity to query token 1 b" in texts_in((tmp_path / "b.svg").read_bytes())
    write_picture(found, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        shown = np.asarray(image.convert("RGB")).astype(int)
    bare = np.argwhere((abs(shown - BLUE) < 3).all(axis=2))  # where the page is seen through nothing
    (top, left), (bottom, right) = bare.min(axis=0), bare.max(axis=0)

    def red(row: int, column: int) -> int:
        """How much redder than the page the middle of a cell is."""
        place = top + (bottom - top) * (2 * row + 1) // 4, left + (right - left) * (2 * column + 1) // 6
        return int(shown[place][0] - shown[place][2] - (BLUE[0] - BLUE[2]))

    assert [[red(row, column) > 10 for column in range(3)] for row in range(2)] == [[True, False, False], [False, False, True]]
    assert red(0, 0) > red(1, 2), "the more a patch adds, the more it stands out"


def test_html_is_one_file_with_picture_and_table(tmp_path: Path) -> None:
    found = explained(TEXTS, WINNERS)
    write_picture(found, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg") == text.count("</svg>") == 1
    assert text.count("<tr>") == 1 + len(TEXTS)
    assert "a &lt; note" in text
    assert "&lt;b&gt;text&lt;/b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r'(?:src|href)="(?!#|data:)', text), "nothing is fetched"
    assert "<script" not in text


def test_a_text_with_half_a_pair_of_surrogates_is_shown(tmp_path: Path) -> None:
    found = replace(explained(TEXTS, WINNERS), document_text="bad \ud83d")
    write_picture(found, tmp_path / "a.html")
    assert "bad \\ud83d" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_many_tokens_are_not_all_drawn_and_it_says_so(tmp_path: Path) -> None:
    found = explained([f"t{n}" for n in range(450)], [0] * 450)
    write_picture(found, tmp_path / "a.svg")
    said = texts_in((tmp_path / "a.svg").read_bytes())
    assert any("the 400 largest of 450" in text for text in said)
    assert "449 t449" in said
    assert "0 t0" not in said


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.pdf", "a", "svg"):
        with pytest.raises(UsageError, match=r"need a name that ends in \.svg, \.png, \.html"):
            check_picture(tmp_path / name)
    with pytest.raises(UsageError, match="heat map"):
        write_picture(explained(["a"], [0]), tmp_path / "a.svg", token=0)
    with_page = explained(["a"], [0], page=page(), patches=PatchGrid(3, 3))
    with pytest.raises(UsageError, match="query token: got 5"):
        write_picture(with_page, tmp_path / "a.svg", token=5)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_picture(explained(["a"], [0]), tmp_path / "file" / "a.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"matplotlib.*maxsim-eval\[pictures\]"):
        check_picture(tmp_path / "a.svg")


def test_words_for_tokens_and_winners() -> None:
    assert [token_text(text) for text in (None, "fox", " fox", "\u200b", "")] == ["", "fox", "' fox'", "\\u200b", "''"]
    found = explained(["a"], [4], patches=PatchGrid(2, 2, 1))
    match = found.tokens[0]
    assert winner_text(match, PatchGrid(2, 2, 1)) == "4 (patch 2, 2)"
    assert winner_text(match, PatchGrid(2, 2, 0)) == "4 held4"
    assert winner_text(replace(match, document_text=None), None) == "4"
    assert winner_text(replace(match, document_position=None), None) == "none"
