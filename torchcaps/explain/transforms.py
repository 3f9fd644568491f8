"""What the class capsule of an image does as the image turns, grows or moves."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.explain.predicting import class_poses, has_decoder, predict, reconstructed
from torchcaps.ops import at_least_float32
from torchcaps.utils.arguments import CountOrZero, FloatTensor, checked, shown

Kind = Literal["turned", "grown", "moved"]
Padding = Literal["zeros", "border"]


class PosePaths(NamedTuple):
    """What a network makes of one image as it changes; tensors are on the network's device.

    Fields:
        values: by how much, `(values,)`.
        inputs: the changed images, `(values, channels, height, width)`.
        poses: poses of the capsule of the class, flattened, `(values, features)`.
        scores: scores of all classes, `(values, classes)`.
        reconstructions: images drawn from the capsule of the class alone, `(values, channels, height, width)`; None
            without a decoder.
    """

    values: Tensor
    inputs: Tensor
    poses: Tensor
    scores: Tensor
    reconstructions: Tensor | None


@checked
def transformed(images: FloatTensor, kind: Kind, value: float, padding: Padding = "zeros") -> Tensor:
    r"""Turn, grow or move images about their center, with bilinear interpolation.

    The pixel at x to the right of the center and y below it takes the value of the image at

    .. math:: (x \cos a - y \sin a, \; x \sin a + y \cos a), \quad (x / g, \; y / g), \quad (x - m, \; y)

    if the image is turned by the angle a, grown by the factor g or moved by m pixels.

    Args:
        images: `(batch, channels, height, width)`.
        kind: "turned", "grown" or "moved".
        value: degrees, counterclockwise; or the factor, above 0; or pixels to the right, which need not be whole.
        padding: what lies outside of the image: "zeros" for images on a dark background, "border" to repeat the edge.

    Shape:
        - Output: that of the images.

    Raises:
        ValueError: the images have another shape, or the value is not finite, or a factor is not above 0.
    """
    if images.dim() != 4:
        raise ValueError(f"expected images of shape (batch, channels, height, width), got {shown(images)}")
    if not math.isfinite(value) or (kind == "grown" and value <= 0):
        raise ValueError(f"value must be finite{', and a factor above 0' * (kind == 'grown')}, got {value}")
    height, width = images.shape[2:]
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]  # in coordinates that are -1 and 1 at the edges
    if kind == "turned":
        sine, cosine = math.sin(math.radians(value)), math.cos(math.radians(value))
        rows = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    elif kind == "grown":
        rows = [[1 / value, 0.0, 0.0], [0.0, 1 / value, 0.0]]
    else:
        rows[0][2] = -2 * value / width
    pixels = at_least_float32(images)
    theta = pixels.new_tensor(rows).expand(len(images), 2, 3)
    places = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(pixels, places, padding_mode=padding, align_corners=False).to(images)


@torch.no_grad()
@checked
def pose_paths(
    network: nn.Module,
    image: FloatTensor,
    class_: CountOrZero,
    kind: Kind,
    values: FloatTensor | Sequence[float],
    padding: Padding = "zeros",
) -> PosePaths:
    """Follow the capsule of one class while an image turns, grows or moves.

    Args:
        network: network that returns a `Prediction` with class capsules; it is run in evaluation mode and left as it
            was.
        image: image as the network takes it, `(channels, height, width)`.
        class_: class whose capsule to follow.
        kind, padding: see :func:`transformed`.
        values: values of :func:`transformed`, one or more.

    Raises:
        TypeError: the network gives no class capsules.
        ValueError: there is no such class or no value, or :func:`transformed` cannot use one.
    """
    if image.dim() != 3:
        raise ValueError(f"expected an image of shape (channels, height, width), got {shown(image)}")
    values = torch.as_tensor(values, dtype=torch.float32)
    if values.dim() != 1 or not len(values):
        raise ValueError(f"values must have the shape (values,), with at least one, got {shown(values)}")
    image = image.to(next(network.parameters(), image))
    inputs = torch.cat([transformed(image.unsqueeze(0), kind, value, padding) for value in values.tolist()])
    prediction = predict(network, inputs)
    poses = class_poses(network, prediction)
    if class_ >= poses.shape[1]:
        raise ValueError(f"class_ must be from 0 to {poses.shape[1] - 1}, one of the class capsules, got {class_}")
    drawn = None
    if has_decoder(network):
        assert prediction.capsules is not None
        drawn = reconstructed(network, prediction.capsules, torch.full((len(inputs),), class_))
    return PosePaths(values.to(inputs), inputs, poses[:, class_], prediction.evidence, drawn)
