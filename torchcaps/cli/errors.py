"""Bad input: a line on stderr that says what was wrong, what was expected and what to do."""

import argparse
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchcaps.utils.checks import whole_number


class BadInput(Exception):
    """The user's input cannot be used; the message is for the user."""


def positive_int(text: str) -> int:
    """Return the number of an option that takes 1 or more, a `type` of argparse."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return number


@contextmanager
def bad_data() -> Iterator[None]:
    """Within this context errors in data, or values that do not fit the network or the loss, are bad input."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from torchcaps.data import DataError

    try:
        yield
    except UnicodeEncodeError:  # a name that cannot be printed; torchcaps.cli.main says so
        raise
    except (DataError, ValueError, MisconfigurationException) as error:
        raise BadInput(str(error)) from error
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        file = Path(frame.f_code.co_filename).as_posix()
        if file.endswith(("torch/nn/modules/conv.py", "torch/nn/modules/linear.py")):
            raise BadInput(f"the network does not fit the samples: {error}") from error
        raise
