"""Random numbers that can be had again: each follows from a seed and from its place in a stream."""

import torch
from torch import Tensor

DRAWS = 8  # for every image, used or not


def _signed(value: int) -> int:
    """The integer of 64 bits with a sign that has the same bits."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)


def splitmix64(seed: int, index: Tensor) -> Tensor:
    """The outputs number `index`, from 0, of the generator SplitMix64 with that seed.

    Any of them at once, without those before. Integers only, which overflow alike everywhere: the same on every
    device.

    Source: G. L. Steele, D. Lea and C. H. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014;
    the constants are those of S. Vigna's splitmix64.c.

    Args:
        seed: its lower 64 bits count.
        index: int64, any shape.

    Returns:
        int64 of the same shape; as bits, uniform.
    """
    z = (index + 1) * GOLDEN + _signed(seed)
    z = (z ^ _shift_right(z, 30)) * FIRST_MULTIPLIER
    z = (z ^ _shift_right(z, 27)) * SECOND_MULTIPLIER
    return z ^ _shift_right(z, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # torch repeats the sign, and there are no 64 bits without one.
    return (value >> bits) & (2 ** (64 - bits) - 1)


def draws(seed: int, index: Tensor) -> Tensor:
    """For each image number of `index` (n,) its random numbers: (n, DRAWS) integers from 0 below 2^53.

    Small remainders of them are uniform to 1 in 10^11.
    """
    return _shift_right(splitmix64(seed, index[:, None] * DRAWS + torch.arange(DRAWS, device=index.device)), 11)


def stream(seed: int, *places: int) -> int:
    """The seed of a stream of its own, such as that of a batch in an epoch of a run: 64 bits with a sign."""
    for place in places:
        seed = int(splitmix64(seed, torch.tensor(place)))
    return seed
