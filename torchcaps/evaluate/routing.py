"""Does the network depend on its coefficients, and do they depend on the image?

Procedure: in one layer at a time, and then in all, the coefficients of every iteration are replaced on the same
weights:

- uniform: by equal ones;
- random: by the softmax of normal random numbers, one for each child and parent, the same for all images;
- shuffled: each child's coefficients are permuted among its parents (with a softmax over the children, each parent's
  among its children), by a permutation of its own for each image and child;
- another image's: by those that another image of the batch has at this iteration.

Each has the accuracy on 1,000 test images, and the share of predictions that change. A fall shows that a trained
network relies on its coefficients, not that training with routing helped: for that, train with `UniformRouting` and
compare.

By iteration, without a replacement: the entropy of the coefficients in percent of that of uniform ones, and the mean
cosine between votes and parents, weighted by the factors of the votes.

Source: Paik et al., Capsule Networks Need an Improved Routing Algorithm, ACML 2019.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject, percent
from torchcaps.explain.recording import watching
from torchcaps.nn.layer import CapsuleLayer
from torchcaps.ops import StoredVotes, Votes, at_least_float32
from torchcaps.ops.computed import ComputedVotes
from torchcaps.routing import Iteration

MOST, WATCHED = 1000, 200  # images
BATCH = 20  # the votes of a batch are stored

# Changes coefficients (batch, children, parents); it is told whether they sum to one over the parents.
Change = Callable[[Tensor, bool], Tensor]


def stored(votes: Votes) -> Tensor:
    """Return all votes, `(batch, children, parents, features)`."""
    return (votes.all_stored() if isinstance(votes, ComputedVotes) else votes).votes  # type: ignore[attr-defined]


class ChangedVotes(StoredVotes):
    """Votes with other coefficients than those that follow from the agreement."""

    def __init__(self, votes: Votes, change: Change):
        super().__init__(stored(votes))
        self.gates, self.layout, self.pose, self.dtype = votes.gates, votes.layout, votes.pose, votes.dtype
        self.source, self.change = votes, change

    def coefficients(self, agreement: Any, softmax: Any = "parents", leaky: bool = False) -> Tensor:
        found = at_least_float32(self.source.coefficients(agreement, softmax, leaky))
        return self.change(found, softmax == "parents")

    def capsules(self, *args: Any) -> Any:
        return self.source.capsules(*args)


@contextmanager
def changed_coefficients(layers: list[CapsuleLayer], change: Change) -> Iterator[None]:
    """Replace the coefficients of every iteration of some layers within this context."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            routing: Any = layer.routing
            advance = routing.advance

            def changed(votes: Votes, state: Any, t: float, advance: Any = advance) -> Any:
                return advance(ChangedVotes(votes, change), state, t)

            routing.advance = changed
            stack.callback(delattr, routing, "advance")
        yield


def changes(generator: torch.Generator) -> dict[str, Change]:
    """Return the changes of coefficients, by name."""
    drawn: dict[tuple[int, ...], Tensor] = {}

    def uniform(x: Tensor, over_parents: bool) -> Tensor:
        dim = 2 if over_parents else 1
        return x.mean(dim, keepdim=True).expand_as(x)

    def random(x: Tensor, over_parents: bool) -> Tensor:
        dim = 2 if over_parents else 1
        shape = (1, *x.shape[1:])
        logits = drawn.setdefault(shape, torch.randn(shape, generator=generator))
        return logits.softmax(dim).to(x) * x.sum(dim, keepdim=True)

    def shuffled(x: Tensor, over_parents: bool) -> Tensor:
        dim = 2 if over_parents else 1
        return x.gather(dim, torch.rand(x.shape, generator=generator).argsort(dim))

    def of_another(x: Tensor, over_parents: bool) -> Tensor:
        return x.roll(len(x) // 2, 0)

    return {"uniform": uniform, "random": random, "shuffled": shuffled, "another image's": of_another}


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    network = subject.network
    layers = {name: x for name, x in network.named_modules() if isinstance(x, CapsuleLayer)}
    if not layers:
        raise DoesNotApply("the network has no layer that routes")
    subject.need_one_label()
    images, labels = subject.images[:MOST], subject.labels[:MOST]
    plain = _predicted(subject, images)
    numbers = {"as it is (%)": percent(plain == labels)}
    whole = {"all layers": list(layers.values())} if len(layers) > 1 else {}
    groups: dict[str, list[CapsuleLayer]] = {name: [layer] for name, layer in layers.items()} | whole
    for name, some in groups.items():
        for what, change in changes(subject.generator()).items():
            subject.progress(f"routing: {name}, {what} coefficients")
            if any(x.routing.needs_poses and what != "uniform" for x in some):
                continue  # net sums have no coefficients that could be replaced
            try:
                with changed_coefficients(some, change):
                    predicted = _predicted(subject, images)
            except ValueError as error:  # a routing whose votes must be the poses
                raise DoesNotApply(f"the coefficients of {name} cannot be replaced: {error}") from error
            numbers[f"{name}, {what} (%)"] = percent(predicted == labels)
            numbers[f"{name}, {what}: other predictions (%)"] = percent(predicted != plain)
    return Outcome(numbers, iterations(network, images[:WATCHED]))


def _predicted(subject: Subject, images: Tensor) -> Tensor:
    return torch.cat([subject.scores(batch).argmax(1) for batch in images.split(BATCH)])


def iterations(network: nn.Module, images: Tensor) -> dict[str, Curve]:
    """Return the entropy of the coefficients and the agreement of the votes by iteration, of each layer."""
    sums: dict[tuple[str, int], list[float]] = {}

    def see(name: str, iteration: Iteration) -> None:
        if not math.isfinite(iteration.t) or name not in layers:
            return
        weighted, votes = iteration.votes, iteration.votes.votes
        coefficients = at_least_float32(weighted.coefficients())
        dim = 2 if weighted.softmax == "parents" else 1
        entropy = torch.special.entr(coefficients).sum(dim).mean() / math.log(max(2, coefficients.shape[dim]))
        poses = at_least_float32(iteration.parents.poses).flatten(-len(votes.pose)).movedim(1, -2).flatten(0, -3)
        row = sums.setdefault((name, int(iteration.t) + 1), [0.0, 0.0, 0.0])
        row[0] += float(entropy)
        if poses.shape == (votes.batch, votes.parents, math.prod(votes.pose)):  # not where the parents are transformed
            cosines, shares = torch.cosine_similarity(stored(votes), poses.unsqueeze(1), dim=-1), weighted.shares()
            row[1] += float((cosines * shares).sum() / shares.sum())
        row[2] += 1

    layers = {name for name, x in network.named_modules() if isinstance(x, CapsuleLayer)}
    with watching(network, see), torch.no_grad():
        for batch in images.split(BATCH):
            network(batch.to(next(network.parameters(), batch)))
    curves = {}
    for name in dict.fromkeys(name for name, _ in sums):
        rows = [(float(t), row) for (other, t), row in sums.items() if other == name]
        entropies = [(t, 100 * row[0] / row[2]) for t, row in rows]
        curves[f"{name}: entropy"] = Curve("iteration", "entropy of coefficients (% of uniform)", entropies)
        curves[f"{name}: agreement"] = Curve(
            "iteration", "mean cosine of votes and parents", [(t, row[1] / row[2]) for t, row in rows]
        )
    return curves


PROTOCOL = Protocol(
    "Does it depend on its coefficients, and they on the image?",
    "Paik et al. 2019",
    ("Uniform and random coefficients train as well as several routing algorithms (Paik et al. 2019)",),
    run,
)
