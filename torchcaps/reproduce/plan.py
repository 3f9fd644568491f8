"""The runs of `torchcaps reproduce`: rows of tables with three seeds, in order."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps.recipes import Recipe, list_recipes, load_recipe
from torchcaps.reproduce.results import SMALL, Key
from torchcaps.utils.checks import nearest
from torchcaps.utils.extras import needs

with needs("train"):
    import yaml

    from torchcaps.recipes.values import options_of

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class PlannedRun:
    """A row of a paper's table, trained with a seed.

    Args:
        recipe: name of the row's recipe; with ` --small` behind it, its small version.
        seed: seed of the run.
        tested_on: classes of further data that the trained network is tested on.
        check_hashes: whether the files of the data must have their published hashes.
        compiled: whether `torch.compile` compiles the training, which changes its values by rounding alone.
        resident: whether its steps are taken on samples that lie on the device, which on a CPU changes no value, and on
            a GPU only the order of some sums.
    """

    recipe: str
    seed: int
    tested_on: tuple[str, ...] = ()
    check_hashes: bool = True
    compiled: bool = False
    resident: bool = False

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"

    def folder(self, root: Path) -> Path:
        """Return the folder of the run's logs and checkpoints, in the folder of all runs."""
        apart = "" if self.check_hashes else "-no-hashes"
        return root / f"seed-{self.seed}" / (self.recipe.replace(SMALL, "-small") + apart)

    def load(self) -> Recipe:
        """Return the recipe; ` --small` behind its name means the small version."""
        return load_recipe(self.recipe.removesuffix(SMALL), self.recipe.endswith(SMALL))

    @property
    def overrides(self) -> list[str]:
        """Command-line arguments that its results are filed with."""
        return options_of({name: value for name, value in self.changes.items() if name == "data.check_hashes"})

    @property
    def keys(self) -> list[Key]:
        """Keys of its results, one for each data set that it is tested on."""
        return [(self.recipe, shlex.join(self.overrides), data, self.seed) for data in ("", *self.tested_on)]

    @property
    def changes(self) -> dict[str, Any]:
        """What its training changes in the recipe."""
        changes: dict[str, Any] = {"seed_everything": self.seed}
        if not self.check_hashes:
            changes["data.check_hashes"] = False
        changes["trainer.devices"] = 1  # Lightning would start the queue again for each further one
        if self.load().bfloat16:
            changes["trainer.precision"] = "bf16-mixed"
        if self.compiled:
            changes["model.compile"] = True
        if self.resident:
            changes["trainer.resident"] = True
        return changes


def plan(
    wanted: Sequence[str] = (), check_hashes: bool = True, compiled: bool = False, resident: bool = False
) -> list[PlannedRun]:
    """Return all runs in their order: those of plan.yaml first, entry by entry, then the others.

    Args:
        wanted: papers, tables or recipes to run, or nothing for all rows with a published number. With ` --small`
            behind a name, the small versions. Of a table that compares, and has no published number, all rows. A name
            that is unknown is a ValueError.
        check_hashes, compiled, resident: see `PlannedRun`.
    """
    entries = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text(encoding="utf-8"))
    every = _rows()
    wanted_rows = list(dict.fromkeys(row for name in wanted for row in _rows_of(name, every)))
    left = dict.fromkeys(wanted_rows or _rows(with_number=True))
    parts: list[tuple[list[str], Sequence[str]]] = []  # rows, and what they are tested on
    for entry in entries:
        named = [row for name in entry["recipes"] for row in _rows_of(name, every)]
        rows = [row for row in left if row.removesuffix(SMALL) in named]
        parts.append((sorted(rows, key=lambda row: named.index(row.removesuffix(SMALL))), entry.get("tested_on", ())))
        for row in rows:
            del left[row]
    parts.append((list(left), ()))
    runs = [
        PlannedRun(row, seed, tuple(tested_on), check_hashes, compiled, resident)
        for rows, tested_on in parts
        for seed in SEEDS
        for row in rows
    ]
    return runs


def names_of_runs() -> list[str]:
    """Return the names that `plan` knows: papers, tables and their rows."""
    return sorted({"/".join(row.split("/")[:parts]) for row in _rows() for parts in (1, 2, 3)})


def _rows(with_number: bool = False) -> list[str]:
    """Return the rows of all tables, or only those that have a published number."""
    recipes = map(load_recipe, list_recipes())
    return [recipe.name for recipe in recipes if recipe.table and (recipe.has_number or not with_number)]


def _rows_of(name: str, every: Sequence[str]) -> list[str]:
    """Return those of all rows that belong to a paper, a table or a recipe."""
    wanted = name.removesuffix(SMALL).rstrip("/")
    rows = [row for row in every if row == wanted or row.startswith(f"{wanted}/")]
    if not rows:
        raise ValueError(f"no paper, table or row is called {wanted!r}{nearest(wanted, names_of_runs())}")
    if name.endswith(SMALL):
        return [row + SMALL for row in rows]
    return [row for row in rows if load_recipe(row).has_number] or rows
