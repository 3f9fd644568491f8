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

from torchcaps.utils.extras import check_installed
from torchcaps.utils.lazy import find

TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps.training.classifier import Classifier
    from torchcaps.training.margin import SpreadMargin
    from torchcaps.training.mixing import mixup
    from torchcaps.training.one_cycle import OneCycle
    from torchcaps.training.report import Report

__all__ = ["Classifier", "OneCycle", "Report", "SpreadMargin", "mixup"]

check_installed("train", "jsonargparse", "lightning", "matplotlib", "rich", "scipy", "sklearn", "torchmetrics", "yaml")

if not TYPE_CHECKING:

    def __getattr__(name):
        return find(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
