"""Made-up reports for the page of `torchcaps explain`: digits and texts that no network has seen."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from torchcaps.explain.page import encoded_maps, picture, sprite
from torchcaps.explain.page.schema import (
    Control,
    Example,
    Overlap,
    Part,
    Report,
    Sharpening,
    Sliders,
    Snapshot,
    Transformed,
)

SIDE = 160  # pixels of a drawn digit
CLASSES = 10
VALUES = [round(-0.25 + 0.05 * step, 2) for step in range(11)]
TEXT = "This film is not bad , it is wonderful , though its <script> ends a little late ."
WORDS = TEXT.split()


def image_report(snapshots: int = 3, examples: int = 4) -> Report:
    """A report with all that there can be for images."""
    return {
        "title": "CapsNet on <digits> & more",
        "facts": [("recipe", "made-up/digits"), ("checkpoint", "last.ckpt"), ("data", "1,797 digits of 8x8 pixels")],
        "classes": [str(number) for number in range(CLASSES)],
        "inputs": "images",
        "scores": "activations",
        "confusion": [[35 if i == j else (i * 7 + j * 3) % 11 // 9 * 2 for j in range(10)] for i in range(10)],
        "curves": {
            "loss": [
                {"name": "training", "x": _epochs(), "y": [1 / epoch for epoch in _epochs()]},
                {"name": "validation", "x": _epochs(), "y": [0.1 + 1 / epoch for epoch in _epochs()]},
            ],
            "accuracy": [{"name": "validation", "x": _epochs(), "y": [1 - 0.8 / epoch for epoch in _epochs()]}],
        },
        "layers": [
            {
                "name": "parts",
                "kind": "CapsuleConv2d",
                "routing": "DynamicRouting(iterations=3)",
                "children": "16 types on a 6x6 grid",
                "parents": "8 types on a 4x4 grid",
            },
            {
                "name": "class_capsules",
                "kind": "CapsuleLinear",
                "routing": "DynamicRouting(iterations=3)",
                "children": "8 types on a 4x4 grid",
                "parents": "10 capsules",
            },
        ],
        "figures": [("reconstructions.png", "a digit of each class and what its capsule draws")],
        "limits": ["Shares say where a vector came from. They do not say what would happen without that place."],
        "snapshots": [_snapshot(place, snapshots, examples) for place in range(snapshots)],
    }


def text_report() -> Report:
    """A report of a network of texts, with a single checkpoint and little else."""
    shares = torch.softmax(torch.tensor([[len(word) * factor for word in WORDS] for factor in (0.4, -0.2)]), 1)
    example: Example = {
        "title": TEXT,
        "label": None,
        "predicted": 1,
        "scores": [-1.25, 2.5],
        "probabilities": [0.023, 0.977],
        "image": None,
        "words": WORDS,
        "word_shares": shares.flip(0).tolist(),
        "word_even": [1 / len(WORDS)] * len(WORDS),
        "trees": [_word_tree(name) for name in ("negative", "positive")],
    }
    return {
        "title": "Routing over a text encoder",
        "facts": [],
        "classes": ["negative", "positive"],
        "inputs": "texts",
        "scores": "logits",
        "confusion": None,
        "curves": {},
        "layers": [],
        "figures": [],
        "limits": [],
        "snapshots": [
            {
                "label": "after epoch 1",
                "accuracy": None,
                "tested": 0,
                "sharpening": [],
                "examples": [
                    example,
                    {
                        **example,
                        "title": "Another",
                        "words": ["Another"],
                        "word_shares": [[1.0]] * 2,
                        "word_even": [1.0],
                    },
                ],
                "overlaps": [],
                "controls": [],
            }
        ],
    }


def _epochs() -> list[float]:
    return [1, 2, 4, 8, 16, 25]


def _snapshot(place: int, snapshots: int, examples: int) -> Snapshot:
    learned = (place + 1) / snapshots
    return {
        "label": f"after epoch {1 + 12 * place}",
        "accuracy": round(0.9 + 0.09 * learned, 4),
        "tested": 360,
        "sharpening": [_sharpening("parts", 8, learned), _sharpening("class_capsules", 10, learned)],
        "examples": [_example(index, learned) for index in range(examples)],
        "overlaps": [_overlap(1, 6), _overlap(3, 4)],
        "controls": [_control(index) for index in range(2)],
    }


def _sharpening(layer: str, count: int, learned: float) -> Sharpening:
    effective = [count * (1 - 0.25 * learned * iteration) for iteration in range(4)]
    return {
        "layer": layer,
        "largest": [1 / x for x in effective],
        "effective": effective,
        "of": "parents",
        "count": count,
        "uniform": float(count),
    }


def _example(index: int, learned: float) -> Example:
    """Digit number `index`; every fourth is taken for another class."""
    label = int(_digits().target[index])
    predicted = label if index % 4 < 3 else (label + 5) % CLASSES
    image = _digit(index)
    scores = [0.9 * learned if k == predicted else 0.5 if k == label else 0.03 * k for k in range(CLASSES)]
    return {
        "title": f"a {label}",
        "label": label,
        "predicted": predicted,
        "scores": scores,
        "probabilities": [score / sum(scores) for score in scores],
        "image": picture(image, SIDE),
        "maps": [encoded_maps("parts", _maps(image, 16)), encoded_maps("class_capsules", _maps(image, 4))],
        "reconstruction": picture(F.avg_pool2d(image, 3, 1, 1), SIDE),
        "sliders": _sliders(image, predicted),
        "transformed": [_transformed(image, name) for name in ("turned", "grown", "moved")],
        "trees": [_tree(k) for k in range(CLASSES)],
    }


@functools.cache
def _digits() -> Any:
    return load_digits()


def _digit(index: int) -> Tensor:
    return torch.as_tensor(_digits().images[index] / 16).float().unsqueeze(0)


def _maps(image: Tensor, side: int) -> Tensor:
    """Shares of each class: the digit, brighter on another side for each class."""
    small = F.interpolate(image.unsqueeze(0), size=(side, side), mode="bilinear")[0, 0]
    angles = torch.arange(CLASSES) * 2 * torch.pi / CLASSES
    row, column = torch.meshgrid(torch.linspace(-1, 1, side), torch.linspace(-1, 1, side), indexing="ij")
    side_of = torch.exp(2 * (angles.sin().view(-1, 1, 1) * row + angles.cos().view(-1, 1, 1) * column))
    found = (small + 0.02) * side_of
    return found / found.mean((1, 2), keepdim=True)


def _warped(image: Tensor, matrix: list[list[float]]) -> Tensor:
    grid = F.affine_grid(torch.tensor([matrix]), [1, *image.shape], align_corners=False)
    return F.grid_sample(image.unsqueeze(0), grid, align_corners=False)[0]


def _sliders(image: Tensor, capsule: int) -> Sliders:
    changes = [
        lambda v: _warped(image, [[1, 3 * v, 0], [0, 1, 0]]),
        lambda v: _warped(image, [[1 + 2 * v, 0, 0], [0, 1, 0]]),
        lambda v: _warped(image, [[1, 0, 2 * v], [0, 1, 0]]),
        lambda v: _warped(image, [[1, 0, 0], [0, 1 + 2 * v, 0]]),
        lambda v: (image * (1 + 3 * v)).clamp(0, 1),
        lambda v: image,
    ]
    tiles = torch.stack([change(value) for change in changes for value in VALUES])
    pose = [0.31, -0.052, 0.4, 0.0, -0.27, 0.118]
    return {"capsule": capsule, "values": VALUES, "sprite": sprite(tiles, len(changes), len(VALUES)), "pose": pose}


def _transformed(image: Tensor, name: str) -> Transformed:
    units = {"turned": "degrees", "grown": "times", "moved": "pixels"}
    values = {"turned": range(-60, 61, 15), "grown": [0.5, 0.75, 1.0, 1.25, 1.5], "moved": range(-3, 4)}[name]
    steps = torch.tensor([float(value) for value in values])
    tiles = []
    for step in steps.tolist():
        turn = torch.tensor(step).deg2rad()
        cosine, sine = float(turn.cos()), float(turn.sin())
        matrix = {
            "turned": [[cosine, -sine, 0.0], [sine, cosine, 0.0]],
            "grown": [[1 / max(step, 0.1), 0.0, 0.0], [0.0, 1 / max(step, 0.1), 0.0]],
            "moved": [[1.0, 0.0, -step / 4], [0.0, 1.0, 0.0]],
        }[name]
        tiles.append(_warped(image, matrix))
    drawn = sprite(torch.stack(tiles), 1, len(tiles))
    part = (steps - steps.mean()) / steps.std()
    return {
        "name": name,
        "unit": units[name],
        "values": steps.tolist(),
        "inputs": drawn,
        "reconstructions": drawn,
        "poses": [[0.1 * k * value - 0.02 * k * value**2 for k in range(-4, 4)] for value in part.tolist()],
        "scores": [[0.9 - 0.3 * value**2 if k == 3 else 0.06 * k for k in range(CLASSES)] for value in part.tolist()],
    }


def _tree(class_: int) -> Part:
    def part(name: str, share: float, row: int, column: int, size: float) -> Part:
        left, top = column * (1 - size) / 3, row * (1 - size) / 3
        return {"name": name, "share": share, "box": (left, top, left + size, top + size)}

    parts = []
    for place, share in enumerate([0.4, 0.25, 0.1]):
        found = part(f"type {place + class_} at row {place}, column {class_ % 4}", share, place, class_ % 4, 0.5)
        found["parts"] = [
            part(f"type {k} at row {k}, column {place}", share * each, k, place, 0.25)
            for k, each in enumerate([0.5, 0.3])
        ]
        found["rest"] = share * 0.2
        parts.append(found)
    return {"name": f"class {class_}", "share": 1.0, "parts": parts, "rest": 0.25}


def _word_tree(name: str) -> Part:
    return {"name": name, "share": 1.0, "rest": 0.4, "parts": [{"name": "wonderful", "share": 0.6}]}


def _overlap(first: int, second: int) -> Overlap:
    both = (_digit(first) + _digit(second)).clamp(0, 1)
    drawn = picture(_digit(first), SIDE), picture(_digit(second), SIDE)
    return {
        "image": picture(both, SIDE),
        "labels": (first, second),
        "inputs": drawn,
        "predicted": (first, second if second == 6 else 9),
        "drawn": drawn,
        "scores": [0.1] * CLASSES,
    }


def _control(index: int) -> Control:
    if index:
        return {"name": "dead capsules", "value": "3 of 128", "meaning": "They are never longer than 0.01."}
    image = picture(torch.rand(1, 8, 8), SIDE)
    return {
        "name": "uniform coefficients",
        "value": "94.2 % of 360 test images, 99.2 % with routing",
        "meaning": "Most of the answer does not depend on routing.",
        "pictures": [(image, "a map without routing")],
    }
