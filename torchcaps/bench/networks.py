"""The papers' networks that `torchcaps bench` measures, forward and in a training step."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchcaps.bench import baselines
from torchcaps.bench.cases import DOT, Case, Work, forward_flops, output_grid, perturb, votes_bytes
from torchcaps.capsules import Capsules
from torchcaps.models import create_model
from torchcaps.models.cnn import residual_features
from torchcaps.nn import CapsuleStack
from torchcaps.nn.inputs import as_capsules
from torchcaps.routing import InvertedAttentionRouting


@dataclass(frozen=True)
class Network:
    """A network of a paper with concurrent layers.

    Attributes:
        make: function that builds the network with a number of iterations.
        baseline: function that computes it as the authors' code does.
        iterations: the paper's number of iterations.
        batch: the paper's batch size.
        smoke: function that builds a small network to try things out.
    """

    make: Callable[[int], Any]
    baseline: Callable[..., tuple[Tensor, ...]]
    iterations: int
    batch: int
    smoke: Callable[[int], Any]

    def build(self, factor: int, batch: int | None, iterations: int | None, smoke: bool) -> "NetworkCase":
        """Build the network with random images; None stands for the paper's value."""
        if factor != 1:
            raise ValueError("a network takes images of one size, and its number of children follows from it")
        module = (self.smoke if smoke else self.make)(iterations or self.iterations)
        # These are the parameters of normalizations, which start at 1 and 0; others are drawn as in the paper.
        perturb((p for p in module.parameters() if p.dim() == 1), 0.1)
        # This bias shifts all logits alike: its gradient is zero, and an error relative to zero would be noise.
        module.classifier.bias.requires_grad_(False)
        if iterations == 1:  # later ones compare the last parents with their votes
            module.capsules.layers[-1].routing.bias.requires_grad_(False)
        n = batch or (3 if smoke else self.batch)
        return NetworkCase(module, {"images": torch.rand(n, 3, 32, 32), "labels": torch.randint(10, (n,))}, self)


@dataclass(frozen=True)
class NetworkCase(Case):
    """A network with images and their classes.

    It is in training mode without gradients too, so that batch normalization computes the same in both passes. A
    backward pass includes a step of Tsai et al.'s optimizer: each way takes as many steps from the same parameters.
    """

    network: Network

    results = ("scores",)

    @property
    def children(self) -> int:
        return self._primary_shape()[1:-2].numel()

    @property
    def iterations(self) -> int:
        return self.module.capsules.layers[0].routing.iterations

    def compute(self, module: Any, inputs: dict[str, Tensor], baseline: bool) -> tuple[Tensor, ...]:
        images = inputs["images"]
        return self.network.baseline(module, images) if baseline else (module(images).evidence,)

    def gradients(self, results: tuple[Tensor, ...], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(results[0], self.inputs["labels"]), of)

    def start(self) -> tuple[Any, torch.optim.Optimizer]:
        module = copy.deepcopy(self.module)  # steps change it
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def compile(self, module: Any) -> Any:
        """Compile the capsules alone.

        A compiled backbone rounds differently and so turns a few ReLUs on or off: then errors of the gradients below
        them say nothing.
        """
        module.capsules.compile(dynamic=False)
        return module

    def parts(self) -> Sequence[Case]:
        """Return one case, because batch normalization needs all samples; its capsules run one sample at a time."""
        module = copy.deepcopy(self.module)
        module.capsules = _OneByOne(*module.capsules.layers, schedule=module.capsules.schedule)
        return [replace(self, module=module)]

    def work(self, backward: bool) -> Work:
        case = self.to("meta", torch.float32)
        with FlopCounterMode(display=False) as counter:
            poses = case.module.primary_capsules(case.inputs["images"]).poses
            if backward:
                poses.sum().backward()
        capsules = sum(forward_flops(*of_layer) for of_layer in self._layers())
        flops = counter.get_total_flops() + (3 if backward else 1) * capsules
        moved = sum(x.numel() * x.element_size() for x in (self.inputs["images"], *self.module.parameters()))
        return Work(flops, 2 * moved if backward else moved)

    def bytes_needed(self, baseline: bool) -> int:
        images = self.inputs["images"]
        votes = [
            votes_bytes(layer, samples, children, images) * (self.iterations if baseline else passes)
            for layer, samples, children, passes in self._layers()
        ]
        return int(DOT * sum(votes))

    def _layers(self) -> list[tuple[Any, int, int, int]]:
        """Each capsule layer with the numbers of its samples (windows in a convolution), of their children, and of
        the passes that reach the last layer."""
        layers, sizes = self.module.capsules.layers, []
        places: tuple[int, ...] = self._primary_shape()[2:4]
        for k, layer in enumerate(layers):
            places = output_grid(layer, places)
            children = layer.layer_shape.children if places else layer.in_capsules
            passes = max(1, self.iterations - (len(layers) - 1 - k))
            sizes.append((layer, self.batch * math.prod(places), children, passes))
        return sizes

    def _primary_shape(self) -> torch.Size:
        case = self.to("meta", torch.float32)
        return case.module.primary_capsules(case.inputs["images"]).poses.shape


class _OneByOne(CapsuleStack):
    """A stack that runs one sample at a time, and needs the memory of one sample's votes."""

    def forward(self, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        def of_one(poses: Tensor) -> Tensor:
            return CapsuleStack.forward(self, poses).poses

        samples = as_capsules(capsules, self.layers[0].weight).poses.split(1)
        return Capsules(torch.cat([checkpoint(of_one, poses, use_reentrant=False) for poses in samples]))


def _tsai(iterations: int, backbone: str) -> Any:
    return create_model("inverted_attention_cifar10", backbone=backbone, iterations=iterations)


def _small(iterations: int, backbone: str) -> Any:
    network: Any = create_model(
        "narrow_cifar10", routing=InvertedAttentionRouting(iterations, init="paper"), types=2, channels=8
    )
    if backbone == "resnet":
        network.backbone = residual_features(3, channels=(4, 8), blocks=(1, 1), strides=(1, 2))
    return network


NETWORKS = {
    f"tsai-{backbone}": Network(
        functools.partial(_tsai, backbone=backbone),
        baselines.inverted_attention_network,
        iterations=2,
        batch=32,
        smoke=functools.partial(_small, backbone=backbone),
    )
    for backbone in ("resnet", "simple")
}
