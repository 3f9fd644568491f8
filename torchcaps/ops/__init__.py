"""Votes of children for parents, and the reductions over the children that every routing algorithm is built from.

votes.py, agreement.py    what a routing may ask for, and the rules for its logits
stored.py                 votes as a tensor: the definition of every reduction
computed.py, poses.py     votes that are computed inside the reductions
pool.py                   routing between the positions of a map, for `RoutingPool2d`
operators.py, backend.py  an operator for each reduction and backend, and the choice of one
device_check.py           whether a CUDA device computes with the Triton kernels what the reference computes
tiled/ native/ triton/    the backends: a file for each reduction
children.py, grid.py, numerics.py   tensors of the children, windows, and arithmetic that all share
"""

from torchcaps.ops.agreement import Agreement, Dot, Gaussian, PoseLogits, SigmoidDot, UnitDot
from torchcaps.ops.backend import Backend, backends, choose_backend, use_backend
from torchcaps.ops.children import Softmax
from torchcaps.ops.computed import ComputedVotes, LinearVotes
from torchcaps.ops.grid import positions, windows
from torchcaps.ops.numerics import (
    at_least_float32,
    autocast_off,
    contract,
    evenly_spaced,
    gates_of,
    nonzero,
    normalize,
)
from torchcaps.ops.poses import PoseVotes
from torchcaps.ops.stored import StoredVotes
from torchcaps.ops.votes import Activation, Beta, Votes, WeightedVotes

__all__ = [
    "Activation",
    "Agreement",
    "Backend",
    "Beta",
    "ComputedVotes",
    "Dot",
    "Gaussian",
    "LinearVotes",
    "PoseLogits",
    "PoseVotes",
    "SigmoidDot",
    "Softmax",
    "StoredVotes",
    "UnitDot",
    "Votes",
    "WeightedVotes",
    "at_least_float32",
    "autocast_off",
    "backends",
    "choose_backend",
    "contract",
    "evenly_spaced",
    "gates_of",
    "nonzero",
    "normalize",
    "positions",
    "use_backend",
    "windows",
]
