"""Every command line of a code block in the documentation is run, page by page as a reader would, and every example of `--help`.

Data are small stand-ins: BEIR sets are collections in their folders, trained encoders are embeddings imported under their names, page
images are a local set. Options of `DROPPED` are left out, torchrun's commands run as one process. Not run are those of `NOT_RUN`,
`bench` and `demo` of `--help`, and commands within sentences.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toolkit" / "cli"))

import typer
from test_docs_commands import PAGES, PLACEHOLDER, Said, said_in

from maxsim_eval.cli.app import app
from places import ROOT

pytestmark = pytest.mark.slow

DIM = 16
PAGE_SETS = ("finreport", "techslides")
BEIR_SETS = ("scifact", "nq", "hotpotqa", "nfcorpus", "fiqa")
TRAINED = ("colbertv2", "colpali", "gve")
# What a stand-in cannot have, and folders that are not the stand-ins': these words are left out of a command.
DROPPED = {"--rephrase": 2, "--trust-remote-code": 1, "--batch-size": 2, "--processes": 2, "--data-dir": 2, "--cache-dir": 2}
# Imports of one side alone of a set of pages, for which there is no stand-in.
NOT_RUN = [
    "import real-mm-rag finreport --queries q3.pt --encoder colpali --rephrase 3",
    "import local /data/my-pages --queries p.pt --encoder colpali --page-queries",
    "import real-mm-rag finreport documents.pt --encoder colpali",
]


def unit(seed: int, count: int, longest: int = 9) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=rng).tolist()
    return [torch.nn.functional.normalize(torch.randn(length, DIM, generator=rng), dim=-1) for length in lengths]


class World:
    """A folder with everything that the documentation speaks of."""

    def __init__(self, home: Path, cli: Callable[..., Any], collection: Callable[..., Path]) -> None:
        self.home, self.cli = home, cli
        draw = random.Random(0)
        # No near ties, which INT8 would decide anew.
        words = ["".join(draw.choices("abcdefghijklmnop", k=7)) for _ in range(400)]
        names = {14: "14717500"}  # a document of SciFact that a page names
        corpus = {names.get(n, str(n)): " ".join(draw.sample(words, 12 + n % 9)) for n in range(12, 40)}
        queries = {str(n): " ".join(corpus[str(12 + n * 3)].split()[:6]) for n in range(1, 6)}
        qrels = [(query, str(12 + int(query) * 3 + more), 1) for query in queries for more in (0, 1)]
        for name in BEIR_SETS:
            collection(home / "datasets" / "beir" / name, corpus=corpus, queries=queries, qrels=qrels)
        sides = {
            "query": dict(zip(queries, unit(1, len(queries)), strict=True)),
            "document": dict(zip(corpus, unit(2, len(corpus)), strict=True)),
        }
        self.write_embeddings(sides)
        self.make_pages()
        (home / "my_kernels.py").write_text(
            "import torch\nfrom maxsim_kernels import maxsim\n\n\ndef score(queries, documents):\n    return maxsim(queries, documents)\n"
        )
        run = [
            f"{query} Q0 {name} {rank} {50 - rank} bm25" for query in queries for rank, name in enumerate(list(corpus)[:20], 1)
        ]
        (home / "bm25.trec").write_text("\n".join(run) + "\n")
        for name in BEIR_SETS:
            cli("import", "beir", name, "scifact.pt", "--encoder", "colbertv2", "--quiet", cwd=home).fine()
        for name in ("a", "b"):
            cli("beir", "scifact", "--encoder", "lexical", "--quiet", "--out", f"results/{name}", cwd=home).fine()
        (home / "ci").mkdir()
        (home / "models").mkdir()

    def write_embeddings(self, sides: dict[str, dict[str, torch.Tensor]]) -> None:
        home, (queries, documents) = self.home, (sides["query"], sides["document"])

        def padded(side: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.nn.utils.rnn.pad_sequence(list(side.values()), batch_first=True), torch.tensor(
                list(map(len, side.values()))
            )

        query, document = {}, {}
        query["query_embeddings"], query["query_lengths"] = padded(queries)
        document["doc_embeddings"], document["doc_lengths"] = padded(documents)
        whole = {**query, **document, "meta": {"query_ids": list(queries), "doc_ids": list(documents)}}
        for name in ("scifact.pt", "colbertv2.pt"):
            torch.save(whole, home / name)
        torch.save({**query, "meta": {"query_ids": list(queries)}}, home / "queries.pt")
        ids, half = list(documents), len(documents) // 2
        for number, part in enumerate((ids[:half], ids[half:])):
            held, lengths = padded({name: documents[name] for name in part})
            torch.save(
                {"doc_embeddings": held, "doc_lengths": lengths, "meta": {"doc_ids": part}}, home / f"documents_{number}.pt"
            )
        np.savez(
            home / "queries.npz", **{name: value.numpy() for name, value in query.items()}, query_ids=np.array(list(queries))
        )
        np.savez(home / "documents.npz", **{name: value.numpy() for name, value in document.items()}, doc_ids=np.array(ids))
        np.save(home / "documents.npy", torch.cat(list(documents.values())).numpy())
        np.save(home / "documents.offsets.npy", np.cumsum([0, *map(len, documents.values())]))
        (home / "documents.ids.txt").write_text("\n".join(ids) + "\n")
        for side, held in (("queries", queries), ("documents", documents)):
            (home / side).mkdir()
            for name, tokens in held.items():
                torch.save(tokens, home / side / f"{name}.pt")

    def make_pages(self) -> None:
        for name in PAGE_SETS:
            folder = self.home / "datasets" / "local" / name
            (folder / "pages").mkdir(parents=True)
            (folder / "qrels").mkdir()
            pages = [f"report_page_{number}" for number in range(5, 12)]
            for number, page in enumerate(pages):
                Image.new("RGB", (40, 60), (255, 20 * number, 99)).save(folder / "pages" / f"{page}.png")
            queries = [str(number) for number in range(1, 5)]
            (folder / "queries.jsonl").write_text(
                "".join(json.dumps({"_id": query, "text": "which?"}) + "\n" for query in queries)
            )
            rows = [f"{query}\treport_page_{4 + int(query)}\t1" for query in queries]
            (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(rows) + "\n")
            asked = torch.nn.utils.rnn.pad_sequence(unit(3, len(queries)), batch_first=True)
            held = torch.stack([torch.cat([tokens, tokens, tokens])[:4] for tokens in unit(4, len(pages), 5)])
            meta = {"query_ids": queries, "doc_ids": pages}
            whole = {"query_embeddings": asked, "doc_embeddings": held, "meta": meta}
            torch.save(whole, self.home / f"{name}.pt")
            for encoder in ("colpali", "gve"):
                words = ("import", "local", name, f"{name}.pt", "--encoder", encoder, "--quiet")
                self.cli(*words, cwd=self.home).fine()

    def words_of(self, text: str) -> list[str] | None:
        """The command's words, its data the stand-ins; None where it names what no stand-in is for."""
        words = shlex.split(text.replace("/data/", "data/").replace("/shared/", "shared/"), comments=True)
        if any(map(PLACEHOLDER.search, (word for word in words if "*" not in word))) or "--help" in words:
            return None
        found: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word in DROPPED:
                del rest[: DROPPED[word] - 1]
            elif word == "real-mm-rag":
                found.append("local")
            elif word == "irds":
                found += ["beir", rest.pop(0).split("/")[1]]
            elif word == "--encoder" and rest[0].partition(":")[0] not in (*TRAINED, "lexical"):
                rest[0] = "lexical"
                found.append(word)
            elif word == "--queries" and rest[0] == "pages":
                rest.pop(0)
            elif "*" in word:
                found += sorted(path.name for path in self.home.glob(word))
            else:
                found.append(word)
        if "real-mm-rag" in words and "--encoder" not in words:
            found += ["--encoder", "colpali"]
        if found[:1] == ["import"]:
            found.append("--replace")
            if "finreport" in found or "--page-queries" in found:
                return None
        if found[:2] == ["cache", "rm"]:
            found.append("--yes")
        return found


@pytest.fixture(scope="module")
def world(cli: Any, collection: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("docs"), cli, collection)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_the_documentation_shows_runs(page: Path, world: World) -> None:
    failed = []
    for said in said_in(page, page.read_text(encoding="utf-8")):
        words = world.words_of(said.text) if said.whole else None
        if words is not None:
            failed += complaints(said, words, world)
    assert not failed, "\n".join(failed)


def complaints(said: Said | str, words: list[str], world: World) -> list[str]:
    outcome = world.cli(*words, cwd=world.home)
    return (
        []
        if outcome.code == 0
        else [f"{said}\n  as {shlex.join(words)}\n  exit {outcome.code}: {outcome.err[-600:]} {outcome.out[-500:]}"]
    )


def examples(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The examples in the help of every command."""
    for name, below in getattr(command, "commands", {}).items():
        yield from examples(below, (*path, name))
    for line in re.findall(r"evaluate\.py (.+)", command.help or ""):
        if not hasattr(command, "commands"):
            yield line


def test_the_examples_of_help_run(world: World) -> None:
    found = list(examples(typer.main.get_command(app)))
    assert len(found) > 15
    stand_ins = {
        "results/a/result.json": "results/a",
        "tests/baselines/scifact-lexical.json": "ci/retrieval-baseline.json",
        "my-corpus": "datasets/beir/nq",
        "qrels.txt": "datasets/beir/scifact/qrels/test.tsv",
        "other.trec": "results/b/runs/int8.trec",
        " run.trec": " results/a/runs/fp32.trec",
    }
    failed = []
    for line in found:
        absent = [word for word in line.split() if word.startswith("tests/") and not (ROOT / word).is_file()]
        failed += [f"{line}: there is no {word}" for word in absent]
        text = functools.reduce(lambda text, name: text.replace(name, stand_ins[name]), stand_ins, line)
        words = world.words_of(text)
        if words is None:
            failed.append(f"{line}: is not run")
            continue
        if words[0] in ("bench", "demo"):
            continue
        if words[0] == "gate" and not (world.home / "ci" / "retrieval-baseline.json").exists():
            failed += complaints(line, [*words, "--update-baseline"], world)
        failed += complaints(line, words, world)
    assert not failed, "\n".join(failed)


def test_all_others_are_run(world: World) -> None:
    every = [said.text for page in PAGES for said in said_in(page, page.read_text(encoding="utf-8")) if said.whole]
    assert len(every) >= 50
    assert [text.partition("#")[0].strip() for text in every if world.words_of(text) is None] == NOT_RUN
