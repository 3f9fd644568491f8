"""Splits of one's own data into training, validation and test parts."""

import hashlib
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.data.notes import listed, say
from torchcaps.data.table import Table, read_table
from torchcaps.utils.checks import counted
from torchcaps.utils.files import user_path

Part = Literal["train", "val", "test"]
PARTS = ("train", "val", "test")
OF_STAGE: dict[str, Part] = {"fit": "train", "validate": "val", "test": "test"}
PART_WORDS: dict[Part, str] = {"train": "training", "val": "validation", "test": "test"}
SPLIT_KEY = "split"  # key of a checkpoint for the split of one's own data
TABLE = "split.csv"  # a copy of it in the folder of the run, for people and for other runs
FILE, HASH, PART = "file", "hash", "part"  # columns of a table: what names a sample, and its part
BYTES = 8  # of a hash: two of 100,000 samples share one with a probability of 3e-10
ANEW = "train anew, without it, for a new split"
NONE = "none"  # value of `group` for no groups
# Names of columns of patients, objects and persons, in parts of words of several languages.
OF_GROUPS = re.compile(
    r"patient|pacient|pazient|subject|lesion|specimen|mrn|owner|author|speaker|[a-z]I[Dd]$"
    r"|(^|[ _-])(user|case|person|animal|slide|group|id)s?($|[ _-])",
    re.I,
)
LEAST_TO_SPLIT = 3  # samples of a class that is split

SEED = 0  # not the run's seed: all runs are tested on the same samples


def check_shares(val_share: float, test_share: float) -> None:
    """Raise a ValueError if the shares leave nothing for training."""
    if val_share + test_share >= 1:
        raise ValueError(
            f"val_share and test_share must leave a part for training, got {val_share:g} and {test_share:g}"
        )


def digest(sample: str) -> bytes:
    """Return the name of a sample in a split: a hash of its path in the folder or of its text. It tells nobody what the
    sample is called, and 100,000 of them take less than a megabyte of a checkpoint."""
    return hashlib.sha256(sample.encode()).digest()[:BYTES]


def packed(split: Mapping[bytes, Part]) -> dict[str, Tensor]:
    """Return a split as a checkpoint holds it: the hashes of each part, (n, BYTES) uint8."""
    hashes = {part: b"".join(sorted(key for key, of in split.items() if of == part)) for part in PARTS}
    return {
        part: torch.frombuffer(bytearray(of_part), dtype=torch.uint8).view(-1, BYTES)
        for part, of_part in hashes.items()
        if of_part
    }


def read_split(name: str) -> dict[bytes, Part]:
    """Read the part of each sample, by its `digest`, from a checkpoint of a run or from the table that `write_split`
    wrote. If both lie in the folder of a run and differ, a line says that the checkpoint counts.

    Raises:
        DataError: the file holds no split, or a sample has two parts.
    """
    path = user_path(name)
    if path.is_dir():
        raise DataError(
            f"{path} is a folder, which holds no split (`save_pretrained` writes none): set data.split to the "
            f"split.csv or a checkpoint of the run, or {ANEW}"
        )
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return _split_of_table(name)
    split = _split_of_checkpoint(path)
    beside = path.parent.parent / TABLE
    if path.parent.name == "checkpoints" and beside.is_file():
        try:
            agrees = _split_of_table(str(beside)) == split
        except DataError:
            agrees = False
        if not agrees:
            say(f"{beside} is not the split of {path}, which counts: to use the table, set data.split to it")
    return split


def _split_of_checkpoint(path: Path) -> dict[bytes, Part]:
    try:
        hashes = torch.load(path, map_location="cpu", weights_only=True, mmap=True)[SPLIT_KEY]
    except Exception:  # bytes that anybody wrote make torch raise errors of many types
        raise DataError(f"{path} holds no split: set data.split to the split.csv of the run, or {ANEW}") from None
    if not isinstance(hashes, dict) or not all(part in PARTS and _are_hashes(x) for part, x in hashes.items()):
        raise DataError(f"{path} holds no split that `torchcaps train` wrote: set data.split to another, or {ANEW}")
    split: dict[bytes, Part] = {}
    for part, x in hashes.items():
        of_part = x.numpy().tobytes()
        split |= dict.fromkeys((of_part[i : i + BYTES] for i in range(0, len(of_part), BYTES)), part)
    if len(split) < sum(map(len, hashes.values())):
        raise DataError(f"{path} holds a split with a sample in two parts: set data.split to another, or {ANEW}")
    return split


def _are_hashes(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and (x.layout, x.device.type, x.dtype) == (torch.strided, "cpu", torch.uint8)
        and x.dim() == 2
        and x.shape[1] == BYTES
        and x.is_contiguous()  # else a few bytes could stand for endless ones
    )


def _split_of_table(name: str) -> dict[bytes, Part]:
    table = read_table(name)
    if sorted(table.columns) not in ([FILE, PART], [HASH, PART]):
        raise DataError(
            f"{name}: has the columns {listed(table.columns)}: expected {FILE} and {PART}, or {HASH} and {PART}, as in "
            f"the {TABLE} of a run"
        )
    split: dict[bytes, Part] = {}
    for line, row in table.rows:
        part: Any = row[PART]
        if part not in PARTS:
            raise DataError(f"{name} line {line}: the part is {part!r}: expected {', '.join(PARTS)}")
        if FILE in row:
            key = digest(row[FILE])
        elif re.fullmatch(f"[0-9a-f]{{{2 * BYTES}}}", row[HASH]):
            key = bytes.fromhex(row[HASH])
        else:
            raise DataError(f"{name} line {line}: {row[HASH][:40]!r} is no hash of {2 * BYTES} digits from 0 to f")
        if split.setdefault(key, part) != part:
            raise DataError(
                f"{name} line {line}: {row.get(FILE, row.get(HASH))} is in {part}, and in {split[key]} above: give "
                "each sample one part"
            )
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
        if len(members) < LEAST_TO_SPLIT:
            continue
        order = np.random.default_rng(SEED).permutation(len(members)).tolist()
        wanted = [(part, share) for part, share in shares.items() if share > 0]
        for later, (part, share) in zip(range(len(wanted), 0, -1), wanted, strict=True):
            count = min(max(1, round(share * len(members))), len(order) - later)  # one is left for each later part
            for place in order[:count]:
                parts[members[place]] = part
            order = order[count:]
    return parts


def split_by_group(names: Sequence[Sequence[str]], groups: Sequence[str], shares: Mapping[Part, float]) -> list[Part]:
    """Split samples into parts with about the same share of every class or label, and no group, such as a patient, in
    two.

    The largest groups come first. A group goes to training if one of its classes is not there yet. Otherwise it goes
    to a part that needs one of the last groups of a class, or to the part that lacks most of the group's classes. A
    class in one group is therefore in training only, one in two groups in training and in the test, and one in three
    groups in all parts. The split depends on the names of the groups and on their classes alone.

    Args:
        names: the class, or the labels, of each sample, one or more.
        groups: group of each sample.
        shares: share of each part that is split off; the rest is for training.

    Returns:
        The part of each sample.
    """
    counts: dict[str, Counter[str]] = {}
    for of_sample, group in zip(names, groups, strict=True):
        counts.setdefault(group, Counter()).update(of_sample)
    totals, left = (
        Counter(name for of_sample in names for name in of_sample),
        Counter(name for of_group in counts.values() for name in of_group),
    )
    wanted: dict[Part, float] = {"train": 1 - sum(shares.values())}
    wanted |= {part: shares[part] for part in ("test", "val") if shares.get(part)}
    missing = {part: {name: share * total for name, total in totals.items()} for part, share in wanted.items()}
    has: dict[Part, set[str]] = {part: set() for part in wanted}
    parts: dict[str, Part] = {}
    for group in sorted(counts, key=lambda group: (-counts[group].total(), digest(group))):
        of_group = dict(sorted(counts[group].items()))  # samples may come in any order
        without = {name: [part for part in wanted if name not in has[part]] for name in of_group}
        urgent = [without[name][0] for name in of_group if without[name] and left[name] <= len(without[name])]
        if any("train" in without[name] for name in of_group):
            part: Part = "train"
        elif urgent:
            part = urgent[0]
        else:
            lack = {
                part: sum(count * missing[part][name] / totals[name] ** 2 for name, count in of_group.items())
                for part in wanted
            }
            part = max(lack, key=lack.__getitem__)
        parts[group] = part
        has[part] |= of_group.keys()
        for name, count in of_group.items():
            missing[part][name] -= count
            left[name] -= 1
    return [parts[group] for group in groups]


def check_groups(groups: Iterable[tuple[str, Part]], where: Any, advice: str) -> None:
    """Raise a DataError if a group has samples in several parts.

    Args:
        groups: group and part of each sample.
        where: folder or file of the samples or of the split.
        advice: what to do.
    """
    parts: dict[str, set[Part]] = {}
    for group, part in groups:
        parts.setdefault(group, set()).add(part)
    if several := [f"{group} ({', '.join(sorted(of, key=PARTS.index))})" for group, of in parts.items() if len(of) > 1]:
        raise DataError(f"{where}: groups are in several parts: {listed(several)}: {advice}")


def say_groups(
    where: str, noun: str, terms: str, names: Sequence[Sequence[str]], groups: Sequence[str], parts: Sequence[Part]
) -> None:
    """Say how many groups each part has, and which classes or labels and groups make the split uneven.

    Args:
        where: folder or file of the samples.
        noun: what a sample is called, such as "picture".
        terms: what its names are called, "classes" or "labels".
        names, groups, parts: those of each sample; it may have any number of names.
    """
    sizes, of_part = Counter(groups), dict(zip(groups, parts, strict=True))
    of_name: dict[str, set[str]] = {}
    for of_sample, group in zip(names, groups, strict=True):
        for name in of_sample:
            of_name.setdefault(name, set()).add(group)
    each = Counter(of_part.values())
    by_part = ", ".join(f"{each[part]} in {word}" for part, word in PART_WORDS.items())
    say(f"{where}: {counted(len(sizes), 'group')}: {by_part}")
    alone = [f"{name} ({group})" for name, (group, *others) in of_name.items() if not others]
    if alone:
        say(f"{where}: {terms} with one group cannot be split, and are in one part alone: {listed(alone)}")
    largest, size = sizes.most_common(1)[0]
    if 2 * size > len(groups):
        say(
            f"{where}: the group {largest} has {size:,} of {counted(len(groups), noun)}, which are all in "
            f"{PART_WORDS[of_part[largest]]}"
        )


def doubts_of_columns(table: Table, sample: str, labels: Sequence[str]) -> list[str]:
    """Return a line if columns of a table seem to name patients or objects that several rows belong to.

    Args:
        table: the table.
        sample, labels: its columns of the samples and of their classes, labels or numbers.
    """
    counts: dict[str, int] = {}
    for column in table.columns:
        if column in (sample, *labels) or not OF_GROUPS.search(column):
            continue
        values = {row.values[column] for row in table.rows}
        pairs = {(row.values[column], *(row.values[label] for label in labels)) for row in table.rows}
        is_label = len(values) == len(pairs) == len({pair[1:] for pair in pairs})  # in other words
        if 3 <= len(values) < len(table.rows) and not is_label:
            counts[column] = len(values)
    if not counts:
        return []
    coarsest = min(counts, key=lambda column: counts[column])
    columns = listed([f"{column} ({count:,} values)" for column, count in counts.items()])
    return [
        f"{table.name}: rows with the same {columns} may belong together, as those of one patient: validation and test "
        f"then show what was trained on: give --data.group {shlex.quote(coarsest)}, or --data.group {NONE} if not"
    ]
