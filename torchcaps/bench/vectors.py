"""Memory and time of Heinsen's vector routing on longer and longer sequences, forward and backward.

    python -m torchcaps.bench.vectors [--lengths 1000 10000 100000 1000000] [--features 1024] [--parents 100]

One sequence of vectors, with gradients of the vectors and of all parameters, in float32: any number of vectors to 100
of the same size, two iterations. Each pass runs in a process of its own. "Beside" is by how much the process grows
beyond the gradients. "Plain" is the same in products of matrices with autograd, as a paper's formulas are usually
written; it keeps tensors with a number for each vector and parent, and is left out where they would fill half of the
free memory. Results and gradients of the vectors must agree.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps import CapsuleShared, HeinsenVectorRouting
from torchcaps.bench.measurement import show_bytes
from torchcaps.bench.memory import free_bytes, peak_bytes
from torchcaps.bench.script import script_parser

KEPT = 12  # tensors that plain keeps or makes, with a number for each vector and parent


def plain(routing: Any, x: Tensor) -> Tensor:
    """Route vectors `(1, n, d)` by `HeinsenVectorRouting` for any number of vectors, in PyTorch's own operators."""
    r, scale = routing, x.shape[1] ** -0.5
    active = (scale * (x @ r.activation_weight[0]) + r.activation_bias).sigmoid().unsqueeze(2)
    use, ignore = r.beta_use(x), r.beta_ignore(x)
    shares = torch.full_like(use, 1 / use.shape[2])
    for t in range(1, r.iterations + 1):
        used = active * shares
        phi = use * used - ignore * (active - used)
        sums = phi.transpose(1, 2) @ (scale * x)
        parents = (sums * r.vote_scale) @ r.vote_weight + phi.sum(1).unsqueeze(2) * r.vote_bias
        parents = F.layer_norm(parents, parents.shape[-1:])
        if t < r.iterations:
            prediction = (parents @ r.prediction_weight) * r.prediction_scale + r.prediction_bias
            similarity = (x @ prediction.transpose(1, 2)) * r.similarity_weight + r.similarity_bias
            shares = F.logsigmoid(similarity).softmax(2)
    return parents


def run(length: int, features: int, parents: int, is_plain: bool) -> tuple[int, float, list[Tensor]]:
    """Return by how many bytes the process grows beyond the gradients, the seconds, and parts of the results."""
    torch.manual_seed(0)
    layer = CapsuleShared(None, parents, features, HeinsenVectorRouting())
    found: list[Tensor] = []

    def both(vectors: Tensor) -> None:
        poses = plain(layer.routing, vectors) if is_plain else layer(vectors).poses
        (poses * torch.linspace(-1, 1, poses.numel()).view_as(poses)).sum().backward()  # the sum of squares is constant
        found.append(poses.detach())

    both(torch.randn(1, 4, features))  # loads libraries
    vectors = torch.randn(1, length, features).requires_grad_()
    layer.zero_grad()
    began = time.perf_counter()
    grown = peak_bytes(lambda: both(vectors))
    seconds = time.perf_counter() - began
    assert vectors.grad is not None
    kept = 4 * (vectors.numel() + sum(x.numel() for x in layer.parameters()))
    return max(0, grown - kept), seconds, [found[1], vectors.grad[:, :100].clone()]


def main() -> None:
    parser = script_parser("vectors", __doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--features", type=int, default=1024, help="size of a vector (default: %(default)s)")
    parser.add_argument("--parents", type=int, default=100, help="number of parents (default: %(default)s)")
    options = parser.parse_args()
    print(f"{'vectors':>9}  {'with gradients':>14}  {'beside':>10}  {'plain, beside':>13}  {'time of plain':>13}")
    for length in sorted(options.lengths):
        ways = [False]
        # Plain also scales the vectors, and has their gradients twice.
        if 4 * length * (KEPT * options.parents + 4 * options.features) < free_bytes("cpu") / 2:
            ways.append(True)
        results = []
        for is_plain in ways:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                results.append(fresh.submit(run, length, options.features, options.parents, is_plain).result())
        (beside, seconds, values), *others = results
        shown = f"{length:>9,}  {show_bytes(8 * length * options.features):>14}  {show_bytes(beside):>10}"
        for other, other_seconds, expected in others:
            for x, y in zip(values, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))
            shown += f"  {show_bytes(other):>13}  {seconds / other_seconds:>12.2f}x"
        print(shown, flush=True)


if __name__ == "__main__":
    main()
