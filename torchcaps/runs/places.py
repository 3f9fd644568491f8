"""Where the checkpoints of runs lie, and which of them is meant."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from torchcaps.recipes import is_recipe, load_recipe
from torchcaps.runs.checkpoint import CONFIG, Checkpoint, damage
from torchcaps.runs.hub import HUB, downloaded
from torchcaps.training.checkpoints import CHECKPOINT_NAMES, MONITORS_OF_NEWEST
from torchcaps.utils.checks import whole_number
from torchcaps.utils.files import user_path
from torchcaps.utils.processes import rank

A_RUN = "give the folder of a run, such as runs/quickstart/version_0"


def is_place(name: str) -> bool:
    """Return whether a name is a folder, a checkpoint or a repository of the Hub, and not a recipe."""
    exists = name.startswith(HUB) or name.endswith(".ckpt") or os.path.exists(user_path(name))
    return exists and not is_recipe(name)


def folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run of a checkpoint, or the one that it lies in. One of `save_pretrained` is its own."""
    if checkpoint.is_dir():
        return checkpoint
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def has_several(source: str) -> bool:
    """Return whether a source may have several checkpoints: it is a recipe, or the folder of a run."""
    return not is_place(source) or _has_several(source)


def _has_several(place: str) -> bool:
    path = user_path(place)
    return os.path.isdir(path) and not os.path.isfile(path / CONFIG)


def find_checkpoint(source: str, which: str | None, small: bool, runs: Path) -> Checkpoint:
    """Find a checkpoint, or a folder of `save_pretrained`, and read it; see :meth:`torchcaps.runs.Run.find`.

    Raises:
        ValueError: there is none; the message says what to do.
    """
    place = source if is_place(source) else None
    if small and place is not None:
        raise ValueError(f"{source} is small or not, as it was trained: leave out --small (in Python, `small`)")
    if which not in (None, "last", "best"):
        place, which = which, None
    if place is None:
        newest = _newest(runs / load_recipe(source, small).folder, of_recipe=True)
    elif place.startswith(HUB) or not _has_several(place):
        if which is not None:
            raise ValueError(
                f"{place} is no run with several checkpoints: leave out --ckpt_path {which} (in Python, `which`)"
            )
        path = downloaded(place.removeprefix(HUB)) if place.startswith(HUB) else user_path(place)
        return Checkpoint.read(path if os.path.isdir(path) else _intact(path))
    else:
        newest = _newest(user_path(place))
    if which == "last":
        return Checkpoint.read(newest)
    best = newest.with_name("best.ckpt")
    if best.is_file():
        return Checkpoint.read(_intact(best))
    checkpoint = Checkpoint.read(newest)
    if named := _named_best(checkpoint):
        return Checkpoint.read(_intact(named))
    if which == "best":
        raise ValueError(f"{newest.parent} has no best checkpoint: its recipe keeps none; take the last one, `last`")
    return checkpoint


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Return the checkpoints in folders `version_N/checkpoints`, intact or not, those of the highest N first."""
    numbered = [(whole_number(folder.parent.name.removeprefix("version_")), folder) for folder in folders]
    ordered = sorted(((number, folder) for number, folder in numbered if number is not None), reverse=True)
    return [folder / name for _, folder in ordered for name in CHECKPOINT_NAMES if (folder / name).is_file()]


def newest_intact(folders: Iterable[Path]) -> tuple[Path | None, str]:
    """Return the newest intact checkpoint in such folders, if there is one, and what is wrong with a newer one."""
    first_problem = ""
    for path in newest_first(folders):
        problem = damage(path)
        if problem is None:
            return path, first_problem
        first_problem = first_problem or f"{path} is damaged ({problem})"
    return None, first_problem


def warn(text: str) -> None:
    """Print a warning about a run; of several processes only the first prints it."""
    if not rank():
        print(f"torchcaps: {text}", file=sys.stderr)


def _newest(folder: Path, of_recipe: bool = False) -> Path:
    """Return the newest intact checkpoint of a run, or of the runs in a folder."""
    for name in CHECKPOINT_NAMES:
        if (newest := folder / "checkpoints" / name).is_file():
            return _intact(newest)
    path, problem = newest_intact(folder.glob("version_*/checkpoints"))
    if path is None and problem:
        raise ValueError(f"{problem}, and there is no intact checkpoint under {folder}: train again")
    if path is None:
        # A recipe may have runs elsewhere, so that no command to train it would be right.
        how = "train first, or give the --runs and --small of its training" if of_recipe else A_RUN
        raise ValueError(f"{folder} has no checkpoint of a run: {how}")
    if problem:
        warn(f"{problem}: taking {path}, the newest that is intact")
    return path


def _intact(path: Path) -> Path:
    """Return the checkpoint that was asked for, or `previous.ckpt` if it is a damaged `last.ckpt`."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no checkpoint {path}: give the path of a .ckpt file, or the folder of a run")
    previous = path.with_name("previous.ckpt")
    if path.name == "last.ckpt" and previous.is_file() and (problem := damage(path)) and not damage(previous):
        warn(f"{path} is damaged ({problem}): taking {previous}, the one before")
        return previous
    return path


def _named_best(newest: Checkpoint) -> Path | None:
    """Return the best checkpoint, beside the newest one of a run, that a callback of its recipe has named."""
    for state in newest.training.get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("monitor") not in MONITORS_OF_NEWEST:
            best = newest.path.parent / Path(str(state.get("best_model_path"))).name
            if best.suffix == ".ckpt" and best.is_file():
                return best
    return None
