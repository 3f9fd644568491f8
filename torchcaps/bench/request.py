"""Requests: which layer or network to measure, in which size, and where."""

from dataclasses import dataclass

import torch

from torchcaps.bench.cases import Case
from torchcaps.bench.layers import LAYERS, Layer
from torchcaps.bench.networks import NETWORKS, Network

MEASURED: dict[str, Layer | Network] = {**LAYERS, **NETWORKS}


@dataclass(frozen=True)
class Request:
    """What to measure; its fields are JSON values, to be passed to another process.

    Attributes:
        layer: name in `MEASURED`.
        factor: children in multiples of the paper's.
        batch: batch size, or None for the paper's.
        iterations: number of routing iterations, or None for the paper's.
        smoke: whether to take small sizes.
        device: "cpu" or "cuda".
        dtype: precision, the name of a torch.dtype.
    """

    layer: str
    factor: int = 1
    batch: int | None = None
    iterations: int | None = None
    smoke: bool = False
    device: str = "cpu"
    dtype: str = "float32"

    def build(self) -> Case:
        """Build module and inputs, with the same numbers at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            case = MEASURED[self.layer].build(self.factor, self.batch, self.iterations, self.smoke)
        return case.to(self.device, getattr(torch, self.dtype))
