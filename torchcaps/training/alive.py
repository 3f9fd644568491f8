"""A warning, at the first training steps, about capsules or gradients that are almost zero. `Classifier` uses it."""

import warnings
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleLayer

LEAST = 1e-4  # least mean activation that raises no warning
ADVICE = "try routings with init='fan_in', fewer layers, or longer poses in the first layer"


class BeginsAlive(Callback):
    """Warn once if no signal reaches the classes in the forward pass, or the first layer in the backward pass.

    The warning names the first capsule layer whose mean activation is below 1e-4 at the first step. Otherwise it names
    the first layer with weights, if their gradient is zero at the first two steps. One step would not be enough: where
    a network's last parameters start at zero, as the betas of Heinsen routing do, only they have a gradient at first.
    """

    def __init__(self) -> None:
        self.steps, self.warned = 0, False
        self.hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = trainer.global_step == 0 and trainer.is_global_zero  # a resumed run was checked at its start
        self.steps = 0 if first else 2
        if self.steps == 0:
            network: Any = pl_module.network
            layers = [(name, module) for name, module in network.named_modules() if isinstance(module, CapsuleLayer)]
            self.hooks = [layer.register_forward_hook(self._look_at(name)) for name, layer in layers]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        self.steps += 1
        if self.steps > 2 or self.warned:
            return
        network: Any = pl_module.network
        used = ((name, p.grad) for name, p in network.named_parameters() if p.grad is not None)
        name, gradient = next(used, ("", None))
        if gradient is None or gradient.any():
            self.steps = 2
        elif self.steps == 2:
            layer = name.rpartition(".")[0] or name
            self._warn(f"the first layer, {layer}, does not learn: its gradient is 0 at the first two steps; {ADVICE}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def _look_at(self, name: str) -> Any:
        def look(layer: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Capsules) and not self.warned:
                size = output.activations.detach().float().mean().item()
                if size < LEAST:
                    self._warn(f"layer {name} starts dead: the mean activation of its capsules is {size:.1g}; {ADVICE}")

        return look

    def _remove_hooks(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def _warn(self, message: str) -> None:
        self.warned = True
        warnings.warn(message, stacklevel=2)
