"""Splits of one's own data into training, validation and test parts."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from torchcaps.data.files import DataError
from torchcaps.data.table import read_table

Part = Literal["train", "val", "test"]
PARTS = ("train", "val", "test")
OF_STAGE: dict[str, Part] = {"fit": "train", "validate": "val", "test": "test"}
KINDS: dict[Part, str] = {"train": "training", "val": "validation", "test": "test"}
SPLIT_COLUMNS = ("file", "class", "part")  # of a split that was written down
LEAST = 3  # samples of a class that is split

SEED = 0  # not the run's seed: all runs are tested on the same samples


def check_shares(val_share: float, test_share: float) -> None:
    """Raise a ValueError if the shares leave nothing for training."""
    if val_share + test_share >= 1:
        raise ValueError(
            f"val_share and test_share must leave a part for training, got {val_share:g} and {test_share:g}"
        )


def read_split(name: str) -> dict[str, tuple[str, Part]]:
    """Read a split that was written down, as a table with SPLIT_COLUMNS.

    Returns:
        The class and the part of each sample, by what the column "file" has for it.

    Raises:
        DataError: the file is no such table.
    """
    split: dict[str, tuple[str, Part]] = {}
    for line, row in read_table(name).rows:
        for column in SPLIT_COLUMNS:
            if column not in row:
                raise DataError(f"{name}: no column {column!r}: expected the split.csv of a run")
        sample, label, part = (row[column] for column in SPLIT_COLUMNS)
        if part not in PARTS:
            raise DataError(f"{name} line {line}: the part of {sample} is {part!r}: expected {', '.join(PARTS)}")
        split[sample] = label, part  # type: ignore[assignment]  # it is one of the parts
    return split


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


def check_names(names: list[str] | None) -> None:
    """Check names of classes that were given."""
    if names is None:
        return
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"class_names must be texts that are not empty, got {names!r}")
    if len(set(names)) < max(2, len(names)):
        raise ValueError(f"class_names must be two or more different names, got {names!r}")
