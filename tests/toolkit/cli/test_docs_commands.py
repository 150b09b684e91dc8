"""Command lines in the documentation: the command is there, has these options, and the public datasets have cards."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from maxsim_eval.cli.app import app
from maxsim_eval.data.cards import load_card
from maxsim_eval.errors import UnknownNameError
from places import ROOT

PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / name / "README.md" for name in (".", "datasets", "embeddings_cache", "kernels"))]
)
CARDS = ("beir", "real-mm-rag", "demo")
LINE = re.compile(r"\b(?:python|torchrun)\b[^#\n]*?\bevaluate\.py[ \t]+(?P<words>\S.*)")
MENTION = re.compile(r"(?:(?:python|torchrun)\b[^`]*\s)?evaluate\.py\s+(?P<words>\S[^`]*)")
PLACEHOLDER = re.compile(r"<[^>]*>|\.\.\.|\[[^\]]*\]|\*")


@dataclass(frozen=True)
class Said:
    """A command line: its words behind `evaluate.py`, and whether it is whole or only named in a sentence."""

    page: Path
    text: str
    whole: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: evaluate.py {self.text}"


def said_in(page: Path, text: str) -> Iterator[Said]:
    """Lines of code blocks that run the program (continued ones joined), and `evaluate.py ...` in sentences."""
    blocks = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
    for block in blocks.findall(text):
        for line in LINE.finditer(re.sub(r"\\\n\s*", " ", block)):
            yield Said(page, line["words"], whole=True)
    for span in re.findall(r"`([^`]+)`", blocks.sub("", text)):
        if found := MENTION.fullmatch(span):
            yield Said(page, " ".join(found["words"].split()), whole=False)


def wrong_in(said: Said) -> list[str]:
    """What is wrong with a command line, in words."""
    words = shlex.split(said.text, comments=True)
    command: Any = typer.main.get_command(app)
    path = []
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return [] if PLACEHOLDER.search(words[0]) else [f"no command {words[0]!r}"]
        path.append(words[0])
        command = command.commands[words.pop(0)]
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}
    wrong, positional, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            positional.append(word)
        elif name not in options and name != "--help":
            wrong.append(f"{' '.join(path)} has no option {name}")
        elif name in options and not options[name].is_flag and not equals and rest:
            rest.pop(0)
    source, names = (path[0], positional[:1]) if path[:1] in [[one] for one in CARDS] else ("", [])
    if not source and len(positional) > 1 and positional[0] in CARDS:
        source, names = positional[0], positional[1:2]
    for name in names:
        if not PLACEHOLDER.search(name) and not name.isupper():
            try:
                load_card(source, name)
            except UnknownNameError as error:
                wrong.append(str(error))
    if not wrong and said.whole and "--help" not in words and not any(map(PLACEHOLDER.search, words)):
        try:
            command.make_context(" ".join(path), words)  # parses and converts; runs nothing
        except Exception as error:  # noqa: BLE001 (whatever the parser raises: it is what a reader would be told)
            wrong.append(f"{type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_command_lines_of_the_documentation(page: Path) -> None:
    found = list(said_in(page, page.read_text(encoding="utf-8")))
    wrong = [f"{said}\n    {'; '.join(what)}" for said in found if (what := wrong_in(said))]
    assert not wrong, "\n" + "\n".join(wrong)


def test_command_lines_are_found() -> None:
    found = {said.text.split()[0] for page in PAGES for said in said_in(page, page.read_text(encoding="utf-8"))}
    assert {"beir", "real-mm-rag", "local", "import", "encode", "convert", "inspect", "plan", "cache", "gate"} <= found


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("```\npython evaluate.py import real-mm-rag FinReport a.pt --encoder x\n```", "FinReport"),
        ("```\n.venv/bin/python evaluate.py beir scifct  # a comment\n```", "scifct"),
        ("```\ntorchrun --nnodes 2 \\\n    evaluate.py beir nq \\\n    --memory 8GB\n```", "beir has no option --memory"),
        ("```\npython evaluate.py real-mm-rag finreport --rephrase three\n```", "BadParameter"),
        ("```\npython evaluate.py import beir nq a.pt\n```", "MissingParameter"),
        ("text `evaluate.py evalute` text", "no command 'evalute'"),
        ("text `python evaluate.py\ncache lst`", "no command 'lst'"),
        ("```\npython evaluate.py cache rm beir scifact --sure\n```", "cache rm has no option --sure"),
    ],
)
def test_mistakes_are_found(text: str, what: str) -> None:
    (said,) = said_in(ROOT / "README.md", text)
    assert what in "; ".join(wrong_in(said))


@pytest.mark.parametrize(
    "text",
    [
        "```\npython evaluate.py beir <name> --paths fp32\n```",
        "```\npython evaluate.py beir nq queries.pt ...\n```",
        "`evaluate.py compare A B`",
        "`evaluate.py inspect`",
        "`evaluate.py --help`",
        "`python evaluate.py local <name>`",
    ],
)
def test_placeholders_and_names_are_no_mistakes(text: str) -> None:
    (said,) = said_in(ROOT / "README.md", text)
    assert wrong_in(said) == []
