"""Pictures of an `Explanation`: what each query token adds to the score and, for a page image, the heat map over the page.

Static, by matplotlib: `.svg` and `.png`, and `.html`, one file with the same picture and the table, which needs no network.
"""

from __future__ import annotations

import html
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxsim_eval.errors import MissingPackageError, UsageError
from maxsim_eval.explain.explaining import Explanation, TokenMatch
from maxsim_eval.files import atomic_path, writing
from maxsim_eval.types import PatchGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".html")
_BAR, _OTHER = "#3b76af", "#b5584a"
_ROW_INCHES, _MOST_ROWS = 0.24, 400  # more bars than this nobody reads: the largest ones are drawn


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is done for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--out: got {path.name!r}, need a name that ends in {', '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingPackageError("a picture of an explanation", "matplotlib", "pictures") from None


def write_picture(found: Explanation, path: Path, token: int | None = None) -> None:
    """Write the picture, whole or not at all.

    Args:
        path: its suffix says what it is: .svg, .png or .html.
        token: for a page: the heat map is of the similarity to this query token, not of what each patch adds to the score.

    Raises:
        UsageError: another suffix, or `token` without a grid of patches. DataError: the file cannot be written.
        MissingPackageError: no matplotlib.
    """
    check_picture(path)
    kind = path.suffix.lower().removeprefix(".")
    drawn = _file(draw(found, token), "svg" if kind == "html" else kind)
    content = _page(found, drawn.decode("utf-8")).encode("utf-8", "backslashreplace") if kind == "html" else drawn
    with writing(path), atomic_path(path) as temporary:
        temporary.write_bytes(content)


def token_text(text: str | None) -> str:
    """A token's text for people: nothing invisible in it."""
    if text is None:
        return ""
    shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return shown if shown.strip() == shown and shown else f"'{shown}'"


def winner_text(match: TokenMatch, grid: PatchGrid | None) -> str:
    """The winning document token: its position, and its text or its place on the page (row and column from 1)."""
    place = match.document_position
    if place is None:
        return "none"
    if grid is not None and 0 <= place - grid.first < grid.patches:
        row, column = divmod(place - grid.first, grid.columns)
        return f"{place} (patch {row + 1}, {column + 1})"
    return f"{place} {token_text(match.document_text)}".rstrip()


def title(found: Explanation) -> str:
    """One line: which pair, by what, and the score."""
    score = "no score" if found.score is None else f"{found.score:.6g}"
    return f"query {found.query}, document {found.document}, path {found.path}: {score}"


def draw(found: Explanation, token: int | None = None) -> Figure:
    """The picture as matplotlib's Figure, for notebooks; arguments and errors as of `write_picture`."""
    from matplotlib.figure import Figure

    matches = _shown(found)
    page = found.page is not None and found.patches is not None
    if token is not None:
        found.patch_map(token)  # raises where there is no such map
    height = max(2.2, 1.2 + _ROW_INCHES * len(matches), 6.0 if page else 0.0)
    figure = Figure(figsize=(13 if page else 8, height), layout="constrained")
    figure.suptitle(title(found), parse_math=False, fontsize=10)
    axes = figure.subplots(1, 2 if page else 1, squeeze=False)[0]
    _bars(axes[-1], found, matches)
    if page:
        _heat(figure, axes[0], found, token)
    return figure


def _file(figure: Figure, kind: str) -> bytes:
    from matplotlib import rc_context

    written = io.BytesIO()
    about = {"Date": None} if kind == "svg" else {"Software": None}
    # Text stays text in SVG: it can be searched and read aloud. A fixed salt: the same pair gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "maxsim-eval"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # signs that matplotlib's font lacks
        figure.savefig(written, format=kind, metadata=about, dpi=120)
    return written.getvalue()


def _shown(found: Explanation) -> list[TokenMatch]:
    if len(found.tokens) <= _MOST_ROWS:
        return list(found.tokens)
    largest = sorted(found.tokens, key=lambda match: -abs(match.contribution or 0.0))[:_MOST_ROWS]
    return sorted(largest, key=lambda match: match.position)


def _bars(axes: Any, found: Explanation, matches: list[TokenMatch]) -> None:
    values = [match.contribution or 0.0 for match in matches]
    axes.barh(range(len(matches)), values, color=[_BAR if value >= 0 else _OTHER for value in values])
    names = [f"{match.position} {token_text(match.text)}".rstrip() for match in matches]
    axes.set_yticks(range(len(matches)), names, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    left = len(found.tokens) - len(matches)
    said = f"; the {len(matches)} largest of {len(found.tokens)}" if left else ""
    axes.set_xlabel(f"contribution of each query token, and the document token that gives it{said}", fontsize=8)
    axes.margins(x=0.35, y=0.01)
    for place, (match, value) in enumerate(zip(matches, values)):
        axes.annotate(
            winner_text(match, found.patches),
            (max(value, 0.0), place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            parse_math=False,
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _heat(figure: Any, axes: Any, found: Explanation, token: int | None) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    heat = found.patch_map(token)
    width, height = found.page.size
    place = (0, width, height, 0)
    axes.imshow(np.asarray(found.page.convert("RGB")), extent=place, aspect="equal")
    low = float(heat.min()) if token is not None else min(0.0, float(heat.min()))
    high = float(heat.max()) if float(heat.max()) > low else low + 1.0
    scale = Normalize(low, high)
    # The less there is, the less it covers: the page stays readable.
    axes.imshow(heat, extent=place, cmap="YlOrRd", norm=scale, alpha=0.75 * np.asarray(scale(heat)), interpolation="nearest")
    axes.set_axis_off()
    what = "what each patch adds to the score"
    if token is not None:
        what = f"similarity to query token {token} {token_text(found.tokens[token].text)}".rstrip()
    axes.set_title(what, fontsize=9, parse_math=False)
    figure.colorbar(ScalarMappable(scale, "YlOrRd"), ax=axes, shrink=0.7)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color-scheme: light dark }
svg { max-width: 100%; height: auto; background: white }
table { border-collapse: collapse } th, td { padding: .15rem .8rem; border-bottom: 1px solid #8885; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
"""


def _page(found: Explanation, svg: str) -> str:
    """One HTML file with the picture, the table and the notes."""

    def safe(text: Any) -> str:
        return html.escape(str(text))

    rows = []
    for match in found.tokens:
        numbers = (
            "" if match.contribution is None else f"{match.contribution:.6g}",
            "" if match.share is None else f"{match.share:.1%}",
        )
        cells = "".join(f'<td class="n">{cell}</td>' for cell in numbers)
        query, winner = safe(token_text(match.text)), safe(winner_text(match, found.patches))
        rows.append(f'<tr><td class="n">{match.position}</td><td>{query}</td>{cells}<td>{winner}</td></tr>')
    heads = "".join(f"<th>{head}</th>" for head in ("#", "query token", "contribution", "share", "document token"))
    notes = "".join(f"<p>Note: {safe(note)}</p>" for note in found.notes)
    texts = "".join(
        f"<p><strong>{name}:</strong> {safe(text)}</p>"
        for name, text in (("Query", found.query_text), ("Document", found.document_text))
        if text is not None
    )
    picture = svg[svg.index("<svg") :]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{safe(title(found))}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{safe(title(found))}</h1>{texts}{notes}\n{picture}\n"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></body></html>\n"
    )
