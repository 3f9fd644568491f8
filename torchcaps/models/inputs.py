"""Check of the images that networks are given."""

from torch import Tensor

from torchcaps.arguments import Count, check_input

# Channels, height and width; None for any.
ImageShape = tuple[Count | None, Count | None, Count | None]
ANY_IMAGE: ImageShape = (None, None, None)


def check_images(images: Tensor, shape: ImageShape, weight: Tensor | None, least: int = 1) -> None:
    """Check a batch of images, see also :func:`torchcaps.arguments.check_input`.

    Args:
        images: the images.
        shape: channels, height and width that the network takes.
        weight: a parameter of the network, whose device and precision the images need; None if it has none, as the
            replicas of `nn.DataParallel` do.
        least: least height and width.

    Raises:
        ValueError: the images have another shape; a single image without a batch too.
    """
    check_input("images", images, weight)
    found = tuple(images.shape[1:])
    fits = images.dim() == 4 and all(size in (None, own) for size, own in zip(shape, found, strict=True))
    if not fits or min(found[1:]) < least:
        names = zip(shape, ("channels", "height", "width"), strict=True)
        expected = ", ".join(name if size is None else str(size) for size, name in names)
        end = f", height and width at least {least}" if least > 1 else ""
        alone = ": add a batch dimension by images.unsqueeze(0)" if images.dim() == 3 else ""
        raise ValueError(f"expected images of shape (batch, {expected}){end}, got {tuple(images.shape)}{alone}")
