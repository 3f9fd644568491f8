"""What networks have in common that classify by capsules and draw their input again."""

from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.nn import CapsuleLinear, MaskedDecoder
from torchcaps.routing import Routing


class ReconstructingCapsNet(nn.Module):
    """Primary capsules, class capsules, and a decoder that redraws the input from one of these.

    A subclass makes the parts and `primary_capsules`.

    Attributes:
        image_shape: `(channels, height, width)`.
        class_capsules: from the primary capsules to a capsule per class.
        decoder: or None.
    """

    image_shape: tuple[int, int, int]
    class_capsules: CapsuleLinear
    decoder: MaskedDecoder | None

    def forward(self, images: Tensor, *, return_coefficients: bool = False) -> Prediction:
        capsules = self.class_capsules(self.primary_capsules(images), return_coefficients=return_coefficients)
        return Prediction(capsules.activations, capsules)

    def primary_capsules(self, images: Tensor) -> Capsules:
        """The children of the class capsules, on a grid `(batch, types, rows, columns, features)`."""
        raise NotImplementedError

    def reconstruct(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor:
        """Draw the image again from the class capsule of each label, or from the most active one."""
        if self.decoder is None:
            raise RuntimeError(f"this {type(self).__name__} has no decoder: build it with decoder=(512, 1024)")
        return self.decoder(capsules, labels)

    def check_images(self, images: Tensor) -> None:
        if tuple(images.shape[1:]) != self.image_shape:
            shape = ", ".join(map(str, self.image_shape))
            raise ValueError(f"expected images of shape (batch, {shape}), got {tuple(images.shape)}")


def check_presence(routing: Routing) -> None:
    """A CapsNet's scores are the activations of its class capsules."""
    if not routing.measures_presence:
        raise ValueError(
            f"{type(routing).__name__} does not say how present a class is, by which a CapsNet classifies: use "
            "DynamicRouting, EMRouting, HeinsenRouting or VectorNormRouting(activation=squash)"
        )
