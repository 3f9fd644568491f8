"""Benchmarks: `torchcaps bench`, and scripts for single questions.

`torchcaps bench` measures time and memory of the papers' layers and networks in each way to compute them. A layer runs
forward (without gradients), and forward and backward; a network runs forward, and in a training step. The ways are our
backends, our reference under torch.compile, and a *baseline* in the style of most published code
(:mod:`torchcaps.bench.baselines`). A way gets numbers only if its values and gradients agree with the reference in
float64. Beside them stands the *bound*: the larger of floating-point operations / rate of a large matrix product, and
bytes / rate of a large copy. Both rates are measured in the same run; :class:`torchcaps.bench.cases.Work` says how
operations and bytes are counted.

Scripts, started by `python -m torchcaps.bench.NAME`:

- `encapsulated`: encapsulated layers beside their convolutions.
- `pooling`: routing in the place of average pooling.
- `sequences`: memory on longer and longer sequences.
- `study`: Table 1 of Li et al. 2018, the memory and time of six networks.
- `tiles`: ways to organize one routing pass on a CPU.
- `vectors`: memory of Heinsen's vector routing on longer and longer sequences.
"""

from torchcaps.bench.measurement import Rates, Row, measure, measure_rates
from torchcaps.bench.memory import peak_bytes
from torchcaps.bench.networks import NETWORKS
from torchcaps.bench.passes import WAYS
from torchcaps.bench.request import MEASURED, Request

__all__ = ["MEASURED", "NETWORKS", "WAYS", "Rates", "Request", "Row", "measure", "measure_rates", "peak_bytes"]
