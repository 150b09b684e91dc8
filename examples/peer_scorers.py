"""Other libraries' scorers as functions of `Packed`, for `conform`: the table of docs/scorers.md is made with them.

PYTHONPATH=examples python evaluate.py conform python:peer_scorers:pylate
PYTHONPATH=examples python evaluate.py conform python:peer_scorers:flash_maxsim --device cuda
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from maxsim_kernels import Packed


def rows(tokens: Packed) -> list[Tensor]:
    """Token matrices `[L, d]`."""
    return [tokens[n] for n in range(len(tokens))]


def padded(tokens: Packed) -> tuple[Tensor, Tensor]:
    """`[N, L, d]` and its mask `[N, L]`."""
    block = pad_sequence(rows(tokens), batch_first=True)
    return block, torch.arange(block.shape[1], device=block.device) < tokens.lengths[:, None]


def sentence_transformers(queries: Packed, documents: Packed) -> Tensor:
    """sentence-transformers' `maxsim` of lists."""
    from sentence_transformers.util.similarity import maxsim

    return maxsim(rows(queries), rows(documents))


def pylate(queries: Packed, documents: Packed) -> Tensor:
    """PyLate's `colbert_scores` with masks, by its torch code."""
    from pylate.scores import colbert_scores

    (q, q_mask), (d, d_mask) = padded(queries), padded(documents)
    return colbert_scores(q, d, q_mask, d_mask, backend="torch")


def colpali_engine(queries: Packed, documents: Packed) -> Tensor:
    """colpali-engine's `score_multi_vector` of lists."""
    from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor

    return BaseVisualRetrieverProcessor.score_multi_vector(rows(queries), rows(documents), device=queries.values.device)


def late_interaction_kernels(queries: Packed, documents: Packed) -> Tensor:
    """late-interaction-kernels' `maxsim` with masks; needs a GPU."""
    from late_interaction_kernels import maxsim

    (q, q_mask), (d, d_mask) = padded(queries), padded(documents)
    return maxsim(q, d, q_mask=q_mask, d_mask=d_mask)


def flash_maxsim(queries: Packed, documents: Packed) -> Tensor:
    """flash-maxsim's `flash_maxsim_batched_train` with lengths; needs a GPU."""
    from flash_maxsim import flash_maxsim_batched_train

    (q, _), (d, _) = padded(queries), padded(documents)
    return flash_maxsim_batched_train(q, d, doc_lengths=documents.lengths.int(), query_lengths=queries.lengths.int())


def maxsim_cpu(queries: Packed, documents: Packed) -> Tensor:
    """maxsim-cpu's `maxsim_scores_variable`, a query at a time; float32 on CPUs."""
    from maxsim_cpu import maxsim_scores_variable

    held = [row.numpy() for row in rows(documents)]
    return torch.stack([torch.from_numpy(maxsim_scores_variable(row.numpy(), held)) for row in rows(queries)])
