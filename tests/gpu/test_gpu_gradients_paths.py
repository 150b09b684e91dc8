"""The three gradient paths on a GPU: csr bit for bit, the others within summation order, and what decides between them."""

from __future__ import annotations

import pytest
import torch

import gradient_truth as gradients
from inputs import on_gpu as make
from maxsim_kernels import explain, maxsim, maxsim_pairs

POISON = False  # runs are compared with each other here, in memory that other work has just left
D = 128
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
PATHS = ["unified", "atomic", "csr"]
LAYOUTS = ["one query", "few", "many", "long", "packed", "packed one", "packed queries", "both packed", "views"]
LAYOUTS += ["views of queries", "per query", "pairs", "ragged pairs"]
VARIABLE = "FLASH_BWD_PATH"


def same(one, other):
    return all(make.same_bits(a, b) for a, b in zip(one.grads, other.grads, strict=True))


@pytest.fixture
def busy():
    """Other work in flight: matrix products of changing sizes on a stream of their own, queued until the test has ended."""
    stream = torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, device="cuda", dtype=HALF)

    def work(number):
        with torch.cuda.stream(stream):
            for _ in range(number % 7 + 1):
                torch.mm(matrix[: 256 * (number % 5 + 1)], matrix)

    torch.cuda.synchronize()
    yield work
    torch.cuda.synchronize()


# --- csr -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_csr_gives_the_same_bits_every_time(busy, layout, dtype):
    """20 runs alone, then beside other work, then on another stream beside it: programs start and end in other orders."""
    queries, documents, pairs = gradients.case(layout, make.gauss, dtype)

    def run():
        return gradients.step(queries, documents, gradients.normals(), pairs=pairs, backward="csr")

    need = run()
    for number in range(20):
        assert same(run(), need), f"run {number}"
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for number in range(20):
        busy(number)
        with torch.cuda.stream(other if number % 2 else torch.cuda.current_stream()):
            got = run()
        torch.cuda.current_stream().wait_stream(other)
        assert same(got, need), f"beside other work, run {number}"


def test_csr_gives_the_same_bits_for_a_large_step(busy):
    """Hundreds of contributions to a row, of a million winners."""
    queries, documents = make.unit(32, 1024, D), make.unit(32, 1024, D, seed=1)
    need = gradients.step(queries, documents, gradients.normals(), backward="csr")
    for number in range(20):
        busy(number)
        assert same(gradients.step(queries, documents, gradients.normals(), backward="csr"), need), f"run {number}"


def test_two_streams_at_once():
    """Workspaces are the call's own."""
    for layout, path in (("many", "csr"), ("many", "unified"), ("packed", "csr"), ("per query", "atomic"), ("pairs", "csr")):
        queries, documents, pairs = gradients.case(layout, make.grid, d=16)
        asked = [queries, make.grid(*queries.shape, seed=7)]
        upstream = gradients.integers()
        need = [gradients.step(q, documents, upstream, pairs=pairs, backward=path) for q in asked]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        got = [[], []]
        for _ in range(15):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[number].append(gradients.step(asked[number], documents, upstream, pairs=pairs, backward=path))
        torch.cuda.synchronize()
        for number in (0, 1):
            assert all(same(one, need[number]) for one in got[number]), (layout, path)


# --- the paths agree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paths_differ_by_summation_order_alone(layout):
    """FP32 inputs, so that nothing is rounded after the sum."""
    queries, documents, pairs = gradients.case(layout, make.gauss, SINGLE)
    steps = [
        gradients.step(queries, documents, gradients.normals(), pairs=pairs, backward=path, return_argmax=True)
        for path in PATHS
    ]
    first = steps[0]
    with torch.no_grad():
        sums = gradients.true_gradients(first.upstream, first.argmax, queries, documents, pairs=pairs)
    for other in steps[1:]:
        assert make.same_bits(other.scores, first.scores)
        assert torch.equal(other.argmax, first.argmax)
        for one, two, need in zip(first.grads, other.grads, sums, strict=True):
            assert bool(((one - two).abs() <= 2 * gradients.ROUNDING * need.size).all())


@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_a_path_never_changes_scores(path):
    for layout in LAYOUTS:
        queries, documents, pairs = gradients.case(layout, make.gauss)
        need = gradients.step(queries, documents, gradients.normals(), pairs=pairs, backward="csr")
        got = gradients.step(queries, documents, gradients.normals(), pairs=pairs, backward=path)
        assert make.same_bits(got.scores, need.scores), layout


# --- what decides ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch):
    """Paths of the calls of the backward kernels since the test began."""
    from maxsim_kernels.gpu.backward import gradients as module

    original, seen = module.backward, []

    def note(*args, **kwargs):
        seen.append(kwargs["path"] if "path" in kwargs else args[9])
        return original(*args, **kwargs)

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "backward", note)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_path_taken_is_the_path_explained(taken, layout):
    queries, documents, pairs = gradients.case(layout, make.gauss)
    for path in ("auto", *PATHS):
        taken.clear()
        gradients.step(queries, documents, gradients.normals(), pairs=pairs, backward=path)
        assert len(taken) == 1
        assert taken[0] == path or path == "auto"
        assert f"gradients: {taken[0]} (" in explain(queries, documents, pairs=pairs, backward=path)


@pytest.mark.parametrize(
    ("value", "path"), [("atomic_unified", "unified"), ("invgrid", "csr"), *((path, path) for path in PATHS)]
)
def test_environment_variable(taken, monkeypatch, value, path):
    """The paper's names and ours, where the call says "auto"; a path that the call names goes first."""
    monkeypatch.setenv(VARIABLE, value)
    for layout in ("few", "packed", "per query", "pairs"):
        queries, documents, pairs = gradients.case(layout, make.grid, d=16)
        taken.clear()
        got = gradients.step(queries, documents, gradients.integers(), pairs=pairs)
        other = gradients.step(queries, documents, gradients.integers(), pairs=pairs, backward="atomic")
        assert taken == [path, "atomic"]
        assert all(torch.equal(a, b) for a, b in zip(got.grads, other.grads, strict=True))


def test_unknown_environment_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "fastest")
    with pytest.raises(ValueError, match=VARIABLE):
        gradients.step(make.gauss(7, 31, D), make.gauss(9, 63, D), gradients.normals())


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic_algorithms_take_csr(taken, layout, request):
    queries, documents, pairs = gradients.case(layout, make.gauss)
    need = gradients.step(queries, documents, gradients.normals(), pairs=pairs, backward="csr")
    request.getfixturevalue("deterministic")
    taken.clear()
    got = gradients.step(queries, documents, need.upstream, pairs=pairs)
    assert taken == ["csr"]
    assert same(got, need)
    assert "gradients: csr (" in explain(queries, documents, pairs=pairs)


@pytest.mark.parametrize("path", ["unified", "atomic"])
def test_deterministic_algorithms_refuse_atomics(deterministic, path):
    for layout in ("few", "packed", "per query"):
        queries, documents, _ = gradients.case(layout, make.gauss)
        with pytest.raises(RuntimeError, match="determin"):
            gradients.step(queries, documents, gradients.normals(), backward=path)
        maxsim(queries, documents, backward=path)  # without a gradient nothing is added up


def test_deterministic_algorithms_that_only_warn():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        queries, documents = make.grid(7, 31, 16), make.grid(9, 63, 16, seed=1)
        with pytest.warns(UserWarning, match="csr"):
            got = gradients.step(queries, documents, gradients.integers(), backward="atomic")
    finally:
        torch.use_deterministic_algorithms(False)
    need = gradients.step(queries, documents, gradients.integers(), backward="csr")
    assert all(torch.equal(a, b) for a, b in zip(got.grads, need.grads, strict=True))


# --- compilations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["dense", "packed", "pairs"])
def test_sizes_do_not_compile_again(compilations, kind, path):
    """Counts and lengths are no compile-time constants of a training step."""

    def train(Nq, Lq, B, Ld):
        count = B if kind == "pairs" else Nq
        queries = make.gauss(count, Lq, D).requires_grad_()
        if kind == "packed":
            documents = make.packed([Ld] * (B // 2) + [Ld // 2] * (B - B // 2), D, seed=1)
            documents.values.requires_grad_()
        else:
            documents = make.gauss(B, Ld, D, seed=1).requires_grad_()
        (maxsim_pairs if kind == "pairs" else maxsim)(queries, documents, backward=path).sum().backward()

    classes = [
        (Nq, Lq, B, Ld) for Nq in (1, 2, 7, 40) for Lq in (1, 31, 64, 130) for B in (1, 16, 301) for Ld in (1, 31, 64, 501)
    ]
    for sizes in classes:
        train(*sizes)
    assert len(compilations) <= 80, f"{len(compilations)} kernels for {len(classes)} shapes"
    compilations.clear()
    generator = make.random(0, "cpu")
    for _ in range(40):
        train(*(int(torch.randint(1, high + 1, (1,), generator=generator)) for high in (40, 130, 300, 500)))
    assert len(compilations) <= 3, f"new sizes compiled {compilations}"
