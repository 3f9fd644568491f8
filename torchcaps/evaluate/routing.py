"""Does the network depend on its coefficients, and do they depend on the image?

Procedure: in one layer at a time, and then in all, the coefficients of every iteration are replaced on the same
weights:

- uniform: by equal ones, see :func:`torchcaps.explain.controls.uniform_coefficients`;
- random: by the softmax of normal random numbers, one for each child and parent, the same for all images;
- shuffled: each child's coefficients are permuted among its parents (with a softmax over the children, each parent's
  among its children), by a permutation of its own for each image and child;
- another image's: by those that another image of the batch has at this iteration.

Each has the accuracy on 1,000 test images at most, and the share of predictions that change. A fall shows that a
trained network relies on its coefficients, not that training with routing helped: for that, train with `UniformRouting`
and compare.

By iteration, without a replacement, on 200 images at most: the entropy of the coefficients in percent of that of
uniform ones, see :func:`torchcaps.explain.sharpening`, and the mean cosine between votes and parents, weighted by the
shares of the votes.

Source: Paik et al., Capsule Networks Need an Improved Routing Algorithm, ACML 2019.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.evaluate.subject import Curve, DoesNotApply, Outcome, Protocol, Subject, percent
from torchcaps.explain.coefficients import sharpening
from torchcaps.explain.controls import uniform_coefficients
from torchcaps.explain.dynamics import poses_as_votes
from torchcaps.explain.recording import routing_layers, watching
from torchcaps.measures.predicting import inputs_for
from torchcaps.ops import StoredVotes, Votes, at_least_float32
from torchcaps.ops.computed import ComputedVotes
from torchcaps.routing import Iteration

WATCHED = 200  # images whose iterations are followed
BATCH = 20  # the votes of a batch are stored

# Changes coefficients (batch, children, parents). It is told whether they sum to one over the parents, and which
# children are absent, (batch, children) or None: over the children, coefficients contain the gates.
Change = Callable[[Tensor, bool, Tensor | None], Tensor]


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
        coefficients = at_least_float32(self.source.coefficients(agreement, softmax, leaky))
        absent = None if self.gates is None or softmax == "parents" else self.gates == 0
        return self.change(coefficients, softmax == "parents", absent)

    def capsules(self, *args: Any) -> Any:
        return self.source.capsules(*args)


@contextmanager
def changed_coefficients(layers: list[Any], change: Change) -> Iterator[None]:
    """Replace the coefficients of every iteration of some layers within this context."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            routing: Any = layer.routing
            advance = routing.advance

            def changed(votes: Votes, state: Any, t: int, advance: Any = advance) -> Any:
                return advance(ChangedVotes(votes, change), state, t)

            routing.advance = changed
            stack.callback(delattr, routing, "advance")
            stack.enter_context(routing.watched(lambda iteration: None))  # so that a pool calls `advance`
        yield


def changes(generator: torch.Generator) -> dict[str, Change]:
    """Return the changes of coefficients, by name."""
    drawn: dict[tuple[int, ...], Tensor] = {}

    def random(x: Tensor, over_parents: bool, absent: Tensor | None) -> Tensor:
        dim = 2 if over_parents else 1
        shape = (1, *x.shape[1:])
        logits = drawn.setdefault(shape, torch.randn(shape, generator=generator)).to(x)
        if absent is not None:
            logits = logits.masked_fill(absent.unsqueeze(2), -1e30)  # finite, where all are absent
        return logits.softmax(dim) * x.sum(dim, keepdim=True)

    def shuffled(x: Tensor, over_parents: bool, absent: Tensor | None) -> Tensor:
        dim = 2 if over_parents else 1
        keys = torch.rand(x.shape, generator=generator).to(x.device)
        if absent is None:
            return x.gather(dim, keys.argsort(dim))
        places = absent.unsqueeze(2).expand_as(x)  # those of present children come first, in their order
        of_present = x.gather(dim, keys.masked_fill(places, 2).argsort(dim))
        return torch.zeros_like(x).scatter(dim, places.byte().argsort(dim=dim, stable=True), of_present)

    def of_another(x: Tensor, over_parents: bool, absent: Tensor | None) -> Tensor:
        return x.roll(len(x) // 2, 0)  # half of an even number of images: windows are samples of their own

    return {"random": random, "shuffled": shuffled, "another image's": of_another}


def run(subject: Subject) -> Outcome:
    """Measure; see the module."""
    subject.need_classes()
    network = subject.network
    layers = routing_layers(network)
    if not layers:
        raise DoesNotApply("the network has no layer that routes")
    count = len(subject.images) // 2 * 2  # each image has a partner
    if not count:
        raise DoesNotApply("a single image has no other whose coefficients it could take")
    images, labels = subject.images[:count], subject.labels[:count]
    scores = _scores(subject, images)
    numbers = {"accuracy as it is (%)": percent(subject.right(scores, labels))}
    groups: dict[str, list[Any]] = {name: [layer] for name, layer in layers.items()}
    if len(groups) > 1:
        groups["all layers"] = list(layers.values())
    curves, notes = {}, []
    for name, some in groups.items():
        points: list[tuple[float | str, float]] = [("its own", numbers["accuracy as it is (%)"])]
        contexts: dict[str, Any] = {"uniform": lambda some=some: uniform_coefficients(nn.ModuleList(some))}
        if any(layer.routing.needs_poses for layer in some):
            notes.append(f"{name}: its votes are the children's poses, so that coefficients can only be made uniform")
        else:
            for what, change in changes(subject.generator()).items():
                contexts[what] = lambda change=change, some=some: changed_coefficients(some, change)
        for what, context in contexts.items():
            subject.progress(f"routing: {name}, {what} coefficients")
            with context():
                changed = _scores(subject, images)
            points.append((what, percent(subject.right(changed, labels))))
            numbers[f"{name}, {what}: accuracy (%)"] = points[-1][1]
            differ = subject.predicted(changed) != subject.predicted(scores)
            numbers[f"{name}, {what}: predictions that change (%)"] = percent(differ.view(count, -1).any(1))
        curves[f"coefficients of {name}"] = Curve("", "accuracy (%)", points)
    batches = [inputs_for(network, batch) for batch in images[:WATCHED].split(BATCH)]
    for name, values in sharpening(network, batches).items():
        if not values.even:
            continue  # a single capsule on the axis of the softmax
        share = 100 * values.entropy / values.even
        points = [(float(t), value) for t, value in enumerate(share.tolist(), 1)]
        curves[f"{name}: entropy"] = Curve("iteration", "entropy of coefficients (% of uniform)", points)
        numbers[f"{name}: entropy at last (% of uniform)"] = points[-1][1]
    for name, cosines in agreement(network, batches).items():
        points = [(float(t), value) for t, value in enumerate(cosines, 1)]
        curves[f"{name}: agreement"] = Curve("iteration", "mean cosine of votes and parents", points)
        numbers[f"{name}: cosine of votes and parents at last"] = points[-1][1]
    return Outcome(numbers, curves, notes, count)


def _scores(subject: Subject, images: Tensor) -> Tensor:
    return torch.cat([subject.scores(batch) for batch in images.split(BATCH)])


def agreement(network: nn.Module, batches: list[Any]) -> dict[str, list[float]]:
    """Return the mean cosine of votes and parents after each iteration of each layer, weighted by the shares of the
    votes. Layers whose parents are no sums of votes are left out."""
    sums: dict[str, dict[float, list[Tensor]]] = {}
    layers: dict[str, Any] = routing_layers(network)

    def see(name: str, iteration: Iteration) -> None:
        if layers[name].routing.needs_poses:
            return
        votes, shares = iteration.votes.votes, iteration.votes.shares()
        poses = poses_as_votes(iteration.parents, votes)
        cosines = torch.cosine_similarity(stored(votes), poses.unsqueeze(1), dim=-1)
        both = torch.stack([(cosines * shares).sum(), shares.sum()]).double().cpu()
        sums.setdefault(name, {}).setdefault(iteration.t, []).append(both)

    with watching(network, see), torch.no_grad():
        for batch in batches:
            network(batch)
    totals = {name: [torch.stack(rows).sum(0) for rows in by_t.values()] for name, by_t in sums.items()}
    return {name: [float(total[0] / total[1]) for total in rows] for name, rows in totals.items()}


PROTOCOL = Protocol(
    "Does it depend on its coefficients, and they on the image?",
    ("Uniform and random coefficients train as well as several routing algorithms (Paik et al. 2019)",),
    run,
    max_images=1000,
)
