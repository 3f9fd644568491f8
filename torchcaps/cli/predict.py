"""Predict classes, labels, numbers or masks of pictures, arrays or texts with a trained network."""

import argparse
import csv
import hashlib
import io
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout

from torchcaps.cli.arguments import add_checkpoint, add_recipe_name, find_run, positive_int
from torchcaps.utils.checks import counted, one_line, whole_number
from torchcaps.utils.files import CSVLines, make_folder, name_file_in_errors, user_path, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.data.file_lists import FileKind
    from torchcaps.runs import Run

TABLES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json")
STANDARD_INPUT = "-"
MASKS, OVERLAYS = "masks.csv", "overlays"  # in a folder of masks


class Sample(NamedTuple):
    """A sample: what names it in the output, the path of its file or its text, and where its mask is written, without
    the ending."""

    name: str
    value: str
    place: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps predict`."""
    add_recipe_name(parser)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="pictures or arrays, folders of them, or tables (.csv, .tsv, .jsonl) with a column `file`; for a network "
        "of texts: tables, or files with a text in each line; - for standard input, with a path or a text in each line",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="CSV file to write (default: standard output); of masks a folder for them, which is needed",
    )
    parser.add_argument("--column", help="column of tables (default: `file`, or the column of texts in the training)")
    parser.add_argument(
        "--columns",
        type=_names,
        metavar="NAMES",
        help='names of the columns of tables without a header line, such as "[label, text]"; for a network of texts '
        "all files are then tables, whatever their ending",
    )
    parser.add_argument(
        "--batch_size", type=positive_int, default=64, metavar="N", help="samples in a batch (default: 64)"
    )
    parser.add_argument("--skip_bad", action="store_true", help="leave out files that cannot be read")
    parser.add_argument(
        "--part",
        metavar="K/N",
        help="predict the K-th of N parts of the samples, such as 3/8; whichever part is done last writes the table of "
        "all (default: all samples; under torchrun, a part for each process)",
    )
    parser.epilog = (
        "Each row has the sample, the likeliest class, its probability, and P(class) for each class; where a sample "
        "has several labels, those that are likely enough, and P(label) for each; or the numbers. With --out, a "
        "prediction that was interrupted goes on where it stopped when the same command runs again. A network that "
        f"segments writes a mask of each picture, in the folder {OVERLAYS} the picture with its mask in colors, and "
        f"{MASKS} with the number of pixels of each class."
    )


def run(options: argparse.Namespace) -> None:
    """Write a row for each sample: its name, and what is predicted of it."""
    part, parts = _part(options)
    trained = find_run(options)
    segments = trained.target == "masks"
    if segments and (options.out is None or (options.out.exists() and not options.out.is_dir())):
        raise ValueError("masks are written into a folder: give --out FOLDER")
    if not segments and options.out and options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: give the path of a .csv file")
    with _name_skip_bad_in_errors():
        if trained.values["model"].get("labels_per_image", 1) not in (1, None):
            raise ValueError("predictions are of one class, or of any number of labels, and this network names several")
        samples = list(_samples(options, trained))
        if not samples:
            raise ValueError(f"there is nothing to predict in {' '.join(options.paths)}")
        if segments:
            _check_masks(options.out, trained, samples)
        elif options.out is not None:
            trained_on = [getattr(trained.data(), name, None) for name in ("table", "file")]
            _check_table(options.out, _header(trained), [*options.paths, *(str(path) for path in trained_on if path)])
        about = f", {_about_probabilities(trained)}" if trained.target in ("class", "labels") else ""
        parts = min(parts, len(samples))
        if part > parts:
            print(f"torchcaps: no sample is left for part {part}: {counted(len(samples), 'sample')}", file=sys.stderr)
            return
        share = f", part {part} of {parts}" * (parts > 1)
        print(f"torchcaps: {counted(len(samples), 'sample')}{share}, {trained.path}{about}", file=sys.stderr)
        skipped: list[str] | None = [] if options.skip_bad else None
        if options.out is None:
            writer = csv.writer(CSVLines(sys.stdout))
            writer.writerow(_header(trained))
            writer.writerows(_rows(options, trained, samples, skipped))
        elif segments:
            make_folder(options.out / OVERLAYS)
            _Table(options, options.out / MASKS, trained, samples, part, parts).write(skipped)
            print(f"masks: {options.out}, and with colors over the pictures: {options.out / OVERLAYS}")
        else:
            _Table(options, options.out, trained, samples, part, parts).write(skipped)
    if skipped:
        more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        print(f"torchcaps: left out {counted(len(skipped), 'file')}: {'; '.join(skipped[:5])}{more}", file=sys.stderr)


def _check_masks(out: Path, trained: "Run", samples: Sequence[Sample]) -> None:
    """Check that no file would be written that is of something else."""
    names = Counter(sample.place for sample in samples)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise ValueError(
            f"several pictures are called {twice}, as their masks would be: predict them into different folders"
        )
    if any(Path(name).parts[0] == OVERLAYS for name in names if Path(name).parent.parts):
        raise ValueError(f"a folder of pictures is called {OVERLAYS}, as that of masks in colors: rename it")
    for place, beside in [(MASKS, OVERLAYS), *(_places(trained, name) for name in names)]:
        if (out / place).exists() and not (out / beside).exists():
            raise ValueError(f"{out / place} is there already, and was not predicted: give another folder as --out")


def _check_table(out: Path, header: list[str], paths: Sequence[str]) -> None:
    """Check that no file would be written over that is an input, or something else than such a table."""
    if not out.is_file():
        return
    if any(os.path.exists(path) and out.samefile(path) for path in map(user_path, paths)):
        raise ValueError(f"--out {out} is one of the inputs, or what was trained on: give another path")
    with suppress(ValueError, csv.Error), out.open(encoding="utf-8", newline="") as table:
        first = next(csv.reader(table), [])
        if first == header or (first[:1] == header[:1] and first[1:2] == ["prediction"]):
            return
    raise ValueError(f"{out} is there already, and is no table of such predictions: give another path, or remove it")


def _places(trained: "Run", name: str) -> tuple[str, str]:
    """Return where the mask of a picture is written, and where the picture with its classes in colors."""
    data: Any = trained.data()
    end = ".png" if data.palette.itemsize < 4 else ".tif"  # a PNG has no numbers above 16 bits
    return f"{name}{end}", f"{OVERLAYS}/{name}.png"


def _write_masks(
    out: Path, trained: "Run", samples: Sequence[Sample], skipped: list[str] | None
) -> Iterator[tuple[int, list[str]]]:
    """Write the masks of pictures, and the pictures with these in colors; yield what the table has of each."""
    import numpy as np
    from PIL import Image

    from torchcaps.deploy.predict import predict_masks
    from torchcaps.explain.segmentation import overlay

    data: Any = trained.data()
    for index, mask in predict_masks(trained, [sample.value for sample in samples], skipped):
        path = Path(samples[index].value)
        place, drawn = _places(trained, samples[index].place)
        picture, image = overlay(data.upright(path), mask), Image.fromarray(data.palette[mask])
        write_whole(out / drawn, partial(picture.save, format="PNG"))
        write_whole(out / place, partial(image.save, format="PNG" if place.endswith(".png") else "TIFF"))
        yield index, [place, *map(str, np.bincount(mask.flatten(), minlength=len(trained.names)))]


def _names(text: str) -> list[str]:
    """Return the names of `--columns`, a `type` of argparse."""
    import yaml

    with suppress(yaml.YAMLError):
        names = yaml.safe_load(text)
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return names
    raise argparse.ArgumentTypeError(f'expected names of columns such as "[label, text]", got {text}')


def _part(options: argparse.Namespace) -> tuple[int, int]:
    """Return the part that this process predicts, counted from 1, and the number of parts."""
    rank, processes = (whole_number(os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE"))  # of torchrun
    given = options.part or ("1/1" if rank is None or processes is None else f"{rank + 1}/{processes}")
    part, parts = (whole_number(text) or 0 for text in given.partition("/")[::2])
    if not 1 <= part <= parts:
        raise ValueError(f"--part must be K/N with K from 1 to N, such as 3/8, got {given}")
    if parts > 1 and (options.out is None or STANDARD_INPUT in options.paths):
        raise ValueError("several parts need a file that they write together, and files to read: give --out, and no -")
    return part, parts


@contextmanager
def _name_skip_bad_in_errors() -> Iterator[None]:
    """Within this context, an error about a file names --skip_bad, by which such files are left out."""
    from torchcaps.data import DataError

    try:
        yield
    except DataError as error:
        hint = ", or leave such files out by --skip_bad" if "that can be read" in str(error) else ""
        raise DataError(f"{error}{hint}") from error


def _samples(options: argparse.Namespace, trained: "Run") -> Iterator[Sample]:
    """Yield the samples that were asked for."""
    from torchcaps.data import TextData
    from torchcaps.data.images import FileData

    data = trained.data()
    if isinstance(data, TextData):
        if options.columns and STANDARD_INPUT in options.paths:
            raise ValueError("--columns is for tables, and - has a text in each line: give the path of the table")
        column = options.column or getattr(data, "text", "text")
        for path in options.paths:
            yield from _texts(path, column, options.columns)
    elif isinstance(data, FileData):
        for path in options.paths:
            column = options.column or getattr(data, "file_column", "file")
            yield from _files(path, data.kind, column, options.columns, options.skip_bad)
    else:
        raise ValueError(f"predictions are for pictures, arrays and texts, and {type(data).__name__} has none")


def _files(
    source: str, kind: "FileKind", column: str, columns: list[str] | None = None, skip_bad: bool = False
) -> Iterator[Sample]:
    from torchcaps.data.file_lists import find_files

    path = user_path(source)
    if source == STANDARD_INPUT:
        files = [line.strip() for line in sys.stdin if line.strip()]
    elif os.path.isdir(path):
        files = [str(file) for file in find_files(path, kind.suffixes)[0]]
        if not files:
            raise ValueError(f"{source}: has no {kind.noun}s: expected files that end in {', '.join(kind.suffixes)}")
    elif columns and path.suffix.lower() not in TABLES:
        raise ValueError(f"--columns is for tables, and {source} is none: leave it out")
    elif path.suffix.lower() in TABLES:
        files = _named(path.parent, kind, _column(source, column, columns))
    else:
        files = [source]
    for file in files:
        # False for any text, where `Path.is_file` refuses long ones. What cannot be read is left out later.
        if not os.path.isfile(user_path(file)) and not (skip_bad and path.suffix.lower() in TABLES):
            shown = file if len(file) <= 300 else f"{file[:300]}..."
            advice = f"give the paths of {kind.noun}s, or of folders or tables of them"
            if path.suffix.lower() in TABLES:
                advice = f"names in a table are looked for in its folder, {path.parent}"
            raise ValueError(f"there is no file {shown}: {advice}")
        place = Path(user_path(file)).with_suffix("")
        folder = path if os.path.isdir(path) else path.parent if path.suffix.lower() in TABLES else place.parent
        inside = place.relative_to(folder) if place.is_relative_to(folder) else Path(place.name)
        yield Sample(file, str(user_path(file)), inside.as_posix())


def _named(folder: Path, kind: "FileKind", names: list[str]) -> list[str]:
    """Return the paths of the files that a table in a folder names: from there, or as a training finds them."""
    from torchcaps.data.file_lists import file_called, files_by_name, find_files

    paths: list[str] = []
    by_name: dict[str, Path | None] | None = None
    for name in names:
        path = folder / user_path(name)
        if not os.path.isfile(path):
            if by_name is None:
                by_name = files_by_name(folder, find_files(folder, kind.suffixes)[0])
            path = file_called(name, by_name, folder) or path
        paths.append(str(path))
    return paths


def _texts(source: str, column: str, columns: list[str] | None = None) -> Iterator[Sample]:
    from torchcaps.data.table import decoded

    path = user_path(source)
    if source != STANDARD_INPUT and not os.path.isfile(path):
        raise ValueError(
            f"there is no file {source}: give a table, a file with a text in each line, or - for such lines"
        )
    if columns or path.suffix.lower() in TABLES:
        texts = [text.strip() for text in _column(source, column, columns)]
    else:
        is_input = source == STANDARD_INPUT
        lines = sys.stdin.buffer.read() if is_input else path.read_bytes()
        # Not by splitlines, which also breaks at characters within a line.
        every = io.StringIO(decoded(lines, "standard input" if is_input else source), newline=None)
        texts = [line.strip() for line in every if line.strip()]
    yield from (Sample(text, text) for text in texts)


def _column(source: str, column: str, columns: list[str] | None) -> list[str]:
    """Return the values of a column of a table, whose columns are `columns` if it has no header line."""
    from torchcaps.data import DataError
    from torchcaps.data.table import read_table

    table = read_table(source, columns)
    table.check_columns({"--column": column}, "--columns")
    for row in table.rows:
        if not row.values[column].strip():
            raise DataError(f"{source} line {row.line}: {column} is empty: fill it in, or remove the line")
    return [row.values[column] for row in table.rows]


def _header(trained: "Run") -> list[str]:
    from torchcaps.data import TextData

    kind = "text" if isinstance(trained.data(), TextData) else "file"
    if trained.target == "masks":
        return [kind, "mask", *(f"pixels({name})" for name in trained.names)]
    if trained.target == "numbers":
        return [kind, *trained.names]
    likeliest = ["prediction", "probability"] if trained.target == "class" else ["prediction"]
    return [kind, *likeliest, *(f"P({name})" for name in trained.names)]


def _about_probabilities(trained: "Run") -> str:
    """Return what the training has chosen on its validation set."""
    if trained.target == "labels":
        trained.thresholds  # noqa: B018  # an error now, and not below a header
        return "thresholds of the run" if trained.checkpoint.thresholds else "threshold 0.5 for each label"
    return f"temperature {trained.temperature:.3g}" if trained.temperature else "probabilities not calibrated"


def _cells(trained: "Run", values: "Tensor") -> list[str]:
    """Return what the table has of a sample: its numbers, or what is likely, and probabilities."""
    if trained.target == "numbers":
        return [f"{value:.6g}" for value in values.tolist()]
    probabilities = [f"{value:.6f}" for value in values.tolist()]
    if trained.target == "labels":
        likely = (values > trained.thresholds).nonzero().squeeze(1).tolist()
        separator = getattr(trained.data(), "separator", None) or "|"  # as in the table of the training
        return [separator.join(trained.names[k] for k in likely), *probabilities]
    likeliest = int(values.argmax())
    return [trained.names[likeliest], probabilities[likeliest], *probabilities]


def _rows(
    options: argparse.Namespace, trained: "Run", samples: Sequence[Sample], skipped: list[str] | None
) -> Iterator[list[str]]:
    """Yield the row of each sample, with the progress on a terminal."""
    from torchcaps.data import TextData
    from torchcaps.data.notes import progress_bar
    from torchcaps.deploy.predict import predict_pictures, predict_texts

    values = [sample.value for sample in samples]
    predictions: Iterator[tuple[int, Any]]
    if trained.target == "masks":
        predictions = _write_masks(options.out, trained, samples, skipped)
    elif isinstance(trained.data(), TextData):
        predictions = predict_texts(trained, values, options.batch_size)
    else:
        predictions = predict_pictures(trained, values, options.batch_size, skipped)
    with progress_bar() as progress:
        bar = progress.add_task("predicting", total=len(samples))
        for index, row in predictions:
            yield [samples[index].name, *(row if isinstance(row, list) else _cells(trained, row))]
            progress.update(bar, completed=index + 1)


class _Table:
    """The table of `--out`, or the one of masks in that folder, of one or several parts.

    The rows of a part are in a hidden file beside the table, below a line that names the checkpoint and the samples:
    they are kept if the command is interrupted. When the part is done, this line also has a hash of the rows. When all
    parts are done, they are joined.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        out: Path,
        trained: "Run",
        samples: Sequence[Sample],
        part: int,
        parts: int,
    ) -> None:
        self.options, self.out, self.trained, self.part = options, out, trained, part
        self.samples = samples[len(samples) * (part - 1) // parts : len(samples) * part // parts]
        self.header = _header(trained)
        names = hashlib.sha256("\0".join(sample.name for sample in samples).encode("utf-8", "surrogatepass"))
        self.facts = {"checkpoint": _digest(trained.path), "header": self.header, "samples": names.hexdigest()}
        self.about = f"{json.dumps(self.facts)}\n"
        self.files = [self.out.with_name(f".{self.out.name}.{k}-of-{parts}") for k in range(1, parts + 1)]

    def write(self, skipped: list[str] | None) -> None:
        """Write this part, unless it is done, and then the table if no part is missing."""
        make_folder(self.out.parent)
        file = self.files[self.part - 1]
        if not self._is_done(file):
            lock = FileLock(file.with_name(f"{file.name}.lock"))
            try:
                with lock.acquire(timeout=0):
                    if not self._is_done(file):  # another process may have written it in this moment
                        if file.exists():
                            reason = "damaged, or of another checkpoint or samples"
                            print(f"torchcaps: {file} is {reason}: starting anew", file=sys.stderr)
                        self._write_part(file, skipped)
                    Path(lock.lock_file).unlink(missing_ok=True)
            except Timeout:
                raise ValueError(f"another process is writing this part of {self.out}: wait for it") from None
        missing = [str(k) for k, other in enumerate(self.files, 1) if not self._is_done(other)]
        if missing:
            others = f"part{'s' * (len(missing) > 1)} {', '.join(missing)}"
            print(f"part {self.part} is done; {self.out} is written after {others}")
            return
        with suppress(FileNotFoundError):  # another part was as fast, and has joined them
            write_whole(self.out, self._join)
        for other in self.files:
            other.unlink(missing_ok=True)
        print(f"predictions: {self.out}")

    def _is_done(self, file: Path) -> bool:
        """Return whether the file of a part has all rows that were written."""
        with suppress(OSError), file.open("rb") as part:
            return part.readline() == self._first_line(file, part)
        return False

    def _first_line(self, file: Path, rows: io.BufferedReader) -> bytes:
        """Return the first line of the file of a part that is done, with a hash of the rows that follow."""
        number = 1 + self.files.index(file)
        facts = {**self.facts, "part": number, "rows": hashlib.file_digest(rows, "sha256").hexdigest()}
        return f"{json.dumps(facts)}\n".encode()

    def _write_part(self, file: Path, skipped: list[str] | None) -> None:
        unfinished = file.with_name(f"{file.name}.unfinished")
        rows, left_out = self._kept(unfinished)
        done = len(rows) + len(left_out)
        if skipped is not None:
            skipped += [f"{name}, before the interruption" for name in left_out]
        if done:
            print(f"torchcaps: going on after {counted(done, 'sample')} of {unfinished}", file=sys.stderr)
        with name_file_in_errors(unfinished), unfinished.open("w", encoding="utf-8", newline="") as opened:
            opened.write(self.about)
            writer = csv.writer(CSVLines(opened))
            writer.writerows(rows)
            opened.flush()
            for count, row in enumerate(_rows(self.options, self.trained, self.samples[done:], skipped), 1):
                writer.writerow(row)
                if count % self.options.batch_size == 0:
                    opened.flush()

        def copy(path: Path) -> None:
            with unfinished.open("rb") as rows, path.open("wb") as part:
                start = len(rows.readline())
                part.write(self._first_line(file, rows))
                rows.seek(start)
                shutil.copyfileobj(rows, part)

        write_whole(file, copy)
        unfinished.unlink()

    def _kept(self, unfinished: Path) -> tuple[list[list[str]], list[str]]:
        """Return the complete rows that an interrupted command has left for the first samples of this part, and the
        names of those among these samples that it has left out."""
        try:
            with unfinished.open(encoding="utf-8", newline="") as file:
                first, text = file.readline(), file.read()
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError) as error:
            print(f"torchcaps: {unfinished} is damaged ({one_line(error)}): starting anew", file=sys.stderr)
            return [], []
        if first != self.about:
            print(f"torchcaps: {unfinished} is of another checkpoint or samples: starting anew", file=sys.stderr)
            return [], []
        rows: list[list[str]] = []
        left_out: list[str] = []
        csv.field_size_limit(max(csv.field_size_limit(), 1 + len(text)))
        lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True)
        with suppress(csv.Error):  # the last row may end within a text that has lines
            for row in lines:
                start = len(rows) + len(left_out)
                most = len(self.samples) if self.options.skip_bad else start + 1
                if len(row) != len(self.header):
                    break
                place = next((i for i in range(start, most) if self.samples[i].name == row[0]), None)
                if place is None:
                    break
                left_out += [sample.name for sample in self.samples[start:place]]
                rows.append(row)
        return rows, left_out

    def _join(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as table:
            csv.writer(CSVLines(table)).writerow(self.header)
            for part in self.files:
                with part.open(encoding="utf-8", newline="") as rows:
                    rows.readline()
                    shutil.copyfileobj(rows, table)


def _digest(path: Path) -> str:
    """Return a hash of a checkpoint's file, or of the network and the values in a folder."""
    from torchcaps.runs.checkpoint import CONFIG, WEIGHTS

    content = hashlib.sha256()
    for file in [path / WEIGHTS, path / CONFIG] if path.is_dir() else [path]:
        with file.open("rb") as opened:
            content.update(hashlib.file_digest(opened, "sha256").digest())
    return content.hexdigest()
