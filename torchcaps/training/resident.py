"""The training loop for samples that lie on the device: `trainer.resident`.

Epochs, validation, schedules, logs and checkpoints are Lightning's, as they are without it; only the steps of an epoch
are taken here, without a loader of batches and without Lightning's work for each of them.
"""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    Timer,
)
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor

from torchcaps.data.labeled import Batch, LabeledData
from torchcaps.data.notes import say
from torchcaps.data.order import Order
from torchcaps.training.classifier import Classifier, Outcome
from torchcaps.utils.checks import one_line

USUAL = 3  # first steps of a training that go the usual way
MOST = 50  # steps until the loss is looked at
# Callbacks of Lightning that need no batch and no single step.
ALLOWED = (EarlyStopping, LearningRateMonitor, ModelCheckpoint, ProgressBar, Timer)


class ResidentEpochLoop(_TrainingEpochLoop):
    """Take the steps of an epoch on samples that lie on the device, see :class:`ResidentStep`.

    What is logged is added up on the device, and read every `trainer.log_every_n_steps` steps, at most after 50.
    `train/loss_step` is the mean since the last reading.

    The first three steps of every training are Lightning's: in them callbacks and layers look at a training that
    begins or goes on. So are all steps where something needs more than this loop has; a line then says what.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._usual: int | None = USUAL  # steps that still go the usual way; None for all
        self._step: ResidentStep | None = None
        self._places: tuple[int, Tensor] | None = None  # an epoch, and the samples in its order

    def run(self, data_fetcher: Any) -> None:
        """Take the steps of an epoch."""
        super().run(data_fetcher)
        self._look_at_rest()  # where `max_steps` or `max_time` ends the training within an epoch

    def advance(self, data_fetcher: Any) -> None:
        """Take one step."""
        if self._usual != 0:
            super().advance(data_fetcher)
            if self._usual is not None:
                self._usual -= 1
            return
        if self._step is None:
            if reason := why_not(self.trainer):
                say(f"trainer.resident: {reason}; the training goes the usual way")
                self._usual = None
                return self.advance(data_fetcher)
            self._step = ResidentStep(self.trainer)
        trainer, model, batch = self.trainer, self.trainer.lightning_module, self.batch_idx + 1
        self.batch_progress.is_last_batch = batch + 1 == trainer.num_training_batches
        self.batch_progress.increment_ready()
        looks = self._step.steps + 1 >= MOST or self._num_ready_batches_reached()
        looks = looks or trainer._logger_connector.should_update_logs or super()._should_check_val_fx(data_fetcher)
        for callback in self._callbacks(looks):
            callback.on_train_batch_start(trainer, model, None, batch)
        self.batch_progress.increment_started()
        epoch: Any = trainer.fit_loop.epoch_progress.current
        self._step.take(epoch.processed, batch, self._indices(epoch.processed, batch))
        counts = self.automatic_optimization.optim_progress.optimizer
        counts.zero_grad.increment_ready()
        counts.zero_grad.increment_started()
        counts.zero_grad.increment_completed()
        counts.step.increment_ready()
        counts.step.increment_completed()
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if looks:
            self._look()
        for callback in self._callbacks(looks):
            callback.on_train_batch_end(trainer, model, {}, None, batch)
        self.batch_progress.increment_completed()
        if looks:
            trainer._logger_connector.update_train_step_metrics()

    def on_save_checkpoint(self) -> dict[str, Any]:
        self._look_at_rest()  # no checkpoint has weights behind a loss that is not finite
        return super().on_save_checkpoint()

    def teardown(self) -> None:
        super().teardown()
        if self._step is not None:
            self._step.graph = None  # which knows the step: together they would keep their memory until a collection
        self._usual, self._step, self._places = USUAL, None, None

    def _indices(self, epoch: int, batch: int) -> Tensor:
        """Return the samples of a batch, on the device."""
        loader: Any = self.trainer.train_dataloader
        if self._places is None or self._places[0] != epoch:
            self._places = epoch, loader.sampler.of_process(epoch).to(self.trainer.strategy.root_device)
        return self._places[1][batch * loader.batch_size : (batch + 1) * loader.batch_size]

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        checks = super()._should_check_val_fx(data_fetcher)
        if checks:  # perhaps only since the step, as by `max_time`; in a validation it would be too late to look
            self._look_at_rest()
        return checks

    def _look_at_rest(self) -> None:
        """Look at the steps since the last look, if there are any."""
        if self._step is not None and self._step.steps:
            self._look()

    def _look(self) -> None:
        """Read and log what the steps have added up."""
        assert self._step is not None
        model: Any = self.trainer.lightning_module
        connector = self.trainer._logger_connector
        connector.on_batch_start(None)
        hook, model._current_fx_name = model._current_fx_name, "training_step"  # as the first steps have logged
        model.log_outcome("train", self._step.read())
        model._current_fx_name = hook
        connector.on_batch_end()

    def _callbacks(self, looks: bool) -> Iterator[Callback]:
        """Yield the callbacks that take part in a step: those that show progress only where it is looked at."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return (callback for callback in callbacks if looks or not isinstance(callback, ProgressBar))


class ResidentStep:
    """A training step on samples that lie on the device.

    It is one function of the indices of the samples: `batch` gathers and augments them, and `gradients` computes the
    loss and the gradients. On CUDA this is captured in a :class:`Graph`, elsewhere it is called. Before it torch gets
    the seed of the batch, and behind it comes the optimizer. The optimizer is not in the graph: its few operators are
    started while the device still computes gradients, and every optimizer and schedule works, whose numbers a graph
    would have frozen.

    On a CPU the weights are those of Lightning's loop, bit by bit.

    Args:
        trainer: the trainer, in a training for which `why_not` returns None.

    Attributes:
        steps: number of steps since the last reading.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.model: Any = trainer.lightning_module
        self.data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a fit
        self.samples: Any = self.data.part("fit")
        self.optimizer = trainer.optimizers[0]
        self.steps = 0
        self._count = 0  # samples since the last reading
        self._sums: dict[str, Tensor] = {}
        self.graph = Graph(self) if self.samples.device.type == "cuda" else None

    def take(self, epoch: int, batch: int, indices: Tensor) -> None:
        """Take a step: that of a batch of an epoch, both counted from 0, which has the samples at the indices."""
        self.data.seed_batch(epoch, batch)
        if self.graph is None:
            self.gradients(self.batch(indices))
        else:
            self.graph(epoch, batch, indices)
        self.update()
        self.steps += 1
        self._count += len(indices)

    def batch(self, indices: Tensor) -> Batch:
        """Return the samples at the indices as the network gets them in training."""
        batch = self.trainer.precision_plugin.convert_input(self.samples.__getitems__(indices))
        return self.model.mixed(self.data.on_after_batch_transfer(batch, 0))

    def gradients(self, batch: Batch, checks: bool = True) -> Tensor:
        """Compute the gradients for a batch, add what is logged of it to the sums, and return the loss.

        Args:
            batch: the samples and their labels.
            checks: whether a loss that is not finite is an error.
        """
        with self.trainer.precision_plugin.train_step_context():
            outcome = self.model.outcome("train", batch, 0)
        if checks:
            self.model.check_finite(outcome.loss, batch[0])
        self.optimizer.zero_grad()
        outcome.loss.backward()
        if checks:
            self.model.on_after_backward()
        self._add("right", outcome.right)
        for name, mean in {"loss": outcome.loss, **outcome.means}.items():
            self._add(name, mean.detach().float() * outcome.own)
        return outcome.loss.detach()

    def update(self) -> None:
        """Let the optimizer use the gradients."""
        if clip := self.trainer.gradient_clip_val:
            algorithm = GradClipAlgorithmType(self.trainer.gradient_clip_algorithm or "norm")
            self.trainer.precision_plugin.clip_gradients(self.optimizer, clip, algorithm)
        self.optimizer.step()

    def read(self) -> Outcome:
        """Return what the steps since the last reading came to, as of one batch."""
        if self.graph is not None:
            self.graph.look(self._sums["loss"])
        right = self._sums["right"].clone()
        means = {name: value / self._count for name, value in self._sums.items() if name != "right"}
        count, self.steps, self._count = self._count, 0, 0
        for value in self._sums.values():
            value.zero_()
        return Outcome(means.pop("loss"), right.new_empty(0, 0), right, count, count, means)

    def _add(self, name: str, value: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(value)
        self._sums[name] += value


class Graph:
    """The gradients of full batches as a CUDA graph: captured at the second call, and replayed from then on.

    The first call is one in which nothing may wait for the device. If the batch cannot be made without waiting, as some
    augmentations read numbers on the CPU, batches are made outside of the graph. If the gradients cannot, the training
    has no graph.

    A loss that is not finite is seen when the sums are read. The steps since the last reading are then taken again by
    calling, from the weights with which they began, so that the error names the step and the layer.

    Args:
        step: the step whose gradients are captured.
    """

    def __init__(self, step: ResidentStep) -> None:
        self.step = step
        self.parameters = list(step.model.parameters())
        self.indices = torch.zeros(step.data.batch_size, dtype=torch.long, device=step.samples.device)
        self.has_batches = True  # whether batches are made in the graph
        self.batch: Batch = ()  # where the graph takes them from otherwise
        self.graph: Any = None
        self.results: list[Tensor | None] = []  # where a replay leaves the gradients of the parameters
        self._called = False
        self._since: list[tuple[int, int, Tensor, list[dict[str, Any]]]] = []  # steps, and options of the optimizer
        self._kept: list[tuple[Tensor, Tensor]] = []  # what these steps change, and its values before them

    def __call__(self, epoch: int, batch: int, indices: Tensor) -> None:
        """Compute the gradients of a batch. torch must have its seed."""
        if not self._since:
            self._keep()
        groups = self.step.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self._since.append((epoch, batch, indices, options))
        if len(indices) < len(self.indices):  # the last batch of an epoch
            self.step.gradients(self.step.batch(indices), checks=False)
            return
        self.indices.copy_(indices)
        if self.graph is None:
            reason = self.capture() if self._called else self.call(epoch, batch)
            first, self._called = not self._called, True
            if reason is not None:
                how = "its operators are started one by one"
                say(f"trainer.resident: the step cannot be captured in a CUDA graph ({reason}): {how}")
                self.step.graph = None
            self.step.data.seed_batch(epoch, batch)  # numbers may have been drawn
            if reason is not None:
                self.step.gradients(self.step.batch(indices))
            if first or reason is not None:
                return
        self.replay()

    def call(self, epoch: int, batch: int) -> str | None:
        """Compute the gradients without a graph, on a stream of their own as a capture has. Return what waits for the
        device, or None."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), never_waiting():
            try:
                made = self.step.batch(self.indices)
            except RuntimeError:
                self.has_batches = False
        if not self.has_batches:
            self.step.data.seed_batch(epoch, batch)
            made = self.step.batch(self.indices)
            stream.wait_stream(torch.cuda.current_stream())
        reason = None
        with torch.cuda.stream(stream), never_waiting():
            try:
                self.step.gradients(made, checks=False)
            except RuntimeError as error:
                reason = one_line(error)[:200]
        torch.cuda.current_stream().wait_stream(stream)
        if reason is not None:
            self._restore()
        return reason

    def capture(self) -> str | None:
        """Capture the graph. Nothing is computed. Return why it cannot be, or None."""
        if not self.has_batches:
            self.batch = self.step.batch(self.indices)
        before, graph, stream = torch.get_rng_state(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        gc.collect()  # nothing on the device, such as the graph of an earlier training, may be freed within the capture
        try:
            with torch.cuda.graph(graph):
                self.step.gradients(self.step.batch(self.indices) if self.has_batches else self.batch, checks=False)
        except Exception as error:  # of any operator
            # A capture that CUDA has ended leaves its stream, and a generator that refuses to draw outside of it.
            torch.cuda.set_stream(stream)
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            return one_line(error.__context__ or error)[:200]  # the first error, not that of the end of the capture
        if not torch.equal(before, torch.get_rng_state()):
            return "it draws random numbers on the CPU"
        self.graph, self.results = graph, [parameter.grad for parameter in self.parameters]
        return None

    def replay(self) -> None:
        """Compute the gradients by the graph."""
        if not self.has_batches:
            for kept, made in zip(tensors_of(self.batch), tensors_of(self.step.batch(self.indices)), strict=True):
                kept.copy_(made)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.results, strict=True):
            parameter.grad = gradient

    def look(self, loss: Tensor) -> None:
        """Check the sum of the losses since the last look."""
        if not loss.isfinite():
            self._stop()
        self._since, self._kept = [], []

    def _keep(self) -> None:
        """Keep the weights and the state of the optimizer."""
        model, states = self.step.model, self.step.optimizer.state.values()
        tensors = [*model.parameters(), *model.buffers(), *(x for state in states for x in state.values())]
        self._kept = [(x, x.detach().clone()) for x in tensors if isinstance(x, Tensor)]

    def _restore(self) -> None:
        with torch.no_grad():
            for tensor, kept in self._kept:
                tensor.copy_(kept)

    def _stop(self) -> NoReturn:
        """Take the steps since the last look again, and raise an error at the first one whose loss is not finite."""
        step, first = self.step, self.step.trainer.global_step - len(self._since)
        self._restore()
        for number, (epoch, batch, indices, options) in enumerate(self._since, first):
            for group, then in zip(step.optimizer.param_groups, options, strict=True):
                group.update(then)
            step.data.seed_batch(epoch, batch)
            made = step.batch(indices)
            loss = step.gradients(made, checks=False)
            if not loss.isfinite():
                step.model.stop_at(loss.item(), number, made[0])
            step.update()
        last = first + len(self._since) - 1
        raise FloatingPointError(
            f"the loss is not finite at one of the steps {first} to {last}, and was when they were taken again: try a "
            "lower learning rate, or train without trainer.resident"
        )


@contextmanager
def never_waiting() -> Iterator[None]:
    """A context in which an operator that waits for a CUDA device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch, in order."""
    parts = ((part,) if isinstance(part, Tensor) else part for part in batch)
    return [tensor for part in parts for tensor in part]


def why_not(trainer: Trainer) -> str | None:
    """Return why the steps of a training cannot be those of a `ResidentStep`, or None if they can."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # it has one in a fit
    model, loader = trainer.lightning_module, trainer.train_dataloader
    samples: Any = data.part("fit") if isinstance(data, LabeledData) else None
    device, scaler = trainer.strategy.root_device, getattr(trainer.precision_plugin, "scaler", None)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    profiler = trainer.profiler  # type: ignore[attr-defined]
    each = [callback for callback in callbacks if not _is_allowed(callback)]
    if type(trainer.strategy) is not SingleDeviceStrategy:  # that of a TPU has steps of its own
        return "it is for one process and one device"
    if type(model) is not Classifier or not isinstance(data, LabeledData):
        return "it is for a torchcaps.training.Classifier and data of torchcaps.data"
    for hook in ("train_dataloader", "on_before_batch_transfer", "transfer_batch_to_device"):
        if getattr(type(data), hook) is not getattr(LabeledData, hook):
            return f"{type(data).__name__} has its own {hook}"
    if not isinstance(getattr(loader, "sampler", None), Order):
        return "trainer.overfit_batches replaces the order of the samples"
    if samples.device != device:
        return f"the samples of {type(data).__name__} do not lie in the memory of the device, {device}"
    if trainer.accumulate_grad_batches != 1:
        return "it needs trainer.accumulate_grad_batches 1"
    if scaler is not None:
        return "trainer.precision 16-mixed scales the loss: take bf16-mixed"
    closure = inspect.signature(trainer.optimizers[0].step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return f"{type(trainer.optimizers[0]).__name__} computes the loss several times in a step"
    if trainer._detect_anomaly or not isinstance(profiler, PassThroughProfiler):
        return "trainer.detect_anomaly and trainer.profiler look at each step"
    if each:
        return f"{type(each[0]).__name__} may need each batch"
    return None


def _is_allowed(callback: Callback) -> bool:
    """Return whether a callback needs no batch and no hook of the backward pass after the first steps."""
    if isinstance(callback, ModelCheckpoint) and (callback._every_n_train_steps or callback._train_time_interval):
        return False  # it would look at metrics at other steps
    package = type(callback).__module__.partition(".")[0]  # a class that inherits from one of these may need a batch
    return package == "torchcaps" or (package == "lightning" and isinstance(callback, ALLOWED))
