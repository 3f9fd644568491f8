"""What a CapsNet's decoder draws: of images, and as each pose entry of a class capsule is changed."""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.explain.material import FigureKind, Material
from torchcaps.measures.axes import CHANGES, VERMILLION, Row, panels_figure
from torchcaps.measures.predicting import class_poses, has_decoder, predict, reconstructed
from torchcaps.utils.arguments import CountOrZero, FloatTensor, checked, shown

# Sabour et al. 2017, Figure 4: [-0.25, 0.25] in steps of 0.05.
TWEAKS = torch.linspace(-0.25, 0.25, 11)


@checked
def perturb(network: nn.Module, image: FloatTensor, label: CountOrZero, tweaks: FloatTensor = TWEAKS) -> Tensor:
    """Reconstruct an image while one entry of a class capsule's pose is tweaked: `(features, tweaks, *image)`.

    Args:
        network: network with a decoder that returns a `Prediction` with class capsules; it is run in evaluation mode
            and left as it was.
        image: `(channels, height, width)`.
        label: class whose capsule to tweak.
        tweaks: values to add to each entry in turn, one or more, `(tweaks,)`. A matrix pose has `rows * features`
            entries.

    Raises:
        TypeError: the network gives no class capsules.
        ValueError: the network has no decoder or no such class, or the image or the tweaks have another shape.

    Reference:
        Sabour et al. 2017, section 5.1, Figure 4.
    """
    if tweaks.dim() != 1 or not len(tweaks):
        raise ValueError(f"tweaks must have the shape (tweaks,), with at least one, got {shown(tweaks)}")
    if image.dim() != 3:
        raise ValueError(f"expected an image of shape (channels, height, width), got {shown(image)}")
    prediction = predict(network, image.unsqueeze(0))
    flat = class_poses(network, prediction)
    _, classes, features = flat.shape
    if label >= classes:
        raise ValueError(f"label must be from 0 to {classes - 1}, as the network has {classes} classes, got {label}")
    poses = flat.repeat(features * len(tweaks), 1, 1)
    tweaked = torch.eye(features, device=tweaks.device).unsqueeze(1) * tweaks.view(1, -1, 1)  # (feature, tweak, entry)
    poses[:, label] += tweaked.flatten(0, 1).to(poses)
    assert prediction.capsules is not None
    poses = poses.view(-1, *prediction.capsules.poses.shape[1:])
    drawn = reconstructed(network, Capsules(poses), torch.full((len(poses),), label))
    return drawn.unflatten(0, (features, len(tweaks)))


@checked
def reconstructions_figure(network: nn.Module, images: FloatTensor, labels: Tensor) -> Figure:
    """Draw images above the reconstructions that the decoder makes from their most active class capsule."""
    prediction = predict(network, images)
    if prediction.capsules is None:
        raise TypeError(f"{type(network).__name__} gives no class capsules to draw from")
    classes = prediction.evidence.argmax(1)
    right = (classes.cpu() == labels.cpu()).tolist()
    said = [f"seen as {seen}" + ("" if ok else ",\nwrong") for seen, ok in zip(classes.tolist(), right, strict=True)]
    styles = [{} if ok else {"color": VERMILLION, "fontweight": "bold"} for ok in right]
    rows = [
        Row(list(images), [f"label {label}" for label in labels.tolist()], label="input"),
        Row(list(reconstructed(network, prediction.capsules, classes)), said, styles, label="drawn again"),
    ]
    return panels_figure(
        rows, "Test images, and what the decoder draws from the longest class capsule of each", 0.95, len(images)
    )


@checked
def perturbations_figure(network: nn.Module, image: FloatTensor, label: CountOrZero) -> Figure:
    """Draw a row for each entry of the class capsule's pose, tweaked from -0.25 to 0.25 (Sabour et al. 2017, Figure 4).

    The last column, which the paper does not have, is the difference of the last image and the first.
    """
    drawn = perturb(network, image, label)
    changes = (drawn[:, -1] - drawn[:, 0]).mean(1)
    tweaks = [*(f"{round(value, 2) + 0.0:+.2f}" for value in TWEAKS.tolist()), "change"]
    rows = [
        Row([*images, change], () if index else tweaks, [{"fontsize": 8}] * len(tweaks), f"entry {index + 1}")
        for index, (images, change) in enumerate(zip(drawn, changes, strict=True))
    ]
    return panels_figure(
        rows,
        f"What the {len(drawn)} pose entries of class {label} mean: each row changes one of them",
        0.55,
        len(tweaks),
        (-0.5, 0.5),
        "change from the first picture to the last,\nfrom darker to brighter",
        CHANGES,
    )


def _fits(material: Material) -> bool:
    network, samples = material.network, material.samples
    if not (samples.are_images_of_one_class and has_decoder(network)):
        return False
    return predict(network, samples.inputs[0]).capsules is not None


def _draw_reconstructions(material: Material) -> Figure:
    return reconstructions_figure(material.network, *material.samples.images_of_each())


def _draw_perturbations(material: Material) -> Figure:
    samples = material.samples
    assert samples.labels is not None
    return perturbations_figure(material.network, samples.images([0])[0], int(samples.labels[0]))


RECONSTRUCTIONS = FigureKind(
    "reconstructions", "test images, and what the network draws of them", _fits, _draw_reconstructions
)
PERTURBATIONS = FigureKind("perturbations", "what each pose dimension changes in a drawing", _fits, _draw_perturbations)
