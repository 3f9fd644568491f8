"""A trial: one training of a search, which reports its metric after every validation."""

import math
import warnings
from typing import Any

import optuna
from lightning import Callback, LightningModule, Trainer

from torchcaps.search.plan import Plan
from torchcaps.search.results import changes
from torchcaps.training.checkpoints import newest_whole
from torchcaps.utils.signals import StopSignals


class Reports(Callback):
    """Report a metric to a trial after every validation, and end the training if the trial shall end early."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial, self.metric = trial, metric
        self.reported: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"reported": self.reported}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reported = state_dict["reported"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value, epoch = float(trainer.callback_metrics[self.metric]), trainer.current_epoch + 1
        if not math.isfinite(value):
            raise FloatingPointError(f"{self.metric} is {value} after epoch {epoch}")
        self.reported.append(float(f"{value:.7g}"))  # float32 has no more digits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trial that was killed may have reported it before
            self.trial.report(self.reported[-1], len(self.reported) - 1)
        self.trial.set_user_attr("epochs", epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def train(plan: Plan, trial: optuna.Trial, signals: StopSignals) -> float:
    """Train a trial to its end, from its newest checkpoint if it has one. Return the metric after the last validation.

    Raises:
        optuna.TrialPruned: the trial shall end early.
        Stopped: a signal asked to stop; the trial can continue.
    """
    folder = plan.folder_of(trial.number)
    checkpoint, _ = newest_whole(folder.glob("version_*/checkpoints"))
    training = plan.training(trial.params, folder=folder, signals=signals)
    trainer: Any = training.trainer
    trial.set_user_attr("changes", changes(training))
    reports = Reports(trial, plan.metric)
    trainer.callbacks.insert(0, reports)
    try:
        trainer.fit(training.model, training.datamodule, ckpt_path=checkpoint, weights_only=True)
    finally:
        training.give_back_folder()
    if not reports.reported:
        raise ValueError("the training ended before its first validation: train longer, or validate more often")
    return reports.reported[-1]
