"""The runs of `torchcaps reproduce`: all rows of the papers with a published number, with three seeds, in order."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchcaps.checks import nearest
from torchcaps.extras import needs
from torchcaps.recipes import list_recipes, load_recipe, name_now
from torchcaps.reproduce.results import Key

with needs("train"):
    import yaml

SEEDS = (0, 1, 2)
DEVICES = "--trainer.devices=1"  # Lightning would start the queue again for each further one


@dataclass(frozen=True)
class Run:
    """A row of a paper's table, trained with a seed.

    Args:
        recipe: name of the row's recipe.
        seed: seed of the run.
        overrides: command-line arguments that change the recipe, such as a shorter training.
        tested_on: classes of further data that the trained network is tested on.
    """

    recipe: str
    seed: int
    overrides: tuple[str, ...] = ()
    tested_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"

    def folder(self, root: Path) -> Path:
        """Return the folder of the run's logs and checkpoints, in the folder of all runs."""
        return root / f"seed-{self.seed}" / self.recipe

    @property
    def keys(self) -> list[Key]:
        """Keys of its results, one for each data set that it is tested on."""
        return [(self.recipe, shlex.join(self.overrides), data, self.seed) for data in ("", *self.tested_on)]

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of its training."""
        chosen = [f"--seed_everything={self.seed}", *self.overrides, DEVICES]
        if load_recipe(self.recipe).bfloat16:
            chosen.append("--trainer.precision=bf16-mixed")
        return chosen


def plan(wanted: Sequence[str] = (), hours: dict[str, float] | None = None) -> list[Run]:
    """Return all runs in their order: those of plan.yaml first, then the others, the shortest first.

    Args:
        wanted: papers, tables or recipes to run, or nothing for all.
        hours: hours that recipes take, by name, as far as they are known. Recipes that are neither here nor in
            plan.yaml come last.

    Raises:
        ValueError: a paper, table or recipe is unknown; the message has the nearest names.
    """
    named = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text(encoding="utf-8"))
    rows = _rows()
    for name in wanted:
        if now := name_now(name.rstrip("/")):
            raise ValueError(f"no recipe is called {name!r}: it is now called {now}")
        if not any(_belongs(row, name) for row in rows):
            raise ValueError(
                f"no paper, table or recipe with a published number is called {name!r}{nearest(name, names_of_runs())}"
            )
    first = [entry["recipe"] for entry in named]
    others = sorted((row for row in rows if row not in first), key=lambda row: (hours or {}).get(row, float("inf")))
    details = {
        entry["recipe"]: (tuple(entry.get("overrides", ())), tuple(entry.get("tested_on", ()))) for entry in named
    }
    order = [(row, SEEDS[0]) for row in first]
    order += [(row, seed) for seed in SEEDS[1:] for row in first]
    order += [(row, seed) for seed in SEEDS for row in others]
    return [
        Run(row, seed, *details.get(row, ()))
        for row, seed in order
        if not wanted or any(_belongs(row, name) for name in wanted)
    ]


def names_of_runs() -> list[str]:
    """Return the names that `plan` knows: papers, tables and recipes with a published number."""
    rows = _rows()
    return sorted({"/".join(row.split("/")[:parts]) for row in rows for parts in (1, 2, 3)})


def _rows() -> list[str]:
    return [name for name in list_recipes() if load_recipe(name).has_number]


def _belongs(row: str, name: str) -> bool:
    return row == name or row.startswith(f"{name.rstrip('/')}/")
