"""Memory and time of Heinsen's layers on longer and longer sequences, forward and backward.

    python benchmarks/sequences.py [--layer heinsen2019] [--lengths 100 1000 10000 100000] [--rounds 5] [--device cuda]

One sequence of any number of vectors, in float32, three or two iterations: with `heinsen2019` the first layer of
`EmbeddingCapsNet`, vectors of 64 features with scores to 64 parts of 2; with `heinsen2022` vectors of 1,024 to 100 of
the same size. Memory is the most that PyTorch allocates in a pass beyond the vectors, the parameters and the gradients
of both. Time is relative to stored votes (the reference), medians of rounds in turns. The reference is left out where
it would take more than half of the free memory; elsewhere parents and gradients of vectors must agree with it.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps import CapsuleLinear, Capsules, CapsuleShared, HeinsenRouting, HeinsenVectorRouting, use_backend
from torchcaps.bench.resources import peak_allocated, show_bytes, time_side_by_side
from torchcaps.utils.memory import free_bytes

# By layer: what makes it, the features of a vector, and the bytes that the reference takes for each vector.
LAYERS = {
    "heinsen2019": (partial(CapsuleLinear, None, 64, 64, 2, HeinsenRouting(init="paper"), bias=True), 64, 14_000),
    "heinsen2022": (partial(CapsuleShared, None, 100, 1024, HeinsenVectorRouting()), 1024, 2_000_000),
}


def forward_and_backward(layer: Any, children: Capsules, backend: Any) -> list[Tensor]:
    """Return the parents, and the gradients of the vectors and of all parameters."""
    with use_backend(backend):
        parents = layer(children)
        poses = parents.poses
        weights = torch.linspace(-1, 1, poses.numel()).to(poses)  # the sum of squares of normalized parents is constant
        loss = (poses * weights.view_as(poses)).sum() + (0 if parents.scores is None else parents.scores.sum())
        return [poses.detach(), *torch.autograd.grad(loss, [children.poses, *layer.parameters()])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, default="heinsen2019", help="default: %(default)s")
    parser.add_argument("--lengths", nargs="+", type=int, default=[100, 1_000, 10_000, 100_000], help="of sequences")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each backend (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    options = parser.parse_args()
    make, features, bytes_per_vector = LAYERS[options.layer]
    torch.manual_seed(0)
    layer: Any = make().to(options.device)
    for bias in (name for name, _ in layer.named_parameters() if name == "bias"):
        nn.init.normal_(layer.get_parameter(bias), std=0.1)  # not zero, as after some training
    backends = ["reference", "tiled", *(["triton"] if options.device == "cuda" else [])]
    print(f"{'vectors':>9}  {'backend':10}{'memory':>10}{'time':>9}")
    for length in options.lengths:
        vectors = torch.randn(1, length, features, device=options.device, requires_grad=True)
        scores = torch.randn(1, length, device=options.device) if options.layer == "heinsen2019" else None
        children = Capsules(vectors, scores)
        fits = length * bytes_per_vector < free_bytes(options.device) / 2
        runs = {
            name: partial(forward_and_backward, layer, children, name)
            for name in backends
            if fits or name != "reference"
        }
        results = {name: run() for name, run in runs.items()}  # also the warm-up
        for other in results.values() if fits else ():
            for x, expected in zip(other[:2], results["reference"][:2], strict=True):
                torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        kept = 4 * (vectors.numel() + sum(p.numel() for p in layer.parameters()))
        del results
        memory = {name: peak_allocated(run, options.device) - kept for name, run in runs.items()}
        taken = time_side_by_side(runs, options.rounds, options.device)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        for name in runs:
            ratio = f"{medians[name] / medians['reference']:.2f}x" if fits else "-"
            print(f"{length:>9,}  {name:10}{show_bytes(memory[name]):>10}{ratio:>9}", flush=True)


if __name__ == "__main__":
    main()
