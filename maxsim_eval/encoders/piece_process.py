"""A process that turns texts into word pieces: `python piece_process.py`, begun by `readers.py` and spoken to in pickles.

First comes a tokenizer as JSON, which a greeting answers; then requests, each answered by ids and lengths as two flat arrays. It ends
with its input. It imports neither torch nor this package, so that it begins in 0.1 s and needs no guard in the script that encodes, as
multiprocessing's processes would.
"""

from __future__ import annotations

import pickle
import sys
from itertools import chain
from typing import Any, BinaryIO

import numpy as np


def pieces(tokenizer: Any, truncation: dict[str, Any] | None, special: bool, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all texts, one behind the other `[sum]` int32, and how many each text has `[n]` int64."""
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special
    if truncation is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(**truncation)
    rows = [one.ids for one in tokenizer.encode_batch_fast(texts)]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


def main(read: BinaryIO, write: BinaryIO) -> None:
    """Answer until the input ends."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(pickle.load(read))
    answer: Any = "ready"
    while True:
        try:
            pickle.dump(answer, write, pickle.HIGHEST_PROTOCOL)
            write.flush()
            request = pickle.load(read)
        except (EOFError, BrokenPipeError):  # whoever asked is gone
            return
        try:
            answer = pieces(tokenizer, *request)
        except Exception as error:  # noqa: BLE001 (raised where it was asked)
            answer = error


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
