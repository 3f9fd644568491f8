"""What a page says of a network that segments: how well each class is found, and examples with their masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import IGNORED
from torchcaps.data.labeled import TERMS
from torchcaps.data.order import evenly_chosen
from torchcaps.explain.page.examples import SIDE
from torchcaps.explain.page.pictures import heat_picture, picture
from torchcaps.explain.samples import STATISTICS, Samples
from torchcaps.explain.segmentation import classes_with_maps, color_of, count_classes, over, segmented
from torchcaps.measures.masks import dice_of, overlaps
from torchcaps.measures.predicting import segment
from torchcaps.measures.results import MaskResults, Predicted

EXAMPLES, LOWEST = 4, 4  # evenly spaced images, and those with the lowest Dice coefficients
ROUTED = "coefficients"
AT_ONCE = 4  # images; a SegCaps takes some hundred megabytes for each

COEFFICIENTS = (
    "The maps of coefficients show, for each class, what share of the votes at a position goes to it, the mean over "
    "the types of child capsules. They are no probabilities, and the layers before the last one are not followed."
)
SIZES = "A Dice coefficient is counted in the images as the network takes them, not in the size of the files."


def results_of(network: nn.Module, samples: Samples) -> tuple[MaskResults | None, Tensor | None, list[int]]:
    """Segment some samples, evenly spaced.

    Returns:
        How well each class is found; the mean Dice coefficient of each of these samples; and their indices. Without
        masks the first two are None.
    """
    some = evenly_chosen(len(samples), min(len(samples), STATISTICS))
    if samples.labels is None:
        return None, None, some
    counts = torch.cat(
        [
            overlaps(segment(network, samples.images(few)).argmax(1).cpu(), samples.labels[few], len(samples.names))
            for few in (some[first : first + AT_ONCE] for first in range(0, len(some), AT_ONCE))
        ]
    )
    results = MaskResults(samples.names, Predicted(counts[:, 0], counts[:, 1:].flatten(1)), None)
    return results, dice_of(counts).nanmean(1), some


def chosen(dice: Tensor | None, some: list[int]) -> list[int]:
    """Return the indices of the samples that the page shows: evenly spaced ones, and those with the lowest Dice
    coefficients.

    Args:
        dice, some: mean Dice coefficient and index of each sample that was segmented, see `results_of`.
    """
    if dice is None:
        return some
    places = evenly_chosen(len(some), min(len(some), EXAMPLES))
    lowest = dice.nan_to_num(2.0).argsort(stable=True).tolist()
    places += [place for place in lowest if place not in places][:LOWEST]
    return [some[place] for place in places]


def mask_example(network: nn.Module, samples: Samples, index: int) -> dict[str, Any]:
    """Return an example: an image, its mask, what the network predicts, and a map of each class."""
    image = samples.images([index])
    probabilities, coefficients = segmented(network, image)
    predicted = probabilities.argmax(1)
    if samples.edges is not None:
        predicted = predicted.masked_fill(samples.edges[[index]], IGNORED)
    drawn, masks, dice = [("image", image[0])], [predicted], torch.tensor(torch.nan)
    if samples.labels is not None:
        truth = samples.labels[[index]]
        dice = dice_of(overlaps(predicted, truth, len(samples.names))).nanmean()
        predicted = predicted.masked_fill(truth == IGNORED, IGNORED)
        drawn.append(("mask", over(image, truth)[0]))
        masks = [predicted, truth]
    drawn.append(("prediction", over(image, predicted)[0]))
    pictures = [(picture(x, SIDE), of) for of, x in drawn]
    what, maps = ("probability", probabilities) if coefficients is None else (ROUTED, coefficients)
    for k in classes_with_maps(count_classes(masks, len(samples.names))):
        pictures.append((heat_picture(maps[0, k].clamp_min(0), 1.0, SIDE), f"{what}: {samples.names[k]}"))
    return {"title": samples.titles[index], "dice": None if dice.isnan() else float(dice), "pictures": pictures}


def about_masks(names: Sequence[str], examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page says about a network that segments, beside its examples."""
    routed = any(of.startswith(ROUTED) for example in examples for _, of in example["pictures"])
    return {
        "classes": names,
        "colors": [color_of(k) if k else None for k in range(len(names))],  # the first class has none
        "inputs": "images",
        "target": "masks",
        "terms": TERMS["masks"],
        "layers": [],
        "limits": [COEFFICIENTS] * routed + [SIZES] * any(example["dice"] is not None for example in examples),
    }
