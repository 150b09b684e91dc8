"""A random BERT of a few megabytes, made on the spot from texts; the other examples here use it where no model is named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write(folder: Path, texts: Iterable[str], *, words: int = 8000, width: int = 128, length: int = 256) -> Path:
    """Write model and tokenizer: the commonest words are tokens, others are spelled in letters."""
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    letters = sorted({letter for word in counts for letter in word})
    vocabulary = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)])
    vocabulary |= dict.fromkeys(word for word, _ in counts.most_common(words))
    numbered = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = BertTokenizerFast(vocab=numbered, do_lower_case=True, model_max_length=length)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(numbered),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    return folder
