"""What a pass starts on a CUDA device, counted without one: `python tests/helpers/launches.py` prints a table.

Each operator of PyTorch that computes numbers counts as one launch, although a few of them start two or three kernels.
Each launch of a Triton kernel is one; views and new memory start none. The tensors are on the CPU, where Triton's
interpreter runs the kernels.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from algorithms import make
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from torchcaps import CapsuleHead, CapsuleLinear, Capsules, Routing, use_backend
from torchcaps.ops.triton import problem

NAMES = "dynamic", "inverted_attention", "vector_norm", "self_routing", "em", "heinsen", "variational_bayes"
# Operators that start nothing, beside views: new memory, and views that do not say so.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
# Operators for which the host waits for the device, beside an index of bools.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}


class Launches(TorchDispatchMode):
    """Counts launches within this context, by the names of operators and kernels.

    Attributes:
        counts: launches by name.
        waits: names of the operators for which the host waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.waits = Counter[str](), list[str]()
        launch = problem.launch

        def counted(kernel: str, *arguments: Any, **options: Any) -> None:
            self.counts[kernel] += 1
            with _disable_current_modes():  # the interpreter has operators of its own
                launch(kernel, *arguments, **options)

        self.patches = [
            mock.patch.object(problem, "launch", counted),
            # As on a device, where no mode sees the operators, and where no values are read.
            *(
                mock.patch(f"torchcaps.{x}", return_value=False)
                for x in (
                    "utils.private.in_dispatch_mode",
                    "capsules.can_read",
                    "nn.inputs.can_read",
                    "nn.losses.can_read",
                )
            ),
        ]

    def __enter__(self) -> "Launches":
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self.patches:
            patch.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        bools = name.startswith("index") and any(x.dtype == torch.bool for x in tensors(args[1:]))
        if name in WAITING or bools:
            self.waits.append(name)
        if not func.is_view and name not in FREE and any(x.numel() for x in tensors(result)):
            self.counts[name] += 1
        return result

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, Tensor)]


def launches_of(run: Callable[[], Any]) -> Launches:
    """Return the launches of a pass that is not the first one, whose layers look at themselves."""
    with use_backend("triton"):
        run()
        with Launches() as launches:
            run()
    return launches


def of_layer(routing: Routing) -> Launches:
    """Return the launches of a layer, forward and backward, with those of a loss. Each child has a gate and weights of
    its own, and the kernels split their sums."""
    layer = CapsuleLinear(4, 2, 2, 2, routing)
    poses, scores = torch.randn(4, 4, 2, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    leaves = [poses, scores, *layer.parameters()]

    def run() -> None:
        loss = layer(Capsules(poses, scores)).poses.square().sum()
        torch.autograd.grad(loss, leaves, allow_unused=True)

    return launches_of(run)


def of_iteration(name: str) -> Counter[str]:
    """Return the launches of an iteration, forward and backward: half of what a layer with four of them has more than
    one with two. A routing that does not iterate has those of the layer."""
    if not make(name).iterative:
        return of_layer(make(name)).counts
    more, less = (of_layer(make(name, iterations)).counts for iterations in (4, 2))
    return Counter({key: (count - less[key]) / 2 for key, count in more.items()})


def of_head() -> Launches:
    """Return the launches of a `CapsuleHead`, forward and backward, with those of the cross-entropy."""
    head = CapsuleHead(2, 2, types=2, pose=2)
    features, labels = torch.randn(4, 2, 2, 1, requires_grad=True), torch.tensor([0, 1, 1, 0])
    leaves = [features, *head.parameters()]
    return launches_of(lambda: torch.autograd.grad(cross_entropy(head(features), labels), leaves))


def main() -> None:
    torch.manual_seed(0)
    for name, counts in [*((name, of_iteration(name)) for name in NAMES), ("CapsuleHead, a pass", of_head().counts)]:
        found = ", ".join(f"{key} {count:g}" for key, count in counts.most_common() if count)
        print(f"{name}: {sum(counts.values()):g} ({found})")


if __name__ == "__main__":
    main()
