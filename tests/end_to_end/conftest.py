"""What the end-to-end tests share: the command line in this process or a fresh one, a finished demo run, small collections."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

LEFTOVERS = (".tmp", ".old", ".download")


@dataclass(frozen=True)
class Outcome:
    """What a command gave."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *texts: str, ways: bool = False) -> None:
        """It must have ended with `code` and one line on stderr that holds all `texts`; `ways`: and lines of what can be done."""
        assert self.code == code, self.err
        assert self.out == ""
        lines = self.err.strip().splitlines()
        assert (len(lines) > 1) if ways else (len(lines) == 1), self.err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in self.err
        for text in texts:
            assert text in (self.err if ways else lines[0]), f"{text!r} is not said: {self.err}"

    def fine(self) -> Outcome:
        """It must have ended well."""
        assert self.code == 0, self.err
        return self


def _run(*arguments: str | Path, cwd: Path) -> Outcome:
    """The command line in this process, in folder `cwd`; anything but a clean exit fails the test."""
    from maxsim_eval.cli.app import main

    words = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    saved, threads = (sys.argv, sys.excepthook), torch.get_num_threads()
    sys.argv = ["evaluate.py", *words]
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other would cost most of the time
    code: object = "main() returned, it must exit"
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            # Warnings meant for users are printed, as without pytest; those of libraries' numerics stay errors.
            warnings.filterwarnings("default", category=UserWarning)
            main(words)
    except SystemExit as exited:
        code = exited.code
    finally:
        sys.argv, sys.excepthook = saved
        torch.set_num_threads(threads)
    assert code is None or isinstance(code, int), code
    return Outcome(code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def cli() -> Callable[..., Outcome]:
    """`cli("demo", "--quiet", cwd=folder) -> Outcome`, in this process."""
    return _run


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """`start(arguments, cwd)`: a fresh Python, output piped, torch on one thread."""

    def begin(arguments: Sequence[str | Path], cwd: Path) -> subprocess.Popen[str]:
        words = [sys.executable, *map(str, arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


@dataclass(frozen=True)
class Demo:
    """`evaluate.py demo` run once from nothing; treat as read-only, or work on a `copy`."""

    folder: Path
    outcome: Outcome

    @property
    def results(self) -> Path:
        """Folder of the report."""
        return self.folder / "results" / "demo-small-lexical"

    @property
    def result(self) -> dict[str, Any]:
        """The parsed result.json."""
        return dict(json.loads((self.results / "result.json").read_text(encoding="utf-8")))

    def copy(self, target: Path, *parts: str) -> Path:
        """A copy of the whole folder, or of some of datasets, embeddings_cache, results."""
        for part in parts or ("datasets", "embeddings_cache", "results"):
            shutil.copytree(self.folder / part, target / part)
        return target


@pytest.fixture(scope="session")
def demo(cli: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The finished demo."""
    folder = tmp_path_factory.mktemp("demo")
    return Demo(folder, cli("demo", cwd=folder))


CORPUS = {
    "d1": "red fox runs",
    "d2": "blue whale swims",
    "d3": "",
    "d4": "green frog jumps",
    "d5": "red fox runs",
    "d6": "quiet owl",
}
QUERIES = {"q1": "red fox", "q2": "frog in green", "q3": "an owl"}
QRELS = (("q1", "d1", 1), ("q1", "d5", 2), ("q2", "d4", 1), ("q3", "d6", 1), ("q3", "d2", 0))


@pytest.fixture(scope="session")
def collection() -> Callable[..., Path]:
    """`collection(folder, corpus=, queries=, qrels=, header=)` writes a small set in BEIR layout and returns its folder."""

    def write(
        folder: Path,
        corpus: Mapping[str, str] = CORPUS,
        queries: Mapping[str, str] = QUERIES,
        qrels: Sequence[tuple[str, str, int]] = QRELS,
        header: str = "query-id\tcorpus-id\tscore\n",
    ) -> Path:
        (folder / "qrels").mkdir(parents=True)
        for name, texts in (("corpus", corpus), ("queries", queries)):
            lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        rows = "".join(f"{query}\t{document}\t{score}\n" for query, document, score in qrels)
        (folder / "qrels" / "test.tsv").write_text(header + rows, encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def clean() -> Callable[[Path], None]:
    """`clean(folder)`: nothing half written is anywhere below, and no result."""

    def check(folder: Path) -> None:
        everything = [path.relative_to(folder) for path in folder.rglob("*")]
        left = [path for path in everything if path.name.endswith(LEFTOVERS)]
        assert left == [], f"left behind: {left}"
        results = [path for path in everything if path.name in ("result.json", "report.md")]
        assert results == [], f"a failed command wrote {results}"

    return check


@pytest.fixture
def torch_file() -> Callable[..., Path]:
    """`torch_file(path, queries, documents, qrels)`: embeddings in the paper's layout; sides are {id: [tokens, d] tensor}."""

    def write(
        path: Path,
        queries: Mapping[str, torch.Tensor],
        documents: Mapping[str, torch.Tensor],
        qrels: Mapping[str, Mapping[str, int]] | None = None,
    ) -> Path:
        padded = torch.nn.utils.rnn.pad_sequence(list(queries.values()), batch_first=True)
        meta: dict[str, Any] = {"query_ids": list(queries), "doc_ids": list(documents)}
        content = {
            "query_embeddings": padded,
            "query_lengths": torch.tensor([len(tokens) for tokens in queries.values()]),
            "doc_embeddings": list(documents.values()),
            "meta": meta if qrels is None else {**meta, "qrels": {key: dict(row) for key, row in qrels.items()}},
        }
        torch.save(content, path)
        return path

    return write


@pytest.fixture
def report(demo: Any, tmp_path: Path) -> Path:
    """A copy of the demo's report, at results/demo-small-lexical below tmp_path."""
    return Path(demo.copy(tmp_path, "results")) / "results" / "demo-small-lexical"


@pytest.fixture
def qrels(demo: Any) -> Path:
    return Path(demo.folder / "datasets" / "demo" / "small" / "qrels" / "test.tsv")


@pytest.fixture
def piped() -> Iterator[Callable[[str], Path]]:
    """`piped(text)`: what a shell gives for `<(...)`, a path that gives the text once."""
    ends = []

    def pipe(text: str) -> Path:
        read, write = os.pipe()
        ends.append(read)
        with open(write, "w", encoding="utf-8") as end:
            end.write(text)
        return Path(f"/dev/fd/{read}")

    yield pipe
    for end in ends:
        os.close(end)
