"""Does a pose know the pose? EquiCaps, and networks without capsules that learn from the same pairs of views.

    python benchmarks/equivariance.py [--data digits toys] [--rows equicaps dense] [--seeds 0 1 2] [--steps 300]

The same four convolutions learn from pairs of views with a known relative rotation, without labels (all rows but
"supervised" and "not trained"): MNIST digits turned by -90 to 90 degrees, and stereo toys of 32x32 pixels from all
azimuths and elevations. Frozen, they are tested on objects that were not trained on: a linear probe tells the class
from the averaged features of one view; a network of two hidden layers tells the relative rotation from the averaged
features of both views, as in the paper, and another from both views' poses. "Without probe" is the angle between the
true rotation and the one that best turns the poses of the first view into those of the second (least squares), in
degrees, the median. "Protocol" is the R2 of `torchcaps evaluate --protocols pose` for the rotation of digits. "One
view" is by how many degrees a linear regression misses the angle of a turned digit, from the features or the poses of
this view, the median. With `--validation` the tested objects are held out of the training set, to choose by.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from torchcaps import Capsules
from torchcaps.data import MNIST, StereoToys, ViewPairs, stereo_pairs, turned_pairs
from torchcaps.evaluate import pose
from torchcaps.evaluate.subject import Subject
from torchcaps.measures.transforms import affine
from torchcaps.models import EquiCapsProjector, equicaps_loss
from torchcaps.models.cnn import conv_features
from torchcaps.nn.modes import evaluating

WIDTH, CAPSULES, BATCH, SIDE = 32, 16, 128, 4  # the map that leaves the convolutions has SIDE x SIDE positions
PROBE_STEPS = 500


class Part(NamedTuple):
    """Images to train on or to test with, their classes, and what draws pairs of views of those at indices."""

    images: Tensor
    labels: Tensor
    pairs: Callable[[Tensor, torch.Generator], ViewPairs]

    @property
    def rows(self) -> int:
        """Return the rows of a pose: 2 for digits, which turn in the plane, 3 for toys."""
        return self.images.shape[1] + 1


def digits(validation: bool) -> list[Part]:
    """Return the digits to train on and to test with."""

    def part(train: bool, chosen: slice) -> Part:
        images, labels = MNIST().load(train)
        pixels = images[chosen].view(-1, 1, 28, 28)
        return Part(pixels, labels[chosen], lambda indices, random: turned_pairs(pixels[indices] / 255, 90, random))

    if validation:
        return [part(True, slice(5000, None)), part(True, slice(5000))]
    return [part(True, slice(None)), part(False, slice(None))]


def toys(validation: bool) -> list[Part]:
    """Return the toys to train on and to test with; toy 7 of each class is the validation."""

    def part(train: bool, instances: tuple[int, ...]) -> Part:
        images, metadata = StereoToys(size=32).read(train)
        chosen = torch.isin(metadata.instance, torch.tensor(instances))
        images, metadata = images[chosen], metadata.at(chosen)
        return Part(images, metadata.category, lambda indices, random: stereo_pairs(images, metadata, indices, random))

    if validation:
        return [part(True, (4, 6, 8, 9)), part(True, (7,))]
    return [part(True, (4, 6, 7, 8, 9)), part(False, (0, 1, 2, 3, 5))]


DATA = {"digits": digits, "toys": toys}


class AsCapsules(nn.Module):
    """Numbers of a layer without capsules in the form of capsules: activations by a softmax, and poses."""

    def forward(self, numbers: Tensor) -> Capsules:
        rows = math.isqrt(numbers.shape[1] // CAPSULES)  # capsules x (1 + rows x rows) numbers
        logits, poses = numbers.split([CAPSULES, rows * rows * CAPSULES], dim=1)
        itself = torch.eye(CAPSULES, dtype=torch.bool)
        others = logits.unsqueeze(1).expand(-1, CAPSULES, -1).masked_fill(itself, -torch.inf).logsumexp(2)
        return Capsules(poses.view(-1, CAPSULES, rows, rows), logits - others, pose_dims=2)


def dense(rows: int, bend: nn.Module | None = None) -> nn.Module:
    """The projector with a dense layer in place of the capsules: as many weights as EquiCaps, less its primary scores,
    and a ReLU, because without the routing nothing else bends."""
    channels = rows * rows * CAPSULES
    conv = nn.Conv2d(WIDTH, channels, 3, padding=1, bias=False)
    layer = nn.Linear(channels * SIDE**2, channels + CAPSULES)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), bend or nn.ReLU(), nn.Flatten(), layer, AsCapsules())


def linear(rows: int) -> nn.Module:
    """The same without the ReLU: what is left of EquiCaps without its gates and coefficients."""
    return dense(rows, nn.Identity())


def average(rows: int) -> nn.Module:
    """Average pooling, then two layers."""
    layers = nn.Linear(WIDTH, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, (1 + rows * rows) * CAPSULES)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers, AsCapsules())


class Supervised(nn.Module):
    """Classes from averaged features, and the relative rotation from those of two views; trained with both known."""

    def __init__(self, classes: int, rows: int):
        super().__init__()
        self.classes = nn.Linear(WIDTH, classes)
        self.rotation = nn.Sequential(nn.Linear(2 * WIDTH, 256), nn.ReLU(), nn.Linear(256, rows * rows))

    def forward(self, maps: Tensor) -> Tensor:
        return self.classes(maps.mean((2, 3)))

    def loss(self, first: Tensor, second: Tensor, transforms: Tensor, labels: Tensor) -> Tensor:
        both = torch.cat([first.mean((2, 3)), second.mean((2, 3))], dim=1)
        classes = F.cross_entropy(self(first), labels) + F.cross_entropy(self(second), labels)
        return classes + (self.rotation(both) - transforms.flatten(1)).square().sum(1).mean()


def capsules(rows: int) -> nn.Module:
    return EquiCapsProjector(WIDTH, SIDE, CAPSULES, rows)


# Projector, and whether it is trained.
ROWS: dict[str, tuple[Callable[[int], nn.Module] | None, bool]] = {
    "equicaps": (capsules, True),
    "dense": (dense, True),
    "linear": (linear, True),
    "average": (average, True),
    "supervised": (None, True),
    "not trained": (capsules, False),
}


def trained(row: str, part: Part, steps: int, rate: float, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    make, learns = ROWS[row]
    projector: Any = Supervised(int(part.labels.max()) + 1, part.rows) if make is None else make(part.rows)
    network = nn.Sequential(conv_features(part.images.shape[1], WIDTH, [2, 2, 2, 1], 3), projector)
    if not learns:
        return network
    optimizer = torch.optim.Adam(network.parameters(), weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        indices = torch.randint(len(part.labels), (BATCH,), generator=generator)
        first, second, transforms = part.pairs(indices, generator)
        if make is None:
            maps = network[0](torch.cat([first, second])).chunk(2)
            loss = projector.loss(*maps, transforms, part.labels[indices])
        else:
            loss = equicaps_loss(network(first), network(second), transforms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network


class Views(NamedTuple):
    """What a frozen network gives for pairs: averaged features of both views, and their poses if there are any."""

    features: list[Tensor]
    poses: list[Tensor]
    transforms: Tensor
    labels: Tensor


def views(network: nn.Sequential, part: Part, count: int, seed: int) -> Views:
    generator = torch.Generator().manual_seed(1000 + seed)
    found: list[Any] = [[], [], [], []]
    transforms, labels = [], []
    with torch.no_grad(), evaluating(network):
        for indices in torch.randint(len(part.labels), (count,), generator=generator).split(500):
            pairs = part.pairs(indices, generator)
            for view, images in enumerate((pairs.first, pairs.second)):
                maps = network[0](images)
                found[view].append(maps.mean((2, 3)))
                output = network[1](maps)
                if isinstance(output, Capsules):
                    found[2 + view].append(F.normalize(output.poses.flatten(2), dim=-1))
            transforms.append(pairs.transforms)
            labels.append(part.labels[indices])
    joined = [torch.cat(x) for x in found if x]
    return Views(joined[:2], joined[2:], torch.cat(transforms), torch.cat(labels))


def probed(fitted: Tensor, targets: Tensor, tested: Tensor, hidden: int, seed: int) -> Tensor:
    """Fit a network to classes `(n,)` or numbers `(n, numbers)`, and return what it says of other inputs."""
    torch.manual_seed(seed)
    std, mean = torch.std_mean(fitted, dim=0)
    fitted, tested = ((x - mean) / std.clamp_min(1e-6) for x in (fitted, tested))
    width, outputs = fitted.shape[1], targets.shape[1] if targets.dim() > 1 else int(targets.max()) + 1
    probe: nn.Module = nn.Linear(width, outputs)
    if hidden:
        below = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        probe = nn.Sequential(*below, nn.Linear(hidden, outputs))
    optimizer = torch.optim.Adam(probe.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3 if hidden else 3e-2, PROBE_STEPS)
    for _ in range(PROBE_STEPS):
        batch = torch.randint(len(fitted), (256,))
        loss = (F.mse_loss if targets.dim() > 1 else F.cross_entropy)(probe(fitted[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return probe(tested)


def r2(found: Tensor, targets: Tensor) -> float:
    """Return 1 - squared errors / squared deviations from the mean, both summed over all entries of a rotation."""
    return 1 - float((found - targets).square().sum() / (targets - targets.mean(0)).square().sum())


def turn_of(first: Tensor, second: Tensor) -> Tensor:
    """Return the rotations that best turn the first poses into the second, `(n, rows, rows)`, by least squares."""
    rows = math.isqrt(first.shape[-1])
    u, _, v = torch.linalg.svd(
        torch.einsum("njkr,njks->nrs", *(x.unflatten(-1, (rows, rows)) for x in (first, second)))
    )
    u[:, :, -1] *= torch.linalg.det(u @ v).view(-1, 1)  # a rotation, no reflection
    return u @ v


def angles(found: Tensor, transforms: Tensor) -> Tensor:
    """Return the angles between rotations in degrees."""
    trace = (found * transforms).sum((1, 2))
    return torch.rad2deg(((trace + 2 - found.shape[1]) / 2).clamp(-1, 1).acos())


def measured(network: nn.Sequential, parts: list[Part], seed: int, counts: tuple[int, int]) -> dict[str, float]:
    """Return the numbers of a row for one seed."""
    fitted, tested = (views(network, part, count, seed) for part, count in zip(parts, counts, strict=True))
    found = probed(fitted.features[0], fitted.labels, tested.features[0], 0, seed)
    numbers = {"classes (%)": 100 * float((found.argmax(1) == tested.labels).double().mean())}
    targets = fitted.transforms.flatten(1), tested.transforms.flatten(1)
    for what in ("features", "poses") if tested.poses else ("features",):
        inputs = [torch.cat([x.flatten(1) for x in getattr(part, what)], 1) for part in (fitted, tested)]
        numbers[f"R2, {what}"] = r2(probed(inputs[0], targets[0], inputs[1], 256, seed), targets[1])
    if tested.poses:
        numbers["without probe"] = float(angles(turn_of(*tested.poses), tested.transforms).median())
    if parts[1].images.shape[1] == 1:  # turned digits: the rotation of the protocol is in the picture too
        order = torch.randperm(len(parts[1].labels), generator=torch.Generator().manual_seed(seed))[: counts[1]]
        with evaluating(network):
            outcome = pose.run(Subject(network, parts[1].images[order] / 255, parts[1].labels[order], seed=seed))
        for what in ("pose", "penultimate layer"):
            name = f"R2 of rotation, from the {what}"
            if name in outcome.numbers:
                numbers[f"protocol, {what}"] = outcome.numbers[name]
        numbers |= one_view(network, parts, seed, counts)
    return numbers


def one_view(network: nn.Sequential, parts: list[Part], seed: int, counts: tuple[int, int]) -> dict[str, float]:
    """Return by how many degrees a ridge regression misses the angle of a turned digit, the median."""
    generator = torch.Generator().manual_seed(2000 + seed)
    inputs: list[list[Tensor]] = []
    turns = []
    with torch.no_grad(), evaluating(network):
        for part, count in zip(parts, counts, strict=True):
            indices = torch.randint(len(part.labels), (count,), generator=generator)
            turns.append(180 * torch.rand(count, generator=generator) - 90)
            maps = network[0](affine(part.images[indices] / 255, rotation=turns[-1]))
            inputs.append([maps.mean((2, 3))])
            output = network[1](maps)
            if isinstance(output, Capsules):
                inputs[-1].append(F.normalize(output.poses.flatten(2), dim=-1).flatten(1))
    radians = torch.deg2rad(turns[0])
    numbers = {}
    for what, fitted, tested in zip(("features", "poses"), *inputs, strict=False):
        probe = RidgeCV([10.0**k for k in range(-3, 4)]).fit(fitted, torch.stack([radians.cos(), radians.sin()], 1))
        cos, sin = torch.tensor(probe.predict(tested)).unbind(1)
        numbers[f"one view, {what}"] = float((torch.rad2deg(torch.atan2(sin, cos)) - turns[1]).abs().median())
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.01, help="largest learning rate")
    parser.add_argument("--pairs", type=int, nargs=2, default=[4000, 2000], help="to fit probes on, and to test with")
    parser.add_argument("--validation", action="store_true", help="test on objects held out of the training set")
    options = parser.parse_args()
    for data in options.data:
        parts = DATA[data](options.validation)
        print(f"\n{data}, {options.steps} steps", flush=True)
        found: dict[str, list[dict[str, float]]] = {row: [] for row in options.rows}
        sizes = {}
        for seed in options.seeds:
            for row in options.rows:
                start = time.perf_counter()
                network = trained(row, parts[0], options.steps, options.rate, seed)
                took = time.perf_counter() - start
                sizes[row] = sum(x.numel() for x in network.parameters())
                found[row].append(measured(network, parts, seed, tuple(options.pairs)) | {"s": took})
                numbers = ", ".join(f"{name} {value:.3f}" for name, value in found[row][-1].items())
                print(f"  seed {seed}, {row}: {numbers}", flush=True)
        for row, by_seed in found.items():
            cells = [row, f"{sizes[row]:,}"]
            for name in by_seed[0]:
                column = torch.tensor([numbers[name] for numbers in by_seed], dtype=torch.float64)
                spread = f" ± {column.std():.3f}" if len(column) > 1 else ""
                cells.append(f"{name} {column.mean():.3f}{spread}")
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
