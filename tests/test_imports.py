"""The map holds: imports run downward, nothing goes round in a circle, every room lists its files and stays small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FULL = 16  # modules a folder may hold

# Each line may import from the lines below it, never from those above; rooms of one line do not know each other.
TOOLKIT = """
cli studies in_memory many mteb
atlas
api gate
report planning subject
comparison explain conformance
importing scoring first_stage
cache
data
encoders processes codecs
crc
files quantities types errors environment hashing ending printing parsing bars
"""
OPERATOR = """
warm tuner integrations
search
training streaming explaining
topk api
autograd
ops chamfer
gpu cpu reference
quantize
checks
modes coded
fallback tokens turns
needs
"""
BENCHMARKS = """
page owed checksums alone searches
rehearsal
paper forward training chamfer streaming parity cpu_forward second encoding cold_start libraries
reference_speed
cases out_of_core
tables
run rivals
results
measure
"""
# A noun that people hold draws itself (`result.report(folder)`, an Atlas in a terminal): its methods ask for these when they are called.
LATE = {
    ("maxsim_eval.types", "maxsim_eval.report.writing"),
    ("maxsim_eval.atlas.judging", "maxsim_eval.atlas.page"),
    ("maxsim_eval.atlas.judging", "maxsim_eval.atlas.writing"),
}
# Small modules of the lowest line, which the others there may use.
APART = {"hashing", "errors", "files", "printing", "parsing"}


@dataclass(frozen=True)
class Arrow:
    """One import, wherever in the file it stands."""

    source: str
    target: str
    line: int


def modules(folder: Path, package: str) -> dict[str, Path]:
    """Every module below a folder by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(filter(None, (package, *parts)))
        found[name.removesuffix(".__init__")] = path
    return found


def arrows(held: dict[str, Path], source: str) -> Iterator[Arrow]:
    """What a module imports of `held`."""
    for node in ast.walk(ast.parse(held[source].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{held[source]}:{node.lineno}: imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            wanted = [name if name in held else str(node.module) for name in names]
        elif isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
            wanted = [name for name in named if (source, name) not in LATE]
        else:
            continue
        yield from (Arrow(source, name, node.lineno) for name in dict.fromkeys(wanted) if name in held)


def test_late_imports_are_still_there() -> None:
    held = modules(ROOT / "maxsim_eval", "maxsim_eval")
    for source, target in LATE:
        assert f'import_module("{target}")' in held[source].read_text(encoding="utf-8")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


PLACES = {
    "toolkit": (ROOT / "maxsim_eval", "maxsim_eval", TOOLKIT),
    "operator": (ROOT / "kernels" / "maxsim_kernels", "maxsim_kernels", OPERATOR),
    "benchmarks": (ROOT / "benchmarks", "", BENCHMARKS),
}
EACH = pytest.mark.parametrize("place", PLACES)


@EACH
def test_imports_run_downward(place: str) -> None:
    folder, package, drawing = PLACES[place]
    held = modules(folder, package)
    height = {room: -line for line, rooms in enumerate(drawing.strip().splitlines()) for room in rooms.split()}
    root = len(package.split(".")) if package else 0

    def room(name: str) -> str:
        return ".".join(name.split(".")[root : root + 1])

    assert {room(name) for name in held} - {""} <= set(height), "a room that the drawing does not know"
    wrong = []
    for source in held:
        for arrow in arrows(held, source):
            here, there = room(source), room(arrow.target)
            if not here or not there or here == there:  # the package's own __init__, or inside one room
                continue
            if height[there] > height[here] or (height[there] == height[here] and there not in APART):
                wrong.append(f"{held[source].relative_to(ROOT)}:{arrow.line} imports {arrow.target}")
    assert not wrong, "\n".join(wrong)


@EACH
def test_no_circles(place: str) -> None:
    folder, package, _ = PLACES[place]
    held = modules(folder, package)
    inits = {name for name, path in held.items() if path.name == "__init__.py"}  # which gather names for those outside
    graph = {name: {arrow.target for arrow in arrows(held, name)} - inits for name in held if name not in inits}
    assert circles(graph) == []


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def outside(pattern: str, *folders: Path) -> list[str]:
    """Lines that import what they should not."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if re.match(rf"\s*(from|import)\s+({pattern})\b", line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_the_operator_knows_torch_triton_and_numpy_alone() -> None:
    others = r"maxsim_eval|benchmarks|h5py|pytrec_eval|datasets|transformers|beir|scipy|tqdm"
    assert outside(others, ROOT / "kernels" / "maxsim_kernels") == []


def test_nothing_imports_the_benchmarks() -> None:
    own = "|".join(sorted({"benchmarks", *(name.split(".")[0] for name in modules(ROOT / "benchmarks", ""))} - {"chamfer"}))
    assert outside(own, ROOT / "maxsim_eval", ROOT / "kernels") == []


def test_the_toolkit_uses_public_names_of_the_operator() -> None:
    private = r"maxsim_kernels\.(?!search\b(?!\.)|streaming\b(?!\.)|topk\b|training\b)[\w.]+"
    assert outside(private, ROOT / "maxsim_eval") == []


def rooms() -> list[Path]:
    """Every folder that holds code."""
    places = [ROOT / "maxsim_eval", ROOT / "kernels" / "maxsim_kernels", ROOT / "benchmarks"]
    return sorted({path.parent for place in places for path in place.rglob("*.py")})


@pytest.mark.parametrize("folder", rooms(), ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_room_is_small_and_lists_its_files(folder: Path) -> None:
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert len(files) <= FULL
    init = folder / "__init__.py"
    if not init.exists() or folder.name == "cards":
        return
    listed = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    inner = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert set(re.findall(r"^(\w+\.py|\w+/)(?=\s{2,}\S)", listed, re.MULTILINE)) == files | inner
