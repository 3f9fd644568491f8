"""The "tiled" backend: the reductions in eager PyTorch, block by block, on any device."""

from torchcaps.ops.tiled.blocks import vote_blocks
from torchcaps.ops.tiled.moments import moments, moments_backward
from torchcaps.ops.tiled.sums import vote_sum, vote_sum_backward, weighted_sum, weighted_sum_backward
from torchcaps.ops.tiled.tiles import Layout, Tile

__all__ = [
    "Layout",
    "Tile",
    "moments",
    "moments_backward",
    "vote_blocks",
    "vote_sum",
    "vote_sum_backward",
    "weighted_sum",
    "weighted_sum_backward",
]
