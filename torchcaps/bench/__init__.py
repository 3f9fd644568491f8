"""`torchcaps bench`: time and memory of the papers' layers and networks in each way to compute them.

Each layer runs forward (without gradients) and forward and backward; a network forward and in a training step. The
ways: our backends, our reference under torch.compile, and a *baseline* in the style that most published code has
(:mod:`torchcaps.bench.baselines`). A way gets numbers only if its values and gradients agree with the reference in
float64. Beside them stands the *bound*: the larger of floating-point operations / rate of a large matrix product and
bytes / rate of a large copy, both rates measured in the same run, both counts in
:class:`torchcaps.bench.cases.Work`.
"""

from torchcaps.bench.measurement import Rates, Row, measure, measure_rates
from torchcaps.bench.memory import peak_bytes
from torchcaps.bench.networks import NETWORKS
from torchcaps.bench.passes import WAYS
from torchcaps.bench.request import MEASURED, Request

__all__ = ["MEASURED", "NETWORKS", "WAYS", "Rates", "Request", "Row", "measure", "measure_rates", "peak_bytes"]
