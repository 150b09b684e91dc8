"""The Chamfer kernels: compiled for sm_80 and sm_90 without a GPU, and how their work is cut into launches and programs."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import record_gradients as gradients  # noqa: E402
from maxsim_kernels.chamfer import nearest  # noqa: E402

POISON = False  # nothing here runs a kernel


recorder, RECORD = gradients.recorder, gradients.recorder.read(gradients.RECORD)
PROCESSORS = gradients.PROCESSORS
BEFORE = ["bounds_kernel", "features_kernel"]
AFTER = ["refine_kernel", "winners_kernel", "rank_kernel", "begin_kernel", "place_kernel", "gradient_kernel"]
FILTERS = (nearest.chunks_kernel, nearest.slots_kernel)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("d", "dtype"), gradients.CLOUDS)
def test_kernels_compile_within_their_resources(tmp_path, architecture, d, dtype) -> None:
    found = gradients.chamfer_launches(d, dtype, (300, 200), architecture)
    assert [one.kernel.__name__ for one in found] == [*BEFORE, "chunks_kernel" if d <= 20 else "slots_kernel", *AFTER]
    for key, one in gradients.keyed(gradients.chamfer_name(d, dtype), found, architecture).items():
        binary = recorder.compiled(one, architecture)
        used = recorder.resources(binary, tmp_path)
        gradients.compare(key, used, RECORD)
        assert used["shared"] <= recorder.LIMITS[architecture], (one.kernel.__name__, used)
        hot = one.kernel in (*FILTERS, nearest.refine_kernel)
        assert used["spill_bytes"] <= (0 if hot else 32), (one.kernel.__name__, used)
        if one.kernel in FILTERS and architecture == 90:
            assert "wgmma.mma_async" in binary.asm["ptx"]
            assert "cp.async.bulk.tensor" in binary.asm["ptx"]


@pytest.mark.parametrize("points", [(1, 1), (10_000, 10_000), (50_000, 50_000), (100_000, 1), (1, 100_000), (3000, 70_000)])
@pytest.mark.parametrize("d", [3, 128])
def test_launches_cover_every_group_and_tile_once(d, points) -> None:
    shape = nearest._shape(torch.empty(points[0], d, device="meta"), torch.empty(points[1], d, device="meta"))
    in_p, in_q = shape.groups
    slices = nearest._slices(shape, PROCESSORS)
    covered = []
    for first, of_p, of_q in slices:
        covered += range(first, first + of_p + of_q)
        assert of_p == sum(first <= group < first + of_p + of_q for group in range(in_p))
        held = (of_p * shape.tiles[1] + of_q * shape.tiles[0]) * shape.tile_words * 4
        assert held <= nearest.MAXIMA_BYTES[shape.split] or of_p + of_q == 1
        rows = (of_p + of_q) * shape.config.rows
        assert rows % shape.refine[0] == 0
        assert 1 <= shape.refine_pieces(rows) <= max(shape.tiles)
        splits = nearest._splits(of_p, of_q, shape, PROCESSORS)[:2]
        assert all(1 <= pieces <= tiles for pieces, tiles in zip(splits, shape.tiles[::-1], strict=True))
    assert covered == list(range(in_p + in_q))


def test_fifty_thousand_points_of_three_coordinates_are_filtered_at_once() -> None:
    cloud = torch.empty(50_000, 3, device="meta")
    assert len(nearest._slices(nearest._shape(cloud, cloud), PROCESSORS)) == 1


@pytest.mark.parametrize("d", [3, 128])
def test_small_clouds_take_few_launches(d) -> None:
    """Two to prepare, one to filter, one to refine, one to add up; three to list who chose whom, and one for both gradients."""
    assert len(gradients.chamfer_launches(d, torch.float32, (10_000, 10_000), 90)) == 5 + 4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_distances_are_multiply_adds_where_the_compiler_fuses_nothing(architecture) -> None:
    """Which of two nearly equal distances is less must not depend on the compiler's flags."""
    found = gradients.chamfer_launches(3, torch.float32, (300, 200), architecture)
    refine = next(one for one in found if one.kernel is nearest.refine_kernel)
    assert recorder.compiled(refine, architecture, fused=False).asm["ptx"].count("fma.rn.f32") >= 3


@pytest.mark.slow
def test_slots_stay_in_their_threads() -> None:
    """The loop over tiles neither shuffles nor passes maxima through shared memory: accumulators are reduced and stored as they lie."""
    found = gradients.chamfer_launches(128, torch.float32, (300, 200), 90)
    binary = recorder.compiled(next(one for one in found if one.kernel is nearest.slots_kernel), 90)
    body = binary.asm["ptx"].split("wgmma.mma_async", 1)[1].split("st.global")
    assert len(body) == 5  # two stores in the loop, two after it
    loop = "".join(body[:2])
    assert loop.count("max.NaN.f32") == 2 * 2 * 15  # two tiles, two rows of a thread, 16 cells each
    assert "shfl" not in loop
    assert "st.shared" not in loop


@pytest.mark.parametrize("key", sorted(nearest.FILTERS))
def test_configurations_hold_together(key) -> None:
    config, (rows, maxima, cells) = nearest.FILTERS[key], nearest.REFINES[key[0]]
    for number in (
        config.rows,
        config.tokens,
        config.short,
        rows,
        maxima,
        cells,
        nearest.FEATURES[key[0]][0],
        nearest.BOUND_PROGRAMS,
        nearest.BOUNDS[key[0]],
        nearest.SAMPLE,
    ):
        assert number & (number - 1) == 0
    assert config.short <= config.tokens <= config.rows  # padding to whole rows is padding to whole tiles
    assert config.rows >= rows
    if not key[0]:  # what `tile_ops.slots` makes of a tile, and `_two_rows` of its rows
        assert config.short == (config.tokens // 4 if config.tokens < 64 else 16)
        assert config.rows % 32 == 0
        assert rows == 16


def test_features_fit_their_width() -> None:
    for d in range(1, nearest.MOST_DIMENSIONS + 1):
        split, width = nearest.features_of(d)
        assert (split, width) in nearest.FILTERS
        assert width >= (3 * d + 3 if split else d)
