"""What can be measured, by name, and what is to be."""

from dataclasses import dataclass

import torch

from torchcaps.bench.cases import Case
from torchcaps.bench.layers import LAYERS, Layer
from torchcaps.bench.networks import NETWORKS, Network

MEASURED: dict[str, Layer | Network] = {**LAYERS, **NETWORKS}


@dataclass(frozen=True)
class Request:
    """Which layer or network, in which size, where. Its fields are JSON."""

    layer: str
    factor: int = 1  # of children
    batch: int | None = None  # instead of the paper's
    iterations: int | None = None  # instead of the paper's
    smoke: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    autocast: bool = False  # parameters stay in float32

    def build(self) -> Case:
        """Module and inputs: the same numbers at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            case = MEASURED[self.layer].build(self.factor, self.batch, self.iterations, self.smoke)
        dtype = getattr(torch, self.dtype)
        return case.to(self.device, torch.float32).mixed(dtype) if self.autocast else case.to(self.device, dtype)
