"""Votes, and the reductions over children that every routing algorithm is made of."""

from torchcaps.ops.agreement import Agreement, Dot, Gaussian
from torchcaps.ops.backend import Backend, check_backend, choose_backend, use_backend
from torchcaps.ops.numerics import at_least_float32, contract, nonzero, normalize
from torchcaps.ops.pool import pool_by_agreement
from torchcaps.ops.relu_squash import relu_squash
from torchcaps.ops.votes import LazyVotes, Moments, Over, StoredVotes, Votes, as_votes, windows

__all__ = [
    "Agreement",
    "Backend",
    "Dot",
    "Gaussian",
    "LazyVotes",
    "Moments",
    "Over",
    "StoredVotes",
    "Votes",
    "as_votes",
    "at_least_float32",
    "check_backend",
    "choose_backend",
    "contract",
    "nonzero",
    "normalize",
    "pool_by_agreement",
    "relu_squash",
    "use_backend",
    "windows",
]
