"""Spectral convolution: the few lowest Fourier modes of a field, each through its own matrix.

Fields are (n, *grid, c), channels last. The transforms are products with the rows of the Fourier
matrix that are kept, in real arithmetic: on one or two processors and at a few hundred points this
takes half the time of full fast transforms, of which most output would be thrown away.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn


class SpectralConv(nn.Module):
    """Multiplies each kept Fourier mode of h (n, *grid, c) by its own complex (c, c) matrix.

    Modes are normalised by the number of points ("forward"), so that the weights mean the same
    on every grid. The complex weight is stored as real numbers, (modes..., c, c, 2): modes is
    (modes,) in one dimension and (2 modes - 1, modes) in two, with frequency 0 of the first
    dimension in the middle.
    """

    def __init__(
        self, channels: int, modes: int, grid_dims: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.modes = modes
        self.grid_dims = grid_dims
        shape = [modes] if grid_dims == 1 else [2 * modes - 1, modes]
        weight = torch.empty(*shape, channels, channels, 2, dtype=torch.float32)
        # E |weight|^2 = 1 / channels: a smooth field keeps its size.
        weight.normal_(0.0, 1 / math.sqrt(2 * channels), generator=generator)
        self.weight = nn.Parameter(weight)

    def forward(self, h: Tensor) -> Tensor:
        """The filtered field, of h's shape."""
        return self._forward_1d(h) if self.grid_dims == 1 else self._forward_2d(h)

    def _forward_1d(self, h: Tensor) -> Tensor:
        n, points, c = h.shape
        keep = _kept(points, self.modes)
        analysis, synthesis = _real_transform(points, keep, h.dtype, h.device)
        f = (analysis @ h).view(n, 2, keep, c)
        f = f.permute(2, 0, 1, 3).reshape(keep, n, 2 * c)
        g = torch.bmm(f, _as_real(self.weight[:keep]))
        g = g.view(keep, n, 2, c).permute(1, 2, 0, 3).reshape(n, 2 * keep, c)
        return synthesis @ g

    def _forward_2d(self, h: Tensor) -> Tensor:
        n, rows, columns, c = h.shape
        keep1, keep2 = _kept(rows, self.modes), _kept(columns, self.modes)
        analysis2, synthesis2 = _real_transform(columns, keep2, h.dtype, h.device)
        analysis1, synthesis1 = _complex_transform(rows, keep1, h.dtype, h.device)
        both = 2 * keep1 - 1
        f = (analysis2 @ h).view(n, rows, 2, keep2, c)
        f = analysis1 @ f.permute(0, 3, 2, 1, 4).reshape(n, keep2, 2 * rows, c)
        f = f.view(n, keep2, 2, both, c).permute(3, 1, 0, 2, 4).reshape(-1, n, 2 * c)
        first = self.modes - keep1
        weight = self.weight[first : first + both, :keep2].reshape(-1, c, c, 2)
        g = torch.bmm(f, _as_real(weight)).view(both, keep2, n, 2, c)
        g = synthesis1 @ g.permute(2, 1, 3, 0, 4).reshape(n, keep2, 2 * both, c)
        g = g.view(n, keep2, 2, rows, c).permute(0, 3, 2, 1, 4).reshape(n, rows, 2 * keep2, c)
        return synthesis2 @ g


def _kept(points: int, modes: int) -> int:
    """Frequencies 0, 1, ... below both `modes` and the Nyquist frequency of the grid."""
    return min(modes, (points + 1) // 2)


def _angles(points: int, frequencies: Tensor) -> Tensor:
    """Angle of each frequency at each point, (frequencies, points), float64."""
    # The product is reduced in integers first: large angles would lose digits.
    turns = torch.outer(frequencies, torch.arange(points)) % points
    return turns.to(torch.float64) * (2 * math.pi / points)


@lru_cache(maxsize=64)
def _real_transform(
    points: int, keep: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Real field -> (real, imaginary) parts, (2 keep, points), and back, (points, 2 keep)."""
    angle = _angles(points, torch.arange(keep))
    waves = torch.cat([angle.cos(), -angle.sin()])
    twice = torch.full((keep, 1), 2.0, dtype=torch.float64)
    twice[0] = 1.0  # the other frequencies stand for their negatives too
    back = waves * torch.cat([twice, twice])
    return _plain(waves / points, dtype, device), _plain(back.T, dtype, device)


@lru_cache(maxsize=64)
def _complex_transform(
    points: int, keep: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The same for complex fields and frequencies -(keep - 1) ... keep - 1.

    Real parts are stacked on imaginary parts on both sides.
    """
    angle = _angles(points, torch.arange(1 - keep, keep))
    cos, sin = angle.cos(), angle.sin()
    there = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
    return _plain(there / points, dtype, device), _plain(there.T, dtype, device)


def _plain(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy that autograd may keep, even if the cache was filled within inference mode."""
    with torch.inference_mode(False):
        copy = torch.empty(matrix.shape, dtype=dtype, device=device)
        with torch.no_grad():
            return copy.copy_(matrix)


def _as_real(weight: Tensor) -> Tensor:
    """Complex matrices (m, c, c, 2) as real ones (m, 2 c, 2 c) that act on [real | imaginary]."""
    real, imaginary = weight[..., 0], weight[..., 1]
    return torch.cat([torch.cat([real, imaginary], 2), torch.cat([-imaginary, real], 2)], 1)
