"""Training with Lightning: the module that every recipe trains, and callbacks that recipes can name.

The other files serve the commands:

    build.py                      trainer, model and data of a recipe
    names.py, signatures.py       which classes and arguments its values may name
    overrides.py, errors.py       values given as options, and one line for what is wrong
    parts.py                      building of one part
    checkpoints.py, checkpoint_files.py   runs are saved, read and continued
    report.py, calibration.py     what a training came to
    trainer.py, progress.py, alive.py, monitors.py   the trainer, and what it says while it runs
"""

from torchcaps.utils.extras import needs

with needs("train"):
    from torchcaps.training.classifier import Classifier
    from torchcaps.training.margin import SpreadMargin
    from torchcaps.training.mixing import mixup
    from torchcaps.training.one_cycle import OneCycle
    from torchcaps.training.report import Report

__all__ = ["Classifier", "OneCycle", "Report", "SpreadMargin", "mixup"]
