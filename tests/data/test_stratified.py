"""A stratified split is scikit-learn's: runs hold out the same samples as ever."""

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from torchcaps.data.stratified import stratified_split


@pytest.mark.parametrize("seed", range(50))
def test_the_parts_are_those_of_scikit_learn(seed):
    random = np.random.default_rng(seed)
    classes = int(random.integers(2, 12))
    samples = int(random.integers(2 * classes, 300))
    labels = np.concatenate([np.arange(classes), np.arange(classes), random.integers(classes, size=samples)])
    random.shuffle(labels)
    held_out = int(random.integers(classes, len(labels) - classes + 1))
    expected = train_test_split(np.arange(len(labels)), test_size=held_out, stratify=labels, random_state=seed)
    for part, their_part in zip(stratified_split(labels, held_out, seed), expected, strict=True):
        assert np.array_equal(part, their_part)


def test_by_hand():
    """Of 4 and 2 samples, 3 are held out: 2 and 1."""
    labels = np.array([0, 1, 0, 0, 1, 0])
    kept, held_out = stratified_split(labels, 3, 0)
    assert sorted(labels[kept].tolist()) == sorted(labels[held_out].tolist()) == [0, 0, 1]
    assert sorted([*kept, *held_out]) == list(range(6))
