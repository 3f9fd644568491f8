"""Images as the hidden states of a frozen encoder."""

import os
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from torchcaps.data.encoder import check_sizes, download_options, identity, quiet_download
from torchcaps.data.files import DataError
from torchcaps.data.image_folder import ImageFolder
from torchcaps.data.images import ImageData
from torchcaps.data.labeled import Batch, LabeledData
from torchcaps.models.libraries import image_side, standardization
from torchcaps.utils.arguments import Count, CountOrZero, checked
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.files import user_path


class ImageEncoder:
    """A frozen Hugging Face model that encodes images: the hidden states of all layers for every patch.

    Images are resized (bicubic) to the size that the model takes, and standardized as its image processor does. The
    states are those that the model returns with `output_hidden_states`, its class token included.

    Args:
        name: name of a model on the Hugging Face Hub, or path of a folder with a model.
        revision: branch, tag or complete commit hash of a model on the Hub; None for its main branch.

    Raises:
        DataError: the model cannot be loaded, or its layers have states of different shapes.
        ImportError: transformers is not installed.
    """

    @checked
    def __init__(self, name: str, revision: str | None = None) -> None:
        with needs("text"):
            from transformers import AutoModel
            from transformers.image_processing_base import ImageProcessingMixin
        self.name = str(user_path(name))
        is_folder, commit = os.path.isdir(self.name), ""
        if not is_folder:
            self.name = name
        if not is_folder or revision is not None:  # which `identity` refuses for a folder
            commit = identity(self.name, revision).rpartition("@")[2]
        try:
            with quiet_download():
                options = download_options(self.name, commit)
                about, _ = ImageProcessingMixin.get_image_processor_dict(self.name, **options)
                model = AutoModel.from_pretrained(self.name, dtype=torch.float32, **options)
                colors = standardization(about, getattr(model.config, "num_channels", 3))
                mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in colors)
                size = model.config.image_size
                height, width = map(image_side, size if isinstance(size, list | tuple) else (size, size))
        except Exception as error:  # transformers raises many kinds of errors for damaged files
            raise DataError(
                f"{name} is not an encoder of images that transformers can load ({type(error).__name__}: "
                f"{one_line(error)[:160]}): give one such as microsoft/beit-large-patch16-224"
            ) from None
        self.size = height, width
        self._mean, self._std, self._model = mean, std, model.eval().requires_grad_(False)

    @checked
    def encode(self, images: Tensor) -> Tensor:
        """Return the states of images `(batch, 3, height, width)` in [0, 1]: `(batch, positions, layers, width)`."""
        self._model = self._model.to(images.device)
        if images.shape[2:] != self.size:
            images = interpolate(images, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        standard = (images.float() - self._mean.to(images.device)) / self._std.to(images.device)
        with torch.no_grad():
            states = self._model(pixel_values=standard, output_hidden_states=True).hidden_states
        if len({state.shape for state in states}) > 1 or states[0].dim() != 3:
            raise DataError(
                f"the layers of {self.name} have states of different shapes, or grids of them: choose an encoder "
                "whose layers are alike, such as a ViT"
            )
        return torch.stack(states, 2)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Number of layers, its input included, and width of a state."""
        states = self.encode(torch.zeros(1, 3, *self.size))
        return states.shape[2], states.shape[3]


class EncodedImages(LabeledData):
    """Color images of a data set, as the hidden states of all layers of a frozen encoder.

    Batches have states of shape (batch, positions, layers, width) in place of images, in the precision of the run. The
    states are computed on the device of the run for every batch anew, because each epoch augments the images in
    another way: nothing is kept on the disk, and an epoch takes as long as the encoder needs for all images. This
    happens in the hook of a Trainer. A loop of your own calls `data.states(images)`.

    Args:
        images: the data set. Its own options augment, crop and split the images; batches are those of this class.
        encoder: name of a model on the Hugging Face Hub, or path of a folder with a model.
        revision: see `ImageEncoder`.
        batch_size, num_workers, shuffle_labels: see `LabeledData`.

    Raises:
        ValueError: the images are gray, or have `ten_crop`; see also `LabeledData`.
        DataError: in `setup`, if the images or the encoder are missing or damaged, or if the network takes other
            states.
    """

    @checked
    def __init__(
        self,
        images: ImageData,
        encoder: str = "microsoft/beit-large-patch16-224",
        revision: str | None = None,
        batch_size: Count = 50,
        num_workers: CountOrZero = 0,
        shuffle_labels: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, shuffle_labels)
        if images.shape[0] != 3:
            raise ValueError(f"images must have 3 channels for an encoder, got {images.shape[0]}: choose color images")
        if images.ten_crop:
            raise ValueError("images must have ten_crop=False: an encoder takes one crop of each image")
        self.images, self.encoder, self.revision = images, encoder, revision
        self.balance, self.target = images.balance, images.target
        if isinstance(images, ImageFolder):
            self.write_split = images.write_split

    @property
    def names(self) -> list[str]:
        return self.images.names

    @property
    def classes(self) -> int:  # type: ignore[override]  # that of the images
        return self.images.classes

    @property
    def title(self) -> str:
        return self.images.title

    def keys(self, stage: str) -> list[str]:
        return self.images.keys(stage)

    def split_hashes(self) -> dict[str, Tensor]:
        return self.images.split_hashes()

    def prepare_data(self) -> None:
        self.images.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Load the images of a stage as their own class does, and the encoder."""
        self.images.setup(stage)
        if self.train_set is None and self.images.train_set is not None:
            self.train_set = self._with_labels(self.images.train_set, "fit")
        if self.val_set is None and self.images.val_set is not None:
            self.val_set = self._with_labels(self.images.val_set, "validate")
        self.test_set = self.images.test_set
        check_sizes(self.encoder, self.trainer, lambda: self._encoder.sizes)

    @property
    def _validates(self) -> bool:
        return self.images._validates

    @cached_property
    def _encoder(self) -> ImageEncoder:
        return ImageEncoder(self.encoder, self.revision)

    @checked
    def states(self, images: Tensor) -> Tensor:
        """Return the states of images `(n, 3, height, width)` in [0, 1], `(n, positions, layers, width)`."""
        return self._encoder.encode(images)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        assert self.trainer is not None  # the Trainer calls this hook
        self.images.trainer = self.trainer
        images, *rest = self.images.on_after_batch_transfer(batch, dataloader_idx)
        dtype: Any = self.trainer.lightning_module.dtype
        return self.states(images).to(dtype), *rest
