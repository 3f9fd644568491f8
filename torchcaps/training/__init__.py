"""Training with Lightning: the trainings of recipes, the module that all of them train, and callbacks to name there.

In the order in which a value given as an option passes them:

    overrides.py                  options that change values of a recipe, as they are given
    values.py                     all values of a training: the recipe's, changed by the options
    names.py, signatures.py       which classes and arguments the values may name
    build.py, parts.py, checks.py trainer, model and data, built of the values
    classifier.py                 the model: network, loss, optimizer, metrics

Beside them:

    errors.py                     one line for what is wrong with a value
    checkpoints.py                how checkpoints are saved, and resumed
    report.py, curves.py          what a training came to
    resident.py                   steps on samples that lie on the device, with `trainer.resident`
    trainer.py, progress.py, alive.py, monitors.py   the trainer, and what it says while it runs
"""

from torchcaps.utils.extras import check_installed
from torchcaps.utils.lazy import accessors

TYPE_CHECKING = False  # the name that type checkers know
if TYPE_CHECKING:
    from torchcaps.training.build import Training
    from torchcaps.training.classifier import Classifier
    from torchcaps.training.margin import SpreadMargin
    from torchcaps.training.mixing import mixup
    from torchcaps.training.one_cycle import OneCycle
    from torchcaps.training.report import Report
    from torchcaps.training.values import Values

__all__ = ["Classifier", "OneCycle", "Report", "SpreadMargin", "Training", "Values", "mixup"]

check_installed("train", "jsonargparse", "lightning", "matplotlib", "rich", "scipy", "sklearn", "torchmetrics", "yaml")

if not TYPE_CHECKING:
    __getattr__, __dir__ = accessors(__name__)
