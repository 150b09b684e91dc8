"""Encoding by several forked ranks, for test_cli_encode_ranks.py: the same files as by one process, and what can go wrong.

Run as `python drive_encode.py SCENARIO FOLDER`; prints one JSON object of what happened. Corpus and forks are those of drive.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

import filelock
import torch
from drive import Child, begin, command, outcome, prepare, result, single, wait

from maxsim_eval.cache import filling, sides
from maxsim_eval.data import loading
from maxsim_eval.encoders import lexical
from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.errors import DataError
from maxsim_eval.processes import agreement, world
from maxsim_eval.types import Role
from maxsim_kernels import Packed

SHARD, CHUNK = 40, 8  # documents: 23 shards of 5 calls of the encoder
ENCODE = ("encode", "local", "ties")
LEXICAL = (*ENCODE, "--encoder", "lexical")


def checkpoint(folder: Path) -> str:
    """A tiny random BERT."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *sorted({"red", "fox", "blue", "whale", "frog", "owl", "old", "toad"}),
    ]
    BertTokenizerFast(vocab={word: n for n, word in enumerate(words)}, model_max_length=20).save_pretrained(folder)
    torch.manual_seed(0)
    layers = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=24, **layers)).save_pretrained(folder)
    return f"hf:{folder}"


def files(folder: Path) -> dict[str, str]:
    """Everything in a cache, by content; but for locks."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def shards(folder: Path) -> dict[str, int]:
    """Finished shards of documents -> inode (another one, if it was written again)."""
    return {path.name: path.stat().st_ino for path in folder.glob("local/ties/*-documents-*/[0-9]*.h5")}


def slow(rank: int, seconds: float = 0.004) -> None:
    """Encoding takes a while, so that every rank comes to its turn, and says who encoded what in `by.<rank>`."""
    for kind in (lexical.LexicalEncoder, HfEncoder):

        def encode(self: Any, items: Sequence[Any], role: Role, original: Any = kind.encode) -> Packed:
            time.sleep(seconds)
            with open(f"by.{rank}", "a") as said:
                said.write(f"{role}\n")
            return original(self, items, role)

        kind.encode = encode  # type: ignore[method-assign]


def met(count: int) -> Child:
    """As `slow`, and nobody takes a third shard before all have encoded something: on a busy machine the others load their model late."""

    def child(rank: int) -> None:
        slow(rank)
        for kind in (lexical.LexicalEncoder, HfEncoder):

            def encode(self: Any, items: Sequence[Any], role: Role, original: Any = kind.encode) -> Packed:
                found = original(self, items, role)
                Path(f"ready.{rank}").touch()  # its model is loaded
                end = time.monotonic() + 60
                while len(list(Path().glob("ready.*"))) < count and Path(f"by.{rank}").read_text().count("document") >= 10:
                    assert time.monotonic() < end, "the other ranks never began"
                    time.sleep(0.01)
                return found

            kind.encode = encode  # type: ignore[method-assign]

    return child


def together(count: int, folder: Path, words: Sequence[str], change: Child = slow) -> dict[str, Any]:
    """One command by several ranks; `by` is what each of them encoded."""
    for old in (*folder.glob("by.*"), *folder.glob("ready.*")):
        old.unlink()
    began = time.monotonic()
    found = outcome(folder, wait(begin(count, folder, command(*words), change)))
    said = [folder / f"by.{rank}" for rank in range(count)]
    by = [path.read_text().split() if path.exists() else [] for path in said]
    return {**found, "by": by, "seconds": time.monotonic() - began}


def runs_out_of_memory(rank: int) -> None:
    """As `encoding.Batches` says it; and a library that grumbles, which every process would repeat."""
    slow(rank)
    encode = lexical.LexicalEncoder.encode

    def warning(self: Any, items: Sequence[Any], role: Role) -> Packed:
        if rank:
            text = f"x: out of memory on cuda:{rank} with 32 texts at once; continuing with 16"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
        warnings.warn("a library's own", FutureWarning, stacklevel=1)
        return encode(self, items, role)

    lexical.LexicalEncoder.encode = warning  # type: ignore[method-assign]


def starts(rank: int) -> None:
    """The leader goes on only when rank 1 starts its model, which warns of memory."""
    made, start, encode = HfEncoder.__init__, sides.TaskSide.start, HfEncoder.encode

    def several(self: Any, *rest: Any, **options: Any) -> None:
        made(self, *rest, **options)
        self.at_once = 2  # as on a GPU

    def starting(self: sides.TaskSide, *rest: Any) -> None:
        end = time.monotonic() + 60
        while rank == 0 and not Path("started").exists():
            assert time.monotonic() < end, "rank 1 waits for the leader"
            time.sleep(0.01)
        Path("started").touch()
        start(self, *rest)

    def warning(self: Any, items: Sequence[Any], role: Role) -> Packed:
        if rank and not Path("oom.said").exists():
            Path("oom.said").touch()
            warnings.warn(f"x: out of memory on cuda:{rank}; continuing with 16", RuntimeWarning, stacklevel=1)
        return encode(self, items, role)

    HfEncoder.__init__, sides.TaskSide.start, HfEncoder.encode = several, starting, warning  # type: ignore[method-assign]


def same(folder: Path) -> dict[str, Any]:
    """One cache by one process, two ranks and three; with and without a model, of all documents and of some, and an evaluation."""
    hf = checkpoint(folder / "tiny")
    found: dict[str, Any] = {}
    for name, words in (
        ("lexical", LEXICAL),
        ("hf", (*ENCODE, "--encoder", hf, "--embedding-dtype", "float16", "--batch-size", "3")),
    ):
        single(folder, *words, "--quiet", "--cache-dir", f"{name}-1")
        found[name] = {"1": files(folder / f"{name}-1")}
        for count in (2, 3):
            ended = together(count, folder, (*words, "--cache-dir", f"{name}-{count}"), met(count))
            found[name][str(count)] = {**ended, "files": files(folder / f"{name}-{count}")}
    evaluating = ("local", "ties", "--paths", "fp16", "--quiet", "--encoder", hf, "--limit-documents", "333", "--out")
    one = single(folder, *evaluating, "out1", "--cache-dir", "some-1")
    two = together(2, folder, (*evaluating, "out2", "--cache-dir", "some-2"))
    found["evaluated"] = {
        "1": {**one, **result(folder, "out1"), "files": files(folder / "some-1")},
        "2": {**two, **result(folder, "out2"), "files": files(folder / "some-2")},
    }
    found["warned"] = together(3, folder, (*LEXICAL, "--quiet", "--cache-dir", "warned"), runs_out_of_memory)
    words = (*ENCODE, "--encoder", hf, "--max-document-tokens", "5", "--quiet", "--cache-dir")
    single(folder, *words, "started-1")
    ended = together(2, folder, (*words, "started-2"), starts)
    found["started"] = {"1": files(folder / "started-1"), "2": {**ended, "files": files(folder / "started-2")}}
    ready = together(2, folder, (*LEXICAL, "--json", "--cache-dir", "lexical-1"))
    found["there"] = {**ready, "files": files(folder / "lexical-1")}
    return found


def tries_the_lock(rank: int) -> None:
    """Rank 1 writes its first shard after two seconds, in which the leader does all the rest; then nobody else may write."""
    write = filling.write_shard

    def last(path: Path, *rest: Any) -> int:
        if rank == 1 and not Path("held").exists():
            time.sleep(2.0)
            try:
                filelock.FileLock(path.parent / ".lock").acquire(timeout=0)
            except filelock.Timeout:
                Path("held").write_text(str(len(list(path.parent.glob("[0-9]*.h5")))))
        return write(path, *rest)

    filling.write_shard = last


def resumes(folder: Path) -> dict[str, Any]:
    """Ranks killed in the middle; other numbers of ranks go on from what they left. Nobody else writes while they do."""
    single(folder, *LEXICAL, "--quiet", "--cache-dir", "whole")
    found: dict[str, Any] = {"whole": files(folder / "whole")}
    ended = together(2, folder, (*LEXICAL, "--cache-dir", "locked", "--quiet"), tries_the_lock)
    held = folder / "held"
    found["locked"] = {**ended, "held": held.read_text() if held.exists() else "", "files": files(folder / "locked")}
    world.SILENCE, world.PATIENCE = 2.0, 4.0

    def dies(dead: int) -> Child:
        def change(rank: int) -> None:
            slow(rank)
            write, count = filling.write_shard, [0]

            def last(*rest: Any) -> int:
                count[0] += 1
                if rank == dead and count[0] > 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(*rest)

            filling.write_shard = last

        return change

    for name, dead in (("follower", 1), ("leader", 0)):
        ended = together(3, folder, (*LEXICAL, "--cache-dir", name), dies(dead))
        found[f"{name} killed"] = {**ended, "shards": shards(folder / name), "count": len(files(folder / name))}
        shutil.copytree(folder / name, folder / f"{name}-copy")
        again = together(2, folder, (*LEXICAL, "--cache-dir", name))
        found[f"{name} again"] = {**again, "shards": shards(folder / name), "files": files(folder / name)}
        alone = single(folder, *LEXICAL, "--quiet", "--cache-dir", f"{name}-copy")
        found[f"{name} alone"] = {**alone, "files": files(folder / f"{name}-copy")}
    return found


def failures(folder: Path) -> dict[str, Any]:
    """What can go wrong on one rank of three."""
    world.SILENCE, world.PATIENCE = 2.0, 4.0
    filling.PATIENCE = agreement.PATIENCE = 0.5

    def raises(error: BaseException) -> Child:
        def change(rank: int) -> None:
            slow(rank)
            if rank == 1:
                encode, count = lexical.LexicalEncoder.encode, [0]

                def failing(self: Any, items: Sequence[Any], role: Role) -> Packed:
                    count[0] += 1
                    if count[0] > 7:  # in its second shard
                        raise error
                    return encode(self, items, role)

                lexical.LexicalEncoder.encode = failing  # type: ignore[method-assign]

        return change

    def other_texts(rank: int) -> None:
        load = loading.load_task

        def changed(*words: Any, **options: Any) -> Any:
            task = load(*words, **options)
            return dataclasses.replace(task, documents=[*list(task.documents)[:-1], "another"])

        if rank == 2:
            loading.load_task = changed

    def elsewhere(rank: int) -> None:
        if rank == 2:
            other = folder / "elsewhere"
            other.mkdir(exist_ok=True)
            (other / "datasets").symlink_to(folder / "datasets")
            os.chdir(other)

    def no_data(rank: int) -> None:
        if rank == 1:
            (folder / "nowhere").mkdir(exist_ok=True)
            os.chdir(folder / "nowhere")

    def other_library(rank: int) -> None:
        version = sides._version
        if rank == 2:
            sides._version = lambda name: "0.1" if name == "h5py" else version(name)

    cases: dict[str, tuple[Child, tuple[str, ...]]] = {
        "not finite": (raises(DataError("embeddings: token 3 of 'c77' holds NaN")), ()),
        "bug": (raises(ZeroDivisionError("a bug")), ()),
        "interrupted": (raises(KeyboardInterrupt()), ()),
        "other texts": (other_texts, ()),
        "elsewhere": (elsewhere, ()),
        "no data": (no_data, ()),
        "threads": (lambda rank: torch.set_num_threads(1 + rank), ()),
        "other library": (other_library, ()),
        "no device": (lambda rank: None, ("--device", "cuda")),
        "unknown": (lambda rank: None, ("--encoder", "lexicon")),
        "usage": (lambda rank: None, ("--batch-size", "0")),
    }
    found = {}
    for name, (change, extra) in cases.items():
        place = name.replace(" ", "-")
        ended = together(3, folder, (*LEXICAL, "--quiet", "--cache-dir", place, *extra), change)
        left = [path for path in files(folder / place) if path.endswith(".tmp")] if (folder / place).exists() else []
        found[name] = {**ended, "shards": len(shards(folder / place)), "left": left}
    return found


if __name__ == "__main__":
    place = Path(sys.argv[2]).resolve()
    prepare(place)
    sides.LEAST, sides.CHUNK = SHARD, CHUNK
    scenarios = {"same": same, "resumes": resumes, "failures": failures}
    print(json.dumps(scenarios[sys.argv[1]](place)))
