"""Run under TRITON_INTERPRET=1 in a process of its own (the variable counts before Triton is first imported).

    TRITON_INTERPRET=1 python interpreted_forward.py GROUP

Every forward kernel, with small tiles so that small shapes cross tile edges, against the FP64 reference; output memory is poisoned.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import quick_interpreter  # noqa: F401 - kernels run under it
import torch

from maxsim_kernels import Packed, maxsim_reference, quantize_fp8, quantize_int8
from maxsim_kernels.checks import Options, validate
from maxsim_kernels.gpu import geometry
from maxsim_kernels.gpu.forward import dense, dispatch, general, wide
from maxsim_kernels.gpu.forward.query_codes import query_codes
from maxsim_kernels.gpu.forward.tuning import Config
from maxsim_kernels.ops import finished

SMALL = Config(16, 16, 4, 1, 2, "interpreter", "small tiles", short=8, bits=True)
ALONE = replace(SMALL, programs=0)
FALSE_PROCESSORS = 2
CHECKED: list[str] = []
plain = torch.empty


def poisoned(*size: Any, **options: Any) -> torch.Tensor:
    """Memory nobody has written shows as NaN or as a number no index has: a missed store fails loudly."""
    tensor = plain(*size, **options)
    return tensor.fill_(torch.nan if tensor.dtype.is_floating_point and tensor.element_size() > 1 else 99)


def norms(tokens: Any) -> torch.Tensor:
    held = tokens.dequantize() if hasattr(tokens, "dequantize") else tokens
    return (held.values if isinstance(held, Packed) else held).double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)


def bound(queries: Any, documents: Any) -> float:
    """The contract's, for the largest document and every query token together (never looser than 2e-6 of what a query could score)."""
    asked, held = norms(queries), norms(documents)
    whole = asked.sum() if isinstance(queries, Packed) else asked.sum(-1).max()
    return 2e-6 * float(whole * held.max()) + 1e-12 if asked.numel() and held.numel() else 1e-12


def pretend(processors: int) -> None:
    """CPU tensors are taken for those of a GPU of sm_90 with so many multiprocessors."""
    for module in (geometry, dense, wide, general, dispatch):
        module.hardware = lambda device: ((9, 0), processors)


def check(
    queries: torch.Tensor | Packed, documents: Any, kernel: str, *, pairs: bool = False, winners: bool = False,
    processors: int = FALSE_PROCESSORS, quantize_queries: bool = True, config: Config = SMALL, **valid: torch.Tensor,
) -> None:  # fmt: skip
    names = ("query_mask", "document_mask", "query_lengths", "document_lengths")
    held = {name: valid.get(name) for name in names}
    truth, places = maxsim_reference(
        queries, documents, dtype=torch.float64, return_argmax=True, pairs=pairs, quantize_queries=quantize_queries, **held
    )
    call = validate(queries, documents, Options(pairs=pairs, quantize_queries=quantize_queries, return_argmax=winners, **held))
    chosen: list[str] = []
    pretend(processors)

    def force(call: Any, hardware: Any) -> tuple[str, Config]:
        chosen.append(kernel)
        return kernel, config

    # The interpreter rounds some ties to FP8 the other way; on a GPU the kernel's own codes are tested.
    if hasattr(documents, "codes") and call.documents.dtype == torch.float8_e4m3fn:
        dispatch.query_codes = lambda asked, dtype: ((held := quantize_fp8(asked, "token")).codes, held.scales.float())
    else:
        dispatch.query_codes = query_codes
    original, dispatch.choose = dispatch.choose, force
    torch.empty = poisoned
    try:
        scores, argmax = dispatch.forward(call)
    finally:
        dispatch.choose = original
        torch.empty = plain
    assert chosen in ([kernel], [])
    if call.single_query:
        scores = scores[0]
        argmax = argmax[0] if winners else argmax
    assert scores.shape == truth.shape, (kernel, scores.shape, truth.shape)
    torch.testing.assert_close(scores.double(), truth, rtol=0.0, atol=bound(queries, documents), equal_nan=True)
    if winners:
        assert argmax.shape == places.shape, (kernel, argmax.shape, places.shape)
        assert torch.equal(argmax, places), (kernel, argmax, places)
    CHECKED.append(kernel)
    if kernel == "stream" and config is SMALL:  # that was few programs for all documents: now one for each
        check(
            queries, documents, kernel, pairs=pairs, winners=winners, processors=processors, quantize_queries=quantize_queries,
            config=ALONE, **valid,
        )  # fmt: skip


def ragged(lengths: torch.Tensor, d: int, dtype: torch.dtype) -> Packed:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Packed(torch.randn(int(offsets[-1]), d).to(dtype), offsets)


def check_general() -> None:
    for dtype, (nq, lq, b, ld, d) in (
        (torch.float16, (1, 5, 7, 19, 8)), (torch.float32, (3, 17, 4, 33, 20)), (torch.float16, (2, 40, 3, 16, 16)),
        (torch.float32, (5, 3, 6, 1, 1)), (torch.float16, (1, 20, 2, 63, 200)), (torch.float32, (2, 9, 2, 20, 100)),
    ):  # fmt: skip
        queries, documents = torch.randn(nq, lq, d).to(dtype), torch.randn(b, ld, d).to(dtype)
        query_lengths, lengths = torch.randint(0, lq + 1, (nq,)), torch.randint(0, ld + 1, (b,))
        lengths[0] = 0
        query_mask, mask = torch.rand(nq, lq) > 0.3, torch.rand(b, ld) > 0.3
        hidden = documents.clone()
        hidden[~mask] = torch.nan
        broken = documents.clone()
        broken[-1, -1] = torch.nan
        check(queries, documents, "general")
        check(queries[0], documents, "general", winners=True)
        check(queries, documents, "general", winners=True, query_lengths=query_lengths, document_lengths=lengths)
        check(queries, hidden, "general", winners=True, query_mask=query_mask, document_mask=mask, document_lengths=lengths)
        check(queries, broken, "general", winners=True)
        check(queries, documents.transpose(1, 2).contiguous().transpose(1, 2), "stream")
        docs = ragged(lengths, d, dtype)
        check(queries, docs, "general", query_mask=query_mask, winners=True)
        check(queries, docs.select(list(range(b - 1, -1, -1))), "stream")
        asked = ragged(query_lengths, d, dtype)
        check(asked, docs, "general", winners=True)
        check(asked, documents, "general", document_mask=mask, winners=True)
        own = torch.randn(nq, b, ld, d).to(dtype)
        check(queries, own, "general", winners=True, document_lengths=torch.randint(0, ld + 1, (nq, b)), query_mask=query_mask)
        check(queries, own, "general", document_mask=torch.rand(nq, b, ld) > 0.5)
        check(asked, own, "general")
        check(queries, documents[:1].expand(nq, ld, d), "general", pairs=True, winners=True, query_lengths=query_lengths)
        check(asked, ragged(torch.randint(0, ld + 1, (nq,)), d, dtype), "general", pairs=True, winners=True)


def check_split() -> None:
    for nq, lq, b, d in ((1, 5, 2, 16), (2, 20, 1, 8)):
        queries, documents = torch.randn(nq, lq, d).half(), torch.randn(b, 200, d).half()
        lengths = torch.randint(100, 200, (b,))
        mask = torch.rand(b, 200) > 0.3
        check(queries, documents, "general", winners=True, processors=64)
        check(queries, documents, "stream", processors=64, document_lengths=lengths)
        check(
            queries, documents, "general", winners=True, processors=64, document_mask=mask, query_mask=torch.rand(nq, lq) > 0.3
        )
        check(queries, ragged(lengths, d, torch.float16), "general", winners=True, processors=64)
        own = torch.randn(nq, b, 200, d).half()
        check(queries, own, "general", winners=True, processors=64, document_mask=torch.rand(nq, b, 200) > 0.3)
        check(queries, own[:, 0], "general", pairs=True, winners=True, processors=64)
        check(queries, documents, "dense", processors=64)
        check(queries, ragged(lengths, d, torch.float16), "ragged", processors=64)
        check(queries, documents, "wide", processors=64, document_lengths=lengths)


def check_tiles() -> None:
    for nq, lq, b, ld, d in ((3, 20, 4, 19, 16), (2, 9, 5, 33, 32), (1, 70, 3, 16, 8), (9, 4, 3, 7, 24), (5, 32, 3, 40, 16)):
        queries, documents = torch.randn(nq, lq, d).half(), torch.randn(b, ld, d).half()
        query_lengths, lengths = torch.randint(0, lq + 1, (nq,)), torch.randint(0, ld + 1, (b,))
        lengths[0] = 0
        query_mask = torch.rand(nq, lq) > 0.3
        broken = documents.clone()
        broken[-1, -1] = torch.nan
        hidden = queries.clone()
        hidden[~query_mask] = torch.nan
        docs, asked = ragged(lengths, d, torch.float16), ragged(query_lengths, d, torch.float16)
        for kernel in ("dense", "wide"):
            check(queries, documents, kernel, winners=True)
            check(hidden, broken, kernel, winners=True, query_lengths=query_lengths, query_mask=query_mask)
            check(asked, documents, kernel, winners=True)
            check(queries, torch.randn(b, ld + 3, d).half()[:, :ld], kernel)
        for kernel in ("ragged", "wide"):
            check(queries, docs, kernel, winners=True, query_mask=query_mask)
            check(queries, docs.select([b - 1, 0, 1, 1]), kernel, query_lengths=query_lengths)
            check(asked, docs, kernel, winners=True)
            check(queries, documents, kernel, document_lengths=lengths)


def check_masks() -> None:
    """Padding, holes, both and nothing left, in the kernels that list tokens of documents with holes or read the mask."""
    for nq, lq, b, ld, d in ((3, 20, 6, 19, 16), (2, 9, 6, 33, 32), (1, 70, 7, 16, 8), (9, 4, 6, 7, 24)):
        queries, documents = torch.randn(nq, lq, d).half(), torch.randn(b, ld + 3, d).half()[:, :ld]
        lengths, query_lengths = torch.randint(1, ld + 1, (b,)), torch.randint(0, lq + 1, (nq,))
        mask = torch.arange(ld) < lengths[:, None]  # padding
        mask[0], mask[1] = True, False
        mask[2] &= torch.rand(ld) > 0.4
        mask[3, 0] = False
        mask[4] = torch.arange(ld) >= ld // 2  # on the left
        hidden = documents.clone()
        hidden[~mask] = torch.nan
        asked = ragged(query_lengths, d, torch.float16)
        for kernel in ("ragged", "wide"):
            check(queries, hidden, kernel, document_mask=mask)
            check(queries, hidden, kernel, winners=True, document_mask=mask, query_mask=torch.rand(nq, lq) > 0.3)
            check(queries, documents, kernel, winners=True, document_mask=mask, document_lengths=torch.randint(0, ld + 1, (b,)))
            check(asked, hidden, kernel, winners=True, document_mask=mask)
            check(queries, hidden.clone(), kernel, document_mask=mask, query_lengths=query_lengths)
            broken = documents.clone()
            broken[mask.nonzero()[0, 0], mask.nonzero()[0, 1], 0] = torch.nan
            check(queries, broken, kernel, winners=True, document_mask=mask)
            check(queries[:1], torch.randn(2, 200, d).half(), kernel, processors=64, document_mask=torch.rand(2, 200) > 0.3)
        wide = torch.randn(nq, lq, 32), torch.randn(b, ld, 32)
        for granularity in ("token", "document", "corpus"):
            for kernel in ("ragged", "wide"):
                check(wide[0], quantize_int8(wide[1], granularity), kernel, winners=True, document_mask=mask)
            check(wide[0], quantize_fp8(wide[1], granularity), "ragged", document_mask=mask)
        check(*wide, "wide", winners=True, document_mask=mask)


def check_codes() -> None:
    for nq, lq, b, ld, d in ((3, 20, 3, 19, 32), (2, 9, 2, 33, 48), (1, 40, 2, 7, 32)):
        queries, documents = torch.randn(nq, lq, d), torch.randn(b, ld, d)
        queries[0, 0] = 0
        documents[0, 0] = 0
        lengths = torch.randint(0, ld + 1, (b,))
        lengths[0], lengths[-1] = 0, ld  # never all empty: those calls go elsewhere
        docs, asked = ragged(lengths, d, torch.float32), ragged(torch.randint(0, lq + 1, (nq,)), d, torch.float32)
        own = torch.randn(nq, b, ld, d)
        for granularity in ("token", "document", "corpus"):
            whole, parts = quantize_int8(documents, granularity), quantize_int8(docs, granularity)
            affine = quantize_int8(documents, granularity, affine=True)
            eight, pieces = quantize_fp8(documents, granularity), quantize_fp8(docs, granularity)
            for kernel in ("dense", "general", "wide"):
                check(queries, whole, kernel, winners=kernel != "dense")
                check(queries.half(), eight, kernel)
                check(asked, whole, kernel)
            for kernel in ("ragged", "general", "wide"):
                check(queries, parts, kernel, winners=True)
                check(asked, parts, kernel)
                check(queries, pieces, kernel)
            check(queries, affine, "general", winners=True, document_lengths=lengths)
            check(queries.half(), whole, "general", quantize_queries=False)
            check(queries, affine, "stream", quantize_queries=False)
            check(queries, eight, "general", quantize_queries=False, winners=True)
            check(queries, quantize_int8(own, granularity), "general", document_lengths=torch.randint(0, ld + 1, (nq, b)))
            check(asked, quantize_int8(docs, granularity).select([0, 1, 2][:nq] if nq <= b else [0]), "general", pairs=True)
        bad = documents.clone()
        bad[-1, -1, 0] = torch.nan
        for kernel in ("dense", "general", "wide"):
            check(queries, quantize_int8(bad), kernel)
        lost = queries.clone()
        lost[-1, -1, 0] = torch.inf
        for kernel in ("ragged", "general", "wide"):
            check(lost, quantize_int8(documents), kernel, document_lengths=lengths)


def check_nan() -> None:
    """NaN wins, the first one, in every kernel: across tiles, pieces and slots, beside infinity, and where a query brought it."""
    for nq, lq, b, ld, d in ((3, 20, 4, 70, 16), (1, 70, 3, 33, 32), (2, 32, 5, 15, 16)):
        queries, documents = torch.randn(nq, lq, d).half(), torch.randn(b, ld, d).half()
        lengths = torch.randint(ld // 2, ld + 1, (b,))
        for row in range(b):
            documents[row, torch.randint(0, ld // 2, (3,)), row % d] = torch.nan
        queries[0, 1, :3] = torch.inf  # infinity of both signs, and NaN where they meet
        queries[-1, 2, 0] = torch.nan
        documents[0, :, 1] = documents[0, :, 1].abs()
        some = documents[:, 3:]
        docs, asked = ragged(lengths, d, torch.float16), ragged(torch.randint(1, lq + 1, (nq,)), d, torch.float16)
        docs.values[torch.randint(0, len(docs.values), (b,)), 0] = torch.nan
        for kernel, processors in (("general", 2), ("general", 64), ("dense", 2), ("wide", 2)):
            check(queries, documents, kernel, winners=True, processors=processors)
            check(queries, some, kernel, winners=True, processors=processors)
            check(asked, documents, kernel, winners=True, processors=processors)
        for kernel in ("general", "ragged", "wide"):
            check(queries, docs, kernel, winners=True)
            check(asked, docs, kernel, winners=True)
            check(queries, documents, kernel, winners=True, document_lengths=lengths)
        mask = torch.rand(b, ld) > 0.3
        check(queries, documents, "general", winners=True, document_mask=mask)
        check(queries, documents, "general", winners=True, document_mask=mask, processors=64)
        check(queries, documents[:1].expand(nq, ld, d), "general", pairs=True, winners=True)
        stored = quantize_int8(documents.float()), quantize_fp8(documents.float().nan_to_num(0.0, 0.0, 0.0), "token")
        finite = queries.float().nan_to_num(0.0, 0.0, 0.0)
        for codes, kernel in itertools.product(stored, ("general", "dense", "wide")):
            check(finite, codes, kernel, winners=True)


def check_exact() -> None:
    """A token's scale rounds its integer product once, whatever the compiler may fuse (`tile_ops.MAGIC`).

    Also where all products of a row are negative, whose bits have the wrong order, and where a scale is negative, zero or no number.
    """
    for size in (40, 5):
        queries, documents = torch.randn(4, 32, 32), torch.randn(5, size, 32)
        queries[0], documents[1] = queries[0].abs(), -documents[1].abs()
        stored, asked = quantize_int8(documents), quantize_int8(queries)
        assert stored.scales is not None
        stored.scales[2, ::3] *= -1
        stored.scales[3] *= 0
        stored.scales[4, size // 2] = torch.nan
        integers = torch.einsum("qrd,btd->qbrt", asked.codes.long(), stored.codes.long()).double()
        cells = (integers * stored.scales.double()[:, None]).float()  # 19 + 11 bits: exact in FP64, rounded once here
        row = cells.max(-1).values * asked.scales.float()[:, None]
        need = row.double().sum(-1).float()
        assert (row[0, 1] < 0).all()
        assert row[:, 4].isnan().all()
        mask = torch.rand(5, size) > 0.3
        mask[:, 0] = mask[4, size // 2] = True
        hidden = cells.masked_fill(~mask[None, :, None], -torch.inf).max(-1).values * asked.scales.float()[:, None]
        for kernel in ("dense", "ragged", "general", "wide"):
            shapes = {"document_lengths": torch.full((5,), size)} if kernel == "ragged" else {}
            check(queries, stored, kernel, winners=True, **shapes)
            check(queries, stored, kernel, winners=True, document_mask=mask)
            dispatch.choose = lambda *_, kernel=kernel: (kernel, SMALL)
            found = dispatch.forward(validate(queries, stored, Options(**shapes)))[0]
            assert torch.equal(found.nan_to_num(1e9), need.nan_to_num(1e9)), (kernel, size, found, need)
            found = dispatch.forward(validate(queries, stored, Options(document_mask=mask)))[0]
            assert torch.equal(found.nan_to_num(1e9), hidden.double().sum(-1).float().nan_to_num(1e9)), kernel


def check_asked() -> None:
    """Scores in another dtype, and with another score of empty documents, have the bits that torch would give them afterwards."""

    def compare(kernel: str, queries: Any, documents: Any, out: torch.dtype, config: Config = SMALL, **options: Any) -> None:
        call = validate(queries, documents, Options(**options))
        dispatch.choose = lambda *_: (kernel, config)
        torch.empty = poisoned
        try:
            need = finished(dispatch.forward(call)[0], asked := replace(call, out=out, empty_score=-7.5))
            found = dispatch.forward(asked)[0]
        finally:
            torch.empty = plain
        assert found.dtype == out
        assert bool((need == -7.5).any()), "no document is empty"
        torch.testing.assert_close(found, need, rtol=0, atol=0)
        CHECKED.append(kernel)

    for out, lq, winners in ((torch.float16, 32, False), (torch.bfloat16, 20, True), (torch.float32, 17, True)):
        queries, documents = torch.randn(2, lq, 16).half(), torch.randn(18, 19, 16).half()
        mask = torch.rand(18, 19) > 0.4
        mask[1], mask[17], mask[16, 2:] = False, False, False
        lengths = torch.randint(0, 20, (18,))
        lengths[0], lengths[5] = 0, 19
        query_mask = torch.rand(2, lq) > 0.5
        query_mask[1] = False  # a query without a token scores 0, but not of an empty document
        pretend(FALSE_PROCESSORS)
        asked = {"query_mask": query_mask, "return_argmax": winners}
        for kernel in ("ragged", "wide", "general"):
            compare(kernel, queries, documents, out, document_mask=mask, document_lengths=lengths, **asked)
            compare(kernel, queries, ragged(lengths, 16, torch.float16), out, **asked)
            if out != torch.bfloat16:  # its rounding is not the masks'
                compare(kernel, queries, documents, out, document_mask=mask, **asked)
                compare(kernel, queries, documents[:, :16], out, document_mask=mask[:, :16].to(torch.int64), **asked)
        compare("stream", queries[:1], documents, out, document_mask=mask)
        compare("stream", queries[:1], documents, out, ALONE, document_lengths=lengths)
        own = documents.view(2, 9, 19, 16)
        compare("general", queries, own, out, document_mask=mask.view(2, 9, 19), **asked)
        compare("general", queries, documents[:2], out, pairs=True, document_mask=mask[:2], **asked)
        pretend(64)
        compare("general", queries, torch.randn(2, 200, 16).half(), out, document_lengths=torch.tensor([0, 150]), **asked)


torch.manual_seed(0)
GROUPS = {
    "nan": check_nan,
    "exact": check_exact,
    "general": check_general,
    "split": check_split,
    "tiles": check_tiles,
    "codes": check_codes,
    "masks": check_masks,
    "asked": check_asked,
}
if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
    sys.stdout.write(f"{len(CHECKED)} checked\n")
