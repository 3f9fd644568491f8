"""What a routing pool costs in a training step of ResNet-20, beside average pooling in the same place.

    python benchmarks/pooling.py [--iterations 1 2 3] [--rounds 15] [--compile]

Networks with each pool take training steps (SGD with momentum) in turns on the same 128 images of 32x32. The time of a
pool is measured inside its step: forward from when it is called to when it returns, backward from when the gradient of
its output is there to when that of its input is. Printed are medians over the rounds, relative to average pooling's.
The ways to compute a routing pool must agree, in values and gradients, before anything is measured. `--compile` adds
the pool as Inductor compiles it, which takes a C++ compiler.
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import RoutingPool2d, create_model, replace_pooling

PARTS = ("forward", "backward", "both")


class Watch:
    """Notes the times of a module's forward and backward pass."""

    def __init__(self, module: nn.Module, wait: Any):
        self.wait, self.taken = wait, defaultdict(list)
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


def agree(pool: nn.Module, others: list[nn.Module], x: Tensor) -> None:
    """In values and gradients."""
    x.requires_grad_()
    weights = torch.rand(*x.shape[:2], 1, 1, device=x.device)
    results = [(y := other(x), *torch.autograd.grad((y * weights).sum(), x)) for other in (pool, *others)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    images = torch.rand(options.batch, 3, 32, 32, device=device)
    labels = torch.randint(10, (options.batch,), device=device)

    names: dict[str, nn.Module] = {"average": nn.AdaptiveAvgPool2d(1), "max": nn.AdaptiveMaxPool2d(1)}
    for count in options.iterations:
        names[f"routing, T = {count}"] = RoutingPool2d(16, 5.0, count)
    few = options.iterations[0]
    others = {f"stored votes, T = {few}": RoutingPool2d(16, 5.0, few, backend="reference")}
    if options.compile:
        inner = RoutingPool2d(16, 5.0, few)
        inner.compile(dynamic=False)
        others[f"compiled, T = {few}"] = nn.Sequential(inner)  # what watches it stays outside
    agree(names[f"routing, T = {few}"], list(others.values()), torch.rand(options.batch, 64, 8, 8, device=device))
    names |= others
    networks, watches = {}, {}
    for name, pool in names.items():
        network = replace_pooling(create_model("pooling_resnet", pooling="average"), pool).to(device)
        networks[name] = network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        watches[name] = Watch(pool, wait)
    steps = defaultdict(list)
    for round_ in range(options.rounds + 2):  # the first two warm up
        for name, (network, optimizer) in networks.items():
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(network(images).scores, labels).backward()
            optimizer.step()
            wait()
            steps[name].append(time.perf_counter() - start)
        print(f"round {round_ + 1} of {options.rounds + 2}", end="\r", flush=True)
    medians = {
        name: {part: statistics.median(watch.taken[part][2:]) for part in PARTS} for name, watch in watches.items()
    }
    average = medians["average"]
    print(f"{'pool':24}" + "".join(f"{part:>12}" for part in PARTS) + f"{'of its step':>14}")
    for name, times in medians.items():
        share = times["both"] / statistics.median(steps[name][2:])
        ratios = "".join(f"{times[part] / average[part]:>11.2f}x" for part in PARTS)
        print(f"{name:24}{ratios}{share:>13.3%}")


if __name__ == "__main__":
    main()
