"""`torchcaps bench`: time and memory of the papers' layers and networks in each way to compute them.

A layer runs forward (without gradients), and forward and backward; a network runs forward, and in a training step. The
ways are our backends, what torch.compile makes of our layers ("compiled", and "compiled-graphs" with CUDA graphs of its
own) and of our reference ("compiled-reference"), and a *baseline* in the style of most published code
(:mod:`torchcaps.bench.baselines`). A way gets numbers only if its values and gradients agree with the reference in
float64. Beside them stands the *bound*: the larger of floating-point operations / rate of a large matrix product, and
bytes / rate of a large copy. Both rates are measured in the same run, on a GPU too, where float32 is computed in
float32 and not in TF32; :class:`torchcaps.bench.cases.Work` says how
operations and bytes are counted.

Studies of a single question are scripts in `benchmarks/`, outside the package, which measure by
:mod:`torchcaps.bench.resources`.
"""

from torchcaps.bench.measurement import MEASURED, Request, Row, measure
from torchcaps.bench.networks import NETWORKS
from torchcaps.bench.resources import Rates, measure_rates
from torchcaps.bench.ways import WAYS

__all__ = ["MEASURED", "NETWORKS", "WAYS", "Rates", "Request", "Row", "measure", "measure_rates"]
