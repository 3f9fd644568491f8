"""results.csv, our numbers: `torchcaps recipes` and the pages of the papers show them next to the published ones."""

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from torchcaps.utils.checks import counted, one_line
from torchcaps.utils.files import locked, read_text, write_csv_whole

SMALL = " --small"  # after a recipe's name: its small version
Key = tuple[str, str, str, int]  # recipe, overrides, data and seed of a result
IN_PACKAGE = Path(__file__).with_name("results.csv")


@dataclass(frozen=True)
class Result:
    """One trained network, tested once.

    Args:
        recipe: name of the recipe, followed by ` --small` for its small version.
        overrides: arguments that change the recipe's training, such as a shorter one.
        data: class of the data that it was tested on, if that is not the recipe's own.
        seed: seed of the run.
        value: percentage of the test samples, wrong ones or right ones according to the unit.
        unit: "test error" or "test accuracy", whichever the paper has; of masks "test Dice", the mean over the classes.
        parameters: number of parameters of the network.
        published: published number, as the recipe has it; empty for small versions.
        command: command that trains it again.
        commit: commit of the code; "A then B" if a run was resumed with another commit.
        hardware: processor and number of threads, or GPU, and the version of PyTorch.
        precision: precision, as the Trainer calls it.
        date: date of the test, `YYYY-MM-DD`.
        hours: hours of training, summed over the parts of a resumed run from start to end; nan if not measured.
    """

    recipe: str
    overrides: str
    data: str
    seed: int
    value: float
    unit: str
    parameters: int
    published: str
    command: str
    commit: str
    hardware: str
    precision: str
    date: str
    hours: float

    @property
    def key(self) -> Key:
        """What identifies a result: a file has one for each key."""
        return self.recipe, self.overrides, self.data, self.seed


def in_unit(metrics: Mapping[str, float], unit: str) -> float:
    """Return what a unit counts of the metrics of a test, in percent."""
    accuracy = metrics["test/dice" if unit == "test Dice" else "test/accuracy"]
    return round(100 * (1 - accuracy if unit == "test error" else accuracy), 4)


def read_results(path: Path) -> list[Result]:
    """Read all results of a file. A missing file has none; a file that has something else is a ValueError."""
    if not path.exists():
        return []
    types: dict[str, Any] = {field.name: field.type for field in fields(Result)}
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        if rows.fieldnames != list(types):
            raise ValueError(f"expected the columns {', '.join(types)}")
        return [Result(**{name: types[name](value) for name, value in row.items()}) for row in rows]
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of results: line {rows.line_num}: {one_line(error)}") from None


def add_results(path: Path, new: Iterable[Result]) -> list[Result]:
    """Add results to a file, except those whose key it has already. Return all results of the file."""
    with locked(path):
        results = _first_of_each_key([*read_results(path), *new])
        write_csv_whole(path, [field.name for field in fields(Result)], map(astuple, results))
    return results


def known_results(root: Path, packaged: bool = True) -> list[Result]:
    """Return the results of the queue in a folder of runs, after those that come with the package if `packaged`."""
    return _first_of_each_key([*(read_results(IN_PACKAGE) if packaged else ()), *read_results(root / "results.csv")])


def _first_of_each_key(results: Iterable[Result]) -> list[Result]:
    first: dict[Key, Result] = {}
    for result in results:
        first.setdefault(result.key, result)
    return list(first.values())


def summary(results: Iterable[Result], recipe: str, overrides: str = "", in_short: bool = False) -> str:
    """Return our number for a row, the mean over its seeds, or "" if there is none.

    Results with the overrides that are asked for are preferred. Otherwise there is one number for each choice of
    overrides, which is named, or in short called "options".
    """
    values: dict[str, list[float]] = {}
    for result in results:
        if (result.recipe, result.data) == (recipe, ""):
            values.setdefault(result.overrides, []).append(result.value)
    shown = {overrides: values[overrides]} if overrides in values else values
    numbers = []
    for given, of_seeds in shown.items():
        named = "" if given == overrides else ", options" if in_short else f", {given or 'no overrides'}"
        numbers.append(f"{mean(of_seeds)} % ({counted(len(of_seeds), 'seed')}{named})")
    return "; ".join(numbers)


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Return the names of seeds: "seed 2", "seeds 0, 1"."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def mean(values: Sequence[float]) -> str:
    """Return the mean over seeds, with the standard deviation if there are several."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
