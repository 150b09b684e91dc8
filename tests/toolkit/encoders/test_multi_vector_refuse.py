"""Checkpoints that `multi-vector:` refuses: without projection, damaged, foreign, with code in them; each with one clear message."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_checkpoints as tiny
from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError, MissingPackageError

Copy = Callable[[str], Path]


@pytest.fixture
def copy(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Copy:
    return lambda layout: Path(shutil.copytree(checkpoint_of(layout), tmp_path / layout))


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def without(path: Path, part: str) -> None:
    """Take the tensors whose names hold `part` out of a weight file."""
    kept = {name: tensor for name, tensor in load_file(path).items() if part not in name}
    save_file(kept, path, metadata={"format": "pt"})


def encode(folder: Path) -> None:
    """Encode what the checkpoint reads."""
    pages = folder.name.startswith("col")
    get_encoder(f"multi-vector:{folder}").encode(tiny.pages()[:1] if pages else ["cat"], "document")


# Without projection ----------------------------------------------------------------------------------------------------


def test_a_stanford_checkpoint_without_projection(copy: Copy) -> None:
    folder = copy("stanford")
    without(folder / "model.safetensors", "linear")
    with pytest.raises(DataError, match=r"no 'linear.weight': the projection layer is missing\. Options: .*--encoder lexical"):
        encode(folder)


@pytest.mark.parametrize("layout", ["colpali", "colqwen2"])
def test_pages_without_projection(layout: str, copy: Copy) -> None:
    folder = copy(layout)
    without(folder / "model.safetensors", "embedding_proj_layer")
    with pytest.raises(DataError, match=r"2 weights are missing, first 'embedding_proj_layer.bias': random numbers would"):
        encode(folder)


def test_a_pylate_checkpoint_without_projection(copy: Copy) -> None:
    folder = copy("pylate")
    modules = json.loads((folder / "modules.json").read_text())
    tiny.write(folder / "modules.json", modules[:1])
    with pytest.raises(
        DataError, match=r"modules.json names no Dense module .* saved as ColBERT: its projection layer is missing"
    ):
        get_encoder(f"multi-vector:{folder}")
    tiny.write(folder / "modules.json", modules)
    (folder / "1_Dense" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"its weights could not be loaded: Could not find 'model.safetensors'"):
        encode(folder)


def test_a_plain_transformer_and_a_plain_sentence_transformer(copy: Copy) -> None:
    folder = copy("pylate")
    for name in ("config_sentence_transformers.json", "1_Dense/config.json"):
        (folder / name).unlink()
    tiny.write(
        folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    )
    with pytest.raises(DataError, match=r"saved as SentenceTransformer: its projection layer is missing"):
        get_encoder(f"multi-vector:{folder}")
    (folder / "modules.json").unlink()
    with pytest.raises(DataError, match=r"config.json names BertModel .* no projection layer; hf:<id or path> gives"):
        get_encoder(f"multi-vector:{folder}")
    tiny.write(folder / "adapter_config.json", {})
    with pytest.raises(DataError, match=r"an adapter without its model; need .* vidore/colpali-v1.2-hf"):
        get_encoder(f"multi-vector:{folder}")


@pytest.mark.parametrize("layout", ["stanford", "pylate", "colpali"])
def test_a_weight_inside_the_transformer_is_missing(layout: str, copy: Copy) -> None:
    folder = copy(layout)
    name = next(
        name
        for name in load_file(folder / "model.safetensors")
        if name.endswith("layers.1.mlp.gate_proj.weight" if layout == "colpali" else "layer.1.output.dense.weight")
    )
    without(folder / "model.safetensors", name)
    with pytest.raises(DataError, match=r"1 weights are missing, first '.*1.*weight': random numbers would take their place"):
        encode(folder)


# Damaged or foreign ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["stanford", "pylate", "colpali"])
def test_truncated_weights(layout: str, copy: Copy) -> None:
    weights = copy(layout) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(DataError, match=r"its weights could not be loaded: .*Options"):
        encode(weights.parent)


@pytest.mark.parametrize(
    ("layout", "file", "content", "said"),
    [
        ("stanford", "config.json", "{", "config.json is no JSON"),
        ("stanford", "config.json", "[]", "config.json holds a list, need a JSON object"),
        ("stanford", "artifact.metadata", "nothing", "artifact.metadata is no JSON"),
        ("pylate", "modules.json", "{}", "modules.json holds no list of modules"),
        ("pylate", "1_Dense/config.json", "7", "1_Dense/config.json holds a int"),
        ("pylate", "config_sentence_transformers.json", '{"model_type": "CrossEncoder"}', "it was saved as a CrossEncoder"),
    ],
)
def test_damaged_small_files(layout: str, file: str, content: str, said: str, copy: Copy) -> None:
    folder = copy(layout)
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=said):
        get_encoder(f"multi-vector:{folder}")


def test_files_and_weights_that_disagree(copy: Copy) -> None:
    folder = copy("stanford")
    change(folder / "artifact.metadata", dim=128)
    with pytest.raises(DataError, match=r"its files promise embeddings of d = 128, its weights give 8"):
        encode(folder)


def test_embeddings_that_are_no_numbers(copy: Copy) -> None:
    folder = copy("stanford")
    tensors = load_file(folder / "model.safetensors")
    tensors["linear.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"NaN or infinity for item 1 of 3 in float32"):
        get_encoder(f"multi-vector:{folder}").encode(["", "cat", "the"], "document")


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)

    def __init__(self, folder: Path) -> None:
        self.folder = folder


@pytest.mark.parametrize("layout", ["stanford", "pylate"])
def test_pickled_code_is_refused_and_not_run(layout: str, copy: Copy, tmp_path: Path) -> None:
    folder = copy(layout)
    place = folder / ("1_Dense" if layout == "pylate" else ".")
    (place / "model.safetensors").unlink()
    for legacy in (False, True):
        if legacy:
            (place / "pytorch_model.bin").write_bytes(pickle.dumps({"linear.weight": _Trap(tmp_path / "sprung")}, protocol=2))
        else:
            torch.save({"linear.weight": _Trap(tmp_path / "sprung")}, place / "pytorch_model.bin")
        with pytest.raises(DataError, match="its weights could not be loaded: "):
            encode(folder)
        assert not (tmp_path / "sprung").exists()


def test_weights_without_safetensors_are_read(copy: Copy, checkpoint_of: Callable[[str], Path]) -> None:
    folder = copy("stanford")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = get_encoder(f"multi-vector:{folder}").encode(["cat"], "document")
    expected = get_encoder(f"multi-vector:{checkpoint_of('stanford')}").encode(["cat"], "document")
    assert torch.equal(found.values, expected.values)


def test_code_in_a_checkpoint_is_not_run(copy: Copy, tmp_path: Path) -> None:
    folder = copy("pylate")
    change(folder / "1_Dense" / "config.json", activation_function="mine.Activation")
    with pytest.raises(DataError, match=r"activation 'mine.Activation' is code from elsewhere, which is not run"):
        get_encoder(f"multi-vector:{folder}")
    change(folder / "1_Dense" / "config.json", activation_function="torch.nn.modules.linear.Identity")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "mine.Transformer"
    tiny.write(folder / "modules.json", modules)
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'sprung')!r})\nclass Transformer: pass\n")
    with pytest.raises(DataError, match=r"modules.json: module 'mine.Transformer' is code from elsewhere, which is not run"):
        encode(folder)
    assert not (tmp_path / "sprung").exists()


# Names, places, packages -----------------------------------------------------------------------------------------------


def test_the_revision_covers_every_file_that_matters(copy: Copy) -> None:
    folder = copy("pylate")
    before = MultiVectorEncoder(str(folder)).revision
    for name in ("README.md", ".cache/model.safetensors", "onnx/config.json", "training_args.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not read")
    assert MultiVectorEncoder(str(folder)).revision == before
    for name in ("1_Dense/model.safetensors", "config_sentence_transformers.json", "tokenizer.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert MultiVectorEncoder(str(folder)).revision != before, name
        (folder / name).write_bytes(content)


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"encoder multi-vector:.*gone: there is no such folder\. Options"):
        get_encoder(f"multi-vector:{tmp_path / 'gone'}")
    with pytest.raises(DataError, match=r"config\.json is missing: not a checkpoint"):
        get_encoder(f"multi-vector:{tmp_path}")


def test_a_missing_package_names_the_pip_command(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingPackageError, match=r"'sentence-transformers>=6.2'.* pip install 'maxsim-eval\[encoders\]'"):
        get_encoder(f"multi-vector:{copy('stanford')}")


def test_an_older_library_names_the_pip_command(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    import sentence_transformers

    encoder = get_encoder(f"multi-vector:{copy('stanford')}")
    monkeypatch.delattr(sentence_transformers, "MultiVectorEncoder")
    with pytest.raises(MissingPackageError, match=r"sentence-transformers>=6\.2"):
        encoder.encode(["cat"], "query")
