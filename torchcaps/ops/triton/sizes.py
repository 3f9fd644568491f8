"""How large the tiles of a kernel are: from a table that was measured on devices, or by a rule."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torchcaps.ops.backend import INTERPRETED

TABLE = Path(__file__).with_name("sizes.json")
LANES = 32  # of a warp
REGISTERS = 2**16  # of a multiprocessor
MOST_REGISTERS = 196  # for the numbers of a tile, of a lane's 255


class Layer(NamedTuple):
    """What the sizes of a kernel's tiles depend on.

    Fields:
        kernel: "sums", "normalize", "grads" or "weight_grads".
        agreement: "none", "dot", "unit" or "gaussian".
        moments: are mass, mean and variance computed, or weighted sums?
        over_children: is the softmax over the children?
        parents, rows, depth, width: of the votes.
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
        """Its name in the table."""
        what = "moments" if self.moments else "sum over children" if self.over_children else "sum"
        return f"{self.kernel} {self.agreement} {what} {self.rows}x{self.depth}x{self.width} {self.parents}"


class Tile(NamedTuple):
    """How many votes a program computes at once, and how many programs there should be.

    Fields:
        parents: in a block. If all are there, a softmax over the parents needs one pass over the children.
        per_lane: neighboring parents that a lane has; it divides the number of parents.
        samples: whose votes are computed at once.
        warps: that a program has. Lanes that are neither for parents nor for samples share a vote's features.
        programs: of a multiprocessor, among which the children are split.
        weights: that a lane reads at once.
    """

    parents: int
    per_lane: int
    samples: int
    warps: int
    programs: int
    weights: int

    @property
    def loads(self) -> int:
        """As many numbers as Triton lets all lanes load alike."""
        return LANES * self.warps // 2


class Trial(NamedTuple):
    """Tiles that are tried, and the kernels that were asked about meanwhile, in order."""

    tiles: dict[Layer, Tile]
    asked: dict[Layer, None]


_trials: list[Trial] = []


@contextmanager
def try_tiles(tiles: dict[Layer, Tile]) -> Iterator[Trial]:
    """Within this context these kernels have these tiles."""
    _trials.append(Trial(tiles, {}))
    try:
        yield _trials[-1]
    finally:
        _trials.pop()


def choose_tile(layer: Layer, architecture: str) -> Tile:
    """The tile that was the fastest on such a device, or what the rule says."""
    for trial in _trials:
        trial.asked[layer] = None
        if layer in trial.tiles:
            return trial.tiles[layer]
    if INTERPRETED:
        return Tile(4, 2 if layer.parents % 2 == 0 else 1, 2, 1, 1, 64)
    return own_table().get(architecture, {}).get(layer.key) or tile_by_rule(layer)


@cache
def own_table() -> dict[str, dict[str, Tile]]:
    return read_table(TABLE)


def read_table(path: Path) -> dict[str, dict[str, Tile]]:
    """Tiles by architecture ("sm_90") and layer; none if there is no such file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {device: {layer: Tile(*sizes) for layer, sizes in of.items()} for device, of in found.items()}


@cache
def tile_by_rule(layer: Layer) -> Tile:
    """One warp, which needs no barrier to sum up, and two parents for each lane if registers allow: sums over the
    parents are shorter then, and samples share loads. Only the sums of many parents take more warps, and all parents in
    one pass: their softmax would need another one."""
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
    """About how many a lane needs that has all features of its votes."""
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
    """The first that is no less than n."""
    return 1 << (n - 1).bit_length()
