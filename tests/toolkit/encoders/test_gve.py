"""`gve` on a local stand-in that brings its own code, with the interface of the real model's card.

The stand-in: `auto_map` in config.json and processor_config.json; `process_images(pages)` and `process_queries(texts)` give
batches of tensors; `model(**batch)` gives L2-normalised embeddings `[n, tokens, 128]`, zero where masked, of a page only the
last image tokens (fewer than went in).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import tiny_checkpoints as tiny
from maxsim_eval.encoders.gve import MODEL, REVISION, GveEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError, UsageError

QUERIES = ["what is the revenue?", "a", "who runs the second division of the group?", "two"]

CODE = """
import numpy
import torch
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

IMAGE = 1
KEPT = 9

class TinyConfig(PreTrainedConfig):
    model_type = "tiny_gve"
    hidden = 16

class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = torch.nn.Embedding(300, config.hidden)
        self.vision = torch.nn.Linear(12, config.hidden)
        self.mix = torch.nn.TransformerEncoderLayer(config.hidden, 2, 32, dropout=0.0, batch_first=True)
        self.custom_text_proj = torch.nn.Linear(config.hidden, 128)
        self.post_init()

    def forward(self, input_ids, attention_mask, pixel_values=None):
        states = self.words(input_ids)
        seen = input_ids == IMAGE
        if pixel_values is not None:
            states = states.masked_scatter(seen[..., None], self.vision(pixel_values.to(states.dtype)))
        states = self.mix(states, src_key_padding_mask=attention_mask == 0)
        if pixel_values is not None:
            places = torch.where(seen, torch.arange(seen.shape[1], device=seen.device), -1).topk(KEPT, dim=1).values.sort(dim=1).values
            states = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
            attention_mask = attention_mask.gather(1, places)
        found = self.custom_text_proj(states)
        found = found / (found.norm(dim=-1, keepdim=True) + 1e-8)
        return found * attention_mask[..., None]

class TinyProcessor(ProcessorMixin):
    def __init__(self):
        super().__init__()

    @classmethod
    def from_pretrained(cls, folder, **options):
        return cls()

    def process_images(self, images):
        assert all(image.mode == "RGB" for image in images)
        pixels = [torch.from_numpy(numpy.asarray(image.resize((8, 8)), dtype="float32").copy()) / 255 for image in images]
        patches = torch.stack([one.reshape(4, 2, 4, 2, 3).transpose(1, 2).reshape(16, 12) for one in pixels])
        ids = torch.tensor([[2, 3] + [IMAGE] * 16 + [4]] * len(images))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": patches}

    def process_queries(self, queries):
        rows = [[5, 6] + [10 + byte for byte in query.encode()][:60] + [7] * 3 for query in queries]
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

open(__file__ + ".ran", "w").close()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gve") / "standin"
    folder.mkdir()
    (folder / "tiny_code.py").write_text(CODE)
    config = {"model_type": "tiny_gve", "architectures": ["TinyModel"], "emb_dim_query": 128, "emb_dim_doc": 128}
    auto = {"AutoConfig": "tiny_code.TinyConfig", "AutoModel": "tiny_code.TinyModel"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    processor = {"processor_class": "TinyProcessor", "auto_map": {"AutoProcessor": "tiny_code.TinyProcessor"}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    space: dict[str, Any] = {"__file__": str(folder / "tiny_code.py"), "__name__": "tiny_code"}
    exec(CODE, space)
    torch.manual_seed(0)
    tensors = space["TinyModel"](space["TinyConfig"]()).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "tiny_code.py.ran").unlink()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, whose code transformers copies into a folder of this test only."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    return Path(shutil.copytree(made, tmp_path / "standin"))


def ran(tmp_path: Path) -> bool:
    """Whether the checkpoint's code was run."""
    return any(tmp_path.rglob("*.ran"))


def direct(folder: Path, dtype: torch.dtype = torch.float32) -> Callable[..., torch.Tensor]:
    """What the model card's few lines give: embeddings of one batch, padding still in them."""
    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)

    def encode(items: list[Any]) -> torch.Tensor:
        batch = processor.process_queries(items) if isinstance(items[0], str) else processor.process_images(items)
        with torch.no_grad():
            return torch.as_tensor(model(**batch))

    return encode


def test_pages_and_queries_are_what_the_models_own_code_gives(folder: Path, tmp_path: Path) -> None:
    encoder = get_encoder(f"gve:{folder}", trust_remote_code=True, dtype="float32", batch_size=1)
    assert (encoder.name, encoder.dim) == ("gve:standin", 128)
    pages, alone = tiny.pages(), direct(folder)
    packed = encoder.encode(pages, "document")
    assert packed.lengths.tolist() == [9] * 5
    for number, page in enumerate(pages):
        assert torch.allclose(packed[number], alone([page.convert("RGB")])[0], atol=1e-6)
    queries = encoder.encode(QUERIES, "query")
    assert queries.lengths.tolist() == [len(query) + 5 for query in QUERIES]
    for number, query in enumerate(QUERIES):
        assert torch.allclose(queries[number], alone([query])[0], atol=1e-6)
    assert ran(tmp_path)


def test_padding_is_dropped_and_order_comes_back(folder: Path) -> None:
    encoder = get_encoder(f"gve:{folder}", trust_remote_code=True, dtype="float32")
    one = get_encoder(f"gve:{folder}", trust_remote_code=True, dtype="float32", batch_size=1)
    mixed = [QUERIES[2], "", tiny.pages()[1], QUERIES[1]]
    packed, expected = encoder.encode(mixed, "query"), one.encode(mixed, "query")
    assert packed.lengths.tolist() == expected.lengths.tolist() == [len(QUERIES[2]) + 5, 0, 9, 6]
    assert torch.allclose(packed.values, expected.values, atol=1e-5)
    assert torch.allclose(packed.values.norm(dim=1), torch.ones(len(packed.values)), atol=1e-5)
    padded = direct(folder)(QUERIES)
    for number, length in enumerate(encoder.encode(QUERIES, "query").lengths.tolist()):
        assert torch.allclose(encoder.encode(QUERIES, "query")[number], padded[number, -length:], atol=1e-5)


def test_masked_tokens_of_a_page_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = GveEncoder(str(folder), trust_remote_code=True, dtype="float32")
    whole = encoder.encode(tiny.pages()[:2], "document")
    original = encoder._processor.process_images

    def masked(pages: list[Image.Image]) -> dict[str, torch.Tensor]:
        batch = dict(original(pages))
        batch["attention_mask"] = batch["attention_mask"].clone()
        batch["attention_mask"][0, 17:] = 0
        return batch

    monkeypatch.setattr(encoder._processor, "process_images", masked)
    packed = encoder.encode(tiny.pages()[:2], "document")
    assert sorted(packed.lengths.tolist()) == [8, 9]
    assert whole.lengths.tolist() == [9, 9]


def test_code_is_run_only_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    encoder = get_encoder(f"gve:{folder}")
    assert encoder.encode(["", " "], "query").lengths.tolist() == [0, 0]
    with pytest.raises(UsageError, match=r"Python code of its own, which is not run without --trust-remote-code.*import"):
        encoder.encode(tiny.pages(), "document")
    assert not ran(tmp_path)
    for name in (f"multi-vector:{folder}", f"hf:{folder}", "colbertv2", "colpali", "multi-vector:org/model"):
        with pytest.raises(UsageError, match="trust_remote_code is for gve only"):
            get_encoder(name, trust_remote_code=True)
    with pytest.raises(DataError, match="could not be loaded"):
        get_encoder(f"hf:{folder}", trust_remote_code=False)
    assert not ran(tmp_path)


def test_code_of_another_repository_is_not_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = f"other/repo--{config['auto_map']['AutoModel']}"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"its code lies in another repository \(other/repo--"):
        get_encoder(f"gve:{folder}", trust_remote_code=True).encode(tiny.pages(), "document")
    assert not ran(tmp_path)


def test_dtype_and_fingerprint(folder: Path) -> None:
    default = get_encoder(f"gve:{folder}", trust_remote_code=True)
    assert default.encode(tiny.pages()[:1], "document").dtype == torch.float16, "as the model card runs it"
    prints = default.fingerprint("document")
    same = get_encoder(f"gve:{folder}", trust_remote_code=False, batch_size=9, device="cpu").fingerprint("document")
    assert same == prints
    for options in ({"dtype": "bfloat16"}, {"embedding_dtype": "float32"}):
        assert get_encoder(f"gve:{folder}", **options).fingerprint("document") != prints
    with (folder / "tiny_code.py").open("a") as code:
        code.write("# another version\n")
    changed = get_encoder(f"gve:{folder}").fingerprint("document")
    assert changed["revision"] != prints["revision"], "code decides embeddings too"


def test_out_of_memory_and_what_is_not_read(folder: Path) -> None:
    encoder = GveEncoder(str(folder), trust_remote_code=True, dtype="float32")
    expected = encoder.encode(tiny.pages(), "document")
    model, sizes = encoder._model, []

    def small(**batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.as_tensor(model(**batch))

    encoder._model = small
    with pytest.warns(RuntimeWarning, match="with 4 pages at once; continuing with 2"):
        packed = encoder.encode(tiny.pages(), "document")
    assert sizes == [4, 2, 2, 1]
    assert torch.allclose(packed.values, expected.values, atol=1e-5)
    with pytest.raises(UsageError, match="reads page images as documents; item 0 is a text"):
        encoder.encode(["text"], "document")
    for option, value in (("max_query_tokens", 4), ("query_prompt", "find ")):
        with pytest.raises(UsageError, match=f"{option}: got .* the processor of gve:standin decides that itself"):
            get_encoder(f"gve:{folder}", **{option: value})


def test_bad_checkpoints(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "custom_text_proj" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"2 weights are missing, first 'custom_text_proj.bias': random numbers would"):
        get_encoder(f"gve:{folder}", trust_remote_code=True).encode(["two"], "query")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    code = (folder / "tiny_code.py").read_text()
    (folder / "tiny_code.py").write_text(code.replace("import numpy\n", "import numpy\nfrom transformers import NoSuchThing\n"))
    with pytest.raises(DataError, match=r"its weights could not be loaded: .*NoSuchThing.*Options"):
        get_encoder(f"gve:{folder}", trust_remote_code=True).encode(["two"], "query")


def test_embeddings_of_another_shape_are_refused(folder: Path) -> None:
    encoder = GveEncoder(str(folder), trust_remote_code=True, dtype="float32")
    encoder.encode(["two"], "query")
    for found, said in ((torch.ones(1, 128), r"\[1, 128\]"), (torch.ones(1, 3, 64), r"\[1, 3, 64\]"), ({}, "dict")):
        encoder._model = lambda found=found, **_: found
        with pytest.raises(DataError, match=rf"the model gave {said}, need embeddings \[1, tokens, 128\]"):
            encoder.encode(["two"], "query")


def test_the_public_model_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options["revision"]))
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for name in ("gve", f"gve:{MODEL}", "gve@main", "gve:org/other"):
        with pytest.raises(DataError, match="no network"):
            get_encoder(name)
    assert asked == [(MODEL, REVISION), (MODEL, REVISION), (MODEL, "main"), ("org/other", "main")]
