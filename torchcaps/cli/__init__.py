"""The command line, `torchcaps COMMAND ...`: a module here for each command, with its arguments and what it does.

`arguments.py` turns arguments into plain values, `errors.py` knows which errors are one line, `table.py` prints tables.

The modules import what they need, PyTorch included, when the command runs, so that help and completion are quick.
"""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

from torchcaps._version import __version__
from torchcaps.cli import (
    bench,
    evaluate,
    explain,
    export,
    models,
    predict,
    recipes,
    reproduce,
    search,
    show,
    test,
    train,
)
from torchcaps.cli.arguments import changes_in
from torchcaps.cli.errors import is_for_users
from torchcaps.utils.checks import one_line, whole_number
from torchcaps.utils.processes import LAUNCHERS, rank, should_print
from torchcaps.utils.quiet import quiet_lightning
from torchcaps.utils.signals import Stopped, StopSignals

SHORT = {  # names of values that people give without those before them
    **dict.fromkeys(("optimizer", "scheduler", "loss", "network", "class_weights"), "model"),
    **dict.fromkeys(("max_epochs", "max_steps", "devices", "accelerator", "precision", "callbacks"), "trainer"),
    **dict.fromkeys(("batch_size", "num_workers", "root", "folder", "file", "split"), "data"),
    "lr": "model.optimizer",
}
COMMANDS = (train, test, predict, search, explain, show, evaluate, export, recipes, reproduce, models, bench)


def run() -> None:
    """Run the command that was typed, as the console script does."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks how a line could continue
        try:
            import argcomplete
        except ImportError:
            sys.exit(1)  # there is no completion, and nothing is run
        argcomplete.autocomplete(parser())
    if sys.stdout.encoding.lower() != "utf-8":  # it may lack characters of results, such as names of classes
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its status: 0, 2 after a line about bad input, 128 plus the signal that stopped it."""
    try:
        options, tokens = parser().parse_known_args(arguments)
        options.tokens = tokens
        check_launcher()
        quiet = quiet_lightning() if options.takes_overrides else nullcontext()
        with print_warnings_in_one_line(), quiet, StopSignals() as options.signals:
            check_overrides(options)
            options.overrides = changes_in(options)
            options.run(options)
            sys.stdout.flush()
    except BrokenPipeError:  # of `torchcaps ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 0
    except UnicodeEncodeError as error:
        print(f"torchcaps: {error.object!a} is a name that is not in UTF-8: rename it", file=sys.stderr)
        return 2
    except Stopped as stop:
        with suppress(OSError):  # the terminal may be gone
            if not rank():
                print(f"torchcaps: {stop.message}", file=sys.stderr)
        return stop.status
    except Exception as error:
        if not is_for_users(error):
            raise
        if should_print(error):
            print(f"torchcaps: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def print_warnings_in_one_line() -> Iterator[None]:
    """Within this context, a warning for users is printed as other notes are, without a line of code."""
    before = warnings.formatwarning

    def form(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is not UserWarning:  # it is for developers
            return before(message, category, filename, lineno, line)
        return f"torchcaps: {one_line(UserWarning(message))}\n"

    warnings.formatwarning = form
    try:
        yield
    finally:
        warnings.formatwarning = before


def check_launcher() -> None:
    """Check that the variables of launchers are numbers. Where one is not, no import of Lightning succeeds."""
    for name in LAUNCHERS:
        if name in os.environ and whole_number(os.environ[name]) is None:
            raise ValueError(
                f"the environment variable {name} must be a whole number, got {os.environ[name]!r}: unset it; torchrun "
                "and srun set it themselves"
            )


def check_overrides(options: argparse.Namespace) -> None:
    """Check that each argument that is no option of the command names a value of a recipe."""
    values = ("seed_everything", "model", "data", "trainer")
    for token in options.tokens:
        name = token.partition("=")[0].rstrip("+")
        if options.takes_overrides and (not token.startswith("--") or name[2:].partition(".")[0] in values):
            continue
        first, _, rest = name[2:].partition(".")
        near = difflib.get_close_matches(first, values, n=1)
        if options.takes_overrides and first in SHORT:
            meant = f"--{SHORT[first]}.{name[2:]}"
        elif options.takes_overrides and near and rest:
            meant = f"--{near[0]}.{rest}"
        else:
            meant = next(iter(difflib.get_close_matches(name, options.options, n=1)), "")
        hint = f"; did you mean {meant}?" if meant else f"; see torchcaps {options.command} --help"
        raise ValueError(f"unknown argument {name}{hint}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    top = _Parser(
        prog="torchcaps",
        description="Train, test and look inside capsule networks.",
        epilog='Completion in bash and zsh: pip install argcomplete; eval "$(register-python-argcomplete torchcaps)"',
    )
    top.add_argument("--version", action="version", version=f"torchcaps {__version__}")
    commands: Any = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        name, what = command.__name__.rpartition(".")[2], (command.__doc__ or "").partition("\n")[0]
        command_parser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        command_parser.set_defaults(run=command.run, takes_overrides=False)
        command.add_arguments(command_parser)
        command_parser.set_defaults(
            options=[name for action in command_parser._actions for name in action.option_strings if name[1] == "-"]
        )
    return top
