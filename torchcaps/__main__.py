"""`torchcaps` and `python -m torchcaps`: from its beginning on, Ctrl-C ends a command in one line.

Until the handler is there, only what Python has loaded at its start is imported: an interrupt would be a traceback.
"""

import os
import sys
from _signal import SIGINT, default_int_handler, getsignal, signal


def run() -> None:
    """Run the command that was typed, as the console script does."""
    if getsignal(SIGINT) is default_int_handler:  # it may be ignored, as in background jobs of a script
        signal(SIGINT, _end)
    from torchcaps.cli import run

    run()


def _end(number: int, frame: object) -> None:
    # An exception would do for most lines of code, but an import may lose it, or make another one of it.
    os.write(2, b"torchcaps: stopped by SIGINT\n")
    os._exit(128 + number)


if __name__ == "__main__":
    # Python puts the working folder first, and a file in it such as wandb.py would be imported. `torchcaps` does not.
    if os.path.realpath(sys.path[0]) == os.getcwd() != os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
        del sys.path[0]
    run()
