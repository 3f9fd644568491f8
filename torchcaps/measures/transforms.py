"""Images that turn, grow, shear and move, and what the class capsule of an image does then."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.measures.predicting import class_poses, has_decoder, predict, reconstructed
from torchcaps.ops import at_least_float32

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


def affine(
    images: Tensor,
    rotation: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    shear: Tensor | float = 0.0,
    shift: Tensor | tuple[float, float] = (0.0, 0.0),
    padding: Padding = "zeros",
) -> Tensor:
    r"""Scale, shear, rotate and move images about their centers, in this order, with bilinear interpolation.

    The pixel at p from the center, x to the right and y below, takes the value of the image at

    .. math::
        \begin{pmatrix} 1 / g_x & 0 \\ 0 & 1 / g_y \end{pmatrix}
        \begin{pmatrix} 1 & -s \\ 0 & 1 \end{pmatrix}
        \begin{pmatrix} \cos a & -\sin a \\ \sin a & \cos a \end{pmatrix} (p - m)

    Args:
        images: `(n, channels, height, width)`.
        rotation: a in degrees, counterclockwise; one for all, or `(n,)`.
        scale: factor g; one for all, or across and down for each, `(n, 2)`.
        shear: s: a point moves to the right by this part of how far it lies below the center; one for all, or `(n,)`.
        shift: m, right and down, as parts of the width and the height; one for all, or `(n, 2)`.
        padding: what lies outside of an image: "zeros" for images on a dark background, "border" to repeat the edge.
    """
    count = len(images)
    angle = torch.as_tensor(rotation, dtype=torch.float64).deg2rad().expand(count)
    factors = torch.as_tensor(scale, dtype=torch.float64).expand(count, 2)
    slants = torch.as_tensor(shear, dtype=torch.float64).expand(count)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros(count), torch.ones(count)
    turn_back = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    slant_back = torch.stack([one, -slants, zero, one], 1).view(-1, 2, 2)
    back = torch.diag_embed(1 / factors) @ slant_back @ turn_back
    size = torch.tensor([images.shape[3], images.shape[2]], dtype=torch.float64) / 2
    moved = 2 * size * torch.as_tensor(shift, dtype=torch.float64).expand(count, 2)
    # From pixels to coordinates that are -1 and 1 at the edges.
    theta = torch.cat([back * (size / size[:, None]), -(back @ moved.unsqueeze(2)) / size[:, None]], 2)
    pixels = at_least_float32(images)
    places = F.affine_grid(theta.to(pixels), list(images.shape), align_corners=False)
    return F.grid_sample(pixels, places, padding_mode=padding, align_corners=False).to(images)


def on_black(images: Tensor) -> bool:
    """Return whether images `(n, channels, height, width)` are gray, and most pixels at their edges black, as those of
    handwritten digits. Such images can be laid over each other, and black may enter as they move."""
    edges = torch.cat([images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], -1)
    return images.shape[1] == 1 and float(edges.median()) == 0


@torch.no_grad()
def pose_paths(
    network: nn.Module, image: Tensor, class_: int, kind: Kind, values: Tensor, padding: Padding = "zeros"
) -> PosePaths:
    """Follow the capsule of one class while an image turns, grows or moves.

    Args:
        network: network that returns a `Prediction` with class capsules; it is run in evaluation mode and left as it
            was.
        image: image as the network takes it, `(channels, height, width)`.
        class_: class whose capsule to follow.
        kind: "turned", "grown" or "moved".
        values: by how much, `(values,)`: degrees, counterclockwise; or factors; or pixels to the right.
        padding: see :func:`affine`.

    Raises:
        TypeError: the network gives no class capsules.
    """
    image = image.to(next(network.parameters(), image))
    images, none = image.expand(len(values), *image.shape), torch.zeros(len(values))
    if kind == "turned":
        inputs = affine(images, rotation=values, padding=padding)
    elif kind == "grown":
        inputs = affine(images, scale=values[:, None], padding=padding)
    else:
        inputs = affine(images, shift=torch.stack([values / image.shape[2], none], 1), padding=padding)
    prediction = predict(network, inputs)
    poses = class_poses(network, prediction)
    drawn = None
    if has_decoder(network):
        assert prediction.capsules is not None
        drawn = reconstructed(network, prediction.capsules, torch.full((len(inputs),), class_))
    return PosePaths(values.to(inputs), inputs, poses[:, class_], prediction.evidence, drawn)
