"""What a network does with one input, as the page shows it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from torchcaps.capsules import Prediction
from torchcaps.data.labeled import TargetKind
from torchcaps.explain.capsnet import TWEAKS, perturb
from torchcaps.explain.credits import Credit, LayerCredit, NoCapsules, Strand, credit, parse_tree
from torchcaps.explain.page.pictures import encoded_maps, picture, sprite
from torchcaps.explain.pixels import Places, heat_of
from torchcaps.explain.samples import Samples
from torchcaps.explain.words import Word, word_shares
from torchcaps.measures.labels import DEFAULT, label_probabilities
from torchcaps.measures.predicting import class_poses, has_decoder, predict, reconstructed
from torchcaps.measures.transforms import pose_paths

SIDE = 280  # pixels of an input on the page
LARGEST_MAP = 48  # rows and columns of a map
MOST_DIMENSIONS = 36  # of a pose that is followed as the image changes
SHOWN = 20  # classes that have maps and trees, those with the highest scores
CHANGES = {  # what is done to an input: unit and values
    "turned": ("degrees", torch.linspace(-60, 60, 13)),
    "grown": ("times", torch.linspace(0.6, 1.4, 9)),
    "moved": ("pixels to the right", torch.linspace(-0.25, 0.25, 9)),  # as a part of the width
}


def example(
    network: nn.Module,
    samples: Samples,
    index: int,
    seen: dict[str, Places],
    temperature: float | None,
    thresholds: Tensor | None = None,
) -> dict[str, Any]:
    """Return all that the page shows of one sample. Without a known class, or with several, its label is None.

    Args:
        network: the network.
        samples: samples, on any device.
        index: index of the sample.
        seen: places of the capsules in images.
        temperature: number by which scores are divided before the softmax; None for 1.
        thresholds: probability above which each of several labels is predicted, `(labels,)`; None for 0.5.
    """
    inputs, target = samples.inputs[index], samples.target
    label = None if samples.labels is None or samples.labels.dim() > 1 else int(samples.labels[index])
    prediction = predict(network, inputs)
    scores = shown_scores(prediction, target)[0]
    shown: dict[str, Any] = {
        "title": samples.titles[index],
        "label": label,
        "predicted": 0 if target == "numbers" else int(scores.argmax()),  # what is looked into first
        "scores": scores,
        "image": None,
    }
    if target == "class":
        shown["probabilities"] = (scores / (temperature or 1.0)).softmax(-1)
    elif target == "labels":
        shown["named"] = _places_of(scores > (DEFAULT if thresholds is None else thresholds))
    if samples.labels is not None and target == "numbers":
        shown["true"] = samples.labels[index]
    elif samples.labels is not None and samples.labels.dim() > 1:
        shown["labels"] = _places_of(samples.labels[index])
    if isinstance(inputs, Tensor):
        shown["image"] = picture(samples.draw(inputs[0]) if samples.draw else inputs[0], SIDE)
    if isinstance(inputs, Tensor) and samples.are_images and target != "numbers":  # of changed images they are unknown
        _add_images(shown, network, prediction, inputs, samples)
    with suppress(NoCapsules):
        credits = credit(network, inputs)
        if isinstance(inputs, Tensor):
            kept = set(scores.topk(min(SHOWN, len(scores))).indices.tolist()) | {label, shown["predicted"]}
            _add_maps(shown, credits, seen, tuple(inputs.shape[2:]), kept, samples.names)
        else:
            _add_words(shown, credits, samples.words[index], samples.names, inputs[0].shape[2])
    return shown


def shown_scores(prediction: Prediction, target: TargetKind) -> Tensor:
    """Return what the page calls scores, `(batch, classes)` on the CPU: those of classes, probabilities of several
    labels, or numbers."""
    return (label_probabilities(prediction) if target == "labels" else prediction.evidence).float().cpu()


def _places_of(present: Tensor) -> list[int]:
    return [int(k) for k in present.nonzero()]


def _add_images(shown: dict[str, Any], network: Any, prediction: Prediction, image: Tensor, samples: Samples) -> None:
    """Add what the class capsule draws of the image, as it is and as its pose changes, and as the image changes."""
    capsules, predicted = prediction.capsules, shown["predicted"]
    if capsules is None or capsules.poses.dim() not in (3, 4) or capsules.poses.shape[1] != len(shown["scores"]):
        return
    pose = class_poses(network, prediction)[0, predicted]
    if has_decoder(network):
        drawn = reconstructed(network, capsules, torch.tensor([predicted]))
        shown["reconstruction"] = picture(drawn[0], SIDE)
        tweaked = perturb(network, image[0], predicted)
        shown["sliders"] = {
            "capsule": predicted,
            "values": [round(value, 6) + 0.0 for value in TWEAKS.tolist()],  # without -0
            "sprite": sprite(tweaked.flatten(0, 1), *tweaked.shape[:2]),
            "pose": pose,
        }
    if len(pose) <= MOST_DIMENSIONS:
        shown["transformed"] = [_transformed(network, image, predicted, name, samples.dark) for name in CHANGES]
        if samples.target == "labels" and prediction.scores is not None:
            for change in shown["transformed"]:
                change["scores"] = change["scores"].sigmoid()


def _transformed(network: nn.Module, image: Tensor, predicted: int, name: Any, dark: bool) -> dict[str, Any]:
    unit, values = CHANGES[name]
    values = (values * image.shape[-1]).round().unique() if name == "moved" else values
    path = pose_paths(network, image[0], predicted, name, values, "zeros" if dark else "border")
    drawn = path.reconstructions
    return {
        "name": name,
        "unit": unit,
        "values": values,
        "inputs": sprite(path.inputs, 1, len(values)),
        "reconstructions": None if drawn is None else sprite(drawn, 1, len(values)),
        "poses": path.poses,
        "scores": path.scores,
    }


def _add_maps(
    shown: dict[str, Any],
    credits: Credit,
    seen: dict[str, Places],
    size: tuple[int, ...],
    kept: set[int | None],
    names: list[str],
) -> None:
    """Add maps and parse trees of the classes that are kept. A routing pool alone has maps and no tree: its children
    are the positions of a map."""
    shown["maps"] = []
    smaller = min(1.0, LARGEST_MAP / max(size))
    for name, values in (heat_of(credits, seen, (size[0], size[1])) if seen else {}).items():
        resized = interpolate(values, scale_factor=smaller, mode="area") if smaller < 1 else values
        layer = next(layer for layer in credits.layers if layer.name == name)
        maps = encoded_maps(name, resized[0].clamp_min(0), layer.shares[0].sum(1), layer.even[0].sum(1))
        maps["maps"] = [text if k in kept else "" for k, text in enumerate(maps["maps"])]
        shown["maps"].append(maps)
    if any(layer.own.groups for layer in credits.layers):
        return

    def describe(strand: Strand) -> dict[str, Any]:
        """Return the name of a part, and the window of its capsules in the image."""
        is_child = strand.layer < len(credits.layers)
        layer = credits.layers[strand.layer if is_child else -1]  # or a parent of the last layer, if that is no class
        part: dict[str, Any] = {"name": _place_name(layer, strand.place, is_child, len(size))}
        if is_child and layer.name in seen and len(strand.place) == 2:
            part["box"] = seen[layer.name].box(*strand.place, (size[0], size[1]))
        return part

    shown["trees"] = [
        _tree(parse_tree(credits, 0, k), name, describe) if k in kept else {"name": name, "share": 1.0}
        for k, name in enumerate(names)
    ]


def _place_name(layer: LayerCredit, place: tuple[int, ...], is_child: bool, dims: int) -> str:
    """Return the name of a child or a parent of a layer, of inputs with so many dimensions."""
    if len(place) == 2 and dims != 2:  # signals and volumes: their positions lie in rows of their last dimension
        columns = (layer.own.children if is_child else layer.own.parents)[-1]
        return f"position {place[0] * columns + place[1] + 1}"
    if len(place) == 2:
        return f"row {place[0] + 1}, column {place[1] + 1}"
    return f"{'position' if is_child and len(layer.own.children) == 2 else 'capsule'} {place[0] + 1}"


def _add_words(shown: dict[str, Any], credits: Credit, words: list[Word], names: list[str], layers: int) -> None:
    """Add the shares of words: the first capsules are the tokens of the text in each layer of its encoder."""
    first = credits.layers[0]
    shown["words"] = [word.text for word in words]
    shown["word_shares"] = word_shares(words, first.shares, layers)[0]
    shown["word_even"] = word_shares(words, first.even, layers)[0, 0]
    groups = [[token * layers + layer for token in word.tokens for layer in range(layers)] for word in words]

    def describe(strand: Strand) -> dict[str, Any]:
        return {"name": words[strand.place[0]].text if strand.layer == 0 else f"part {strand.place[0] + 1}"}

    shown["trees"] = [_tree(parse_tree(credits, 0, k, groups=groups), name, describe) for k, name in enumerate(names)]


def _tree(strand: Strand, name: str, describe: Callable[[Strand], dict[str, Any]]) -> Any:
    """Return a parse tree as the page shows it, under the name of its class. All shares are those in the class."""

    def part(strand: Strand) -> dict[str, Any]:
        below = {"rest": strand.rest, "parts": [part(each) for each in strand.parts]} if strand.parts else {}
        return {**describe(strand), "share": strand.share, **below}

    return {**part(strand), "name": name}
