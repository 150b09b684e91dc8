"""Which sources of the operator a figure depends on: a digest for every family of kernels.

A family is the modules that make its figures (kernels, what chooses among them, what launches them) and all that those import inside
the rooms of kernels. Not counted: checks and classes of arguments, dispatch.py, which hands a call on to any kernel, and whatever runs
nothing (docstrings, comments, layout). So a change of the backward leaves figures of the forward as they are.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "maxsim_kernels"
ROOMS = ("chamfer", "gpu", "integrations", "search", "streaming")
NOT_FOLLOWED = "gpu.forward.dispatch"
FORWARD = ("gpu.forward.choice", "gpu.forward.dense", "gpu.forward.general")
CODES = (*FORWARD, "gpu.forward.query_codes")
CALLS = ("api", "ops", "autograd", "checks", "modes", "tokens", NOT_FOLLOWED)  # what a call costs its caller beside the kernels
LIBRARIES = tuple(f"integrations.{name}" for name in ("sentence_transformers", "pylate", "colpali_engine"))
FAMILIES = {  # roots: modules of the operator
    "forward": FORWARD,  # float tokens of up to 256 bytes
    "codes": CODES,  # INT8 and FP8
    "coded": (*CODES, "gpu.coded.coded", "coded"),  # tokens of few bits, scored as they are stored
    "wide": (*FORWARD, "gpu.forward.wide"),  # float tokens of any width
    "training": (*FORWARD, "gpu.backward.gradients", "autograd", "training"),
    "chamfer": ("chamfer.chamfer", "chamfer.nearest"),
    "streaming": (*CODES, "streaming.streaming", "topk"),
    "search": (*CODES, "search.searching", "search.device"),
    "host": (*FORWARD, *CALLS),
    "libraries": (*FORWARD, *CALLS, *LIBRARIES),
    "cpu": (
        "cpu.forward",
        "cpu.pairs",
        "cpu.tiles",
        "quantize",
        *(f"reference.{name}" for name in ("reference", "products", "rows")),
    ),
}


def digests(package: Path) -> dict[str, str]:
    """Of every family, where the operator lies in this folder."""
    return {family: _digest(package, roots) for family, roots in FAMILIES.items()}


def _digest(package: Path, roots: tuple[str, ...]) -> str:
    waiting, code = list(roots), dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name not in code:
            code[name], imported = _read(_file(package, name).read_text(encoding="utf-8"))
            waiting += [one for one in imported if _file(package, one).exists()]
    held = "".join(f"{name}\0{code[name]}\0" for name in sorted(code))
    return hashlib.sha256(held.encode()).hexdigest()[:16]


@cache
def _read(text: str) -> tuple[str, list[str]]:
    """What a file's code says, and which modules of the rooms it may import."""
    tree = ast.parse(text)
    return said(tree), [name for name in _imported(tree) if name.partition(".")[0] in ROOMS and name != NOT_FOLLOWED]


def _file(package: Path, name: str) -> Path:
    path = package.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(tree: ast.AST) -> Iterator[str]:
    """Modules of the operator, its name left out; some are names inside a module, which no file has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            above = str(node.module)[len(PACKAGE) + 1 :]
            yield above
            yield from (f"{above}.{alias.name}".lstrip(".") for alias in node.names)


def said(node: Any) -> str:
    """What code says, in a form that stays from one Python to the next (`ast.dump` does not): no docstrings, no empty fields."""
    if isinstance(node, list):
        return "[" + ",".join(map(said, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if (
        isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    ):
        fields["body"] = node.body[1:]
    held = (f"{name}={said(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({','.join(held)})"
