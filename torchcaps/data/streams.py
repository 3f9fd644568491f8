"""Reproducible streams of random numbers: each number depends on a seed and on its position in the stream alone.

The orders of training samples, the seeds of batches and the images of MultiMNIST and Expanded MNIST are drawn from
them.
"""

import torch
from torch import Tensor

DRAWS = 8  # random numbers of every image, whether it uses them or not

# Numbers of the streams of images. Only the training images of MultiMNIST depend on a seed.
MULTI_TRAIN, MULTI_VALIDATE, MULTI_TEST = 0, 1, 2
EXPANDED_VALIDATE, EXPANDED_TEST = 3, 4
AFFINE_TEST = 5


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits as an unsigned one."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)


def splitmix64(seed: int, index: Tensor) -> Tensor:
    """Return the outputs number `index`, counted from 0, of the generator SplitMix64.

    An output needs none of those before it. Results are the same on every device, because integers overflow in the same
    way on all of them.

    Source: G. L. Steele, D. Lea and C. H. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. The
    constants are those of S. Vigna's splitmix64.c.

    Args:
        seed: seed; its lower 64 bits are used.
        index: int64 of any shape.

    Returns:
        int64 of the same shape, whose 64 bits are uniform.
    """
    z = (index + 1) * GOLDEN + _signed(seed)
    z = (z ^ _shift_right(z, 30)) * FIRST_MULTIPLIER
    z = (z ^ _shift_right(z, 27)) * SECOND_MULTIPLIER
    return z ^ _shift_right(z, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # A shift of int64 repeats the sign bit: mask the repeated bits.
    return (value >> bits) & (2 ** (64 - bits) - 1)


def draws(seed: int, index: Tensor) -> Tensor:
    """Return the random numbers of the images number `index` (n,): integers (n, DRAWS) from 0 to 2^53 - 1.

    Their remainder by a small number is uniform to 1 in 10^11.
    """
    return _shift_right(splitmix64(seed, index[:, None] * DRAWS + torch.arange(DRAWS, device=index.device)), 11)


def stream(seed: int, *places: int) -> int:
    """Return the seed of a stream that belongs to the places, a signed 64-bit integer.

    For example, `stream(seed, epoch, batch)` is the seed for one batch in one epoch of a run.
    """
    for place in places:
        seed = int(splitmix64(seed, torch.tensor(place)))
    return seed
