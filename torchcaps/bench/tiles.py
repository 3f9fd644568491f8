"""Ways to compute one routing pass on a CPU without storing the votes, side by side.

    python -m torchcaps.bench.tiles

The pass is the second iteration of the inverted attention convolution: 1568 windows, 288 children, 32 parents, 4x4
poses, softmax over the parents, forward only. The benchmark compares how to organize the work, so the ways are sketches
and not the library's code; the tiles with parents innermost became `torchcaps/ops/tiled`. Each way must agree with
stored votes before its time is printed. Times are medians, as ratios to stored votes. One way needs a C++ compiler, for
Inductor, and one needs numba (`pip install numba`); a way that cannot run is left out with a line that says why.
"""

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from torchcaps.bench.measurement import time_side_by_side
from torchcaps.bench.script import script_parser

SAMPLES, CHILDREN, PARENTS, ROWS, D, H = 1568, 288, 32, 4, 4, 4
ROUNDS = 7


def stored(poses: Tensor, weight: Tensor, query: Tensor) -> Tensor:
    """All votes in memory, in two einsums: the baseline."""
    votes = torch.einsum("nird,ijdh->nijrh", poses, weight).flatten(3)
    coefficients = torch.einsum("nijk,njk->nij", votes, query).softmax(-1)
    return torch.einsum("nij,nijk->njk", coefficients, votes)


def parents_innermost(poses: Tensor, weight: Tensor, query: Tensor, samples: int = 64, children: int = 16) -> Tensor:
    """Blocks of samples and children, with the parents innermost in memory."""
    weight = weight.permute(0, 2, 3, 1).flatten(2).contiguous()
    query = query.transpose(1, 2).contiguous()
    sums = torch.zeros_like(query)
    for i in range(0, CHILDREN, children):
        for n in range(0, SAMPLES, samples):
            own = query[n : n + samples]
            rows = poses[n : n + samples, i : i + children].transpose(0, 1).flatten(1, 2)
            votes = torch.bmm(rows, weight[i : i + children]).view(-1, own.shape[0], ROWS * H, PARENTS)
            coefficients = (votes * own).sum(2).softmax(-1)
            sums[n : n + samples] += votes.mul_(coefficients.unsqueeze(2)).sum(0)
    return sums.transpose(1, 2)


def parents_outermost(poses: Tensor, weight: Tensor, query: Tensor, samples: int = 16, children: int = 32) -> Tensor:
    """Blocks of samples and children, with the features innermost in memory."""
    weight = weight.transpose(1, 2).flatten(2).contiguous()
    sums = torch.zeros_like(query)
    for i in range(0, CHILDREN, children):
        for n in range(0, SAMPLES, samples):
            own = query[n : n + samples]
            rows = poses[n : n + samples, i : i + children].transpose(0, 1).flatten(1, 2)
            votes = torch.bmm(rows, weight[i : i + children]).view(-1, own.shape[0], ROWS, PARENTS, H)
            votes = votes.transpose(2, 3).flatten(3)
            coefficients = (votes * own).sum(-1).softmax(-1)
            sums[n : n + samples] += (votes * coefficients.unsqueeze(-1)).sum(0)
    return sums


def pulled(poses: Tensor, weight: Tensor, query: Tensor, samples: int = 4) -> Tensor:
    """No votes: the queries go through the weights to the poses, weighted poses through the weights to the parents."""
    forth = weight.permute(1, 3, 2, 0).flatten(2).contiguous()  # (parents, h, d * children)
    back = weight.permute(1, 2, 0, 3).flatten(1, 2).contiguous()  # (parents, d * children, h)
    poses = poses.permute(0, 2, 3, 1).contiguous()  # (samples, rows, d, children)
    query = query.unflatten(2, (ROWS, H)).transpose(0, 1).contiguous()
    sums = torch.empty_like(query)
    for n in range(0, SAMPLES, samples):
        own = poses[n : n + samples]
        through = torch.bmm(query[:, n : n + samples].flatten(1, 2), forth).view(PARENTS, -1, ROWS, D, CHILDREN)
        coefficients = (through * own).sum((2, 3)).softmax(0)
        weighted = (coefficients[:, :, None, None] * own).view(PARENTS, -1, D * CHILDREN)
        sums[:, n : n + samples] = torch.bmm(weighted, back).view(PARENTS, -1, ROWS, H)
    return sums.transpose(0, 1).flatten(2)


def inductor() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Blocks with the parents innermost, each compiled by Inductor."""

    @torch.compile(dynamic=False)
    def tile(rows: Tensor, weight: Tensor, query: Tensor) -> Tensor:
        votes = (rows[..., None, None] * weight[:, None, None]).sum(3)  # (children, samples, rows, h, parents)
        coefficients = (votes * query).sum((2, 3)).softmax(-1)
        return (votes * coefficients[:, :, None, None]).sum(0)

    def run(poses: Tensor, weight: Tensor, query: Tensor, samples: int = 56, children: int = 32) -> Tensor:
        poses, weight = poses.transpose(0, 1).contiguous(), weight.permute(0, 2, 3, 1).contiguous()
        query = query.unflatten(2, (ROWS, H)).permute(0, 2, 3, 1).contiguous()
        sums = torch.zeros_like(query)
        for i in range(0, CHILDREN, children):
            for n in range(0, SAMPLES, samples):
                own = slice(n, n + samples)
                sums[own] += tile(poses[i : i + children, own], weight[i : i + children], query[own])
        return sums.permute(0, 3, 1, 2).flatten(2)

    return run


def numba() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Loops over children and samples, compiled by numba."""
    import numba as nb
    import numpy as np

    @nb.njit(parallel=True, fastmath=True)
    def kernel(poses, weight, query, sums, block):  # type: ignore[no-untyped-def]
        for b in nb.prange((SAMPLES + block - 1) // block):
            votes = np.empty((ROWS * H, PARENTS), np.float32)
            logits = np.empty(PARENTS, np.float32)
            for i in range(CHILDREN):
                for n in range(b * block, min(SAMPLES, (b + 1) * block)):
                    logits[:] = 0
                    for r in range(ROWS):
                        p0, p1, p2, p3 = poses[n, i, r, 0], poses[n, i, r, 1], poses[n, i, r, 2], poses[n, i, r, 3]
                        for h in range(H):
                            k = r * H + h
                            for j in range(PARENTS):
                                v = p0 * weight[i, 0, h, j] + p1 * weight[i, 1, h, j]
                                v += p2 * weight[i, 2, h, j] + p3 * weight[i, 3, h, j]
                                votes[k, j] = v
                                logits[j] += v * query[n, k, j]
                    largest = logits.max()
                    mass = np.float32(0)
                    for j in range(PARENTS):
                        logits[j] = np.exp(logits[j] - largest)
                        mass += logits[j]
                    for k in range(ROWS * H):
                        for j in range(PARENTS):
                            sums[n, k, j] += votes[k, j] * (logits[j] / mass)

    def run(poses: Tensor, weight: Tensor, query: Tensor) -> Tensor:
        query = query.transpose(1, 2).contiguous()
        sums = torch.zeros_like(query)
        weight = weight.permute(0, 2, 3, 1).contiguous()
        kernel(poses.numpy(), weight.numpy(), query.numpy(), sums.numpy(), 8)
        return sums.transpose(1, 2)

    return run


def main() -> None:
    script_parser("tiles", __doc__).parse_args()
    torch.manual_seed(0)
    children = torch.randn(SAMPLES, CHILDREN, ROWS, D), torch.randn(CHILDREN, PARENTS, D, H) * 0.3
    arguments = *children, torch.randn(SAMPLES, PARENTS, ROWS * H) * 0.3
    expected = stored(*(x.double() for x in arguments))
    allowed = 2 * (stored(*arguments) - expected).norm()
    ways: dict[str, Callable[..., Tensor]] = {
        "stored votes (einsum)": stored,
        "tiles, parents innermost": parents_innermost,
        "tiles, parents outermost": parents_outermost,
        "no votes: pulled through the weights": pulled,
    }
    for name, make in (("tiles, compiled by Inductor", inductor), ("numba", numba)):
        try:
            ways[name] = make()
            ways[name](*arguments)
        except Exception as error:  # whatever is missing
            print(f"{name}: left out, {type(error).__name__}: {str(error).splitlines()[0]}")
            ways.pop(name, None)
    runs: dict[str, Callable[[], Tensor]] = {}
    for name, way in ways.items():
        off = (way(*arguments) - expected).norm()
        if off <= allowed:
            runs[name] = functools.partial(way, *arguments)
        else:
            print(f"{name}: values disagree: off by {off:.1e}, allowed {allowed:.1e}")
    taken = time_side_by_side(runs, ROUNDS)
    base = statistics.median(taken["stored votes (einsum)"])
    for name, seconds in taken.items():
        print(f"{name}: {base / statistics.median(seconds):.1f} times as fast as stored votes")


if __name__ == "__main__":
    main()
