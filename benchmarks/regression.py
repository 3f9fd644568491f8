"""Errors of three heads that read numbers: flatten and a linear layer, average pooling and one, and capsules.

    python benchmarks/regression.py [--tasks blobs angles] [--seeds 0 1 2] [--steps 500] [--routings HeinsenRouting]

Behind the same three convolutions each head learns the place and the size of a blob (28x28 pixels, 2400 training
samples), and by how many degrees an MNIST digit was turned (from -45 to 45; 4000 training samples), from the same
batches with the same optimizer. Printed are medians over the seeds of the errors on held-out samples: root mean squares
in the units of each number, and over all numbers in deviations of the targets, also relative to those of the linear
layer on flattened maps. With `--validation` the samples are held out of the training set, to choose by: what is chosen
is then tested without it.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import CapsuleRegressor, routing
from torchcaps.data import MNIST
from torchcaps.models.cnn import conv_features

WIDTH, BATCH = 32, 64


def blobs(train: bool) -> tuple[Tensor, Tensor]:
    """Return blobs of 28x28 pixels, and the place of their center and their size."""
    generator = torch.Generator().manual_seed(0 if train else 1)
    least, most = torch.tensor([6.0, 6.0, 1.5]), torch.tensor([22.0, 22.0, 3.5])
    targets = least + (most - least) * torch.rand(2400 if train else 600, 3, generator=generator)
    x, y, size = targets.view(-1, 3, 1, 1).unbind(1)
    pixels = torch.arange(28.0)
    images = (-((pixels - x) ** 2 + (pixels.view(-1, 1) - y) ** 2) / (2 * size**2)).exp()
    return (255 * images).floor().unsqueeze(1) / 255, targets


def angles(train: bool) -> tuple[Tensor, Tensor]:
    """Return turned digits of MNIST, and their angles in degrees."""
    images, _ = MNIST().load(train)
    generator = torch.Generator().manual_seed(0 if train else 1)
    images = images[torch.randperm(len(images), generator=generator)[: 4000 if train else 1000]]
    targets = 90 * torch.rand(len(images), generator=generator) - 45
    cos, sin, zero = targets.deg2rad().cos(), targets.deg2rad().sin(), torch.zeros(len(images))
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    pixels = images.float().view(-1, 1, 28, 28) / 255
    grid = F.affine_grid(turns, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False), targets.unsqueeze(1)


TASKS = {"blobs": (blobs, ("x", "y", "size")), "angles": (angles, ("degrees",))}


class Linear(nn.Module):
    """A linear layer on pooled and flattened maps, which standardizes the targets as a CapsuleRegressor does."""

    def __init__(self, pool: nn.Module, features: int, numbers: int):
        super().__init__()
        self.layers = nn.Sequential(pool, nn.Flatten(), nn.Linear(features, numbers))

    def standardize(self, targets: Tensor) -> None:
        self.deviation, self.mean = torch.std_mean(targets, dim=0, correction=0)

    def forward(self, maps: Tensor) -> Tensor:
        return self.mean + self.deviation * self.layers(maps)


def make_head(name: str, numbers: int) -> nn.Module:
    if name == "flatten":
        return Linear(nn.Identity(), WIDTH * 7 * 7, numbers)
    if name == "average":
        return Linear(nn.AdaptiveAvgPool2d(1), WIDTH, numbers)
    own = None if name == "capsules" else getattr(routing, name)()
    return CapsuleRegressor(WIDTH, numbers, own, dims=2)


def errors(task: str, name: str, seed: int, steps: int, validation: bool) -> Tensor:
    """Train one network, and return the root mean squares of its errors in each number and, in deviations, in all."""
    load, _ = TASKS[task]
    images, targets = load(True)
    if validation:
        count = len(images) // 5
        held_out, (images, targets) = (images[:count], targets[:count]), (images[count:], targets[count:])
    else:
        held_out = load(False)
    torch.manual_seed(seed)
    head: Any = make_head(name, targets.shape[1])
    head.standardize(targets)
    network = nn.Sequential(conv_features(1, WIDTH, [2, 2, 1], 3), head)
    deviation = targets.std(0, correction=0)
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=batches)
        loss = ((network(images[batch]) - targets[batch]) / deviation).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    with torch.no_grad():
        found = torch.cat([network(x) for x in held_out[0].split(200)])
    squares = (found - held_out[1]).square().mean(0)
    return torch.cat([squares, (squares / deviation.square()).mean().view(1)]).sqrt()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--routings", nargs="*", default=[], help="names of routings, beside the default of the head")
    parser.add_argument("--validation", action="store_true", help="hold a fifth of the training samples out")
    options = parser.parse_args()
    for task in options.tasks:
        print(f"\n{task}\n{'head':22}" + "".join(f"{name:>10}" for name in (*TASKS[task][1], "all", "relative", "s")))
        first = None
        for name in ("flatten", "average", "capsules", *options.routings):
            start = time.perf_counter()
            seeds = [errors(task, name, seed, options.steps, options.validation) for seed in options.seeds]
            took = (time.perf_counter() - start) / len(seeds)
            medians = [statistics.median(column) for column in torch.stack(seeds).T.tolist()]
            first = first or medians[-1]
            print(
                f"{name:22}" + "".join(f"{x:10.3f}" for x in (*medians, medians[-1] / first)) + f"{took:10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
