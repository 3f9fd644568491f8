"""How long a step of a row takes on this machine: measured once before the queue trains it, to say what is left.

`pace/RECIPE.json` in the folder of the runs has the seconds per step and the number of steps of a recipe by hardware.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from torchcaps.reproduce.plan import Run
from torchcaps.training.build import Training
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.machine import processor


def read_pace(root: Path, run: Run) -> tuple[float, int] | None:
    """Return the seconds per step and the number of steps of a row, or None if not measured on this hardware with this
    number of threads."""
    paces = _read(_file(root, run))
    return tuple(paces[hardware()]) if hardware() in paces else None


def measure_pace(root: Path, run: Run) -> None:
    """Take a few steps of a row and write down how long they took."""
    overrides = [*run.arguments, "--trainer.enable_progress_bar=false"]
    training = Training(run.load(), overrides)
    training.trainer.callbacks.append(_Pace())  # type: ignore[attr-defined]
    try:
        training.trainer.fit(training.model, training.datamodule)
    except _Pace.Measured as measured:
        path = _file(root, run)
        text = json.dumps({**_read(path), hardware(): measured.args})
        write_text_whole(path, text)


def hardware() -> str:
    """Return the GPU, or the processor and the number of threads, and the version of PyTorch."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


class _Pace(Callback):
    """Raise `Measured` with the seconds per step and the number of steps after a few batches."""

    BATCHES = 5

    class Measured(Exception):
        pass

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.times = [time.perf_counter()]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > self.BATCHES:
            seconds = [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]
            seconds_per_step = statistics.median(seconds) * trainer.accumulate_grad_batches
            raise self.Measured(seconds_per_step, int(trainer.estimated_stepping_batches))


def _file(root: Path, run: Run) -> Path:
    return root / "pace" / f"{run.recipe}.json"


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
