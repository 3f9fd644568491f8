"""Resident steps: what does not fit them, losses that are not finite, and the graph, here without a GPU.

That they end in the weights of Lightning's loop, also after interruptions, is tested in test_resume.py.
"""

import copy
import gc
import sys
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import call
from interruptions import newest
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchcaps.data import Digits, notes
from torchcaps.nn import SpreadLoss
from torchcaps.recipes import load_recipe
from torchcaps.training import Classifier, classifier
from torchcaps.training.build import Training
from torchcaps.training.resident import USUAL, Graph, ResidentEpochLoop, ResidentStep, why_not
from torchcaps.training.values import Values

SMALL = {
    "model.network": {
        "class_path": "torchcaps.CapsNet",
        "init_args": {
            "image_size": 8,
            "channels": 4,
            "kernel_size": 3,
            "primary_types": 2,
            "primary_pose": 4,
            "primary_kernel_size": 3,
            "class_pose": 4,
            "decoder": [8],
        },
    },
    "data.batch_size": 8,
    "data.shift": 1,
    "trainer.accelerator": "cpu",
    "trainer.limit_train_batches": 12,
    "trainer.max_epochs": 1,
    "trainer.enable_progress_bar": False,
    "trainer.resident": True,
}


class KeepsLosses(EarlyStopping):
    """A callback that inherits from one of Lightning's and needs what a step returns."""

    def __init__(self) -> None:
        super().__init__("train/loss", patience=100)
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))


class Reversed(Digits):
    """Data whose own loader makes other batches."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        collate = loader.collate_fn
        loader.collate_fn = lambda batch: tuple(x.flip(0) for x in collate(batch))
        return loader


class OnCPU(Graph):
    """A graph of which a replay is a call, on a CPU: all of it but CUDA itself."""

    replays, in_graph = 0, True

    def call(self, epoch: int, batch: int) -> str | None:
        self.has_batches = self.in_graph
        self.step.gradients(self.step.batch(self.indices), checks=False)
        return None

    def capture(self) -> str | None:
        if not self.has_batches:
            self.batch = self.step.batch(self.indices)

        def replay() -> None:
            type(self).replays += 1
            for parameter in self.parameters:  # those of the step before lie elsewhere
                parameter.grad = None
            self.step.gradients(self.step.batch(self.indices) if self.has_batches else self.batch, checks=False)
            self.results = [parameter.grad for parameter in self.parameters]

        self.graph = SimpleNamespace(replay=replay)
        return None


@pytest.fixture
def graphs(monkeypatch) -> None:
    """Let every resident step be that of a graph."""
    start = ResidentStep.__init__

    def starting(self, trainer):
        start(self, trainer)
        self.graph = OnCPU(self)

    OnCPU.replays = 0
    monkeypatch.setattr(ResidentStep, "__init__", starting)


@pytest.fixture(autouse=True)
def _says_again(monkeypatch):
    monkeypatch.setattr(notes, "_said", set())


def training(folder=None, **changes: Any) -> Training:
    values = {**SMALL, **changes}
    if "data" in changes:
        del values["data.shift"]  # of other data
    return Training(Values.of(load_recipe("quickstart"), values, allow_code=True), folder)


def weights(built: Training) -> list[torch.Tensor]:
    built.fit()
    return [value.clone() for value in built.model.state_dict().values()]


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_graph_takes_the_same_steps(graphs, in_graph, monkeypatch):
    """Also where the last batch of an epoch is smaller: then it is called. Batches are made in the graph or not."""
    monkeypatch.setattr(OnCPU, "in_graph", in_graph)
    epochs = {"data.batch_size": 400, "trainer.limit_train_batches": 1.0, "trainer.max_epochs": 3}
    usual = weights(training(**epochs, **{"trainer.resident": False}))
    assert OnCPU.replays == 0
    ours = weights(training(**epochs))
    assert all(map(torch.equal, usual, ours))
    assert OnCPU.replays > 3


@pytest.mark.parametrize("at", [USUAL + 2, USUAL + 7, 1])
@pytest.mark.parametrize("replayed", [False, True])
def test_an_error_names_the_step_and_the_layer(at, replayed, request, tmp_path, monkeypatch):
    """A layer gives values that are not finite once the weights have been changed so often."""
    if replayed:
        request.getfixturevalue("graphs")
    built = training(tmp_path)
    break_at(at, built, monkeypatch)
    with pytest.raises(FloatingPointError, match=rf"the loss is nan at step {at}: the first output .* primary"):
        built.fit()
    assert not list(tmp_path.rglob("*.ckpt"))  # none has weights behind a loss that is not finite


def break_at(at: int, built: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a layer give values that are not finite once the weights have been changed so often."""
    layer = built.model.network.primary
    forward, history = type(layer).forward, []

    def breaking(self, *inputs):
        output = forward(self, *inputs)
        return type(output)(output.poses * torch.inf) if seen(self) == at else output

    def seen(self) -> int:
        """Return the step by the weights: a step that is taken again has the same."""
        weight = next(self.parameters()).detach()
        for step, known in enumerate(history):
            if torch.equal(weight, known):
                return step
        history.append(weight.clone())
        return len(history) - 1

    monkeypatch.setattr(type(layer), "forward", breaking)


def test_the_last_steps_are_looked_at_where_training_ends_within_an_epoch(graphs, monkeypatch):
    """Also without a checkpoint, and long before the next look."""
    built = training(**{"trainer.max_steps": 7, "trainer.max_epochs": -1, "trainer.log_every_n_steps": 50})
    break_at(5, built, monkeypatch)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 5"):
        built.fit()


def test_steps_are_taken_again_with_what_the_epoch_has_changed(graphs, monkeypatch):
    """Such as the margin of the loss: with that of the epoch before, the loss may be finite."""
    margins = {"class_path": "torchcaps.training.SpreadMargin", "init_args": {}}
    built = training(**{"model.loss": "torchcaps.SpreadLoss", "trainer.callbacks": [margins], "trainer.max_epochs": 2})
    forward = SpreadLoss.forward
    monkeypatch.setattr(SpreadLoss, "forward", lambda self, *x: forward(self, *x) / (self.margin < 0.5))
    with pytest.raises(FloatingPointError, match="the loss is inf at step 12"):
        built.fit()


def test_steps_are_looked_at_before_a_validation_that_is_due_since_the_step(tmp_path, monkeypatch):
    """Not by the checkpoint after it, among the metrics of the validation and with the network in evaluation mode."""
    best = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitor": "val/accuracy"}}
    best["init_args"]["mode"] = "max"
    by_time = {"trainer.val_check_interval": "00:01:00:00", "data.val_size": 100, "trainer.callbacks": [best]}
    built = training(tmp_path, **by_time, **{"trainer.log_every_n_steps": 50})
    update, read, looks = ResidentStep.update, ResidentStep.read, []

    def updating(self):
        update(self)
        if self.trainer.global_step == 6:
            self.trainer._last_val_time -= 3600

    def reading(self):
        looks.append((self.trainer.global_step, self.trainer.state.stage.value, self.model.training))
        return read(self)

    monkeypatch.setattr(ResidentStep, "update", updating)
    monkeypatch.setattr(ResidentStep, "read", reading)
    built.fit()
    assert looks == [(7, "train", True), (12, "train", True)]
    assert list(tmp_path.rglob("epoch=0-step=7.ckpt"))
    usual = training(**{"trainer.resident": False, "trainer.limit_val_batches": 0, "data.val_size": 100})
    usual.fit()
    ours, theirs = (one.trainer.callback_metrics["train/loss_epoch"] for one in (built, usual))
    assert float(ours) == pytest.approx(float(theirs))


def test_a_loss_on_a_gpu_is_read_after_the_backward_pass(monkeypatch):
    model = training().model
    model._trainer = SimpleNamespace(global_step=7)
    loss = SimpleNamespace(is_cuda=True, detach=lambda: None)
    for value in (1.0, float("nan")):
        monkeypatch.setattr(classifier, "_reading", lambda loss, value=value: lambda: value)
        model.check_finite(loss, torch.rand(2, 1, 8, 8))
        if value == 1:
            model.on_after_backward()
    with pytest.raises(FloatingPointError, match="the loss is nan at step 7: all layers are finite"):
        model.on_after_backward()
    model.on_after_backward()  # nothing is left to look at


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.accumulate_grad_batches": 2}, "it needs trainer.accumulate_grad_batches 1"),
        ({"trainer.overfit_batches": 12}, "trainer.overfit_batches replaces the order of the samples"),
        ({"trainer.callbacks": ["lightning.pytorch.callbacks.LambdaCallback"]}, "LambdaCallback may need each batch"),
        ({"trainer.callbacks": ["inheriting.KeepsLosses"]}, "KeepsLosses may need each batch"),
        ({"trainer.detect_anomaly": True}, "trainer.detect_anomaly and trainer.profiler look at each step"),
        ({"trainer.profiler": "simple"}, "trainer.detect_anomaly and trainer.profiler look at each step"),
        ({"data": {"class_path": "inheriting.Reversed", "init_args": {}}}, "Reversed has its own train_dataloader"),
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_what_does_not_fit_goes_the_usual_way(changes, said, capfd, monkeypatch):
    """A line says what it is, and the weights are those of a training that is not resident."""
    monkeypatch.setitem(sys.modules, "inheriting", sys.modules[__name__])
    ours = weights(training(**changes))
    assert f"torchcaps: trainer.resident: {said}" in capfd.readouterr().err
    usual = weights(training(**changes, **{"trainer.resident": False}))
    assert "trainer.resident" not in capfd.readouterr().err
    assert all(map(torch.equal, ours, usual))


def test_optimizers_that_compute_the_loss_go_the_usual_way():
    built = training()
    weight = torch.nn.Parameter(torch.ones(2))
    taken = []

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            usual = trainer.optimizers
            for optimizer in (torch.optim.LBFGS([weight]), torch.optim.Adam([weight])):
                trainer.optimizers = [optimizer]
                taken.append(why_not(trainer))
            trainer.optimizers = usual

    Look.__module__ = "torchcaps.tests"
    built.trainer.callbacks.append(Look())
    built.fit()
    assert taken == ["LBFGS computes the loss several times in a step", None]


def test_a_graph_that_cannot_be_captured_is_called(graphs, monkeypatch, capfd):
    usual = weights(training(**{"trainer.resident": False}))
    monkeypatch.setattr(OnCPU, "capture", lambda self: "it reads a value")
    ours = weights(training())
    said = "trainer.resident: the step cannot be captured in a CUDA graph (it reads a value): its operators"
    assert said in capfd.readouterr().err
    assert OnCPU.replays == 0
    assert all(map(torch.equal, usual, ours))


def test_a_capture_that_has_failed_leaves_no_trace(monkeypatch):
    """CUDA ends a capture at an operator that waits. torch then stays on its stream, and no generator may draw:
    'Offset increment outside graph capture encountered unexpectedly'."""
    stream, said = SimpleNamespace(device_index=0), []
    clone = SimpleNamespace(graphsafe_set_state=said.append, clone_state=lambda: "clone")

    @contextmanager
    def failing(graph):
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def waiting(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    for name, value in {
        "graph": failing,
        "CUDAGraph": object,
        "current_stream": lambda: stream,
        "set_stream": said.append,
        "default_generators": (clone,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graph: Any = SimpleNamespace(step=SimpleNamespace(batch=waiting, gradients=None), indices=None, has_batches=True)
    assert Graph.capture(graph) == "operation not permitted when stream is capturing"
    assert said == [stream, "clone"]


def test_a_graph_is_freed_at_the_end_of_the_training(graphs):
    gone = []
    built = training()
    end = ResidentEpochLoop.teardown

    def teardown(self):
        gone.append(weakref.ref(self._step.graph))
        self._step.graph.graph = None  # the replay of an `OnCPU` knows it too
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResidentEpochLoop, "teardown", teardown)
        gc.collect()
        gc.disable()
        try:
            built.fit()
            assert gone[0]() is None
        finally:
            gc.enable()


def test_pictures_that_do_not_fit_the_memory_stay_on_the_disk(tmp_path, monkeypatch, capfd):
    from pictures import draw_digits

    draw_digits(tmp_path / "pictures", 0, 12)
    monkeypatch.setattr("torchcaps.data.images.free_bytes", lambda device: 1000)
    monkeypatch.chdir(tmp_path)
    options = ["--data.folder=pictures", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    options += ["--model.network.depth=8", "--data.batch_size=4"]
    assert call("train", "own/images", *options, "--trainer.resident=true") == 0
    assert "the samples of ImageFolder do not lie in the memory of the device, cpu" in capfd.readouterr().err
    one = newest("runs")["state_dict"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert call("train", "own/images", *options, "--trainer.resident=true") == 0
    assert "trainer.resident" not in capfd.readouterr().err
    other = newest("runs")["state_dict"]
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("resident", [False, True])
def test_the_layer_is_found_in_the_precision_of_the_steps(resident, monkeypatch):
    """Also where the loss is read outside of it, as after the backward pass on a GPU."""
    built = training(**{"trainer.precision": "bf16-mixed", "trainer.resident": resident})
    layer = built.model.network.primary
    forward = type(layer).forward

    def breaking(self, *inputs):
        output = forward(self, *inputs)
        overflows = torch.is_autocast_enabled("cpu") and built.trainer.global_step == USUAL
        return type(output)(output.poses * torch.inf) if overflows else output

    monkeypatch.setattr(type(layer), "forward", breaking)
    if not resident:  # as on a GPU
        loss_of: list[Any] = []
        monkeypatch.setattr(Classifier, "check_finite", lambda self, loss, inputs: loss_of.append((loss, inputs)))
        monkeypatch.setattr(
            Classifier,
            "on_after_backward",
            lambda self: self._stop_unless_finite(loss_of[-1][0].item(), loss_of[-1][1]),
        )
    with pytest.raises(FloatingPointError, match=f"step {USUAL}: the first output .* primary"):
        built.fit()


def test_clipped_gradients_and_half_precision():
    for changes in ({"trainer.gradient_clip_val": 0.01}, {"trainer.precision": "bf16-mixed"}):
        usual, ours = (weights(training(**changes, **{"trainer.resident": on})) for on in (False, True))
        assert all(map(torch.equal, usual, ours))


# On CUDA

RESNET = {"class_path": "torchcaps.models.pooling_resnet", "init_args": {"depth": 8, "in_channels": 1}}
OVERLAYS = {
    **{"data": {"class_path": "torchcaps.data.MultiMNIST", "init_args": {"batch_size": 8}}},
    **{"data.epoch_size": 1000, "data.parts": True, "data.check_hashes": False},
    **{"model.network.image_size": 36},
    **{"model.network.kernel_size": 9, "model.network.primary_kernel_size": 9, "model.labels_per_image": 2},
}
KINDS: dict[str, dict[str, Any]] = {
    "reconstructed": {},
    "half precision": {"trainer.precision": "bf16-mixed"},
    "mixed": {"model.mixup": 0.2, "model.reconstruction_weight": 0.0, "model.network.decoder": None},
    "one cycle of momentum": {"trainer.callbacks": ["torchcaps.training.OneCycle"], "model.scheduler": None},
    "a schedule by epoch": {
        "model.scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.5}}
    },
    "another optimizer": {"model.optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}},
    "EM": {"model.network.routing": "torchcaps.EMRouting"},
    "batch normalization, mirrored": {
        **{"model.network": RESNET, "model.reconstruction_weight": 0.0, "model.loss": "torch.nn.CrossEntropyLoss"},
        **{"data.flip": True, "trainer.gradient_clip_val": 1.0},
    },
    "several labels": OVERLAYS,
    "masks": {
        **{"data": {"class_path": "torchcaps.data.Cells", "init_args": {"batch_size": 8}}, "data.size": 16},
        **{"data.train_size": 64, "data.flip": True, "data.val_size": 8, "model.reconstruction_weight": 0.0},
        "model.network": {"class_path": "torchcaps.models.segcaps", "init_args": {"classes": 3, "features": 4}},
        **{"model.network.decoder": False, "model.loss": "torchcaps.SegmentationLoss"},
        **{"model.classes": 3, "model.predicts": "masks", "model.class_weights": "balanced"},
    },
    "distorted": {
        **{"data": {"class_path": "torchcaps.data.MNIST", "init_args": {"batch_size": 4}}, "data.distort": True},
        **{"data.check_hashes": False, "model.network.image_size": 28},
        **{"model.network.kernel_size": 9, "model.network.primary_kernel_size": 9},
    },
}


class Alone(TorchDispatchMode):
    """Fail where a tensor of the host meets one of the device, unless it is a single number."""

    def __torch_dispatch__(self, operator, types, args=(), options=None):
        result = operator(*args, **(options or {}))
        tensors = [x for x in tree_leaves((args, options, result)) if isinstance(x, torch.Tensor)]
        kinds = {x.device.type for x in tensors if x.dim() or "copy" in str(operator)}
        assert len(kinds) < 2, f"{operator} copies between the host and the device"
        return result


# There is no mixup on the device `meta`, which has no Beta distribution.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixed"])
def test_a_step_needs_nothing_of_the_host(kind, images_of_noise, monkeypatch):
    """A CUDA graph can neither read a value nor copy. Nor can the device `meta`, which needs no GPU."""

    class Done(Exception):
        pass

    def take(self, epoch, batch, indices):
        samples = copy.copy(self.samples)
        vars(samples).update({name: x.to("meta") for name, x in vars(samples).items() if isinstance(x, torch.Tensor)})
        self.samples = samples
        self.model.to("meta")
        for mode in (nullcontext(), Alone()):  # the first step may fill caches
            self._sums = {}
            with mode:
                self.gradients(self.batch(torch.zeros(8, dtype=torch.long, device="meta")), checks=False)
        self.model.to_empty(device="cpu")
        raise Done

    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr(ResidentStep, "take", take)
    with pytest.raises(Done):
        training(**{**KINDS[kind], "trainer.max_epochs": 3}).fit()


CUDA = {"trainer.accelerator": "auto", "trainer.limit_train_batches": 25, "trainer.max_epochs": 2}


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the largest difference of any two weights, relative to the largest of their tensor."""
    pairs = [(x.double(), y.double()) for x, y in zip(one, other, strict=True)]
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-6)) for x, y in pairs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_a_graph_takes_the_same_steps(kind, images_of_noise, monkeypatch):
    """Fifty steps, of which the most are replayed, differ from those that are called by no more than these do among
    themselves, where sums have another order in each run."""
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    changes = {**CUDA, **KINDS[kind]}
    captured = []
    capture = Graph.capture
    monkeypatch.setattr(Graph, "capture", lambda graph: (captured.append(capture(graph)), captured[-1])[1])
    ours = weights(training(**changes))
    assert captured == [None]
    monkeypatch.setattr(Graph, "capture", lambda graph: "this is to be called")
    called, again = (weights(training(**changes)) for _ in range(2))
    usual = weights(training(**changes, **{"trainer.resident": False}))
    allowed = max(4 * distance(called, again), 1e-4)
    assert distance(ours, called) <= allowed
    assert distance(usual, called) <= allowed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_a_step_that_waits_is_called(images_of_noise, monkeypatch, capfd):
    """A capture that CUDA has ended harms no random number and no later step."""
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    outcome = Classifier.outcome

    def waiting(self, stage, batch, batch_idx):
        batch[0].sum().item()
        return outcome(self, stage, batch, batch_idx)

    monkeypatch.setattr(Classifier, "outcome", waiting)
    ours = weights(training(**CUDA))
    assert "the step cannot be captured in a CUDA graph" in capfd.readouterr().err
    called, again = (weights(training(**CUDA, **{"trainer.resident": False})) for _ in range(2))
    assert distance(ours, called) <= max(4 * distance(called, again), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_called_on_a_cpu(kind, images_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    changes = {**CUDA, **KINDS[kind], "trainer.accelerator": "cpu", "trainer.limit_train_batches": 5}
    ours, usual = (weights(training(**changes, **{"trainer.resident": on})) for on in (True, False))
    assert all(map(torch.equal, ours, usual))
