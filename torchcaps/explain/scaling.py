"""Multidimensional scaling: points of many features, placed in the plane."""

import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.manifold import smacof
from sklearn.metrics import pairwise_distances
from torch import Tensor

from torchcaps.ops import at_least_float32
from torchcaps.utils.arguments import FloatTensor, checked, shown


@checked
def mds(points: FloatTensor) -> Tensor:
    r"""Place points in the plane, so that the distances between them stay as near as possible to what they are.

    It minimizes the stress :math:`\sum_{i<j} (|x_i - x_j| - |p_i - p_j|)^2` with scikit-learn's SMACOF. The start is
    the two principal components, so the same points always give the same picture, up to rounding.

    Shape:
        - Input: `(n, features)`.
        - Output: `(n, 2)`, centered at zero, without a gradient.

    Raises:
        ValueError: the points have another shape, or are not finite.
    """
    if points.dim() != 2:
        raise ValueError(f"expected points of shape (n, features), got {shown(points)}")
    if not points.isfinite().all():
        raise ValueError("points must be finite, because others have no distances: leave out those with nan or inf")
    values = at_least_float32(points.detach()).cpu()
    scale = (values - values.mean(0)).norm()
    if not scale:
        return points.new_zeros(len(points), 2)
    centered = F.pad((values - values.mean(0)) / scale, (0, max(0, 2 - values.shape[1]))).numpy()
    placed, _ = smacof(
        pairwise_distances(centered),
        init=PCA(2).fit_transform(centered),
        n_init=1,
        max_iter=300,
        eps=1e-9,
        normalized_stress=False,
    )
    return (scale * torch.from_numpy(placed).to(values)).to(points)
