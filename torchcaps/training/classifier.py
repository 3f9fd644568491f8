"""The LightningModule that trains and tests the network of every recipe: loss, reconstruction, metrics, optimizer."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format
from torchmetrics import Metric

from torchcaps.capsules import Capsules, Prediction, Segmentation
from torchcaps.data.encoded_images import EncodedImages
from torchcaps.data.labeled import LabeledData, TargetKind
from torchcaps.data.notes import say, say_rare
from torchcaps.data.order import Order
from torchcaps.measures.accuracy import is_among
from torchcaps.measures.labels import label_probabilities
from torchcaps.measures.masks import dice_of, overlaps
from torchcaps.measures.predicting import check_scores, name_unfit_inputs
from torchcaps.models import FeedbackAgreement
from torchcaps.nn import CapsuleRegressor
from torchcaps.nn.inputs import check_labels, check_masks
from torchcaps.nn.losses import input_of_loss
from torchcaps.training.alive import BeginsAlive
from torchcaps.training.mixing import Inputs, mixup
from torchcaps.utils.arguments import Count, NotNegative, Positive, checked, shown, shown_with_type
from torchcaps.utils.checks import counted, one_line

Stage = Literal["train", "val", "test"]


class Outcome(NamedTuple):
    """What a network made of a batch.

    Attributes:
        loss: the mean loss of the samples.
        predicted: of the samples that are this process's own: evidence for each class, the probability of each label if
            `labels_per_image` is None, numbers, or numbers of pixels `(own, 3, classes)`, see
            :func:`torchcaps.measures.masks.overlaps`.
        right: how many of these count as correct, int64; 0 of numbers; of masks the sum of the numbers of pixels, `(3,
            classes)`.
        own: how many these are.
        together: samples of the batch in all processes.
        means: further means over the samples, by their names.
    """

    loss: Tensor
    predicted: Tensor
    right: Tensor
    own: int
    together: int
    means: dict[str, Tensor]


class Share(Metric):
    """The share of samples that count as correct, of those in all processes."""

    right: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, right: Tensor, total: int) -> None:
        """Add a number of samples that are correct, and the number of all samples among which they are."""
        self.right += right
        self.total += total

    def compute(self) -> Tensor:
        """Return the share so far."""
        return self.right / self.total


class Dice(Metric):
    """The mean Dice coefficient of the classes, of all pixels in all processes; classes without pixels do not count."""

    pixels: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add_state("pixels", torch.zeros(3, classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, pixels: Tensor, total: int) -> None:
        """Add numbers of pixels `(3, classes)`, see :func:`torchcaps.measures.masks.overlaps`."""
        self.pixels += pixels

    def compute(self) -> Tensor:
        """Return the mean so far."""
        return dice_of(self.pixels).nanmean()


class Classifier(LightningModule):
    """Train a network that maps images or other inputs to a Prediction.

    A batch is `(inputs, labels)`, with the images of the digits as a third tensor where several labels per image are
    reconstructed. If the inputs are a tuple, its items are the network's arguments. An image may also be several crops,
    `(batch, crops, channels, height, width)`: the mean of their scores counts, and no reconstruction is made. With
    `predicts="numbers"` the labels are numbers `(batch, numbers)`, in any units, and so are the network's scores. With
    `predicts="masks"` the network returns a Segmentation, and the labels are masks `(batch, height, width)` with the
    class of each pixel, -100 for a pixel that does not count.

    Args:
        network: module that returns a Prediction, or a Segmentation; with a reconstruction weight it also needs a
            `decoder` and `reconstruct(capsules, labels)`, or of masks `reconstruct(capsules, masks)`.
        loss: function of the scores and the labels, or of the activations if its attribute `reads` is "activations".
        classes: number of classes, or of numbers.
        optimizer: function that takes the parameters and returns an optimizer.
        features_lr: learning rate of `network.features`, for example of pretrained features behind which a new head
            learns faster; None for that of the optimizer. A schedule scales both.
        scheduler: function that takes the optimizer and returns a schedule of its learning rate, or None.
        scheduler_interval: whether the schedule advances every "step" or every "epoch".
        reconstruction_weight: weight of the squared error between an image and its reconstruction, summed over pixels
            (Sabour et al. 2017: 0.0005). With several labels per image, each digit is reconstructed from its own
            capsule, and the error is that to `(batch, classes, channels, height, width)`, the third tensor of a batch.
            With masks, the pixels that are not of the first class are reconstructed from the capsules of their true
            classes (LaLonde and Bagci 2018, section 3.2). 0 makes no reconstruction.
        labels_per_image: 1 for labels that are class indices `(batch,)`. Otherwise labels `(batch, classes)` are 1 for
            the classes that are present and 0 for the others, and an image counts as correct only if all its classes
            are predicted and no other. A number predicts that many classes, those with the highest scores; None
            predicts every class with a probability above 0.5, see `torchcaps.measures.labels.label_probabilities`.
        feedback: function that takes the network and returns a regularizer of its layers, whose divergence is added to
            the loss in training (Li et al. 2018), or None.
        mixup: parameter alpha of :func:`torchcaps.training.mixup`, which mixes the training batches. The loss then gets
            labels `(batch, classes)` that sum to 1, and the training accuracy counts the larger label of each sample as
            the true one. 0 mixes nothing.
        compile: whether `torch.compile` compiles the training steps of the network.
        top_k: number of highest scores among which the score of the true class counts as correct; 1 with several labels
            per image.
        class_weights: weights of the classes in the loss, for classes of unequal size: one number for each, or
            "balanced" for n / (classes * n_c), where n_c of the n training labels are of class c, as scikit-learn has
            it; None for none. The loss must have a buffer `weight` for them, as those of PyTorch and of `torchcaps`
            have. It is then the sum of the weighted losses, divided by the number of samples, in training, validation
            and test. (`nn.CrossEntropyLoss` divides by the sum of the weights of a batch, so that a batch of one class
            would count as if it had no weight.) A checkpoint holds the weights.
        predicts: "classes"; "numbers" in place of classes; or "masks", a class of each pixel. With numbers, the loss
            gets predicted and true numbers that are standardized: less the mean of the training labels, divided by
            their standard deviation, so that numbers of different units count alike. A
            :class:`torchcaps.CapsuleRegressor` in the network learns both from them too. There is no accuracy. With
            masks, the Dice coefficient, the mean of those of all classes, stands in place of the accuracy, "balanced"
            class weights count pixels, and a loss normalizes its weights itself.

    Raises:
        TypeError: a function that is an argument, the network or a batch is or returns something else than it must.
        ValueError: an argument is out of range, the network has another number of classes, a batch is empty, the loss
            is not one number, the labels are out of range or have another shape than `labels_per_image` requires, or
            scores of a validation or a test are NaN or infinite.
        FloatingPointError: the loss of a training step is not finite; the message names the step and the first layer
            whose output is not finite.
    """

    mean: Tensor  # of the training labels, if they are numbers, see `setup`
    deviation: Tensor

    @checked
    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        classes: Count = 10,
        optimizer: OptimizerCallable = torch.optim.Adam,
        features_lr: NotNegative | None = None,
        scheduler: LRSchedulerCallable | None = None,
        scheduler_interval: Literal["step", "epoch"] = "epoch",
        reconstruction_weight: NotNegative = 0.0,
        labels_per_image: Count | None = 1,
        feedback: Callable[[nn.Module], FeedbackAgreement] | None = None,
        mixup: NotNegative = 0.0,
        compile: bool = False,
        top_k: Count = 1,
        class_weights: Literal["balanced"] | Sequence[Positive] | None = None,
        predicts: Literal["classes", "numbers", "masks"] = "classes",
    ):
        super().__init__()
        if labels_per_image is not None and labels_per_image > classes:
            raise ValueError(f"labels_per_image must be None or from 1 to classes={classes}, got {labels_per_image}")
        if top_k > classes or (top_k > 1 and labels_per_image != 1):
            raise ValueError(f"top_k must be from 1 to classes={classes}, and 1 with several labels, got {top_k}")
        if mixup and (labels_per_image not in (1, None) or reconstruction_weight or predicts != "classes"):
            raise ValueError(
                "mixup must be 0 with numbers or masks, with a given number of labels per image or with "
                f"reconstruction; got mixup={mixup}, labels_per_image={labels_per_image}, "
                f"reconstruction_weight={reconstruction_weight}, predicts={predicts!r}"
            )
        if predicts == "numbers" and (labels_per_image != 1 or reconstruction_weight or class_weights is not None):
            raise ValueError(
                "predicts='numbers' needs labels_per_image=1, reconstruction_weight=0 and no class_weights: leave them "
                "out, or leave out predicts"
            )
        if predicts == "masks" and (labels_per_image != 1 or top_k != 1 or feedback is not None):
            raise ValueError(
                "predicts='masks' needs labels_per_image=1, top_k=1 and no feedback: leave them out, or leave out "
                "predicts"
            )
        if features_lr is not None and not isinstance(getattr(network, "features", None), nn.Module):
            raise ValueError(
                f"features_lr={features_lr} needs a network with `features`, and {type(network).__name__} has none: "
                "leave it out, or choose another network"
            )
        if compile and feedback is not None:
            raise ValueError("compile must be false with feedback, which looks into the layers at every step")
        if reconstruction_weight and labels_per_image is None:
            raise ValueError(
                f"reconstruction_weight={reconstruction_weight} needs a number as labels_per_image, got None: the "
                "decoder reconstructs that many classes"
            )
        if reconstruction_weight and getattr(network, "decoder", None) is None:
            raise ValueError(
                f"reconstruction_weight={reconstruction_weight} needs a network with a decoder: "
                "give the network one, or set reconstruction_weight to 0"
            )
        self.network: Any = network  # Any, because `reconstruct` is not a method of nn.Module
        self._takes_volumes = any(isinstance(module, nn.Conv3d) for module in network.modules())
        self.loss, self.class_weights = loss, class_weights
        self.optimizer, self.scheduler, self.scheduler_interval = optimizer, scheduler, scheduler_interval
        self.features_lr = features_lr
        self.reconstruction_weight = reconstruction_weight
        self.labels_per_image, self.classes, self.mixup = labels_per_image, classes, mixup
        self.target: TargetKind = "class" if labels_per_image == 1 else "labels"
        if predicts != "classes":
            self.target = predicts
        if predicts == "numbers":
            self.register_buffer("mean", torch.zeros(classes))
            self.register_buffer("deviation", torch.ones(classes))
        if class_weights is not None:
            self._check_class_weights()
            self.loss = copy.deepcopy(loss)  # the user's own stays as it is
            of_class = torch.ones(classes) if class_weights == "balanced" else torch.tensor(class_weights).float()
            self.loss.weight = of_class  # those of "balanced" follow in `setup`, or from a checkpoint
        self.compiled = compile
        self.feedback = None if feedback is None else feedback(network)
        if not isinstance(self.feedback, FeedbackAgreement | None):
            raise TypeError(f"feedback must return a FeedbackAgreement, got {shown_with_type(self.feedback)}")
        self.top_k = top_k
        # Of masks, the Dice coefficient takes the place of the accuracy.
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            Dice(classes) if predicts == "masks" else Share() for _ in range(3)
        )
        self._unread: tuple[Callable[[], float], Inputs] | None = None  # a loss that a GPU still computes, of inputs

    def configure_callbacks(self) -> list[Callback]:
        return [BeginsAlive()]

    def setup(self, stage: str) -> None:
        if self.trainer.strategy.root_device.type == "cpu":
            # Only weights of convolutions. ResNets train a fifth faster, other networks as fast (docs/performance.md).
            # Not those of 1x1: PyTorch 2.13 and 2.14 write beyond their memory in the backward pass of
            # nn.Conv2d(3, 48, 1, stride=2) with such weights, as RepVGG has it.
            for module in self.network.modules():
                if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                    convert_conv2d_weight_memory_format(module, torch.channels_last)
        precision = self.trainer.precision
        if self.target == "numbers" and precision in ("16-true", "bf16-true"):
            raise ValueError(f"trainer.precision {precision} rounds the numbers of the data: take bf16-mixed")
        if stage == "fit" and self.target == "numbers":
            self._standardize()
        elif stage == "fit":
            self._look_at_classes()
        if stage == "fit" and self.compiled:
            check_compiler(self.trainer.strategy.root_device)
            # One program for each batch size: the order in which sizes come, as after a resumption, changes no result.
            self.network.compile(dynamic=False)

    def take_units(self) -> None:
        """Take the mean and the deviation of numbers from the network's head: a folder has its weights alone."""
        for head in self.network.modules():
            if self.target == "numbers" and isinstance(head, CapsuleRegressor):
                self.mean, self.deviation = head.mean.clone(), head.deviation.clone()

    def _standardize(self) -> None:
        """Learn the mean and the standard deviation of the training labels, here and in heads that standardize."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        labels = data.train_set.labels if isinstance(data, LabeledData) and data.train_set is not None else None
        if labels is None or labels.shape[1:] != (self.classes,):
            given = "another one" if labels is None else f"labels that are {shown(labels)}"
            expected = f"a data set of torchcaps.data with labels (n, {self.classes})"
            raise ValueError(f"predicts='numbers' needs {expected}, and the training has {given}")
        self.mean.copy_(labels.double().mean(0))
        self.deviation.copy_(labels.double().std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny))
        for head in self.network.modules():
            if isinstance(head, CapsuleRegressor):
                head.standardize(labels)

    def _check_class_weights(self) -> None:
        given, name = self.class_weights, type(self.loss).__name__
        if self.labels_per_image != 1:
            raise ValueError(
                f"class_weights must be None with several labels per image, got {shown(given)}: leave them out, or "
                "weight the classes in a loss of your own"
            )
        if "weight" not in self.loss._buffers:
            raise ValueError(
                f"class_weights={shown(given)} need a loss with a buffer `weight`, one number for each class, and "
                f"{name} has none: choose CrossEntropyLoss, MarginLoss or SpreadLoss, or leave out the class weights"
            )
        if self.loss.weight is not None:
            raise ValueError(f"class_weights={shown(given)}, and {name} has a weight already: leave out one of them")
        if given != "balanced" and len(given) != self.classes:
            raise ValueError(
                f"class_weights must have one number for each of {counted(self.classes, 'class', 'classes')}, got "
                f"{len(given)}: give so many, or balanced"
            )

    def _look_at_classes(self) -> None:
        """Count the training samples of each class: for balanced weights, and to say which classes are rare."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        labels = data.train_set.labels if isinstance(data, LabeledData) and data.train_set is not None else None
        if labels is None or self.target not in ("class", "masks"):
            if self.class_weights == "balanced":
                raise ValueError(
                    "class_weights must be one number for each class here: 'balanced' counts the labels of a data set "
                    "of torchcaps.data, and the training has another one"
                )
            return
        if self.target == "masks":
            counts = labels.sum(0)
        else:
            check_labels(labels, self.classes, labels.device)
            counts = labels.bincount(minlength=self.classes)
        if self.class_weights == "balanced":
            present, weight = counts > 0, self.loss._buffers["weight"]
            even = counts.sum() / (present.sum() * counts.clamp_min(1))
            assert weight is not None
            weight.copy_(even.where(present, 1.0))  # 1 for a class that only validation or test have
        if self.target == "masks":
            return
        weighted, balanced = getattr(self.loss, "weight", None) is not None, data.balance
        option = "--data.images.balance true" if isinstance(data, EncodedImages) else "--data.balance true"
        if weighted and balanced:
            weights = "--model.class_weights" if self.class_weights is not None else "the weights of the loss"
            say(f"{option} and {weights} correct for rare classes twice: one of them is enough")
        elif not weighted and not balanced:
            weights = "--model.class_weights balanced"
            remedies = [option] * (balanced is False) + [weights] * ("weight" in self.loss._buffers)
            names = data.names if len(data.names) == self.classes else map(str, range(self.classes))
            say_rare(dict(zip(names, counts.tolist(), strict=True)), remedies)

    def forward(self, inputs: Inputs) -> Prediction | Segmentation:
        with name_unfit_inputs(self.network, inputs):
            return self._forward(inputs)

    def _forward(self, inputs: Inputs) -> Prediction | Segmentation:
        if self.target == "masks":
            return _segmentation(self.network(inputs))
        if not isinstance(inputs, Tensor):
            return _prediction(self.network(*inputs))
        if not self._are_crops(inputs):
            return _prediction(self.network(inputs))
        of_crops = _prediction(self.network(inputs.flatten(0, 1)))
        mean = of_crops.evidence.unflatten(0, inputs.shape[:2]).mean(1)
        return Prediction(mean) if of_crops.activations is None else Prediction(activations=mean)

    def _are_crops(self, inputs: Tensor) -> bool:
        """Return whether inputs are several crops of each image, and no volumes `(batch, channels, d, h, w)`."""
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        return inputs.dim() == 5 and not self._takes_volumes and getattr(data, "ten_crop", True)

    def on_train_start(self) -> None:
        for config in self.trainer.lr_scheduler_configs:
            self._check_length(config.scheduler, f"{config.interval}s")

    def _check_length(self, scheduler: Any, units: str) -> None:
        """Check that a schedule of a fixed length, such as OneCycleLR's, does not end before the training."""
        steps = self.trainer.estimated_stepping_batches if units == "steps" else self.trainer.max_epochs
        most = getattr(scheduler, "total_steps", None)
        if most is None or steps is None or not most < steps < math.inf:
            return
        longer = "" if self.trainer.ckpt_path else f"--model.scheduler.total_steps {steps:.0f} or "
        raise ValueError(
            f"{type(scheduler).__name__} ends after {counted(most, units[:-1])}, and the training takes {steps:.0f}: "
            f"give {longer}--trainer.max_{units} {most}"
        )

    def training_step(self, batch: tuple[Any, ...], batch_idx: int) -> Tensor:
        batch = self.mixed(batch)
        outcome = self.outcome("train", batch, batch_idx)
        self.log_outcome("train", outcome)
        self.check_finite(outcome.loss, batch[0])
        return outcome.loss * self._weight(outcome)  # the mean over the processes is then that over the samples

    def mixed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a training batch as `mixup` has it."""
        if not self.mixup:
            return batch
        inputs, labels, *parts = _parts_of(batch)
        return *mixup(inputs, labels, self.classes, self.mixup), *parts

    def check_finite(self, loss: Tensor, inputs: Inputs) -> None:
        """Raise an error if the loss of a training step is not finite, before the optimizer uses it. On a GPU this
        waits until the backward pass has been started, so that the device has work in the meantime."""
        if self._trainer is not None and loss.is_cuda:
            self._unread = _reading(loss.detach()), inputs
        else:
            self._stop_unless_finite(loss.item(), inputs)

    def on_after_backward(self) -> None:
        if self._unread is not None:
            (read, inputs), self._unread = self._unread, None
            self._stop_unless_finite(read(), inputs)

    def _stop_unless_finite(self, loss: float, inputs: Inputs) -> None:
        if not math.isfinite(loss):
            self.stop_at(loss, self.global_step, inputs)

    def stop_at(self, loss: float, step: int, inputs: Inputs) -> NoReturn:
        """Raise an error about the loss of a training step, in which the network had these inputs."""
        raise FloatingPointError(f"the loss is {loss} at step {step}: {self._first_non_finite(inputs, step)}")

    @torch.compiler.set_stance("force_eager")  # compilation would take longer than it saves
    def validation_step(self, batch: tuple[Any, ...], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluated("val", batch, batch_idx)

    @torch.compiler.set_stance("force_eager")
    def test_step(self, batch: tuple[Any, ...], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluated("test", batch, batch_idx)

    def _evaluated(self, stage: Stage, batch: tuple[Any, ...], batch_idx: int) -> dict[str, Tensor]:
        outcome = self.outcome(stage, batch, batch_idx)
        self.log_outcome(stage, outcome)
        return {"predicted": outcome.predicted}

    def configure_optimizers(self) -> Any:
        parts = (self.network, self.feedback, self.loss)  # a loss may have parameters too
        trained = nn.ModuleList(module for module in parts if isinstance(module, nn.Module))
        optimizer = self.optimizer(self._groups_of(trained))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must return a torch.optim.Optimizer, got {shown_with_type(optimizer)}")
        if self.scheduler is None:
            return optimizer
        schedule = {"scheduler": self.scheduler(optimizer), "interval": self.scheduler_interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _groups_of(self, trained: nn.Module) -> Any:
        """Return the parameters for the optimizer, those of the features as a group of their own if they have a
        learning rate of their own."""
        parameters = [p for p in trained.parameters() if p.requires_grad]
        if self.features_lr is None:
            return parameters
        features = set(self.network.features.parameters())
        return [
            {"params": [p for p in parameters if p not in features]},
            {"params": [p for p in parameters if p in features], "lr": self.features_lr},
        ]

    def outcome(self, stage: Stage, batch: tuple[Any, ...], batch_idx: int) -> Outcome:
        """Return what the network makes of a batch. Nothing is logged, and no value is read on a GPU in training."""
        images, labels, *parts = _parts_of(batch)
        count, together = self._share(stage, batch_idx, len(labels))  # samples here, and in all processes
        mixed = stage == "train" and self.mixup > 0
        one_class, masks = self.target == "class" and not mixed, self.target == "masks"
        divergence = None
        means: dict[str, Tensor] = {}
        if stage == "train" and self.feedback is not None:
            output, divergence = self.feedback(images)
            prediction = _prediction(output)
            means["divergence"] = divergence
        else:
            prediction = self(images)
        evidence = prediction.evidence
        if evidence.shape[1] != self.classes:
            raise ValueError(
                f"the network has {counted(evidence.shape[1], 'class', 'classes')}, but the model has "
                f"classes={self.classes}: set both to the number of classes in the data"
            )
        if stage != "train":
            check_scores(evidence.movedim(1, -1))
        expected = evidence.shape[: 1 if one_class else 2]
        if masks:
            check_masks(labels, evidence)
        elif labels.shape != expected:
            of = "predicts='numbers'" if self.target == "numbers" else f"labels_per_image={self.labels_per_image}"
            raise ValueError(f"{of} needs labels of shape {tuple(expected)}, got {tuple(labels.shape)}")
        if one_class:
            check_labels(labels, self.classes, evidence.device)
            labels = labels.long()
        if self.target == "numbers":
            loss = self.loss_of_numbers(evidence, labels)
        else:
            loss = self.loss(input_of_loss(self.loss, prediction), labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            reduces = getattr(self.loss, "reduction", "mean") != "mean"
            advice = f": give {type(self.loss).__name__} the option reduction='mean'" if reduces else ""
            raise ValueError(
                f"the loss must be a tensor of one number, the mean over the batch, got {shown(loss)}{advice}"
            )
        normalizes = isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss) and self.loss.reduction == "mean"
        if self.class_weights is not None and normalizes and one_class:
            of_class: Any = self.loss.weight
            loss = loss * of_class[labels].mean()  # it has divided by the sum of the weights of this batch
        if divergence is not None:
            loss = loss + divergence
        if masks and self.reconstruction_weight:
            assert isinstance(prediction, Segmentation)
            means["reconstruction_error"] = error = self._error_of_masked(images, prediction, labels)
            loss = loss + self.reconstruction_weight * error
        elif self.reconstruction_weight and not self._are_crops(images):  # crops of an image are not reconstructed
            # From the capsule of the true class in training, and of the most likely one in validation and test.
            if self.labels_per_image == 1:
                drawn = self.network.reconstruct(prediction.capsules, labels if stage == "train" else None)
                error = (drawn - images).square().sum() / len(images)
            else:
                chosen = labels > 0 if stage == "train" else self._predicted(evidence)
                error = self._error_of_parts(prediction, chosen, images.shape[1:], parts)
            means["reconstruction_error"] = error
            loss = loss + self.reconstruction_weight * error
        if self.labels_per_image is None:
            evidence = label_probabilities(prediction)
        predicted = evidence[:count]
        if masks:
            predicted = overlaps(predicted.detach().argmax(1), labels[:count], self.classes)
            return Outcome(loss, predicted, predicted.sum(0), count, together, means)
        right = self._right(predicted, labels[:count], mixed)
        return Outcome(loss, predicted, right.count_nonzero(), count, together, means)

    def _error_of_masked(self, images: Tensor, segmentation: Segmentation, masks: Tensor) -> Tensor:
        """Return the squared error of images that are reconstructed where they are not of the first class, summed over
        pixels, the mean over images."""
        inside = (masks > 0).unsqueeze(1)
        present = torch.zeros_like(segmentation.evidence).scatter(1, masks.clamp_min(0).unsqueeze(1), inside.float())
        drawn = self.network.reconstruct(segmentation.capsules, present)
        return ((drawn - images) * inside).square().sum() / len(images)

    def loss_of_numbers(self, predicted: Tensor, numbers: Tensor) -> Tensor:
        """Return the loss of predicted and true numbers `(batch, numbers)`, after both are standardized."""
        return self.loss((predicted - self.mean) / self.deviation, (numbers - self.mean) / self.deviation)

    def _right(self, predicted: Tensor, labels: Tensor, mixed: bool) -> Tensor:
        """Return which samples count as correct, `(batch,)` bool."""
        if self.target == "numbers":
            return torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
        if self.target == "labels":
            return (self._predicted(predicted) == (labels > (0.5 if mixed else 0))).all(1)
        return is_among(predicted, labels.argmax(1) if mixed else labels, self.top_k)

    def _weight(self, outcome: Outcome) -> float:
        """Return the weight of a batch in the mean over the processes."""
        return outcome.own * self._processes / outcome.together

    def log_outcome(self, stage: Stage, outcome: Outcome) -> None:
        """Log the means over the samples, and which share of them is correct."""
        weight, accuracy, train = self._weight(outcome), getattr(self, f"{stage}_accuracy"), stage == "train"
        for of, mean in outcome.means.items():
            self._log_mean(f"{stage}/{of}", mean * weight, outcome.together)
        accuracy.update(outcome.right, outcome.own)
        bar, name = train or self.target == "numbers", "dice" if self.target == "masks" else "accuracy"
        self._log_mean(f"{stage}/loss", outcome.loss * weight, outcome.together, on_step=train, prog_bar=bar)
        if self.target != "numbers":
            self.log(f"{stage}/{name}", accuracy, on_step=False, on_epoch=True, prog_bar=True)

    @property
    def _processes(self) -> int:
        return 1 if self._trainer is None else self.trainer.world_size

    def _share(self, stage: Stage, batch_idx: int, count: int) -> tuple[int, int]:
        """Return how many of the `count` samples of a batch are this process's own, and how many all processes have."""
        if self._processes > 1:
            loader: Any = getattr(self.trainer, f"{stage}_dataloader{'' if stage == 'train' else 's'}")
            order = getattr(loader, "sampler", None)
            if isinstance(order, Order):
                return order.share(batch_idx)
        return count, count * self._processes

    def of_all_processes(self, columns: Tensor) -> Tensor:
        """Return the columns of all processes, which have taken the samples in turn, in the order of the samples."""
        if self._processes == 1:
            return columns
        parts: list[Any] = [None] * self._processes
        torch.distributed.all_gather_object(parts, columns)
        merged = columns.new_empty(len(columns), sum(part.shape[1] for part in parts))
        for rank, part in enumerate(parts):
            merged[:, rank :: self._processes] = part
        return merged

    def _log_mean(self, name: str, value: Tensor, count: int, on_step: bool = False, prog_bar: bool = False) -> None:
        """Log the mean over the samples of an epoch in all processes. Accuracies compute theirs themselves.

        Args:
            name: name of the metric.
            value: mean over this process's samples of a batch, times the weight of this process.
            count: samples of the batch in all processes. Lightning divides it by their number, as an integer: it must
                be the same in all of them.
            on_step, prog_bar: see `LightningModule.log`.
        """
        self.log(name, value, on_step=on_step, on_epoch=True, prog_bar=prog_bar, batch_size=count, sync_dist=True)

    def _error_of_parts(
        self, prediction: Prediction, chosen: Tensor, image_shape: torch.Size, parts: list[Tensor]
    ) -> Tensor:
        """Return the squared error of the reconstructed `chosen` classes `(batch, classes)`, mean over images."""
        if not parts:
            raise ValueError(
                "reconstruction with several labels per image needs batches with each class's own image as a third "
                "tensor: use MultiMNIST(parts=True), or set reconstruction_weight to 0"
            )
        expected = (*chosen.shape, *image_shape)
        if not isinstance(parts[0], Tensor) or parts[0].shape != expected:
            raise ValueError(
                f"the third tensor of a batch, each class's own image, must have the shape {expected}, got "
                f"{shown(parts[0])}"
            )
        # As many for each image, because a GPU would have to wait until the host knows another number.
        label = chosen.int().topk(self.labels_per_image or 1).indices.sort().values
        image = torch.arange(len(label), device=label.device)[:, None].expand_as(label)
        assert prediction.capsules is not None
        capsules = Capsules(prediction.capsules.poses[image.flatten()])  # repeated for each chosen class
        drawn = self.network.reconstruct(capsules, label.flatten())
        errors = (drawn - parts[0][image, label].flatten(0, 1)).square().flatten(1)
        return (errors * chosen[image, label].view(-1, 1)).sum() / len(chosen)  # an image may have fewer

    def _predicted(self, scores: Tensor) -> Tensor:
        """Return which classes are predicted, `(batch, classes)` bool."""
        if self.labels_per_image is None:  # they are probabilities
            return scores > 0.5
        highest = scores.topk(self.labels_per_image, dim=1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, highest, True)

    def _first_non_finite(self, inputs: Inputs, step: int) -> str:
        """Return where in the network a value that is not finite appears first, and what to do, for a message."""
        layers: list[str] = []

        def look(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                tensors = output if isinstance(output, tuple) else (output,)
                if any(isinstance(t, Tensor) and not torch.isfinite(t).all() for t in tensors):
                    layers.append(f"{name} ({type(module).__name__})")

            return hook

        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        if not all(torch.isfinite(x).all() for x in tensors):
            too_large = any(x.dtype == torch.float16 for x in tensors)
            advice = ", or train in float32: float16 has no numbers above 65,504" if too_large else ""
            return f"the inputs themselves are not finite: correct the data{advice}"
        tried = "try a lower learning rate" if step else "look at the first weights and the loss"
        advice = f"; {tried}, or try float32 if you train in half precision"
        for name, parameter in self.network.named_parameters():
            if not torch.isfinite(parameter).all():
                return f"the parameter {name} is not finite{advice}"
        handles = [m.register_forward_hook(look(name)) for name, m in self.network.named_modules() if name]
        precision = getattr(self._trainer, "precision_plugin", None)
        with torch.no_grad(), nullcontext() if precision is None else precision.train_step_context():
            self(inputs)
        for handle in handles:
            handle.remove()
        reason = f"the first output that is not finite is that of {layers[0]}" if layers else "all layers are finite"
        return f"{reason}{advice}"


def _reading(loss: Tensor) -> Callable[[], float]:
    """Begin to read a number from a GPU, and return a function that waits for it."""
    value = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> float:
        event.synchronize()
        return value.item()

    return read


def check_compiler(device: torch.device) -> None:
    """Check that `torch.compile` works on this machine."""
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:  # of the compiler or of PyTorch
        raise ValueError(
            f"compile must be false here: torch.compile does not work on this machine ({one_line(error)[:200]})"
        ) from error


def _parts_of(batch: Any) -> tuple[Any, ...]:
    """Return the inputs, the labels and further tensors of a batch, after a check that it is one."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise TypeError(f"a batch must be a tuple of inputs and labels, got {shown_with_type(batch)}")
    inputs, labels = batch[:2]
    if not isinstance(inputs, Tensor) and not (isinstance(inputs, (tuple, list)) and inputs):
        raise TypeError(f"the inputs of a batch must be a tensor or several in a tuple, got {shown_with_type(inputs)}")
    if not isinstance(labels, Tensor):
        raise TypeError(f"the labels of a batch must be a tensor, got {shown_with_type(labels)}")
    if labels.dim() == 0 or not len(labels):
        raise ValueError(f"a batch must have at least one sample, got labels that are {shown(labels)}")
    return tuple(batch)


def _prediction(output: Any) -> Prediction:
    """Return the output of a network, after a check that it is a Prediction."""
    if not isinstance(output, Prediction):
        raise TypeError(f"the network must return a torchcaps.Prediction(scores), got {shown_with_type(output)}")
    output.evidence  # noqa: B018  # the check of its shape
    return output


def _segmentation(output: Any) -> Segmentation:
    """Return the output of a network, after a check that it is a Segmentation."""
    if not isinstance(output, Segmentation):
        raise TypeError(f"the network must return a torchcaps.Segmentation(scores), got {shown_with_type(output)}")
    output.evidence  # noqa: B018  # the check of its shape
    return output
