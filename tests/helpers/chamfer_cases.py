"""The bound that the Chamfer kernels' filter promises, asked of what it left: on a GPU and under Triton's interpreter."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor


def require_filter_bound(p: Tensor, q: Tensor) -> None:
    """The filter's maxima are within the error that `refine` relies on, against FP64 scores of the centred, scaled inputs."""
    from maxsim_kernels.chamfer import nearest  # needs Triton, which those who skip their tests may lack

    centre, maxima = _left_by_the_filter(nearest, p, q)
    d = p.shape[1]
    centre = centre[:d]
    furthest = (torch.cat([p, q]) - centre).abs().max()
    scale = 2.0 ** -int(torch.frexp(furthest).exponent)
    x, y = ((one.double() - centre.double()) * scale for one in (p, q))
    assert 0.5 <= float(torch.cat([x, y]).abs().max()) <= 1.0
    alpha, beta, floor = nearest.score_error(d)
    shape, at = nearest._shape(p, q), 0
    for turn, (source, target) in enumerate(((x, y), (y, x))):
        tiles, groups = shape.tiles[1 - turn], shape.groups[turn]
        size = groups * tiles * shape.tile_words
        got = _held_maxima(maxima[at : at + size], shape, groups, tiles)[: len(source)]
        at += size
        score = source @ target.T - 0.5 * target.square().sum(1)
        one, other = source.norm(dim=1)[:, None], target.norm(dim=1)[None]
        error = alpha * one * other + beta * other.square() / 2 + floor * (one + other) + 2.0**-32
        best, allowed = _by_part(score, shape, tiles), _by_part(error, shape, tiles)
        if not shape.split:  # stored in FP16
            allowed = allowed + 2.0**-11 * (best.abs() + allowed) + 2.0**-25
        known = best > -torch.inf
        assert torch.equal(known, got > -torch.inf)
        worst = float(((got - best).abs()[known] / allowed[known]).max())
        assert worst <= 1.0, (d, worst)


def _left_by_the_filter(nearest: Any, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The centre of all points and the maxima, as the kernels have written them."""
    held: dict[str, Tensor] = {}
    original = nearest.launch

    def watch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        original(kernel, grid, *arguments, **constants)
        if kernel is nearest.features_kernel:
            held["centre"] = arguments[2].clone()
        if kernel in (nearest.chunks_kernel, nearest.slots_kernel):
            assert "maxima" not in held, "several slices: take smaller clouds"
            held["maxima"] = arguments[2 if kernel is nearest.chunks_kernel else 3].clone()

    with mock.patch.object(nearest, "launch", watch):
        nearest._run(p, q, False)
    return held["centre"], held["maxima"]


def _held_maxima(words: Tensor, shape: Any, groups: int, tiles: int) -> Tensor:
    """What a filter left for `groups` of sources and `tiles` of targets: `[sources, tiles, parts]`."""
    rows, parts = shape.config.rows, shape.parts
    if shape.split:
        return words.view(groups, tiles, rows, parts).permute(0, 2, 1, 3).reshape(groups * rows, tiles, parts).double()
    halves = words.view(torch.float16).view(groups, tiles, rows // 16, 8, parts, 2)
    return halves.permute(0, 2, 5, 3, 1, 4).reshape(groups * rows, tiles, parts).double()


def _by_part(scores: Tensor, shape: Any, tiles: int) -> Tensor:
    """The largest score of each source in each part: `[sources, targets]` as `[sources, tiles, parts]`."""
    tile, parts = shape.config.tokens, shape.parts
    scores = torch.nn.functional.pad(scores, (0, tiles * tile - scores.shape[1]), value=-torch.inf)
    if shape.split:
        return scores.view(-1, tiles, parts, tile // parts).amax(-1)
    return scores.view(-1, tiles, parts // 4, tile // parts // 2, 4, 2).amax((3, 5)).view(-1, tiles, parts)
