"""The first networks of new users, as public threads tell of them: own pictures, own numbers of classes, learning rates
that are too high or too low, and inputs that are not scaled. A network learns, or a layer has said why it does not."""

import itertools
import math
import os
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchcaps import CapsuleHead, MarginLoss, create_model
from torchcaps.data.mnist import read_idx

STEPS, BATCH, HELD_OUT = 300, 32, 500
DATA = ("digits, 2 classes", "digits", "letters", "Fashion-MNIST")
SETTINGS = ((1e-2, "0 to 1"), (1e-3, "0 to 1"), (1e-4, "0 to 1"), (1e-3, "0 to 255"), (1e-2, "standardized"))


class Cell(NamedTuple):
    """One network of a new user: "capsnet_small" with the margin loss, or "head" behind two convolutions."""

    network: str
    data: str
    rate: float
    inputs: str


CELLS = [
    Cell(network, data, rate, inputs)
    for network, data, (rate, inputs) in itertools.product(("capsnet_small", "head"), DATA, SETTINGS)
]


class Outcome(NamedTuple):
    accuracy: float
    learns: bool
    said: tuple[str, ...]


@cache
def pictures(data: str) -> tuple[Tensor, Tensor]:
    """Return pictures of 28 x 28 pixels from 0 to 1 and their labels, in random order."""
    if data == "Fashion-MNIST":
        root = Path(os.environ["TORCHCAPS_DATA"]) / "fashion-mnist"
        images = read_idx(root / "train-images-idx3-ubyte.gz")[:3000, None] / 255
        labels = read_idx(root / "train-labels-idx1-ubyte.gz")[:3000]
    elif data == "letters":
        images, labels = letters()
    else:
        digits = load_digits()
        small = torch.from_numpy(digits.images / 16).float().unsqueeze(1)
        images, labels = F.interpolate(small, size=28), torch.from_numpy(digits.target)
        if data == "digits, 2 classes":
            images, labels = images[labels < 2], labels[labels < 2]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order].float(), labels[order].long()


def letters() -> tuple[Tensor, Tensor]:
    """Return the 26 letters in the fonts that matplotlib carries, each at several sizes and places."""
    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("DejaVu*[!y].ttf"))
    images, labels = [], []
    for font, size, dx, dy in itertools.product(fonts, (18, 22), (-2, 1), (-2, 1)):
        face = ImageFont.truetype(str(font), size)
        for label in range(26):
            image = Image.new("L", (28, 28))
            ImageDraw.Draw(image).text((14 + dx, 14 + dy), chr(65 + label), 255, face, anchor="mm")
            images.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 28, 28) / 255)
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def scaled(images: Tensor, inputs: str) -> Tensor:
    return {"0 to 1": images, "0 to 255": 255 * images, "standardized": (images - images.mean()) / images.std()}[inputs]


def play(cell: Cell, seed: int = 0) -> Outcome:
    """Train a network for 300 steps of Adam in a plain loop, and return what it has learned and what layers said."""
    torch.manual_seed(seed)
    images, labels = pictures(cell.data)
    images, classes = scaled(images, cell.inputs), int(labels.max()) + 1
    held_out = min(HELD_OUT, len(labels) // 4)
    train, train_labels = images[held_out:], labels[held_out:]
    if cell.network == "head":
        convolutions = [nn.Conv2d(1, 32, 5, 2), nn.BatchNorm2d(32), nn.ReLU()]
        convolutions += [nn.Conv2d(32, 64, 3, 2), nn.BatchNorm2d(64), nn.ReLU()]
        network, loss = nn.Sequential(*convolutions, CapsuleHead(64, classes)), nn.CrossEntropyLoss()
    else:
        network, loss = create_model("capsnet_small", classes=classes, decoder=False), MarginLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=cell.rate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            batch = torch.randint(len(train), (BATCH,))
            error = loss(scores_of(network(train[batch])), train_labels[batch])
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    with torch.no_grad():
        right = scores_of(network.eval()(images[:held_out])).argmax(1) == labels[:held_out]
    accuracy = right.float().mean().item()
    # Twice chance; with two classes half of the errors.
    learns = math.isfinite(error.item()) and accuracy >= min(2 / classes, (1 + 1 / classes) / 2)
    return Outcome(accuracy, learns, tuple(str(x.message) for x in caught if "Capsule" in str(x.message)))


def scores_of(output: Tensor | tuple) -> Tensor:
    return output if isinstance(output, Tensor) else output.evidence
