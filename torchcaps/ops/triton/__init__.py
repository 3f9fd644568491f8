"""The "triton" backend: the reductions as kernels for CUDA devices. Operators call these functions.

- `weighted_sum.py`, `moments.py`: a reduction each, forward and backward.
- `problem.py`: what the kernels take, how the work is divided, and the launch of each kernel.
- `kernels.py`: the kernels. `tiles.py`: the functions that they are built from. `joins.py`: kernels that join what the
  parts of a sum have written.
- `parents.py`: what routings compute of the parents between two reductions, as a kernel each way; `formulas.py` has
  these kernels.

Triton itself is imported at the first launch, because it may not be installed.
"""
