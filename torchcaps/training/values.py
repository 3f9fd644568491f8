"""All values of a training: those of a recipe, changed by options such as `--trainer.max_epochs 5`, and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError

from torchcaps.recipes import Recipe
from torchcaps.recipes.modules import OwnModules
from torchcaps.recipes.values import ARGUMENTS
from torchcaps.training.errors import innermost, misfit, where
from torchcaps.training.names import Names, Refused, recipe_signature
from torchcaps.training.overrides import Override, overrides_of
from torchcaps.utils.arguments import checked

# With these values any recipe runs in seconds.
SMOKE: dict[str, Any] = {
    "data.batch_size": 2,
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 2,
    "trainer.limit_val_batches": 1,
    "trainer.limit_test_batches": 1,
    "trainer.log_every_n_steps": 1,
}


@dataclass(frozen=True)
class Values:
    """All values of a training, and where they come from.

    Args:
        recipe: the recipe, or one with the values of a run.
        overrides: what was changed in it.
        merged: the result, nested as in YAML. It names only what it may name.
        own_modules: modules beside the recipe that may be imported.
        allow_code: whether it may name classes and functions of any package.
        smoke: whether the training is a check of two steps.
        checkpoint: checkpoint of the run that the values are of, whose weights will be loaded; None if they are of no
            run.
    """

    recipe: Recipe
    overrides: tuple[Override, ...]
    merged: dict[str, Any]
    own_modules: OwnModules
    allow_code: bool = False
    smoke: bool = False
    checkpoint: Path | None = None

    @classmethod
    @checked
    def of(
        cls,
        recipe: Recipe,
        overrides: Mapping[str, Any] | Sequence[Override] = (),
        allow_code: bool = False,
        smoke: bool = False,
    ) -> "Values":
        """Change values of a recipe, and check all names in the result.

        Args:
            recipe, allow_code, smoke: see the class.
            overrides: the changes, such as `{"trainer.max_epochs": 5}`. They take precedence over those of `smoke`.

        Raises:
            ValueError: a name is not allowed or not known; the message says where it was given.
        """
        changes = (*overrides_of(SMOKE if smoke else {}), *overrides_of(overrides))
        names, own_modules = Names(allow_code), OwnModules(recipe.name, recipe.files, allow_code)
        done: list[Override] = []
        try:
            merged = recipe.config
            for change in changes:
                done.append(change)
                merged = names.changed(merged, change)
            names.check(merged)
        except (Refused, RecursionError) as error:
            try:
                names.check(recipe.config)  # is it wrong without the changes?
            except (Refused, RecursionError) as in_recipe:
                raise _refusal(in_recipe, recipe, (), own_modules) from in_recipe
            raise _refusal(error, recipe, done, own_modules) from error
        return cls(recipe, changes, merged, own_modules, allow_code, smoke)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `torchcaps train` with which a training has these values, behind the recipe's name."""
        small = ["--small"] if self.recipe.is_small else []
        changes = [token for override in self.overrides for token in override.tokens]
        allowed = ["--allow_code"] if self.allow_code else []
        resumed = [] if self.checkpoint is None else ["--ckpt_path", str(self.checkpoint)]
        return [*small, *changes, *allowed, *resumed]

    def refusal(self, error: ArgumentError | RecursionError) -> ValueError:
        """Return the error, in one line, about a value that the parser of recipes refuses."""
        path, reason = misfit(self.merged, recipe_signature, (), Names(self.allow_code)) or ((), innermost(error))
        if [name for name in path if name not in ARGUMENTS][:3] == ["model", "loss", "weight"]:
            reason = (
                'class weights are given as --model.class_weights balanced, or as "[1, 19]" with one for each class'
            )
        reason = self.own_modules.why_not(error.__cause__) or reason
        return ValueError(f"{where(path, self.recipe.name, self.overrides)}: {reason}")


def _refusal(
    error: Refused | RecursionError, recipe: Recipe, overrides: Sequence[Override], own_modules: OwnModules
) -> ValueError:
    path = error.path if isinstance(error, Refused) else ()
    reason = own_modules.why_not(error.__cause__) or str(error)
    return ValueError(f"{where(path, recipe.name, overrides)}: {reason}")
