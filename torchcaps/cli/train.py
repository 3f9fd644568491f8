"""Train a recipe, then test it."""

import argparse
import multiprocessing
import os
import shlex
import sys
from pathlib import Path

from torchcaps.cli.checkpoints import find_checkpoint
from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe import add_recipe, build
from torchcaps.cli.test import print_test
from torchcaps.extras import needs
from torchcaps.signals import Stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps train`."""
    add_recipe(parser)
    parser.add_argument("--ckpt_path", help="checkpoint to go on from, or `last` for the newest of this recipe")
    parser.add_argument("--smoke", action="store_true", help="take two steps of two images, to see that all runs")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Train a recipe, then test it. Where a signal or a full disk ends it, say how to go on."""
    with needs("train"):
        from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    cli = build(options, overrides, logs=True, smoke=options.smoke)
    checkpoint = find_checkpoint(options, cli, options.ckpt_path, "")[0] if options.ckpt_path else None
    try:
        with bad_data():
            cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
            if isinstance(cli.trainer.strategy.launcher, _MultiProcessingLauncher):
                cli.trainer.loggers = []  # the test starts new processes, which would begin the logs anew
            print_test(cli)
    except Stopped as stop:
        for process in multiprocessing.active_children():  # of a spawned training
            process.terminate()
            process.join()
        if not cli.trainer.is_global_zero:
            sys.exit(0)  # the first process tells; Lightning kills it where another one ends with an error
        if cli.run_folder:
            stop.said += f"; {_way_on(options, overrides, cli.run_folder)}"
        raise
    except OSError as error:
        if cli.run_folder is None:
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise BadInput(f"{reason}; {_way_on(options, overrides, cli.run_folder)}") from error
    if cli.trainer.is_global_zero and cli.run_folder:
        print(f"run: {cli.run_folder}")


def _way_on(options: argparse.Namespace, overrides: list[str], run_folder: Path) -> str:
    """The command that goes on with a run."""
    last = run_folder / "checkpoints" / "last.ckpt"
    checkpoint = str(last) if last.is_file() else options.ckpt_path
    flags = [flag for flag, given in (("--small", options.small), ("--smoke", options.smoke)) if given]
    command = ["torchcaps", "train", options.recipe, *flags, *overrides]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    if checkpoint:
        command += ["--ckpt_path", checkpoint]
    return f"{'to go on' if checkpoint else 'nothing was saved; to start again'}: {shlex.join(command)}"
