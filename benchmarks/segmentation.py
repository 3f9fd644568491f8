"""Memory and time of a training step of SegCaps, beside the same network with stored votes, and a U-Net.

    OMP_NUM_THREADS=1 python benchmarks/segmentation.py [--sides 128 256 512] [--rounds 3]

Each network takes steps, a forward and a backward pass, on one image in a process of its own. "blocks" is SegCaps as it
is. "stored" is backend="reference", which stores all votes. "einsum" stores them and routes them as `StoredVotes`, as
public code does. "convolutions" sums the votes over the child types in place of a routing: what the convolutions take
alone. The first three must agree in gradients before anything is measured. Memory is by how much the resident memory
of the process rises at most. Time is that of the CPU in the shortest of the rounds, in seconds, which
other processes change less than that of a clock.
"""

import argparse
import os
import time
from typing import Any

import torch
from torch import nn

from torchcaps import CapsuleMap, Capsules, create_model
from torchcaps.bench.resources import in_fresh_process, peak_resident, show_bytes
from torchcaps.nn.map import MapVotes
from torchcaps.ops import StoredVotes

WAYS = ("blocks", "stored", "einsum", "convolutions", "unet")


class Sum(nn.Module):
    """Stands in for a routing: the sum of the votes over the child types."""

    def __init__(self, layer: CapsuleMap):
        super().__init__()
        self.layer = layer

    def forward(self, capsules: Any) -> Capsules:
        votes = self.layer.votes(capsules)
        return votes.capsules(votes.votes.sum(1))


def build(way: str) -> nn.Module:
    """Return a network with the same weights each time."""
    torch.manual_seed(0)
    network = create_model("unet" if way == "unet" else "segcaps")
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, CapsuleMap)]
    for name, layer in layers:
        layer.backend = "auto" if way == "blocks" else "reference"
        if way == "convolutions":
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, Sum(layer))
    if way == "einsum":  # in a process of its own
        for method in ("_over_children", "_over_features", "coefficients"):
            setattr(MapVotes, method, getattr(StoredVotes, method))
    return network


def step(network: nn.Module, side: int) -> list[torch.Tensor]:
    """Return the gradients of one step."""
    torch.manual_seed(1)
    network.zero_grad()
    result = network(torch.rand(1, 1, side, side))
    (result.scores if result.activations is None else result.activations).square().mean().backward()
    return [x.grad for x in network.parameters() if x.grad is not None]


def gradients(way: str, side: int) -> list[torch.Tensor]:
    return [x.clone() for x in step(build(way), side)]


def measure(way: str, side: int, rounds: int) -> tuple[float, int]:
    """Return the time and the memory of a step."""
    network = build(way)
    step(network, 32)
    memory, times = peak_resident(lambda: step(network, side)), []
    for _ in range(rounds):
        begun = time.process_time()
        step(network, side)
        times.append(time.process_time() - begun)
    return min(times), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", type=int, default=[128, 256, 512], help="height and width of the image")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="what is measured")
    options = parser.parse_args()
    first, *others = (in_fresh_process(gradients, way, 128) for way in ("blocks", "stored", "einsum"))
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-5)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(f"{'side':>5} {'way':13} {'time':>8} {'memory':>8}")
    for side in options.sides:
        for way in options.ways:
            taken, memory = in_fresh_process(measure, way, side, options.rounds)
            print(f"{side:5} {way:13} {taken:7.2f}s {show_bytes(memory):>8}", flush=True)


if __name__ == "__main__":
    main()
