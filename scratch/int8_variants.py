"""Candidates for INT8, FP8 and masks with holes, beside today's kernels: checked first, then timed in turns with the L2 flushed.

    python scratch/int8_variants.py --json FILE [--runs 15] [--groups colpali ragged holes] [--compile-only]

Every group first checks in child processes of their own (in parallel; one that hangs or fails is killed and reported, the rest goes on),
each variant against today's bits on the timed shape and against FP64 on a smaller one; what passed is then timed in one process a group.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "benchmarks"), str(Path(__file__).resolve().parent)]

import int8_launch as by
import torch
from maxsim_kernels import Packed, quantize_fp8, quantize_int8
from maxsim_kernels.checks import Call, Options, validate
from maxsim_kernels.gpu.forward import choice, dispatch
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.gpu.geometry import hardware
from maxsim_kernels.gpu.launch import ensure_context
from torch import Tensor

Form = Callable[[Call], Tensor]
CHECK_SECONDS, TIME_SECONDS = 70, 60


def config(rows: int, tokens: int, warps: int, stages: int, programs: int, registers: int = 0) -> Config:
    return Config(rows, tokens, warps, stages, programs, "tried", "tried", registers=registers)


def text(name: str, given: Config | None = None) -> Form:
    """An edited kernel, in today's configuration or another."""

    def run(call: Call) -> Tensor:
        chosen = given or choice.choose(call, hardware(call.queries.device)).config
        return by.by_text(call, chosen, name)

    return run


def gluon(*numbers: int, held: bool = False) -> Form:
    return lambda call: by.by_gluon(call, config(*numbers), held)


def index(*numbers: int) -> Form:
    return lambda call: by.by_index(call, config(*numbers))


def today(call: Call) -> Tensor:
    return dispatch.forward(call)[0]


# rows, tokens, warps, stages, programs
CODES: dict[str, dict[str, Form]] = {
    "colpali int8 document": {
        "raw": text("raw"),
        "atend": text("atend"),
        "raw 128 8w": text("raw", config(128, 128, 8, 3, 2)),
        "gluon 128": gluon(64, 128, 4, 3, 3),
        "gluon 128 4 stages": gluon(64, 128, 4, 4, 2),
        "gluon 128 held": gluon(64, 128, 4, 3, 3, held=True),
        "gluon 128 8w": gluon(128, 128, 8, 4, 1),
    },
    "colpali int8 token": {
        "gluon 128": gluon(64, 128, 4, 3, 3),
        "gluon 128 4 stages": gluon(64, 128, 4, 4, 2),
        "gluon 128 held": gluon(64, 128, 4, 3, 3, held=True),
        "gluon 64": gluon(64, 64, 4, 4, 4, 128),
    },
    "colpali int8 corpus": {"raw": text("raw"), "gluon 128": gluon(64, 128, 4, 3, 3)},
    "colpali fp8 document": {
        "raw": text("raw"),
        "raw 64": text("raw", config(64, 128, 4, 3, 3)),
        "gluon 128": gluon(64, 128, 4, 3, 3),
        "gluon 128 4 stages": gluon(64, 128, 4, 4, 2),
        "gluon 128 8w": gluon(128, 128, 8, 4, 1),
    },
    "colpali none": {"gluon 64": gluon(64, 64, 4, 4, 2), "gluon 128 8w": gluon(128, 128, 8, 3, 1)},
    "ragged int8 document": {
        "raw": text("raw"),
        "atend": text("atend"),
        "gluon 64": gluon(64, 64, 4, 3, 5),
        "gluon 64 held": gluon(64, 64, 4, 3, 4, held=True),
        "gluon 128": gluon(64, 128, 4, 3, 3),
    },
    "ragged int8 token": {
        "gluon 64": gluon(64, 64, 4, 3, 4, 128),
        "gluon 64 4 stages": gluon(64, 64, 4, 4, 4, 128),
        "gluon 128": gluon(64, 128, 4, 3, 3),
        "gluon 128 held": gluon(64, 128, 4, 3, 3, held=True),
    },
    "ragged none": {"gluon 64": gluon(64, 64, 4, 4, 2), "gluon 64 8w": gluon(128, 64, 8, 4, 1)},
}
HOLES: dict[str, Form] = {
    "index 128": index(128, 64, 8, 3, 2),
    "index 128 4 stages": index(128, 64, 8, 4, 1),
    "index 64": index(64, 64, 4, 4, 2),
    "index 64 3 stages": index(64, 64, 4, 3, 3),
    "index 128 wide": index(128, 128, 8, 3, 1),
}
MASKED = {"16 q": (16, 32, 4096, 180), "256 q": (256, 32, 4096, 180), "colpali": (1, 1024, 1000, 1024)}
GROUPS = ("colpali", "ragged", "holes")


def families(group: str) -> list[str]:
    """Children of a group's checks."""
    if group == "holes":
        return list(MASKED)
    return [name for name in CODES if name.startswith(group)]


def unit(device: str, *shape: int, seed: int = 0) -> Tensor:
    """FP16 unit vectors, drawn in blocks."""
    random = torch.Generator(device).manual_seed(seed)
    found = torch.empty(shape, dtype=torch.float16, device=device)
    flat = found.view(-1, shape[-1])
    for start in range(0, flat.shape[0], 1 << 20):
        part = flat[start : start + (1 << 20)]
        part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, device=device, generator=random), dim=-1))
    return found


def inputs(group: str, device: str, small: bool) -> tuple[Tensor, Any]:
    """Queries and FP16 documents of a group of codes."""
    if group == "colpali":
        return unit(device, 1, 1024, 128), unit(device, 24 if small else 10000, 1024, 128, seed=1)
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(16, 241, (200 if small else 8192,), generator=random)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    return unit(device, 256, 32, 128), Packed(unit(device, int(offsets[-1]), 128, seed=1), offsets.to(device))


def coded(family: str, documents: Any) -> Any:
    """Documents as a family of candidates has them."""
    kind = family.split()[1]
    if kind == "none":
        return documents
    return (quantize_int8 if kind == "int8" else quantize_fp8)(documents, family.split()[2])


def holed(name: str, device: str, small: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Queries, documents and masks as `benchmarks/alone/masks.py` draws them."""
    count, size, documents, length = MASKED[name]
    documents = 40 if small else documents
    q, d = unit(device, count, size, 128), unit(device, documents, length, 128, seed=1)
    random = torch.Generator(device).manual_seed(5)
    lengths = torch.randint(length // 2, length + 1, (documents,), device=device, generator=random)
    padding = torch.arange(length, device=device) < lengths[:, None]
    holes = padding & (torch.rand(documents, length, device=device, generator=random) > 0.1)
    some = padding & (holes | (torch.rand(documents, 1, device=device, generator=random) > 0.1))
    d[~holes & ~some] = float("nan")  # what no mask counts must not be read
    return q, d, {"lengths": lengths, "padding": padding, "every": holes, "tenth": some}


def truth(call: Call) -> Tensor:
    """FP64 scores of a small call, of the codes themselves."""
    queries, scales = by.codes_of(call)
    q = queries.double()
    rows = []
    for number in range(call.document_count):
        if call.document_starts is not None:
            first, many = int(call.document_starts[number]), int(call.document_lengths[number])  # type: ignore[index]
            tokens = call.documents[first : first + many]
            at: Any = slice(first, first + many)
        else:
            tokens = call.documents[number]
            if call.document_mask is not None:
                tokens = tokens[call.document_mask[number]]
            at = slice(number * call.documents.shape[1], (number + 1) * call.documents.shape[1])
        cells = q @ tokens.double().T
        if call.granularity == "token":
            cells = cells * call.scales.reshape(-1)[at].double()  # type: ignore[union-attr]
        best = cells.amax(-1)
        if call.granularity in ("document", "corpus"):
            scale = call.scales.reshape(-1)  # type: ignore[union-attr]
            best = best * scale[number if call.granularity == "document" else 0].double()
        if scales is not None:
            best = best * scales.double()
        rows.append(best.sum(-1))
    return torch.stack(rows, 1)


def variants(group: str, family: str) -> dict[str, Form]:
    return HOLES if group == "holes" else CODES[family]


def calls_of(group: str, family: str, device: str, small: bool) -> dict[str, Call]:
    """The calls that a family's candidates score."""
    if group == "holes":
        q, d, masks = holed(family, device, small)
        return {name: validate(q, d, Options(document_mask=masks[name])) for name in ("every", "tenth")}
    q, d = inputs(group, device, small)
    return {"": validate(q, coded(family, d), Options())}


def check(group: str, family: str) -> dict[str, str]:
    """What is wrong with each variant of a family; an empty string: nothing."""
    found: dict[str, str] = {}
    ensure_context(0)
    small, large = (calls_of(group, family, "cuda", one) for one in (True, False))
    for name, form in {"today": today, **variants(group, family)}.items():
        try:
            found[name] = "; ".join(filter(None, (_wrong(form, small[one], large[one], family) for one in small)))
        except Exception as error:
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {str(error)[-300:]}"
        print(f"CHECKED {json.dumps({name: found[name]})}", flush=True)
    return found


def _wrong(form: Form, small: Call, large: Call, family: str) -> str:
    scores, exact = form(small), truth(small)
    apart = float((scores.double() - exact).abs().max())
    allowed = small.queries.shape[1] * (2**-10 if "fp8" in family else 2e-6)
    if not apart <= allowed:
        return f"{apart:.3g} from FP64, {allowed:.3g} allowed"
    whole, expected = form(large), today(large)
    torch.cuda.synchronize()
    if not torch.equal(whole, expected):
        most = float((whole - expected).abs().max())
        if not ("fp8" in family and most <= allowed):
            return f"{most:.3g} from today's bits, {int((whole != expected).sum())} of {whole.numel()}"
        print(f"{family}: other bits than today's, {most:.3g} at most", flush=True)
    again = form(large)
    return "" if torch.equal(whole, again) else "other bits when asked again"


def time_group(group: str, good: dict[str, list[str]], runs: int) -> dict[str, Any]:
    """Medians of what passed, in turns."""
    from measure.timing import Flush, Graphed, measure

    ensure_context(0)
    calls: dict[str, Callable[[], Tensor]] = {}
    kept: list[Any] = []
    result: dict[str, Any] = {}
    flush = Flush()
    if group == "holes":
        for family in MASKED:
            calls.clear()
            q, d, masks = holed(family, "cuda", False)
            made = {"lengths": validate(q, d, Options(document_lengths=masks["lengths"]))}
            made["padding"] = validate(q, d, Options(document_mask=masks["padding"]))
            made |= {name: validate(q, d, Options(document_mask=masks[name])) for name in ("every", "tenth")}
            turns = {f"today {name}": partial(today, one) for name, one in made.items()}
            turns |= {f"{name} {one}": partial(HOLES[name], made[one]) for name in good.get(family, ()) for one in ("every", "tenth")}
            # As graphs: the host's share is not asked here.
            graphs = {name: Graphed(turn) for name, turn in turns.items()}
            result |= {f"{family}: {name}": took for name, took in measure(graphs, runs, flush).items()}
            report(result, family)
        return result
    q, d = inputs(group, "cuda", False)
    calls["own FP16: today"] = partial(today, validate(q, d, Options()))
    for family in families(group):
        call = validate(q, coded(family, d), Options())
        kept.append(call)
        if not family.endswith("none"):
            calls[f"{family}: today"] = partial(today, call)
        for name in good.get(family, ()):
            calls[f"{family}: {name}"] = partial(CODES[family][name], call)
    result = measure(calls, runs, flush)
    report(result, "own FP16: today")
    return result


def report(result: dict[str, Any], base: str) -> None:
    """A line a variant: ms, quartile range, and how often it goes into the base."""
    own = result.get(base, {}).get("median_ms")
    for name, took in result.items():
        if own is None and not name.startswith(base):
            continue
        against = own if own is not None else result[f"{base}: today lengths"]["median_ms"]
        ratio = against / took["median_ms"] if own is not None else took["median_ms"] / against
        print(f"{name:42s} {took['median_ms']:8.4f} ms  iqr {took['iqr_ms']:.4f}  {ratio:5.2f}x", flush=True)


def clocks() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def children(wanted: list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Checks in processes of their own, all at once."""
    script = str(Path(__file__).resolve())
    made = {}
    for group, family in wanted:
        command = [sys.executable, script, "--child", group, family]
        made[family] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found: dict[str, dict[str, str]] = {}
    until = time.monotonic() + CHECK_SECONDS
    for family, process in made.items():
        try:
            out, errors = process.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            errors += "\nkilled: took too long"
        found[family] = {}
        for line in out.splitlines():
            if line.startswith("CHECKED "):
                found[family] |= json.loads(line[8:])
            else:
                print(line)
        bad = {name: why for name, why in found[family].items() if why}
        for name, why in bad.items():
            print(f"WRONG {family}: {name}: {why[:200]}")
        if process.returncode:
            print(f"CHILD {family} ended with {process.returncode}: {errors[-600:]}")
    return found


def compile_only(wanted: str, groups: list[str]) -> None:
    """Registers, spills, shared memory and matrix instructions of every variant on sm_90, without a GPU."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from compile_candidates import show

    show(groups, families, variants, calls_of, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--compile-only", nargs="?", const="", help="only variants whose name has this")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile_only is not None:
        compile_only(options.compile_only, options.groups)
        return
    if options.child:
        check(*options.child)
        return
    if options.time:
        group, path = options.time
        good = json.loads(Path(path).read_text())["good"]
        result = time_group(group, good, options.runs)
        Path(path).with_suffix(f".{group}").write_text(json.dumps(result))
        return
    start = time.monotonic()
    checks = children([(group, family) for group in options.groups for family in families(group)])
    good = {family: [name for name, why in one.items() if not why and name != "today"] for family, one in checks.items()}
    held: dict[str, Any] = {"device": torch.cuda.get_device_name(), "good": good, "checks": checks, "ms": {}}
    path = options.json or Path("int8_variants.json")
    path.write_text(json.dumps(held, indent=1))
    print(f"checked in {time.monotonic() - start:.0f} s; clocks {clocks()}", flush=True)
    for group in options.groups:
        command = [sys.executable, str(Path(__file__).resolve()), "--time", group, str(path), "--runs", str(options.runs)]
        try:
            done = subprocess.run(command, timeout=TIME_SECONDS, text=True, capture_output=True, check=False)
            print(done.stdout, end="")
            if done.returncode:
                print(f"{group}: {done.stderr[-800:]}")
        except subprocess.TimeoutExpired as error:
            print(f"{group}: took too long\n{error.stdout}")
        part = path.with_suffix(f".{group}")
        if part.is_file():
            held["ms"][group] = json.loads(part.read_text())
            part.unlink()
        path.write_text(json.dumps(held, indent=1))
    print(f"{time.monotonic() - start:.0f} s; clocks {clocks()}")


if __name__ == "__main__":
    main()
