"""A trial: one training of a search, which reports its metric after every validation."""

import gc
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from torchcaps.data import DataError
from torchcaps.search.plan import Plan
from torchcaps.training.build import Training
from torchcaps.training.checkpoints import newest_whole
from torchcaps.utils.checks import one_line
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.signals import StopSignals

RUNNING, COMPLETE, PRUNED, FAILED = "running", "complete", "pruned", "failed"
ENDS_THE_SEARCH = (DataError, ImportError, OSError)  # other trials would fail too


@dataclass(frozen=True)
class Trial:
    """What is known of a trial, as it stands in its file `trial.json`.

    Args:
        number: number in the search, from 0 on.
        values: the values that were searched, by their names.
        state: "running" (or stopped, or killed), "complete", "pruned" or "failed".
        reported: the metric after each validation.
        epochs: epochs that were trained, the one under way included.
        error: why it failed.
    """

    number: int
    values: dict[str, Any]
    state: str = RUNNING
    reported: list[float] = field(default_factory=list)
    epochs: int = 0
    error: str = ""

    @property
    def metric(self) -> float | None:
        """The metric after the last validation, or None before the first."""
        return self.reported[-1] if self.reported else None

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.state != RUNNING


class Pruned(Exception):
    """A trial ends early, because others are better."""


class Reports(Callback):
    """Report a metric after every validation, and keep it in the checkpoints of the run.

    Args:
        metric: name of the metric.
        report: function of all values so far and the number of the epoch; it may raise :class:`Pruned`.
    """

    def __init__(self, metric: str, report: Callable[[list[float], int], None]) -> None:
        self.metric, self.report = metric, report
        self.reported: list[float] = []
        self.epochs: list[int] = []  # in which they were reported, from 1 on

    def state_dict(self) -> dict[str, Any]:
        return {"reported": list(self.reported), "epochs": list(self.epochs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reported, self.epochs = state_dict["reported"], state_dict["epochs"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for count, epoch in enumerate(self.epochs, 1):  # of a run that continues
            self.report(self.reported[:count], epoch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = float(trainer.callback_metrics[self.metric])
        if not math.isfinite(value):
            raise FloatingPointError(f"{self.metric} is {value} after epoch {trainer.current_epoch + 1}")
        self.reported.append(float(f"{value:.7g}"))  # float32 has no more digits
        self.epochs.append(trainer.current_epoch + 1)
        self.report(list(self.reported), self.epochs[-1])


def run_trial(
    plan: Plan,
    number: int,
    values: Mapping[str, Any],
    report: Callable[[list[float]], bool],
    signals: StopSignals | None = None,
) -> Trial:
    """Train a trial to its end, from its newest checkpoint if it has one.

    Args:
        plan: the search.
        number: number of the trial.
        values: its values.
        report: function that is called after every validation with the metrics so far, also once for each of those
            before a checkpoint; it returns whether the trial ends here.
        signals: signals that ask to stop.

    Returns:
        The trial, which is complete, pruned or failed.

    Raises:
        DataError, ImportError, OSError: what every other trial would fail from too.
        Stopped: a signal asked to stop; the trial can continue.
    """
    folder, trial = plan.folder_of(number), Trial(number, dict(values))
    before = read_trial(folder)
    if before is not None and before.values != trial.values:
        shutil.rmtree(folder)  # a search of other values was here
    write_trial(folder, trial)

    def keep(reported: list[float], epochs: int) -> None:
        nonlocal trial
        trial = replace(trial, reported=reported, epochs=epochs)
        write_trial(folder, trial)
        if report(reported):
            raise Pruned

    try:
        _fit(plan, folder, values, Reports(plan.search.metric, keep), signals)
        if not trial.reported:
            raise ValueError("the training ended before its first validation: train longer, or validate more often")
        trial = replace(trial, state=COMPLETE)
    except Pruned:
        trial = replace(trial, state=PRUNED)
    except ENDS_THE_SEARCH:
        raise
    except Exception as error:  # a trial may fail in any way: out of memory, or values that do not fit each other
        known = isinstance(error, ValueError | FloatingPointError)
        said = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
        trial = replace(trial, state=FAILED, error=said)
    finally:
        if torch.cuda.is_available():
            gc.collect()  # a training is full of cycles
            torch.cuda.empty_cache()
    write_trial(folder, trial)
    return trial


def _fit(plan: Plan, folder: Path, values: Mapping[str, Any], reports: Reports, signals: StopSignals | None) -> None:
    checkpoint, _ = newest_whole(folder.glob("version_*/checkpoints"))
    training = Training(plan.recipe, plan.arguments(values), folder, signals=signals, allow_code=plan.allow_code)
    trainer: Any = training.trainer
    if trainer.world_size > 1:
        raise ValueError("a trial trains in one process: add --trainer.devices=1")
    trainer.callbacks.insert(0, reports)
    try:
        trainer.fit(training.model, training.datamodule, ckpt_path=checkpoint, weights_only=True)
    finally:
        training.give_back_folder()


def read_trial(folder: Path) -> Trial | None:
    """Read the file of a trial; None if there is none, or if it is not one."""
    try:
        return Trial(**json.loads((folder / "trial.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_trial(folder: Path, trial: Trial) -> None:
    """Write the file of a trial."""
    write_text_whole(folder / "trial.json", json.dumps(asdict(trial), indent=1))


def read_trials(plan: Plan) -> list[Trial]:
    """Return all trials of a search that have begun, in their order."""
    found = (read_trial(path.parent) for path in plan.folder.glob("trial_*/trial.json"))
    return sorted((trial for trial in found if trial is not None), key=lambda trial: trial.number)


def best_of(plan: Plan, trials: list[Trial]) -> Trial | None:
    """Return the complete trial with the best metric, the first of equals; None if no trial is complete."""
    sign = 1 if plan.search.mode == "max" else -1
    complete = [trial for trial in trials if trial.state == COMPLETE and trial.metric is not None]
    return max(complete, key=lambda trial: sign * (trial.metric or 0.0), default=None)
