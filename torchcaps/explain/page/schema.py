"""What the page of `torchcaps explain` shows, as the JSON that is written into it.

Pictures are data URIs. Maps are base64 of bytes, row by row: 0 is nothing and 255 is `peak`. Shares of a class sum to
one over its children, in every layer. Named tuples and tensors become JSON as `writing.as_plain` says.
"""

from typing import Any, NotRequired, TypedDict

from torch import Tensor


class Layer(TypedDict):
    """A capsule layer of the network."""

    name: str  # as in `network.named_modules()`
    kind: str  # "CapsuleConv2d"
    routing: str  # "DynamicRouting(iterations=3)"; "" if the layer does not route
    children: str  # "16 types on a 4x4 grid"
    parents: str  # "10 capsules"


class Maps(TypedDict):
    """Where a layer's children of each class lie in the image: the shares, carried to pixels."""

    layer: str
    size: tuple[int, int]  # rows and columns of a map
    maps: list[str]  # one for each class
    peak: float  # share at 255, as a multiple of an even share
    half: list[float]  # of each class: the smallest part of the positions that gives half of it


class Sprite(TypedDict):
    """Pictures in one picture, in rows and columns of equal tiles."""

    image: str
    rows: int
    columns: int


class Part(TypedDict):
    """A capsule in a parse tree, with the strongest of its children."""

    name: str  # "row 2, column 4"; for texts a word
    share: float  # in the class, not in the parent
    box: NotRequired[tuple[float, float, float, float]]  # left, top, right, bottom in the image, as parts of its sides
    rest: NotRequired[float]  # share of the children that are left out
    parts: NotRequired[list["Part"]]


class Sliders(TypedDict):
    """Reconstructions while a pose dimension of a class capsule changes: a row per dimension, a column per value."""

    capsule: int  # class
    values: list[float]  # what is added, with a zero in the middle
    sprite: Sprite
    pose: Tensor


class Transformed(TypedDict):
    """What happens as the input turns, grows or moves."""

    name: str  # "turned", "grown", "moved"
    unit: str  # "degrees", "times", "pixels to the right"
    values: Tensor
    inputs: Sprite  # one row
    reconstructions: Sprite | None  # one row
    poses: Tensor  # pose of the class capsule, one row per value
    scores: Tensor  # one row per value


class Example(TypedDict):
    """What the network does with one input."""

    title: str
    label: int | None  # None: unknown, or several
    labels: NotRequired[list[int]]  # several
    predicted: int
    scores: Tensor
    probabilities: Tensor
    image: str | None  # None for texts
    words: NotRequired[list[str]]  # texts: words and marks, in order
    word_shares: NotRequired[Tensor]  # of each class: the share of each word
    word_even: NotRequired[Tensor]  # share of each word if all its tokens contributed like all others
    maps: NotRequired[list[Maps]]  # first the layer next to the image, last the one next to the classes
    reconstruction: NotRequired[str]
    sliders: NotRequired[Sliders]
    transformed: NotRequired[list[Transformed]]
    trees: NotRequired[list[Part]]  # one for each class


class Overlap(TypedDict):
    """Two inputs laid over each other, and what the capsule of each class draws."""

    image: str
    labels: tuple[int, int]
    inputs: NotRequired[tuple[str, str]]  # if they are known one by one
    predicted: Tensor  # classes of the two highest scores
    drawn: list[str]  # each from the capsule of its class, in the order of `predicted`


class Control(TypedDict):
    """A number or pictures that show what the pictures above would look like if there were nothing to see."""

    name: str  # "uniform coefficients"
    value: str  # "94.2 % of 360 test images, 99.2 % with routing"
    meaning: str  # a sentence: what this says about the pictures above
    pictures: NotRequired[list[tuple[str, str]]]  # pictures and their descriptions


class Snapshot(TypedDict):
    """All that depends on the weights: one for each checkpoint."""

    label: str  # "after epoch 25"
    accuracy: float | None  # on `tested` inputs
    tested: int
    sharpening: list[dict[str, Any]]  # the name of a `layer` and its :class:`torchcaps.explain.Sharpening`
    examples: list[Example]
    overlaps: list[Overlap]
    controls: list[Control]


class About(TypedDict):
    """What an example needs to be shown."""

    classes: list[str]
    inputs: str  # "images" or "texts"
    scores: str  # "activations", from 0 to 1, or "logits"
    temperature: float | None  # of calibrated probabilities; None if the run has none
    layers: list[Layer]
    limits: list[str]  # sentences: what the pictures can and cannot show


class Report(About):
    """All that the page shows."""

    title: str
    facts: list[tuple[str, str]]  # name and value: recipe, checkpoint, network, data
    confusion: Tensor | None  # rows: true classes; of the last snapshot
    curves: dict[str, list[dict[str, Any]]]  # by quantity, such as "loss": lines with a `name`, `x` and `y`
    figures: list[tuple[str, str]]  # files beside the page and their descriptions
    snapshots: list[Snapshot]
