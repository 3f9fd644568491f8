"""What a network does with one input, as the page shows it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from torchcaps.capsules import Prediction
from torchcaps.explain.capsnet import TWEAKS, perturb
from torchcaps.explain.credit import Credit, LayerCredit, NoCapsules, Strand, credit, parse_tree
from torchcaps.explain.page.pictures import encoded_maps, picture, sprite
from torchcaps.explain.page.samples import Samples
from torchcaps.explain.page.schema import Example, Part, Sliders, Transformed
from torchcaps.explain.pixels import Places, heat_of
from torchcaps.explain.predicting import class_poses, has_decoder, predict, reconstructed
from torchcaps.explain.transforms import pose_paths
from torchcaps.explain.words import Word, word_shares

SIDE = 280  # pixels of an input on the page
LARGEST_MAP = 48  # rows and columns of a map
MOST_DIMENSIONS = 36  # of a pose that is followed as the image changes
SHOWN = 20  # classes that have maps and trees, those with the highest scores
CHANGES = {  # what is done to an input: unit and values
    "turned": ("degrees", torch.linspace(-60, 60, 13)),
    "grown": ("times", torch.linspace(0.6, 1.4, 9)),
    "moved": ("pixels to the right", torch.linspace(-0.25, 0.25, 9)),  # as a part of the width
}


def example(network: nn.Module, samples: Samples, index: int, seen: dict[str, Places], temperature: float) -> Example:
    """Return all that the page shows of one sample.

    Args:
        network: the network.
        samples: samples.
        index: index of the sample.
        seen: places of the capsules in images.
        temperature: number by which scores are divided before the softmax.
    """
    inputs = samples.inputs[index]
    label = None if samples.labels is None or samples.labels.dim() > 1 else int(samples.labels[index])
    found = _credit(network, inputs)
    prediction = predict(network, inputs)
    scores = prediction.evidence[0].cpu()
    predicted = int(scores.argmax())
    shown: Example = {
        "title": _title(samples, index),
        "label": label,
        "predicted": predicted,
        "scores": scores.tolist(),
        "probabilities": (scores / temperature).softmax(-1).tolist(),
        "image": None,
    }
    if samples.labels is not None and samples.labels.dim() > 1:
        shown["labels"] = samples.labels[index].nonzero().flatten().tolist()
    if samples.are_images:
        assert isinstance(inputs, Tensor)
        shown["image"] = picture(inputs[0], SIDE)
        _add_images(shown, network, prediction, inputs, samples.dark)
    if found is None:
        return shown
    kept = set(scores.topk(min(SHOWN, len(scores))).indices.tolist()) | ({label} if label is not None else set())
    if samples.are_images:
        assert isinstance(inputs, Tensor)
        shown["maps"] = _maps(found, seen, (inputs.shape[2], inputs.shape[3]), kept)
        trees = [parse_tree(found, 0, k) if k in kept else None for k in range(len(scores))]
        size = inputs.shape[2], inputs.shape[3]
        shown["trees"] = [
            {**_part(found, tree, size, seen), "name": name} for name, tree in zip(samples.names, trees, strict=True)
        ]
    else:
        words = samples.words[index]
        shown["words"] = [word.text for word in words]
        _add_words(shown, found, words, samples.names, inputs[0].shape[2])
    return shown


def _title(samples: Samples, index: int) -> str:
    if samples.labels is None or samples.labels.dim() == 1:
        return samples.titles[index]
    there = [samples.names[k] for k in samples.labels[index].nonzero().flatten().tolist()]
    return f"{samples.titles[index]}: {' and '.join(there)}"


def _credit(network: nn.Module, inputs: Any) -> Credit | None:
    """Return the credit, or None if the network has no capsule layer."""
    try:
        return credit(network, inputs)
    except NoCapsules:
        return None


def _add_images(shown: Example, network: Any, prediction: Prediction, image: Tensor, dark: bool) -> None:
    """Add what the class capsule draws of the image, as it is and as its pose changes, and as the image changes."""
    capsules, predicted = prediction.capsules, shown["predicted"]
    if capsules is None or capsules.poses.dim() not in (3, 4) or capsules.poses.shape[1] != len(shown["scores"]):
        return
    pose = class_poses(network, prediction)[0, predicted]
    if has_decoder(network):
        drawn = reconstructed(network, capsules, torch.tensor([predicted]))
        shown["reconstruction"] = picture(drawn[0], SIDE)
        tweaked = perturb(network, image[0], predicted)
        rows, columns = tweaked.shape[:2]
        sliders: Sliders = {
            "capsule": predicted,
            "values": [round(value, 6) + 0.0 for value in TWEAKS.tolist()],  # without -0
            "sprite": sprite(tweaked.flatten(0, 1), rows, columns),
            "pose": pose.tolist(),
        }
        shown["sliders"] = sliders
    if len(pose) <= MOST_DIMENSIONS:
        shown["transformed"] = [_transformed(network, image, predicted, name, dark) for name in CHANGES]


def _transformed(network: nn.Module, image: Tensor, predicted: int, name: Any, dark: bool) -> Transformed:
    unit, values = CHANGES[name]
    values = (values * image.shape[-1]).round().unique() if name == "moved" else values
    path = pose_paths(network, image[0], predicted, name, values, "zeros" if dark else "border")
    drawn = path.reconstructions
    return {
        "name": name,
        "unit": unit,
        "values": values.tolist(),
        "inputs": sprite(path.inputs, 1, len(values)),
        "reconstructions": None if drawn is None else sprite(drawn, 1, len(values)),
        "poses": path.poses.tolist(),
        "scores": path.scores.tolist(),
    }


def _maps(found: Credit, seen: dict[str, Places], size: tuple[int, int], kept: set[int]) -> list[Any]:
    maps = []
    for name, values in heat_of(found, seen, size).items():
        smaller = min(1.0, LARGEST_MAP / max(size))
        resized = interpolate(values, scale_factor=smaller, mode="area") if smaller < 1 else values
        shares = next(layer.shares for layer in found.layers if layer.name == name)
        encoded = encoded_maps(name, resized[0].clamp_min(0), shares[0].sum(1))
        encoded["maps"] = [text if k in kept else "" for k, text in enumerate(encoded["maps"])]
        maps.append(encoded)
    return maps


def _part(found: Credit, strand: Strand | None, size: tuple[int, int], seen: dict[str, Places]) -> Part:
    """Return a strand as the page shows it, with the windows of its capsules; None for a class that has no tree."""
    if strand is None:
        return {"name": "", "share": 1.0}
    part: Part = {"name": _parent_name(found.layers[-1], strand.place), "share": strand.share}
    if strand.layer < len(found.layers):
        layer = found.layers[strand.layer]
        part["name"] = _place_name(layer, strand.place)
        if layer.name in seen and len(strand.place) == 2:
            part["box"] = seen[layer.name].box(*strand.place, size)
    if strand.parts:
        part["rest"] = strand.rest
        part["parts"] = [_part(found, below, size, seen) for below in strand.parts]
    return part


def _parent_name(last: LayerCredit, place: tuple[int, ...]) -> str:
    """Return the name of a parent of the last layer where the parents are not the classes."""
    kind = "group" if last.own.groups else "capsule"
    return f"{kind} {place[0] + 1}" if len(place) == 1 else f"row {place[0] + 1}, column {place[1] + 1}"


def _place_name(layer: LayerCredit, place: tuple[int, ...]) -> str:
    if len(place) == 2:
        return f"row {place[0] + 1}, column {place[1] + 1}"
    if len(layer.own.children) == 2:
        return f"position {place[0] + 1}"
    return f"{'group' if layer.own.groups else 'capsule'} {place[0] + 1}"


def _add_words(shown: Example, found: Credit, words: list[Word], names: list[str], layers: int) -> None:
    """Add the shares of words: the first capsules are the tokens of the text in each layer of its encoder."""
    first = found.layers[0].shares
    shown["word_shares"] = word_shares(words, first, layers)[0].tolist()
    shown["word_even"] = word_shares(words, found.layers[0].even, layers)[0, 0].tolist()
    groups = [[token * layers + layer for token in word.tokens for layer in range(layers)] for word in words]
    trees = [parse_tree(found, 0, k, groups=groups) for k in range(first.shape[1])]
    shown["trees"] = [_word_part(found, tree, names[k], words) for k, tree in enumerate(trees)]


def _word_part(found: Credit, strand: Strand, name: str, words: list[Word]) -> Part:
    part: Part = {"name": name, "share": strand.share}
    if strand.layer < len(found.layers):
        part["name"] = words[strand.place[0]].text if strand.layer == 0 else f"part {strand.place[0] + 1}"
    if strand.parts:
        part["rest"] = strand.rest
        part["parts"] = [_word_part(found, below, name, words) for below in strand.parts]
    return part
