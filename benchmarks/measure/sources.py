"""Which sources a figure depends on: a digest for every family of kernels, and of the toolkit where the toolkit was measured.

A family is the modules that make its figures (kernels, what chooses among them, what launches them) and all that those import
from the operator's packages in `ROOMS`. Not counted: classes of arguments, dispatch.py, which hands a call on to any kernel, the
search on a GPU in figures of a CPU, and whatever runs nothing (docstrings, comments, layout). So a change of the backward leaves
figures of the forward as they are. Rows whose time is the host's too count what a call passes on its way: checks, dispatch,
autograd.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE, TOOLKIT_PACKAGE = "maxsim_kernels", "maxsim_eval"
TOOLKIT_FOLDER = Path(__file__).resolve().parents[2] / TOOLKIT_PACKAGE
ROOMS = ("chamfer", "gpu", "integrations", "search", "streaming")
CPU_ROOMS = ("cpu", "search")
NOT_FOLLOWED = ("gpu.forward.dispatch", "search.device")
FORWARD = ("gpu.forward.choice", "gpu.forward.dense", "gpu.forward.general")
CODES = (*FORWARD, "gpu.forward.query_codes")
CALLS = ("api", "ops", "autograd", "checks", "modes", "tokens", "gpu.forward.dispatch")  # what a call costs beside the kernels
BACKWARD = ("gpu.backward.gradients", "autograd", "training")
LIBRARIES = tuple(f"integrations.{name}" for name in ("sentence_transformers", "pylate", "colpali_engine"))
SEARCH = ("search.exact", "search.searching", "topk")
REFERENCE = (*(f"reference.{name}" for name in ("reference", "rows", "products")), "turns")
CPU = ("cpu.forward", "cpu.pairs", "cpu.tiles", "quantize", *REFERENCE)
EVERYTHING = "operator"  # the family of all modules of the operator
PARTS: dict[str, Callable[[str], bool]] = {  # families of some of them, by name of the module
    "scoring": lambda module: not module.startswith(("search.", "gpu.search.", "cpu.")),  # on a GPU
    "device": lambda module: not module.startswith("cpu."),  # and searching there
    "kernels": lambda module: module.startswith(("gpu.", "chamfer.")) or module == "topk",  # which sizes a group of scores
}
FAMILIES = {  # roots: modules of the operator
    "forward": FORWARD,  # float tokens of up to 256 bytes
    "codes": CODES,  # INT8 and FP8
    "coded": (*CODES, "gpu.coded.coded", "coded"),  # tokens of few bits, scored as they are stored
    "wide": (*FORWARD, "gpu.forward.wide"),  # float tokens of any width
    "training": (*FORWARD, *BACKWARD),  # kernels of a step alone
    "step": (*FORWARD, *BACKWARD, *CALLS),  # a step with its host
    "chamfer": ("chamfer.chamfer", "chamfer.nearest"),
    "streaming": (*CODES, "streaming.streaming", "topk"),
    "search": (*CODES, *CALLS, *SEARCH, "search.device"),
    "host": (*FORWARD, *CALLS),
    "libraries": (*FORWARD, *CALLS, *LIBRARIES),
    "cpu": CPU,
    "search-cpu": (*CPU, *SEARCH, "cpu.some"),
    "reference": REFERENCE,
}
ON_A_CPU = ("cpu", "search-cpu", "reference")
TOOLKIT = {  # roots: modules of the toolkit, which are followed wherever they lead
    "encoding": ("cache.embeddings", "encoders.names"),
    "evaluation": ("api",),
    "planning": ("cli.plan",),
    "proving": ("crc.device_ranges", "crc.device_rows"),
    "atlas": ("atlas.running", "atlas.judging"),
}


def digests(package: Path, toolkit: Path = TOOLKIT_FOLDER) -> dict[str, str]:
    """The digest of every family, by the operator and the toolkit in these folders."""
    found = {
        family: _digest(package, PACKAGE, roots, CPU_ROOMS if family in ON_A_CPU else ROOMS)
        for family, roots in FAMILIES.items()
    }
    every = sorted(path.relative_to(package).with_suffix("") for path in package.rglob("*.py") if path.name != "__init__.py")
    modules = tuple(".".join(path.parts) for path in every)
    found[EVERYTHING] = _digest(package, PACKAGE, modules, ())
    found |= {family: _digest(package, PACKAGE, tuple(filter(has, modules)), ()) for family, has in PARTS.items()}
    return found | {family: _digest(toolkit, TOOLKIT_PACKAGE, roots, None) for family, roots in TOOLKIT.items()}


def _digest(package: Path, name: str, roots: tuple[str, ...], rooms: tuple[str, ...] | None) -> str:
    """The digest of modules and of all that they import, from these rooms of the package (None: from any)."""
    waiting, code = list(roots), dict[str, str]()
    while waiting:
        one = waiting.pop()
        if one not in code:
            code[one], imported = _read(_file(package, one).read_text(encoding="utf-8"), name)
            followed = (
                other for other in imported if rooms is None or (other.partition(".")[0] in rooms and other not in NOT_FOLLOWED)
            )
            waiting += [other for other in followed if other and _file(package, other).exists()]
    held = "".join(f"{one}\0{code[one]}\0" for one in sorted(code))
    return hashlib.sha256(held.encode()).hexdigest()[:16]


@cache
def _read(text: str, package: str) -> tuple[str, list[str]]:
    """What a file's code says, and which modules of its package it may import."""
    tree = ast.parse(text)
    return said(tree), list(_imported(tree, package))


def _file(package: Path, name: str) -> Path:
    path = package.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """What code imports from a package, as modules without its name; some are names inside a module, and have no file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            above = str(node.module)[len(package) + 1 :]
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
