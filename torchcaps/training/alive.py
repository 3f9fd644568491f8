"""A word about networks that begin dead, before an hour of training has shown it."""

import warnings
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchcaps.capsules import Capsules
from torchcaps.nn import CapsuleLayer

LEAST = 1e-4  # activation, on average
ADVICE = "try routings with init='fan_in', fewer layers, or longer poses to begin with"


class BeginsAlive(Callback):
    """Warns once, at the first steps, of a network in which nothing reaches the classes, or the first layer.

    It names the first capsule layer whose capsules are shorter than 1e-4 on average at the first step; or the first
    layer with weights, if these have no gradient in two steps. (In one step they may have none although all is well:
    where a network's last parameters begin at zero, as the betas of Heinsen's routing do.)
    """

    def __init__(self) -> None:
        self.steps, self.warned = 0, False
        self.hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps = 0 if trainer.global_step == 0 else 2  # a run that goes on has begun before
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
            self._warn(f"nothing reaches the first layer, {layer}: its gradient is 0 at the first two steps; {ADVICE}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def _look_at(self, name: str) -> Any:
        def look(layer: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Capsules) and not self.warned:
                size = output.activations.detach().float().mean().item()
                if size < LEAST:
                    self._warn(f"layer {name} begins dead: its capsules have activations of {size:.1g}; {ADVICE}")

        return look

    def _remove_hooks(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def _warn(self, message: str) -> None:
        self.warned = True
        warnings.warn(message, stacklevel=2)
