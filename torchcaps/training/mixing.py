"""Samples between samples."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta

Inputs = Tensor | tuple[Tensor, ...]


def mixup(inputs: Inputs, labels: Tensor, classes: int, alpha: float = 0.2) -> tuple[Inputs, Tensor]:
    r"""Mix every sample of a batch with another one of it, and their labels likewise.

    With k a random permutation and :math:`\lambda_i \sim \text{Beta}(\alpha, \alpha)`, one for each sample,

    .. math::
        x_i \leftarrow (1 - \lambda_i) x_i + \lambda_i x_{k(i)}, \quad
        y_i \leftarrow (1 - \lambda_i) y_i + \lambda_i y_{k(i)}

    Drawn by torch's default generator for the device of the inputs.

    Args:
        inputs: what a network takes, `(batch, ...)` in floating point, or several such tensors, which are mixed alike:
            embeddings of sentences and the mask of their padding, say, where both must be finite.
        labels: class indices `(batch,)`.
        classes: their number.
        alpha: above 0; the smaller, the closer each sample stays to one of its two.

    Returns:
        The mixed inputs, and labels `(batch, classes)` that sum to 1.

    Reference:
        Zhang et al. 2017; one share for each sample as in the code of Heinsen 2019.
    """
    soft = F.one_hot(labels, classes)
    first = inputs if isinstance(inputs, Tensor) else inputs[0]
    both = torch.tensor(alpha, dtype=torch.float32, device=first.device)  # not drawn in half precision
    share = Beta(both, both).sample((len(labels),))
    other = torch.randperm(len(labels), device=first.device)

    def mix(x: Tensor) -> Tensor:
        return x.lerp(x[other], share.view(-1, *[1] * (x.dim() - 1)).to(x.dtype))

    mixed = mix(inputs) if isinstance(inputs, Tensor) else tuple(map(mix, inputs))
    return mixed, mix(soft.to(first.dtype))
