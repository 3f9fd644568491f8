"""Train a recipe, then test it."""

import argparse
import multiprocessing
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.checkpoints import build_run, can_be_resumed, find_run, is_run, runs_of_run
from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe_commands import add_recipe, build_training, check_test, load_requested, run_test, runs_of
from torchcaps.utils.processes import ends_together
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


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train a recipe, then test it. Where a signal or a full disk ends it, say how to continue."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    checkpoint = None
    if options.ckpt_path is None and not is_run(options.recipe):
        recipe = load_requested(options)
        training = build_training(options, overrides, recipe, runs_of(options, recipe), options.smoke)
    else:
        resumed = find_run(options, overrides, options.ckpt_path or "last", resumed=True)
        checkpoint, folder = resumed.checkpoint, runs_of_run(options, resumed)
        training = build_run(options, overrides, resumed, "", folder=folder, smoke=options.smoke)
    try:
        check_test(training)
        if training.trainer.is_global_zero:
            print(f"trains {training.what()}")
        with bad_data(), can_be_resumed(checkpoint), ends_together(training.trainer):
            training.trainer.fit(training.model, training.datamodule, ckpt_path=checkpoint, weights_only=True)
            if isinstance(training.trainer.strategy.launcher, _MultiProcessingLauncher):
                training.trainer.loggers = []  # the test starts new processes, which would begin the logs anew
            best = _take_best(training)
            _validate(training)
            run_test(training)
            _keep_facts(training, best)
    except Stopped as stop:
        for process in multiprocessing.active_children():  # of a spawned training
            process.terminate()
            process.join()
        if not training.trainer.is_global_zero:
            sys.exit(0)  # only the first process reports; Lightning would kill it if another one ended with an error
        if training.run_folder:
            stop.said += f"; {_resume_command(options, overrides, training.run_folder)}"
        raise
    except (BadInput, FloatingPointError, ImportError):
        training.give_back_folder()
        raise
    except OSError as error:
        if training.run_folder is None or isinstance(error, BrokenPipeError):
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise BadInput(f"{reason}; {_resume_command(options, overrides, training.run_folder)}") from error
    if training.trainer.is_global_zero and training.run_folder:
        print(f"run: {training.run_folder}")


def _take_best(training: "Training") -> Path | None:
    """Give the model the weights of the best checkpoint, if the recipe keeps one; return its path."""
    from torchcaps.training.checkpoint_files import read_checkpoint

    best = training.best_checkpoint()
    if best is not None:
        content = read_checkpoint(best, "state_dict", "epoch")
        training.model.load_state_dict(content["state_dict"])
        epoch = content["epoch"] + 1
        if report := training.report():
            report.about["epoch"] = epoch
        if training.trainer.is_global_zero:
            print(f"best checkpoint: {best}, after epoch {epoch}")
    return best


def _validate(training: "Training") -> None:
    """Let the report see the validation samples, if there are both."""
    from torchcaps.training.monitors import validates

    trainer = training.trainer
    if training.report() and validates(trainer, training.datamodule):
        loggers, trainer.loggers = trainer.loggers, []  # the curves would get one more point
        trainer.validate(training.model, training.datamodule, verbose=False)
        trainer.loggers = loggers


def _keep_facts(training: "Training", best: Path | None) -> None:
    """Write what the report found into the checkpoint that was tested."""
    from torchcaps.training.checkpoints import add_facts

    report = training.report()
    if report is None or training.run_folder is None or not training.trainer.is_global_zero:
        return
    print(f"report: {training.run_folder / 'report'}")
    path = best or training.run_folder / "checkpoints" / "last.ckpt"
    if path.is_file():
        add_facts(path, report.about)


def _resume_command(options: argparse.Namespace, overrides: list[str], run_folder: Path) -> str:
    """Return the command that resumes a run, and what to do with it."""
    last = run_folder / "checkpoints" / "last.ckpt"
    checkpoint = str(last) if last.is_file() else options.ckpt_path
    flags = [f"--{flag}" for flag in ("small", "smoke", "allow_code") if getattr(options, flag)]
    model = ["--model", options.model] if options.model else []
    if last.is_file() and is_run(options.recipe):  # it has all values that were given
        overrides = []
    command = ["torchcaps", "train", options.recipe, *flags, *model, *overrides]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    if checkpoint:
        command += ["--ckpt_path", checkpoint]
    return f"{'to continue' if checkpoint else 'nothing was saved; to start again'}: {shlex.join(command)}"
