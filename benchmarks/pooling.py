"""Time of a routing pool in a training step of ResNet-20, relative to average pooling in the same place.

    python benchmarks/pooling.py [--iterations 1 2 3] [--rounds 15] [--batch 128]

Networks with each pool take training steps (SGD with momentum) in turns on the same images of 32x32. A pool is timed
inside its step: the forward pass from its call to its return, the backward pass from the gradient of its output to that
of its input. Printed are medians over the rounds, relative to average pooling's. All ways to compute a routing pool
must agree in values and gradients before anything is measured.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import RoutingPool2d, create_model
from torchcaps.bench.resources import time_side_by_side

PASSES = ("forward", "backward")
WARM_UP = 2  # rounds


def clock() -> float:
    """Return the time, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def watch(pool: nn.Module) -> dict[str, list[float]]:
    """Return the lists to which a module will add how long its forward and its backward passes take."""
    begun: dict[str, float] = {}
    taken: dict[str, list[float]] = {name: [] for name in PASSES}

    def begin(name: str, *_: object) -> None:
        begun[name] = clock()

    def end(name: str, *_: object) -> None:
        taken[name].append(clock() - begun[name])

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(functools.partial(end, "backward"))
        begin("forward")

    def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
        end("forward")
        output.register_hook(functools.partial(begin, "backward"))

    pool.register_forward_pre_hook(before)
    pool.register_forward_hook(after)
    return taken


def check_agreement(pools: list[nn.Module], x: Tensor) -> None:
    """Raise AssertionError if pools differ from the first one in values or gradients."""
    x.requires_grad_()
    weights = torch.rand(*x.shape[:2], 1, 1, device=x.device)
    first, *others = [(y := pool(x), *torch.autograd.grad((y * weights).sum(), x)) for pool in pools]
    for other in others:
        torch.testing.assert_close(other, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", nargs="+", type=int, default=[1, 2, 3], help="numbers of routing iterations")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each network (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images of a step (default: %(default)s)")
    options = parser.parse_args()
    device, few = "cuda" if torch.cuda.is_available() else "cpu", options.iterations[0]
    torch.manual_seed(0)
    images = torch.rand(options.batch, 3, 32, 32, device=device)
    labels = torch.randint(10, (options.batch,), device=device)
    networks = {name: create_model("pooling_resnet", pooling=name) for name in ("average", "max")}
    for count in options.iterations:
        networks[f"routing, T = {count}"] = create_model("pooling_resnet", iterations=count)
    for name, backend in (("no kernel", "tiled"), ("stored votes", "reference")):
        networks[f"{name}, T = {few}"] = network = create_model("pooling_resnet", iterations=few)
        next(module for module in network.modules() if isinstance(module, RoutingPool2d)).backend = backend
    kinds = (RoutingPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
    pools = {n: next(m for m in network.modules() if isinstance(m, kinds)) for n, network in networks.items()}
    maps = torch.rand(options.batch, 64, 8, 8, device=device)
    check_agreement([pool for name, pool in pools.items() if name.endswith(f"T = {few}")], maps)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images).scores, labels).backward()
        optimizer.step()

    steps = {}
    for name, network in networks.items():
        optimizer = torch.optim.SGD(network.to(device).parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        steps[name] = functools.partial(step, network, optimizer)
    watched = {name: watch(pool) for name, pool in pools.items()}
    taken = time_side_by_side(steps, options.rounds + WARM_UP, device)
    print(f"{'pool':24}{'forward':>12}{'backward':>12}{'both':>12}{'of its step':>14}")
    average: list[float] = []
    for name, passes in watched.items():
        forward, backward = (passes[each][WARM_UP:] for each in PASSES)
        both = [sum(pair) for pair in zip(forward, backward, strict=True)]
        medians = [statistics.median(times) for times in (forward, backward, both)]
        average = average or medians
        ratios = "".join(f"{time / base:>11.2f}x" for time, base in zip(medians, average, strict=True))
        print(f"{name:24}{ratios}{100 * medians[2] / statistics.median(taken[name][WARM_UP:]):>11.3f} %")


if __name__ == "__main__":
    main()
