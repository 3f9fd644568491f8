"""Lightning's Trainer, with limits of batches that are read as they are written."""

from typing import Annotated, Any

from lightning.pytorch import Trainer as LightningTrainer

# Lightning has Optional[Union[int, float]] here and Optional[Union[float, int]] elsewhere. These are equal keys of
# typing's cache, which keeps one of them: depending on other imports, 1 would be read as 1.0, which is all batches.
# Nothing else is equal to this type.
Limit = Annotated[int, "number of batches"] | Annotated[float, "share of the batches"] | None


class Trainer(LightningTrainer):
    """Trainer whose arguments are read alike whatever was imported before.

    Args:
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: number (int) or share (float)
            of the batches to take; None: all.
        options: other arguments of `lightning.Trainer`.
    """

    def __init__(
        self,
        *,
        limit_train_batches: Limit = None,
        limit_val_batches: Limit = None,
        limit_test_batches: Limit = None,
        limit_predict_batches: Limit = None,
        **options: Any,
    ) -> None:
        super().__init__(
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            **options,
        )
