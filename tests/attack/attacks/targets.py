"""What is attacked: files, the commands that read them, and the truth about their answers."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from attacks import mutations, stored, truth
from attacks.endings import CHANGED, RIGHT, SILENT, SILENT_VALUES, refusal
from attacks.running import Outcome, run
from attacks.specimen import ASKED, ATLAS, CORPUS, FEW_BYTES, METRICS, OF_SET, PATHS, QRELS, K, Specimen, evaluation

Ending = tuple[str, str]
Damage = Callable[[Random, Path], str]


@dataclass(frozen=True)
class Attack:
    """One attack while it goes on: the copy that is damaged, the damaged file, and how."""

    home: Path
    file: Path
    mutation: str
    specimen: Specimen


Command = tuple[str | Path, ...]
Judge = Callable[[Attack, Outcome, Command], Ending]


@dataclass(frozen=True)
class Target:
    """One kind of file.

    parts: what of the specimen a case copies; files: those of the copy that may be damaged; damages: ways to do it; fifo: also by a
    fifo nobody writes to (where a user may name one, waiting is right); commands: one of them is run; judge: of an exit with 0, or of
    the gate's 1; few: with small units.
    """

    parts: Sequence[str]
    files: Callable[[Path], list[Path]]
    damages: Sequence[Damage]
    commands: Callable[[Random, Attack], Command]
    judge: Judge
    fifo: bool = False
    few: bool = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """What must hold while a command runs."""
        from maxsim_eval.conformance import checks
        from maxsim_eval.scoring import units

        with contextlib.ExitStack() as stack:
            if self.few:
                stack.enter_context(mock.patch.object(units, "LEAST_BYTES", FEW_BYTES))
            stack.enter_context(mock.patch.object(checks, "_free_memory", return_value=0))  # no buffers of gigabytes
            yield


def text(rng: Random, path: Path) -> str:
    """Lines, words, numbers and bytes of a text file."""
    change = rng.choice(mutations.TEXT)
    path.write_bytes(change(rng, path.read_bytes()))
    return change.__name__


def entry(rng: Random, path: Path) -> str:
    """One entry of JSON."""
    path.write_bytes(mutations.json_entry(rng, path.read_bytes()))
    return "entry"


def raw(rng: Random, path: Path) -> str:
    """Bytes."""
    change = rng.choice(mutations.BYTES)
    path.write_bytes(change(rng, path.read_bytes()))
    return change.__name__


def _same_answer(attack: Attack, _: Outcome, command: Command) -> Ending:
    paths = next(str(word) for word in command if str(word).startswith("fp32")).split(",")
    wrong = attack.specimen.wrong(attack.home / "out", paths)
    if not wrong:
        return RIGHT, ""
    undamaged = attack.specimen.folder / attack.file.relative_to(attack.home)
    return (SILENT_VALUES if stored.only_values_differ(attack.file, undamaged) else SILENT), wrong


def _by_the_texts(attack: Attack, _: Outcome, __: Command) -> Ending:
    try:
        wrong = truth.wrong_evaluation(attack.home, attack.home / "out", K, METRICS.split(","))
    except (ValueError, KeyError, TypeError, OSError, StopIteration) as error:
        return SILENT, f"a second reading gives up: {error!r}"
    return (SILENT, wrong) if wrong else (RIGHT, "")


def _by_the_run(attack: Attack, outcome: Outcome, command: Command) -> Ending:
    (found,) = json.loads(outcome.out)["runs"].values()
    qrels, run = (attack.home / str(word) for word in command[1:3])
    try:
        judged = truth.beir_qrels(qrels) if qrels.suffix == ".tsv" else truth.trec_qrels(qrels)
        wrong = truth.differing(found["metrics"], truth.metrics(judged, truth.trec_run(run), METRICS.split(",")))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        return SILENT, f"a second reading gives up: {error!r}"
    return (SILENT, wrong) if wrong else (RIGHT, "")


def _by_the_gate(attack: Attack, outcome: Outcome, command: Command) -> Ending:
    result, baseline, bounds = (attack.home / str(command[place]) for place in (1, 3, 5))
    try:
        need = truth.gate_says(json.loads(result.read_text()), json.loads(baseline.read_text()), truth.bounds(bounds))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # What the second reading needs is not there: the gate must not have passed.
        return (CHANGED, "") if outcome.code else (SILENT, f"passes, and a second reading gives up: {error!r}")
    if need == (outcome.code == 0):
        return RIGHT, ""
    return SILENT, f"exit {outcome.code}, a second reading says {'pass' if need else 'no'}"


def _by_the_result(attack: Attack, outcome: Outcome, command: Command) -> Ending:
    if "--update-baseline" in command:
        return CHANGED, ""
    if command[0] == "gate":
        return _by_the_gate(attack, outcome, command)
    if "--json" not in command or command[0] == "compare":
        return CHANGED, ""
    given = json.loads(attack.file.read_text())
    paths, need = json.loads(outcome.out)["paths"], given["paths"]
    for name, path in need.items():
        for key in ("metrics", "per_query"):
            if paths[name][key] != path.get(key, {}):
                return SILENT, f"{name}: other {key} than the file"
    same = given["paths"] == json.loads((attack.specimen.folder / "out/result.json").read_text())["paths"]
    return (RIGHT if same else CHANGED), ""


def _imported(attack: Attack, _: Outcome, command: Command) -> Ending:
    from maxsim_eval.cache.entries import open_entry

    name = next(Path(word).name for word in command if str(word).startswith("imports/"))
    held = {}
    for manifest in (attack.home / "cache").rglob("manifest.json"):
        held["doc" if "documents" in manifest.parent.name else "query"] = open_entry(manifest.parent, verify=True).load()
    undamaged = truth.imported(attack.specimen.folder / "imports", name)
    if not _differ(held, undamaged):
        return RIGHT, ""
    files = attack.home / "imports"
    if name.endswith(".pt") and not truth.zip_is_whole(files / name):
        return SILENT_VALUES, "its archive's CRC-32 is another"
    try:
        need = truth.imported(files, name)
    except Exception as error:  # noqa: BLE001 (readers of damaged files)
        return CHANGED, f"a second reading gives up: {error!r}"
    wrong = _differ(held, need)
    return (SILENT, wrong) if wrong else (CHANGED, "")


def _differ(held: dict[str, Any], need: dict[str, list[np.ndarray]]) -> str:
    for role, entry in held.items():
        rows = need[role]
        if len(rows) != len(entry):
            return f"{role}: {len(entry)} rows, need {len(rows)}"
        for place, row in enumerate(rows):
            mine = entry[place].numpy()
            # An empty row may have no shape of its own; trailing rows of zeros without lengths are padding.
            if mine.shape[0] != len(row) or not np.array_equal(mine, np.asarray(row).reshape(mine.shape).astype(mine.dtype)):
                return f"{role} {place}: other tokens"
    return ""


def _evaluate(*paths: str) -> Callable[[Random, Attack], Command]:
    return lambda rng, _: evaluation(paths or PATHS)


def _metrics(rng: Random, attack: Attack) -> Command:
    qrels = (
        rng.choice(("qrels.txt", str(QRELS))) if attack.file.suffix == ".trec" else str(attack.file.relative_to(attack.home))
    )
    run = (
        rng.choice(("other.trec", "out/runs/int8.trec"))
        if attack.file.suffix != ".trec"
        else attack.file.relative_to(attack.home)
    )
    return ("metrics", qrels, run, "--metrics", METRICS, "--json")


def _gate(_: Random, __: Attack) -> Command:
    return ("gate", "out/result.json", "--baseline", "baseline.json", "--thresholds", "bounds.toml", "--verbose")


def _of_result(rng: Random, attack: Attack) -> Command:
    name = attack.file.relative_to(attack.home)
    return rng.choice(
        (
            _gate(rng, attack),
            _gate(rng, attack),
            ("report", name, "--json"),
            ("report", name, "--out", "again"),
            ("compare", "baseline-result.json", f"{name}:int8", "--json"),
            ("compare", name, "baseline-result.json", "--out", "again"),
            ("gate", name, "--baseline", "new.json", "--update-baseline"),
        )
    )


def _atlas(_: Random, __: Attack) -> Command:
    return ATLAS


def _same_atlas(attack: Attack, outcome: Outcome, _: Command) -> Ending:
    """Every entry, whatever was kept of it, has the figures of the undisturbed atlas."""
    need = {row["name"]: row for row in json.loads((attack.specimen.folder / "atlas/atlas.json").read_text())["rows"]}
    found = {row["name"]: row for row in json.loads(outcome.out)["rows"]}
    if list(need) != list(found):
        return SILENT, f"entries {', '.join(found)}"
    for name, row in need.items():
        for key in ("metrics", "document_bytes", "error"):
            if row.get(key) != found[name].get(key):
                return SILENT, f"{name}: another {key}"
    return RIGHT, ""


_RAISED = (
    "ValueError('a')",
    "SystemExit(0)",
    "SystemExit('x')",
    "GeneratorExit()",
    "MemoryError()",
    "Unsaid()",
    "BaseException('x')",
)
_RETURNED = (
    "None", "scores.T", "scores.tolist()", "scores.long()", "scores[:1]", "scores * float('nan')", "scores + 1", "-scores",
    "scores.half()", "scores.double()", "scores.fill_(float('inf'))", "scores",
)  # fmt: skip
_DONE = (
    "pass", "queries.values.data.zero_()", "documents.values.zero_()", "documents.values.resize_(0)",
    "ctypes.memset(queries.values.data_ptr(), 0, queries.values.nbytes)", "ctypes.memset(queries.offsets.data_ptr(), 0, queries.offsets.nbytes)",
)  # fmt: skip


def scorer(rng: Random, path: Path) -> str:
    """A function that does one thing and raises or returns another."""
    ends = f"raise {rng.choice(_RAISED)}" if rng.random() < 0.5 else f"return {rng.choice(_RETURNED)}"
    done = rng.choice(_DONE)
    when = rng.choice(("True", "len(documents) > 5", "queries.dtype != torch.float32"))
    path.write_text(
        "import ctypes\nimport torch\nfrom maxsim_kernels import maxsim\n\nclass Unsaid(Exception):\n    def __str__(self):\n        1 / 0\n\n"
        f"def score(queries, documents):\n    scores = maxsim(queries, documents)\n    if {when}:\n        {done}\n        {ends}\n"
        "    return scores\n"
    )
    return f"{done}; {ends} if {when}"


def _conform(rng: Random, attack: Attack) -> Command:
    """The module under a name that nobody has imported."""
    name = f"attacked_{rng.getrandbits(64):x}"
    if attack.file.is_file():
        attack.file.rename(attack.home / f"{name}.py")
    if rng.random() < 0.5:
        return ("conform", f"python:{name}:score", "--json")
    return (*evaluation(("fp32", f"python:{name}:score", "fp16")), "--k", str(K))


def _by_the_checks(attack: Attack, outcome: Outcome, command: Command) -> Ending:
    """The exit code is what the rows say; an evaluation's own paths are as without the function."""
    if command[0] != "conform":
        wrong = attack.specimen.wrong(attack.home / "out", ("fp32", "fp16"))
        return (SILENT, wrong) if wrong else (RIGHT, "")
    verdicts = [row["verdict"] for row in json.loads(outcome.out)["checks"]]
    no = "bug" in verdicts or "pass" not in verdicts
    return (RIGHT, "") if no == (outcome.code == 1) else (SILENT, f"exit {outcome.code} of {verdicts}")


def _import(rng: Random, attack: Attack) -> Command:
    name = attack.file.name
    first = "documents.npy" if name.endswith((".npy", ".txt")) else name
    file: Command = (f"imports/{first}",)
    more: Command = ()
    if first == "documents.npy":
        more = ("--document-ids", "imports/ids.txt")
        file = ("--documents", f"imports/{first}", "--queries", "imports/queries.npy")
    return ("import", "local", "mine", *file, "--encoder", "mine", "--cache-dir", "cache", "--quiet", *more)


def _rerank(_: Random, attack: Attack) -> Command:
    return (*evaluation(("fp32", "fp16")), "--candidates", attack.file.relative_to(attack.home))


def _reranked(attack: Attack, _: Outcome, __: Command) -> Ending:
    """Every listed pair, and no other, is in the ranking, with the score that it has in the undisturbed one."""
    try:
        given = truth.trec_run(attack.file)
    except (ValueError, IndexError, KeyError) as error:
        return SILENT, f"a second reading gives up: {error!r}"
    whole = truth.trec_run(attack.specimen.folder / "out/runs/fp32.trec")
    found = truth.trec_run(attack.home / "out/runs/fp32.trec")
    for query, ranking in whole.items():
        known = dict(ranking)
        need = {document for document, _ in given.get(query, []) if document in known}
        mine = dict(found.get(query, []))
        if set(mine) != need:
            return SILENT, f"{query}: ranks {len(mine)} documents, {len(need)} are listed"
        if any(not math.isclose(known[document], score, rel_tol=1e-5, abs_tol=1e-5) for document, score in mine.items()):
            return SILENT, f"{query}: other scores"
    return RIGHT, ""


_BYTES = re.compile(r'"file_bytes": \d+')


def _of_cache(rng: Random, attack: Attack) -> Command:
    query, document = rng.choice(("q1", "q4")), rng.choice(("d0", "d7", "d23"))
    read: tuple[Command, ...] = (
        ("explain", *OF_SET[:-1], "--query", query, "--document", document, "--path", rng.choice(("fp32", "int8")), "--json"),
        ("inspect", *OF_SET, "--verify", "--json"),
        ("cache", "ls", "--json"),
        ("cache", "gc"),
        ("plan", *OF_SET[:-1], "--json"),
    )
    return rng.choice((*read, ("encode", *OF_SET), ("convert", *OF_SET, "--to", rng.choice(("int8-token", "int8-document")))))


def _as_undamaged(attack: Attack, outcome: Outcome, command: Command) -> Ending:
    """What shows embeddings says the same as of the undamaged cache; after what writes, an evaluation does.

    A manifest whose checksum was made to fit shows what it says now, without one there is no entry to show; a copy is shown with its
    size. The size of a file is its own: it may have grown, or hold the same values compressed.
    """
    own = attack.file.suffix == ".h5" and ".int8-" not in attack.file.name
    if command[0] in ("cache", "plan") or (command[0] == "inspect" and not own):
        return CHANGED, ""
    if command[0] in ("encode", "convert"):
        after = run(evaluation(), attack.home)
        return _same_answer(attack, after, evaluation()) if after.code == 0 else refusal(after.code, after.out, after.err)
    found, need = (_BYTES.sub("", one.out) for one in (outcome, run(command, attack.specimen.folder)))
    return (RIGHT, "") if found == need else (SILENT, f"{command[0]} shows something else")


def _below(*patterns: str) -> Callable[[Path], list[Path]]:
    return lambda home: [path for pattern in patterns for path in sorted(home.glob(pattern))]


DATA, CACHE = "datasets", "embeddings_cache"
SHARD: tuple[Damage, ...] = (
    stored.shard_bytes, stored.shard_bytes, stored.shard_structure, stored.shard_structure, stored.shard_values, stored.other_file,
)  # fmt: skip

TARGETS: dict[str, Target] = {
    "documents": Target(
        (DATA, CACHE), _below(f"{CACHE}/*/*/*documents*/0000?.h5"), SHARD, _evaluate("fp32", "fp16"), _same_answer, fifo=True
    ),
    "queries": Target(
        (DATA, CACHE), _below(f"{CACHE}/*/*/*queries*/*.h5"), SHARD, _evaluate("fp32", "fp16"), _same_answer, fifo=True
    ),
    "manifest": Target(
        (DATA, CACHE),
        _below(f"{CACHE}/*/*/*/manifest.json"),
        (stored.manifest_entry, text),
        _evaluate("fp32", "fp16"),
        _same_answer,
        fifo=True,
    ),
    "copy": Target(
        (DATA, CACHE),
        _below(f"{CACHE}/*/*/*/*int8-token.h5"),
        (stored.shard_bytes, stored.shard_structure, stored.shard_values, stored.other_file),
        _evaluate("fp32", "int8"),
        _same_answer,
        fifo=True,
    ),
    "kept": Target(
        (DATA, CACHE),
        _below(f"{CACHE}/*/*/*/*.h5", f"{CACHE}/*/*/*/manifest.json"),
        (stored.kept_file,),
        _of_cache,
        _as_undamaged,
        fifo=True,
    ),
    "part": Target(
        (DATA, CACHE, "stopped"),
        _below("stopped/.partial/*/*.h5"),
        (raw, stored.other_file),
        _evaluate(),
        _same_answer,
        fifo=True,
        few=True,
    ),
    "result": Target(
        ("out", "baseline.json", "bounds.toml"), _below("out/result.json"), (entry, entry, text), _of_result, _by_the_result
    ),
    "baseline": Target(("out", "baseline.json", "bounds.toml"), _below("baseline.json"), (entry, text), _gate, _by_the_gate),
    "thresholds": Target(("out", "baseline.json", "bounds.toml"), _below("bounds.toml"), (text,), _gate, _by_the_gate),
    "corpus": Target((DATA,), _below(str(CORPUS)), (text, text, entry), _evaluate("fp32", "int8"), _by_the_texts),
    "asked": Target((DATA, CACHE), _below(str(ASKED)), (text, text, entry), _evaluate("fp32", "int8"), _by_the_texts),
    "judged": Target((DATA, CACHE), _below(str(QRELS)), (text,), _evaluate("fp32"), _by_the_texts),
    "qrels": Target((DATA, "qrels.txt", "other.trec", "out"), _below("qrels.txt", str(QRELS)), (text,), _metrics, _by_the_run),
    "run": Target(
        (DATA, "qrels.txt", "other.trec", "out"), _below("other.trec", "out/runs/int8.trec"), (text,), _metrics, _by_the_run
    ),
    "candidates": Target((DATA, CACHE, "other.trec"), _below("other.trec"), (text,), _rerank, _reranked),
    "atlas": Target(
        (DATA, CACHE, "atlas"),
        _below("atlas/entries/*/entry.json", "atlas/entries/*/run.trec"),
        (text, text, raw),
        _atlas,
        _same_atlas,
        fifo=True,
    ),
    "scorer": Target((DATA, CACHE, "scorer.py"), _below("scorer.py"), (scorer,), _conform, _by_the_checks, fifo=True),
    "npz": Target((DATA, "imports"), _below("imports/?.npz"), (stored.npz_entry, raw), _import, _imported),
    "npy": Target((DATA, "imports"), _below("imports/*.npy", "imports/ids.txt"), (raw, raw), _import, _imported),
    "pt": Target((DATA, "imports"), _below("imports/e.pt"), (stored.torch_entry, raw), _import, _imported),
    "safetensors": Target(
        (DATA, "imports"), _below("imports/e.safetensors"), (stored.safetensors_entry, raw), _import, _imported
    ),
}
assert OF_SET  # the collection's name is part of the commands
