"""Checks of the images and embeddings that networks are given."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.nn.inputs import SIDES
from torchcaps.utils.arguments import Count, can_read, check_input

# Channels, height and width; None for any.
ImageShape = tuple[Count | None, Count | None, Count | None]
# Channels and sides of a signal, an image or a volume.
InputShape = (
    tuple[Count | None, Count | None] | ImageShape | tuple[Count | None, Count | None, Count | None, Count | None]
)
INPUTS = {1: "signals", 2: "images", 3: "volumes"}
ANY_IMAGE: ImageShape = (None, None, None)


def check_images(images: Tensor, shape: InputShape, weight: Tensor | None, least: int = 1) -> None:
    """Check a batch of images, signals or volumes, see also :func:`torchcaps.utils.arguments.check_input`.

    Args:
        images: the images.
        shape: channels, height and width that the network takes; of signals channels and length, of volumes channels,
            depth, height and width.
        weight: a parameter of the network, whose device and precision the images need; None if it has none, as the
            replicas of `nn.DataParallel` do.
        least: least size of each side.

    Raises:
        ValueError: the images have another shape; a single image without a batch too.
    """
    sides = SIDES[len(shape) - 1]
    kind = INPUTS[len(sides)]
    check_input(kind, images, weight)

    def fits(given: tuple[int, ...]) -> bool:
        sizes = len(given) == 1 + len(shape) and all(
            size in (None, side) for size, side in zip(shape, given[1:], strict=True)
        )
        return sizes and min(given[2:]) >= least

    if not fits(given := tuple(images.shape)):
        names = zip(shape, ("channels", *sides), strict=True)
        expected = ", ".join(name if size is None else str(size) for size, name in names)
        end = f", {' and '.join(sides)} at least {least}" if least > 1 else ""
        gray = "gray " if kind == "images" else ""
        ways = {
            f"a single {kind[:-1]} needs {kind}.unsqueeze(0)": (1, *given),
            f"{gray}{kind} without channels need {kind}.unsqueeze(1)": (*given[:1], 1, *given[1:]),
            f"a single {gray}{kind[:-1]} without channels needs {kind}[None, None]": (1, 1, *given),
            f"channels that come last need {kind}.movedim(-1, 1)": (*given[:1], *given[-1:], *given[1:-1]),
        }
        right = [way for way, then in ways.items() if fits(then)]
        advice = f": {', '.join(right)}" if right else ""
        raise ValueError(f"expected {kind} of shape (batch, {expected}){end}, got {given}{advice}")


def padded_to(multiple: int, images: Tensor) -> Tensor:
    """Return images with zeros below and on the right, so that height and width are multiples of a number."""
    height, width = images.shape[2:]
    return F.pad(images, (0, -width % multiple, 0, -height % multiple))


def check_embeddings(embeddings: Tensor, mask: Tensor | None, weight: Tensor) -> None:
    """Check the inputs of a network whose weights `(layers, width)` are given."""
    check_input("embeddings", embeddings, weight, takes_half=True)
    if embeddings.dim() != 4 or embeddings.shape[2:] != weight.shape or not embeddings.shape[1]:
        layers, width = weight.shape
        raise ValueError(
            f"expected embeddings of shape (batch, tokens, {layers}, {width}), with the encoder's layers and width, "
            f"got {tuple(embeddings.shape)}"
        )
    if mask is None:
        return
    if mask.shape != embeddings.shape[:2]:
        raise ValueError(
            f"expected a mask of shape (batch, tokens) = {tuple(embeddings.shape[:2])}, got {tuple(mask.shape)}"
        )
    if mask.device != embeddings.device:
        raise ValueError(f"the embeddings are on {embeddings.device} and the mask on {mask.device}: move one of them")
    if can_read(mask) and mask.dtype != torch.bool and not ((mask >= 0) & (mask <= 1)).all():
        raise ValueError(
            "a mask must be bool, or from 0 (padding) to 1 (a token), got other numbers: give True and False"
        )


def without_padding(embeddings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return embeddings `(batch, tokens, layers, width)` with zeros for padding, and scores of all tokens and layers,
    `(batch, tokens * layers)`, or None without a mask. Only the numbers of the mask between 0 and 1 have a gradient."""
    if mask is None:
        return embeddings, None
    mask = mask.to(embeddings.dtype)
    embeddings = embeddings.where(mask[..., None, None] > 0, 0)  # a gate of 0 times NaN is NaN
    between = (mask > 0) & (mask < 1)  # elsewhere the logit has no finite gradient
    scores = torch.where(between, mask.where(between, 0.5).logit(), mask.detach().logit())
    return embeddings, scores.unsqueeze(-1).expand(embeddings.shape[:3]).flatten(1)
