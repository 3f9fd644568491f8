"""Sizes of the tiles of the Triton kernels, by a rule: nothing has been measured on a device yet."""

from functools import cache
from typing import NamedTuple

from torchcaps.ops.backend import INTERPRETED

LANES = 32  # lanes of a warp
REGISTERS = 2**16  # registers of a multiprocessor
MOST_REGISTERS = 196  # most of a lane's 255 registers that the numbers of a tile may take


class Layer(NamedTuple):
    """The properties of a kernel and its layer that the sizes of tiles depend on.

    Fields:
        kernel: "sums", "normalize", "grads" or "weight_grads".
        agreement: "none", "dot", "unit" or "gaussian".
        moments: whether mass, mean and variance are computed, and not weighted sums.
        over_children: whether the softmax is over the children.
        parents: number of parents.
        rows, depth, width: a pose is `(rows, depth)`, a vote `(rows, width)`.
    """

    kernel: str
    agreement: str
    moments: bool
    over_children: bool
    parents: int
    rows: int
    depth: int
    width: int


class Tile(NamedTuple):
    """How many votes a program computes at once, and how many programs there should be.

    Fields:
        parents: number of parents in a block. If it holds all of them, a softmax over the parents needs one pass over
            the children.
        per_lane: number of neighboring parents in a lane; it divides the number of parents.
        samples: number of samples in a block.
        warps: number of warps of a program. If it has more lanes than parents and samples need, several lanes share
            the features of a vote.
        programs: number of programs for each multiprocessor; the children are split among them.
        weights: most weights that a lane reads at once.
    """

    parents: int
    per_lane: int
    samples: int
    warps: int
    programs: int
    weights: int

    @property
    def loads(self) -> int:
        """Most numbers of a load that every lane makes for itself; Triton distributes larger loads among the lanes."""
        return LANES * self.warps // 2


def choose_tile(layer: Layer) -> Tile:
    """Return the tile of a kernel by the rule; in the interpreter a small one, so that tests have many blocks."""
    if INTERPRETED:
        return Tile(4, 2 if layer.parents % 2 == 0 else 1, 2, 1, 1, 64)
    return tile_by_rule(layer)


@cache
def tile_by_rule(layer: Layer) -> Tile:
    """Return a tile by rule.

    A program has one warp, which needs no barrier to sum, and a lane has two parents if registers allow: then sums over
    the parents take fewer steps, and samples share loads. Only forward sums of many parents take up to four warps, so
    that all parents fit one block and their softmax needs no pass of its own.
    """
    per_lane = 2 if layer.parents % 2 == 0 and _registers(layer, 2) <= MOST_REGISTERS else 1
    registers = _registers(layer, per_lane)
    sharing = power_of_2(ceil_div(registers, MOST_REGISTERS))  # lanes that share a vote's features
    lanes = power_of_2(ceil_div(layer.parents, per_lane))
    warps = 1
    if layer.kernel == "sums" and not layer.over_children:
        warps = min(4, max(1, lanes * sharing // LANES))
    lanes = min(lanes, max(1, LANES * warps // sharing))
    samples = max(1, LANES * warps // (lanes * sharing))
    resident = REGISTERS // (LANES * warps * min(255, 40 + ceil_div(registers, sharing)))
    weights = 128 if layer.kernel == "sums" else 64
    return Tile(per_lane * lanes, per_lane, samples, warps, max(1, 2 * resident), weights)


def _registers(layer: Layer, per_lane: int) -> int:
    """Estimate the registers of a lane that has all features of its votes."""
    features = power_of_2(layer.rows) * power_of_2(layer.width)
    gaussian = layer.agreement == "gaussian"
    agreement = {"none": 0, "dot": 1, "unit": 1, "gaussian": 2}[layer.agreement]  # target, precision
    matrix = power_of_2(layer.depth) * power_of_2(layer.width)
    if layer.kernel == "sums":  # votes, sums, squares, origin
        tiles = agreement + 2 + layer.moments * (2 - gaussian)
    else:  # votes, their gradients, slope, curve, mean
        tiles = agreement + 2 + layer.moments * (2 - gaussian) + (layer.kernel != "normalize")
    if layer.kernel == "grads":
        tiles += agreement
    weights = 2 * matrix if layer.kernel == "weight_grads" else min(matrix, 16)
    return per_lane * (tiles * features + weights)


def ceil_div(n: int, by: int) -> int:
    """Return n / by, rounded up."""
    return -(-n // by)


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less than n."""
    return 1 << (n - 1).bit_length()
