"""The "triton" backend: the reductions as kernels for CUDA devices. Operators call these functions.

- `weighted_sum.py`, `moments.py`: a reduction each, forward and backward.
- `problem.py`: what the kernels take, how the work is divided, and the launch of each kernel.
- `kernels.py`: the kernels. `tiles.py`: the functions that they are built from.

Triton itself is imported at the first launch, because it may not be installed.
"""

from torchcaps.ops.triton.moments import moments, moments_backward
from torchcaps.ops.triton.weighted_sum import weighted_sum, weighted_sum_backward

__all__ = ["moments", "moments_backward", "weighted_sum", "weighted_sum_backward"]
