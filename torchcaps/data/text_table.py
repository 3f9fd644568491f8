"""Labeled texts of one's own, in a table."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchcaps.data.files import DataError
from torchcaps.data.notes import MOST_BAD, listed, say
from torchcaps.data.splits import (
    ANEW,
    HASH,
    LEAST_TO_SPLIT,
    NONE,
    OF_STAGE,
    PART,
    PART_WORDS,
    TABLE,
    Part,
    check_groups,
    check_shares,
    digest,
    doubts_of_columns,
    packed,
    read_split,
    say_groups,
)
from torchcaps.data.table import read_table
from torchcaps.data.targets import Label, target_of
from torchcaps.data.texts import TextData
from torchcaps.utils.arguments import Fraction, checked
from torchcaps.utils.checks import check_choice, counted, nearest
from torchcaps.utils.files import write_csv_whole


class Sample(NamedTuple):
    """A row of a table: a text, its class or its labels, and where it stands."""

    text: str
    label: Label
    file: str
    line: int
    group: str = ""

    @property
    def key(self) -> str:
        """The text with single spaces; samples are equal if their keys are."""
        return " ".join(self.text.split())

    @property
    def digest(self) -> bytes:
        """The name of the sample in a split: rows may be moved, added and deleted."""
        return digest(f"{self.group}\0{self.key}" if self.group else self.key)

    @property
    def words(self) -> str:
        """The words of the text in lower case; texts with the same words are near copies."""
        return " ".join(re.findall(r"\w+", self.text.casefold())) or self.key


class TextTable(TextData):
    """Labeled texts of one's own, in a table: CSV, TSV or JSON lines, see `torchcaps.data.table.read_table`.

        text,label
        "A film, and a good one.",positive
        Never again.,negative

    Parts without a file of their own are split off the file, the same share of every class, by a split that depends on
    the texts and labels alone. Texts with the same words are in one part, and with `group` all texts of a group, such
    as a patient; see `split_by_group`. A class of one or two texts has all of them in training.
    `write_split` writes the split down, by hashes of the texts, and `split` reads it again; every checkpoint of
    `torchcaps train` holds it. Texts of more tokens than the encoder takes are cut.

    Args:
        file: the table. It is read when it is needed, not before.
        text, label: names of the columns with the texts and with their classes.
        separator, labels: for texts that may have any number of labels, see `OwnFiles`; None for one class.
        group: name of a column with the groups of the texts, which are not divided between parts; "none" for no groups;
            with None a line says if a column seems to have some.
        columns: names of the columns of tables without a header line, see `read_table`; None if they have one.
        val_file, test_file: tables with the same columns for validation and test; None to split them off `file`.
        val_share, test_share: shares of the texts of each class for validation and test, where these have no file.
        split: file with the part of each row of `file`, as `write_split` writes it, or a checkpoint of a run; None for
            a new split. Rows that it does not have are left out.
        skip_bad: whether rows without a text, or with a label that cannot be used, are left out. Otherwise they are an
            error.
        class_names: classes or labels, in the order of the network's scores; None for those in `file`, in the order of
            numbers if all of them are numbers.
        encoder: see `TextData`.
        balance: whether an epoch of training has equally many texts of each class, see `Order`.
        options: see `TextData`.

    Raises:
        ValueError: an argument is out of range.
        DataError: in `prepare_data`, `setup`, `network_arguments` and `resolved_arguments`, if a file cannot be used;
            the one line says which line of it and why. See also `Encoder`.
    """

    truncate = True

    @checked
    def __init__(
        self,
        file: str | None = None,
        text: str = "text",
        label: str = "label",
        separator: str | None = None,
        labels: list[str] | None = None,
        group: str | None = None,
        columns: list[str] | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        val_share: Fraction = 0.1,
        test_share: Fraction = 0.1,
        split: str | None = None,
        skip_bad: bool = False,
        class_names: list[str] | None = None,
        encoder: str = "sentence-transformers/all-MiniLM-L6-v2",
        balance: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(encoder=encoder, **options)
        check_shares(val_share, test_share)
        self._target = target_of(label, separator, labels, None, class_names, balance)
        self.target, self.separator = self._target.kind, separator
        self.file, self.text, self.columns = file, text, columns
        self.group, self._may_have_groups = None if group == NONE else group, group is None
        self._doubts: list[str] = []  # about columns that seem to be groups
        self.val_file, self.test_file, self.split = val_file, test_file, split
        self.val_share, self.test_share, self.skip_bad, self.balance = val_share, test_share, skip_bad, balance
        self._class_names = class_names

    @property
    def names(self) -> list[str]:
        """Names of the classes or labels."""
        return self._names_in_data if self._class_names is None else self._class_names

    @property
    def classes(self) -> int:  # type: ignore[override]  # known only when there is a file
        return len(self.names)

    @property
    def title(self) -> str:
        return super().title if self.file is None else f"texts in {Path(self.file).name}"

    def network_arguments(self) -> dict[str, Any]:
        some, classes = self._samples[0].text, self.classes
        layers, width = self._encoder.embed([some]).sizes
        return {"classes": classes, "layers": layers, "width": width}

    def resolved_arguments(self) -> dict[str, Any]:
        return {"class_names": self.names}

    def prepare_data(self) -> None:
        for stage in OF_STAGE:
            self.read(stage)  # a wrong label in the test part is said before the training
        self._say_what_is_doubtful()

    @property
    def _validates(self) -> bool:
        return bool(self.parts["val"])

    def read(self, stage: str) -> tuple[list[str], Tensor]:
        names, samples = self.names, self.parts[OF_STAGE[stage]]
        known, names_of = set(names), self._target.names_of
        wrong = [(sample, name) for sample in samples for name in names_of(sample.label) if name not in known]
        if wrong:
            first, label = wrong[0]
            others = dict.fromkeys(repr(name) for _, name in wrong if name != label)
            more = f" (and {listed([*others])})" if others else ""
            raise DataError(
                f"{first.file} line {first.line}: the label {label!r}{more} is not one of the {self._target.terms}"
                f"{nearest(label, names)}"
            )
        return [sample.text for sample in samples], self._target.tensor([sample.label for sample in samples], names)

    def keys(self, stage: str) -> list[str]:
        """Return the file, the line and the text of each sample of a stage."""
        check_choice("stage", stage, OF_STAGE)
        samples = self.parts[OF_STAGE[stage]]
        chosen = [samples[i] for i in self._chosen(len(samples))]
        return [f"{sample.file} line {sample.line}: {sample.text}" for sample in chosen]

    @cached_property
    def parts(self) -> dict[Part, list[Sample]]:
        """The texts of each part: "train", "val" and "test"."""
        parts: dict[Part, list[Sample]] = {"train": [], "val": [], "test": []}
        for sample, row_part in zip(self._samples, self._split, strict=True):
            if row_part is not None:
                parts[row_part].append(sample)
        for of, file in self._own_files.items():
            parts[of] = self._read(file)
        for part in ("train", "test"):
            if not parts[part]:
                if self.split is not None:
                    advice = "choose another split"
                elif self.test_share:
                    needs = f"{LEAST_TO_SPLIT} different texts" if self.group is None else "two groups"
                    advice = f"a class needs {needs} to be split: add some"
                else:
                    advice = "set data.test_share above 0"
                test_file = ", or give a data.test_file" if part == "test" else ""
                raise DataError(f"{self.split or self.file}: has no text for the {part} part: {advice}{test_file}")
        if self.group is not None:
            groups = ((sample.group, part) for part, samples in parts.items() for sample in samples)
            advice = ANEW if self.split else "leave such rows out of one of the files"
            check_groups(groups, self.split or ", ".join([str(self.file), *self._own_files.values()]), advice)
        return parts

    @checked
    def write_split(self, folder: Path) -> Path:
        """Write `split.csv` with a hash of each text of `file` and its part; return its path."""
        return write_csv_whole(folder / TABLE, (HASH, PART), ((key.hex(), part) for key, part in self._by_hash.items()))

    def split_hashes(self) -> dict[str, Tensor]:
        return packed(self._by_hash)

    @property
    def _by_hash(self) -> dict[bytes, Part]:
        return {sample.digest: part for sample, part in zip(self._samples, self._split, strict=True) if part}

    @property
    def _own_files(self) -> dict[Part, str]:
        """The files of the parts that are not split off."""
        files: dict[Part, str | None] = {"val": self.val_file, "test": self.test_file}
        return {part: file for part, file in files.items() if file is not None}

    @cached_property
    def _samples(self) -> list[Sample]:
        """All rows of `file` that have a text and a label."""
        if self.file is None:
            raise DataError(
                "data.file is missing: give --data.file FILE, a table (CSV, TSV or JSON lines) with a column of texts "
                "and a column of labels"
            )
        return self._read(self.file)

    @cached_property
    def _names_in_data(self) -> list[str]:
        labels = [sample.label for sample in self._samples]
        self._doubts += self._target.check(labels, str(self.file), "row")
        return self._target.names(labels, _in_order)

    @cached_property
    def _split(self) -> Sequence[Part | None]:
        """The part of each row of `file`; None for rows that a given split does not have."""
        if self.split is not None:
            return self._parts_in(self._given_split, self.split)
        shares: dict[Part, float] = {"val": self.val_share, "test": self.test_share}
        for part in self._own_files:
            del shares[part]
        labels = [sample.label for sample in self._samples]
        if self.group is not None:
            return self._target.split([], labels, [sample.group for sample in self._samples], shares)
        words = [sample.words for sample in self._samples]
        of_words: dict[str, Label] = {}  # of texts with the same words the first label of the alphabet
        for text, label in zip(words, labels, strict=True):
            of_words[text] = min(label, of_words.get(text, label), key=self._target.names_of)
        parts = dict(zip(of_words, self._target.split([*of_words], [*of_words.values()], None, shares), strict=True))
        return [parts[text] for text in words]

    @cached_property
    def _given_split(self) -> dict[bytes, Part]:
        """The split that was given, by the hash of each text."""
        return {} if self.split is None else read_split(self.split)

    def _parts_in(self, split: dict[bytes, Part], name: str) -> list[Part | None]:
        parts = [split.get(sample.digest) for sample in self._samples]
        if not any(parts):
            raise DataError(
                f"{name}: has none of the texts in {self.file}: give the file and the data.group of its run, or, "
                "for texts that its network was not trained on, set data.split to null"
            )
        if gone := len(split.keys() - {sample.digest for sample in self._samples}):
            say(f"{self.file}: no longer has {counted(gone, 'text')} of the split of {name}")
        if new := [f"line {x.line}" for x, part in zip(self._samples, parts, strict=True) if part is None]:
            rows = counted(len(new), "row")
            say(f"{self.file}: left out {rows} that the split of {name} does not have: {listed(new)}")
        return parts

    def _read(self, file: str) -> list[Sample]:
        """Read the rows of a file that have a text and a label."""
        table = read_table(file, self.columns)
        wanted = {"data.text": self.text} | self._target.wanted
        table.check_columns(wanted if self.group is None else wanted | {"data.group": self.group}, "--data.columns")
        self._target.check_columns(table)
        if self._may_have_groups:
            self._doubts = self._doubts or doubts_of_columns(table, self.text, self._target.columns)
        samples, bad = [], []
        for line, values in table.rows:
            text, group = values[self.text].strip(), values[self.group].strip() if self.group is not None else ""
            try:
                for column, value in ((self.text, text), (self.group, group)):
                    if column is not None and not value:
                        raise ValueError(f"{column} is empty")
                samples.append(Sample(text, self._target.read(values), file, line, group))
            except ValueError as error:
                bad.append(f"line {line}: {error}")
        if bad and not self.skip_bad:
            raise DataError(
                f"{file} {listed(bad, MOST_BAD)}: mend such rows, or leave them out by --data.skip_bad true"
            )
        if bad:
            say(f"{file}: left out {counted(len(bad), 'row')}: {listed(bad, MOST_BAD)}")
        if not samples:
            raise DataError(f"{file}: no row has a text and a label")
        return samples

    def _say_what_is_doubtful(self) -> None:
        """Say which classes are too small to be split or seem to be one, and which texts are there more than once."""
        texts = {part: {digest(sample.key) for sample in samples} for part, samples in self.parts.items()}
        words = {part: {digest(sample.words) for sample in samples} for part, samples in self.parts.items()}
        for key, part in self._given_split.items():
            texts[part].add(key)  # also what is no longer there, if there are no groups
        pairs: list[tuple[Part, Part]] = [("val", "train"), ("test", "train"), ("test", "val")]
        for part, other in pairs:
            file, samples = self._own_files.get(part, self.file), self.parts[part]
            count = counted(len(samples), f"{PART_WORDS[part]} text")
            new = [sample for sample in samples if digest(sample.key) not in texts[other]]
            if len(new) < len(samples):
                say(f"{file}: {PART_WORDS[other]} has {len(samples) - len(new)} of its {count} too")
            if near := [sample for sample in new if digest(sample.words) in words[other]]:
                line = near[0].line
                say(f"{file}: {PART_WORDS[other]} has near copies of {len(near)} of its {count}, such as line {line}")
        if self.split is None:
            for doubt in self._doubts:
                say(doubt)
        target, terms = self._target, self._target.terms
        if self.group is not None:
            rows = [(target.names_of(x.label), x.group, part) for part, samples in self.parts.items() for x in samples]
            say_groups(str(self.file), "text", terms, *zip(*rows, strict=True))
        alike: dict[float | str, list[str]] = {}
        for name in self.names:
            alike.setdefault(_plain(name), []).append(name)
        if twice := [" and ".join(map(repr, names)) for names in alike.values() if len(names) > 1]:
            say(f"{self.file}: labels that differ in spelling alone are {terms} of their own: {listed(twice)}")
        labels: dict[str, set[Label]] = {}
        for sample in self._samples:
            labels.setdefault(sample.key, set()).add(sample.label)
        if several := [text for text, names in labels.items() if len(names) > 1]:
            say(f"{self.file}: has {counted(len(several), 'text')} with different labels, such as {several[0][:60]!r}")
        counts = Counter(name for of_text in labels.values() for name in target.counts(of_text))
        small = [f"{name} ({counts[name]})" for name in self.names if counts[name] < LEAST_TO_SPLIT]
        if small and self.split is None and len(self._own_files) < 2:
            say(f"{self.file}: {terms} with too few texts to be split are in training only: {listed(small)}")


def _plain(name: str) -> float | str:
    """Return a label without its spelling: the number that it is, or its letters in lower case."""
    with suppress(ValueError):
        if math.isfinite(number := float(name)):
            return number
    return name.casefold()


def _in_order(names: list[str]) -> list[str]:
    """Return labels in the order of numbers if all of them are numbers, else in that of the alphabet."""
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return sorted(names)
    if not all(map(math.isfinite, numbers)):
        return sorted(names)
    return [name for _, name in sorted(zip(numbers, names, strict=True))]
