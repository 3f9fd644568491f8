"""What Lightning tells everybody about choices that are this library's, kept from the user during a command."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGES = (
    ".*does not have many workers.*",  # batches of tensors in memory need none
    "Total length of `list` across ranks is zero.*",  # a recipe may have no validation set
    ".*isinstance\\(treespec, LeafSpec\\).*",
    "LightningCLI's args parameter is intended to run from within Python.*",
    "Experiment logs directory .* exists and is not empty.*",  # two loggers share it
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # the order of samples begins there
)
LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Within this context Lightning logs nothing below a warning, and no warning of MESSAGES; after it all is as before."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    with warnings.catch_warnings():
        for message in MESSAGES:
            warnings.filterwarnings("ignore", message)
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
