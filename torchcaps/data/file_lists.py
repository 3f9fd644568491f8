"""Which files of one's own there are, with their classes and groups: in a folder for each class, or in a table."""

import os
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from torchcaps.data.files import DataError
from torchcaps.data.notes import MOST_BAD, listed, say
from torchcaps.data.splits import NONE, Part, doubts_of_columns
from torchcaps.data.table import read_table
from torchcaps.data.targets import Label, Target
from torchcaps.utils.checks import counted, nearest
from torchcaps.utils.files import user_path

FOLDERS: dict[str, Part] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Folders of Synology and QNAP servers, of macOS, Windows and Linux.
OF_SYSTEMS = (
    *("@eaDir", "#recycle", "@Recycle", "@__thumb", "__MACOSX"),
    *("$RECYCLE.BIN", "System Volume Information", "lost+found"),
)
RECIPES = ("own/images", "own/numbers", "own/arrays", "own/masks")  # whose runs lie in folders of these names
FOLDER = "folder"  # value of `group`
IMAGES, MASKS = "images", "masks"  # folders of pictures and their masks
MASK_ENDINGS = ("", "_mask", "_label", "_seg")  # behind the name of the picture
EXPECTED_MASKS = (
    f"expected a folder with {IMAGES}/NAME.png and {MASKS}/NAME.png, or with folders train, val and test that "
    "have both, or that lie in both"
)
# Patterns for what names of files of one object share: all but the place of a tile, their last word, a letter behind
# a number, or a number behind another.
STEMS = (r"(.+?)[ _-]?x\d+[ _-]?y\d+", r"(.+)[ _-]", r"(.*\d)[a-zA-Z]$", r"(.*\d)\D+\d+$")


class FileKind(NamedTuple):
    """A kind of files.

    Fields:
        noun: what a file is called, such as "picture"; also the option of the table's column.
        suffixes: endings of such files, in lower case.
        has_masks: whether they lie beside their masks.
    """

    noun: str
    suffixes: tuple[str, ...]
    has_masks: bool = False

    @property
    def expected_folders(self) -> str:
        if self.has_masks:
            return EXPECTED_MASKS
        return f"expected a folder with a folder of {self.noun}s for each class"


class FileList(NamedTuple):
    """Files that were found.

    Fields:
        labels: the class, the labels or the numbers of each file, or the path of its mask, by its path in the folder.
        parts: the part in whose folder it lies; empty if the folder has no folders of parts.
        groups: its group, such as a patient; empty if there are no groups.
        others: paths of files of another kind.
        beside: paths of what lies in no folder of a class, or in no row of the table.
        doubts: lines about files that seem to belong together although there are no groups, or about classes that
            seem to be something else.
    """

    labels: dict[str, Label]
    parts: dict[str, Part]
    groups: dict[str, str]
    others: list[str]
    beside: list[str]
    doubts: list[str]


def files_in_folders(folder: Path, kind: FileKind, group: str | None = None) -> FileList:
    """Find the files of a folder that has a folder for each class, perhaps within folders of parts.

    Args:
        folder: the folder.
        kind: kind of the files.
        group: see `OwnFiles`.

    Raises:
        DataError: there is no such folder, or its folders are no classes and parts.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: {kind.expected_folders}")
    places = _folders_of_parts(folder, kind.noun)

    def inside(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    classes: dict[str, str] = {}
    parts: dict[str, Part] = {}
    in_class: dict[str, PurePath] = {}  # paths in the folder of the class
    others: list[str] = []
    empty: list[str] = []
    for place in places or [folder]:
        for home in _folders(place):
            files, rest = find_files(home, kind.suffixes)
            others += map(inside, rest)
            if not files:
                empty.append(inside(home))
            for path in files:
                classes[inside(path)] = home.name
                in_class[inside(path)] = path.relative_to(home)
                if places:
                    parts[inside(path)] = FOLDERS[place.name.lower()]
    if empty:
        raise DataError(
            f"{folder}: there are no {kind.noun}s in {listed(empty)}: expected files that end in "
            f"{', '.join(kind.suffixes)}"
        )
    _check_classes(folder, kind, classes, parts, [place.name for place in places])
    beside = [path for path in _folders(folder) if path not in places] if places else []
    for place in {folder, *places}:
        beside += (path for path in place.iterdir() if path.suffix.lower() in kind.suffixes and path.is_file())
    left_out = sorted(inside(path) for path in beside if not path.name.startswith("."))
    groups = _groups_of(in_class, kind.noun, group, folder)
    doubts = _doubts_of_classes(folder, in_class, classes)
    if group is None:
        doubts += _doubts(folder, kind.noun, in_class, classes, parts)
    return FileList({**classes}, parts, groups, others, left_out, doubts)


def files_with_masks(folder: Path, kind: FileKind, group: str | None = None, skip_bad: bool = False) -> FileList:
    """Find the pictures in a folder `images`, and the mask of each in a folder `masks`. Folders of parts
    may have both, or lie in both.

    Args:
        folder: the folder of both.
        kind: kind of the files.
        group: see `OwnFiles`.
        skip_bad: whether pictures without a mask are left out. Otherwise they are an error.

    Raises:
        DataError: there are no such folders, or names in them do not fit together.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: {EXPECTED_MASKS}")
    homes = _folders_of_parts(folder, kind.noun)
    labels: dict[str, Label] = {}
    parts: dict[str, Part] = {}
    in_images: dict[str, PurePath] = {}  # paths in the folder of the pictures
    others: list[str] = []
    without: list[str] = []  # pictures without a mask
    alone: list[str] = []  # masks without a picture

    def inside(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    for home in homes or [folder]:
        pictures, masks = (_by_stem(home, name, kind, others, folder) for name in (IMAGES, MASKS))
        by_ending = [
            {stem.removesuffix(ending): path for stem, path in masks.items() if stem.endswith(ending)}
            for ending in MASK_ENDINGS
        ]
        called = max(by_ending, key=lambda named: len(pictures.keys() & named.keys()))
        for stem, path in pictures.items():
            if stem not in called:
                without.append(inside(path))
                continue
            labels[inside(path)] = inside(called[stem])
            in_images[inside(path)] = PurePath(stem)
            if homes:
                parts[inside(path)] = FOLDERS[home.name.lower()]
        alone += [inside(path) for stem, path in called.items() if stem not in pictures]
    if without and not (skip_bad and labels):
        raise DataError(
            f"{folder}: {counted(len(without), kind.noun)} without a mask: {listed(without, MOST_BAD)}: a mask has the "
            f"name of its {kind.noun}, perhaps with {', '.join(MASK_ENDINGS[1:])} behind it: add the masks, or leave "
            f"such {kind.noun}s out by --data.skip_bad true"
        )
    for paths, noun, lacks in ((without, kind.noun, "a mask"), (alone, "mask", f"a {kind.noun}")):
        if paths:
            say(f"{folder}: left out {counted(len(paths), noun)} without {lacks}: {listed(paths, MOST_BAD)}")
    first_folders = {inside.parent.parts[0].lower() if inside.parent.parts else "" for inside in in_images.values()}
    if not homes and first_folders <= FOLDERS.keys():
        _folders_of_parts(folder / PurePath(next(iter(labels))).parts[0], kind.noun)
        for name, inside_images in in_images.items():
            parts[name] = FOLDERS[inside_images.parts[0].lower()]
            in_images[name] = PurePath(*inside_images.parts[1:])
    groups = _groups_of(in_images, kind.noun, group, folder)
    doubts = [] if group else _doubts(folder, kind.noun, in_images, dict.fromkeys(labels, ""), parts)
    return FileList(labels, parts, groups, others, [], doubts)


def _by_stem(home: Path, name: str, kind: FileKind, others: list[str], folder: Path) -> dict[str, Path]:
    """Return the pictures in the folder of this name, by their paths in it without endings. Add other files to
    `others`."""
    place = next((path for path in _folders(home) if path.name.lower() == name), None)
    files, rest = find_files(place, kind.suffixes) if place is not None else ([], [])
    if place is None or not files:
        lacks = f"there is no folder {name} in it" if place is None else f"there are no {kind.noun}s in {place.name}"
        raise DataError(f"{home}: {lacks}: {EXPECTED_MASKS}")
    others += [path.relative_to(folder).as_posix() for path in rest]
    by_stem: dict[str, Path] = {}
    for path in files:
        stem = as_key(path.relative_to(place).with_suffix("").as_posix())
        if (first := by_stem.setdefault(stem, path)) != path:
            raise DataError(f"{path}: {first.name} has the same name: keep one, since a {kind.noun} has one mask")
    return by_stem


def files_in_table(
    folder: Path,
    kind: FileKind,
    name: str,
    file: str,
    target: Target,
    columns: list[str] | None = None,
    group: str | None = None,
    skip_bad: bool = False,
) -> FileList:
    """Find the files of a folder that a table names.

    Args:
        folder: the folder; files may lie in further folders within it.
        kind: kind of the files.
        name: path of the table.
        file: name of its column with the files.
        target: what else it has of each file.
        columns: names of all columns of a table without a header line; None if it has one.
        group: see `OwnFiles`.
        skip_bad: whether rows whose file is not there or whose label cannot be used are left out. Otherwise they are
            an error.

    Raises:
        DataError: the table cannot be used; the one line says which line of it and why.
    """
    noun = kind.noun
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: expected the folder of the {noun}s that {name} names")
    table = read_table(name, columns)
    table.check_columns({f"data.{noun}": file} | target.wanted, "--data.columns")
    target.check_columns(table)
    files, others = find_files(folder, kind.suffixes)
    by_name = files_by_name(folder, files)

    def path_of(text: str) -> str:
        if not text:
            raise ValueError(f"{file} is empty")
        if (path := file_called(text, by_name, user_path(name).parent)) is None:
            if {as_key(text), PurePath(as_key(text)).stem} & by_name.keys():
                raise ValueError(f"several {noun}s are called {text[:100]!r}: give the path in the folder")
            raise ValueError(f"no {noun} is called {text[:100]!r}")
        return path.relative_to(folder).as_posix()

    labels: dict[str, Label] = {}
    lines: dict[str, int] = {}  # where each file stands first
    rows: list[tuple[str, dict[str, str], int]] = []
    bad: list[str] = []
    is_named = False  # whether a row names a file
    for line, values in table.rows:
        try:
            key = path_of(values[file].strip())
            is_named = True
            label = target.read(values)
        except ValueError as error:
            bad.append(f"line {line}: {error}")
            continue
        if (first := labels.setdefault(key, label)) != label:
            if target.kind == "class":
                differs = f"is {label!r}, and {first!r} in line {lines[key]}: give each {noun} one class"
            else:
                differs = f"has other {target.kind} in line {lines[key]}: give each {noun} one row with all of them"
            raise DataError(f"{name} line {line}: {values[file].strip()} {differs}")
        lines.setdefault(key, line)
        rows.append((key, values, line))
    if not is_named:
        raise DataError(
            f"{name}: names no {noun} in {folder} by its column {file!r} ({bad[0]}): set data.{noun} to the "
            "column of the files, or data.folder to their folder"
        )
    if bad and not (skip_bad and labels):
        or_left_out = ", or leave them out by --data.skip_bad true" if labels else ""
        doubts = target.doubts([*labels.values()], name)  # an empty value may be no label
        raise DataError("; ".join([*doubts, f"{name} {listed(bad, MOST_BAD)}: mend such rows{or_left_out}"]))
    if bad:
        say(f"{name}: left out {counted(len(bad), 'row')}: {listed(bad, MOST_BAD)}")
    doubts = target.check([*labels.values()], name, noun)
    paths = (path.relative_to(folder).as_posix() for path in files)
    beside = [path for path in paths if path not in labels]
    inside: dict[str, PurePath] = {path: PurePath(path) for path in labels}
    if group in table.columns:
        groups: dict[str, str] = {}
        for key, values, line in rows:
            if groups.setdefault(key, values[group].strip()) != values[group].strip():
                raise DataError(
                    f"{name} line {line}: the {noun} {values[file]} has another {group} in line {lines[key]}: give "
                    "it one"
                )
        if empty := [f"line {lines[path]}" for path, value in groups.items() if not value]:
            raise DataError(f"{name} {listed(empty, MOST_BAD)}: {group} is empty: fill it in")
        _check_groups(folder, noun, groups, group)
    else:
        groups = _groups_of(inside, noun, group, folder, table.columns)
    if group is None:
        alike = {path: " ".join(target.names_of(label)) for path, label in labels.items()}
        doubts += doubts_of_columns(table, file, target.columns) or _doubts(folder, noun, inside, alike, {})
    table_file = user_path(name).resolve()
    rest = [path.relative_to(folder).as_posix() for path in others if path.resolve() != table_file]
    return FileList(labels, {}, groups, rest, beside, doubts)


def find_files(folder: Path, suffixes: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the files with some endings in a folder and in those below it, and the other files. Links to folders are
    followed, each folder once. What is hidden is left out.

    Raises:
        DataError: the path of such a file is not UTF-8, so that no table can name it.
    """
    found: list[Path] = []
    others: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not is_hidden(name)]
        folders.sort(key=lambda name: (os.path.islink(os.path.join(place, name)), name))  # links last: names stay
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if path.is_file():
                (found if path.suffix.lower() in suffixes else others).append(path)
    for path in found:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(f"{str(path)!r}: the name is not text in UTF-8: rename the file or its folder") from None
    return sorted(found), sorted(others)


def is_hidden(folder: str) -> bool:
    """Return whether a folder of this name is one of a system: hidden, of a Synology or QNAP server, or of macOS."""
    return folder.startswith(".") or folder in OF_SYSTEMS


def files_by_name(folder: Path, files: Sequence[Path]) -> dict[str, Path | None]:
    """Return files by the names that a table may give them: the whole path, the path in the folder, the name of the
    file, and both without the ending. A name that several files have leads to None."""
    ways: list[Callable[[Path], str]] = [
        lambda path: os.path.abspath(path),
        lambda path: path.relative_to(folder).as_posix(),
        lambda path: path.relative_to(folder).with_suffix("").as_posix(),
        lambda path: path.name,
        lambda path: path.stem,
    ]
    by_name: dict[str, Path | None] = {}
    for way in ways:  # the first ones take precedence
        new: dict[str, Path | None] = {}
        for path in files:
            name = as_key(way(path))
            new[name] = None if name in new else path
        by_name = new | by_name
    return by_name


def file_called(name: str, by_name: Mapping[str, Path | None], table: Path) -> Path | None:
    """Return the one file that a table means by a name, which may also be a path from the folder of the table, a
    path on another machine, or have another ending; None if there is none."""
    key = as_key(name)
    if (path := by_name.get(key)) is not None:  # as most names are
        return path
    others = (as_key(os.path.abspath(table / key)), PurePath(key).name, PurePath(key).stem)
    return next((path for way in others if (path := by_name.get(way)) is not None), None)


def as_key(name: str) -> str:
    """Return a name as `files_by_name` has it: separators may be those of Windows, and letters those of macOS."""
    return unicodedata.normalize("NFC", PurePath(name.replace("\\", "/")).as_posix())


def _folders_of_parts(folder: Path, noun: str) -> list[Path]:
    """Return the folders of parts: train, and perhaps val and test; none if the classes lie in the folder."""
    folders = [path for path in _folders(folder) if path.name.lower() in FOLDERS]
    by_part = Counter(FOLDERS[path.name.lower()] for path in folders)
    if folders and not by_part["train"]:
        raise DataError(
            f"{folder}: has {listed([path.name for path in folders])}, and no folder train: add one with the training "
            f"{noun}s, or rename the folder if it is a class"
        )
    for part, count in by_part.items():
        if count > 1:
            raise DataError(f"{folder}: has {count} folders for the part {part!r}: expected one")
    return folders


def _folders(place: Path) -> list[Path]:
    """Return the folders in a place, without hidden ones and without runs of such recipes, which have figures."""
    inside = (path for path in place.iterdir() if path.is_dir() and not is_hidden(path.name))
    return sorted(path for path in inside if not any((path / recipe).is_dir() for recipe in RECIPES))


def _check_classes(
    folder: Path, kind: FileKind, classes: Mapping[str, str], parts: Mapping[str, Part], in_parts: list[str]
) -> None:
    """Check that there are two or more classes, all of them in training."""
    trained = {name for path, name in classes.items() if parts.get(path, "train") == "train"}
    if unknown := {name: path for path, name in classes.items() if name not in trained}:
        name, file = next(iter(unknown.items()))
        more = f" (and none of {listed(others)})" if (others := [*unknown][1:]) else ""
        raise DataError(f"{folder / file}: there is no class {name!r} in training{more}{nearest(name, trained)}")
    if len(trained) < 2:
        a_part = f"; {listed(in_parts)} was taken for a part: rename it if it is a class" if in_parts else ""
        raise DataError(
            f"{folder}: has {kind.noun}s of {counted(len(trained), 'class', 'classes')}, two or more are needed: "
            f"{kind.expected_folders}{a_part}{_hint_of_table(folder)}"
        )


def _hint_of_table(folder: Path) -> str:
    tables = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in (".csv", ".tsv", ".jsonl"))
    return f", or a table of the classes: --data.table {shlex.quote(str(folder / tables[0]))}" if tables else ""


def _groups_of(
    paths: Mapping[str, PurePath], noun: str, group: str | None, folder: Path, columns: Sequence[str] = ()
) -> dict[str, str]:
    """Return the group of each file.

    Args:
        paths: paths in the folder of the class, by the paths in the folder of the files.
        noun: what a file is called.
        group: see `OwnFiles`; no column.
        folder: folder of the files.
        columns: columns of the table that names the files.
    """
    if group is None or group == NONE:
        return {}
    of_table = [f"a column of the table ({listed([*columns], 20)})"] if columns else []
    others = ", ".join(way for way in (FOLDER, NONE, *of_table) if way != group)
    try:
        brackets = 0 if group == FOLDER else re.compile(group).groups
        groups = {path: group_name for path, inside in paths.items() if (group_name := _group_of(inside, group))}
    except re.error as error:
        raise DataError(
            f"data.group {group!r} is no pattern ({error}): expected {others} or a regular expression"
        ) from None
    if brackets > 1:
        raise DataError(
            f"data.group {group!r} has {brackets} pairs of brackets: keep one, around the name of the group, and begin "
            "the others with (?:"
        )
    if not groups:
        where = "there are no folders in those of the classes" if group == FOLDER else "no name of a file has it"
        raise DataError(f"{folder}: data.group is {group!r}, and {where}: set it to {others} or a regular expression")
    if alone := [path for path in paths if path not in groups]:
        say(f"{folder}: without a group, and so a group of its own: {listed(alone)}")
    groups |= {path: path for path in alone}
    _check_groups(folder, noun, groups, group)
    return groups


def _group_of(inside: PurePath, group: str) -> str | None:
    """Return the group of a file by its path in the folder of its class: what the pattern's brackets match in the
    name without its ending, or the first folder."""
    if group == FOLDER:
        return inside.parts[0] if len(inside.parts) > 1 else None
    match = re.search(group, inside.stem)
    return match and match[match.lastindex or 0]


def _check_groups(folder: Path, noun: str, groups: Mapping[str, str], group: str) -> None:
    if len(names := set(groups.values())) < 2:
        raise DataError(f"{folder}: by data.group {group!r} all {noun}s are of one group, {names.pop()!r}: set another")


def _doubts(
    folder: Path, noun: str, paths: Mapping[str, PurePath], classes: Mapping[str, str], parts: Mapping[str, Part]
) -> list[str]:
    """Return a line if files of a class seem to show the same patients or objects, by their folders or names. If
    there are folders of parts, these must have some in common."""
    for group in (FOLDER, *STEMS):
        members: dict[tuple[str, str], list[str]] = {}
        for path, inside in paths.items():
            if group_name := _group_of(inside, group):
                members.setdefault((classes[path], group_name), []).append(path)
        several = {key: of_group for key, of_group in members.items() if len(of_group) > 1}
        # A class with one such folder or stem has a name for all of its files.
        named = 2 * len({name for name, _ in several}) > len(several)
        if len(several) < 3 or named or 2 * sum(map(len, several.values())) < len(paths):
            continue
        crossing = [of for of in several.values() if not parts or len({parts[path] for path in of}) > 1]
        if not crossing:
            return []
        count = len({group_name for _, group_name in members})
        return [
            f"{folder}: {noun}s seem to belong together, such as {listed([crossing[0][0], crossing[0][-1]])}: if they "
            "show one patient or object, validation and test show what was trained on: give --data.group "
            f"{shlex.quote(group)}, which makes {count:,} groups, or a coarser pattern, or --data.group {NONE} if not"
        ]
    return []


def _doubts_of_classes(folder: Path, paths: Mapping[str, PurePath], classes: Mapping[str, str]) -> list[str]:
    """Return a line if the folders of the classes seem to be patients, each with folders of the classes."""
    inner: dict[str, set[str]] = {}
    for path, inside in paths.items():
        if len(inside.parts) > 1:
            inner.setdefault(inside.parts[0], set()).add(classes[path])
    count = len(set(classes.values()))
    if len(inner) < 2 or count < 2 * len(inner) or min(map(len, inner.values())) < 2:
        return []
    return [
        f"{folder}: {count} classes have the same folders, {listed(sorted(inner))}: if these are the classes, give "
        "each a folder, with those of the patients in it"
    ]
