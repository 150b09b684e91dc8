"""`Packed`, `pack`, `Int8Tokens`, `Fp8Tokens` as containers: constructors, views, selections, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
from inputs import on_cpu as cases
from maxsim_kernels import Fp8Tokens, Int8Tokens, Packed, maxsim, pack

LENGTHS = [3, 0, 2, 4]


@pytest.fixture
def rows():
    return cases.packed(LENGTHS, 5)


def codes(*shape, dtype=torch.int8):
    return torch.ones(shape).to(dtype)


def scales(*shape):
    return torch.ones(shape, dtype=torch.float16)


def test_pack_and_rows():
    documents = [cases.grid(n, 5, seed=n) for n in LENGTHS]
    packed = pack(documents)
    assert packed.values.shape == (9, 5)
    assert packed.offsets.tolist() == [0, 3, 3, 5, 9]
    assert packed.starts.tolist() == [0, 3, 3, 5]
    assert packed.lengths.tolist() == LENGTHS
    assert (len(packed), packed.dim, packed.dtype, packed.device.type) == (4, 5, torch.float32, "cpu")
    for n, document in enumerate(documents):
        assert torch.equal(packed[n], document)
    assert torch.equal(packed[-1], documents[-1])
    assert [len(row) for row in packed] == LENGTHS
    with pytest.raises(IndexError):
        packed[4]


def test_pack_nothing():
    assert len(pack([], dim=5)) == 0
    assert pack([], dim=5, dtype=torch.float16).values.dtype == torch.float16
    assert pack([], dim=5).dim == 5
    with pytest.raises(ValueError, match="dim="):
        pack([])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(2, 4), r"documents\[1\].*\[2, 4\].*5"),
        (torch.ones(5), r"documents\[1\].*\[5\]"),
        (torch.ones(2, 5, dtype=torch.float16), r"documents\[1\].*float16.*float32"),
    ],
)
def test_pack_refuses_mixtures(bad, message):
    with pytest.raises(ValueError, match=message):
        pack([torch.ones(3, 5), bad])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"documents": [np.ones((3, 5))]}, "documents: got a list of ndarray"),
        ({"documents": [torch.ones(3, 5)], "dim": 6}, "dim, dtype: got 6 and None"),
        ({"documents": [torch.ones(3, 5)], "dtype": torch.float16}, "dim, dtype: got None and torch.float16"),
    ],
)
def test_pack_changes_nothing(given, message):
    with pytest.raises(ValueError, match=message):
        pack(**given)
    assert pack([torch.ones(3, 5)], dim=5, dtype=torch.float32).dim == 5


def test_pack_refuses_a_first_document_of_another_rank():
    with pytest.raises(ValueError, match=r"documents\[0\]"):
        pack([torch.ones(5), torch.ones(3, 5)])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_offsets_keep_their_dtype(index):
    packed = Packed(cases.grid(4, 5), torch.tensor([0, 1, 4], dtype=index))
    assert packed.offsets.dtype == packed.starts.dtype == packed.lengths.dtype == index


@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0.0, 4.0]),
        torch.tensor([[0, 4]]),
        torch.tensor([0, 4], dtype=torch.int16),
        [0, 4],
        torch.tensor([], dtype=torch.int64),
    ],
)
def test_bad_offset_tensors(offsets):
    with pytest.raises(ValueError, match="offsets"):
        Packed(cases.grid(4, 5), offsets)


@pytest.mark.parametrize("values", [torch.ones(4), torch.ones(2, 4, 5), torch.ones(4, 0), [[1.0]]])
def test_bad_values(values):
    with pytest.raises(ValueError, match="values"):
        Packed(values, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="values"):
        Packed.view(values, torch.tensor([0]), torch.tensor([1]))


def test_view_needs_as_many_lengths_as_starts():
    with pytest.raises(ValueError, match="lengths"):
        Packed.view(cases.grid(4, 5), torch.tensor([0, 1]), torch.tensor([1]))
    with pytest.raises(ValueError, match="starts"):
        Packed.view(cases.grid(4, 5), torch.tensor([0.0]), torch.tensor([1]))


def test_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"offsets.*meta.*cpu"):
        Packed(cases.grid(4, 5), torch.tensor([0, 4], device="meta"))
    with pytest.raises(ValueError, match=r"scales.*meta.*cpu"):
        Int8Tokens(codes(2, 3, 5), scales(2, 3).to("meta"))


def test_views_share_storage(rows):
    view = Packed.view(rows.values, torch.tensor([5, 0]), torch.tensor([4, 9]))
    assert view.offsets is None
    assert view.values.data_ptr() == rows.values.data_ptr()
    assert torch.equal(view[0], rows[3])
    assert torch.equal(view[1], rows.values)
    assert rows.select(torch.tensor([3])).values.data_ptr() == rows.values.data_ptr()
    assert "view" in repr(view)
    assert "packed" in repr(rows)


@pytest.mark.parametrize("indices", [[3, 0, 0, 1], torch.tensor([3, 0, 0, 1], dtype=torch.int32), torch.tensor([3, 0, 0, 1])])
def test_select(rows, indices):
    chosen = rows.select(indices)
    assert chosen.lengths.tolist() == [4, 3, 3, 0]
    for n, source in enumerate([3, 0, 0, 1]):
        assert torch.equal(chosen[n], rows[source])


@pytest.mark.parametrize("bad", [[4], [-1], [0, 9]])
def test_select_out_of_range(rows, bad):
    with pytest.raises(IndexError, match="indices"):
        rows.select(bad)


@pytest.mark.parametrize("bad", [torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([True, False, True, True])])
def test_select_needs_integers(rows, bad):
    with pytest.raises(ValueError, match="indices"):
        rows.select(bad)


def test_select_nothing(rows):
    assert len(rows.select([])) == 0
    assert len(rows.select(torch.tensor([], dtype=torch.int64))) == 0


def test_compact(rows):
    assert rows.compact() is rows
    view = Packed.view(rows.values, torch.tensor([5, 0, 2, 9]), torch.tensor([4, 9, 0, 0], dtype=torch.int64))
    whole = view.compact()
    assert whole.offsets.tolist() == [0, 4, 13, 13, 13]
    for n in range(4):
        assert torch.equal(whole[n], view[n])
    assert len(rows.select([]).compact()) == 0


@pytest.mark.parametrize(("start", "length"), [(-2, 2), (8, 2), (0, -1), (2**63 - 1, 2**63 - 1)])
def test_rows_outside_the_values_are_refused(rows, start, length):
    view = Packed.view(rows.values, torch.tensor([0, start]), torch.tensor([1, length]))
    with pytest.raises(ValueError, match="rows: row 1 starts at"):
        view.compact()
    with pytest.raises(ValueError, match="row 1 has a bad"):
        maxsim(rows.values[None, :2], view)


def test_a_document_is_asked_for_by_one_number(rows):
    assert torch.equal(rows[np.int64(3)], rows[-1])
    with pytest.raises(TypeError, match="slice"):
        rows[1:2]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_compact_of_any_index_dtype(rows, index):
    view = Packed.view(rows.values, torch.tensor([5, 0], dtype=index), torch.tensor([4, 9], dtype=index))
    assert torch.equal(view.compact().values, torch.cat([rows.values[5:9], rows.values]))


def test_document_of_token(rows):
    assert rows.document_of_token().tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3]
    with pytest.raises(ValueError, match="compact"):
        rows.select([0]).document_of_token()


def test_to_and_with_values(rows):
    half = rows.to(torch.float16)
    assert half.dtype == torch.float16
    assert half.offsets.dtype == torch.int64
    assert rows.select([0, 3]).to(torch.float16).lengths.tolist() == [3, 4]
    assert torch.equal(rows.with_values(rows.values * 2)[3], rows[3] * 2)
    with pytest.raises(ValueError, match="values"):
        rows.with_values(rows.values[1:])


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [((2, 3), "token"), ((2,), "document"), ((), "corpus")],
)
def test_dense_granularity_from_the_scales(shape, granularity):
    assert Int8Tokens(codes(2, 3, 5), scales(*shape)).granularity == granularity
    assert Fp8Tokens(codes(2, 3, 5, dtype=torch.float8_e4m3fn), scales(*shape)).granularity == granularity


@pytest.mark.parametrize(("shape", "granularity"), [((9,), "token"), ((4,), "document"), ((), "corpus")])
def test_packed_granularity_from_the_scales(rows, shape, granularity):
    assert Int8Tokens(rows.with_values(codes(9, 5)), scales(*shape)).granularity == granularity


def test_ambiguous_granularity_must_be_named():
    one_token_each = Packed(codes(3, 5), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="granularity="):
        Int8Tokens(one_token_each, scales(3))
    assert Int8Tokens(one_token_each, scales(3), granularity="document").granularity == "document"


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 5), (1,)])
def test_scales_of_no_granularity(shape):
    with pytest.raises(ValueError, match="scales"):
        Int8Tokens(codes(2, 3, 5), scales(*shape))


def test_bad_codes_scales_and_offsets():
    with pytest.raises(ValueError, match=r"codes.*float32.*int8"):
        Int8Tokens(torch.ones(2, 3, 5), scales(2, 3))
    with pytest.raises(ValueError, match=r"codes"):
        Int8Tokens(codes(5), scales())
    with pytest.raises(ValueError, match=r"codes.*int8.*float8"):
        Fp8Tokens(codes(2, 3, 5), scales(2, 3))
    with pytest.raises(ValueError, match=r"scales.*int64"):
        Int8Tokens(codes(2, 3, 5), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"offset"):
        Int8Tokens(codes(2, 3, 5), scales(2, 3), scales(2))
    with pytest.raises(ValueError, match=r"granularity.*row"):
        Int8Tokens(codes(2, 3, 5), scales(2, 3), granularity="row")
    with pytest.raises(ValueError, match=r"scales.*document"):
        Int8Tokens(codes(2, 3, 5), scales(2, 3), granularity="document")


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_dequantize(granularity, layout):
    numbers = torch.from_numpy(np.random.default_rng(0).integers(-127, 128, (9, 5))).to(torch.int8)
    stored = numbers.view(3, 3, 5) if layout == "dense" else cases.packed(LENGTHS, 5).with_values(numbers)
    shape = {
        "token": (3, 3) if layout == "dense" else (9,),
        "document": (3,) if layout == "dense" else (4,),
        "corpus": (),
    }[granularity]
    scale, offset = cases.grid(*shape, seed=1).abs().half() + 0.25, cases.grid(*shape, seed=2).half()
    for extra in (None, offset):
        tokens = Int8Tokens(stored, scale, extra, granularity)
        back = tokens.dequantize()
        need = torch.from_numpy(oracle.dequantized(tokens)[0]).float()
        assert torch.equal(back.values if layout == "packed" else back, need)
        assert (tokens.dim, len(tokens)) == (5, 3 if layout == "dense" else 4)
    assert (tokens.dequantize(torch.float16).dtype) == torch.float16


@pytest.mark.parametrize("granularity", ["token", "document", "corpus"])
def test_quantised_select(rows, granularity):
    shape = {"token": (9,), "document": (4,), "corpus": ()}[granularity]
    scale = (torch.arange(max(1, torch.Size(shape).numel())).half() + 1).view(shape)
    tokens = Int8Tokens(rows.with_values(codes(9, 5)), scale, granularity=granularity)
    chosen = tokens.select([3, 0])
    assert chosen.granularity == granularity
    assert len(chosen) == 2
    if granularity == "document":
        assert chosen.scales.tolist() == [4.0, 1.0]
    with pytest.raises(IndexError):
        tokens.select([4])
    with pytest.raises(ValueError, match="select"):
        Int8Tokens(codes(2, 3, 5), scales(2, 3)).select([0])
