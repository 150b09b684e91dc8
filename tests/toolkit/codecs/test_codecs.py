"""Every codec against an independent implementation of a few lines, in NumPy and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maxsim_eval.codecs.bits import pack_bits, packed_size, unpack_bits
from maxsim_eval.codecs.codec import Fitted
from maxsim_eval.codecs.names import STEPS, codec_of
from maxsim_eval.codecs.trained import default_centroids
from maxsim_eval.errors import DataError, UnknownNameError, UsageError
from maxsim_eval.scoring.compressed import codec_path
from maxsim_kernels import Packed, maxsim, pack

DIM = 16


def corpus(documents: int = 300, unit: bool = True, seed: int = 0, dim: int = DIM) -> Packed:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(20, dim))
    rows = []
    for _ in range(documents):
        tokens = centres[random.integers(20, size=random.integers(1, 40))] + 0.3 * random.normal(size=(1, dim))
        tokens = tokens + 0.3 * random.normal(size=tokens.shape)
        rows.append(tokens / np.linalg.norm(tokens, axis=1, keepdims=True) if unit else tokens)
    return pack([torch.from_numpy(row).float() for row in rows])


def fitted(name: str, tokens: Packed) -> Fitted:
    codec = codec_of(name)
    return Fitted(codec, codec.fit(lambda _: tokens, tokens.dim, len(tokens.values)))


def read(name: str, tokens: Packed) -> np.ndarray:
    """Decoded values as floats."""
    found = fitted(name, tokens).documents(tokens)
    return found.values.numpy() if isinstance(found, Packed) else found.dequantize().values.numpy()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 31, 64])
def test_bits_come_back_and_lie_as_said(bits, count):
    codes = np.random.default_rng(count).integers(2**bits, size=(5, count)).astype(np.uint8)
    packed = pack_bits(torch.from_numpy(codes), bits)
    assert packed.shape == (5, packed_size(count, bits))
    text = ["".join(format(code, f"0{bits}b") for code in row).ljust(8 * packed.shape[1], "0") for row in codes]
    assert packed.tolist() == [[int(row[at : at + 8], 2) for at in range(0, len(row), 8)] for row in text]
    assert np.array_equal(unpack_bits(packed, count, bits).numpy(), codes)


def uniform(values: np.ndarray, bits: int, scale: str) -> np.ndarray:
    found = np.empty_like(values)
    for row, token in enumerate(values):
        step = (
            {2: 0.9957, 4: 0.3352}[bits] * np.sqrt(np.mean(token**2))
            if scale == "rms"
            else np.abs(token).max() / 2 ** (bits - 1)
        )
        step = 2 * np.float64(np.float16(step / 2))
        grid = (np.arange(2**bits) + 0.5 - 2 ** (bits - 1)) * step
        found[row] = grid[np.abs(token[:, None] - grid).argmin(1)] if step else 0
    return found


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("scale", ["rms", "max"])
@pytest.mark.parametrize("queries", ["float", "int8"])
def test_uniform_levels_are_the_nearest(bits, scale, queries):
    tokens = corpus(40, unit=False)
    tokens.values[3] = 0
    found = read(f"int{bits}(scale={scale},queries={queries})", tokens)
    np.testing.assert_allclose(found, uniform(tokens.values.numpy().astype(np.float64), bits, scale), rtol=2e-3, atol=1e-6)
    assert (found[3] == 0).all()


@pytest.mark.parametrize("queries", ["float", "int8"])
def test_signs_keep_the_mean_magnitude(queries):
    tokens = corpus(40)
    values = tokens.values.numpy()
    expected = np.where(values >= 0, 1, -1) * np.abs(values).mean(1, keepdims=True)
    np.testing.assert_allclose(read(f"sign(queries={queries})", tokens), expected, rtol=1e-3)


def test_the_control_swaps_neighbours():
    tokens = corpus(40)
    right, wrong = read("int4", tokens), read("control", tokens)
    assert np.array_equal(wrong.reshape(-1, DIM // 2, 2)[:, :, ::-1], right.reshape(-1, DIM // 2, 2))


def colbertv2(values: np.ndarray, bits: int, state: dict) -> np.ndarray:
    """ColBERTv2's reading, number by number, from its centroids, cut-offs and weights."""
    centroids, cutoffs, weights = (state[name].numpy() for name in ("0.centroids", "0.cutoffs", "0.weights"))
    found = []
    for token in values:
        centroid = centroids[np.argmax(centroids @ token)]
        codes = [sum(x > cutoff for cutoff in cutoffs) for x in token - centroid]
        row = centroid + weights[codes]
        found.append(row / np.linalg.norm(row))
    return np.array(found)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_residuals_are_colbertv2s(bits):
    tokens = corpus()
    one = fitted(f"residual-{bits}(centroids=16)", tokens)
    values = tokens.values.numpy()
    np.testing.assert_allclose(one.documents(tokens).values.numpy(), colbertv2(values, bits, dict(one.state)), atol=1e-5)
    rests = values - one.state["0.centroids"].numpy()[(values @ one.state["0.centroids"].numpy().T).argmax(1)]
    levels = np.arange(2**bits) / 2**bits
    np.testing.assert_allclose(one.state["0.cutoffs"], np.quantile(rests, levels[1:]), atol=0.02)  # held-out tokens: 5% of them
    np.testing.assert_allclose(one.state["0.weights"], np.quantile(rests, levels + 0.5 / 2**bits), atol=0.03)
    np.testing.assert_allclose(np.linalg.norm(one.state["0.centroids"], axis=1), 1, atol=1e-5)
    stored = one.encode(tokens.values)
    assert {name: (part.dtype, part.shape[1:]) for name, part in stored.items()} == {
        "centroids": (torch.uint16, ()),
        "codes": (torch.uint8, (DIM * bits // 8,)),
    }


def test_colbertv2s_rule_of_centroids():
    assert [default_centroids(tokens) for tokens in (1_239_235, 321_000_000)] == [16384, 262144]


def test_products_take_the_nearest_points():
    tokens = corpus(600)
    one = fitted("pq(parts=4)", tokens)
    points = one.state["0.points"].numpy()
    pieces = tokens.values.numpy().reshape(-1, 4, DIM // 4)
    found = one.documents(tokens).values.numpy().reshape(-1, 4, DIM // 4)
    for part in range(4):
        distances = np.linalg.norm(pieces[:, part, None] - points[part], axis=2)
        np.testing.assert_allclose(np.linalg.norm(pieces[:, part] - found[:, part], axis=1), distances.min(1), atol=1e-5)


def test_rotations_keep_scores_and_pca_keeps_most():
    tokens, queries = corpus(), corpus(5, seed=1)
    exact = maxsim(queries, tokens)
    for name, within in (("rotate", 2e-2), ("dims-16", 2e-2), ("pca-16", 2e-2), ("pca-12", 6.0)):
        one = fitted(name, tokens)
        assert (maxsim(one.queries(queries), one.documents(tokens)) - exact).abs().max() < within
    rotation = fitted("rotate", tokens).state["0.rotation"].double()
    assert (rotation @ rotation.T - torch.eye(DIM)).abs().max() < 1e-6
    directions = fitted("pca-5", tokens).state["0.directions"].numpy()
    _, _, right = np.linalg.svd(tokens.values.numpy(), full_matrices=False)
    np.testing.assert_allclose(np.abs((directions * right[:5].T).sum(0)), 1, atol=1e-4)


@pytest.mark.parametrize("factor", [2, 3])
def test_pooling_is_sentence_transformers(factor):
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    tokens = corpus(20)
    found = fitted(f"pool-{factor}+fp16", tokens).documents(tokens)
    pooling = HierarchicalTokenPooling(factor)
    for number in range(len(tokens)):
        expected = pooling.pool_one(tokens[number])
        assert torch.equal(found[number], expected.half().float())
    kept = codec_of(f"pool-{factor}").lengths(tokens.lengths.numpy())
    assert np.array_equal(kept, found.lengths.numpy())


def test_pruning_keeps_the_first_or_the_longest():
    tokens = corpus(30, unit=False)
    for by in ("position", "norm"):
        found = fitted(f"prune-60(by={by})", tokens).documents(tokens)
        for number in range(len(tokens)):
            one = tokens[number].numpy()
            count = -(-len(one) * 40 // 100)
            chosen = (
                np.arange(count)
                if by == "position"
                else np.sort(np.argsort(-np.linalg.norm(one, axis=1), kind="stable")[:count])
            )
            assert np.array_equal(found[number].numpy(), one[chosen].astype(np.float16).astype(np.float32))


def test_pruning_by_words_keeps_the_rarest():
    tokens = corpus(30)
    random = np.random.default_rng(0)
    words = [[f"w{int(n)}" for n in random.zipf(1.5, len(tokens[number])) % 40] for number in range(len(tokens))]
    codec = codec_of("prune-60(by=idf)")
    one = Fitted(codec, codec.fit(lambda _: tokens, DIM, len(tokens.values), lambda: iter(words)))
    holding = {word: sum(word in row for row in words) for row in words for word in row}
    for first, last in ((0, 30), (7, 12), (29, 30)):
        found = one.documents(tokens.select(range(first, last)), first)
        for number in range(first, last):
            order = sorted(range(len(words[number])), key=lambda place: (holding[words[number][place]], place))
            kept = sorted(order[: -(-len(order) * 40 // 100)])
            assert torch.equal(found[number - first], tokens[number][kept].half().float())


@pytest.mark.parametrize(
    ("name", "words", "error", "match"),
    [
        ("prune-50(by=idf)", None, DataError, "the words that tokens stand for are not known"),
        ("pool-2+prune-50(by=idf)", lambda: iter([]), UsageError, "what reads words has to be the first step"),
        ("prune-50(by=idf)", lambda: iter([["a"]]), DataError, "names 1 tokens and the cache holds"),
    ],
)
def test_words_that_are_not_there(name, words, error, match):
    tokens, codec = corpus(30), codec_of(name)
    with pytest.raises(error, match=match):
        codec.fit(lambda _: tokens, DIM, len(tokens.values), words)


NAMES = [
    "int8", "int4", "int2", "sign", "fp16", "control", "rotate+int4", "rotate+sign(queries=int8)", "dims-8+int8(queries=int8)",
    "pca-8", "pool-2+int2", "prune-50+sign", "residual-2(centroids=16)", "pool-2+residual-1(centroids=8)", "pq(parts=2)", "rotate+pca-9+pq(parts=3)",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_stored_the_same_in_every_company_and_at_every_fit(name):
    tokens = corpus(600)
    one, again = fitted(name, tokens), fitted(name, tokens)
    assert all(torch.equal(one.state[key], again.state[key]) for key in one.state)
    whole = one.documents(tokens)
    lengths = whole.lengths if isinstance(whole, Packed) else whole.codes.lengths
    ends = torch.cumsum(lengths, 0)
    for first, last in ((0, 1), (1, 8), (8, 600), (599, 600)):
        part = one.documents(tokens.select(range(first, last)))
        span = slice(int(ends[first] - lengths[first]), int(ends[last - 1]))
        if isinstance(whole, Packed):
            assert torch.equal(part.values, whole.values[span])
        else:
            assert torch.equal(part.token_values, whole.token_values[span])
            assert torch.equal(part.scales, whole.scales[span])


@pytest.mark.parametrize("name", NAMES)
def test_bytes_by_arithmetic_are_those_that_are_stored(name):
    tokens = corpus(600)
    one = fitted(name, tokens)
    shaped = tokens
    for number, shape in enumerate(one.codec.shapes):
        state = {key.partition(".")[2]: value for key, value in one.state.items() if key.startswith(f"{number}.")}
        shaped = shape.documents(shaped, state)
    stored = one.encode(shaped.values)
    total = sum(part.numel() * part.element_size() for part in stored.values())
    assert total == len(shaped.values) * one.codec.token_bytes(DIM, one.state)
    assert len(shaped.values) == one.codec.lengths(tokens.lengths.numpy()).sum()


@pytest.mark.parametrize("name", NAMES)
def test_empty_documents_and_no_documents(name):
    tokens = corpus(600)
    one = fitted(name, tokens)
    empty = torch.empty(0, DIM)
    for few in (pack([empty, tokens[0], empty]), pack([empty, empty]), pack([], dim=DIM)):
        found = one.documents(few)
        codes = found if isinstance(found, Packed) else found.codes
        assert len(codes) == len(few)
        assert ((codes.lengths == 0) == (few.lengths == 0)).all()


def test_coarser_codecs_lose_more():
    tokens = corpus()
    lost = [
        np.linalg.norm(read(name, tokens) - tokens.values.numpy())
        for name in ("fp16", "int8", "int4", "int2", "sign", "control")
    ]
    assert lost == sorted(lost)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("itn4", UnknownNameError, "unknown codec step 'itn4'. Did you mean 'int4'"),
        ("int4+rotate", UsageError, "int4 stores numbers, so that no step can follow it"),
        ("residual", UsageError, "residual needs a number, as residual-2"),
        ("int4-4", UsageError, "int4 takes no number"),
        ("int4(bits=2)", UnknownNameError, "unknown option of int4 'bits'. Known: queries, scale"),
        ("residual-2(centroid=5)", UnknownNameError, "Did you mean 'centroids'"),
        ("residual-2(centroids=x)", UsageError, "centroids is 'x', need a whole number"),
        ("residual-2(seed=1,seed=2)", UsageError, "seed is given twice"),
        ("pool-2(", UsageError, r"cannot read 'pool-2\('"),
        ("+int4", UsageError, "cannot read ''"),
    ],
)
def test_names_that_cannot_be(name, error, match):
    with pytest.raises(error, match=match):
        codec_of(name)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("residual-3", UsageError, "residual-3: got 3, need 1, 2, 4 or 8 bits"),
        ("residual-2(centroids=-1)", UsageError, "centroids: got -1"),
        ("residual-2(centroids=4000)", DataError, "tokens are too few for 4,000 centroids, need 156,000; centroids="),
        ("pq(parts=5)", UsageError, "a divisor of the width, 16"),
        ("pq", DataError, "tokens are too few for 256 points"),
        ("dims-17", UsageError, "1 to the embeddings' width, 16"),
        ("pca-8+dims-9", UsageError, "1 to the embeddings' width, 8"),
        ("pool-1", UsageError, "2 or more"),
        ("prune-100", UsageError, "1 to 99 percent"),
        ("prune-50(by=norm)", DataError, "all tokens have length 1"),
        ("prune-50(by=luck)", UsageError, "by: got luck, need norm or idf or position"),
        ("sign(queries=int4)", UsageError, "queries: got int4, need float or int8"),
        ("int4(scale=min)", UsageError, "scale: got min, need rms or max"),
    ],
)
def test_options_that_do_not_fit(name, error, match):
    with pytest.raises(error, match=match):
        fitted(name, corpus(100))


def test_every_step_says_what_it_does():
    for kind, _ in STEPS.values():
        assert kind.summary
        assert kind.__doc__


def test_numbers_that_fp16_does_not_hold_are_refused():
    tokens = corpus(3, unit=False)
    tokens.values *= 1e6
    for name in ("fp16", "sign", "int4"):
        with pytest.raises(DataError, match=r"FP16"):
            fitted(name, tokens).documents(tokens)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "sign",
        "int2",
        "int4",
        "int4(queries=int8)",
        "rotate+int2(scale=max)",
        "residual-1(centroids=20)",
        "residual-4(centroids=20)",
    ],
)
def test_what_a_gpu_scores_is_what_is_stored(name, unit):
    """`_as_stored`, which a GPU takes: the operator's own decoding gives the codec's values."""
    if "residual" in name:
        pytest.importorskip("faiss")
    tokens = corpus(unit=unit)
    made = fitted(name, tokens)
    assert made.codec.coder.fused
    shaped = tokens
    for number, shape in enumerate(made.codec.shapes):
        state = {key.partition(".")[2]: value for key, value in made.state.items() if key.startswith(f"{number}.")}
        shaped = shape.documents(shaped, state, 0)
    kept = made._as_stored(shaped)
    np.testing.assert_allclose(kept.dequantize().values.numpy(), read(name, tokens), rtol=2e-6, atol=1e-6)
    path = codec_path(name)
    decoded = made.documents(tokens)
    torch.testing.assert_close(
        path.score(made.queries(tokens), kept), path.score(made.queries(tokens), decoded), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["control", "int8", "pq", "residual-8", "fp16"])
def test_codecs_that_no_kernel_reads(name):
    assert not codec_of(name).coder.fused
