"""Chamfer distance: mean over p of the smallest squared distance to q, plus the same from q."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
import tolerances as tol
from inputs import on_cpu as cases
from maxsim_kernels import chamfer_distance, fallback
from maxsim_kernels.chamfer import chamfer


def close(got, need, tolerance):
    scale = max(float(np.abs(need).max()), 1e-30)
    return float(np.abs(got - need).max()) <= tolerance * scale


@pytest.mark.parametrize(
    ("N", "M", "d"), [(1, 1, 3), (7, 31, 3), (63, 7, 2), (100, 100, 3), (300, 40, 3), (5, 9, 1), (20, 31, 64)]
)
def test_value(N, M, d):
    p, q = cases.gauss(N, d), cases.gauss(M, d, seed=1)
    distance = chamfer_distance(p, q)
    assert distance.shape == ()
    assert distance.dtype == torch.float32
    assert float(distance) == pytest.approx(oracle.chamfer(p, q)[0], rel=tol.CHAMFER)


@pytest.mark.parametrize("shift", [100.0, 1000.0, -1000.0])
def test_translation(shift):
    p, q = cases.gauss(60, 3) + shift, cases.gauss(45, 3, seed=1) + shift
    assert float(chamfer_distance(p, q)) == pytest.approx(oracle.chamfer(p, q)[0], rel=tol.CHAMFER)


def test_clouds_far_apart_and_close_pairs():
    p = cases.gauss(40, 3)
    near = p + 1e-3 * cases.gauss(40, 3, seed=1)
    assert float(chamfer_distance(p, near)) == pytest.approx(oracle.chamfer(p, near)[0], rel=tol.CHAMFER)
    far = cases.gauss(30, 3, seed=2) + 500
    assert float(chamfer_distance(p, far)) == pytest.approx(oracle.chamfer(p, far)[0], rel=tol.CHAMFER)


def test_two_clusters_far_from_their_common_centre():
    """Centring cannot save squared norms here: neighbours are 1e-2 apart, clusters 2000."""
    offsets = torch.tensor([1000.0, -1000.0]).repeat(20)[:, None]
    p = offsets + 0.25 * cases.grid(40, 3)
    q = offsets + 0.25 * cases.grid(40, 3, seed=1)
    assert float(chamfer_distance(p, q)) == pytest.approx(oracle.chamfer(p, q)[0], rel=tol.CHAMFER)


def test_identical_clouds_are_at_zero():
    p = cases.gauss(50, 3) + 1000
    assert float(chamfer_distance(p, p.flip(0))) == 0.0


def test_symmetry():
    p, q = cases.gauss(30, 3), cases.gauss(70, 3, seed=1)
    assert float(chamfer_distance(p, q)) == pytest.approx(float(chamfer_distance(q, p)), rel=tol.CHAMFER)


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_gradient(shift):
    p, q = cases.gauss(33, 3) + shift, cases.gauss(20, 3, seed=1) + shift
    _, need_p, need_q = oracle.chamfer(p, q)
    dp, dq = torch.autograd.grad(chamfer_distance(p.requires_grad_(), q.requires_grad_()), (p, q))
    assert close(oracle.numbers(dp), need_p, tol.CHAMFER_GRADIENT)
    assert close(oracle.numbers(dq), need_q, tol.CHAMFER_GRADIENT)


def test_gradient_takes_the_first_index_on_ties():
    p, q = 4 * cases.grid(20, 2), 4 * cases.grid(31, 2, seed=1)  # small lattice: equal distances abound
    _, need_p, need_q = oracle.chamfer(p, q)
    dp, dq = torch.autograd.grad(3 * chamfer_distance(p.requires_grad_(), q.requires_grad_()), (p, q))
    assert close(oracle.numbers(dp), 3 * need_p, tol.CHAMFER_GRADIENT)
    assert close(oracle.numbers(dq), 3 * need_q, tol.CHAMFER_GRADIENT)


@pytest.mark.parametrize("which", ["p", "q"])
def test_gradient_of_one_side(which):
    p, q = cases.gauss(9, 3), cases.gauss(14, 3, seed=1)
    need = oracle.chamfer(p, q)[1 if which == "p" else 2]
    leaf = (p if which == "p" else q).requires_grad_()
    chamfer_distance(p, q).backward()
    assert close(oracle.numbers(leaf.grad), need, tol.CHAMFER_GRADIENT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_points_are_computed_in_float32(dtype):
    p, q = (100 * cases.gauss(20, 3)).to(dtype), (100 * cases.gauss(31, 3, seed=1)).to(dtype)
    distance = chamfer_distance(p, q)
    assert distance.dtype == torch.float32
    assert float(distance) == pytest.approx(oracle.chamfer(p, q)[0], rel=tol.CHAMFER)


def test_strides():
    p, q = cases.gauss(3, 20).T, cases.gauss(31, 6, seed=1)[:, ::2]
    assert float(chamfer_distance(p, q)) == pytest.approx(oracle.chamfer(p, q)[0], rel=tol.CHAMFER)


def test_nan_is_never_hidden():
    p, q = cases.gauss(20, 3), cases.gauss(30, 3, seed=1)
    for cloud in (p, q):
        broken = cloud.clone()
        broken[7, 1] = float("nan")
        assert chamfer_distance(broken if cloud is p else p, broken if cloud is q else q).isnan()


def test_bad_arguments():
    p = cases.gauss(5, 3)
    with pytest.raises(ValueError, match=r"^q\b"):
        chamfer_distance(p, cases.gauss(5, 4))
    with pytest.raises(ValueError, match=r"^p\b"):
        chamfer_distance(p[0], p)
    with pytest.raises(ValueError, match=r"^q\b"):
        chamfer_distance(p, p[None])
    with pytest.raises(ValueError, match=r"int|float"):
        chamfer_distance(p.int(), p.int())


@pytest.mark.parametrize(("N", "M"), [(1, 257), (257, 1), (100, 63)])
@pytest.mark.parametrize("d", [1, 16, 20, 128])
def test_unequal_sizes_and_dimensions(N, M, d):
    p, q = cases.gauss(N, d), cases.gauss(M, d, seed=1)
    need, need_p, need_q = oracle.chamfer(p, q)
    distance = chamfer_distance(p.requires_grad_(), q.requires_grad_())
    assert float(distance.detach()) == pytest.approx(need, rel=tol.CHAMFER)
    dp, dq = torch.autograd.grad(distance, (p, q))
    assert close(oracle.numbers(dp), need_p, tol.CHAMFER_GRADIENT)
    assert close(oracle.numbers(dq), need_q, tol.CHAMFER_GRADIENT)


def test_one_point_that_is_everybodys_nearest():
    p, q = cases.gauss(40, 3), cases.gauss(300, 3, seed=1) + 50
    p[7] += 10  # nearest of every q
    _, need_p, need_q = oracle.chamfer(p, q)
    dp, dq = torch.autograd.grad(chamfer_distance(p.requires_grad_(), q.requires_grad_()), (p, q))
    assert close(oracle.numbers(dp), need_p, tol.CHAMFER_GRADIENT)
    assert close(oracle.numbers(dq), need_q, tol.CHAMFER_GRADIENT)


def test_a_far_outlier():
    p, q = cases.gauss(40, 3), cases.gauss(30, 3, seed=1)
    p[11], q[7] = 1e6, 5.0  # clearly the nearest to it
    # The outlier's own distance is nearly all of the mean: the rest is compared without it.
    assert float(chamfer_distance(p, q)) == pytest.approx(oracle.chamfer(p, q)[0], rel=tol.CHAMFER)
    dq = torch.autograd.grad(chamfer_distance(p, q.requires_grad_()), q)[0]
    need = oracle.chamfer(p, q)[2]
    for got, row in zip(oracle.numbers(dq), need, strict=True):
        assert close(got, row, tol.CHAMFER_GRADIENT)


def test_infinite_coordinates():
    p, q = cases.gauss(20, 3), cases.gauss(30, 3, seed=1)
    p[7, 1] = float("inf")
    assert chamfer_distance(p, q) == float("inf")
    q[2, 1] = float("inf")
    assert chamfer_distance(p, q).isnan()


def test_float64_gradients_of_both_orders():
    p, q = cases.gauss(7, 3).double().requires_grad_(), cases.gauss(5, 3, seed=1).double().requires_grad_()
    assert chamfer_distance(p, q).dtype == torch.float64
    assert torch.autograd.gradcheck(chamfer_distance, (p, q))
    assert torch.autograd.gradgradcheck(chamfer_distance, (p, q))
    assert torch.autograd.gradgradcheck(lambda one: chamfer_distance(one, q.detach()), (p,))


def test_a_call_without_gradient_skips_the_custom_op(monkeypatch):
    p, q = cases.gauss(9, 3).requires_grad_(), cases.gauss(14, 3, seed=1)
    need = chamfer_distance(p, q)

    def fail(*_):
        raise AssertionError("went through the custom op")

    monkeypatch.setattr(chamfer, "_chamfer", fail)
    with torch.no_grad():
        assert chamfer_distance(p, q) == need
    assert chamfer_distance(p.detach(), q) == need
    with pytest.raises(AssertionError, match="custom op"):
        chamfer_distance(p, q)


def test_what_is_not_fused_is_said_once(monkeypatch):
    monkeypatch.setattr(fallback, "_SAID", set())
    p = torch.empty(5, 3, device="meta")
    with pytest.warns(UserWarning, match="no fused Chamfer kernel for meta tensors"):
        assert chamfer_distance(p, p).shape == ()
    chamfer_distance(p, p)  # warnings are errors here


class Cuda:
    """The little that the choice looks at, without a GPU."""

    def __init__(self, count, d, dtype=torch.float32):
        self.shape, self.dtype, self.device = (count, d), dtype, torch.device("cuda")


def test_what_the_fused_kernels_take(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    for d in (1, 3, 128, 256):
        assert chamfer._not_fused(Cuda(100_000, d), Cuda(1, d)) == ""
    assert "d = 257" in chamfer._not_fused(Cuda(5, 257), Cuda(5, 257))
    assert "float64" in chamfer._not_fused(Cuda(5, 3, torch.float64), Cuda(5, 3, torch.float64))
    assert "points" in chamfer._not_fused(Cuda(2**30, 3), Cuda(1, 3))
    monkeypatch.setattr(fallback, "HAS_TRITON", False)
    assert "Triton" in chamfer._not_fused(Cuda(5, 3), Cuda(5, 3))
