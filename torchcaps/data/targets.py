"""What the user's own data has to predict: a class, several labels or numbers, and the columns of a table with them."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.data.labeled import TERMS, TargetKind
from torchcaps.data.notes import say
from torchcaps.data.splits import LEAST_TO_SPLIT, Part, split_by_class, split_by_group
from torchcaps.data.table import Table
from torchcaps.utils.arguments import LARGEST
from torchcaps.utils.checks import counted

Label = str | tuple[str, ...] | tuple[float, ...]  # of a sample: its class or mask, its labels or its numbers
PRESENT, ABSENT = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")  # values of the column of a label
SEPARATORS = "|;,"  # of labels, where none was given
ENOUGH_ALIKE = 20  # samples with the same labels, of which the same share is in every part
LEAST_NUMBERS = 8  # samples from which numbers are learned


class Target(NamedTuple):
    """What is predicted, and the columns of a table that have it.

    Fields:
        kind: see `LabeledData`.
        columns: the column of the classes, the column of all labels, or a column for each label or number; none for
            masks.
        separator: what stands between the labels in their column; None for other targets.
        option: what the user sets to choose the columns, such as "data.label".
    """

    kind: TargetKind
    columns: list[str]
    separator: str | None
    option: str

    @property
    def term(self) -> str:
        return TERMS[self.kind][0]

    @property
    def terms(self) -> str:
        return TERMS[self.kind][1]

    @property
    def wanted(self) -> dict[str, str]:
        """The column of the classes or of all labels, by its option; empty if there are several columns."""
        return {self.option: self.columns[0]} if self.option == "data.label" else {}

    def check_columns(self, table: Table) -> None:
        """Raise a DataError if there are no columns of labels or numbers, or if the table does not have them."""
        if not self.columns:
            raise DataError(
                f'{self.option} is missing: give --{self.option} "[NAME, ...]", names of columns of {table.name} with '
                f"{self.kind}"
            )
        for column in self.columns:
            table.check_column(column, self.option)

    def read(self, values: Mapping[str, str]) -> Label:
        """Return the label of a row, given its values by column.

        Raises:
            ValueError: a value cannot be used; the message says which one and what is expected.
        """
        texts = [values[column].strip() for column in self.columns]
        if self.kind == "numbers":
            return tuple(map(_number, self.columns, texts))
        if self.separator is not None:
            return tuple(sorted({label.strip() for label in texts[0].split(self.separator)} - {""}))
        if self.kind == "labels":
            for column, text in zip(self.columns, texts, strict=True):
                if text.lower() not in PRESENT + ABSENT:
                    raise ValueError(f"{column} is {_shown(text)}: write 1 or 0")
            return tuple(sorted(x for x, text in zip(self.columns, texts, strict=True) if text.lower() in PRESENT))
        if not texts[0]:
            raise ValueError(f"{self.columns[0]} is empty")
        return texts[0]

    def check(self, labels: Sequence[Label], where: str, noun: str) -> list[str]:
        """Check that a network can learn the labels of all samples. Return a line if classes seem to be several labels.

        Args:
            labels: label of each sample.
            where: name of the table.
            noun: what a sample is called, such as "picture".

        Raises:
            DataError: there are too few classes, labels or samples, or numbers are all equal.
        """
        if self.kind == "numbers":
            if len(labels) < LEAST_NUMBERS:
                raise DataError(
                    f"{where}: has numbers of {counted(len(labels), noun)}: at least {LEAST_NUMBERS} are needed"
                )
            for column, numbers in zip(self.columns, self.tensor(labels, []).unbind(1), strict=True):
                if numbers.min() == numbers.max():
                    raise DataError(
                        f"{where}: all numbers in column {column!r} are {numbers[0]:g}: set {self.option} to columns "
                        "of numbers that differ"
                    )
            return []
        counts, column = self.counts(labels), self.columns[0]
        if self.separator is not None and len(counts) < 2:
            raise DataError(
                f"{where}: column {column!r} has {counted(len(counts), 'label')} with the separator "
                f"{self.separator!r}: at least two labels are needed: set data.label to their column, or "
                "data.separator to what stands between them"
            )
        if self.kind == "labels" and not counts:
            raise DataError(f"{where}: no {noun} has a label: set {self.option} to columns in which some have a 1")
        if self.kind == "class" and len(counts) < 2:
            raise DataError(
                f"{where}: all {noun}s have the class {next(iter(counts))!r} in column {column!r}: at least two "
                "classes are needed"
            )
        composed = _composed(counts)
        options = "".join(f", or data.separator to {sign!r} if its values are several labels" for sign in composed)
        if self.kind == "class" and max(counts.values()) == 1:
            raise DataError(
                f"{where}: every {noun} has another class in column {column!r}: set data.label to the column of the "
                f"classes{options}, or add {noun}s: a class needs {LEAST_TO_SPLIT} different ones to be split"
            )
        if self.separator is not None and composed and all(len(self.names_of(label)) < 2 for label in labels):
            signs = " or ".join(f"--data.separator {shlex.quote(sign)}" for sign in composed)
            raise DataError(
                f"{where}: no value in column {column!r} has the separator {self.separator!r}, and some look like "
                f"several labels: give {signs}"
            )
        if self.kind == "labels" and (always := [name for name, count in counts.items() if count == len(labels)]):
            say(f"{where}: every {noun} has the label {always[0]!r}: a network that always predicts it is right")
        return self.doubts(labels, where)

    def doubts(self, labels: Sequence[Label], where: str) -> list[str]:
        """Return a line if the classes of samples, or their labels, seem to be several labels each."""
        if self.kind == "numbers":
            return []
        return [
            f"{where}: {self.terms} in column {self.columns[0]!r} look like several labels, such as {value[:60]!r}: if "
            f"so, give --data.separator {shlex.quote(sign)}"
            for sign, value in _composed(self.counts(labels)).items()
        ]

    def names_of(self, label: Label) -> tuple[str, ...]:
        """Return the class or the labels of a sample; none for numbers and masks."""
        if self.kind == "masks":
            return ()
        if isinstance(label, str):
            return (label,)
        return tuple(name for name in label if isinstance(name, str))

    def counts(self, labels: Iterable[Label]) -> Counter[str]:
        """Return the number of samples with each class or label."""
        return Counter(name for label in labels for name in self.names_of(label))

    def names(self, labels: Iterable[Label], in_order: Callable[[list[str]], list[str]]) -> list[str]:
        """Return the names of the classes, labels or numbers: the columns, or what the labels have, in an order."""
        return in_order([*self.counts(labels)]) if self.wanted else self.columns

    def split(
        self, keys: Sequence[str], labels: Sequence[Label], groups: Sequence[str] | None, shares: Mapping[Part, float]
    ) -> list[Part]:
        """Split samples into parts with the same share of every class or label, or of samples with numbers.

        Args:
            keys, labels: name and label of each sample.
            groups: group of each sample, none of which is in two parts; None for no groups.
            shares: see `split_by_class`.

        Returns:
            The part of each sample.
        """
        names = [self.names_of(label) or ("",) for label in labels]
        if groups is not None:
            return split_by_group(names, groups, shares)
        counts, alike = self.counts(labels), Counter(names)
        # Samples with the same labels are a class. Where these are few, all that have the same rarest label are one.
        classes = [
            "\0".join(some if alike[some] >= ENOUGH_ALIKE else [min(some, key=lambda name: (counts[name], name))])
            for some in names
        ]
        return split_by_class(keys, classes, shares)

    def tensor(self, labels: Sequence[Label], names: Sequence[str]) -> Tensor:
        """Return the labels as a data set has them, see `LabeledData`, given the names of the classes or labels."""
        if self.kind == "numbers":
            return torch.tensor(labels, dtype=torch.float32).view(len(labels), len(self.columns))
        places = {name: place for place, name in enumerate(names)}
        if self.kind == "class":
            return torch.tensor([places[name] for label in labels for name in self.names_of(label)])
        found = [(row, places[name]) for row, label in enumerate(labels) for name in self.names_of(label)]
        tensor = torch.zeros(len(labels), len(names))
        if found:
            tensor[tuple(torch.tensor(found).unbind(1))] = 1
        return tensor


def target_of(
    label: str,
    separator: str | None,
    labels: list[str] | None,
    numbers: list[str] | None,
    class_names: list[str] | None,
    balance: bool,
) -> Target:
    """Return the target that options of own data choose, see `OwnFiles`.

    Raises:
        ValueError: the options do not fit each other.
    """
    given = {"separator": separator, "labels": labels, "numbers": numbers}
    if len(several := [name for name, value in given.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(several)} are different targets: set one of them")
    if separator == "":
        raise ValueError("separator must be a text that is not empty, such as '|'")
    for name, columns in (("labels", labels), ("numbers", numbers)):
        if len(set(columns or ())) < len(columns or ()):
            raise ValueError(f"{name} must be different columns, got {columns!r}")
    if labels is not None and len(labels) == 1:
        raise ValueError(f"labels must be two or more columns, got {labels!r}: for one of yes and no set label to it")
    if numbers is not None:
        target = Target("numbers", numbers, None, "data.numbers")
    elif labels is not None:
        target = Target("labels", labels, None, "data.labels")
    else:
        target = Target("class" if separator is None else "labels", [label], separator, "data.label")
    if balance and target.kind != "class":
        raise ValueError(f"balance is for one class per sample, and the target is {target.kind}: set it to false")
    if class_names is not None and not target.wanted:
        if class_names != target.columns:
            raise ValueError(
                f"class_names must be those of {target.option}, {target.columns!r}, got {class_names!r}: set it to null"
            )
    elif class_names is not None:
        if not all(isinstance(name, str) and name for name in class_names):
            raise ValueError(f"class_names must be texts that are not empty, got {class_names!r}")
        if len(set(class_names)) < max(2, len(class_names)):
            raise ValueError(f"class_names must be two or more different names, got {class_names!r}")
    return target


def _number(column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST:
        raise ValueError(f"{column} is {_shown(text)}: write a number such as 12.5")
    return number


def _shown(value: str) -> str:
    return repr(value[:40]) if value else "empty"


def _composed(names: Iterable[str]) -> dict[str, str]:
    """Return a name that looks like several labels, by their separator; empty if there seems to be none. Most names
    with a separator then have parts that other names have too."""
    for sign in SEPARATORS:
        parts = {name: {part.strip() for part in name.split(sign)} for name in names}
        counts = Counter(part for of_name in parts.values() for part in of_name)
        several = [name for name in parts if sign in name]
        composed = [name for name in several if all(counts[x] > 1 for x in parts[name])]
        if composed and 2 * len(composed) >= len(several):
            return {sign: composed[0]}
    return {}
