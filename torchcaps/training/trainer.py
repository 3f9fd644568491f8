"""Lightning's Trainer with `limit_*_batches` that are parsed reliably: 1 is one batch, 1.0 is all. Recipes use it."""

from typing import Annotated, Any

from lightning.pytorch import Trainer as LightningTrainer

# Lightning annotates these with Optional[Union[int, float]], and others with Optional[Union[float, int]]. The cache of
# typing takes the two for equal and keeps the first: depending on other imports, 1 would be parsed as 1.0. The texts
# make this type different from both.
Limit = Annotated[int, "number of batches"] | Annotated[float, "fraction of the batches"] | None


class Trainer(LightningTrainer):
    """Trainer whose arguments are parsed in the same way whatever was imported before.

    Args:
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: number (int) or fraction
            (float) of the batches to take, or None for all.
        resident: whether the training samples lie on the device, and steps are taken without Lightning's work for each
            of them, on CUDA as a graph, see torchcaps.training.resident. Where a training needs more than this, a line
            says what, and it goes the usual way.
        options: other arguments of `lightning.Trainer`.
    """

    def __init__(
        self,
        *,
        limit_train_batches: Limit = None,
        limit_val_batches: Limit = None,
        limit_test_batches: Limit = None,
        limit_predict_batches: Limit = None,
        resident: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            **options,
        )
        self.resident = resident
        if resident:
            from torchcaps.training.resident import ResidentEpochLoop  # it needs this module's package

            usual = self.fit_loop.epoch_loop
            self.fit_loop.epoch_loop = ResidentEpochLoop(self, usual.min_steps, usual.max_steps)
