"""Table 1 of Li et al. 2018: parameters, memory and time of a training step of its six networks, side by side.

    python benchmarks/li2018_table1.py [--batch 4] [--rounds 2] [--narrow]

The networks take steps (Adam) in turns on the same images of 32x32, at full size, or with --narrow in the sizes of the
small recipes of li2018/table1. Memory is the most that PyTorch allocated at once during a step, beyond the network, its
gradients and the optimizer's state. Time is relative to network (c), a median over the rounds.
"""

import argparse
import functools
import statistics
from typing import Any

import torch
import torch.nn.functional as F

from torchcaps import MarginLoss, create_model
from torchcaps.bench.resources import peak_allocated, time_side_by_side

# By row: published megabytes of parameters, model, its arguments, and those that make it narrow.
ROWS: dict[str, tuple[float, str, dict[str, Any], dict[str, Any]]] = {
    "(a) CapNet, dynamic": (151.24, "capnet_dynamic", {}, {"types": 8, "grid": 4}),
    "(b) CapNet, EM": (152.44, "capnet_em", {}, {"types": 8, "grid": 4}),
    "(c) CNN, same shape": (24.44, "shallow_cnn", {}, {"channels": (8, 16, 32, 64, 128)}),
    "(d) CNN, similar parameters": (
        146.88,
        "shallow_cnn",
        {"channels": (32, 256, 512, 512, 1300)},
        {"channels": (8, 36, 72, 72, 183)},
    ),
    "(e) EncapNet, master": (25.76, "shallow_encapnet", {"coefficients": None}, {"types": 8}),
    "(f) EncapNet, master/aide": (60.68, "shallow_encapnet", {}, {"types": 8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="images of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each network (default: %(default)s)")
    parser.add_argument("--narrow", action="store_true", help="sizes of the small recipes of li2018/table1")
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = torch.rand(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    networks: dict[str, Any] = {
        row: create_model(name, **(arguments | narrow if options.narrow else arguments))
        for row, (_, name, arguments, narrow) in ROWS.items()
    }
    optimizers = {row: torch.optim.Adam(network.parameters()) for row, network in networks.items()}

    def step(row: str) -> None:
        loss = F.cross_entropy if "CNN" in row else MarginLoss()
        loss(networks[row](images).evidence, labels).backward()
        optimizers[row].step()
        optimizers[row].zero_grad(set_to_none=False)

    steps = {row: functools.partial(step, row) for row in networks}
    time_side_by_side(steps, 1)  # warms up, and makes gradients and the optimizers' states
    times = {row: statistics.median(taken) for row, taken in time_side_by_side(steps, options.rounds).items()}
    print(f"{'':30}{'parameters':>12}{'MB':>8}{'published':>11}{'memory, MB':>12}{'time':>9}")
    for row, (published, *_) in ROWS.items():
        count = sum(p.numel() for p in networks[row].parameters())
        memory = peak_allocated(steps[row])
        ratio = times[row] / times["(c) CNN, same shape"]
        print(f"{row:30}{count:>12,}{4 * count / 2**20:>8.2f}{published:>11}{memory / 2**20:>12.0f}{ratio:>8.1f}x")


if __name__ == "__main__":
    main()
