"""Our numbers beside the published ones: a CSV file that tables are made from."""

import csv
import io
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torchcaps.extras import needs
from torchcaps.files import write_text_whole

with needs("train"):
    from filelock import FileLock

PUBLISHED_WITH_THE_PACKAGE = Path(__file__).with_name("results.csv")


@dataclass(frozen=True)
class Result:
    """One trained network, tested once.

    Args:
        recipe: its name.
        overrides: arguments that change the published training, such as a shorter one.
        data: the class of data that it was tested on, if that is not the recipe's own.
        seed: of the run.
        value: in per cent of the test samples; the unit says of which.
        unit: "test error" or "test accuracy", as published.
        published: the published number, as the recipe has it.
        command: what trains it again.
        commit: of the code, or commits, if it was resumed with others.
        hardware: processor and threads, or GPU; and the release of PyTorch.
        precision: as the Trainer calls it.
        date: of the test, `YYYY-MM-DD`.
        hours: of training, from the beginning to the end of each part, pauses included.
    """

    recipe: str
    overrides: str
    data: str
    seed: int
    value: float
    unit: str
    published: str
    command: str
    commit: str
    hardware: str
    precision: str
    date: str
    hours: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is one result of."""
        return self.recipe, self.overrides, self.data, self.seed


def unit_of(published: str) -> str:
    """What a published number counts."""
    return "test error" if "error" in published else "test accuracy"


def value_of(accuracy: float, published: str) -> float:
    """An accuracy from 0 to 1 in the unit of a published number, in per cent."""
    share = 1 - accuracy if unit_of(published) == "test error" else accuracy
    return round(100 * share, 4)


def read_results(path: Path) -> list[Result]:
    """All results of a file; none if it is not there.

    Raises:
        ValueError: it is not a file of results.
    """
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(Result)}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is None or list(rows.fieldnames) != list(types):
            raise ValueError(f"{path} is not a file of results: expected the columns {', '.join(types)}")
        try:
            return [Result(**{name: types[name](value) for name, value in row.items()}) for row in rows]  # type: ignore[operator]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {rows.line_num}: {error}") from None


def add_results(path: Path, new: Iterable[Result]) -> list[Result]:
    """Add results to a file. A result that it has already stays as it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        found = {result.key: result for result in read_results(path)}
        for result in new:
            found.setdefault(result.key, result)
        results = list(found.values())
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)
        write_text_whole(path, text.getvalue())
    return results


def known_results(root: Path) -> list[Result]:
    """Those that came with the package, and those of the queue in this folder."""
    found = {result.key: result for result in read_results(PUBLISHED_WITH_THE_PACKAGE)}
    for result in read_results(root / "results.csv"):
        found.setdefault(result.key, result)
    return list(found.values())


def summary(results: Iterable[Result], recipe: str, data: str = "") -> str:
    """Our number of a row, if there is one: the mean over seeds, and their standard deviation if there are several; and
    with which overrides, if it was trained otherwise than published."""
    values: dict[str, list[float]] = {}
    for result in results:
        if (result.recipe, result.data) == (recipe, data):
            values.setdefault(result.overrides, []).append(result.value)
    parts = []
    for overrides, of_seeds in values.items():
        spread = f" ± {statistics.stdev(of_seeds):.2f}" if len(of_seeds) > 1 else ""
        seeds = f"{len(of_seeds)} seed{'s' if len(of_seeds) > 1 else ''}"
        parts.append(f"{statistics.fmean(of_seeds):.2f}{spread} % ({', '.join(filter(None, (seeds, overrides)))})")
    return "; ".join(parts)
