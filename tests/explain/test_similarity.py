"""How much alike maps are, against scipy and by hand."""

import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

from torchcaps.explain.similarity import similarity, structural_similarity


def test_ranks_by_hand():
    maps = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]).repeat(3, 1, 1)
    others = torch.tensor([[[1.0, 10.0], [11.0, 1e6]], [[4.0, 3.0], [2.0, 1.0]], [[2.0, 1.0], [3.0, 4.0]]])
    # One exchange of neighbors: 1 - 6 * 2 / (4 * 15).
    assert_close(similarity(maps, others), torch.tensor([1.0, -1.0, 0.8]))


def test_ranks_with_ties_against_scipy():
    maps, others = torch.randint(0, 6, (2, 5, 7, 9)).float()
    expected = [spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(maps, others, strict=True)]
    assert_close(similarity(maps, others), torch.tensor(expected).float())


def test_a_map_without_ranks():
    found = similarity(torch.ones(1, 3, 3), torch.rand(1, 3, 3))
    assert found.isnan().all()


def test_structure():
    maps = torch.rand(3, 12, 10)
    assert_close(structural_similarity(maps, 5 * maps - 2), torch.ones(3))  # scaled to [0, 1] both
    assert (structural_similarity(maps, torch.rand(3, 12, 10)).abs() < 0.3).all()
    assert (structural_similarity(maps, 1 - maps) < -0.5).all()
    # Maps that are the same everywhere count as zero.
    assert_close(structural_similarity(torch.full((1, 8, 8), 0.3), torch.full((1, 8, 8), 0.8)), torch.ones(1))


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"expected two tensors of maps \(n, height, width\), got"):
        similarity(torch.rand(2, 3, 3), torch.rand(3, 3, 3))
    with pytest.raises(ValueError, match="at least 4 pixels each way"):
        structural_similarity(torch.rand(1, 3, 9), torch.rand(1, 3, 9))
