"""Resident steps: what does not fit them, losses that are not finite, and the graph, here without a GPU.

That they end in the weights of Lightning's loop, also after interruptions, is tested in test_resume.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import call
from interruptions import newest

from torchcaps.data import notes
from torchcaps.recipes import load_recipe
from torchcaps.training import classifier
from torchcaps.training.build import Training
from torchcaps.training.resident import USUAL, Graph, ResidentStep
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
    with pytest.raises(FloatingPointError, match=rf"the loss is nan at step {at}: the first output .* primary"):
        built.fit()
    assert not list(tmp_path.rglob("*.ckpt"))  # none has weights behind a loss that is not finite


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
        ({"data.num_workers": 1}, "it needs data.num_workers 0, as no process makes batches"),
        ({"trainer.callbacks": ["lightning.pytorch.callbacks.LambdaCallback"]}, "LambdaCallback may need each batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_what_does_not_fit_goes_the_usual_way(changes, said, capfd):
    """A line says what it is, and the weights are those of a training that is not resident."""
    ours = weights(training(**changes))
    assert f"torchcaps: trainer.resident: {said}" in capfd.readouterr().err
    usual = weights(training(**changes, **{"trainer.resident": False}))
    assert "trainer.resident" not in capfd.readouterr().err
    assert all(map(torch.equal, ours, usual))


def test_a_graph_that_cannot_be_captured_is_called(graphs, monkeypatch, capfd):
    usual = weights(training(**{"trainer.resident": False}))
    monkeypatch.setattr(OnCPU, "capture", lambda self: "it reads a value")
    ours = weights(training())
    said = "trainer.resident: the step cannot be captured in a CUDA graph (it reads a value): it is called"
    assert said in capfd.readouterr().err
    assert OnCPU.replays == 0
    assert all(map(torch.equal, usual, ours))


def test_pictures_that_do_not_fit_the_memory_stay_on_the_disk(tmp_path, monkeypatch, capfd):
    from pictures import draw_digits

    draw_digits(tmp_path / "pictures", 0, 12)
    monkeypatch.setattr("torchcaps.data.images.free_bytes", lambda device: 1000)
    monkeypatch.chdir(tmp_path)
    options = ["--data.folder=pictures", "--data.num_workers=0", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
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


def test_clipped_gradients_and_half_precision():
    for changes in ({"trainer.gradient_clip_val": 0.01}, {"trainer.precision": "bf16-mixed"}):
        usual, ours = (weights(training(**changes, **{"trainer.resident": on})) for on in (False, True))
        assert all(map(torch.equal, usual, ours))


# On CUDA

RESNET = {"class_path": "torchcaps.models.pooling_resnet", "init_args": {"depth": 8, "in_channels": 1}}
OVERLAYS = {
    **{"data": {"class_path": "torchcaps.data.MultiMNIST", "init_args": {}}},
    **{"data.epoch_size": 1000, "data.parts": True, "data.batch_size": 8, "data.check_hashes": False},
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
}
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


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_called_on_a_cpu(kind, images_of_noise, monkeypatch):
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    changes = {**CUDA, **KINDS[kind], "trainer.accelerator": "cpu", "trainer.limit_train_batches": 5}
    ours, usual = (weights(training(**changes, **{"trainer.resident": on})) for on in (True, False))
    assert all(map(torch.equal, ours, usual))
