"""Figures of kernels that have changed since are marked, wherever a table shows them; prose of READMEs holds none of its own."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import page
from measure import session, sources
from tables import ages, marks
from tables import cells as page_cells
from tables.columns import drawn

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
UNIT = r"(?:x|times|%|[num]?s|us|seconds?|min(?:utes?)?|hours?|[KMGT]i?B|[KMGT]?B/s|[GT]FLOP/s|tokens/s|documents/s)"
FIGURE = re.compile(rf"\d[\d.,]*\s?{UNIT}(?![\w/])")


# Digests


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    """A copy of the operator that a test may change."""
    return shutil.copytree(page_cells.OPERATOR, tmp_path / sources.PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))


@cache
def digests_before() -> dict[str, str]:
    """Digests of the operator, and so of a copy that nothing has changed."""
    return sources.digests(page_cells.OPERATOR)


def changed(operator: Path, file: str, edit: Callable[[str], str]) -> set[str]:
    """The families whose digest an edit of a file changes; that of the whole operator does by any, its parts' by theirs."""
    before, path = digests_before(), operator / file
    old = path.read_text(encoding="utf-8")
    path.write_text(edit(old), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != old
    found = {name for name, digest in sources.digests(operator).items() if digest != before[name]}
    assert (sources.EVERYTHING in found) == bool(found)
    assert ("scoring" in found) == (bool(found) and not re.match(r"(cpu|(gpu/)?search)/", file))
    assert ("device" in found) == (bool(found) and not file.startswith("cpu/"))
    assert ("kernels" in found) == (bool(found) and bool(re.match(r"(gpu|chamfer)/|topk", file)))
    return found - {sources.EVERYTHING, *sources.PARTS}


HOSTS = {"host", "libraries", "search", "step"}  # whose times are the host's too
FLOATS = HOSTS | {"forward", "wide", "codes", "coded", "training", "streaming"}


@pytest.mark.parametrize(
    ("file", "families"),
    [
        ("gpu/forward/dense.py", FLOATS),
        ("gpu/forward/query_codes.py", HOSTS | {"codes", "coded", "streaming"}),
        ("gpu/forward/wide.py", HOSTS | {"wide"}),
        ("gpu/forward/tuning.py", FLOATS | {"chamfer"}),
        ("gpu/backward/kernels.py", HOSTS | {"training"}),
        ("chamfer/filter_kernels.py", {"chamfer"}),
        ("gpu/forward/counted.py", HOSTS),
        ("gpu/forward/dispatch.py", HOSTS),
        ("cpu/tiles.py", {"cpu", "search-cpu"}),
        ("cpu/some.py", {"search-cpu"}),
        ("search/exact.py", {"search", "search-cpu"}),
        ("search/device.py", {"search"}),
        ("reference/products.py", {"cpu", "search-cpu", "reference"}),
        ("ops.py", HOSTS),
        ("api.py", HOSTS),
        ("warm.py", set()),
    ],
)
def test_a_change_ages_the_families_that_depend_on_it(operator: Path, file: str, families: set[str]) -> None:
    assert changed(operator, file, lambda text: text + "\nMORE = 1\n") == families


def test_what_runs_nothing_ages_nothing(operator: Path) -> None:
    def dressed(text: str) -> str:
        """Other docstrings, comments and layout: all of the file anew from its tree."""
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
                node.body[0] = ast.Expr(ast.Constant("Said in other words."))
        return "# a comment\n\n" + ast.unparse(tree) + "\n\n\n"

    assert changed(operator, "gpu/forward/dense.py", dressed) == set()


def test_a_digest_is_the_same_under_every_python() -> None:
    code = 'def f(a, *, b: int = 2) -> str:\n    "Says."\n    return f"{a!r:>{b}}" + g(1.5, None, *[x for x in a if x])\n'
    (body,) = ast.parse(code).body
    assert sources.said(body) == (
        "FunctionDef(name='f',args=arguments(args=[arg(arg='a')],kwonlyargs=[arg(arg='b',annotation=Name(id='int',ctx=Load()))],"
        "kw_defaults=[Constant(value=2)]),body=[Return(value=BinOp(left=JoinedStr(values=[FormattedValue(value=Name(id='a',ctx=Load()),"
        "conversion=114,format_spec=JoinedStr(values=[Constant(value='>'),FormattedValue(value=Name(id='b',ctx=Load()),conversion=-1)]))]),"
        "op=Add(),right=Call(func=Name(id='g',ctx=Load()),args=[Constant(value=1.5),Constant(),Starred(value=ListComp(elt=Name(id='x',"
        "ctx=Load()),generators=[comprehension(target=Name(id='x',ctx=Store()),iter=Name(id='a',ctx=Load()),ifs=[Name(id='x',ctx=Load())],"
        "is_async=0)]),ctx=Load())])))],returns=Name(id='str',ctx=Load()))"
    )


def test_every_root_is_a_module_and_every_run_records_its_families(tmp_path: Path) -> None:
    here = session.surroundings("", torch.device("cpu"))
    assert here["families"] == sources.digests(session.PACKAGE)
    known = {*sources.FAMILIES, *sources.TOOLKIT, *sources.PARTS, sources.EVERYTHING}
    named = {name for names in (*ages.SCRIPTS.values(), *ages.GROUPS.values(), *ages.TOOLKIT.values()) for name in names}
    assert set(here["families"]) == known >= named | {"forward"}
    assert here["revision"]
    assert here["measured"] == datetime.now(UTC).date().isoformat()


# Marks


def write_results(folder: Path, families: dict[str, str]) -> None:
    """Two rows of a campaign: one by these sources, one without a digest; and a group of forward.py by these."""
    methods = {"ours": {"kind": "ours", "median_ms": 1.0}, "naive FP16": {"kind": "baseline", "median_ms": 2.0}}
    row = {"methods": methods, "skipped": {}, "measured": "2026-12-01T00:00:00"}
    new, old = {"revision": "abc", "families": families}, {"revision": "xyz"}
    shapes = {"textual 1000": {**row, "environment": "new"}, "visual 1000": {**row, "environment": "old"}}
    paper = {
        "schema": "maxsim-kernels/paper/1",
        "environments": {"new": new, "old": old},
        "groups": {"shapes": {"rows": shapes}},
    }
    pairs = {"environment": new, "rows": {"pairs 4 x 16": {"methods": methods, "skipped": {}}}}
    forward = {"schema": "maxsim-kernels/forward/2", "groups": {"pairs": pairs}}
    (folder / "h200").mkdir()
    for name, held in (("paper", paper), ("forward", forward)):
        (folder / "h200" / f"{name}.json").write_text(json.dumps(held), encoding="utf-8")


def test_rows_of_other_sources_are_marked(operator: Path, tmp_path: Path) -> None:
    write_results(tmp_path, sources.digests(operator))

    def said() -> tuple[str, str, str, str]:
        """Of two tables and two files, by the sources as they are."""
        book = page_cells.Book(tmp_path, page.FIGURES, operator=operator)
        tables = page.named(page.sections(book))
        return (
            tables["nocg"].age,
            tables["tiny pairs"].age,
            *(ages.of_file(book, f"h200/{name}.json") for name in ("paper", "forward")),
        )

    now = (
        "Measured at abc, xyz (2026-12-01). Of **older kernels**: visual.",
        "Measured at abc.",
        "measured at abc, xyz (2026-12-01), in part **older kernels**",
        "measured at abc",
    )
    assert said() == now
    assert changed(operator, "cpu/forward.py", lambda text: text + "\nMORE = 1\n") == {"cpu", "search-cpu"}
    assert said() == now, "nothing here is of a CPU"
    changed(operator, "gpu/forward/general.py", lambda text: text + "\nMORE = 1\n")
    assert said() == (
        "Measured at abc, xyz (2026-12-01). Of **older kernels**: every row.",
        "Measured at abc. Of **older kernels**: every row.",
        "measured at abc, xyz (2026-12-01), **older kernels**",
        "measured at abc, **older kernels**",
    )
    book = page_cells.Book(tmp_path, page.FIGURES, operator=operator)
    group = "<!-- age: h200/forward.json#/groups/pairs --><!-- end of age -->"
    assert "-->measured at abc, **older kernels**<!--" in marks.written(book, group, "docs/a.md")
    with pytest.raises(ValueError, match=r"docs/a\.md: got a mark of .*, need .* FILE#/groups/NAME"):
        marks.written(book, group.replace("pairs", "peers"), "docs/a.md")
    table = page.named(page.sections(book))["tiny pairs"]
    assert page_cells.markdown(table)[-2] == f"Raw figures: [h200/forward.json](results/h200/forward.json). {table.age}"


def test_groups_know_their_family() -> None:
    known = {
        ("maxsim-kernels/paper/1", "shapes"): ("forward",),
        ("maxsim-kernels/paper/1", "int8_B"): ("codes",),
        ("maxsim-kernels/forward/2", "host"): ("host",),
        ("maxsim-kernels/streaming/1", "int8"): ("streaming",),
        ("maxsim-kernels/training/1", "memory"): ("training",),
        ("maxsim-kernels/training/1", "steps"): ("step",),
        ("maxsim-kernels/step/1", ""): ("step",),
        ("maxsim-kernels/chamfer/1", "forward"): ("chamfer",),
        ("maxsim-kernels/second/1", "ColPali"): ("forward",),
        ("maxsim-kernels/masks/1", ""): ("wide",),
        ("maxsim-kernels/search-cases/1", ""): ("search-cpu",),
        ("maxsim-eval/rehearsal/1", ""): ("evaluation", "streaming", "reference"),
        ("maxsim-eval/tests/2", "test_gpu_dense"): ("scoring",),
        ("maxsim-eval/tests/2", "test_gpu_search"): ("device",),
        ("maxsim-eval/sanitizers/1", "memcheck, part 1/8"): ("device", "proving"),
        ("maxsim-eval/sanitizers/1", "racecheck, part 16/16"): ("kernels", "proving"),
        ("maxsim-eval/plan-accuracy/1", ""): ("planning", "evaluation", "cpu"),
        ("maxsim-eval/attack/1", ""): (),
    }
    assert {key: ages.families(*key) for key in known} == known


def test_tests_that_search_age_with_the_search() -> None:
    """Those whose own words show it, and those that come to it by the toolkit: evaluations, plans, and copies of codes."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in (page.ROOT / "tests" / "gpu").glob("test_gpu_*.py")}
    named = {name for name in found if "device" in ages.families("maxsim-eval/tests/2", name)}
    said = {name for name, text in found.items() if re.search(r"exact[_-](topk|int8)|kernels\.search|gpu\.search", text)}
    assert said <= named == said | {f"test_gpu_{name}" for name in ("evaluate", "plan", "proving")}


def test_every_committed_file_has_families_that_age_it() -> None:
    """Whoever adds a schema says what ages its figures, or why nothing does."""
    for path in sorted(page.RESULTS.glob("*/*.json")):
        home, _, name = json.loads(path.read_text(encoding="utf-8"))["schema"].rpartition("/")[0].partition("/")
        known = f"{home}/" == ages.SCHEMAS or name in ages.TOOLKIT
        assert known != (name in ages.UNAGED), f"{path.name}: tables/ages.py needs {home}/{name} in TOOLKIT or UNAGED"


def test_a_file_without_families_is_of_older_code(tmp_path: Path) -> None:
    """As a file was before its script recorded any; with those of today it is not, and the day stands behind the commit."""
    today = sources.digests(page_cells.OPERATOR)
    held = {"schema": "maxsim-eval/plan-accuracy/1", "revision": "abc", "cases": {}}
    for name, more in (("old", {}), ("new", {"families": today, "measured": "2026-12-01"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(held | more), encoding="utf-8")
    book = page_cells.Book(tmp_path, page.FIGURES)
    assert ages.of_file(book, "old.json") == "measured at abc, **older code**"
    assert ages.of_file(book, "new.json") == "measured at abc (2026-12-01)"


def test_a_row_is_as_old_as_its_own_run() -> None:
    """A file's day is not that of a part, or of a row, measured before; a run's day is that of its rows without one."""
    parts = {"measured": "2026-12-02", "revision": "new", "runs": {"a": {"families": {}, "revision": "old"}}}
    assert ages.when_of(ages.runs_of(parts)) == "at old"
    here = {"revision": "r", "measured": "2026-12-02"}
    groups = {
        "x": {"environment": here, "rows": {"a": {}}},
        "y": {"environment": here, "measured": "2026-12-01", "rows": {"b": {}}},
    }
    assert [run["measured"] for run in ages.runs_of({"groups": groups})] == ["2026-12-02", "2026-12-01"]
    rows = {"a": {"environment": "one"}, "b": {"environment": "two", "measured": "2026-12-03T00:00:00"}}
    environments = {"one": here, "two": {"revision": "q"}, "of no row": {"revision": "z"}}
    mixed = {"environments": environments, "groups": {"x": {"rows": rows}}}
    assert ages.when_of(ages.runs_of(mixed)) == "at q, r (2026-12-02, 2026-12-03)"
    assert page.runs(mixed) == "revision q, r, measured 2026-12-02, 2026-12-03"


def test_a_change_of_the_toolkit_ages_its_own_families(tmp_path: Path) -> None:
    """An evaluation's figures depend on what scores and what encodes, an encoder's not on how results are compared."""
    toolkit = shutil.copytree(sources.TOOLKIT_FOLDER, tmp_path / "eval", ignore=shutil.ignore_patterns("__pycache__"))

    def digests() -> dict[str, str]:
        return {
            name: digest for name, digest in sources.digests(page_cells.OPERATOR, toolkit).items() if name in sources.TOOLKIT
        }

    before = digests()
    for file, families in (
        ("comparison/metrics.py", {"evaluation", "planning", "atlas"}),
        ("encoders/hf.py", {"encoding", "evaluation", "planning", "atlas"}),
        ("planning/around.py", {"planning"}),
        ("crc/device_ranges.py", set(sources.TOOLKIT)),
    ):
        path = toolkit / file
        path.write_text(path.read_text(encoding="utf-8") + "\nMORE = 1\n", encoding="utf-8")
        now = digests()
        assert {name for name in now if now[name] != before[name]} == families, file
        before = now


# The committed pages


def sections(path: Path) -> list[str]:
    """A page cut at its headings, its fenced code left out."""
    return re.split(r"^(?=#)", FENCED.sub("", path.read_text(encoding="utf-8")), flags=re.MULTILINE)


@cache
def today() -> dict[str, str]:
    return sources.digests(page_cells.OPERATOR)


@cache
def raw(name: str) -> Any:
    return json.loads((page.RESULTS / name).read_text(encoding="utf-8"))


def older(cell: dict[str, Any]) -> bool:
    """Whether a figure of the map is of other sources, read from its files without what makes the page."""
    for place in cell["from"]:
        name, keys = page_cells.keys_of(place)
        found = here = raw(name)
        if keys[0] in ("groups", "partial"):
            group = found[keys[0]][keys[1]]
            here = group.get("environment") or found["environments"][group["rows"][keys[3]]["environment"]]
        elif keys[0] in ages.PARTS and "environment" not in found:
            here = found[keys[0]][keys[1]]
        here = here if "families" in here else here.get("environment", here)
        named = ages.families(found.get("schema", ""), keys[1])
        if any(here.get("families", {}).get(name) != today()[name] for name in named):
            return True
    return False


def test_every_table_with_older_figures_says_so() -> None:
    """Fails where sources behind a figure have changed since it was measured, and the page was not written anew."""
    held = json.loads(page.MAP.read_text(encoding="utf-8"))
    said = {one.partition(": ")[0].removeprefix("### "): one for one in sections(page.PAGE) if one.startswith("### ")}
    for name, cells in held.items():
        rows = {key.partition(" | ")[0] for key in cells}
        old = {key.partition(" | ")[0] for key, cell in cells.items() if older(cell)}
        mark = re.search(rf"Of {re.escape(ages.OLDER)}: (.*)\.\n", said[name])
        assert bool(mark) == bool(old), name
        assert not mark or (old == rows if mark[1] == "every row" else set(mark[1].split("; ")) == old), name


def blocks(kind: str) -> dict[str, str]:
    """What stands between the marks of a kind on all pages, by name."""
    texts = (path.read_text(encoding="utf-8") for path in marks.pages(ROOT))
    return {match[3]: match[0] for text in texts for match in marks.MARKED.finditer(text) if match[2] == kind}


@pytest.mark.parametrize("place", marks.PLACES)
def test_every_quoted_table_with_older_figures_says_so(place: str) -> None:
    """By the sources of each table as it is drawn, and with the mark of whose figures they are."""
    book, shown = page_cells.Book(page.RESULTS, page.FIGURES), blocks("table")
    assert marks.PLACES[place]
    for name in marks.PLACES[place]:
        found = dict.fromkeys(page_cells.sources(drawn(marks.TABLES[name], book)))
        assert found, name
        old = {ages.mark_of(raw(page_cells.keys_of(one)[0])) for one in found if older({"from": [one]})}
        assert {mark for mark in (ages.OLDER, ages.OLDER_CODE) if f"Of {mark}: " in shown[name]} == old, name


@pytest.mark.parametrize("name", marks.LINES)
def test_every_table_of_a_script_says_how_old_its_rows_are(name: str) -> None:
    file, begin, _ = marks.LINES[name]
    rows = {
        row: older({"from": [page_cells.pointer(file, ("groups", group, "rows", row))]})
        for group, held in raw(file)["groups"].items()
        for row in held["rows"]
        if row.startswith(begin)
    }
    assert rows
    below = blocks("lines")[name].splitlines()[-2]
    mark = re.search(rf"^Measured at [^.]*\.(?: Of {re.escape(ages.OLDER)}: (.*)\.)?$", below)
    assert mark is not None, below
    old = {row for row in rows if rows[row]}
    assert (set(rows) if mark[1] == "every row" else set((mark[1] or "").split("; ")) - {""}) == old


def test_a_row_that_is_older_than_its_table_is_named(tmp_path: Path) -> None:
    """Forward rows of today, but for the smallest; those of training are of another table."""
    today = {"revision": "new", "families": sources.digests(page_cells.OPERATOR)}
    held = json.loads((page.RESULTS / marks.CHAMFER).read_text(encoding="utf-8"))
    for name, group in held["groups"].items():
        group["environment"] = {"revision": "old"} if name == "small" else today
        group.pop("measured", None)
    (tmp_path / "h200").mkdir()
    (tmp_path / marks.CHAMFER).write_text(json.dumps(held), encoding="utf-8")
    book = page_cells.Book(tmp_path, page.FIGURES)
    text = "<!-- lines: chamfer-forward --><!-- end of lines -->"
    below = marks.written(book, text, "docs/a.md").splitlines()[-2]
    assert below == "Measured at new, old. Of **older kernels**: forward, 1K points, d = 3; forward, 1K points, d = 128."


LINKED = re.compile(r"results/((?:cpu|h100|h200)/\w+\.json)")


def test_pages_with_tables_of_their_own_say_the_age_of_what_they_link() -> None:
    """Wherever a section of another page links figures of the operator, it has their mark, which `page.py` writes."""
    seen = 0
    for path in {*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in marks.PLACES)} - {page.PAGE}:
        below = {
            marks.LINES[match[3]][0] for match in marks.MARKED.finditer(path.read_text(encoding="utf-8")) if match[2] == "lines"
        }
        for section in sections(path):
            linked = {name for name in LINKED.findall(section) if ages.families(str(raw(name).get("schema", "")), "")}
            linked |= {marks.FIGURES[match[3]][0] for match in marks.MARKED.finditer(section) if match[2] == "figure"}
            linked -= tables_of(path, section) | below
            marked = {match[3] for match in marks.MARKED.finditer(section) if match[2] == "age"}
            assert linked <= marked, (
                f"{path.relative_to(ROOT)}: needs <!-- age: FILE --><!-- end of age --> of {linked - marked}"
            )
            seen += len(linked)
    assert seen >= 34


def tables_of(path: Path, section: str) -> set[str]:
    """Files of the tables that `page.py` writes into a section, whose line below says how old they are."""
    book = page_cells.Book(page.RESULTS, page.FIGURES)
    names = [match[3] for match in marks.MARKED.finditer(section) if match[2] == "table"]
    made = [drawn(marks.TABLES[name], book) for name in names]
    return {page_cells.keys_of(place)[0] for table in made for place in page_cells.sources(table)}


def own_figures(text: str) -> list[str]:
    """Figures with a unit in prose, beside what stands between marks."""
    return FIGURE.findall(marks.MARKED.sub("", FENCED.sub("", text)))


@pytest.mark.parametrize("place", marks.READMES)
def test_prose_holds_no_measured_figure_of_its_own(place: str) -> None:
    assert own_figures((ROOT / place).read_text(encoding="utf-8")) == []


def test_a_figure_in_prose_is_found() -> None:
    text = "3.1x, 25 us; 1.6% of 8 GB\n```\n--ram 1TB\n```\n<!-- figure: cold -->11.4 s<!-- end of figure --> in 2 minutes, d = 128, 300 queries"
    assert own_figures(text) == ["3.1x", "25 us", "1.6%", "8 GB", "2 minutes"]


def test_marks_are_checked(tmp_path: Path) -> None:
    book = page_cells.Book(page.RESULTS, page.FIGURES)
    text = "<!-- age: h200/masks.json -->of old<!-- end of age --> and <!-- figure: cold --><!-- end of figure -->"
    found = marks.written(book, text, "docs/a.md")
    assert re.fullmatch(
        r"<!-- age: \S+ -->measured at .*<!-- end of age --> and <!-- figure: cold -->[\d.]+ s<!-- .* -->", found
    )
    assert marks.written(book, found, "docs/a.md") == found
    for mark, problem in (("age: h200/nothing.json", "a file below docs/results"), ("figure: luck", "one of cold, warm")):
        kind = mark.partition(":")[0]
        with pytest.raises(ValueError, match=rf"docs/a\.md: got a mark of .*, need {problem}"):
            marks.written(book, f"<!-- {mark} --><!-- end of {kind} -->", "docs/a.md")
