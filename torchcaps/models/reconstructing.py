"""Base class of networks that classify by class capsules and reconstruct their input from them."""

from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.inputs import check_images
from torchcaps.nn import CapsuleLinear, MaskedDecoder
from torchcaps.routing import Routing
from torchcaps.utils.arguments import checked


class ReconstructingCapsNet(nn.Module):
    """Network of primary capsules, class capsules, and a decoder that reconstructs the input from one class capsule.

    A subclass creates the parts and defines `primary_capsules`.

    Attributes:
        image_shape: shape of an image, `(channels, height, width)`.
        class_capsules: layer from the primary capsules to one capsule per class.
        decoder: decoder of the class capsules, or None.
    """

    gives_logits = False  # but activations, for a MarginLoss
    image_shape: tuple[int, int, int]
    class_capsules: CapsuleLinear
    decoder: MaskedDecoder | None

    @checked
    def forward(self, images: Tensor, *, return_coefficients: bool = False) -> Prediction:
        capsules = self.class_capsules(self.primary_capsules(images), return_coefficients=return_coefficients)
        return Prediction(activations=capsules.activations, capsules=capsules)

    def primary_capsules(self, images: Tensor) -> Capsules:
        """Return the children of the class capsules, on a grid `(batch, types, rows, columns, features)`."""
        raise NotImplementedError

    @checked
    def reconstruct(self, capsules: Capsules, labels: Tensor | None = None) -> Tensor:
        """Reconstruct the images from the class capsule of each label, or from the most active one."""
        if self.decoder is None:
            raise RuntimeError(f"this {type(self).__name__} has no decoder: build it with one, by the argument decoder")
        return self.decoder(capsules, labels)

    def check_images(self, images: Tensor) -> None:
        """Check the shape of the images."""
        check_images(images, self.image_shape, self.class_capsules.weight)


def check_presence(routing: Routing) -> None:
    """Check that the activations of class capsules say how present the classes are: a CapsNet classifies by them."""
    if not routing.measures_presence:
        raise ValueError(
            f"{type(routing).__name__} does not say how present a class is, and a CapsNet classifies by that: use "
            "DynamicRouting, EfficientRouting, EMRouting, HeinsenRouting, SelfRouting, VBRouting or "
            "VectorNormRouting(activation=squash)"
        )
