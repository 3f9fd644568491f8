"""Time and memory of an encapsulated layer, relative to the convolutions inside it.

    python -m torchcaps.bench.encapsulated [--batch 64] [--rounds 11]

Layers of EncapNet run forward and backward, in turns with their own convolutions: alone, and with batch normalization
and ReLU after those of the branches and of the shortcut, as in an ordinary network. Printed are ratios of the medians
over the rounds, and of the most memory that PyTorch allocated at once beyond weights and input. "norm" is the same
layer with its capsules squashed by `torch.linalg.vector_norm`; values and gradients must agree first. The last row is a
whole EncapNet of 18 layers: "alone" leaves out all BN, ReLU and squash, and "+BN,ReLU" leaves out all squash.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from torchcaps import CapsuleBlock2d, create_model
from torchcaps.bench.memory import peak_allocated
from torchcaps.bench.script import script_parser
from torchcaps.nn import encapsulated
from torchcaps.nn.encapsulated import Coefficients, as_poses
from torchcaps.routing import squash

# (in_pose, out_pose, kernel_size, stride, size): EncapNet's third and fourth module, type I and type II.
LAYERS = {
    "module 3, type I": (4, 8, 3, 2, 16),
    "module 3, type II": (8, 8, 1, 1, 8),
    "module 4, type I": (8, 16, 3, 2, 8),
    "module 4, type II": (16, 16, 1, 1, 4),
}
TYPES = 32
COEFFICIENTS: tuple[Coefficients | None, ...] = ("both", "own", None)

Forward = Callable[[], Tensor]


def squash_by_norm(x: Tensor, features: int) -> Tensor:
    """ReLU and squash with `torch.linalg.vector_norm`, in the place of `relu_squash`."""
    return squash(x.relu().unflatten(1, (-1, features)), dim=2).flatten(1, 2)


def convolutions(block: Any, normed: bool) -> Callable[[Tensor], Tensor]:
    """The layer's convolutions alone, each on an input of the right shape; `normed` adds BN and ReLU."""
    branches = [block.conv] if block.coefficients is None else [block.master[0], block.aide[0]]
    readers = [] if block.coefficients is None else [block.from_master, block.from_aide]
    norms = [nn.BatchNorm2d(branch.out_channels) for branch in branches]

    def run(x: Tensor) -> Tensor:
        maps = [branch(x) for branch in branches]
        if normed:
            maps = [norm(y).relu() for norm, y in zip(norms, maps, strict=True)]
        maps += [reader(y) for reader, y in zip(readers, maps, strict=False)]
        total: Tensor = sum(y.sum() for y in maps)
        return total

    return run


def compare(name: str, coefficients: str | None, runs: Mapping[str, Forward], learned: nn.Module, rounds: int) -> None:
    """Print one row of ratios: runs["layer"] to the others, forward and backward."""
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):  # the first round warms up
        for way, run in runs.items():
            learned.zero_grad()
            start = time.perf_counter()
            run().backward()
            taken[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(times[1:]) for way, times in taken.items()}
    peaks: dict[str, float] = {}
    for way, run in runs.items():
        learned.zero_grad()
        peaks[way] = peak_allocated(partial(_backward, run))
    ratios = [part["layer"] / part[way] for part in (medians, peaks) for way in ("alone", "normed", "norm")]
    shown = "".join(f"{ratio:>{width}.2f}x" for ratio, width in zip(ratios, (11, 11, 7, 15, 11, 7), strict=True))
    print(f"{name:20}{coefficients!s:14}{shown}", flush=True)


def _backward(run: Forward) -> None:
    run().backward()


def patched(run: Forward, where: object, name: str, by: Callable[..., Tensor]) -> Forward:
    """A forward pass in which `where.name` is replaced."""

    def forward() -> Tensor:
        with mock.patch.object(where, name, by):
            return run()

    return forward


def main() -> None:
    parser = script_parser("encapsulated", __doc__)
    parser.add_argument("--batch", type=int, default=64, help="images of a pass (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="passes of each way (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'':34}{'time':16}{'':16}{'memory'}")
    head = "".join(
        f"{title:>{width}}"
        for title, width in zip(2 * ("alone", "+BN,ReLU", "norm"), (12, 12, 8, 16, 12, 8), strict=True)
    )
    print(f"{'layer':20}{'coefficients':14}{head}")
    runs: dict[str, Forward]
    for name, (before, after, kernel, stride, size) in LAYERS.items():
        for coefficients in COEFFICIENTS:
            block = CapsuleBlock2d(TYPES, before, after, kernel, stride, coefficients=coefficients)
            x = torch.rand(options.batch, TYPES * before, size, size, requires_grad=True)
            weights = torch.rand(options.batch, TYPES, size // stride, size // stride, after)

            def layer(
                x: Tensor = x, block: CapsuleBlock2d = block, weights: Tensor = weights, before: int = before
            ) -> Tensor:
                return (block(as_poses(x, before)).poses * weights).sum()

            runs = {
                "layer": layer,
                "alone": partial(convolutions(block, False), x),
                "normed": partial(convolutions(block, True), x),
                "norm": patched(layer, encapsulated, "relu_squash", squash_by_norm),
            }
            results = [
                (y := runs[way](), *torch.autograd.grad(y, [x, *block.parameters()])) for way in ("layer", "norm")
            ]
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            compare(name, coefficients, runs, block, options.rounds)
    network = create_model("encapnet_v1")
    images = torch.rand(options.batch, 3, 32, 32)

    def step() -> Tensor:
        activations: Tensor = network(images).activations
        return activations.sum()

    activation = encapsulated.BNReLUSquash
    runs = {
        "layer": step,
        "alone": patched(step, activation, "forward", lambda self, x: x),
        "normed": patched(step, activation, "forward", lambda self, x: self.bn(x).relu()),
        "norm": patched(step, encapsulated, "relu_squash", squash_by_norm),
    }
    compare("EncapNet, 18 layers", "both", runs, network, options.rounds)


if __name__ == "__main__":
    main()
