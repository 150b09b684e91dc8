"""Every file of an atlas: HTML, Markdown, CSV, the picture and JSON, each written whole."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from maxsim_eval.atlas import page
from maxsim_eval.atlas.attribution import Loss
from maxsim_eval.atlas.judging import Atlas, Row
from maxsim_eval.atlas.picture import to_svg
from maxsim_eval.comparison.statistics import Difference
from maxsim_eval.errors import DataError
from maxsim_eval.files import write_text
from maxsim_eval.printing import printable
from maxsim_eval.report.markdown import cell, table
from maxsim_eval.report.result_json import dump_json, jsonable, load_json

SCHEMA = "maxsim-eval/atlas/1"


def write_atlas(atlas: Atlas, folder: Path | str) -> None:
    """Write atlas.svg, .md, .csv, .html, then atlas.json: the last means all are complete.

    Raises:
        DataError: the folder cannot be written. MissingPackageError: no matplotlib.
    """
    folder, picture = Path(folder), to_svg(atlas)
    try:
        write_text(folder / "atlas.svg", picture + "\n")
        write_text(folder / "atlas.md", to_markdown(atlas))
        write_text(folder / "atlas.csv", to_csv(atlas))
        write_text(folder / "atlas.html", to_html(atlas, picture))
        write_text(folder / "atlas.json", to_json(atlas))
    except OSError as error:
        raise DataError(f"{folder}: the atlas cannot be written ({error.strerror})") from error


def to_json(atlas: Atlas) -> str:
    """The atlas as JSON (docs/atlas.md)."""
    document = {"schema": SCHEMA, **dataclasses.asdict(atlas)}
    document["headline"] = page.headline(atlas)
    for row, made in zip(document["rows"], atlas.rows, strict=True):
        row["verdict"] = made.verdict
    return dump_json(jsonable(document)) + "\n"


def read_atlas(path: Path | str) -> Atlas:
    """The atlas that an atlas.json holds.

    Raises:
        DataError: no such file, or not an atlas of this version.
    """
    try:
        document = load_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DataError(f"{path}: not an atlas, need the schema {SCHEMA!r}")
    try:
        names = {field.name for field in dataclasses.fields(Atlas)}
        rows = [_row(row) for row in document["rows"]]
        return Atlas(**{name: value for name, value in document.items() if name in names} | {"rows": rows})
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not a whole atlas ({error})") from error


def _row(row: dict[str, Any]) -> Row:
    names = {field.name for field in dataclasses.fields(Row)}
    changes = {metric: Difference(**change) for metric, change in row["changes"].items()}
    losses = [Loss(**{**loss, "ties": tuple(loss["ties"])}) for loss in row["losses"]]
    kept = {name: value for name, value in row.items() if name in names}
    return Row(**kept | {"changes": changes, "losses": losses, "fronts": tuple(row["fronts"])})


def to_csv(atlas: Atlas) -> str:
    """Every figure, a row an entry."""
    columns, rows = page.figures(atlas)
    held = io.StringIO()
    writer = csv.writer(held, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return held.getvalue()


def to_markdown(atlas: Atlas) -> str:
    """One self-contained page."""
    lines = [f"# {cell('Fidelity atlas')}", "", cell(page.facts_line(atlas)), "", f"**{cell(page.headline(atlas))}.**", ""]
    lines += [f"- warning: {cell(line)}" for line in page.warnings(atlas)]
    lines += [f"- failed: {cell(line)}" for line in page.error_lines(atlas)]
    lines += ["", "![change against bytes and time](atlas.svg)", ""]
    for one in (page.main_table(atlas), page.loss_table(atlas), page.definitions(atlas)):
        if one is not None:
            lines += [f"## {cell(one.title)}", "", *table(one.columns, one.rows, "---:" if one.title != "Entries" else "---")]
    lines += [*(f"- {cell(line)}" for line in page.reading()), ""]
    lines += ["## Command", "", f"    {printable(shlex.join(atlas.command) or '(none)')}", ""]
    return "\n".join(lines)


def to_html(atlas: Atlas, picture: str) -> str:
    """One self-contained page; nothing in it runs or is fetched."""
    environment = Environment(loader=PackageLoader("maxsim_eval.atlas"), autoescape=True, undefined=StrictUndefined)
    tables: list[Any] = [
        one for one in (page.main_table(atlas), page.loss_table(atlas), page.definitions(atlas)) if one is not None
    ]
    return environment.get_template("atlas.html").render(
        title=printable(f"Fidelity atlas: {atlas.task.get('source')}/{atlas.task.get('dataset')}"),
        facts=printable(page.facts_line(atlas)),
        headline=printable(page.headline(atlas)),
        warnings=[printable(line) for line in page.warnings(atlas)],
        errors=[printable(line) for line in page.error_lines(atlas)],
        picture=Markup(picture),  # made by matplotlib, whose texts are paths
        tables=[
            {"title": one.title, "columns": one.columns, "rows": [[printable(text) for text in row] for row in one.rows]}
            for one in tables
        ],
        reading=page.reading(),
        command=printable(shlex.join(atlas.command)),
        machine=printable(
            ", ".join(f"{key} {value}" for key, value in atlas.environment.items() if isinstance(value, str | int))
        ),
    )
