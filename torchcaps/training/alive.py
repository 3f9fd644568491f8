"""A warning, at the first training steps, about a network that cannot learn. `Classifier` uses it."""

import math
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchcaps.capsules import Capsules, Prediction
from torchcaps.nn.layer import CapsuleLayer


class BeginsAlive(Callback):
    """Warn once if the loss cannot fall, or if no signal reaches the first layer in the backward pass.

    A capsule layer looks at its first forward pass itself (`torchcaps/nn/first_pass.py`). This callback sees what no
    layer sees:

    - a cross-entropy of activations: they are from 0 to 1, so that the loss stays above log(1 + (classes - 1) / e);
    - a gradient of the first layer with weights that is zero at the first two steps. One step would not be enough:
      where a network's last parameters start at zero, as the betas of Heinsen routing do, only they have a gradient at
      first.
    """

    def __init__(self) -> None:
        self.steps, self.warned = 0, False
        self.seen = -1  # the step of the last gradient
        self.blank = False  # whether the newest inputs are all 0
        self.hook: RemovableHandle | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = trainer.global_step == 0 and trainer.is_global_zero  # a resumed run was checked at its start
        self.steps = 0 if first else 2
        network, loss = pl_module.network, pl_module.loss
        if first and isinstance(loss, nn.CrossEntropyLoss):
            assert isinstance(network, nn.Module)
            self.hook = network.register_forward_hook(self._look_at_scores)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.steps < 2:
            inputs = batch[0] if isinstance(batch[0], torch.Tensor) else batch[0][0]
            self.blank = not inputs.any()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hook()
        if trainer.global_step == self.seen:  # gradients accumulate, and no parameter has changed
            return
        self.seen = trainer.global_step
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
            routes = any(isinstance(module, CapsuleLayer) for module in network.modules())
            why = "with init='fan_in', fewer layers, or longer poses in the first layer"
            advice = ", as the inputs are" if self.blank else f"; try routings {why}" if routes else ""
            self._warn(f"the first layer, {layer}, does not learn: its gradient is 0 at the first two steps{advice}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hook()

    def _look_at_scores(self, network: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Prediction) and output.scores is not None and isinstance(output.capsules, Capsules):
            scores, activations = output.scores.detach(), output.capsules.activations.detach()
            if torch.equal(scores, activations) and ((scores >= 0) & (scores <= 1)).all():
                least = math.log(1 + (scores.shape[1] - 1) / math.e)
                self._warn(
                    f"the cross-entropy of activations, which are from 0 to 1, cannot fall below {least:.2f} with "
                    f"{scores.shape[1]} classes: use torchcaps.MarginLoss, or logits such as those of a CapsuleHead"
                )

    def _remove_hook(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        self.hook = None

    def _warn(self, message: str) -> None:
        self.warned = True
        warnings.warn(message, stacklevel=2)
