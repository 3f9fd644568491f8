"""The "triton" backend: the reductions as kernels for CUDA devices. Operators call these functions.

- `vote_sum.py`, `weighted_sum.py`, `moments.py`: a reduction each, forward and backward, as a sequence of launches.
- `launches.py`: the launch of each kernel. `problem.py` and `sizes.py`: what it takes as arguments, and how the work is
  divided.
- `kernels.py` and `pairs.py`: the kernels. `tiles.py`: what they are built from.

Triton itself is imported at the first launch, because it may not be installed.
"""

from torchcaps.ops.triton.moments import moments, moments_backward
from torchcaps.ops.triton.vote_sum import vote_sum, vote_sum_backward
from torchcaps.ops.triton.weighted_sum import weighted_sum, weighted_sum_backward

__all__ = ["moments", "moments_backward", "vote_sum", "vote_sum_backward", "weighted_sum", "weighted_sum_backward"]
