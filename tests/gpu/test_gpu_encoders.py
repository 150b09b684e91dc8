"""Encoders on a GPU: texts one behind the other are embedded as alone, and a shard that is encoded again has the same bytes."""

from __future__ import annotations

import random

import pytest
import torch

import tiny_checkpoints as tiny
from encoding import BOUND
from maxsim_eval.cache.sides import embed
from maxsim_eval.encoders import unpadded
from maxsim_eval.encoders.names import get_encoder
from task_cases import small_task

pytest.importorskip("sentence_transformers")
WORDS = [word for word in tiny.WORDS if not word.startswith("##")]
ENCODERS = ("hf", "multi-vector")


def texts(count):
    """Of up to 29 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(30))) for _ in range(count)]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Random BERTs on disk: encoder name of each kind."""
    folder = tmp_path_factory.mktemp("hub")
    return {"hf": f"hf:{tiny.pylate(folder / 'pylate')}", "multi-vector": f"multi-vector:{tiny.stanford(folder / 'stanford')}"}


@pytest.fixture
def together(monkeypatch):
    """How many texts each call of the kernel for texts of several lengths had."""
    found, attention = [], unpadded._attention

    def counted(query, key, value, ends):
        found.append(len(ends.places) - 1)
        return attention(query, key, value, ends)

    monkeypatch.setattr(unpadded, "_attention", counted)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_a_text_among_others_is_embedded_as_alone(kind, role, dtype, names, together):
    """Within the bounds that docs/data.md gives; in half precision unpadded, but for queries that are filled up with [MASK]."""
    some = texts(60)
    alone = get_encoder(names[kind], device="cuda", dtype="float32", batch_size=1).encode(some, role)
    assert together == []
    found = get_encoder(names[kind], device="cuda", dtype=dtype).encode(some, role)
    assert torch.equal(found.lengths, alone.lengths)
    distance = torch.linalg.vector_norm(found.values.float() - alone.values, dim=1).max()
    assert distance <= BOUND[getattr(torch, dtype)]
    padded = dtype == "float32" or (kind, role) == ("multi-vector", "query")
    assert set(together) == (set() if padded else {sum(map(bool, some))})


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_shard_that_is_encoded_again_has_the_same_bytes(kind, names, tmp_path):
    """By another encoder of the same name, which encodes nothing else."""
    task = small_task(["cat"], texts(2500))

    def shards():
        entry = embed(task, "document", get_encoder(names[kind], device="cuda"), tmp_path, quiet=True)
        return {shard.path: (shard.path.stat().st_ino, shard.path.read_bytes()) for shard in entry.shards}

    before = shards()
    assert len(before) == 3
    gone = sorted(before)[1]
    gone.unlink()
    after = shards()
    assert after.pop(gone)[1] == before.pop(gone)[1]
    assert after == before
