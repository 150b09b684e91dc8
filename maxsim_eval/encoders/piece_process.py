"""A process that turns texts into word pieces: `python piece_process.py`, begun by `readers.py` and spoken to in pickles.

It reads a tokenizer as JSON and answers with a greeting; then requests, each answered by ids and lengths as two flat arrays.
It ends with its input. It imports neither torch nor this package, so that it begins in a quarter of a second and needs no guard
in the script that encodes, as multiprocessing's processes would.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

import numpy as np


@dataclass(frozen=True)
class Plain:
    """A BERT tokenizer without its normalizer, which takes two fifths of the time, for texts that it would only lower-case.

    What else it handles (accents, control characters, Chinese, blanks of all kinds) does not occur in printable ASCII.
    """

    tokenizer: Any
    small: bool
    added: tuple[str, ...]  # tokens that are matched before a text is normalized

    @staticmethod
    def of(made: str) -> Plain | None:
        """From the tokenizer as JSON; None: another normalizer, or added tokens that are matched after it or are not ASCII."""
        from tokenizers import Tokenizer

        parts = json.loads(made)
        normalizer, added = parts["normalizer"] or {}, parts["added_tokens"]
        if normalizer.get("type") != "BertNormalizer":
            return None
        if any(one["normalized"] or not one["content"].isascii() for one in added):
            return None
        bare = Tokenizer.from_str(json.dumps({**parts, "normalizer": None}))
        return Plain(bare, normalizer["lowercase"], tuple(one["content"] for one in added))

    def text(self, text: str) -> str | None:
        """The text as normalized; None: that takes more than lower-casing, or might destroy or create an added token."""
        if not (text.isascii() and text.isprintable()):
            return None
        if not self.small:
            return text
        small = text.lower()
        found = [one for one in self.added if one.lower() in small]
        if not found:
            return small
        (one, *more) = found  # a prompt's own, as a rule
        kept = not more and one == one.lower() and small.split(one) == [part.lower() for part in text.split(one)]
        return small if kept else None


def pieces(
    tokenizer: Any, truncation: dict[str, Any] | None, special: bool, texts: list[str], plain: Plain | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all texts, concatenated `[sum]` int32, and how many each text has `[n]` int64; `plain`: of the same tokenizer."""
    small = [None if plain is None else plain.text(text) for text in texts]
    found = {True: iter(_rows(tokenizer, truncation, special, [text for text, one in zip(texts, small) if one is None]))}
    if plain is not None:
        found[False] = iter(_rows(plain.tokenizer, truncation, special, [one for one in small if one is not None]))
    rows = [next(found[one is None]) for one in small]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


def _rows(tokenizer: Any, truncation: dict[str, Any] | None, special: bool, texts: list[str]) -> list[list[int]]:
    """Ids of each text."""
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special
    if truncation is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(**truncation)
    return [one.ids for one in tokenizer.encode_batch_fast(texts)]


def main(read: BinaryIO, write: BinaryIO) -> None:
    """Answer until the input ends."""
    from tokenizers import Tokenizer

    made = pickle.load(read)
    tokenizer, plain = Tokenizer.from_str(made), Plain.of(made)
    answer: Any = "ready"
    while True:
        try:
            pickle.dump(answer, write, pickle.HIGHEST_PROTOCOL)
            write.flush()
            truncation, special, texts = pickle.load(read)
        except (EOFError, BrokenPipeError):  # whoever asked is gone
            return
        try:
            answer = pieces(tokenizer, truncation, special, texts, plain)
        except Exception as error:  # noqa: BLE001 (raised where it was asked)
            answer = error


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
