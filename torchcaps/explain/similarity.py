"""How much alike heat maps of two networks are, for the randomization tests of Adebayo et al. (2018)."""

import torch
from kornia.metrics import ssim
from torch import Tensor

from torchcaps.utils.arguments import FloatTensor, checked, shown

WINDOW = 7  # pixels: side of the windows of the structural similarity


@checked
def similarity(maps: FloatTensor, others: FloatTensor) -> Tensor:
    """Compute Spearman's rank correlation between maps, pair by pair: 1 if both rank all places alike, about 0 if they
    have nothing in common, -1 if they rank them in opposite orders.

    Equal values share the mean of their ranks. It is nan where a map is the same everywhere, because it ranks nothing.

    Shape:
        - Input: `(n, height, width)` each.
        - Output: `(n,)`.
    """
    _check_pairs(maps, others)
    ranks, other_ranks = (_ranks(x.detach().flatten(1)) for x in (maps, others))
    return (torch.cosine_similarity(ranks, other_ranks, dim=1, eps=0)).to(maps)


@checked
def structural_similarity(maps: FloatTensor, others: FloatTensor) -> Tensor:
    """Compute the mean structural similarity (SSIM, Wang et al. 2004) of maps that are scaled to [0, 1], pair by pair.

    It is 1 for equal maps and about 0 for maps that have nothing in common. A map that is the same everywhere counts as
    0. Windows are Gaussian, of 7 x 7 pixels.

    Shape:
        - Input: `(n, height, width)` each, at least 4 x 4 pixels.
        - Output: `(n,)`.
    """
    _check_pairs(maps, others)
    if min(maps.shape[1:]) <= WINDOW // 2:
        raise ValueError(f"maps must have at least {WINDOW // 2 + 1} pixels each way, got {shown(maps)}")
    scaled, others_scaled = (_from_zero_to_one(x.detach()).unsqueeze(1) for x in (maps, others))
    return ssim(scaled, others_scaled, WINDOW).mean((1, 2, 3))


def _check_pairs(maps: Tensor, others: Tensor) -> None:
    if maps.dim() != 3 or maps.shape != others.shape:
        raise ValueError(f"expected two tensors of maps (n, height, width), got {shown(maps)} and {shown(others)}")


def _ranks(values: Tensor) -> Tensor:
    """Ranks of the values in each row `(n, places)`, less their mean, in float64 on the CPU."""
    rows = values.cpu().double()
    order = rows.sort(dim=1).values
    below, upto = torch.searchsorted(order, rows), torch.searchsorted(order, rows, right=True)
    return (below + upto).double() / 2 - values.shape[1] / 2


def _from_zero_to_one(maps: Tensor) -> Tensor:
    least, most = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - least) / torch.where(most > least, most - least, 1)
