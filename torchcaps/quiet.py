"""Silence for messages of Lightning that users of the commands cannot act on."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torchcaps.extras import needs

MESSAGES = (  # regular expressions for warnings
    ".*does not have many workers.*",  # batches of tensors in memory need no workers
    "Total length of `list` across ranks is zero.*",  # recipes without a validation set
    ".*isinstance\\(treespec, LeafSpec\\).*",
    "LightningCLI's args parameter is intended to run from within Python.*",
    "Experiment logs directory .* exists and is not empty.*",  # two loggers share the folder
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # the order of samples is resumed too
)
LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Within this context Lightning logs warnings only, and none of MESSAGES. Afterwards everything is as before."""
    with needs("train"):
        import lightning.pytorch  # noqa: F401  # its import sets levels of its own

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
