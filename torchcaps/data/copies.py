"""Near copies among pictures: the same one in another size, quality, brightness or contrast."""

from collections.abc import Iterator, Sequence

import numpy as np

# Two small gray pictures with at least this correlation show the same. Of 3,000 pictures of CIFAR-10, of MNIST and of
# Fashion-MNIST no two reach it. 99 % reach it with their own copy in another size, or as JPEG of quality 40.
SAME = 0.995
LEAST_CONTRAST = 4.0  # standard deviation of the bytes; of pictures with less, rounding decides
CHUNK = 4096  # pictures that are compared at once


def near_copies(thumbnails: Sequence[bytes], others: Sequence[bytes]) -> dict[int, int]:
    """Return the place of the most similar other picture, by the places of the pictures that are its near copies.

    Small gray pictures are compared by the correlation of their bytes. A picture that is nearly of one gray has no
    copies.

    Args:
        thumbnails, others: small gray pictures of one size, see `torchcaps.data.pictures.Reading`.
    """
    best = np.full(len(thumbnails), SAME, np.float32)
    copies: dict[int, int] = {}
    for first, rows in _standardized(thumbnails):
        for first_other, columns in _standardized(others):
            similarity = rows @ columns.T
            nearest = similarity.argmax(1)
            for row in np.flatnonzero(similarity.max(1) > best[first : first + len(rows)]).tolist():
                best[first + row] = similarity[row, nearest[row]]
                copies[first + row] = first_other + int(nearest[row])
    return copies


def _standardized(thumbnails: Sequence[bytes]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield some pictures at a time, with a mean of 0 and a norm of 1, and the place of the first of them."""
    for first in range(0, len(thumbnails), CHUNK):
        some = b"".join(thumbnails[first : first + CHUNK])
        pixels = np.frombuffer(some, np.uint8).reshape(-1, len(thumbnails[0])).astype(np.float32)
        pixels -= pixels.mean(1, keepdims=True)
        deviation = pixels.std(1, keepdims=True)
        yield first, (deviation >= LEAST_CONTRAST) * pixels / (deviation.clip(1e-6) * pixels.shape[1] ** 0.5)
