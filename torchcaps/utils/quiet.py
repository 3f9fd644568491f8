"""Silence for messages of Lightning that users of the commands cannot act on."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torchcaps.utils.extras import needs

MESSAGES = (  # regular expressions for warnings
    ".*does not have many workers.*",  # batches of tensors in memory need no workers
    "Total length of `list` across ranks is zero.*",  # recipes without a validation set
    ".*isinstance\\(treespec, LeafSpec\\).*",
    "The number of training batches .* is smaller than the logging interval.*",  # curves have a point for each epoch
    "Experiment logs directory .* exists and is not empty.*",  # two loggers share the folder
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # the order of samples is resumed too
)
LEVELS = {  # of loggers
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "lightning.pytorch.profilers": logging.INFO,  # their results, for those who ask for one
    "torch.multiprocessing.spawn": logging.ERROR,  # it warns that it ends the other processes where one fails
}


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Within this context loggers have LEVELS, and no warning is one of MESSAGES. Afterwards all is as before.

    It changes the filters of the whole process, as `warnings.catch_warnings` does: use it in one thread at a time.
    """
    with needs("train"):
        import lightning.pytorch  # noqa: F401  # its import sets levels of its own

    levels = {name: logging.getLogger(name).level for name in LEVELS}
    with warnings.catch_warnings():
        quiet_process()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def quiet_process() -> None:
    """Set LEVELS and ignore MESSAGES in this process."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message)
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
