"""Mixup: training samples that are weighted means of two samples. `Classifier` uses it where a recipe sets `mixup`."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta

from torchcaps.nn.inputs import check_labels
from torchcaps.utils.arguments import Count, Positive, check_input, checked, shown

Inputs = Tensor | tuple[Tensor, ...]  # what a network takes


@checked
def mixup(inputs: Inputs, labels: Tensor, classes: Count, alpha: Positive = 0.2) -> tuple[Inputs, Tensor]:
    r"""Mix every sample of a batch with another one, and their labels in the same proportion.

    With k a random permutation and one :math:`\lambda_i \sim \text{Beta}(\alpha, \alpha)` for each sample,

    .. math::
        x_i \leftarrow (1 - \lambda_i) x_i + \lambda_i x_{k(i)}, \quad
        y_i \leftarrow (1 - \lambda_i) y_i + \lambda_i y_{k(i)}

    All random numbers come from torch's default generator for the device of the inputs.

    Args:
        inputs: floating-point tensor `(batch, ...)`, or several, which are mixed in the same way, such as embeddings of
            sentences and the mask of their padding. All values must be finite.
        labels: class indices `(batch,)`, or 1 for each label of a sample and 0 for the others, `(batch, classes)`.
        classes: number of classes.
        alpha: parameter of the distribution, above 0. Small values keep each mixed sample close to one of its two.

    Returns:
        The mixed inputs, and labels `(batch, classes)`, which sum to 1 if the labels were class indices.

    Raises:
        TypeError: the inputs are no floating-point numbers, or the labels no integers.
        ValueError: labels are out of range (read on the CPU alone), or inputs and labels differ in number or device.

    Reference:
        Zhang et al. 2017; one proportion for each sample, as in the code of Heinsen 2019.
    """
    if labels.dim() == 2 and labels.is_floating_point() and labels.shape[1] == classes:
        soft = labels
    else:
        check_labels(labels, classes, labels.device)
        soft = F.one_hot(labels.long(), classes)
    several = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not several:
        raise ValueError("inputs must be a tensor or a tuple with at least one, got ()")
    for x in several:
        check_input("inputs", x, None)
        if x.shape[:1] != labels.shape[:1] or x.device != labels.device:
            raise ValueError(
                f"the inputs must have the number and the device of the {len(labels)} labels on {labels.device}, got "
                f"{shown(x)} on {x.device}"
            )
    first = several[0]
    both = torch.full((), alpha, dtype=torch.float32, device=first.device)  # even for half precision
    proportion = Beta(both, both, validate_args=False).sample((len(labels),))  # a check would wait for a GPU
    other = torch.randperm(len(labels), device=first.device)

    def mix(x: Tensor) -> Tensor:
        return x.lerp(x[other], proportion.view(-1, *[1] * (x.dim() - 1)).to(x.dtype))

    mixed = mix(inputs) if isinstance(inputs, Tensor) else tuple(map(mix, inputs))
    return mixed, mix(soft.to(first.dtype))
