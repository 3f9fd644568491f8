"""Base of data in files of one's own, in a folder for each class or named by a table: classes, parts, groups."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps.data.file_lists import FileKind, FileList, files_in_folders, files_in_table
from torchcaps.data.files import DataError
from torchcaps.data.labeled import LabeledData, LabeledSet
from torchcaps.data.notes import MOST_BAD, listed, say, together
from torchcaps.data.splits import (
    ANEW,
    FILE,
    OF_STAGE,
    PART,
    TABLE,
    Part,
    check_groups,
    check_shares,
    digest,
    packed,
    read_split,
    say_groups,
)
from torchcaps.data.targets import Label, target_of
from torchcaps.utils.arguments import Count, CountOrZero, Fraction, checked
from torchcaps.utils.checks import counted
from torchcaps.utils.files import user_path, write_csv_whole

MOVING = ("shift", "flip", "rotate", "zoom")  # augmentations that change places, angles or sizes


class OwnFiles(LabeledData):
    """Base of data in files of one's own, in a folder for each class, or in one folder beside a table.

    Files lie in one of these ways:

        <folder>/<class>/<any file>
        <folder>/train/<class>/<any file>    or with folders train (or training), val (or valid, validation, dev, eval)
                                             and test (or testing), in upper or lower case
        <folder>/<any file>                  and `table`, a CSV with a column of names and a column of classes

    Files may lie in further folders within that of their class. They are read when a batch needs them, so any number of
    them will do. Links to folders are followed. Hidden files and folders, those of servers (`@eaDir`), and files with
    other endings are left out.

    Without a folder `val` or `test`, the part is split off the training files, the same share of every class or label,
    by a split that depends on their names and labels alone; files with numbers are split by their names alone.
    `write_split` writes the split down, and `split` reads it again. Every checkpoint of `torchcaps train` holds it, by
    hashes of the names. A class of one or two files has all of them in training. With `group`, no group is in two
    parts; see `split_by_group`.

    A subclass sets `kind` and `file_column`, and defines `_errors` and `_samples`.

    Args:
        folder: folder of the files.
        table: table that names the files and their classes, see `torchcaps.data.table.read_table`; None for a folder
            of each class. It names a file by its path in `folder` or by its name, with or without the ending.
        label: name of its column with the classes.
        separator: what stands between labels in that column, such as "|" in "cat|dog", if a file may have any number of
            labels; a file with an empty value has none. None for one class.
        labels: names of columns, one for each label, with 1 or 0 (or true or false, yes or no) in each row; for files
            that may have any number of labels. None for one class.
        numbers: names of columns with numbers to predict; None for one class.
        columns: names of all of its columns if it has no header line; None if it has one.
        group: what files of one group, such as a patient, have in common: "folder", the first folder within that of
            the class; a column of the table; or a regular expression, what it matches in the name of the file without
            its ending, or what its brackets match. "none" for no groups; with None a line says if there seem to be
            some.
        val_share, test_share: shares of the files of each class for validation and test.
        split: file with the parts of all files, as `write_split` writes it, or a checkpoint of a run; None for a new
            split. Files that it does not have are left out.
        skip_bad: whether files that cannot be read are left out. Otherwise they are an error.
        class_names: names of the classes or labels; None for those of the folders or of the table.
        batch_size: samples in a batch.
        num_workers: worker processes of each loader.
        shuffle_labels: whether to shuffle the training labels and the validation labels, see `LabeledData`.
        balance: whether an epoch of training has equally many samples of each class, see `Order`.

    Raises:
        ValueError: an argument is out of range.
        DataError: the folder, or a file in it, cannot be used; the one line says which and why. All files of a part
            are read once in `setup`, so that none stops the training later.
    """

    kind: FileKind
    file_column: str  # of the table: the names of the files
    augmentations: Sequence[str] = ()  # of the training samples

    @checked
    def __init__(
        self,
        folder: str | None = None,
        table: str | None = None,
        label: str = "label",
        separator: str | None = None,
        labels: list[str] | None = None,
        numbers: list[str] | None = None,
        columns: list[str] | None = None,
        group: str | None = None,
        val_share: Fraction = 0.15,
        test_share: Fraction = 0.15,
        split: str | None = None,
        skip_bad: bool = False,
        class_names: list[str] | None = None,
        batch_size: Count = 32,
        num_workers: CountOrZero = 2,
        shuffle_labels: bool = False,
        balance: bool = False,
    ) -> None:
        self.folder, self.split, self.skip_bad, self.balance = folder, split, skip_bad, balance
        self.table, self.columns, self.group = table, columns, group
        self.val_share, self.test_share = val_share, test_share
        check_shares(val_share, test_share)
        self._target = target_of(label, separator, labels, numbers, class_names, balance)
        self.target, self.separator = self._target.kind, separator
        self._class_names = class_names
        self._error_of: dict[str, str] = {}  # by the paths of the files that were read, "" without one
        super().__init__(batch_size=batch_size, num_workers=num_workers, shuffle_labels=shuffle_labels)

    @property
    def names(self) -> list[str]:
        """Names of the classes, labels or numbers."""
        return self._names_in_data if self._class_names is None else self._class_names

    @property
    def classes(self) -> int:  # type: ignore[override]  # known only when the folder exists
        return len(self.names)

    @property
    def title(self) -> str:
        return super().title if self.folder is None else f"{self.kind.noun}s in {Path(self.folder).name or self.folder}"

    def network_arguments(self) -> dict[str, Any]:
        return {"numbers" if self.target == "numbers" else "classes": self.classes}

    def resolved_arguments(self) -> dict[str, Any]:
        return {"class_names": self.names}

    def prepare_data(self) -> None:
        """Say which files were not taken, which groups there are, and which classes are small."""
        files, noun = self._listed, self.kind.noun
        moving = [name for name in self.augmentations if name in MOVING]
        if self.target == "numbers" and moving:
            say(
                f"data.augmentations has {listed(moving)}, which may change what the numbers measure: then leave it out"
            )
        if files.beside:
            place = "row of the table" if self.table else "folder of a class"
            say(f"left out what lies in no {place}: {listed(files.beside)}")
        if files.others:
            say(f"left out {counted(len(files.others), 'file')} beside the {noun}s: {listed(files.others)}")
        if self.split is None:
            for doubt in files.doubts:
                say(doubt)
        target, paths = self._target, [*self.parts]
        if groups := files.groups:
            of_files = [target.names_of(self._files[path]) for path in paths]
            say_groups(
                str(self.folder), noun, target.terms, of_files, [groups[x] for x in paths], [*self.parts.values()]
            )
        trained, tested = (
            target.counts(self._files[path] for path in paths if self.parts[path] == part) for part in ("train", "test")
        )
        names = self.names if self.target in ("class", "labels") else []
        if self.target == "labels" and (unknown := [name for name in names if name not in trained]):
            say(f"labels that no training {noun} has, so that a network cannot learn them: {listed(unknown)}")
        if alone := [f"{name} ({trained[name]})" for name in names if name not in tested]:
            few = f"{noun}s or groups" if files.groups else f"{noun}s"
            why = "are not in the test part" if files.parts or self.split else f"have too few {few} to be tested"
            say(f"{target.terms} that {why}: {listed(alone)}")

    setup = LabeledData.setup  # `parts` says which files belong to a stage

    @property
    def _validates(self) -> bool:
        return "val" in self.parts.values()

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The part of each file, by its path in the folder: "train", "val" or "test"."""
        files, noun = self._files, self.kind.noun
        if self.split is not None:
            split = read_split(self.split)
            parts = {path: split[key] for path in files if (key := digest(path)) in split}
            if not parts:
                raise DataError(
                    f"{self.split}: has none of the {noun}s in {self.folder}: give the folder of its run, or, for "
                    f"{noun}s that its network was not trained on, set data.split to null"
                )
            if gone := len(split) - len(parts):
                say(f"{self.folder}: no longer has {counted(gone, noun)} of the split of {self.split}")
            if new := [path for path in files if path not in parts]:
                say(
                    f"{self.folder}: left out {counted(len(new), noun)} that the split of {self.split} does not "
                    f"have: {listed(new)}"
                )
            if groups := self._listed.groups:
                advice = f"{ANEW}, or set data.group to none"
                check_groups(((groups[path], part) for path, part in parts.items()), self.split, advice)
            return parts
        parts = {path: self._listed.parts.get(path, "train") for path in files}
        shares: dict[Part, float] = {"val": self.val_share, "test": self.test_share}
        open_parts = {part: share for part, share in shares.items() if part not in parts.values()}
        to_split = [path for path in files if parts[path] == "train"]
        labels = [files[path] for path in to_split]
        groups = self._listed.groups
        of_groups = [groups[path] for path in to_split] if groups else None
        parts |= dict(zip(to_split, self._target.split(to_split, labels, of_groups, open_parts), strict=True))
        if groups:
            advice = f"move all {noun}s of a group into one of the folders, or set data.group to none"
            check_groups(((groups[path], part) for path, part in parts.items()), self._folder, advice)
        if "test" not in parts.values():
            raise DataError(f"{self.folder}: has no {noun} to test on: {self._how_to_test()}")
        return parts

    @checked
    def write_split(self, folder: Path) -> Path:
        """Write `split.csv` with the path and the part of each file; return its path."""
        return write_csv_whole(folder / TABLE, (FILE, PART), self.parts.items())

    def split_hashes(self) -> dict[str, Tensor]:
        return packed({digest(path): part for path, part in self.parts.items()})

    @checked
    def keys(self, stage: str) -> list[str]:
        """Return the paths of the files of a stage, in the folder."""
        samples: Any = self._loaded(stage)
        return samples.names.tolist()

    def _set(self, stage: str) -> LabeledSet:
        part: Part = OF_STAGE[stage]
        for name in self._names_in_data:
            if name not in self.names:
                raise DataError(
                    f"{self.folder}: has a {self._target.term} {name!r}, which is none of {', '.join(self.names)}"
                )
        self._read(list(self.parts) if stage == "fit" else [path for path, of in self.parts.items() if of == part])
        names = self._readable(part)
        if not names:
            raise DataError(f"{self.folder}: the part {part!r} has no {self.kind.noun} that can be read")
        if part == "train":
            of_part = self._target.counts(self._files[path] for path, of in self.parts.items() if of == part)
            if lost := of_part.keys() - self._target.counts(self._files[path] for path in names):
                raise DataError(
                    f"{self.folder}: no training {self.kind.noun} of {listed(sorted(lost))} can be read: mend some, or "
                    f"remove the {self._target.term}"
                )
        return self._samples(part, names, self._target.tensor([self._files[path] for path in names], self.names))

    def _errors(self, paths: list[str]) -> list[str]:
        """Read files, given their paths in the folder; return the error of each, "" if it can be read."""
        raise NotImplementedError

    def _samples(self, part: Part, paths: list[str], labels: Tensor) -> LabeledSet:
        """Return the samples of a part, given the paths of its files, which can be read, and their labels."""
        raise NotImplementedError

    def _read(self, paths: Sequence[str]) -> None:
        """Read files that were not read before. All that cannot be read are one error, or are left out."""
        paths = [path for path in paths if path not in self._error_of]
        error_of = dict(zip(paths, self._errors(paths), strict=True))
        bad = {path: error for path, error in error_of.items() if error}
        if bad and not self.skip_bad:
            some_can = len(bad) < len(paths)
            raise DataError(together([*bad.items()]) + ", or leave such files out by --data.skip_bad true" * some_can)
        if bad:
            noun = self.kind.noun
            say(f"left out {counted(len(bad), noun)} that cannot be read: {listed(list(bad), MOST_BAD)}")
        self._error_of |= error_of

    def _readable(self, part: Part) -> list[str]:
        """Return the files of a part that were read without an error."""
        return [path for path, of in self.parts.items() if of == part and self._error_of.get(path) == ""]

    @cached_property
    def _folder(self) -> Path:
        if self.folder is None:
            raise DataError(f"data.folder is missing: give --data.folder FOLDER, {self.kind.expected_folders}")
        return user_path(self.folder)

    @cached_property
    def _listed(self) -> FileList:
        if self.table is None and self.target != "class":
            raise DataError(
                f"data.table is missing: give --data.table FILE, a table with columns of {self.kind.noun}s and "
                f"{self.target}"
            )
        if self.table is None:
            return files_in_folders(self._folder, self.kind, self.group)
        of_table = self.file_column, self._target, self.columns
        return files_in_table(self._folder, self.kind, self.table, *of_table, self.group, self.skip_bad)

    @property
    def _files(self) -> dict[str, Label]:
        """The class, the labels, the numbers or the mask of each file, by its path in the folder."""
        return self._listed.labels

    @cached_property
    def _names_in_data(self) -> list[str]:
        labels = (self._files[path] for path in self.parts)
        return self._target.names(labels, lambda names: sorted(names, key=_natural))

    def _how_to_test(self) -> str:
        if self.test_share == 0:
            return "set data.test_share above 0, or add a folder test"
        needs = "it needs" if self.target == "masks" else f"a {self._target.term} needs"
        if self._listed.groups:
            return f"{needs} two groups to be tested"
        return f"{needs} three {self.kind.noun}s to be split"


def _natural(name: str) -> tuple[int, int, str]:
    """Key that sorts names which are numbers as numbers, before all others."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
