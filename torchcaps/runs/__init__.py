"""Runs: what trainings have left, found, read and used again.

The files, from the outside in:

    run.py           the run
    places.py        where its files lie, and which is meant
    hub.py           folders of `save_pretrained` on the Hugging Face Hub
    checkpoint.py    a file, read once and checked
    comparison.py    what a training that is built of a run may change
"""

from torchcaps.utils.lazy import accessors

TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps.runs.checkpoint import Checkpoint
    from torchcaps.runs.run import Run

__all__ = ["Checkpoint", "Run"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = accessors(__name__)
