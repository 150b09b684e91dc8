"""The whole of `python evaluate.py beir hotpotqa`, rehearsed: a corpus with HotpotQA's published counts, by phase, beside its floors.

    python benchmarks/rehearsal.py [--json FILE] [--folder DIR] [--encoded 10] [--scored 5] [--gpus 1] [--only scored --beside FILE]
    python benchmarks/rehearsal.py --folder DIR --make        only the data: later calls with that folder and these parts use it

Nothing is downloaded. Two runs of the real command with its defaults but for what is said here, each in a process of its own with
clocks around its phases (`measure/command.py`), and before each of them what `plan` predicts of it:

- `encoded`: 1/10 of 5,233,329 passages of made-up words (lognormal, 46 words on average, as published), encoded by a random
  BERT-base of ColBERTv2's shape and cached. It is scored by fp16 alone: what scoring takes is measured by the other run.
- `scored`: 1/5 of the passages with random unit vectors in the cache under the default encoder's name, and all 7,405 queries of 32
  tokens: every pair is scored by fp32, fp16 and int8, compared and reported.

Each phase is extrapolated linearly in the documents (what depends on queries alone, or on nothing, is not), beside its floor: bytes, or
operations, over a rate of this machine that is measured first. What it cannot show: files are in the page cache when they are read
back, words are made up, scores of random vectors have no near ties.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encoding import make_checkpoints
from measure.session import kernels
from results.file import write
from tables.quoted import phase_cells

SCHEMA = "maxsim-eval/rehearsal/1"
DOCUMENTS, QUERIES, RELEVANT = 5_233_329, 7_405, 2
WORDS, SPREAD, LONGEST, QUERY_WORDS = 46.3, 0.6, 250, 17
TOKENS, MOST_TOKENS, QUERY_TOKENS, DIM = 66.0, 256, 32, 128
VOCABULARY = 50_000
ROOT = Path(__file__).resolve().parents[1]
# Phases of `plan` and the measured ones that are the same work; other phases have the same name in both.
PLANNED = {
    "start": (("start",), ("read texts", "hash texts", "look in the cache", "start and the rest")),
    "encode": (("encode",), ("start the encoder", "wait for the others", "encode and write", "encode the queries")),
    "comparison and report": (("compare", "finish"), ("compare full scores", "metrics", "statistics", "runs and report")),
}
OF_ENCODER = ("start the encoder", "wait for the others", "encode and write", "encode the queries")
OF_QUERIES = (
    *OF_ENCODER[:2],
    "encode the queries",
    "metrics",
    "statistics",
    "runs and report",
    "start and the rest",
)  # these depend on queries alone, or on nothing
LAYER_PARAMETERS = 85_054_464  # of BERT-base, which every token passes


def lengths_of(count: int, mean: float, most: int, seed: int) -> np.ndarray:
    """Lognormal lengths `[count]`, 4 to `most`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(np.rint(drawn), 4, most).astype(np.int64)


def make_texts(folder: Path, documents: int, queries: int) -> list[str]:
    """A BEIR folder of made-up words, frequent ones first as in language; returns some of the texts."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(rng.choice(letters[: 8 + n % 19], 2 + n % 9)) for n in range(VOCABULARY)]
    chances = 1 / np.arange(1, VOCABULARY + 1)
    chances = np.cumsum(chances / chances.sum())
    (folder / "qrels").mkdir(parents=True)

    def texts(lengths: np.ndarray) -> list[str]:
        drawn = np.searchsorted(chances, rng.random(int(lengths.sum()))).clip(max=VOCABULARY - 1).tolist()
        ends = np.cumsum(lengths).tolist()
        return [" ".join(words[n] for n in drawn[end - size : end]) for end, size in zip(ends, lengths.tolist(), strict=True)]

    some: list[str] = []
    with (folder / "corpus.jsonl").open("w") as file:
        for begin in range(0, documents, 100_000):
            found = texts(lengths_of(min(100_000, documents - begin), WORDS, LONGEST, begin))
            some = some or found[:5000]
            file.writelines(
                f'{{"_id": "{begin + n}", "title": "{text[:20]}", "text": "{text}"}}\n' for n, text in enumerate(found)
            )
    with (folder / "queries.jsonl").open("w") as file:
        found = texts(np.full(queries, QUERY_WORDS))
        file.writelines(f'{{"_id": "{n:024x}", "text": "{text}"}}\n' for n, text in enumerate(found))
    judged = rng.integers(0, documents, (queries, RELEVANT)).tolist()
    rows = [f"{n:024x}\t{document}\t1\n" for n, row in enumerate(judged) for document in dict.fromkeys(row)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return some


def make_embeddings(data: Path, cache: Path, device: str) -> dict[str, int]:
    """Random unit tokens for all texts of the folder, in the cache as embeddings imported under the default encoder's name."""
    from maxsim_eval.cache.filling import fill_entry
    from maxsim_eval.cache.sides import content_hash, entry_folder
    from maxsim_eval.data.loading import load_task
    from maxsim_kernels import Packed

    task = load_task("beir", "hotpotqa", data_dir=data, quiet=True)
    found = {}
    for role, ids, items in (("query", task.query_ids, task.queries), ("document", task.document_ids, task.documents)):
        lengths = np.full(len(ids), QUERY_TOKENS) if role == "query" else lengths_of(len(ids), TOKENS, MOST_TOKENS, 1)

        def encode(start: int, stop: int, lengths: np.ndarray = lengths, salt: int = len(ids)) -> Packed:
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[start:stop])]))
            generator = torch.Generator(device).manual_seed(start + salt)
            values = torch.randn(int(offsets[-1]), DIM, device=device, dtype=torch.float16, generator=generator)
            return Packed(torch.nn.functional.normalize(values.float(), dim=1).half().cpu(), offsets)

        content = content_hash(ids, items)
        provenance = {"origin": "imported", "content": content, "encoder": "colbertv2", "role": role, "revision": ""}
        provenance |= {"source": "beir", "dataset": "hotpotqa", "file": "made from seeds", "files": 1, "notes": []}
        folder = entry_folder(cache, "beir", "hotpotqa", "colbertv2", role, hashlib.sha256(content.encode()).hexdigest()[:16])
        fill_entry(
            folder, ids=ids, key=folder.name, dtype=torch.float16, dim=DIM, provenance=provenance, encode=encode, chunk=1 << 15,
            quiet=True, at_once=4,
        )  # fmt: skip
        found[f"{role}_tokens"] = int(lengths.sum())
    return found


# The command, with clocks


def planned(arguments: list[str], gpus: int) -> dict[str, Any]:
    """What `plan` says before a command: its answer, and seconds by phase with what may come on top."""
    command = [sys.executable, str(ROOT / "evaluate.py"), "plan", *arguments, "--json"]
    ended = subprocess.run([*command, "--processes", str(gpus)], check=False, capture_output=True, text=True)
    if ended.returncode not in (0, 1):  # 1: it does not fit
        raise SystemExit(f"plan {' '.join(arguments)}: ended with {ended.returncode}\n{ended.stderr[-3000:]}")
    said = json.loads(ended.stdout)
    return {"answer": said["answer"], "phases": {phase["name"]: [phase["seconds"], phase["more"]] for phase in said["phases"]}}


def predictions(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Predicted over measured seconds by phase; of a range, both ends. Phases that `plan` could not predict are left out."""
    said, found = run["plan"]["phases"], {}
    for phase, (names, took) in {**PLANNED, **{name: ((name,), (name,)) for name in run["detail"]}}.items():
        held = [said[name] for name in names if said.get(name, [None])[0] is not None]
        measured, least = sum(run["phases"].get(name, 0.0) for name in took), sum(seconds for seconds, _ in held)
        if held:
            ends = sorted({least, least + sum(more for _, more in held)})
            found[phase] = {"measured": measured, "planned_over_measured": [end / measured for end in ends]}
    return found


def run(arguments: list[str], out: Path, gpus: int) -> dict[str, Any]:
    """Seconds by phase of one command in a process of its own."""
    record = out.with_suffix(".clocks.json")
    words = [str(ROOT / "benchmarks" / "measure" / "command.py"), str(record), *arguments, "--out", str(out)]
    launcher = (
        [sys.executable]
        if gpus == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    )
    began = time.perf_counter()
    ended = subprocess.run([*launcher, *words], check=False, capture_output=True, text=True)
    wall = time.perf_counter() - began
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)}: ended with {ended.returncode}\n{ended.stderr[-3000:]}")
    clocks = json.loads(record.read_text())
    paths = json.loads((out / "result.json").read_text())["paths"]
    phases = {name: clocks.pop(name) for name in ("read texts", "hash texts")}
    threads = {name: clocks.pop(name) for name in list(clocks) if "threads" in name}
    phases |= {name: clocks.pop(name, 0.0) for name in OF_ENCODER}
    phases["start the encoder"] += clocks.pop("import the encoder", 0.0)
    phases["look in the cache"] = clocks.pop("embeddings") - sum(phases.values())
    scoring = {name: path["seconds"]["total"] for name, path in paths.items()}
    phases |= scoring
    phases |= {name: clocks.pop(name, 0.0) for name in ("compare full scores", "metrics")}
    others = phases["compare full scores"] + phases["metrics"]
    others += sum(scoring.values()) if gpus == 1 else 0.0  # several processes compare when all of them have scored
    phases["statistics"] = clocks.pop("score and compare") - others
    phases["runs and report"] = clocks.pop("write runs and report")
    phases["start and the rest"] = wall - sum(phases.values())
    return {
        "command": arguments,
        "wall": wall,
        "phases": phases,
        "threads": threads,
        "detail": {name: path["seconds"] for name, path in paths.items()},
    }


# Floors


def rate_of(amount: float, call: Callable[[], Any]) -> float:
    """Amount a second, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return amount / best


def floors(folder: Path, device: str) -> dict[str, float]:
    """Rates of this machine: bytes a second of hashing, writing and reading, operations a second of products."""
    block = os.urandom(64 << 20)
    file = folder / "floor.bin"

    def writing() -> None:
        with file.open("wb") as handle:
            for _ in range(8):
                handle.write(block)

    def reading() -> None:
        with file.open("rb") as handle:
            while handle.read(8 << 20):
                pass

    found = {"sha256": rate_of(len(block), lambda: hashlib.sha256(block)), "write": rate_of(8 * len(block), writing)}
    found["read"] = rate_of(8 * len(block), reading)
    file.unlink()
    side = 8192 if device == "cuda" else 1024
    torch.backends.fp32_precision = "ieee"
    for dtype, name in ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.int8, "int8")):
        left = torch.ones(side, side, device=device, dtype=dtype)
        product = (
            (lambda left=left: torch._int_mm(left, left.t())) if dtype == torch.int8 else (lambda left=left: left @ left.t())
        )  # type: ignore[misc]
        product()
        found[name] = rate_of(2 * side**3, product)
    return found


def with_floors(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a phase: seconds, seconds and floor at full size, and the run: `encoded` of the encoder, else the last one."""
    last = "scored" if "scored" in report else "encoded"
    rates, encoded, scored = report["rates"], report["encoded"], report[last]
    pairs = 2.0 * QUERIES * QUERY_TOKENS * DIM * scored["document_tokens"] * report[f"{last}_part"]
    tokens = encoded["document_tokens"] * report["encoded_part"]
    text = scored["text_bytes"] * report[f"{last}_part"]
    floor = {
        "read texts": text / rates["read"],
        "hash texts": text / rates["sha256"],
        "encode and write": 2.0 * LAYER_PARAMETERS * tokens / rates["fp16"] / report["gpus"],
        **{name: pairs / rates[name] / report["gpus"] for name in ("fp32", "fp16", "int8")},
    }
    rows = []
    for phase in scored["phases"]:
        name = "encoded" if phase in OF_ENCODER else last
        seconds, part = report[name]["phases"][phase], report[f"{name}_part"]
        whole = seconds if phase in OF_QUERIES else seconds * part
        if phase == "look in the cache" and last == "scored":
            # Where nothing is cached, this phase makes the encoder's fingerprint too, which does not grow with the documents.
            whole += encoded["phases"][phase] - seconds * part / report["encoded_part"]
        rows.append({"phase": phase, "run": name, "seconds": seconds, "full": whole, "floor": floor.get(phase)})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows, and their sum."""
    lines = ["| phase | measured | whole HotpotQA | its floor | share of the floor |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join((row['phase'], *phase_cells(row)))} |" for row in rows]
    return "\n".join([*lines, f"| **all** |  | {sum(row['full'] for row in rows) / 60:.1f} min |  |  |"])


def data_of(home: Path, name: str, part: float, queries: int, layers: int, device: str) -> tuple[list[str], dict[str, Any]]:
    """The command's words for a run, and what was made for it: now, or by an earlier call with this folder and the same sizes."""
    data, cache, record = home / name, home / f"{name}-cache", home / f"{name}.json"
    words = ["beir", "hotpotqa", "--data-dir", str(data), "--cache-dir", str(cache)]
    if name == "encoded":
        words += ["--encoder", f"multi-vector:{home / 'colbert'}", "--paths", "fp16"]
    sizes = {"part": part, "queries": queries, "layers": layers}
    if record.exists():
        made: dict[str, Any] = json.loads(record.read_text())
        if made.pop("sizes") != sizes:
            raise SystemExit(f"{record}: made for other sizes than {sizes}; name another --folder, or remove this one")
        return words, made
    began = time.perf_counter()
    for old in (data, cache):  # of a call that was stopped
        shutil.rmtree(old, ignore_errors=True)
    some = make_texts(data / "hotpotqa", int(DOCUMENTS / part), queries)
    made = {}
    if name == "scored":
        made = make_embeddings(data, cache, device)
    else:
        make_checkpoints(home, some, layers, 768)
    made |= {"made_in": time.perf_counter() - began, "text_bytes": (data / "hotpotqa" / "corpus.jsonl").stat().st_size}
    record.write_text(json.dumps({**made, "sizes": sizes}))
    return words, made


def rehearsed(name: str, words: list[str], home: Path, gpus: int) -> dict[str, Any]:
    """One run: what `plan` says of it, then what it took."""
    out = home / f"{name}-out"
    for old in (out, home / "encoded-cache"):  # everything is scored, and encoded, by this run
        shutil.rmtree(old, ignore_errors=True)
    found: dict[str, Any] = {"plan": planned(words, gpus), **run(words, out, gpus)}
    found["command"] = [word.replace(str(home), "DIR") for word in words]
    found["predictions"] = predictions(found)
    if name == "encoded":
        found["document_tokens"] = json.loads((out / "result.json").read_text())["task"]["document_tokens"]
    for kind in ("phases", "threads"):
        print(json.dumps({key: round(value, 2) for key, value in found[kind].items()}), flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--folder", type=Path, help="where the data is made and kept (default: a temporary folder)")
    parser.add_argument("--make", action="store_true", help="make the data below --folder and end")
    parser.add_argument("--encoded", type=float, default=10, help="encode one document in so many (default 10)")
    parser.add_argument("--scored", type=float, default=5, help="score one document in so many (default 5)")
    parser.add_argument("--queries", type=int, default=QUERIES, help=f"queries (default {QUERIES})")
    parser.add_argument("--layers", type=int, default=12, help="of the encoder (default 12)")
    parser.add_argument("--gpus", type=int, default=1, help="processes, each with a GPU (default 1)")
    parser.add_argument("--only", choices=("encoded", "scored"), help="one of the two runs")
    parser.add_argument("--beside", type=Path, help="with --only: what an earlier call wrote of the other")
    options = parser.parse_args(arguments)
    if options.make and options.folder is None:
        parser.error("--make: need --folder")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {
        "schema": SCHEMA, "torch": torch.__version__, "gpus": options.gpus, "encoded_part": options.encoded,
        "scored_part": options.scored, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", **kernels(),
    }  # fmt: skip
    if options.beside is not None:
        earlier = json.loads(options.beside.read_text())
        other = "scored" if options.only == "encoded" else "encoded"
        report |= {key: earlier[key] for key in (other, f"{other}_part")} | {f"{other}_revision": earlier["revision"]}
    with contextlib.ExitStack() as stack:
        home = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        if not options.make:
            report["rates"] = floors(home, device)
        for name in ("encoded", "scored"):
            if options.only not in (None, name):
                continue
            words, made = data_of(home, name, getattr(options, name), options.queries, options.layers, device)
            print(f"{name}: data made in {made['made_in']:.0f} s", flush=True)
            if options.make:
                continue
            report[name] = {**made, **rehearsed(name, words, home, options.gpus)}
            write(options.json, report)
        if "encoded" in report:
            report["rows"] = with_floors(report)
            write(options.json, report)
            print(markdown(report["rows"]))


if __name__ == "__main__":
    main()
