"""A stratified split of labels, the same for a seed on every machine and with every version of every package."""

import numpy as np


def stratified_split(labels: np.ndarray, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split samples into two parts that have each class in the proportion of the whole, as well as whole numbers can.

    These are the parts of scikit-learn's `train_test_split(..., stratify=labels)`, which takes long to import.

    Args:
        labels: class of each sample, (n,). Both parts must have room for a sample of every class.
        held_out: number of samples of the second part.
        seed: which of the splits it is.

    Returns:
        Indices of the samples of the first part, and of the second, in random order.
    """
    random = np.random.RandomState(seed)  # its numbers never change, those of a Generator may
    counts = np.unique(labels, return_counts=True)[1]
    kept = _spread(counts, len(labels) - held_out, random)
    others = _spread(counts - kept, held_out, random)
    first, second = [], []
    classes = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    for samples, share, rest in zip(classes, kept, others, strict=True):
        samples = random.permutation(samples)
        first.append(samples[:share])
        second.append(samples[share : share + rest])
    return random.permutation(np.concatenate(first)), random.permutation(np.concatenate(second))


def _spread(counts: np.ndarray, total: int, random: np.random.RandomState) -> np.ndarray:
    """Return how many samples to take of each class, `total` together. What rounding down leaves goes to the classes
    with the largest remainders, and at random where these are equal."""
    exact = counts / counts.sum() * total
    taken = np.floor(exact)
    remainders, left = exact - taken, int(total - taken.sum())
    for remainder in np.unique(remainders)[::-1]:
        if not left:
            break
        classes = np.flatnonzero(remainders == remainder)
        more = random.choice(classes, size=min(len(classes), left), replace=False)
        taken[more] += 1
        left -= len(more)
    return taken.astype(int)
