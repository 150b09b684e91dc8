"""Which kernel takes a call with tokens in few bits, in which configuration: pure, from shapes, dtypes and the architecture.

Never from the number of documents: a document gets the same bits however a corpus is cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from maxsim_kernels.checks import Call
from maxsim_kernels.coded import BitTokens, CodedTokens
from maxsim_kernels.gpu.forward.choice import Launch
from maxsim_kernels.gpu.forward.tuning import Config, Key, Row
from maxsim_kernels.gpu.forward.unaligned import UNTUNED, aligned
from maxsim_kernels.gpu.geometry import padded

HELD_BYTES = 256  # of a query row; wider ones come in slices
_SAFE = "untuned"
_LOOKED_UP = "one stage: loads issued ahead would make each weight's lookup a copy of four bytes"
# fmt: off
ROWS = (
    # By query rows that meet a document; more rows share the work of unpacking. Registers and shared memory as compiled for sm_90.
    Row("bits most", "any", (Key("coded", "bits", "most"),),
        Config(256, 64, 8, 2, 4, _SAFE, "whole numbers: two programs of 256 rows fit")),
    Row("bits many", "any", (Key("coded", "bits", "many"),),
        Config(128, 64, 8, 2, 4, _SAFE, "two programs fit")),
    Row("bits few", "any", (Key("coded", "bits", "few"),),
        Config(64, 32, 4, 2, 24, _SAFE, "four programs and more hide each other's waits")),
    Row("residual once", "sm_90", (Key("coded once", "residual"),),
        Config(64, 64, 4, 3, 3, "H200", "a token is decoded once for all query rows, which come from L2; three programs fit")),
    Row("residual once", "any", (Key("coded once", "residual"),),
        Config(64, 64, 4, 2, 3, _SAFE, "a token is decoded once for all query rows; two stages fit every shared memory")),
    Row("residual many", "any", (Key("coded", "residual", "many"),),
        Config(128, 64, 8, 1, 4, _SAFE, _LOOKED_UP)),
    Row("residual few", "sm_90", (Key("coded", "residual", "few"),),
        Config(64, 32, 4, 1, 24, "H200", _LOOKED_UP)),
    Row("residual few", "any", (Key("coded", "residual", "few"),),
        Config(64, 32, 4, 1, 24, _SAFE, _LOOKED_UP)),
    Row("exact", "any", (Key("coded", "bits", "exact"), Key("coded", "residual", "exact")),
        Config(32, 32, 4, 1, 8, _SAFE, "FP32 products without matrix units: small tiles keep registers")),
)
# fmt: on
TABLE: dict[tuple[Key, str], Row] = {(key, row.architecture): row for row in ROWS for key in row.keys}
_FEW_ROWS, _MANY_ROWS, _UNKNOWN_ROWS = 64, 128, 32
_MANY_COLUMNS = 128


def choose(call: Call, documents: CodedTokens, capability: tuple[int, int]) -> Launch:
    """The launch that scores a call: "coded", or "coded once", which decodes a tile of tokens for all query rows."""
    row = row_of(call, documents, capability)
    config = replace(row.config, rows=padded(_query_rows(call))) if row.keys[0].size == "few" else row.config
    if documents.dim > _MANY_COLUMNS and not aligned(call.queries):  # a thread would have to spill numbers and addresses
        config = replace(config, rows=min(64, config.rows), tokens=32, warps=8, **UNTUNED)
    return Launch(row.kernel, config)


def row_of(call: Call, documents: CodedTokens, capability: tuple[int, int]) -> Row:
    """The row of the table for a call: that of its architecture, else that of "any"."""
    key = _key(call, documents, _query_rows(call))
    return TABLE.get((key, f"sm_{capability[0]}{capability[1]}")) or TABLE[key, "any"]


def _key(call: Call, documents: CodedTokens, size: int) -> Key:
    """The key by which a call finds its row; `size`: query rows that meet a document."""
    bits = isinstance(documents, BitTokens)
    integer = bits and call.quantize_queries
    operands = "bits" if bits else "residual"
    if call.queries.dtype == torch.float32 and not integer:
        return Key("coded", operands, "exact")
    if size <= _FEW_ROWS:
        return Key("coded", operands, "few")
    narrow = documents.dim * (1 if integer else 2) <= HELD_BYTES
    if bits or not narrow or call.layout == "pairs":
        return Key("coded", operands, "most" if bits and narrow and size > _MANY_ROWS else "many")
    return Key("coded once", operands)


def _query_rows(call: Call) -> int:
    """Query rows that meet a document."""
    if call.query_starts is not None:  # of pairs it is not known here how long a query is
        return _UNKNOWN_ROWS if call.layout == "pairs" else call.queries.shape[0]
    return call.queries.shape[1] * (1 if call.layout == "pairs" else call.query_count)
