"""Importing a set takes the memory of one chunk and one shard, whatever the set's size: measured in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES, BYTES, WIDTH = {"padded": 24, "documents": 240}, 13 << 20, 128  # 312 MB of chunks; 195 MB of documents of 832 KB


# VmHWM is the most memory that was ever resident, pages of mapped files included.
SCRIPT = """
import json, sys
from pathlib import Path
from maxsim_eval.importing import importing as importers
from maxsim_eval.types import Task

def peak():
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

folder, documents = Path(sys.argv[1]), int(sys.argv[2])
importers.SHARD_BYTES = 8 << 20
ids = [f"d{n}" for n in range(documents)]
task = Task("local", "toy", "test", ["q"], ["what"], ids, [""] * documents, {"q": {"d1": 1}})
importers.read_embeddings(folder / "small", quiet=True).documents.values.float().sum()  # everything is loaded and warm
before = peak()
entries = importers.import_embeddings(
    folder / "documents", task, source="local", dataset="toy", encoder_name="mine", cache_dir=folder / "cache", data_dir=folder,
    quiet=True,
)
imported = peak()
values = importers.read_embeddings(folder / "documents", quiet=True).documents.values  # the counter-test: all of it at once
print(json.dumps({"import": imported - before, "all": peak() - before, "tokens": entries["document"].tokens}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is Linux's")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "documents"])
def test_peak_memory(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (tmp_path / "small").mkdir()
    torch.save(torch.ones(4, WIDTH).half(), tmp_path / "small" / "d0.pt")
    tokens = torch.nn.functional.normalize(torch.randn(BYTES // 2 // WIDTH, WIDTH), dim=1).half()
    if layout == "padded":
        documents, chunk = 416, {"doc_embeddings": tokens.view(416, 128, WIDTH), "doc_lengths": [128] * 416}
        for number in range(FILES[layout]):
            torch.save(chunk, folder / f"chunk_{number:03d}.pt")
    else:
        documents = 1
        for number in range(FILES[layout]):
            torch.save(tokens[:3328].clone(), folder / f"d{number}.pt")
    size = sum(file.stat().st_size for file in folder.iterdir())
    outcome = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(documents * FILES[layout])],
        # A fixed threshold: large buffers go back to the system when they are freed, so that the peak is of what is held.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert 0.98 < found["tokens"] * WIDTH * 2 / size <= 1
    assert found["all"] > 0.9 * size, "the measure must see what is held"
    # Measured: 32 and 18 MB, a chunk, a shard of 8 MB, its copy and a slice; a set of documents has no chunk.
    assert found["import"] < (48 if layout == "padded" else 30) << 20, found
