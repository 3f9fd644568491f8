"""Train a recipe, then test it."""

import argparse
import multiprocessing
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.arguments import add_recipe, find_run
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
        "for each class in it; torchcaps train own/texts --data.file TABLE --data.text COLUMN --data.label COLUMN"
    )
    parser.add_argument("--smoke", action="store_true", help="take two steps of two images, as a check")


def run(options: argparse.Namespace) -> None:
    """Train a recipe, then test it. Where a signal or a full disk ends it, say how to continue."""
    training = _training(options)
    try:
        check_test(training)
        first = training.trainer.is_global_zero  # of several processes
        if first:
            print(f"trains {training.summary()}")
        with stop_all_on_error(training.trainer):
            training.fit()
            if first and training.best:
                print(f"best checkpoint: {training.best}, after epoch {training.best_epoch}")
            print_test(training)
        if first and training.run_folder:
            if training.report():
                print(f"report: {training.run_folder / 'report'}")
            print(f"run: {training.run_folder}")
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
    flags = [f"--{flag}" for flag in ("small", "smoke", "allow_code") if getattr(options, flag)]
    model = ["--model", options.model] if options.model else []
    # A checkpoint of a run that went on has all values that were given.
    tokens = [] if last.is_file() and is_place(options.recipe) else options.tokens
    command = ["torchcaps", "train", options.recipe, *flags, *model, *tokens]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    if checkpoint:
        command += ["--ckpt_path", checkpoint]
    return f"{'to continue' if checkpoint else 'nothing was saved; to start again'}: {shlex.join(command)}"
