"""`torchcaps bench`: time and memory of the papers' layers in each way to compute them.

Each layer runs forward (without gradients) and forward and backward, in these ways: our backends, our reference under
torch.compile, and a *baseline* in the style that most published code has (:mod:`torchcaps.bench.baselines`). A way
gets numbers only if its values and gradients agree with the reference in float64. Beside them stands the *bound*: the
larger of floating-point operations / rate of a large matrix product and bytes / rate of a large copy, both rates
measured in the same run, both counts in :class:`torchcaps.bench.layers.Work`.
"""

from torchcaps.bench.layers import LAYERS, Request
from torchcaps.bench.measurement import Rates, Row, measure, measure_rates
from torchcaps.bench.memory import peak_bytes
from torchcaps.bench.passes import WAYS

__all__ = ["LAYERS", "WAYS", "Rates", "Request", "Row", "measure", "measure_rates", "peak_bytes"]
