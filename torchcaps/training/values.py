"""All values of a training: those of a recipe, changed by options such as `--trainer.max_epochs 5`, and checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from torchcaps.recipes import Recipe
from torchcaps.recipes.modules import OwnModules
from torchcaps.recipes.reading import read_yaml
from torchcaps.recipes.values import ARGUMENTS
from torchcaps.recipes.values import Path as ValuePath
from torchcaps.training.errors import innermost, misfit, where
from torchcaps.training.names import OWNERS, Names, Refused, recipe_signature
from torchcaps.training.overrides import Override, overrides_of
from torchcaps.training.signatures import UNKNOWN, parameters
from torchcaps.utils.checks import one_line

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
    def of(
        cls,
        recipe: Recipe,
        overrides: Mapping[str, Any] | Sequence[Override] = (),
        allow_code: bool = False,
        smoke: bool = False,
        checkpoint: Path | None = None,
    ) -> "Values":
        """Change values of a recipe, and check all names in the result.

        Args:
            recipe, allow_code, smoke, checkpoint: see the class.
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
                merged = _changed(merged, change.path, change, names, recipe_signature, ())
            names.check(merged)
        except (Refused, RecursionError) as error:
            try:
                names.check(recipe.config)  # is it wrong without the changes?
            except (Refused, RecursionError) as in_recipe:
                raise _refusal(in_recipe, recipe, (), own_modules) from in_recipe
            raise _refusal(error, recipe, done, own_modules) from error
        return cls(recipe, changes, merged, own_modules, allow_code, smoke, checkpoint)

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


def _changed(
    values: Any, names_left: tuple[str, ...], override: Override, names: Names, annotation: Any, path: ValuePath
) -> Any:
    """Return values that stand at `path` with a change of the value that `names_left` lead to from there.

    The names of an override leave out `init_args`, and it changes the last item of a list. Where it names another
    class, the arguments that the new class also takes are kept.
    """
    if not names_left:
        return _added(values, override, path) if override.adds else _replaced(values, override, names, annotation, path)
    if isinstance(values, str):
        read = _structured(values, path)
        values = {"class_path": read} if isinstance(read, str) else read
    if isinstance(values, list):
        items = values or [{}]
        last = len(items) - 1
        return [*items[:-1], _changed(items[-1], names_left, override, names, annotation, (*path, last))]
    values = dict(values) if isinstance(values, dict) else {}
    name, left = names_left[0], names_left[1:]
    if name in (*ARGUMENTS, "class_path"):
        values[name] = _changed(values.get(name), left, override, names, UNKNOWN, (*path, name))
        return values
    owner: Any = names.owner(values, annotation, path)
    known = (parameters(owner) if owner is not None else None) or {}
    place = values
    if "class_path" in values and annotation not in OWNERS:
        place = values["init_args"] = _arguments(values, path)
    annotation = known[name].annotation if name in known else UNKNOWN
    place[name] = _changed(place.get(name), left, override, names, annotation, (*path, name))
    return values


def _arguments(values: dict[str, Any], path: ValuePath) -> dict[str, Any]:
    """Return a copy of the arguments of a class."""
    arguments = values.get("init_args") or {}
    if not isinstance(arguments, dict):
        raise Refused((*path, "init_args"), f"must have values of its own, {{NAME: VALUE}}, got {arguments!r}")
    return dict(arguments)


def _added(values: Any, override: Override, path: ValuePath) -> list[Any]:
    """Return a list with one more item, or with the items of another list."""
    before = _structured(values, path) if isinstance(values, str) else values
    before = before if isinstance(before, list) else [] if before is None else [before]
    added = _structured(override.value, path)
    return [*before, *(added if isinstance(added, list) else [added])]


def _structured(text: str, path: ValuePath) -> Any:
    """Return the list or the dictionary that a text is in YAML, or the text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise Refused(path, f"{text} cannot be read: {one_line(error)}") from None


def _replaced(values: Any, override: Override, names: Names, annotation: Any, path: ValuePath) -> Any:
    """Return the new value. If it is the name of a class, it takes over the arguments that the class also has."""
    before = _arguments(values, path) if isinstance(values, dict) else None
    if not before or not re.fullmatch(r"[\w.]+", override.value) or override.value in ("null", "true", "false"):
        return override.value
    known = parameters(names.find(override.value, annotation, path)) or {}
    kept = {name: x for name, x in before.items() if name in known and _fits(x, known[name].annotation, names)}
    return {"class_path": override.value, "init_args": kept}


def _fits(value: Any, annotation: Any, names: Names) -> bool:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=Any if annotation is UNKNOWN else annotation)
    try:
        names.check(value, annotation)  # the parser imports what it names
        parser.parse_object({"value": value})
    except (ArgumentError, Refused):
        return False
    return True
