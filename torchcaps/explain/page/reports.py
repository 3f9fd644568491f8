"""The content of a page: what a network does with test samples, at one or several checkpoints."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from scipy.stats import ConstantInputWarning, spearmanr
from torch import Tensor, nn

from torchcaps.data.labeled import TERMS
from torchcaps.data.order import evenly_chosen
from torchcaps.explain.coefficients import sharpening
from torchcaps.explain.controls import uniform_coefficients, with_new_weights
from torchcaps.explain.credits import credit
from torchcaps.explain.dead import dead_capsules
from torchcaps.explain.overlaps import overlaid, taken_apart
from torchcaps.explain.page.examples import SIDE, example, shown_scores
from torchcaps.explain.page.masks import about_masks, chosen, mask_example, results_of
from torchcaps.explain.page.pictures import heat_picture, picture
from torchcaps.explain.pixels import Places, heat_of, places
from torchcaps.explain.recording import Recording, record, routing_layers
from torchcaps.explain.samples import BATCH, STATISTICS, Samples
from torchcaps.explain.shares import shares_of
from torchcaps.measures.accuracy import balanced_accuracy, is_right
from torchcaps.measures.predicting import has_decoder, kind_of_scores, predict, segment
from torchcaps.measures.results import LabelResults, NumberResults, Predicted, Results
from torchcaps.utils.arguments import FloatTensor, Positive, checked
from torchcaps.utils.checks import counted, percent

VOTES = 2**29  # entries of votes that may be computed for these statistics
AT_ONCE = 2**24  # coefficients of a batch
COMPARED = 16  # images whose maps are compared with those of a control
DRAWN = 3  # how many of these are drawn
OVERLAPS = 5
RIGHT, WRONG = 10, 3  # examples: the first of each class, and mistakes

LIMITS = {
    "images": "The maps show where the capsules with a large share lie, not which pixels made them what they are: a "
    "capsule sees its whole window, and the layers before the capsules are not followed.",
    "texts": "The shares of the words are those of their tokens' capsules. The encoder before them has mixed the "
    "words: a token's capsule also knows its neighbors.",
    "arrays": "Drawn are the curves of a signal, twelve channels at most, or the middle slice of a volume in its first "
    "channel; the network was given all of it. Maps of where it looks, and changes of the input, are for images.",
}
SHARES = "A share says how much a capsule adds to a {0}, not whether the {0} would change without it."
SCORES = {"labels": "probabilities", "numbers": "numbers"}  # what the page has of these in place of scores
NO_CAPSULES = "This network has no capsule layer, so there are no coefficients, shares or poses to look at."


@checked
def report(
    network: nn.Module,
    samples: Samples,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    states: Sequence[tuple[str, Callable[[], None]]] = (),
    temperature: Positive | None = None,
    shuffled: nn.Module | None = None,
    progress: Callable[[str], None] | None = None,
    thresholds: FloatTensor | None = None,
) -> dict[str, Any]:
    """Return the content of a page about a network.

        write_page(report(network, image_samples(data, 1000), "My network"), Path("index.html"))

    Args:
        network: network that returns a `Prediction`. It is run in evaluation mode and left as it was, but with the
            weights of the last state.
        samples: test samples, see :func:`image_samples` and :func:`text_samples`.
        title: title of the page.
        facts: names and values to show, such as the recipe and the checkpoint.
        states: labels of several states of the weights, and a function for each that puts it into the network; none for
            the network as it is.
        temperature: number by which scores are divided before the softmax, so that probabilities are calibrated; None
            if it is not known.
        shuffled: the same network, trained with shuffled labels, whose maps are drawn beside.
        progress: function that is told what is computed, for long work.
        thresholds: probability above which each of several labels is predicted, `(labels,)`; None for 0.5.

    Raises:
        ValueError: the network's scores are NaN or infinite.
    """
    progress = progress or (lambda text: None)
    if samples.target == "masks":
        return _report_of_masks(network, samples, title, facts, states, progress)
    kept: list[int] = []
    snapshots: list[dict[str, Any]] = []
    for label, load in states or [("", lambda: None)]:
        load()
        progress(f"{label or 'network'}: scores of {counted(len(samples), 'sample')}")
        scores = _scores(network, samples)
        samples = samples.with_names_of(scores.shape[1])
        fewer = len(states) > 1 and samples.labels is not None
        kept = kept or _chosen(samples, scores)[: 4 if fewer else None]
        results = _results(samples, scores, thresholds)
        accuracy = _accuracy(samples, scores, results)
        snapshots.append(
            _snapshot(network, samples, label, accuracy, kept, temperature, shuffled, progress, thresholds)
        )
        if samples.labels is not None and samples.labels.dim() == 1:
            snapshots[-1]["balanced"] = balanced_accuracy(is_right(scores, samples.labels), samples.labels)
    confusion = None
    if samples.labels is not None and samples.labels.dim() == 1:
        confusion = torch.zeros(len(samples.names), len(samples.names), dtype=torch.long)
        confusion.index_put_((samples.labels, scores.argmax(1)), torch.tensor(1), accumulate=True)
    return {
        **about(network, samples, temperature, thresholds),
        "title": title,
        "facts": list(facts),
        "confusion": confusion,
        "table": None if results is None else [results.header, *results.rows],  # how well each label or number is known
        "curves": {},  # by quantity, such as "loss": lines with a `name`, `x` and `y`
        "figures": [],  # files beside the page and what they show
        "snapshots": snapshots,
    }


def _report_of_masks(
    network: nn.Module,
    samples: Samples,
    title: str,
    facts: Sequence[tuple[str, str]],
    states: Sequence[tuple[str, Callable[[], None]]],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return the content of a page about a network that segments: of its last state alone."""
    if states:
        states[-1][1]()
    progress(f"masks of {counted(min(len(samples), STATISTICS), 'sample')}")
    samples = samples.with_names_of(segment(network, samples.images([0])).shape[1])
    results, dice, some = results_of(network, samples)
    progress("examples")
    examples = [mask_example(network, samples, index) for index in chosen(dice, some)]
    snapshot = {
        "label": "",
        "accuracy": None,
        "dice": None if results is None or math.isnan(results.dice) else results.dice,  # NaN where no pixel counts
        "tested": 0 if results is None else len(some),
        "masks": examples,
    }
    return {
        **about_masks(samples.names, examples),
        "title": title,
        "facts": list(facts),
        "confusion": None,
        "table": None if results is None else [results.header, *results.rows],
        "curves": {},
        "figures": [],
        "snapshots": [snapshot | dict.fromkeys(("examples", "sharpening", "overlaps", "controls"), ())],
    }


@checked
def about(
    network: nn.Module, samples: Samples, temperature: Positive | None, thresholds: FloatTensor | None = None
) -> dict[str, Any]:
    """Return what the page says about a network beside its examples; arguments are those of :func:`report`."""
    kind = "images" if samples.are_images else "texts" if samples.words else "arrays"
    layers = _layers(network, samples)
    return {
        "classes": samples.names,
        "inputs": kind,
        "target": samples.target,
        "terms": TERMS[samples.target],
        "scores": SCORES.get(samples.target) or kind_of_scores(predict(network, samples.inputs[0])),
        "thresholds": thresholds,
        "temperature": temperature,
        "layers": layers,
        "limits": [LIMITS[kind], SHARES.format(samples.term)] if layers else [NO_CAPSULES],
    }


def _chosen(samples: Samples, scores: Tensor) -> list[int]:
    """Return the first sample of each class, and the first mistakes; without labels all samples."""
    if samples.labels is None:
        return list(range(len(samples)))
    if samples.labels.dim() > 1:
        return list(range(min(RIGHT, len(samples))))
    right = samples.first_of_each()[:RIGHT]
    wrong = (scores.argmax(1) != samples.labels).nonzero().flatten().tolist()
    return right + [index for index in wrong if index not in right][:WRONG]


def _scores(network: nn.Module, samples: Samples) -> Tensor:
    return torch.cat([shown_scores(predict(network, x), samples.target) for x, _ in samples.batches()])


def _results(samples: Samples, scores: Tensor, thresholds: Tensor | None) -> Results | None:
    """Return how well each of several labels, or each number, is predicted."""
    if samples.labels is None or samples.target == "class":
        return None
    tested = Predicted(samples.labels, scores)
    if samples.target == "numbers":
        return NumberResults(samples.names, tested, None)
    return LabelResults(samples.names, tested, None, None if thresholds is None else thresholds.tolist())


def _accuracy(samples: Samples, scores: Tensor, results: Results | None) -> float | None:
    """Return the share of samples on which the network is right; of several labels, of which it predicts exactly those
    that they have. There is none of numbers."""
    if results is not None:
        return results.metrics.get("exact_match")
    return None if samples.labels is None else float(is_right(scores, samples.labels).double().mean())


def _snapshot(
    network: nn.Module,
    samples: Samples,
    label: str,
    accuracy: float | None,
    chosen: list[int],
    temperature: float | None,
    shuffled: nn.Module | None,
    progress: Callable[[str], None],
    thresholds: Tensor | None,
) -> dict[str, Any]:
    runs = _runs(network, samples)
    seen = places(network, samples.image_shape) if samples.are_images else {}
    progress(f"{label or 'network'}: {counted(len(chosen), 'example')}")
    examples = [example(network, samples, index, seen, temperature, thresholds) for index in chosen]
    controls: list[dict[str, Any]] = []
    sharp: list[dict[str, Any]] = []
    if runs:
        progress(f"{label or 'network'}: coefficients and controls")
        few = _few(runs, samples)
        layers = sharpening(network, [inputs for inputs, _ in few])
        sharp = [{"layer": name, **values._asdict()} for name, values in layers.items()]
        controls = list(_controls(network, samples, few, accuracy, seen, shuffled, thresholds))
    return {
        "label": label,
        "accuracy": accuracy,
        "balanced": None,
        "tested": 0 if accuracy is None else len(samples),
        "sharpening": sharp,
        "examples": examples,
        "overlaps": _overlaps(network, samples),
        "controls": controls,
    }


@torch.no_grad()
def _runs(network: nn.Module, samples: Samples) -> list[Recording]:
    """Return what the capsule layers do with the first sample."""
    return record(network, samples.inputs[0])[1]


def _layers(network: nn.Module, samples: Samples) -> list[dict[str, Any]]:
    return [
        {
            "name": run.name,
            "kind": type(run.layer).__name__,
            "routing": ""
            if run.last is None
            else f"{type(run.layer.routing).__name__}({run.layer.routing.extra_repr()})",
            "children": _spelled(own.children, "groups" if own.groups else "types"),
            "parents": _spelled(own.parents, "groups" if own.groups else "types"),
        }
        for run, own in ((run, shares_of(run)) for run in _runs(network, samples))
    ]


def _spelled(layout: tuple[int, ...], kinds: str) -> str:
    if len(layout) == 1:
        return f"{layout[0]} {'groups' if kinds == 'groups' else 'capsules'}"
    return f"{layout[0]} {kinds} at {'x'.join(map(str, layout[1:]))} positions"


def _few(runs: Sequence[Recording], samples: Samples) -> list[tuple[Any, Tensor]]:
    """Return samples for statistics: few of them, in small batches, if the network has many votes."""
    votes = [run.last.votes.votes for run in runs if run.last is not None]
    pairs = max([x.batch * x.children * x.parents for x in votes], default=1)
    entries = sum(x.batch * x.children * x.parents * math.prod(x.pose) for x in votes)
    count = min(STATISTICS, max(8, VOTES // max(1, entries)))
    return samples.batches(count, max(1, min(BATCH, AT_ONCE // pairs)))


def _controls(
    network: nn.Module,
    samples: Samples,
    few: list[tuple[Any, Tensor]],
    accuracy: float | None,
    seen: dict[str, Places],
    shuffled: nn.Module | None,
    thresholds: Tensor | None,
) -> Iterator[dict[str, Any]]:
    """Yield the controls: numbers and pictures with random weights, shuffled labels or uniform routing."""
    if routing_layers(network) and accuracy is not None:
        with uniform_coefficients(network):
            scores = _scores(network, samples)
        uniform = _accuracy(samples, scores, _results(samples, scores, thresholds)) or 0.0
        yield {
            "name": "Uniform coefficients",
            "value": f"{percent(uniform)} right on {counted(len(samples), 'sample')}; {percent(accuracy)} with routing",
            "meaning": "The same weights, but routing does not choose: all coefficients are equal. The smaller the "
            "difference, the less the answers depend on the coefficients.",
        }
    if len(samples) > 1:
        shares = [
            f"{name}: {'' if x.children is None else f'{percent(x.children, 1)} of the children, '}"
            f"{'' if x.parents is None else f'{percent(x.parents, 1)} of the parents'}"
            for name, x in dead_capsules(network, few).items()
        ]
        yield {
            "name": "Dead capsules",
            "value": "; ".join(shares),
            "meaning": "A dead capsule is absent, or the same for every input: it tells nothing about any of them.",
        }
    if samples.are_images and seen:
        control = {}
        with suppress(ValueError):  # a module that cannot draw its weights anew, or shares that are not finite
            what = "this network with weights that have learned nothing"
            control = _compared(network, with_new_weights(network), samples, seen, "Weights drawn anew", what)
        if control:
            yield control
        if shuffled is not None:
            what = "a network trained with shuffled labels, which knows nothing about the classes"
            yield _compared(network, shuffled, samples, seen, "Shuffled labels", what)


def _compared(
    network: nn.Module, other: nn.Module, samples: Samples, seen: dict[str, Places], name: str, what: str
) -> dict[str, Any]:
    """Compare the maps of the predicted classes with those of another network for the same classes."""
    chosen = evenly_chosen(len(samples), COMPARED)
    images = samples.images(chosen)
    scores = predict(network, images).evidence
    classes = torch.zeros_like(scores[:, 0]).long() if samples.target == "numbers" else scores.argmax(1)
    layer = next(iter(seen))
    credits = [credit(x, images) for x in (network, other)]
    size = images.shape[2], images.shape[3]
    which = torch.arange(len(images)), classes
    own, others = (heat_of(x, seen, size)[layer][which] for x in credits)
    # On the grid of the capsules: what is interpolated between them is alike in all maps.
    grids = [next(x for x in by.layers if x.name == layer) for by in credits]
    ratios = [(x.shares.sum(2) / x.even.sum(2).clamp_min(1e-12))[which] for x in grids]
    alike, between = (_agreement(ratios[0], x) for x in (ratios[1], ratios[0].roll(1, 0)))
    peak = float(torch.stack([own[:DRAWN], others[:DRAWN]]).max())
    pictures = []
    for k in range(min(DRAWN, len(images))):
        class_ = samples.names[int(classes[k])]
        taken = f", taken for {class_}" * (samples.target == "class")
        pictures.append((picture(images[k], SIDE // 2), f"{samples.titles[chosen[k]]}{taken}"))
        pictures.append((heat_picture(own[k], peak, SIDE // 2), f"the map of {samples.term} {class_}"))
        pictures.append((heat_picture(others[k], peak, SIDE // 2), name.lower()))
    return {
        "name": name,
        "value": f"maps of the same image agree by {alike}"
        + (f"; own maps of different images by {between}" if len(images) > 1 else ""),
        "meaning": f"The same maps, made by {what}. 1 means that two maps put all places in the same order, 0 that "
        f"they have nothing in common; means over {counted(len(images), 'image')}. If the first number is near 1, the "
        "maps do not show what was learned. If it is small, they depend on the weights. This shows dependence on the "
        "weights, not the reason for an answer.",
        "pictures": pictures,
    }


def _agreement(maps: Tensor, others: Tensor) -> str:
    """Return the mean rank correlation (Spearman) of maps, pair by pair, without maps that are the same everywhere."""
    pairs = zip(*(x.flatten(1).double().cpu().numpy() for x in (maps, others)), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        values = [float(spearmanr(x, y).statistic) for x, y in pairs]
    known = [value for value in values if not math.isnan(value)]
    return f"{fmean(known):+.2f}" if known else "nothing that can be compared"


def _overlaps(network: nn.Module, samples: Samples) -> list[dict[str, Any]]:
    """Draw each class of overlapping images from its own capsule: of the samples themselves, if they show two classes
    each, or else of pairs of samples that are laid over each other."""
    if not (samples.are_images and samples.dark and has_decoder(network)) or samples.labels is None:
        return []
    if samples.labels.dim() > 1:
        pairs = (samples.labels.sum(1) == 2).nonzero().flatten().tolist()[:OVERLAPS]
        return [
            _overlap(network, samples.images([i])[0], samples.labels[i].nonzero().flatten().tolist()) for i in pairs
        ]
    order = samples.first_of_each()
    shift = max(1, samples.image_shape[2] // 14)
    overlaps: list[dict[str, Any]] = []
    for a, b in zip(order[0 : 2 * OVERLAPS : 2], order[1 : 2 * OVERLAPS : 2], strict=False):
        one, two = samples.images([a, b])
        labels = [int(samples.labels[a]), int(samples.labels[b])]
        overlap = _overlap(network, overlaid(one, two, (shift, shift)), labels)
        overlap["inputs"] = picture(one, SIDE), picture(two, SIDE)
        overlaps.append(overlap)
    return overlaps


def _overlap(network: nn.Module, image: Tensor, labels: list[int]) -> dict[str, Any]:
    apart = taken_apart(network, image)
    return {
        "image": picture(image, SIDE),
        "labels": (labels[0], labels[1]),
        "predicted": apart.classes,
        "drawn": [picture(drawn, SIDE) for drawn in apart.drawn],
    }
