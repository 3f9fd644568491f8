"""Votes, and the reductions over children that every routing algorithm is made of."""

from torchcaps.ops.agreement import Agreement, Dot, Gaussian
from torchcaps.ops.numerics import at_least_float32, normalize
from torchcaps.ops.votes import LazyVotes, Moments, Over, StoredVotes, Votes, as_votes

__all__ = [
    "Agreement",
    "Dot",
    "Gaussian",
    "LazyVotes",
    "Moments",
    "Over",
    "StoredVotes",
    "Votes",
    "as_votes",
    "at_least_float32",
    "normalize",
]
