"""Slot attention takes two overlapping digits apart: nobody tells it which stroke belongs to which digit.

    python examples/slot_attention.py slots.png                # some minutes on one core
    python examples/slot_attention.py slots.png --steps 500    # blurred drawings, sooner

Two of scikit-learn's 8x8 digits lie in a canvas of 12x12. Each of two slots draws an image of its own, and all that is
trained is that the two drawings, laid over each other, are the input.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps import CapsuleShared, SlotAttention
from torchcaps.data import Digits
from torchcaps.measures.axes import in_style, show, write

PLACES = torch.cartesian_prod(torch.arange(5), torch.arange(5))  # of an 8x8 digit in the canvas, (25, 2)
BESIDE = ((PLACES[:, None, 1] - PLACES[:, 1]).abs() >= 3).nonzero()  # at least 3 pixels to the right or left


def digits(train: bool) -> Tensor:  # every digit at every place: (digits, places, 12, 12)
    images = Digits().load(train)[0].squeeze(1) / 255
    return torch.stack([F.pad(images, (x, 4 - x, y, 4 - y)) for y, x in PLACES.tolist()], 1)


def pairs(placed: Tensor, count: int) -> Tensor:  # two digits each, (count, 2, 12, 12)
    return placed[torch.randint(len(placed), (count, 2)), BESIDE[torch.randint(len(BESIDE), (count,))]]


def overlay(images: Tensor) -> Tensor:  # (n, 2, 12, 12) to (n, 12, 12): a pixel is dark if it is dark in both
    return 1 - (1 - images).prod(1)


class SlotAutoencoder(nn.Module):
    """Features of a CNN at 36 positions are the children, and a decoder draws each of two slots."""

    def __init__(self, pose: int = 24) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        self.features = nn.Sequential(*convolutions, nn.Flatten(2))
        self.positions = nn.Parameter(0.1 * torch.randn(36, 64))
        self.project = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, pose))
        self.slots = CapsuleShared(None, 2, in_pose=pose, routing=SlotAttention(iterations=3, start="learned"))
        self.decoder = nn.Sequential(
            *(nn.Linear(pose, 64 * 3 * 3), nn.ReLU(), nn.Unflatten(1, (64, 3, 3))),
            *(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ReLU()),
            nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:  # (n, 12, 12) to the drawings of the slots, (n, 2, 12, 12)
        features = self.features(images.unsqueeze(1)).transpose(1, 2)
        slots = self.slots(self.project(features + self.positions)).poses  # (n, 2, pose)
        drawings = self.decoder(slots.flatten(0, 1)).view(-1, 2, 12, 12)
        return (drawings - 2).sigmoid()  # they begin dark, as most of an image is


def in_order(drawings: Tensor, true: Tensor) -> Tensor:  # each drawing in the place of the digit that it is like
    straight, crossed = ((slots - true).square().sum((1, 2, 3)) for slots in (drawings, drawings.flip(1)))
    return torch.where((straight < crossed)[:, None, None, None], drawings, drawings.flip(1))


@in_style
def figure(true: Tensor, drawings: Tensor) -> Figure:
    names = "input", "both slots", "one slot", "its digit", "other slot", "its digit"
    rows = overlay(true), overlay(drawings), drawings[:, 0], true[:, 0], drawings[:, 1], true[:, 1]
    drawn = Figure(figsize=(0.75 * len(true) + 0.9, 4.6))
    for line, name, images in zip(drawn.subplots(len(rows), len(true)), names, rows, strict=True):
        for axis, image in zip(line, images, strict=True):
            show(axis, image.unsqueeze(0))
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return drawn


def main(path: str, steps: int = 5000, seed: int = 0) -> float:
    """Train the network, print how well it takes 1,000 pairs apart, and write a picture of ten to `path`."""
    torch.manual_seed(seed)
    network, train = SlotAutoencoder(), digits(train=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
    slower = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        images = overlay(pairs(train, 32))
        optimizer.zero_grad()
        loss = F.binary_cross_entropy(overlay(network(images)), images)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)  # slots are recurrent
        optimizer.step()
        slower.step()
        if (step + 1) % 500 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    with torch.inference_mode():
        true = pairs(digits(train=False), 1000)
        images = overlay(true)
        drawings = in_order(network(images), true)
    found, halves = ((x - true).square().sum((2, 3)) for x in (drawings, images.unsqueeze(1) / 2))  # halves: not apart
    apart = (found < halves / 2).all(1).float().mean().item()
    print(f"squared error of a digit: {found.mean():.2f}; of half of the input: {halves.mean():.2f}")
    print(f"images whose two digits both have less than half of that error: {100 * apart:.1f} %")
    write(figure(true[:10], drawings[:10]), Path(path))
    return (found.mean() / halves.mean()).item()


if __name__ == "__main__":
    auto_cli(main)
