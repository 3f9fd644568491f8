"""Checkpoints of a training: how they are saved, so that a run can resume exactly. `torchcaps.runs` finds and reads
them."""

import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.optim import SGD, Optimizer

from torchcaps.data.files import DataError
from torchcaps.data.splits import SPLIT_KEY
from torchcaps.training.curves import metrics_of
from torchcaps.utils.checks import counted, one_line
from torchcaps.utils.files import make_folder, sync_folder, write_whole
from torchcaps.utils.processes import PATIENCE, lost_peer
from torchcaps.utils.quiet import quiet_process
from torchcaps.utils.signals import Stopped, StopSignals

# Newest first. `next.ckpt` exists only until it is renamed to `last.ckpt`.
CHECKPOINT_NAMES = ("next.ckpt", "last.ckpt", "previous.ckpt")
VALUES_KEY = "recipe"  # key of a checkpoint for the values of its recipe
FILES_KEY = "files"  # key of a checkpoint for the user's own files of its recipe, if modules beside them may run
FACTS_KEY = "about"  # key of a checkpoint for the facts of the training, see `Report`
MONITORS_OF_NEWEST = (None, "epoch", "step")  # of a ModelCheckpoint that keeps the newest checkpoints, not the best
PATHS_IN_STATE = ("best_model_path", "kth_best_model_path", "last_model_path")  # of a ModelCheckpoint


class CannotResume(ValueError):
    """A checkpoint has no state that this training can go on from; the message says why."""


@contextmanager
def blame_checkpoint(path: Any) -> Iterator[None]:
    """Within this context, errors say that a checkpoint has no state that fits the training."""
    try:
        yield
    except (CannotResume, DataError, OSError, ImportError, FloatingPointError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if path is None or lost_peer(error):
            raise
        raise CannotResume(
            f"{path} has no state that this training can be resumed from ({type(error).__name__}: {one_line(error)}): "
            "expected one that `torchcaps train` wrote for the same recipe"
        ) from error


class BlamingConnector(_CheckpointConnector):
    """What restores the state of a training in Lightning, whose errors then name the checkpoint."""

    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        with blame_checkpoint(checkpoint_path):
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only)

    def restore_training_state(self) -> None:
        with blame_checkpoint(self.trainer.ckpt_path):
            super().restore_training_state()


class FirstStep(Callback):
    """Know whether a training is in the first step of its optimizer, which finds what is missing in a restored state.

    Attributes:
        under_way: whether it is.
    """

    def __init__(self) -> None:
        self.under_way, self._taken = False, False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.under_way, self._taken = not self._taken, True

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.under_way = False


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint to a temporary file, and rename it when all of it is on the disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        def write(unfinished: Path) -> None:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)

        write_whole(Path(path), write)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint. It has the paths of other checkpoints, which Lightning deletes when better ones come. The
        folder may have been moved since: each path becomes that of the file of the same name beside the checkpoint, or
        "" if there is none."""
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **options)
        states = checkpoint.get("callbacks")
        for state in states.values() if isinstance(states, dict) else ():
            if isinstance(state, dict):
                _name_those_beside(Path(path).parent, state)
        return checkpoint


def _name_those_beside(folder: Path, state: dict[str, Any]) -> None:
    """Replace the paths in the state of a ModelCheckpoint by those of the files of the same names in a folder."""

    def here(path: Any) -> str:
        beside = folder / Path(path).name if isinstance(path, str) and path.endswith(".ckpt") else None
        return str(beside) if beside is not None and beside.is_file() else ""

    state.update({name: here(state[name]) for name in PATHS_IN_STATE if name in state})
    if isinstance(state.get("best_k_models"), dict):
        state["best_k_models"] = {new: score for path, score in state["best_k_models"].items() if (new := here(path))}


class KeepsValues(Callback):
    """Write the values of the recipe, and the split of one's own data, into every checkpoint, so that it says what it
    was trained with wherever it lies.

    Args:
        values: all values, as they stand in a run's `config.yaml`.
        files: the user's own files of the recipe, beside which are modules that it names.
    """

    def __init__(self, values: dict[str, Any], files: Sequence[Path] = ()) -> None:
        self.values = json.dumps(values)  # a text: nested values of a file from elsewhere could be endless
        self.files = json.dumps([str(file) for file in files])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a fit
        checkpoint |= {VALUES_KEY: self.values, FILES_KEY: self.files}
        if split := data.split_hashes():
            checkpoint[SPLIT_KEY] = split


def add_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write facts of a training, such as its metrics, into a checkpoint that it has left."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    AtomicCheckpointIO().save_checkpoint(content | {FACTS_KEY: json.dumps(facts)}, path)


class LastCheckpoints(Checkpoint):
    """Keep the last two checkpoints. A run resumed from either ends in the same weights as one that never stopped.

    A run that resumes another keeps its best checkpoint so far, and its metrics as `metrics.000.csv` and so on.

    A checkpoint is saved at the end of every epoch. Within an epoch, a step saves one if `SECONDS` have passed, if
    training ends there, or if a signal asks to stop. None is saved when training fails: its state may be the reason.

    Args:
        folder: folder for `last.ckpt`, and for `previous.ckpt`, which is used if the last one is damaged.
        signals: signals that ask to stop; training then ends with :class:`torchcaps.utils.signals.Stopped`.
    """

    SECONDS = 120.0  # least time between checkpoints within an epoch

    def __init__(self, folder: Path, signals: StopSignals) -> None:
        self.folder, self.signals = folder, signals
        self._time, self._step = 0.0, -1  # of the newest checkpoint
        self._stops = False
        self._states: dict[str, Any] = {}  # of optimizers and schedulers in the checkpoint that is resumed
        self._best: dict[str, str] = {}  # best checkpoints of the run that is resumed, and where their copies go

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        quiet_process()  # a spawned process has unpickled this, before Lightning says that it begins

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = trainer.strategy.broadcast(self.folder)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning saves before it counts the epoch as completed. With max_steps, a resumed run would end it again.
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        for counts in (epochs["total"], epochs["current"]):
            if counts["processed"] == counts["ready"]:
                counts["completed"] = counts["processed"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let an epoch go on after the same samples if the batches of all processes together have another size now, and
        take over the best checkpoint of each callback. The patience of early stopping is that of this training."""
        self._states = {name: checkpoint[name] for name in ("optimizer_states", "lr_schedulers", "global_step")}
        self._take_over_best(trainer, checkpoint)
        for callback in trainer.early_stopping_callbacks:
            if state := checkpoint["callbacks"].get(callback.state_key):
                state["patience"] = callback.patience
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a fit
        then = checkpoint.get(type(data).__qualname__, {}).get("batch_size")
        loop = checkpoint["loops"]["fit_loop"]
        epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
        if then is None or then == data.batch_size_together or epochs["ready"] == epochs["processed"]:
            return
        now, samples = data.batch_size_together, batches["ready"] * then
        if samples % (now * trainer.accumulate_grad_batches):
            raise CannotResume(
                f"the checkpoint was saved within an epoch, after {counted(samples, 'sample')} in global batches of "
                f"{then}, and the new global batch of {now} does not divide them: choose data.batch_size and the "
                f"number of processes so that their product is {then}"
            )
        skipped = samples // now - batches["ready"]
        batches.update({name: count + skipped for name, count in batches.items() if isinstance(count, int)})

    def _take_over_best(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Let callbacks go on from the best checkpoint so far; the folder of this run will have a copy of it. In
        another folder Lightning forgets it, and takes the first epoch that follows for the best."""
        for callback in trainer.checkpoint_callbacks:
            state: Any = checkpoint["callbacks"].get(callback.state_key)
            if not isinstance(callback, ModelCheckpoint) or not state:
                continue
            best, scores = state.get("best_model_path"), state.get("best_k_models") or {}
            if best not in scores or not Path(best).is_file() or Path(best).name in CHECKPOINT_NAMES:
                continue
            new = str(Path(callback.dirpath or self.folder) / Path(best).name)
            if Path(new).resolve() == Path(best).resolve():
                continue
            self._best[best] = new
            state.update(dirpath=callback.dirpath, best_model_path=new, kth_best_model_path=new, last_model_path="")
            state.update(best_k_models={new: scores[best]}, best_model_score=scores[best], kth_value=scores[best])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `on_train_start`, which Lightning does not call for a training that has ended.
        if trainer.ckpt_path is None:
            return
        if self._states:  # sharded weights are loaded later
            _check_states(trainer, **self._states)
            self._states = {}
        if any(map(_has_stopped, trainer.early_stopping_callbacks)):
            trainer.should_stop = True  # Lightning would train another epoch
            if trainer.is_global_zero:
                print("the run has stopped early: nothing is left to train")
        if trainer.is_global_zero:
            for best, new in self._best.items():
                make_folder(Path(new).parent)
                shutil.copy(best, new)
            before = Path(trainer.ckpt_path).absolute().parent
            if before.name == "checkpoints":  # those beside a checkpoint that lies alone may be another run's
                for number, path in enumerate(metrics_of(before.parent)):
                    shutil.copy(path, self.folder.parent / f"metrics.{number:03}.csv")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = self.folder / "last.ckpt"
        if trainer.ckpt_path is not None and trainer.is_global_zero and not last.exists():  # nothing was left to train
            before = trainer.ckpt_path
            write_whole(last, lambda unfinished: shutil.copyfile(before, unfinished))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if epochs.processed == epochs.ready:
            trainer.fit_loop.epoch_loop.restarting = False  # a new epoch begins
        self._time, self._step = time.monotonic(), trainer.global_step
        self.signals.install()  # Lightning has replaced the handlers by its own
        self.signals.waits = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop
        if loop.epoch_loop.batch_progress.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # the end of the epoch follows; accumulating gradients are in no checkpoint
        ends = (trainer.should_stop and loop._can_stop_early) or 0 <= trainer.max_steps <= trainer.global_step
        due = time.monotonic() - self._time > self.SECONDS
        if self._any(trainer, self.signals.received is not None or ends or due):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._step:  # equal if training ended, and saved, within the epoch
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.waits = False
        self._stops = self._any(trainer, self.signals.received is not None)
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.signals.waits = False
        if lost_peer(exception):
            time.sleep(PATIENCE)  # the process that has failed ends before, and its error is the one that is reported

    def _any(self, trainer: Trainer, decision: bool) -> bool:
        """Return whether the decision is true in any of the processes."""
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    def _save(self, trainer: Trainer) -> None:
        self._stops = self._any(trainer, self.signals.received is not None)
        newest, last, previous = (self.folder / name for name in CHECKPOINT_NAMES)
        trainer.save_checkpoint(newest)
        if trainer.is_global_zero:
            if last.exists():
                last.replace(previous)
            newest.replace(last)
            sync_folder(self.folder)
        self._time, self._step = time.monotonic(), trainer.global_step

    def _leave(self) -> None:
        # Called later than _save, because the metrics of the step are logged in between.
        if self._stops:
            raise Stopped(self.signals.received or signal.SIGTERM)  # SIGTERM if only another process got a signal


def _check_states(trainer: Trainer, optimizer_states: Any, lr_schedulers: Any, global_step: int) -> None:
    """Check the states in a checkpoint, before Lightning loads them into the optimizers and schedulers."""
    source = f"{trainer.ckpt_path} has no state that this training can be resumed from"
    for what, states, built in (
        ("optimizers", optimizer_states, trainer.optimizers),
        ("schedulers", lr_schedulers, trainer.lr_scheduler_configs),
    ):
        if len(states) != len(built):
            raise CannotResume(
                f"{source}: it has the states of {len(states)} {what}, expected {len(built)}: take the checkpoint as "
                "it was written"
            )
    for optimizer, state in zip(trainer.optimizers, optimizer_states, strict=True):
        integers = not type(optimizer).__module__.startswith("torch.optim")  # as optimizers with 8 bits have
        values = state.get("state") if isinstance(state, dict) else None
        skips = getattr(trainer.precision_plugin, "scaler", None) is not None  # steps whose gradients overflow
        if values == {} and global_step and not skips and _keeps_state(optimizer):
            raise CannotResume(f"{source}: it has nothing of the optimizer: take the checkpoint as it was written")
        for kept in values.values() if isinstance(values, dict) else ():
            for name, value in kept.items() if isinstance(kept, dict) else ():
                if isinstance(value, torch.Tensor) and not _is_usable(value, integers):
                    raise CannotResume(
                        f"{source}: {name} of the optimizer is no dense tensor of finite floating-point numbers: take "
                        "an earlier checkpoint"
                    )


def _keeps_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of PyTorch has a state once it has taken a step; those of others may have none."""
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return type(optimizer).__module__.startswith("torch.optim") and (momentum or not isinstance(optimizer, SGD))


def _is_usable(value: torch.Tensor, integers: bool) -> bool:
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return False
    return (integers or value.is_floating_point() or value.is_complex()) and bool(value.isfinite().all())


def _has_stopped(callback: EarlyStopping) -> bool:
    """Return whether a callback, in the state of a checkpoint, had stopped the training and would stop it now."""
    if callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        return callback.wait_count >= callback.patience
    return callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED
