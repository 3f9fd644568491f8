"""A trial: one training of a search, which reports its metric after every validation."""

import gc
import math
import warnings
from typing import Any

import numpy as np
import optuna
import torch
from lightning import Callback, LightningModule, Trainer
from optuna.exceptions import OptunaError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from torchcaps.data import DataError
from torchcaps.search.plan import Plan
from torchcaps.search.results import changes
from torchcaps.training.checkpoints import newest_whole
from torchcaps.utils.checks import one_line
from torchcaps.utils.signals import StopSignals

ENDS_THE_SEARCH = (DataError, ImportError, OSError, OptunaError, SQLAlchemyError)  # other trials would fail too


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


def run_trial(plan: Plan, trial: optuna.Trial, signals: StopSignals) -> None:
    """Train a trial to its end, from its newest checkpoint if it has one, and tell the study how it ended.

    Args:
        plan: the search.
        trial: a trial of the study; it gets its values here, unless it was begun before.
        signals: signals that ask to stop.

    Raises:
        ENDS_THE_SEARCH: what every other trial would fail from too, as a storage that does not answer.
        Stopped: a signal asked to stop; the trial can continue.
    """
    # A sampler of its own for each trial: what it chooses follows from the trials before, however often the search was
    # stopped.
    seed = np.random.SeedSequence([plan.seed, trial.number]).generate_state(1)[0]
    trial.study.sampler = optuna.samplers.TPESampler(seed=int(seed))
    for name, space in plan.values.items():
        trial._suggest(name, space)  # as `Study.ask` does; a trial that was begun before has its values
    metric, state = None, TrialState.COMPLETE
    try:
        metric = _fit(plan, trial, signals)
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except ENDS_THE_SEARCH:
        raise
    except Exception as error:  # a trial may fail in any way: out of memory, or values that do not fit each other
        known = isinstance(error, ValueError | FloatingPointError)
        trial.set_user_attr("error", one_line(error) if known else f"{type(error).__name__}: {one_line(error)}")
        state = TrialState.FAIL
    finally:
        if torch.cuda.is_available():
            gc.collect()  # a training is full of cycles
            torch.cuda.empty_cache()
    trial.study.tell(trial, metric, state)


def _fit(plan: Plan, trial: optuna.Trial, signals: StopSignals) -> float:
    """Train, and return the metric after the last validation."""
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
