"""`multi-vector:` on tiny ColBERT checkpoints, Stanford's and PyLate's: the library's own embeddings, limits, prompts, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints as tiny
from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import UsageError
from maxsim_eval.types import Role

TEXTS = ["glacier melt", "a", "two cats . , the valley", "cat " * 90, "the melt of a glacier, unknown.", "zebra"]
LAYOUTS = ("stanford", "pylate")
Find = Callable[[str], Path]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(layout: str, checkpoint_of: Find) -> Path:
    return checkpoint_of(layout)


def library(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from sentence_transformers import MultiVectorEncoder as Library

    return Library(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_text_is_what_the_library_gives_alone(folder: Path, dtype: str) -> None:
    encoder = get_encoder(f"multi-vector:{folder}", device="cpu", batch_size=1, dtype=dtype)
    direct = library(folder, getattr(torch, dtype))
    for role, alone in (("query", direct.encode_query), ("document", direct.encode_document)):
        packed = encoder.encode(TEXTS, role)
        assert packed.values.dtype == getattr(torch, dtype)
        for number, text in enumerate(TEXTS):
            assert torch.equal(packed[number], alone([text])[0]), (role, text)


def test_what_is_kept_of_a_text(folder: Path, layout: str) -> None:
    encoder = get_encoder(f"multi-vector:{folder}")
    width, most = {"stanford": (12, 18), "pylate": (10, 20)}[layout]
    assert encoder.encode(TEXTS, "query").lengths.tolist() == [width] * len(TEXTS), "[MASK] fills every query"
    lengths = encoder.encode(TEXTS, "document").lengths.tolist()
    # [CLS], the marker and [SEP] stay; punctuation goes; what is too long is cut.
    assert lengths == [5, 4, 8, most, 10, 4]
    assert encoder.max_tokens == {"document": most}  # type: ignore[attr-defined]
    assert torch.allclose(encoder.encode(TEXTS, "document").values.norm(dim=1), torch.ones(sum(lengths)), atol=1e-5)


def test_empty_texts_have_no_tokens(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}")
    for role in ("query", "document"):
        assert encoder.encode(["", " \n", "cat"], role).lengths[:2].tolist() == [0, 0]
        nothing = encoder.encode([], role)
        assert (len(nothing), nothing.dim, nothing.dtype) == (0, 8, torch.float32)


def test_batches_are_of_similar_length_and_order_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = (MultiVectorEncoder(str(folder), batch_size=size) for size in (1, 4))
    expected = one.encode(TEXTS, "document")
    original, seen = many._forward, []

    def watched(features: dict[str, Any], role: Role) -> Any:
        seen.append(features["attention_mask"].sum(1).tolist())
        return original(features, role)

    monkeypatch.setattr(many, "_forward", watched)
    packed = many.encode(TEXTS, "document")
    assert [len(batch) for batch in seen] == [4, 2]
    lengths = [length for batch in seen for length in batch]
    assert lengths == sorted(lengths, reverse=True), "the longest first"
    assert packed.lengths.tolist() == expected.lengths.tolist()
    assert torch.allclose(packed.values, expected.values, atol=1e-5)
    assert torch.equal(packed.values, many.encode(TEXTS, "document").values)


# Options ---------------------------------------------------------------------------------------------------------------


def test_limits_replace_those_of_the_checkpoint(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}", max_query_tokens=7, max_document_tokens=6, batch_size=1)
    assert set(encoder.encode(TEXTS, "query").lengths.tolist()) == {7}
    documents = encoder.encode(TEXTS, "document")
    assert int(documents.lengths.max()) == 6
    direct = library(folder)
    direct[0].document_length = 6
    assert torch.equal(documents[3], direct.encode_document([TEXTS[3]])[0])
    assert encoder.max_tokens == {"document": 6}  # type: ignore[attr-defined]
    for option in ("max_query_tokens", "max_document_tokens"):
        with pytest.raises(UsageError, match=rf"{option}: got 0"):
            get_encoder(f"multi-vector:{folder}", **{option: 0})
        with pytest.raises(UsageError, match=rf"{option}: got 900, but .* reads at most \d+ tokens"):
            get_encoder(f"multi-vector:{folder}", **{option: 900}).encode(["cat"], "query")


def test_a_floor_of_query_tokens_never_passes_the_limit(checkpoint_of: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MultiVectorEncoder(str(checkpoint_of("stanford")), max_query_tokens=9)
    model = encoder._library()
    model[0].query_length = None
    model[0].query_expansion = {"strategy": "min", "length": 6, "attend": False}
    encoder._set_limits(model)
    assert encoder.encode(["cat", "cat " * 30], "query").lengths.tolist() == [6, 9]
    model[0].query_expansion = None
    encoder._set_limits(model)
    assert encoder.encode(["cat", "cat " * 30], "query").lengths.tolist() == [4, 9], "no expansion: the tokens alone"


def test_prompts_replace_those_of_the_checkpoint(folder: Path) -> None:
    plain = get_encoder(f"multi-vector:{folder}", batch_size=1)
    asked = get_encoder(f"multi-vector:{folder}", batch_size=1, query_prompt="the ", document_prompt="")
    direct = library(folder)
    assert torch.equal(asked.encode(["cat"], "query")[0], direct.encode_query(["cat"], prompt="the ")[0])
    assert torch.equal(asked.encode(["cat"], "document")[0], direct.encode_document(["cat"], prompt="")[0])
    assert asked.encode(["cat"], "document").lengths.tolist() == [3], "without the marker"
    assert not torch.equal(asked.encode(["cat"], "query").values, plain.encode(["cat"], "query").values)


def test_the_dtype_of_the_model_and_of_what_is_stored(folder: Path) -> None:
    exact = get_encoder(f"multi-vector:{folder}").encode(TEXTS, "document").values
    stored = get_encoder(f"multi-vector:{folder}", embedding_dtype="float16").encode(TEXTS, "document").values
    assert torch.equal(stored, exact.half()), "computed in float32, rounded once"
    computed = get_encoder(f"multi-vector:{folder}", dtype="bfloat16", embedding_dtype="float32")
    values = computed.encode(TEXTS, "document").values
    assert values.dtype == torch.float32
    assert 0 < float((values - exact).abs().max()) < 0.1
    for option in ("dtype", "embedding_dtype"):
        with pytest.raises(UsageError, match=rf"{option}: got 'int8', need float32, float16, bfloat16"):
            get_encoder(f"multi-vector:{folder}", **{option: "int8"})


def test_the_fingerprint_has_what_changes_embeddings_and_nothing_else(folder: Path) -> None:
    def prints(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        encoder = get_encoder(f"multi-vector:{folder}", **options)
        return encoder.fingerprint("query"), encoder.fingerprint("document")

    plain = prints()
    assert prints(device="cpu", batch_size=7, trust_remote_code=False) == plain
    for options in ({"dtype": "float16"}, {"embedding_dtype": "float16"}, {"dtype": "float16", "embedding_dtype": "float32"}):
        changed = prints(**options)
        assert changed[0] != plain[0]
        assert changed[1] != plain[1]
    assert prints(dtype="float16") != prints(embedding_dtype="float16")
    for role, options in (
        ("query", {"max_query_tokens": 9}),
        ("query", {"query_prompt": ""}),
        ("document", {"max_document_tokens": 9}),
    ):
        changed = prints(**options)
        assert (changed[0] != plain[0], changed[1] != plain[1]) == (role == "query", role == "document")
    assert str(folder) not in str(plain)


def test_nothing_is_loaded_before_something_is_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MultiVectorEncoder(str(folder))
    monkeypatch.setattr(
        "maxsim_eval.encoders.checkpoints.Checkpoint.weights", lambda *_, **__: pytest.fail("weights were asked for")
    )
    assert (encoder.dim, len(encoder.encode([""], "query"))) == (8, 1)
    assert encoder.fingerprint("query")["model"] == folder.name
    encoder.prepare(TEXTS)


# Memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_out_of_memory_halves_the_batch_and_says_so_once(
    folder: Path, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = MultiVectorEncoder(str(folder), batch_size=4)
    expected = encoder.encode(TEXTS, "document")
    original, sizes = encoder._forward, []

    def small(features: dict[str, Any], role: Role) -> Any:
        sizes.append(len(features["input_ids"]))
        if len(features["input_ids"]) > 1:
            raise error
        return original(features, role)

    monkeypatch.setattr(encoder, "_forward", small)
    with pytest.warns(RuntimeWarning, match=r"out of memory on cpu with 4 texts at once; continuing with 2") as said:
        packed = encoder.encode(TEXTS, "document")
    assert len(said) == 1
    assert said[0].filename == __file__, "the warning points at the caller"
    assert sizes[:3] == [4, 2, 1]
    assert sizes[-1] == 1
    assert packed.lengths.tolist() == expected.lengths.tolist()
    assert torch.allclose(packed.values, expected.values, atol=1e-5)


def test_no_memory_for_one_text_and_other_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MultiVectorEncoder(str(folder), batch_size=1)

    def fail(message: str) -> None:
        def call(*_: Any) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr(encoder, "_forward", call)

    fail("out of memory")
    with pytest.raises(UsageError, match=r"with one text of 1\d tokens; lower max_document_tokens or choose another device"):
        encoder.encode(TEXTS[:1], "query")
    fail("something else")
    with pytest.raises(RuntimeError, match="something else"):
        encoder.encode(TEXTS, "query")


def test_only_text_is_read(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}")
    with pytest.raises(UsageError, match=r"reads texts and PIL images; item 1 is a NoneType"):
        encoder.encode(["cat", None], "query")
    with pytest.raises(UsageError, match=r"reads text; item 0 is a page image"):
        encoder.encode(tiny.pages(), "document")
