"""One cycle of the learning rate and of the momentum."""

import math
from typing import Any

from lightning import Callback, LightningModule, Trainer


class OneCycle(Callback):
    r"""Let the learning rate rise once and fall once in a training, and the momentum fall and rise.

    With s the step, S their number and w the warm-up's share of them, and lr and :math:`\beta_1` those that the
    optimizer was made with,

    .. math::
        c = \begin{cases}
            s / wS & s < wS \\
            \frac{1}{2} (1 + \cos \pi \frac{s - wS}{S - wS}) & \text{otherwise}
        \end{cases} \\
        \text{lr}_s = \text{first} + c \, (\text{lr} - \text{first}), \quad
        \beta_{1,s} = \beta_1 (1 - c \, (1 - \text{momentum}))

    The momentum is :math:`\beta_1` of optimizers in the manner of Adam, else what they call momentum, if they have it.

    Args:
        first: learning rate of the first step, and of what would come after the last one.
        warmup: w, from 0 to 1.
        momentum: the lowest momentum, as a part of the highest.

    Raises:
        ValueError: an argument is out of range; or, when training begins, its length is not known, or a scheduler sets
            the learning rate as well.

    Reference:
        Heinsen 2019, section 3.2, where w = 1/10; the momentum as in its code.
    """

    def __init__(self, first: float = 1e-5, warmup: float = 0.1, momentum: float = 0.9):
        if not first >= 0 or not 0 <= warmup <= 1 or not 0 <= momentum <= 1:
            raise ValueError(
                f"expected first of at least 0, warmup and momentum from 0 to 1, got {first}, {warmup} and {momentum}"
            )
        self.first, self.warmup, self.momentum = first, warmup, momentum

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            raise ValueError("OneCycle sets the learning rate, and so does model.scheduler: leave one of them out")
        if not 0 < trainer.estimated_stepping_batches < math.inf:
            raise ValueError("OneCycle needs to know how long training lasts: set trainer.max_epochs or max_steps")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        part = self.part(trainer.global_step, int(trainer.estimated_stepping_batches))
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                # In the group, and so in checkpoints: what a resumed optimizer has is of its last step.
                peak = group.setdefault("one_cycle", [group["lr"], *group.get("betas", [group.get("momentum")])[:1]])
                group["lr"] = self.first + part * (peak[0] - self.first)
                if "betas" in group:
                    group["betas"] = peak[1] * (1 - part * (1 - self.momentum)), *group["betas"][1:]
                elif group.get("momentum"):
                    group["momentum"] = peak[1] * (1 - part * (1 - self.momentum))

    def part(self, step: int, steps: int) -> float:
        """How far the learning rate is, from 0 at first to 1 at its highest, in a step, counted from 0, of so many."""
        step, top = min(step, steps), self.warmup * steps
        if step < top:
            return step / top
        return 0.5 * (1 + math.cos(math.pi * (step - top) / ((steps - top) or 1)))
