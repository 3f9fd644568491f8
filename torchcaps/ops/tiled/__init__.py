"""The "tiled" backend: the reductions in eager PyTorch, block by block, on any device."""

from torchcaps.ops.tiled.moments import moments, moments_backward
from torchcaps.ops.tiled.net_sum import Net, net_factors, net_sum, net_sum_backward
from torchcaps.ops.tiled.vote_sum import vote_sum, vote_sum_backward
from torchcaps.ops.tiled.weighted_sum import weighted_sum, weighted_sum_backward

__all__ = [
    "Net",
    "moments",
    "moments_backward",
    "net_factors",
    "net_sum",
    "net_sum_backward",
    "vote_sum",
    "vote_sum_backward",
    "weighted_sum",
    "weighted_sum_backward",
]
