"""The networks that `torchcaps bench` measures, forward and in a training step with its optimizer."""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchcaps.bench import baselines
from torchcaps.bench.cases import DOT, GAUSSIAN, SLACK, Case, Work, forward_flops, output_grid, perturb, votes_bytes
from torchcaps.capsules import Capsules, Prediction
from torchcaps.functional import margin_loss
from torchcaps.models import create_model
from torchcaps.models.cnn import residual_features
from torchcaps.models.li2018.encapsulated import CapsuleBlock2d, CapsuleFC
from torchcaps.nn import CapsuleHead, CapsuleLayer, CapsuleLinear, CapsuleStack, RoutingPool2d
from torchcaps.nn.inputs import as_capsules
from torchcaps.routing import DynamicRouting, HeinsenRouting, InvertedAttentionRouting, Routing

# Functions that run in place of `forward` in all modules of a class.
Forwards = Mapping[type[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Network:
    """A network and its training.

    Attributes:
        make: function that builds the network with a number of iterations.
        smoke: function that builds a small network to try things out.
        authors: the authors' way to compute the capsules, by the class of the module that it replaces. All else is the
            same module in both.
        optimizer: function that makes the optimizer of parameters.
        loss: function of the evidence for the classes and the labels.
        iterations: the paper's number of iterations, or None for a network that has none.
        batch: the paper's batch size.
        image, smoke_image: shapes of an image.
        classes: number of classes.
        has_relus_in_capsules: whether what the ways compute differently has ReLUs.
        reconstructs: whether the loss includes the squared error of the reconstruction, as Sabour et al. weigh it.
    """

    make: Callable[[Any], Any]
    smoke: Callable[[Any], Any]
    authors: Forwards
    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    iterations: int | None
    batch: int
    image: tuple[int, int, int]
    smoke_image: tuple[int, int, int]
    classes: int = 10
    has_relus_in_capsules: bool = False
    reconstructs: bool = False

    def build(self, factor: int, batch: int | None, iterations: int | None, smoke: bool) -> "NetworkCase":
        """Build the network with random images; None stands for the paper's value."""
        if factor != 1:
            raise ValueError("a network takes images of one size, and its number of children follows from it")
        if self.iterations is None and iterations is not None:
            raise ValueError("this network has no iterations: leave out their number")
        module = (self.smoke if smoke else self.make)(iterations or self.iterations)
        # These are biases and the parameters of normalizations, which start at 1 and 0; others are drawn as in the
        # paper.
        perturb((p for p in module.parameters() if p.dim() == 1), 0.1)
        n = batch or (3 if smoke else self.batch)
        images = torch.rand(n, *(self.smoke_image if smoke else self.image))
        case = NetworkCase(module, {"images": images, "labels": torch.randint(self.classes, (n,))}, self)
        of_routings = (p for part in module.modules() if isinstance(part, Routing) for p in part.parameters())
        perturb((p for p in of_routings if p.dim() > 1), 1 / case.children)  # sums over children have the size of one
        return case


@dataclass(frozen=True)
class NetworkCase(Case):
    """A network with images and their classes.

    It is in training mode without gradients too, so that batch normalization computes the same in both passes. A
    backward pass includes a step of the optimizer: each way takes as many steps from the same parameters.
    """

    network: Network

    results = ("scores", "reconstruction")
    slack = SLACK  # a rounding passes through many other layers, and what becomes of it differs by chance

    @property
    def children(self) -> int:
        return self._seen().children

    @property
    def iterations(self) -> int:
        return next((part.iterations for part in self.module.modules() if isinstance(part, Routing)), 1)

    def compute(self, module: Any, inputs: dict[str, Tensor], baseline: bool) -> tuple[Tensor, ...]:
        if not isinstance(module, nn.Module):
            return module(**inputs)  # compiled
        if baseline:
            with _forwards(module, self.network.authors):
                return self._compute(module, **inputs)
        return self._compute(module, **inputs)

    def _compute(self, module: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        prediction: Prediction = module(images)
        if not self.network.reconstructs:
            return (prediction.evidence,)
        return prediction.evidence, module.reconstruct(prediction.capsules, labels)

    def gradients(self, results: tuple[Tensor, ...], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        loss = self.network.loss(results[0], self.inputs["labels"])
        if self.network.reconstructs:
            loss = loss + 0.0005 * (results[1] - self.inputs["images"]).square().sum() / self.batch
        # Scores of a single iteration of Heinsen's routing do not depend on the poses.
        return torch.autograd.grad(loss, of, materialize_grads=True)

    def start(self) -> tuple[Any, torch.optim.Optimizer]:
        module = copy.deepcopy(self.module)  # steps change it
        optimizer = self.network.optimizer(module.parameters())
        for group in optimizer.param_groups:
            if "capturable" in group:  # in a CUDA graph the number of the step is on the device
                group["capturable"] = self.inputs["images"].is_cuda
        return module, optimizer

    def is_exact(self, compiled: bool) -> bool:
        """A compiled backbone rounds differently and so turns a few ReLUs on or off: then errors of the gradients below
        them say nothing. So do ways to compute capsules that are ReLUs themselves."""
        return not compiled and not self.network.has_relus_in_capsules

    def compile(self, module: Any, mode: str | None) -> Any:
        """Compile the whole network, without a graph break."""
        return torch.compile(functools.partial(self._compute, module), fullgraph=True, dynamic=False, mode=mode)

    def parts(self) -> Sequence[Case]:
        """Return one case, because batch normalization needs all samples; its capsules run one sample at a time."""
        module = copy.deepcopy(self.module)
        stacks = [part for part in module.modules() if isinstance(part, CapsuleStack)]
        within = {layer for stack in stacks for layer in stack.layers}
        for part in module.modules():
            if part in stacks or (isinstance(part, CapsuleLayer) and part not in within):
                part.forward = MethodType(_one_by_one, part)
        return [replace(self, module=module)]

    def work(self, backward: bool) -> Work:
        seen = self._seen(backward)
        capsules = sum(forward_flops(*of_layer) for of_layer in seen.layers)
        flops = seen.flops + (3 if backward else 1) * capsules
        moved = sum(x.numel() * x.element_size() for x in (self.inputs["images"], *self.module.parameters()))
        return Work(flops, 2 * moved if backward else moved)

    def bytes_needed(self, baseline: bool) -> int:
        images, needed = self.inputs["images"], 0.0
        for layer, samples, children, passes, gaussian in self._seen().layers:
            times = self.iterations if baseline else passes
            needed += (GAUSSIAN if gaussian else DOT) * times * votes_bytes(layer, samples, children, images)
        return int(needed)

    def _seen(self, backward: bool = False) -> "_Seen":
        """Run the network without its capsule layers, on the device `meta`."""
        case = self.to("meta", torch.float32)
        seen = _Seen(case.module, self.iterations)
        with FlopCounterMode(display=False) as counter, _forwards(case.module, seen.forwards()):
            results = case._compute(case.module, **case.inputs)
            if backward:
                sum(x.sum() for x in results).backward()  # type: ignore[union-attr]
        seen.flops = counter.get_total_flops()
        return seen


class _Seen:
    """What is seen of a network on the device `meta`.

    Attributes:
        children: number of children of a sample in the first part that routes.
        layers: each capsule layer with the numbers of its samples (windows in a convolution), of their children, of the
            passes that reach the output, and whether its agreement is Gaussian.
        flops: floating-point operations of all else.
    """

    def __init__(self, module: nn.Module, iterations: int):
        self.children, self.flops = 0, 0
        self.layers: list[tuple[Any, int, int, int, bool]] = []
        self.iterations = iterations
        # In a concurrent stack the first passes of the lower layers alone reach the output.
        self.above: dict[nn.Module, int] = {}
        for stack in module.modules():
            if isinstance(stack, CapsuleStack) and stack.schedule == "concurrent":
                self.above |= {layer: len(stack.layers) - 1 - k for k, layer in enumerate(stack.layers)}
                stack.schedule = "sequential"  # the same sizes

    def forwards(self) -> Forwards:
        """Return what runs in place of the parts that route."""

        def of_block(part: Any, capsules: Any, shortcut: Any = None) -> Any:
            self._count(as_capsules(capsules, next(part.parameters())).poses, part.in_pose)
            return type(part).forward(part, capsules, shortcut)

        def of_pool(part: Any, x: Tensor) -> Tensor:
            self._count(x, part.features)
            return x.mean((2, 3), keepdim=True)

        def of_layer(part: Any, capsules: Any, *, return_coefficients: bool = False) -> Capsules:
            poses, scores = as_capsules(capsules, part.weight)[:2]
            self._count(poses, part.in_pose)
            places = output_grid(part, tuple(poses.shape[2:4]))
            children = part.layer_shape.children if places else poses[0].numel() // _size(part.in_pose)
            passes = max(1, self.iterations - self.above.get(part, 0))
            samples = poses.shape[0] * math.prod(places)
            self.layers.append((part, samples, children, passes, part.routing.gives_scores))
            total = poses.sum() + (0 if scores is None else scores.sum())
            parents = (poses.shape[0], part.weight.shape[-3], *places)
            pose = part.out_pose
            return Capsules(
                total.expand(*parents, *pose),
                total.expand(parents) if part.routing.gives_scores else None,
                pose_dims=len(pose),
            )

        return {CapsuleBlock2d: of_block, RoutingPool2d: of_pool, CapsuleLayer: of_layer}

    def _count(self, children: Tensor, pose: Any) -> None:
        self.children = self.children or children[0].numel() // _size(pose)


def _size(pose: int | tuple[int, ...]) -> int:
    return pose if isinstance(pose, int) else math.prod(pose)


@contextmanager
def _forwards(network: nn.Module, forwards: Forwards) -> Iterator[None]:
    """Run other functions in place of `forward` in all modules of some classes."""
    parts = [(part, run) for part in network.modules() for cls, run in forwards.items() if isinstance(part, cls)]
    for part, run in parts:
        part.forward = MethodType(run, part)
    try:
        yield
    finally:
        for part, _ in parts:
            del part.forward


def _last(part: Any) -> Any:
    """Return the layer whose parents a layer or a stack returns."""
    return part.layers[-1] if isinstance(part, CapsuleStack) else part


def _one_by_one(self: Any, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
    """Run a layer or a stack one sample at a time, in the memory of one sample's votes."""

    def of_one(poses: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor | None]:
        parents: Capsules = type(self).forward(self, Capsules(poses, scores))
        return parents.poses, parents.scores

    children = as_capsules(capsules, next(self.parameters()))
    all_poses = children.poses.split(1)
    all_scores = [None] * len(all_poses) if children.scores is None else children.scores.split(1)
    results = [checkpoint(of_one, *sample, use_reentrant=False) for sample in zip(all_poses, all_scores, strict=True)]
    scores = [x for _, x in results if x is not None]
    poses = torch.cat([poses for poses, _ in results])
    return Capsules(poses, torch.cat(scores) if scores else None, pose_dims=len(_last(self).out_pose))


class _VisionTransformer(nn.Module):
    """A ViT with a `CapsuleHead` on its tokens. The defaults are the sizes of ViT-Tiny, as DeiT has it."""

    def __init__(self, iterations: int, side: int = 224, patch: int = 16, width: int = 192, depth: int = 12):
        super().__init__()
        heads = width // 64 or 1
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = CapsuleHead(width, 10, DynamicRouting(iterations), dims=0)

    def forward(self, images: Tensor) -> Prediction:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head.predict(self.blocks(tokens))


def _capsules(compute: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Capsules]:
    """Return a function of poses and scores as a layer's `forward`."""

    def forward(layer: Any, capsules: Capsules | Tensor, *, return_coefficients: bool = False) -> Capsules:
        poses, scores = as_capsules(capsules, next(layer.parameters()))[:2]
        parents: Any = compute(layer, poses, scores)
        return Capsules(*parents)._replace(pose_dims=len(_last(layer).out_pose))

    return forward


def _tsai(iterations: int, backbone: str) -> Any:
    return _without_unread(create_model("inverted_attention_cifar10", backbone=backbone, iterations=iterations))


def _small_tsai(iterations: int, backbone: str) -> Any:
    network: Any = create_model(
        "narrow_cifar10", routing=InvertedAttentionRouting(iterations, init="paper"), types=2, channels=8
    )
    if backbone == "resnet":
        network.backbone = residual_features(3, channels=(4, 8), blocks=(1, 1), strides=(1, 2))
    return _without_unread(network)


def _without_unread(network: Any) -> Any:
    """Freeze the parameters whose gradient is zero: an error relative to zero would be noise."""
    network.classifier.bias.requires_grad_(False)  # it shifts all logits alike
    last = network.capsules.layers[-1].routing
    if last.iterations == 1:  # later ones compare the last parents with their votes
        last.bias.requires_grad_(False)
    return network


def _encapnet(iterations: None, **options: Any) -> Any:
    return create_model("encapnet_v1", **options)


def _model(name: str, **options: Any) -> Callable[[int], Any]:
    return lambda iterations: create_model(name, iterations=iterations, **options)


def _heinsen(**options: Any) -> Callable[[int], Any]:
    return lambda iterations: create_model(
        "heinsen_smallnorb", routing=HeinsenRouting(iterations, init="paper"), **options
    )


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CIFAR = (3, 32, 32)
NETWORKS = {
    "capsnet": Network(
        _model("capsnet_mnist"),
        _model("capsnet_digits"),
        {CapsuleLinear: _capsules(baselines.digit_capsules)},
        functools.partial(torch.optim.Adam, lr=1e-3),
        margin_loss,
        iterations=3,
        batch=128,
        image=(1, 28, 28),
        smoke_image=(1, 8, 8),
        reconstructs=True,
    ),
    **{
        f"tsai-{backbone}": Network(
            functools.partial(_tsai, backbone=backbone),
            functools.partial(_small_tsai, backbone=backbone),
            {CapsuleStack: _capsules(baselines.inverted_attention_stack)},
            functools.partial(SGD, weight_decay=5e-4),
            F.cross_entropy,
            iterations=2,
            batch=32,
            image=CIFAR,
            smoke_image=CIFAR,
        )
        for backbone in ("resnet", "simple")
    },
    "smallnorb": Network(
        _heinsen(),
        _heinsen(parts=4, channels=4),
        {CapsuleLinear: _capsules(baselines.heinsen)},
        functools.partial(torch.optim.RAdam, lr=5e-4),
        F.cross_entropy,
        iterations=3,
        batch=20,
        image=(2, 96, 96),
        smoke_image=(2, 32, 32),
        classes=5,
    ),
    "encapnet": Network(
        _encapnet,
        functools.partial(_encapnet, image_size=16, capsules=2, depth=1),
        {CapsuleBlock2d: baselines.encapsulated, CapsuleFC: baselines.summed},
        functools.partial(torch.optim.Adam, lr=1e-4, weight_decay=5e-4),
        margin_loss,
        iterations=None,
        batch=128,
        image=CIFAR,
        smoke_image=(3, 16, 16),
        has_relus_in_capsules=True,
    ),
    "resnet-pool": Network(
        _model("pooling_resnet"),
        _model("pooling_resnet", depth=8),
        {RoutingPool2d: baselines.routing_pool},
        functools.partial(SGD, weight_decay=1e-4),
        F.cross_entropy,
        iterations=1,
        batch=128,
        image=CIFAR,
        smoke_image=CIFAR,
    ),
    "vit-head": Network(
        _VisionTransformer,
        functools.partial(_VisionTransformer, side=8, patch=4, width=8, depth=1),
        {CapsuleLinear: _capsules(baselines.capnet_dynamic)},
        functools.partial(torch.optim.AdamW, lr=1e-3),
        F.cross_entropy,
        iterations=3,
        batch=64,
        image=(3, 224, 224),
        smoke_image=(3, 8, 8),
    ),
}
