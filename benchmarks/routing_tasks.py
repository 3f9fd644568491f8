"""Where does routing help? Small networks that differ in their routing alone, on the digits of scikit-learn.

    python benchmarks/routing_tasks.py [--rows dynamic uniform ...] [--seeds 0 1 2] [--steps 600]

A digit of 8x8 lies at a random place of a 16x16 image. Each network is trained twice: on such images, and on images
that also show fragments of other digits. The test has 360 other digits:

- as they are;
- affine: turned by up to 30 degrees, scaled by 0.7 to 1.3 in each direction and sheared by up to 0.3;
- fragments: beside four windows of 5x5 pixels out of other digits;
- overlap: two digits of different classes, both of which must be the two highest scores.

The learning rate is 0.005 for all, with one cycle; it was not tuned. Printed are percentages, means of the seeds with
the smallest and the largest of them. All networks see the same images. The last column is the CPU time of the trainings
relative to that of the first row.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import torchcaps
from torchcaps.data.digits import Digits
from torchcaps.explain.transforms import affine
from torchcaps.models import compare, compare_average

ROWS = {
    "average": None,
    "uniform": torchcaps.UniformRouting,
    "random": torchcaps.RandomRouting,
    "dynamic": torchcaps.DynamicRouting,
    "attention": torchcaps.InvertedAttentionRouting,
    "em": torchcaps.EMRouting,
    "self-routing": torchcaps.SelfRouting,
    "variational-bayes": torchcaps.VBRouting,
    "efficient": torchcaps.EfficientRouting,
}
SIDE = 16
Split = tuple[Tensor, Tensor]


def place(digits: Tensor, random: Generator, pixels: int = 4) -> Tensor:
    """Return images of SIDE x SIDE with each digit moved by up to so many pixels from the center."""
    moved = torch.randint(-pixels, pixels + 1, (len(digits), 2), generator=random)
    return affine(F.pad(digits, ((SIDE - 8) // 2,) * 4), shift=moved / SIDE)


def transform(digits: Tensor, random: Generator) -> Tensor:
    """Turn, scale and shear digits, and place them."""
    turn, across, down, shear = 2 * torch.rand(4, len(digits), generator=random) - 1
    scale = torch.stack([1 + 0.3 * across, 1 + 0.3 * down], 1)
    wide = affine(F.pad(digits, (4,) * 4), rotation=30 * turn, scale=scale, shear=0.3 * shear)
    return affine(wide, shift=torch.randint(-2, 3, (len(digits), 2), generator=random) / SIDE)


def add_fragments(images: Tensor, digits: Tensor, random: Generator) -> Tensor:
    """Add four windows of 5x5 pixels out of other digits to each image."""
    for _ in range(4):
        others = place(digits[torch.randint(len(digits), (len(images),), generator=random)], random)
        top, left = torch.randint(0, SIDE - 4, (2, len(images), 1), generator=random)
        rows, columns = (((torch.arange(SIDE) - first) // 5 == 0).float() for first in (top, left))
        images = torch.maximum(images, others * (rows.unsqueeze(2) * columns.unsqueeze(1)).unsqueeze(1))
    return images


def build(row: str) -> nn.Module:
    routing = ROWS[row]
    if routing is None:
        return compare_average(in_channels=1, channels=32, convolutions=4)
    return compare(routing(), in_channels=1, channels=32, convolutions=4)


def trained(row: str, train: Split, seed: int, steps: int, with_fragments: bool) -> nn.Module:
    digits, labels = train
    torch.manual_seed(seed)
    network, random = build(row), Generator().manual_seed(seed + 1)
    optimizer = torch.optim.Adam(network.parameters(), 0.005)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=steps)
    for _ in range(steps):
        batch = torch.randint(len(digits), (64,), generator=random)
        images = place(digits[batch], random)
        if with_fragments:
            images = add_fragments(images, digits, random)
        loss = F.cross_entropy(network(images).scores, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def test(network: nn.Module, split: Split) -> list[float]:
    """Return the four accuracies in per cent."""
    digits, labels = split
    random = Generator().manual_seed(0)
    images = place(digits, random)
    single = (images, transform(digits, random), add_fragments(images, digits, random))
    accuracies = [(network(x).scores.argmax(1) == labels).float().mean() for x in single]
    other = torch.randperm(len(digits), generator=random)
    pairs = torch.maximum(place(digits, random, 3), place(digits[other], random, 3))
    highest = network(pairs).scores.topk(2).indices
    found = [(highest == x.unsqueeze(1)).any(1) for x in (labels, labels[other])]
    accuracies.append((found[0] & found[1])[labels != labels[other]].float().mean())
    return [100 * float(x) for x in accuracies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    data = Digits()
    train, held_out = ((images.float() / 255, labels) for images, labels in (data.load(True), data.load(False)))
    for with_fragments in (False, True):
        trained_with = "with" if with_fragments else "without"
        print(f"\ntrained {trained_with} fragments: as they are, affine, fragments, overlap, time")
        first = None
        for row in args.rows:
            begun = time.process_time()
            networks = [trained(row, train, seed, args.steps, with_fragments) for seed in args.seeds]
            taken = time.process_time() - begun
            first = first or taken
            columns = zip(*(test(network, held_out) for network in networks), strict=True)
            shown = (f"{sum(x) / len(x):.1f} ({min(x):.1f} to {max(x):.1f})" for x in columns)
            print(f"{row:18}", *shown, f"{taken / first:.2f}", sep="  ", flush=True)


if __name__ == "__main__":
    main()
