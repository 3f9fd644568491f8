"""The one-cycle schedule of learning rate and momentum: a callback that recipes list under `trainer.callbacks`."""

import math
from typing import Any

from lightning import Callback, LightningModule, Trainer

from torchcaps.utils.arguments import Count, CountOrZero, Fraction, NotNegative, checked


class OneCycle(Callback):
    r"""Let the learning rate rise and then fall once during training, and the momentum fall and then rise.

    At step s of S, where the fraction w of the steps is warm-up, and lr and :math:`\beta_1` are the optimizer's own
    learning rate and momentum,

    .. math::
        c = \begin{cases}
            s / wS & s < wS \\
            \frac{1}{2} (1 + \cos \pi \frac{s - wS}{S - wS}) & \text{otherwise}
        \end{cases} \\
        \text{lr}_s = \text{first} + c \, (\text{lr} - \text{first}), \quad
        \beta_{1,s} = \beta_1 (1 - c \, (1 - \text{momentum}))

    The momentum is :math:`\beta_1` of optimizers with `betas`, such as Adam, and `momentum` of others that have one.

    Of several groups of parameters, such as those with `features_lr`, the learning rates keep their proportions.

    Args:
        first: learning rate at step 0, and at step S, which would follow the last one, of the group with the highest.
        warmup: fraction w of the steps, from 0 to 1.
        momentum: lowest momentum, as a fraction of the highest.

    Raises:
        ValueError: an argument is out of range; or, at the start of training, its length is unknown, or a scheduler
            sets the learning rate too.

    Reference:
        Heinsen 2019, section 3.2, where w = 1/10; the momentum as in its code.
    """

    @checked
    def __init__(self, first: NotNegative = 1e-5, warmup: Fraction = 0.1, momentum: Fraction = 0.9):
        self.first, self.warmup, self.momentum = first, warmup, momentum

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            raise ValueError("OneCycle and model.scheduler both set the learning rate: leave out one of them")
        if not 0 < trainer.estimated_stepping_batches < math.inf:
            raise ValueError("OneCycle needs to know how long training lasts: set trainer.max_epochs or max_steps")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        part = self.part(trainer.global_step, int(trainer.estimated_stepping_batches))
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                # Stored in the group, and so in checkpoints: a resumed optimizer has the values of its last step.
                group.setdefault("one_cycle", [group["lr"], *group.get("betas", [group.get("momentum")])[:1]])
            highest = max(group["one_cycle"][0] for group in optimizer.param_groups)
            for group in optimizer.param_groups:
                peak = group["one_cycle"]
                first = self.first * (peak[0] / highest if highest else 1)
                group["lr"] = first + part * (peak[0] - first)
                if "betas" in group:
                    group["betas"] = peak[1] * (1 - part * (1 - self.momentum)), *group["betas"][1:]
                elif group.get("momentum"):
                    group["momentum"] = peak[1] * (1 - part * (1 - self.momentum))

    @checked
    def part(self, step: CountOrZero, steps: Count) -> float:
        """Return c at a step, counted from 0: 0 at the lowest learning rate, 1 at the highest. `steps` is S."""
        step, top = min(step, steps), self.warmup * steps
        if step < top:
            return step / top
        return 0.5 * (1 + math.cos(math.pi * (step - top) / ((steps - top) or 1)))
