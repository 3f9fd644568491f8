"""Splits of one's own data into training, validation and test parts."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

Part = Literal["train", "val", "test"]
PARTS = ("train", "val", "test")
SPLIT_COLUMNS = ("file", "class", "part")  # of a split that was written down
LEAST = 3  # samples of a class that is split

SEED = 0  # not the run's seed: all runs are tested on the same samples


def split_by_class(keys: Sequence[str], classes: Sequence[str], shares: Mapping[Part, float]) -> list[Part]:
    """Split samples into parts, with the same share of every class.

    The split depends on the keys and the classes alone, not on their order. A class of fewer than three samples has
    all of them in training. Every other class has at least one sample in each part whose share is above 0.

    Args:
        keys: name of each sample.
        classes: class of each sample.
        shares: share of each part that is split off; the rest is for training.

    Returns:
        The part of each sample.
    """
    parts: list[Part] = ["train"] * len(keys)
    by_class: dict[str, list[int]] = {}
    for index in sorted(range(len(keys)), key=lambda index: keys[index]):
        by_class.setdefault(classes[index], []).append(index)
    for name in sorted(by_class):
        members = by_class[name]
        if len(members) < LEAST:
            continue
        order = np.random.default_rng(SEED).permutation(len(members)).tolist()
        wanted = [(part, share) for part, share in shares.items() if share > 0]
        for later, (part, share) in zip(range(len(wanted), 0, -1), wanted, strict=True):
            count = min(max(1, round(share * len(members))), len(order) - later)  # one is left for each later part
            for place in order[:count]:
                parts[members[place]] = part
            order = order[count:]
    return parts
