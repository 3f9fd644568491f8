"""Runs: what trainings have left, found, read and used again.

`Run` is a run; `checkpoint.py` reads its files, `places.py` knows where they lie, `hub.py` downloads them.
"""

from torchcaps.utils.extras import needs

with needs("train"):
    from torchcaps.runs.checkpoint import Checkpoint
    from torchcaps.runs.run import Run

__all__ = ["Checkpoint", "Run"]
