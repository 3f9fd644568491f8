"""Votes of children for parents, and the reductions over the children that every routing algorithm is built from."""

from torchcaps.ops.agreement import Agreement, Dot, Gaussian
from torchcaps.ops.backend import Backend, backends, choose_backend, use_backend
from torchcaps.ops.children import Pair, Softmax, positions
from torchcaps.ops.lazy import LazyVotes
from torchcaps.ops.numerics import at_least_float32, autocast_off, contract, evenly_spaced, nonzero, normalize
from torchcaps.ops.reference import StoredVotes, as_votes
from torchcaps.ops.votes import Activation, Linear, Moments, Votes, per_child
from torchcaps.ops.windows import windows

__all__ = [
    "Activation",
    "Agreement",
    "Backend",
    "Dot",
    "Gaussian",
    "LazyVotes",
    "Linear",
    "Moments",
    "Pair",
    "Softmax",
    "StoredVotes",
    "Votes",
    "as_votes",
    "at_least_float32",
    "autocast_off",
    "backends",
    "choose_backend",
    "contract",
    "evenly_spaced",
    "nonzero",
    "normalize",
    "per_child",
    "positions",
    "use_backend",
    "windows",
]
