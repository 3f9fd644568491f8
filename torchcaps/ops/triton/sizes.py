"""Sizes of the tiles of the Triton kernels: from a table measured on devices, or by a rule."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torchcaps.ops.backend import INTERPRETED

TABLE = Path(__file__).with_name("sizes.json")
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

    @property
    def key(self) -> str:
        """Name of the layer in the table."""
        what = "moments" if self.moments else "sum over children" if self.over_children else "sum"
        return f"{self.kernel} {self.agreement} {what} {self.rows}x{self.depth}x{self.width} {self.parents}"


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


class Trial(NamedTuple):
    """Tiles to try, and the layers whose tiles were asked for meanwhile, in order."""

    tiles: dict[Layer, Tile]
    asked: dict[Layer, None]


_trials: list[Trial] = []


@contextmanager
def try_tiles(tiles: dict[Layer, Tile]) -> Iterator[Trial]:
    """Use these tiles within this context, before those of the table."""
    _trials.append(Trial(tiles, {}))
    try:
        yield _trials[-1]
    finally:
        _trials.pop()


def choose_tile(layer: Layer, architecture: str) -> Tile:
    """Return the fastest tile measured on this architecture, or that of the rule."""
    for trial in _trials:
        trial.asked[layer] = None
        if layer in trial.tiles:
            return trial.tiles[layer]
    if INTERPRETED:
        return Tile(4, 2 if layer.parents % 2 == 0 else 1, 2, 1, 1, 64)
    return own_table().get(architecture, {}).get(layer.key) or tile_by_rule(layer)


@cache
def own_table() -> dict[str, dict[str, Tile]]:
    """Return the table of the package."""
    return read_table(TABLE)


def read_table(path: Path) -> dict[str, dict[str, Tile]]:
    """Read tiles by architecture ("sm_90") and layer; an empty table if the file does not exist."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {device: {layer: Tile(*sizes) for layer, sizes in of.items()} for device, of in found.items()}


@cache
def tile_by_rule(layer: Layer) -> Tile:
    """Return a tile by rule.

    A program has one warp, which needs no barrier to sum, and a lane has two parents if registers allow: then sums over
    the parents take fewer steps, and samples share loads. Only forward sums of many parents take up to four warps, so
    that all parents fit one block and their softmax needs no pass of its own.
    """
    per_lane = 2 if layer.parents % 2 == 0 and _registers(layer, 2) <= MOST_REGISTERS else 1
    registers = _registers(layer, per_lane)
    sharing = _power_of_2(-(-registers // MOST_REGISTERS))  # lanes that share a vote's features
    lanes = _power_of_2(-(-layer.parents // per_lane))
    warps = 1
    if layer.kernel == "sums" and not layer.over_children:
        warps = min(4, max(1, lanes * sharing // LANES))
    lanes = min(lanes, max(1, LANES * warps // sharing))
    samples = max(1, LANES * warps // (lanes * sharing))
    resident = REGISTERS // (LANES * warps * min(255, 40 + -(-registers // sharing)))
    weights = 128 if layer.kernel == "sums" else 64
    return Tile(per_lane * lanes, per_lane, samples, warps, max(1, 2 * resident), weights)


def _registers(layer: Layer, per_lane: int) -> int:
    """Estimate the registers of a lane that has all features of its votes."""
    features = _power_of_2(layer.rows) * _power_of_2(layer.width)
    gaussian = layer.agreement == "gaussian"
    agreement = {"none": 0, "dot": 1, "unit": 1, "gaussian": 2}[layer.agreement]  # target, precision
    matrix = _power_of_2(layer.depth) * _power_of_2(layer.width)
    if layer.kernel == "sums":  # votes, sums, squares, origin
        tiles = agreement + 2 + layer.moments * (2 - gaussian)
    else:  # votes, their gradients, slope, curve, mean
        tiles = agreement + 2 + layer.moments * (2 - gaussian) + (layer.kernel != "normalize")
    if layer.kernel == "grads":
        tiles += agreement
    weights = 2 * matrix if layer.kernel == "weight_grads" else min(matrix, 16)
    return per_lane * (tiles * features + weights)


def _power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less than n."""
    return 1 << (n - 1).bit_length()
