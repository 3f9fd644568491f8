"""Training with Lightning: the module that every recipe trains, and callbacks that recipes can name.

The other files serve the commands: they build a training from a recipe (`build.py`, `errors.py`, `trainer.py`), save it
(`checkpoints.py`) and report on it (`progress.py`, `alive.py`).
"""

from torchcaps.utils.extras import needs

with needs("train"):
    from torchcaps.training.classifier import Classifier
    from torchcaps.training.margin import SpreadMargin
    from torchcaps.training.mixing import mixup
    from torchcaps.training.one_cycle import OneCycle
    from torchcaps.training.report import Report

__all__ = ["Classifier", "OneCycle", "Report", "SpreadMargin", "mixup"]
