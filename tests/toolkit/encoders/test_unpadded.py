"""Texts one behind the other through a transformer: on a CPU, with the GPU's attention kernel replaced by plain attention of each text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints as tiny
from maxsim_eval.encoders import text_batches, unpadded
from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
from maxsim_eval.errors import DataError, UsageError

WORDS = ["glacier", "melt", "valley", "cat", "two", "the", "a", "."]
TEXTS = [
    "glacier melt",
    "",
    "cat",
    "two cat valley the glacier melt a cat",
    "the . valley",
    "  ",
    "a",
    "melt melt the cat . two",
]
Batches = list[dict[str, torch.Tensor]]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would do, here: the kernel's attention, text by text."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: unpadded.Ends) -> torch.Tensor:
        places = ends.places.tolist()
        assert ends.longest == max(end - begin for begin, end in pairwise(places))
        found = torch.full_like(query, torch.nan)
        for begin, end in pairwise(places):
            text = [side[begin:end].transpose(0, 1) for side in (query, key, value)]
            found[begin:end] = torch.nn.functional.scaled_dot_product_attention(*text).transpose(0, 1)
        return found

    monkeypatch.setattr(unpadded, "_has_kernel", lambda device, dtype: True)
    monkeypatch.setattr(unpadded, "_attention", attention)


def _tokenizer(folder: Path, special: list[str]) -> int:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: n for n, word in enumerate([*special, *WORDS])}
    pad, unknown, begin, end = special
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])]
    )
    names = {"pad_token": pad, "unk_token": unknown, "cls_token": begin, "sep_token": end}
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=20, **names).save_pretrained(folder)
    return len(vocabulary)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import transformers

    made = {}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    for kind in ("Bert", "Roberta", "Electra", "DistilBert"):
        folder = made[kind.lower()] = tmp_path_factory.mktemp("hub") / kind.lower()
        vocabulary = _tokenizer(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=vocabulary, pad_token_id=0, max_position_embeddings=40, **({} if kind == "DistilBert" else sizes)
        )
        if kind == "DistilBert":
            config.dim, config.n_layers, config.n_heads, config.hidden_dim = 16, 2, 2, 32
        model = getattr(transformers, f"{kind}Model")(config)
        with torch.no_grad():  # positions that matter
            for name, values in model.named_parameters():
                if "position" in name:
                    values.mul_(50)
        model.save_pretrained(folder)
    return made


def seen_by(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> Batches:
    seen: Batches = []
    original: Callable[..., Any] = encoder._forward
    monkeypatch.setattr(encoder, "_forward", lambda batch, *role: (seen.append(dict(batch)), original(batch, *role))[1])
    return seen


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("tokens", [1, 12, 1000])
def test_the_same_tokens_as_alone(
    kind: str, tokens: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, alone = (
        HfEncoder(str(checkpoints[kind]), device="cpu"),
        HfEncoder(str(checkpoints[kind]), device="cpu", batch_size=1),
    )
    with monkeypatch.context() as context:
        context.setattr(unpadded, "_has_kernel", lambda device, dtype: False)
        need = alone.encode(TEXTS, "document")
    encoder.texts.tokens = tokens
    seen = seen_by(encoder, monkeypatch)
    found = encoder.encode(TEXTS, "document")
    assert torch.equal(found.lengths, need.lengths)
    assert torch.allclose(found.values, need.values, atol=1e-5)
    shapes = [tuple(batch["input_ids"].shape) for batch in seen]
    assert all(rows == 1 for rows, _ in shapes)
    assert [length for _, length in shapes] == {1: [4, 3, 10, 5, 3, 8], 12: [7, 10, 8, 8], 1000: [33]}[tokens]
    assert torch.equal(found.values, encoder.encode(TEXTS, "document").values)


def test_a_kind_that_is_not_known_is_padded(on_gpu: None, checkpoints: dict[str, Path]) -> None:
    encoder = HfEncoder(str(checkpoints["distilbert"]), device="cpu")
    encoder.encode(TEXTS, "document")
    assert encoder.texts.first_position is None
    assert encoder._model.config._attn_implementation == "sdpa"


def test_a_cpu_pads(checkpoints: dict[str, Path]) -> None:
    encoder = HfEncoder(str(checkpoints["bert"]), device="cpu")
    encoder.encode(TEXTS, "document")
    assert encoder.texts.first_position is None


@pytest.mark.usefixtures("on_gpu")
def test_padded_batches_of_the_same_model_are_right_too(checkpoints: dict[str, Path]) -> None:
    """Queries of some encoders have tokens that are not attended to; and other threads have batches of their own."""
    encoder = HfEncoder(str(checkpoints["bert"]), device="cpu")
    need = encoder.encode(TEXTS, "document")
    encoder.texts.first_position = None
    assert torch.allclose(encoder.encode(TEXTS, "document").values, need.values, atol=1e-5)
    found: list[Any] = []
    with unpadded.unpadded(unpadded.Ends(torch.tensor([0, 1], dtype=torch.int32), 1)):
        thread = threading.Thread(target=lambda: found.append(encoder.encode(TEXTS, "document")))
        thread.start()
        thread.join()
    assert torch.allclose(found[0].values, need.values, atol=1e-5)


@pytest.mark.usefixtures("on_gpu")
def test_late_interaction_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers and skipped punctuation are the library's; queries, filled up with [MASK] that nothing attends to, are padded."""
    for folder in (tiny.stanford(tmp_path / "stanford"), tiny.pylate(tmp_path / "pylate")):
        encoder, padded = MultiVectorEncoder(str(folder), device="cpu"), MultiVectorEncoder(str(folder), device="cpu")
        padded._library()
        padded.texts.first_position = None
        seen = seen_by(encoder, monkeypatch)
        for role in ("document", "query"):
            found, need = encoder.encode(TEXTS, role), padded.encode(TEXTS, role)  # type: ignore[arg-type]
            assert torch.equal(found.lengths, need.lengths)
            assert torch.allclose(found.values, need.values, atol=1e-5)
        assert "position_ids" in seen[0]
        assert seen[0]["input_ids"].shape[0] == 1


@pytest.mark.usefixtures("on_gpu")
def test_a_module_that_looks_beside_its_token_is_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maxsim_eval.encoders import multi_vector

    monkeypatch.setattr(multi_vector, "_TOKEN_BY_TOKEN", ("Normalize", "MultiVectorMask"))
    encoder = MultiVectorEncoder(str(tiny.pylate(tmp_path / "pylate")), device="cpu")
    encoder.encode(TEXTS, "document")
    assert encoder.texts.first_position is None


@pytest.mark.usefixtures("on_gpu")
def test_memory_that_runs_out_halves_the_tokens(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = HfEncoder(str(checkpoints["bert"]), device="cpu")
    need = encoder.encode(TEXTS, "document")
    original = encoder._forward

    def short(most: int) -> Callable[..., Any]:
        def forward(batch: dict[str, torch.Tensor]) -> Any:
            if batch["input_ids"].numel() > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(batch)

        return forward

    monkeypatch.setattr(encoder, "_forward", short(20))
    with pytest.warns(RuntimeWarning, match="out of memory"):
        found = encoder.encode(TEXTS, "document")
    assert torch.allclose(found.values, need.values, atol=1e-5)
    assert encoder.texts.tokens == 17  # the first three of six texts
    monkeypatch.setattr(encoder, "_forward", short(2))
    with pytest.raises(UsageError, match="one text of"):
        encoder.encode(TEXTS, "document")


def limit_what_fits_together(monkeypatch: pytest.MonkeyPatch, encoder: HfEncoder, most: int) -> list[int]:
    """No memory to put more than so many tokens together; returns how many were, each time."""
    original, done = encoder.texts._together, []

    def together(parts: list[Any], *others: Any) -> Any:
        tokens = sum(int(part.counts.sum()) for part in parts)
        if tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(tokens)
        return original(parts, *others)

    monkeypatch.setattr(encoder.texts, "_together", together)
    return done


@pytest.mark.parametrize("way", ["padded", "unpadded"])
def test_embeddings_that_do_not_fit_together_are_taken_in_halves(
    way: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Smaller batches would free nothing there. Said once, and the next window is halved before it fails."""
    if way == "unpadded":
        request.getfixturevalue("on_gpu")
    texts = [*(TEXTS * 8)[:-1], ""]
    encoder = HfEncoder(str(checkpoints["bert"]), device="cpu")
    need = encoder.encode(texts, "document")
    assert (encoder.texts.first_position is None) == (way == "padded")
    fits = len(need.values) // 5
    done = limit_what_fits_together(monkeypatch, encoder, fits)
    batches = encoder.texts.tokens
    with pytest.warns(RuntimeWarning, match=r"out of memory on cpu with \d+ texts at once; continuing with \d+") as said:
        found = encoder.encode(texts, "document")
    assert len(said) == 1
    assert said[0].filename == __file__
    again = encoder.encode(texts, "document")
    assert sum(done) == 2 * len(need.values)
    assert encoder.texts.tokens == batches, "what fits into a batch is another matter"
    for each in (found, again):
        assert each.offsets is not None
        assert torch.equal(each.offsets, need.offsets)
        assert torch.allclose(each.values, need.values, atol=1e-5)
    limit_what_fits_together(monkeypatch, encoder, 1)
    with pytest.raises(UsageError, match="one text of"):
        encoder.encode(texts, "document")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("value", "stored", "words"),
    [
        (torch.nan, "float16", "the model gave NaN or infinity for item 3 of 8"),
        (torch.inf, "float16", "the model gave NaN or infinity for item 3 of 8"),
        (-torch.inf, "float32", "the model gave NaN or infinity for item 3 of 8"),
        (7e4, "float16", r"item 3 of 8 .*float16 cannot hold"),
    ],
)
def test_what_is_not_finite_is_named(
    value: float, stored: str, words: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = HfEncoder(str(checkpoints["bert"]), device="cpu", embedding_dtype=stored)
    original = encoder._forward

    def broken(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        values, kept = original(batch)
        values = values.clone()
        values[0, 0] = torch.nan  # a [CLS], which does not count
        values[0, 9, 1] = value  # "cat valley ..." of text 3
        return values, kept

    monkeypatch.setattr(encoder, "_forward", broken)
    with pytest.raises(DataError, match=words):
        encoder.encode(TEXTS, "document")


def test_every_token_must_be_attended_to() -> None:
    read = text_batches.Read.of({"attention_mask": torch.tensor([[1, 0, 1]])}, torch.tensor([[True, True, True]]), False, {})
    assert not read.can_lie_unpadded()
    assert not text_batches.Read({"input_ids": torch.ones(1, 3)}, read.lengths).can_lie_unpadded()
