"""Tiny random checkpoints in the exact layouts of the real ones; each function writes one folder.

Shapes are small, weights random: what is tested is which tokens are kept, how, and that nothing is made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

DIM = 8
WORDS = ["glacier", "melt", "valley", "cat", "two", "the", "un", "##known", "##s", "a", ".", ","]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]


def pages() -> list[Image.Image]:
    """Page images of several sizes and modes: colour, grey, palette, with an alpha channel."""
    made = []
    for number, (mode, size) in enumerate(
        [("RGB", (60, 80)), ("L", (30, 40)), ("RGB", (100, 60)), ("P", (50, 50)), ("RGBA", (56, 84))]
    ):
        page = Image.new("RGB", size, "white")
        for row in range(4 + number, size[1] - 4, 7):
            page.paste((20 * number, 90, 200 - 9 * row % 200), (5, row, size[0] - 5 - 3 * (row % 5), row + 3))
        made.append(page.convert(mode))
    return made


def bert(folder: Path, words: list[str], length: int = 40) -> Any:
    """A random BERT for texts of up to `length` tokens; its tokenizer is written."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizerFast(vocab=vocabulary, do_lower_case=True, model_max_length=length).save_pretrained(folder)
    torch.manual_seed(0)
    return BertModel(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=length + 8,
        )
    )


def stanford(folder: Path) -> Path:
    """`HF_ColBERT`: weights behind `bert.`, the projection `linear.weight` beside them, `artifact.metadata`."""
    folder.mkdir(parents=True)
    model = bert(folder, [*SPECIAL, *WORDS])
    tensors = {f"bert.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors["linear.weight"] = torch.randn(DIM, 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", {**model.config.to_dict(), "architectures": ["HF_ColBERT"]})
    artifact = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 12, "doc_maxlen": 18}
    write(folder / "artifact.metadata", {**artifact, "attend_to_mask_tokens": False, "mask_punctuation": True, "dim": DIM})
    return folder


def pylate(folder: Path) -> Path:
    """PyLate's: `modules.json` with a Transformer and a Dense, lengths and markers in the top-level configuration."""
    folder.mkdir(parents=True)
    model = bert(folder, [*SPECIAL, *WORDS, "[Q]", "[D]"])
    model.save_pretrained(folder)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    write(
        folder / "modules.json",
        [{"idx": number, "name": str(number), "path": path, "type": kind} for number, (path, kind) in enumerate(modules)],
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 39, "do_lower_case": False})
    settings = {
        "__version__": {"sentence_transformers": "4.0.2"},
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "model_type": "ColBERT",
        "query_prefix": "[Q]",
        "document_prefix": "[D]",
        "query_length": 10,
        "document_length": 20,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [".", ","],
        "do_query_expansion": True,
    }
    write(folder / "config_sentence_transformers.json", settings)
    dense = {"in_features": 16, "out_features": DIM, "bias": False}
    (folder / "1_Dense").mkdir()
    write(folder / "1_Dense" / "config.json", {**dense, "activation_function": "torch.nn.modules.linear.Identity"})
    save_file({"linear.weight": torch.randn(DIM, 16)}, folder / "1_Dense" / "model.safetensors", metadata={"format": "pt"})
    return folder


def colpali(folder: Path) -> Path:
    """transformers' own ColPali: PaliGemma (Siglip and Gemma) under a projection, and its processor; 4 patches a page."""
    from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor, GemmaTokenizer
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    signs = ["<pad>", "<eos>", "<bos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789:.?QD", "▁", "\n"]
    tokenizer = GemmaTokenizer(vocab={sign: number for number, sign in enumerate(signs)}, merges=[], model_max_length=120)
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = ColPaliProcessor(image_processor=images, tokenizer=tokenizer)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "gemma", "vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 8, "num_image_tokens": 4}
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "vision_use_head": False}
    config = ColPaliConfig(
        vlm_config={
            "model_type": "paligemma",
            "image_token_index": processor.image_token_id,
            "projection_dim": 16,
            "text_config": {**layers, **text, "max_position_embeddings": 256},
            "vision_config": {**layers, **vision, "projection_dim": 16},
        },
        embedding_dim=DIM,
    )
    return _save_pages(folder, ColPaliForRetrieval, config, processor)


def colqwen2(folder: Path) -> Path:
    """transformers' own ColQwen2: patches by the size of the page."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor, Qwen2Tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    names = ["endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad"]
    special = [f"<|{name}|>" for name in names]
    vocabulary = {sign: number for number, sign in enumerate([*sorted(ByteLevel.alphabet()), *special])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=special[1:], model_max_length=300)
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size={"shortest_edge": 3136, "longest_edge": 12544})
    processor = ColQwen2Processor(image_processor=images, tokenizer=tokenizer)
    ids = {f"{name}_token_id": vocabulary[f"<|{name}|>"] for name in names[3:5]}
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {"model_type": "qwen2_vl_text", "vocab_size": len(vocabulary), "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = ColQwen2Config(
        vlm_config={
            "model_type": "qwen2_vl",
            "image_token_id": vocabulary["<|image_pad|>"],
            "video_token_id": vocabulary["<|video_pad|>"],
            **ids,
            "text_config": {**layers, **text, "max_position_embeddings": 256, "bos_token_id": 256, "eos_token_id": 258},
            "vision_config": {**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
        embedding_dim=DIM,
    )
    return _save_pages(folder, ColQwen2ForRetrieval, config, processor)


def _save_pages(folder: Path, model: Any, config: Any, processor: Any) -> Path:
    torch.manual_seed(0)
    model(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write(path: Path, content: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(content), encoding="utf-8")


MAKERS = {"stanford": stanford, "pylate": pylate, "colpali": colpali, "colqwen2": colqwen2}
