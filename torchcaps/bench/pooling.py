"""Time of a routing pool in a training step of ResNet-20, relative to average pooling in the same place.

    python -m torchcaps.bench.pooling [--iterations 1 2 3] [--rounds 15] [--compile]

Networks with each pool take training steps (SGD with momentum) in turns on the same 128 images of 32x32. A pool is
timed inside its step: the forward pass from its call to its return, the backward pass from the gradient of its output
to that of its input. Printed are medians over the rounds, relative to average pooling's. All ways to compute a routing
pool must agree in values and gradients before anything is measured. `--compile` adds the pool compiled by Inductor,
which needs a C++ compiler.
"""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import RoutingPool2d, create_model, replace_pooling
from torchcaps.bench.measurement import time_side_by_side
from torchcaps.bench.script import script_parser

PARTS = ("forward", "backward", "both")
WARM_UP = 2  # rounds


class Watch:
    """Record how long a module's forward and backward passes take.

    Args:
        module: module to watch.
        wait: function that waits until the device is idle.
    """

    def __init__(self, module: nn.Module, wait: Callable[[], object]):
        self.wait = wait
        self.taken: dict[str, list[float]] = defaultdict(list)
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(self.done)
        self.start = self.now()

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.taken["forward"].append(self.now() - self.start)
        output.register_hook(self.begin)

    def begin(self, gradient: Tensor) -> None:
        self.start = self.now()

    def done(self, gradient: Tensor) -> None:
        self.taken["backward"].append(self.now() - self.start)
        self.taken["both"].append(self.taken["forward"][-1] + self.taken["backward"][-1])

    def now(self) -> float:
        self.wait()
        return time.perf_counter()


def check_agreement(pools: Sequence[nn.Module], x: Tensor) -> None:
    """Raise AssertionError if pools differ from the first one in values or gradients."""
    x.requires_grad_()
    weights = torch.rand(*x.shape[:2], 1, 1, device=x.device)
    first, *others = [(y := pool(x), *torch.autograd.grad((y * weights).sum(), x)) for pool in pools]
    for other in others:
        torch.testing.assert_close(other, first)


def main() -> None:
    parser = script_parser("pooling", __doc__)
    parser.add_argument(
        "--iterations", nargs="+", type=int, default=[1, 2, 3], help="numbers of routing iterations (default: 1 2 3)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="steps of each network (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images of a step (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="add the pool compiled by Inductor")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    images = torch.rand(options.batch, 3, 32, 32, device=device)
    labels = torch.randint(10, (options.batch,), device=device)

    pools: dict[str, Any] = {"average": nn.AdaptiveAvgPool2d(1), "max": nn.AdaptiveMaxPool2d(1)}
    for count in options.iterations:
        pools[f"routing, T = {count}"] = RoutingPool2d(16, 5.0, count)
    few = options.iterations[0]
    others: dict[str, Any] = {
        f"no kernel, T = {few}": RoutingPool2d(16, 5.0, few, backend="tiled"),
        f"stored votes, T = {few}": RoutingPool2d(16, 5.0, few, backend="reference"),
    }
    if options.compile:
        inner = RoutingPool2d(16, 5.0, few)
        inner.compile(dynamic=False)
        others[f"compiled, T = {few}"] = nn.Sequential(inner)  # the hooks of Watch stay outside the compiled module
    maps = torch.rand(options.batch, 64, 8, 8, device=device)
    check_agreement([pools[f"routing, T = {few}"], *others.values()], maps)
    pools |= others

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images).scores, labels).backward()
        optimizer.step()

    steps: dict[str, Callable[[], object]] = {}
    watches: dict[str, Watch] = {}
    for name, pool in pools.items():
        network = replace_pooling(create_model("pooling_resnet", pooling="average"), pool).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        steps[name] = functools.partial(step, network, optimizer)
        watches[name] = Watch(pool, wait)
    taken: dict[str, list[float]] = defaultdict(list)
    for round_ in range(options.rounds + WARM_UP):
        for name, seconds in time_side_by_side(steps, 1, device).items():
            taken[name] += seconds
        print(f"round {round_ + 1} of {options.rounds + WARM_UP}", end="\r", flush=True)
    medians = {
        name: {part: statistics.median(watch.taken[part][WARM_UP:]) for part in PARTS}
        for name, watch in watches.items()
    }
    average = medians["average"]
    print(f"{'pool':24}" + "".join(f"{part:>12}" for part in PARTS) + f"{'of its step':>14}")
    for name, times in medians.items():
        share = times["both"] / statistics.median(taken[name][WARM_UP:])
        ratios = "".join(f"{times[part] / average[part]:>11.2f}x" for part in PARTS)
        print(f"{name:24}{ratios}{share:>13.3%}")


if __name__ == "__main__":
    main()
