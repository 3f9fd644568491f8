"""What there is to reproduce, and in which order."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchcaps.checks import nearest
from torchcaps.extras import needs
from torchcaps.recipes import list_recipes, load_recipe

with needs("train"):
    import yaml

SEEDS = (0, 1, 2)
Key = tuple[str, str, str, int]  # of a result: recipe, overrides, data, seed


@dataclass(frozen=True)
class Run:
    """A row of a paper with a seed.

    Args:
        recipe: its name.
        seed: of the run.
        overrides: arguments of the run beside the recipe's and the seed.
        tested_on: classes of other data that the trained network is tested on as well.
    """

    recipe: str
    seed: int
    overrides: tuple[str, ...] = ()
    tested_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"

    def folder(self, root: Path) -> Path:
        """Where it is trained."""
        return root / f"seed-{self.seed}" / self.recipe

    @property
    def keys(self) -> list[Key]:
        """Those of its results."""
        return [(self.recipe, shlex.join(self.overrides), data, self.seed) for data in ("", *self.tested_on)]


def plan(wanted: Sequence[str] = (), hours: dict[str, float] | None = None) -> list[Run]:
    """All rows that have a published number, the most useful first.

    Args:
        wanted: papers, tables or recipes; all if there are none.
        hours: how long recipes take, as far as it is known. Those that the plan does not name are sorted by it; those
            of which nothing is known come last.

    Raises:
        ValueError: for an unknown paper, table or recipe; the message has the nearest ones.
    """
    named = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text(encoding="utf-8"))
    rows = [name for name in list_recipes() if load_recipe(name).has_number]
    for name in wanted:
        if not any(_belongs(row, name) for row in rows):
            groups = {"/".join(row.split("/")[:parts]) for row in rows for parts in (1, 2)}
            raise ValueError(
                f"no paper, table or recipe with a published number is called {name!r}{nearest(name, [*groups, *rows])}"
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


def _belongs(row: str, name: str) -> bool:
    return row == name or row.startswith(f"{name.rstrip('/')}/")
