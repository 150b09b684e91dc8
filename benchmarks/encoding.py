"""Encoding: texts into a full cache through the toolkit, beside a plain loop over the same model, correctness first, in one run.

    python benchmarks/encoding.py --texts FILE.jsonl [--json FILE] [--documents 40000] [--device cuda] [--cache FOLDER] [--only hf]
    python benchmarks/encoding.py --texts FILE.jsonl --device cpu --documents 400 --layers 6 --hidden 384 --runs 5    (a CPU's size)

The models are random (nothing is downloaded): BERT-base (`--layers`, `--hidden` for smaller ones) with a vocabulary trained on the
texts, as `hf:` and as a ColBERTv2-shaped `multi-vector:` (projection to 128, markers, punctuation skipped). Each method begins
with a list of texts, its model loaded:

- `ours`: `maxsim_eval` fills a new cache with its defaults, written shards included. The file says when the GPU had no work.
- `plain loop`: tokenise all, sort by length, 65,536 tokens a batch (4,096 on a CPU), the same dtype, one pinned copy a batch; nothing
  is written. `hf:` only.
- `sentence-transformers`: the library's own `encode_document`, 32 texts a batch on a CPU and 256 on a GPU; `multi-vector:` only.

The last two take 40,000 texts at most: their pace does not depend on how many there are, ours does (nothing runs on the GPU while
the first texts are read and while the last tokens are written).

First every text of a sample is compared with the same text alone in FP32: the largest distance of two tokens of unit length.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.cache.embeddings import embeddings
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.types import Task
from measure.session import kernels
from results.file import write

SCHEMA = "maxsim-eval/encoding/2"
SAMPLE = 48  # texts whose embeddings are compared with those of the text alone
LOOP_TOKENS = {"cpu": 4096, "cuda": 65536}
LONG_GAP = 1_000_000  # nanoseconds: longer spells without work are counted, the longest of them listed
RIVALS = 40_000  # texts
LIBRARY_BATCH = {"cpu": 32, "cuda": 256}
BOUND = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # between unit tokens, by what the model computes in
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]


def read_texts(path: Path, count: int) -> list[str]:
    """Title and text of a BEIR corpus, repeated until there are enough; a number before each keeps them apart."""
    with path.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    texts = [f"{one.get('title', '')} {one['text']}".strip() for one in found]
    return [texts[n] if n < len(texts) else f"{n} {texts[n % len(texts)]}" for n in range(count)]


def make_checkpoints(folder: Path, texts: list[str], layers: int, hidden: int) -> dict[str, str]:
    """Random BERTs on disk: encoder name of each kind."""
    from safetensors.torch import save_file
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts[:5000], vocab_size=30522, special_tokens=SPECIAL, show_progress=False)
    plain, colbert = folder / "bert", folder / "colbert"
    tokenizer = BertTokenizerFast(vocab=trained.get_vocab(), do_lower_case=True, model_max_length=512)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    model = BertModel(config)
    for place in (plain, colbert):
        tokenizer.save_pretrained(place)
    model.save_pretrained(plain)
    tensors = {f"bert.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors["linear.weight"] = torch.randn(128, hidden) / hidden**0.5
    save_file(tensors, colbert / "model.safetensors", metadata={"format": "pt"})
    (colbert / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["HF_ColBERT"]}))
    markers = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 32, "doc_maxlen": 256}
    facts = {**markers, "attend_to_mask_tokens": False, "mask_punctuation": True, "dim": 128}
    (colbert / "artifact.metadata").write_text(json.dumps(facts))
    return {"hf": f"hf:{plain}", "multi-vector": f"multi-vector:{colbert}"}


def task_of(texts: list[str]) -> Task:
    """A task of documents only; one query, since a task has one."""
    ids = [f"d{n}" for n in range(len(texts))]
    return Task("bench", "texts", "test", ["q"], ["what"], ids, texts, {"q": {"d0": 1}})


def distance(name: str, texts: list[str], device: str) -> tuple[float, float]:
    """Largest distance of unit tokens in the default dtype, texts together, from FP32's of each text alone; and its bound."""
    some = sorted(texts, key=len)[:: max(1, len(texts) // SAMPLE)]
    encoder, exact = get_encoder(name, device=device), get_encoder(name, device=device, dtype="float32", batch_size=1)
    together, alone = encoder.encode(some, "document"), exact.encode(some, "document")
    assert torch.equal(together.lengths, alone.lengths)
    found = torch.linalg.vector_norm(together.values.float() - alone.values.float(), dim=1).max()
    return float(found), BOUND[encoder.model_dtype]  # type: ignore[attr-defined]


def busy(call: Callable[[], Any]) -> tuple[float, float, dict[str, Any]]:
    """Seconds of a call, the share of them in which the GPU had work, and where it had none: before, after and between its work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns()) for event in profile.profiler.kineto_results.events()
    )
    end, worked = spans[0][0], 0
    gaps: list[tuple[float, float]] = []
    for start, stop in spans:
        if start - end > LONG_GAP:
            gaps.append(((start - end) / 1e9, (end - spans[0][0]) / 1e9))
        worked += max(0, stop - max(start, end))
        end = max(end, stop)
    idle = {
        "before_and_after": seconds - (end - spans[0][0]) / 1e9,
        "long_gaps": len(gaps),
        "in_long_gaps": sum(gap for gap, _ in gaps),
        "longest": [{"seconds": gap, "at": at} for gap, at in sorted(gaps, reverse=True)[:12]],
    }
    return seconds, worked / 1e9 / seconds, idle


def ours(encoder: Any, task: Task, cache: Path) -> int:
    """Fill a cache that is not there; returns the number of the documents' tokens."""
    return int(embeddings(task, encoder, cache, quiet=True).documents.lengths().sum())


def plain_loop(name: str, texts: list[str], device: str) -> Callable[[], int]:
    """The plain loop over the same model; a call returns how many tokens it kept."""
    encoder: Any = get_encoder(name, device=device)
    model, tokenizer = (encoder._loaded_model(), encoder._tokenizer) if name.startswith("hf:") else (None, None)

    def batches(lengths: list[int]) -> list[list[int]]:
        order, found, begin = sorted(range(len(lengths)), key=lambda n: -lengths[n]), [], 0
        while begin < len(order):
            size = max(1, LOOP_TOKENS[device] // lengths[order[begin]])
            found.append(order[begin : begin + size])
            begin += size
        return found

    def call() -> int:
        kept = 0
        with torch.inference_mode():
            ids = tokenizer(texts, truncation=True, max_length=258, return_attention_mask=False)["input_ids"]
            for rows in batches([len(one) for one in ids]):
                padded = tokenizer.pad({"input_ids": [ids[row] for row in rows]}, return_tensors="pt")
                moved = {
                    key: (values.pin_memory() if device == "cuda" else values).to(device, non_blocking=True)
                    for key, values in padded.items()
                }
                states = torch.nn.functional.normalize(model(**moved).last_hidden_state.float(), dim=-1).to(encoder.dtype)
                tokens = states[moved["attention_mask"].bool()]
                held = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=device == "cuda")
                held.copy_(tokens, non_blocking=True)
                kept += len(held)
            if device == "cuda":
                torch.cuda.synchronize()
        return kept - 2 * len(texts)

    return call


def library(name: str, texts: list[str], device: str) -> Callable[[], int]:
    """sentence-transformers' own encoding of the same checkpoint in the same dtype."""
    encoder: Any = get_encoder(name, device=device)
    model = encoder._library()

    def call() -> int:
        found = model.encode_document(texts, batch_size=LIBRARY_BATCH[device], convert_to_numpy=True, show_progress_bar=False)
        return sum(len(one) for one in found)

    return call


def measure(kind: str, name: str, texts: list[str], cache: Path, device: str, runs: int) -> dict[str, Any]:
    """Check our tokens, then time all methods in turns."""
    found, bound = distance(name, texts, device)
    if not found <= bound:
        raise SystemExit(f"{kind}: tokens are {found:.2g} from FP32's of the text alone, need {bound:.2g}; nothing timed")
    task = task_of(texts)
    rivals = (
        {"plain loop": plain_loop(name, texts[:RIVALS], device)}
        if kind == "hf"
        else {"sentence-transformers": library(name, texts[:RIVALS], device)}
    )
    encoder = get_encoder(name, device=device)
    methods: dict[str, Callable[[], int]] = {"ours": lambda: ours(encoder, task, cache), **rivals}
    emptied = functools.partial(shutil.rmtree, cache, ignore_errors=True)  # before the clock begins
    emptied()
    ours(encoder, task_of(texts[:600]), cache)
    rows: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(runs):
        for method, call in methods.items():
            emptied()
            began = time.perf_counter()
            tokens = call()
            seconds[method].append(time.perf_counter() - began)
            rows.setdefault(method, {})["tokens"] = tokens
    for method, times in seconds.items():
        median = statistics.median(times)
        rows[method] |= {
            "seconds": times,
            "tokens_a_second": rows[method]["tokens"] / median,
            "documents_a_second": (len(texts) if method == "ours" else min(len(texts), RIVALS)) / median,
        }
    emptied()
    if device == "cuda":
        traced, share, idle = busy(methods["ours"])
        rows["ours"] |= {"gpu_busy": share, "seconds_while_traced": traced, "gpu_idle": idle}
    for method, row in rows.items():
        share = f", GPU busy {row['gpu_busy']:.0%}" if row.get("gpu_busy") else ""
        print(
            f"{kind:13} {method:22} {row['tokens_a_second']:12,.0f} tokens/s {row['documents_a_second']:9,.0f} documents/s{share}",
            flush=True,
        )
    return {"distance": found, "bound": bound, "methods": rows}


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a BEIR corpus.jsonl")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--documents", type=int, default=40_000, help="texts encoded (default 40000)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--runs", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--cache", type=Path, help="where caches are filled (default: a temporary folder)")
    parser.add_argument(
        "--only", choices=("hf", "multi-vector"), help="one of the encoders, which FILE then holds alone (default: both)"
    )
    options = parser.parse_args(arguments)
    texts = read_texts(options.texts, options.documents)
    about = {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "documents": len(texts), "layers": options.layers, "hidden": options.hidden, **kernels(),
    }  # fmt: skip
    encoders: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.cache) as place:
        names = make_checkpoints(Path(place), texts, options.layers, options.hidden)
        for kind in [options.only] if options.only else names:
            found = measure(kind, names[kind], texts, Path(place) / "cache", options.device, options.runs)
            encoders[kind] = {**about, **found}
            write(options.json, {"schema": SCHEMA, "encoders": encoders})


if __name__ == "__main__":
    sys.exit(main())
