"""`multi-vector:` on tiny transformers-native ColPali and ColQwen2 checkpoints: pages and queries, against transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints as tiny
from maxsim_eval.encoders import multi_vector
from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import UsageError

QUERIES = ["what melts?", "a", "x" * 40, "glacier 2019"]
Find = Callable[[str], Path]


@pytest.fixture(params=["colpali", "colqwen2"])
def folder(request: pytest.FixtureRequest, checkpoint_of: Find) -> Path:
    return checkpoint_of(str(request.param))


def alone(folder: Path, **inputs: Any) -> torch.Tensor:
    """Embeddings of one text or page by transformers, without sentence-transformers: masked tokens dropped."""
    import transformers

    kind = "ColPali" if "colpali" in folder.name else "ColQwen2"
    processor = getattr(transformers, f"{kind}Processor").from_pretrained(folder)
    model = getattr(transformers, f"{kind}ForRetrieval").from_pretrained(folder, dtype=torch.float32).eval()
    batch = processor(**inputs)
    batch.pop("labels", None)
    with torch.inference_mode():
        found = model(**batch).embeddings[0]
    return torch.as_tensor(found[batch["attention_mask"][0].bool()])


def test_pages_and_queries_are_what_transformers_gives_alone(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}", device="cpu", batch_size=1)
    pages = tiny.pages()
    packed = encoder.encode(pages, "document")
    assert (packed.dim, packed.dtype) == (8, torch.float32)
    for number, page in enumerate(pages):
        assert torch.allclose(packed[number], alone(folder, images=[page.convert("RGB")]), atol=1e-6), number
    queries = encoder.encode(QUERIES, "query")
    for number, query in enumerate(QUERIES):
        assert torch.allclose(queries[number], alone(folder, text=[query]), atol=1e-6), query
    assert torch.allclose(queries.values.norm(dim=1), torch.ones(len(queries.values)), atol=1e-5), "no padding was left"


def test_pages_are_exactly_what_the_library_gives(folder: Path) -> None:
    from sentence_transformers import MultiVectorEncoder as Library

    direct = Library(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32})
    encoder = get_encoder(f"multi-vector:{folder}", batch_size=1)
    pages = tiny.pages()
    packed, queries = encoder.encode(pages, "document"), encoder.encode(QUERIES, "query")
    for number, page in enumerate(pages):
        assert torch.equal(packed[number], direct.encode_document([page.convert("RGB")])[0])
    for number, query in enumerate(QUERIES):
        assert torch.equal(queries[number], direct.encode_query([query])[0])


def test_a_page_as_a_query_has_the_tokens_of_the_page(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}", batch_size=1)
    pages = tiny.pages()
    as_queries, as_documents = encoder.encode(pages, "query"), encoder.encode(pages, "document")
    assert torch.equal(as_queries.values, as_documents.values)
    assert as_queries.lengths.tolist() == as_documents.lengths.tolist()
    mixed = encoder.encode(["what melts?", pages[0], "", pages[2]], "query")
    assert torch.equal(mixed[1], as_documents[0])
    assert torch.equal(mixed[3], as_documents[2])
    assert torch.equal(mixed[0], encoder.encode(["what melts?"], "query")[0])
    assert mixed.lengths[2] == 0


def test_batches_of_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tiny.pages()
    expected = get_encoder(f"multi-vector:{folder}", batch_size=1).encode(pages, "document")
    encoder = MultiVectorEncoder(str(folder))
    assert encoder.batches["page"].size == 4
    packed = encoder.encode(pages, "document")
    assert packed.lengths.tolist() == expected.lengths.tolist()
    assert torch.allclose(packed.values, expected.values, atol=1e-5)
    original, sizes = encoder._library().preprocess, []

    def small(items: list[Any], **options: Any) -> Any:
        sizes.append(len(items))
        if len(items) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert items[0].mode == "RGB"
        return original(items, **options)

    monkeypatch.setattr(encoder._library(), "preprocess", small)
    with pytest.warns(RuntimeWarning, match="with 4 pages at once; continuing with 2"):
        again = encoder.encode(pages, "document")
    assert sizes == [4, 2, 1, 1, 1, 1, 1]
    assert encoder.batches["text"].size == 32, "texts have their own batch size"
    assert torch.equal(again.values, expected.values)
    monkeypatch.setattr(encoder._library(), "preprocess", lambda *_, **__: small([1, 2]))
    with pytest.raises(UsageError, match="with one page of 100x60 pixels; choose a smaller dtype or choose another device"):
        encoder.encode(pages, "document")


def test_what_these_checkpoints_do_not_read_or_obey(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}")
    with pytest.raises(UsageError, match="reads page images as documents; item 1 is a text"):
        encoder.encode(["", "a text"], "document")
    for option, value in (("max_query_tokens", 9), ("max_document_tokens", 9), ("document_prompt", "page: ")):
        with pytest.raises(UsageError, match=rf"{option}: got .* processor .* decides the tokens"):
            get_encoder(f"multi-vector:{folder}", **{option: value})
    asked = get_encoder(f"multi-vector:{folder}", query_prompt="find: ", batch_size=1)
    assert torch.equal(asked.encode(["a"], "query")[0], encoder.encode(["find: a"], "query")[0])
    assert asked.fingerprint("query") != encoder.fingerprint("query")


def test_half_precision(folder: Path) -> None:
    encoder = get_encoder(f"multi-vector:{folder}", dtype="bfloat16")
    packed = encoder.encode(tiny.pages(), "document")
    assert packed.dtype == torch.bfloat16
    exact = get_encoder(f"multi-vector:{folder}").encode(tiny.pages(), "document")
    assert packed.lengths.tolist() == exact.lengths.tolist()
    assert float((packed.values.float() - exact.values).abs().max()) < 0.1


def test_the_default_on_a_gpu_has_the_range_of_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multi_vector.PAGES_DTYPE_ON, "cpu", multi_vector.PAGES_DTYPE_ON["cuda"])
    encoder = MultiVectorEncoder(str(folder), device="cpu")
    assert (encoder.model_dtype, encoder.other_dtypes) == (torch.bfloat16, [])
    assert MultiVectorEncoder(str(folder), device="cpu", dtype="float32").model_dtype == torch.float32
