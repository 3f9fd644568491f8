"""For whom the CPU kernels are fast: the native backend beside stored votes, over drawn sizes of capsule layers.

    python benchmarks/sizes.py --seed 7 --cells 40 --threads 1 [--small] [--compiled] [--out FOLDER]
    python benchmarks/sizes.py --table
    python benchmarks/sizes.py --head

A cell is a `CapsuleLinear` of a routing, of poses of children and parents, and of numbers of children, parents and
samples. Cells are drawn log-uniformly by a seed; `--table` takes a fixed list instead, and `--head` a `CapsuleHead` of
10 classes on maps of 7x7. Each runs forward without gradients, and forward and backward, in turns by

    native      the kernels
    auto        what backend="auto" chooses
    reference   our operators on stored votes
    plain       what people write: an einsum that makes the votes, and the textbook loop
    compiled    `plain` by torch.compile (with --compiled)

A way whose values or gradients disagree with the reference in float64 gets no number. The bound is that of `torchcaps
bench`: the larger of arithmetic / rate of a matrix product and bytes / rate of a copy, both measured beside the cell.
The summary compares the native backend with the bound where it takes a millisecond or more, and with the other ways
everywhere. `--out` gets sizes.json and the figure sizes.png.
"""

import argparse
import copy
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps import (
    CapsuleHead,
    CapsuleLinear,
    Capsules,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    Routing,
    VBRouting,
    use_backend,
)
from torchcaps.bench import measure_rates
from torchcaps.bench.baselines import dynamic_loop, em_loop, heinsen_loop
from torchcaps.bench.layers import Layer, LayerCase, Sizes
from torchcaps.bench.measurement import PASSES
from torchcaps.bench.report import environment
from torchcaps.bench.resources import show_bytes, time_side_by_side
from torchcaps.bench.ways import by_samples, prepare
from torchcaps.measures.axes import COLORS, MARKERS, in_style, write
from torchcaps.utils.checks import counted, one_line
from torchcaps.utils.files import make_folder, write_text_whole
from torchcaps.utils.memory import free_bytes

TOLERANCE = 3e-4  # of values and gradients in float32, relative to the largest number; as the tests of the kernels
COUNTED = 1e-3  # seconds of a native pass from which on it is compared with the bound
DEEP = 8  # depth of the children's poses from which on the bound can be reached
SMALL = (1_000, 100_000)  # votes of a small layer
TURN = 0.2  # seconds that a way's turn takes at least
MOST_SECONDS = 60  # of all rounds of a cell's pass: where they take longer there is a single one
Results = dict[str, Tensor]
Run = Callable[[], Results]


# ------------------------------------------------------------ what people write


def votes_of(layer: Any, poses: Tensor) -> Tensor:
    """Return all votes, `(b, i, j, k)`."""
    poses = poses if poses.dim() == 4 else poses.unsqueeze(2)
    return torch.einsum("bird,ijdh->bijrh", poses, layer.weight).flatten(3)


def plain_dynamic(layer: Any, poses: Tensor, scores: None) -> tuple[Tensor, ...]:
    return (dynamic_loop(layer.routing, votes_of(layer, poses)).unflatten(-1, layer.out_pose),)


def plain_em(layer: Any, poses: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    mean, parent_scores = em_loop(layer.routing, votes_of(layer, poses), scores.sigmoid())
    return mean.unflatten(-1, layer.out_pose), parent_scores


def plain_heinsen(layer: Any, poses: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    mean, parent_scores = heinsen_loop(layer.routing, votes_of(layer, poses), scores)
    return mean.unflatten(-1, layer.out_pose), parent_scores


def plain_vb(layer: Any, poses: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """De Sousa Ribeiro et al. 2020, Algorithm 1; batch normalization with the first running values."""
    votes, routing = votes_of(layer, poses), layer.routing
    d, presence = votes.shape[-1], scores.sigmoid().unsqueeze(-1)
    shares = torch.full_like(votes[..., 0], 1 / votes.shape[2])
    for t in range(routing.iterations):
        used = presence * shares
        r = used.sum(1)
        mean = torch.einsum("bij,bijk->bjk", used, votes) / r.unsqueeze(-1)
        spread = torch.einsum("bij,bijk->bjk", used, (votes - mean.unsqueeze(1)) ** 2)
        kappa, nu, kept = 1 + r, d + 1 + r, (r / (1 + r)).unsqueeze(-1)
        m, p = kept * mean, 1 + spread + kept * mean**2
        log_share = torch.digamma(kappa) - torch.digamma(kappa.sum(-1, keepdim=True))
        below = torch.arange(d, dtype=nu.dtype)
        log_det = torch.digamma((nu.unsqueeze(-1) - below) / 2).sum(-1) + d * math.log(2) - p.log().sum(-1)
        if t < routing.iterations - 1:
            distance = ((votes - m.unsqueeze(1)) ** 2 * (nu.unsqueeze(-1) / p).unsqueeze(1)).sum(-1)
            shares = ((log_share + (log_det - d / kappa) / 2).unsqueeze(1) - distance / 2).softmax(-1)
    entropy = d / 2 * math.log(2 * math.pi * math.e) - log_det / 2
    norms = (routing.pose_norm, routing.score_norm)
    parents = [
        F.batch_norm(x, norm.running_mean, norm.running_var, eps=norm.eps)
        for x, norm in zip((m, -log_share.exp() * entropy), norms, strict=True)
    ]
    return parents[0].unflatten(-1, layer.out_pose), parents[1]


def plain_inverted_attention(layer: Any, poses: Tensor, scores: None) -> tuple[Tensor, ...]:
    """Tsai et al. 2020, Procedure 1."""
    votes, routing = votes_of(layer, poses), layer.routing
    coefficients = torch.full_like(votes[..., 0], 1 / votes.shape[2])
    for t in range(routing.iterations):
        parents = (coefficients.unsqueeze(-1) * votes).sum(1)
        parents = F.layer_norm(parents, parents.shape[-1:], routing.weight, routing.bias)
        if t < routing.iterations - 1:
            coefficients = ((votes * parents.unsqueeze(1)).sum(-1) / math.sqrt(votes.shape[-1])).softmax(-1)
    return (parents.unflatten(-1, layer.out_pose),)


class Kind(NamedTuple):
    """A routing algorithm, what people write for it, and whether children have scores and the agreement is Gaussian."""

    make: Callable[[], Routing]
    plain: Callable[..., tuple[Tensor, ...]]
    gaussian: bool = False


KINDS = {
    "dynamic": Kind(DynamicRouting, plain_dynamic),
    "dynamic over children": Kind(partial(DynamicRouting, softmax="children"), plain_dynamic),
    "EM": Kind(EMRouting, plain_em, gaussian=True),
    "VB": Kind(VBRouting, plain_vb, gaussian=True),
    "Heinsen": Kind(HeinsenRouting, plain_heinsen, gaussian=True),
    "inverted attention": Kind(InvertedAttentionRouting, plain_inverted_attention),
}


# ------------------------------------------------------------ cells


@dataclass(frozen=True)
class Cell:
    """A capsule layer and its number of samples; poses have (rows, depth) and (rows, width), a vector has one row."""

    routing: str
    rows: int
    depth: int
    width: int
    children: int
    parents: int
    batch: int

    def __str__(self) -> str:
        poses = [str(n) if self.rows == 1 else f"{self.rows}x{n}" for n in (self.depth, self.width)]
        sizes = f"{self.children:,} children, {counted(self.parents, 'parent')}, batch {self.batch}"
        return f"{self.routing}, {' to '.join(poses)}, {sizes}"

    @property
    def votes(self) -> int:
        """Number of votes of all samples."""
        return self.batch * self.children * self.parents

    @property
    def bytes(self) -> int:
        """Bytes of the votes in float32."""
        return 4 * self.votes * self.rows * self.width

    def build(self) -> LayerCase:
        """Build the layer and its children, with the same numbers at each call."""
        kind = KINDS[self.routing]
        in_pose, out_pose = (n if self.rows == 1 else (self.rows, n) for n in (self.depth, self.width))
        sizes = Sizes(self.batch, self.children, self.parents, in_pose, out_pose)

        def make(sizes: Sizes, iterations: int) -> CapsuleLinear:
            return CapsuleLinear(sizes.types, sizes.parents, sizes.in_pose, sizes.out_pose, kind.make())

        torch.manual_seed(0)
        layer = Layer(make, kind.plain, kind.make().iterations, sizes, sizes, kind.gaussian)
        case = layer.build(1, None, None, smoke=False)
        case.module.eval()  # batch normalization would need all samples at once, and so their votes in float64
        return case


def draw(seed: int, cells: int, small: bool, most_bytes: float) -> Iterator[Cell]:
    """Draw cells log-uniformly. One of too many bytes is drawn again, and a small layer of too few or many votes."""
    numbers = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(math.exp(numbers.uniform(math.log(low), math.log(high))))

    while cells:
        routing, shape = numbers.choice(list(KINDS)), numbers.choice(["vector", "square", "rectangle"])
        rows = 1 if shape == "vector" else between(2, 8)
        depth, width = (rows if shape == "square" else between(2, 64 // rows) for _ in range(2))
        cell = Cell(routing, rows, depth, width, between(32, 2048), between(2, 100), between(1, 128))
        if cell.bytes <= most_bytes and (not small or SMALL[0] <= cell.votes <= SMALL[1]):
            cells -= 1
            yield cell


TABLE = [
    Cell("dynamic", rows, depth, width, 576, parents, 32)
    for rows, depth, width, parents in [
        (4, 4, 4, 10),
        (1, 8, 16, 10),
        (1, 16, 16, 10),
        (1, 16, 12, 10),
        (1, 32, 32, 10),
        (1, 64, 16, 10),
        (3, 3, 3, 10),
        (1, 8, 8, 5),
    ]
]


# ------------------------------------------------------------ measuring


@dataclass
class Row:
    """Times of a cell in one pass; a way that has none has a note. The cell and the bound of a head are None."""

    name: str
    cell: Cell | None
    pass_: str
    bound: float | None
    seconds: dict[str, float]
    notes: dict[str, str]

    def __str__(self) -> str:
        native = self.seconds.get("native")
        texts = []
        for way, seconds in self.seconds.items():
            ratio = "" if native is None or way == "native" else f" ({seconds / native:.2f}x)"
            bound = f" ({seconds / self.bound:.1f}x bound)" if self.bound and way == "native" else ""
            texts.append(f"{way} {1e3 * seconds:.3g} ms{ratio}{bound}")
        texts += [f"{way}: {note}" for way, note in self.notes.items()]
        return f"  {self.pass_:17}{', '.join(texts)}"

    def json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    @property
    def times_bound(self) -> float | None:
        """Time of the native pass relative to the bound, or None where it does not count."""
        native = self.seconds.get("native", 0.0)
        return native / self.bound if self.bound and native >= COUNTED else None


def measure(
    name: str,
    cell: Cell | None,
    runs: dict[str, dict[str, Run | str]],
    truth: Results,
    bounds: Sequence[float | None],
    rounds: int,
    clock: Callable[[], float],
) -> list[Row]:
    """Check and time the runs of each pass; a text in the place of a run says why it does not run."""
    print(name, flush=True)
    rows = []
    for (pass_, ways), bound in zip(runs.items(), bounds, strict=True):
        row = Row(name, cell, pass_, bound, {}, {})
        timed: dict[str, Run] = {}
        for way, run in ways.items():
            try:
                note = run if isinstance(run, str) else disagreement(run(), truth)  # also the warm-up
            except Exception as error:  # whatever it is, the other ways are measured
                note = f"{type(error).__name__}: {one_line(error)[:200]}"
            if note:
                row.notes[way] = note
            elif not isinstance(run, str):
                timed[way] = run
        once = {way: seconds for way, (seconds,) in time_side_by_side(timed, 1, clock=clock).items()}
        often = {way: max(1, int(TURN / seconds)) for way, seconds in once.items()}
        turns = {way: partial(repeat, run, often[way]) for way, run in timed.items()}
        is_long = sum(once.values()) * rounds > MOST_SECONDS
        taken = time_side_by_side(turns, 1 if is_long else rounds, clock=clock)
        row.seconds = {way: statistics.median(times) / often[way] for way, times in taken.items()}
        print(row, flush=True)
        rows.append(row)
    return rows


def repeat(run: Run, often: int) -> None:
    """Run many short passes in a turn: the first finds memory and caches as another way has left them."""
    for _ in range(often):
        run()


def disagreement(results: Results, truth: Results) -> str:
    """Say by how much results are off, relative to the largest number of each; "" if all agree."""
    off = {
        name: float((x - truth[name]).abs().max() / truth[name].abs().max().clamp_min(1e-3))
        for name, x in results.items()
    }
    wrong = [f"{name} is off by {error:.1e}" for name, error in off.items() if not error <= TOLERANCE]
    return ", ".join(wrong)


def layer_rows(cell: Cell, compiled: bool, rounds: int, clock: Callable[[], float]) -> list[Row]:
    case = cell.build()
    exact = case.to("cpu", torch.float64)
    needed, free = case.bytes_needed(baseline=False), free_bytes("cpu") / 2  # the other half is for others
    truth = prepare("reference", exact, True)() if 2 * needed < free else by_samples(exact)
    baselines = {"auto": ours, "reference": None, "plain": case.layer.baseline}
    if compiled:
        torch.compiler.reset()
        baselines["compiled"] = torch.compile(case.layer.baseline, dynamic=False)

    def runs_of(backward: bool) -> dict[str, Run | str]:
        runs: dict[str, Run | str] = {"native": prepare("native", case, backward)}
        for way, baseline in baselines.items():
            if way != "auto" and needed > free:
                runs[way] = f"not run, it needs about {show_bytes(needed)}"
            elif baseline is None:
                runs[way] = prepare(way, case, backward)
            else:
                as_baseline = replace(case, layer=replace(case.layer, baseline=baseline))
                runs[way] = prepare("baseline", as_baseline, backward)
        return runs

    rates = measure_rates("cpu", torch.float32, clock)  # anew for each cell: what else the machine does changes them
    works = [case.work(backward) for backward in (False, True)]
    bounds = [max(work.flops / rates.matrix, work.bytes / rates.copy) for work in works]
    return measure(
        str(cell), cell, dict(zip(PASSES, map(runs_of, (False, True)), strict=True)), truth, bounds, rounds, clock
    )


def ours(layer: Any, poses: Tensor, scores: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the layer itself, by the backend that "auto" stands for."""
    parents = layer(Capsules(poses, scores))
    return (parents.poses,) if parents.scores is None else (parents.poses, parents.scores)


def head_rows(routing: str, rounds: int, clock: Callable[[], float], batch: int = 64) -> list[Row]:
    torch.manual_seed(0)
    head = CapsuleHead(64, 10, KINDS[routing].make())
    features, labels = torch.randn(batch, 64, 7, 7), torch.randint(10, (batch,))

    def run(head: CapsuleHead, features: Tensor, backend: Any) -> Results:
        leaves = {"features": features.requires_grad_(), **dict(head.named_parameters())}
        with use_backend(backend):
            logits = head(features)
            gradients = torch.autograd.grad(F.cross_entropy(logits, labels), list(leaves.values()))
        return {"logits": logits.detach(), **dict(zip(leaves, gradients, strict=True))}

    ways: dict[str, Run | str] = {way: partial(run, head, features, way) for way in ("native", "auto", "reference")}
    truth = run(copy.deepcopy(head).double(), features.detach().double(), "reference")
    name = f"head of 10 classes, {routing}, maps of 7x7 with 64 channels, batch {batch}"
    return measure(name, None, {PASSES[1]: ways}, truth, [None], rounds, clock)


# ------------------------------------------------------------ summary


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Say how far the native passes are from the bound, and how often and by how much another way is faster."""
    for pass_ in PASSES:
        of_pass = [row for row in rows if row.pass_ == pass_ and "native" in row.seconds]
        for text, deep in ((f"depth {DEEP} or more", True), (f"depth below {DEEP}", False)):
            times = [
                (n, row) for row in of_pass if row.cell and (row.cell.depth >= DEEP) == deep and (n := row.times_bound)
            ]
            if times:
                ratios = sorted(n for n, _ in times)
                ninth = ratios[math.ceil(0.9 * len(ratios)) - 1]
                worst, row = max(times, key=lambda each: each[0])
                yield (
                    f"{pass_}, {text}: {counted(len(ratios), 'cell')}, times the bound: median "
                    f"{statistics.median(ratios):.2f}, 90th percentile {ninth:.2f}, worst {worst:.2f} ({row.name})"
                )
        for own, other in itertools.product(("native", "auto"), ("reference", "plain", "compiled")):
            both = [row for row in of_pass if own in row.seconds and other in row.seconds]
            if both:
                ratios_of = [(row.seconds[own] / row.seconds[other], row) for row in both]
                worst, row = max(ratios_of, key=lambda each: each[0])
                slower = f"{sum(ratio > 1 for ratio, _ in ratios_of)} of {len(both)}"
                yield f"{pass_}: {own} is slower than {other} in {slower}, at worst {worst:.2f}x ({row.name})"


@in_style
def figure(rows: Sequence[Row]) -> Figure:
    """Draw times the bound over the number of votes. Hollow markers: poses of children of small depth."""
    drawn = Figure(figsize=(9, 4.2))
    axes = drawn.subplots(1, 2, sharey=True)
    for axis, pass_ in zip(axes, PASSES, strict=True):
        of_pass = [(row.cell, row) for row in rows if row.pass_ == pass_ and row.cell and row.bound]
        for cell, row in of_pass:  # a line joins the ways of a cell
            of_ways = [seconds / row.bound for seconds in row.seconds.values() if row.bound]
            axis.plot([cell.votes] * len(of_ways), of_ways, color="0.8", linestyle="-", linewidth=0.8, zorder=0)
        for index, way in enumerate(["native", "reference", "plain", "compiled"]):
            points = [(cell, row.seconds[way] / row.bound) for cell, row in of_pass if row.bound and way in row.seconds]
            for deep in (True, False):
                some = [(cell.votes, ratio) for cell, ratio in points if (cell.depth >= DEEP) == deep]
                if some:
                    fill = COLORS[index] if deep else "none"
                    label = f"{way}, depth {'from' if deep else 'below'} {DEEP}"
                    axis.scatter(
                        *zip(*some, strict=True), 18, fill, marker=MARKERS[index], edgecolors=COLORS[index], label=label
                    )
        axis.axhline(1, color="0.4", linewidth=0.8)
        axis.set(title=pass_, xscale="log", yscale="log", xlabel="votes (samples x children x parents)")
        axis.grid(visible=True)
    axes[0].set_ylabel("time / bound")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--table", action="store_true", help="a fixed list of cells instead of drawn ones")
    which.add_argument("--head", action="store_true", help="heads instead of layers")
    which.add_argument("--small", action="store_true", help="draw layers of a thousand to a hundred thousand votes")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn cells (default: %(default)s)")
    parser.add_argument("--cells", type=int, default=40, help="number of drawn cells (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="to take medians of (default: %(default)s)")
    parser.add_argument(
        "--most-bytes", type=float, default=1e9, help="of a drawn cell's votes (default: %(default).0e)"
    )
    parser.add_argument("--compiled", action="store_true", help="also the plain code by torch.compile")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for sizes.json and sizes.png")
    options = parser.parse_args(arguments)
    if options.out:
        make_folder(options.out)
    torch.set_num_threads(options.threads)
    # CPU time does not count while another process has the core. It is that of this thread alone: with more threads
    # the others' work would be missing.
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rates = measure_rates("cpu", torch.float32, clock)
    print(f"matrix product {rates.matrix / 1e9:.3g} GFLOP/s, copy {rates.copy / 1e9:.3g} GB/s", flush=True)
    if options.head:
        measured = (head_rows(name, options.rounds, clock) for name in ("dynamic", "EM", "VB", "inverted attention"))
    else:
        drawn = draw(options.seed, options.cells, options.small, options.most_bytes)
        cells = TABLE if options.table else drawn
        measured = (layer_rows(cell, options.compiled, options.rounds, clock) for cell in cells)
    rows: list[Row] = []
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    values = {**environment("cpu", "float32", rates), "options": asked}
    for more in measured:
        rows += more
        if options.out:  # after each cell, so that a run that is stopped has left what it measured
            text = json.dumps({**values, "rows": [row.json() for row in rows]}, indent=1)
            write_text_whole(options.out / "sizes.json", text + "\n")
    print(*summary(rows), sep="\n")
    if options.out and not options.head:
        write(figure(rows), options.out / "sizes.png")


if __name__ == "__main__":
    main()
