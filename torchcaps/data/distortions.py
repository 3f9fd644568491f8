"""Random distortions of handwritten digits, as Byerly, Kalganova, Dear: No Routing Needed Between Capsules (2021) and
Mazzia, Salvetti, Chiaberge: Efficient-CapsNet (2021) have them in their code."""

import functools

import torch
from torch import Tensor

from torchcaps.utils.arguments import FloatTensor, checked

PATCH = 4  # side of the erased square


@checked
def distort(images: FloatTensor) -> Tensor:
    """Rotate, shift, squeeze and erase each image independently.

    With g a normal random number of standard deviation 0.33, cut at -1 and 1, each image is

    1. with probability 1/2 rotated by 30 g degrees, cut to whole degrees;
    2. shifted by whole pixels across and down, each way with probability 1/2, by |g| of the empty margin on that side;
    3. squeezed across by 1 + floor(|g| width / 4) pixels, by Lanczos interpolation, and put near the middle;
    4. erased in a square of 4x4 pixels, which lies at least 4 pixels from the upper and the left edge.

    Args:
        images: `(n, channels, height, width)` in [0, 1], zero in the background, at least 12x12 pixels.

    Returns:
        Images of the same shape, in [0, 1]. They come from torch's default generator.

    Raises:
        ValueError: the images have another shape or are too small.
    """
    if images.dim() != 4 or min(images.shape[-2:]) < 3 * PATCH:
        raise ValueError(
            f"expected images of shape (n, channels, height, width) of at least {3 * PATCH}x{3 * PATCH} pixels, got "
            f"{tuple(images.shape)}"
        )
    return _erase(_squeeze(_shift(_rotate(images)))).clamp(0, 1)


def _normal(images: Tensor) -> Tensor:
    """Return one random number for each image, in (-1, 1)."""
    return (0.33 * torch.randn(len(images), device=images.device)).clamp(-0.9999, 0.9999)


def _rotate(images: Tensor) -> Tensor:
    from kornia.geometry.transform import rotate  # slow to import

    angle = (30 * _normal(images)).trunc() * (torch.rand(len(images), device=images.device) < 0.5)
    return rotate(images, angle.to(images.dtype), mode="bilinear", padding_mode="zeros")


def _shift(images: Tensor) -> Tensor:
    for dim in (-1, -2):
        size, others = images.shape[dim], -3 - dim
        inked = images.sum((1, others)) > 0  # (n, size)
        first, last = inked.int().argmax(1), size - 1 - inked.flip(1).int().argmax(1)
        part = _normal(images).abs()
        forward = torch.rand(len(images), device=images.device) < 0.5
        steps = torch.where(forward, (part * (size - last)).floor(), (-part * first).floor()).long()
        places = (torch.arange(size, device=images.device) - steps[:, None]) % size
        shape = [len(images), 1, 1, 1]
        shape[dim] = size
        images = images.gather(dim, places.view(shape).expand_as(images))
    return images


def _squeeze(images: Tensor) -> Tensor:
    width = images.shape[-1]
    less = (_normal(images).abs() * (width // 4)).long()
    right = torch.rand(len(images), device=images.device) < 0.5
    matrices = _squeezing(width, images.device, images.dtype)[2 * less + right]
    return images @ matrices.unsqueeze(1)


@functools.cache
def _squeezing(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return matrices `(2 * n, width, width)` that squeeze rows of pixels by 1 to n pixels, in the middle and one pixel
    to the right of it. They stay on the device: a copy to it waits, and no CUDA graph can have it."""
    matrices = torch.zeros(width // 4, 2, width, width)
    for k in range(width // 4):
        narrow = width - k - 1
        scale = width / narrow
        centers = (torch.arange(narrow) + 0.5) * scale - 0.5
        distances = (torch.arange(width)[:, None] - centers) / scale  # the kernel is as much wider as the row shrinks
        weights = torch.sinc(distances) * torch.sinc(distances / 3) * (distances.abs() < 3)
        weights = weights / weights.sum(0)
        for right in (0, 1):
            offset = (k + 1) // 2 + right
            fits = min(narrow, width - offset)
            matrices[k, right, :, offset : offset + fits] = weights[:, :fits]
    return matrices.flatten(0, 1).to(device, dtype)


def _erase(images: Tensor) -> Tensor:
    inside = torch.ones((), dtype=torch.bool, device=images.device)
    for dim in (-1, -2):
        size = images.shape[dim]
        least = torch.rand(len(images), device=images.device) * (size - 2 * PATCH - 1)
        distance = torch.arange(size, device=images.device) - PATCH - least.floor()[:, None]
        within = (distance >= 0) & (distance < PATCH)
        inside = inside & (within[:, None, None, :] if dim == -1 else within[:, None, :, None])
    return images.masked_fill(inside, 0)
