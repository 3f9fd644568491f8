"""Train a recipe, then test it."""

import argparse
import gc
import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from torchcaps.cli.arguments import add_recipe, find_run
from torchcaps.cli.table import as_text, print_table
from torchcaps.cli.test import check_test, print_test
from torchcaps.utils.processes import stop_all_on_error
from torchcaps.utils.signals import Stopped

if TYPE_CHECKING:
    from torchcaps.training.build import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps train`."""
    add_recipe(parser)
    parser.add_argument(
        "--ckpt_path",
        help="continue a run, with its values: `last` for the newest checkpoint of this recipe, or a path. A folder of "
        "a run, or a checkpoint, in place of RECIPE does the same",
    )
    parser.epilog = (
        f"{parser.epilog}. Your own data: torchcaps train own/images --data.folder FOLDER, with a folder of pictures "
        "for each class in it; torchcaps train own/arrays --data.folder FOLDER --data.layout CL, with .npy or .npz "
        "files; torchcaps train own/masks --data.folder FOLDER, with folders images and masks in it; torchcaps train "
        "own/texts --data.file TABLE --data.text COLUMN --data.label COLUMN"
    )
    parser.add_argument("--smoke", action="store_true", help="take two steps of two images, as a check")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="train once with each of these seeds, one after another in one process, and print the mean and the "
        "standard deviation of what the tests give",
    )


def run(options: argparse.Namespace) -> None:
    """Train a recipe, then test it, once or with each of several seeds."""
    if options.seeds is None:
        _train(options)
        return
    seeds = _check_seeds(options)
    results: list[dict[str, float]] = []
    try:
        for place, seed in enumerate(seeds):
            print(f"seed {seed}")
            try:
                results.append(_train(_with_seed(options, seed)))
                gc.collect()  # a training lies in cycles: its samples and its graph would take memory from the next one
            except Stopped as stop:
                if left := seeds[place + 1 :]:
                    stop.message += f"; then: {_command(options, ['--seeds', *map(str, left)])}"
                raise
    finally:
        if results:  # also of those that were done before a stop or an error
            _print_means(seeds, results)


def _print_means(seeds: Sequence[int], results: Sequence[dict[str, float]]) -> None:
    """Print the results of the first seeds, and what they are together."""
    of_all = [(name, [result[name] for result in results]) for name in results[0]]
    rows = [
        (name, as_text(mean(values)), as_text(stdev(values)) if len(values) > 1 else "", *map(as_text, values))
        for name, values in of_all
    ]
    header = ("", "mean", "standard deviation", *(f"seed {seed}" for seed in seeds[: len(results)]))
    print_table(header, rows)


def _check_seeds(options: argparse.Namespace) -> list[int]:
    """Return the seeds, after a check that each of them begins a training of its own."""
    from torchcaps.runs.places import is_place

    seeds: list[int] = options.seeds
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must be different numbers, got {' '.join(map(str, seeds))}")
    if wrong := [seed for seed in seeds if not 0 <= seed < 2**32]:
        raise ValueError(f"--seeds must be from 0 to {2**32 - 1}, got {wrong[0]}")
    if any(override.path[0] == "seed_everything" for override in options.overrides):
        raise ValueError("--seeds and --seed_everything both choose the seed: leave out one of them")
    if options.ckpt_path is not None or is_place(options.recipe):
        raise ValueError("--seeds begins trainings, and a run that goes on has a seed: leave it out, or give a recipe")
    return seeds


def _with_seed(options: argparse.Namespace, seed: int) -> argparse.Namespace:
    """Return the options of a training with a seed."""
    from torchcaps.training.overrides import overrides_of

    (override,) = overrides_of({"seed_everything": seed})
    changed = {"overrides": [*options.overrides, override], "tokens": [*options.tokens, *override.tokens]}
    return argparse.Namespace(**{**vars(options), **changed})


def _train(options: argparse.Namespace) -> dict[str, float]:
    """Train a recipe, test it, and return the metrics. Where a signal or a full disk ends it, say how to continue."""
    training = _training(options)
    try:
        if options.seeds is not None and training.trainer.world_size > 1:
            raise ValueError("--seeds is for a single process: leave it out, or train on one device")
        check_test(training)
        first = training.trainer.is_global_zero  # of several processes
        if first:
            print(f"trains {training.summary()}")
        with stop_all_on_error(training.trainer):
            training.fit()
            if first and training.best:
                print(f"best checkpoint: {training.best}, after epoch {training.best_epoch}")
            metrics = print_test(training)
        if first and training.run_folder:
            if training.report():
                print(f"report: {training.run_folder / 'report'}")
            print(f"run: {training.run_folder}")
        return metrics
    except Stopped as stop:
        for process in multiprocessing.active_children():  # of a spawned training
            process.terminate()
            process.join()
        if not training.trainer.is_global_zero:
            sys.exit(0)  # only the first process reports; Lightning would kill it if another one ended with an error
        if training.run_folder:
            stop.message += f"; {_resume_command(options, training.run_folder)}"
        raise
    except OSError as error:
        if training.run_folder is None or isinstance(error, BrokenPipeError):
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise ValueError(f"{reason}; {_resume_command(options, training.run_folder)}") from error
    except Exception:
        training.give_back_folder()
        raise


def _training(options: argparse.Namespace) -> "Training":
    """Build the training that was asked for: of a recipe, or of a run that goes on."""
    from torchcaps.recipes import load_recipe
    from torchcaps.runs.places import has_several, is_place
    from torchcaps.training.build import Training
    from torchcaps.training.values import Values

    if options.ckpt_path is not None or is_place(options.recipe):
        which = options.ckpt_path or ("last" if has_several(options.recipe) else None)
        run = find_run(options, which=which)
        return run.training(options.overrides, resume=True, smoke=options.smoke, signals=options.signals)
    recipe = load_recipe(options.recipe, options.small)
    values = Values.of(recipe, options.overrides, options.allow_code, options.smoke)
    return Training(values, Path(options.runs) / recipe.folder, options.signals)


def _resume_command(options: argparse.Namespace, run_folder: Path) -> str:
    """Return the command that resumes a run, and what to do with it."""
    from torchcaps.runs.places import is_place

    last = run_folder / "checkpoints" / "last.ckpt"
    checkpoint = str(last) if last.is_file() else options.ckpt_path
    resumed = ["--ckpt_path", checkpoint] if checkpoint else []
    command = _command(options, resumed, with_changes=not last.is_file() or not is_place(options.recipe))
    return f"{'to continue' if checkpoint else 'nothing was saved; to start again'}: {command}"


def _command(options: argparse.Namespace, more: Sequence[str], with_changes: bool = True) -> str:
    """Return a command with the options that were given, and more. A checkpoint of a run that went on has all values
    that were given: its command is without changes."""
    flags = [f"--{flag}" for flag in ("small", "smoke", "allow_code") if getattr(options, flag)]
    model = ["--model", options.model] if options.model else []
    command = ["torchcaps", "train", options.recipe, *flags, *model, *(options.tokens if with_changes else [])]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    return shlex.join([*command, *more])
