"""Makes the figures of docs/gallery.md from the weights of the package and from runs that retrain in minutes.

python docs/gallery.py --commands      # prints the commands that train the runs, with $TORCHCAPS_RUNS for the folder
python docs/gallery.py --runs runs     # draws the figures; writes networks and accuracies into the page
"""

import argparse
import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import torchcaps.models
from torchcaps import create_model, explain
from torchcaps.data import CIFAR10, MNIST, AffineMNIST, ImageData
from torchcaps.explain.overlaps import taken_apart
from torchcaps.explain.words import LoadedEncoder, word_shares, words_of
from torchcaps.measures.axes import BLUE, ORANGE, VERMILLION, Row, in_style, panels_figure
from torchcaps.runs import Run
from torchcaps.utils.files import write_text_whole, write_whole

DOCS = Path(__file__).parent
EPOCHS = "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.save_top_k=-1"  # keeps a checkpoint of each
RUNS = {  # recipes in their small versions, with overrides
    "overlaps": (
        "sabour2017/table1/multimnist",
        "--model capsnet_small --model.network.image_size 36 --trainer.max_steps 3000 "
        "--model.scheduler.total_steps 3000",
    ),
    "li": (
        "li2018/table1/cifar10-capnet-dynamic",
        "--model.network.types 4 --model.network.grid 2 --trainer.max_steps 1000 --model.scheduler.total_steps 1000 "
        f"--trainer.max_epochs 5 --trainer.limit_train_batches 200 {EPOCHS}",
    ),
    "tsai": ("tsai2020/table1/cifar10-attention", ""),
    "toys": ("heinsen2019/table1/heinsen", ""),
    "words": ("heinsen2019/table3/heinsen", "--data.phrases false"),
}
BLOCK = re.compile(r"(<!-- network of ([\w-]+), written by gallery.py -->\n).*?(<!-- end -->\n)", re.DOTALL)


class Network(NamedTuple):
    """A trained network, its data, and how it is trained again."""

    network: Any
    data: Any
    facts: str
    command: str


def packaged(model: str, weights: str, data: ImageData) -> Network:
    """Return a network with weights of the package; their card says how good it is."""
    card = (Path(torchcaps.models.__file__).parent / "weights" / f"{model}.{weights}.md").read_text(encoding="utf-8")
    facts = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", card, flags=re.MULTILINE))
    accuracy = facts["test accuracy"].partition("%")[0]
    parameters = facts["network"].rpartition(": ")[2]
    said = f'`create_model("{model}", pretrained="{weights}")`, {parameters}: test accuracy {accuracy} %'
    return Network(create_model(model, pretrained=weights).eval(), data, said, facts["command"].strip("`"))


def command(key: str) -> str:
    recipe, overrides = RUNS[key]
    return f"torchcaps train {recipe} --small {overrides}".rstrip()


def checkpoints(runs: Path, key: str, pattern: str = "last.ckpt") -> list[Path]:
    """Return the checkpoints of the newest run, from the first step to the last."""
    versions = (runs / f"{RUNS[key][0]}-small").glob("version_*")
    by_number = sorted(versions, key=lambda x: int(x.name.removeprefix("version_")))
    found = [sorted(version.glob(f"checkpoints/{pattern}")) for version in by_number]
    found = [paths for paths in found if paths]
    if not found:
        raise SystemExit(f"{runs} has no run of {RUNS[key][0]}: {command(key)}")
    return sorted(found[-1], key=lambda path: [int(number) for number in re.findall(r"step=(\d+)", path.name)])


def trained(runs: Path, key: str) -> Network:
    """Return the network of the newest run, with the accuracy that the run logged."""
    (path,) = checkpoints(runs, key)
    found = Run.find(path)
    tests: list[dict[str, str]] = []
    for metrics in path.parent.parent.parent.glob("version_*/metrics.csv"):
        if metrics.stat().st_mtime >= path.stat().st_mtime:  # also of a version that went on and only tested
            with metrics.open(encoding="utf-8", newline="") as file:
                tests += [row for row in csv.DictReader(file) if row.get("test/accuracy")]
    if not tests:
        raise SystemExit(f"{path.parent.parent} has no test accuracy: torchcaps test {RUNS[key][0]} --small")
    accuracy, steps = 100 * float(tests[-1]["test/accuracy"]), found.checkpoint.step
    parameters = sum(parameter.numel() for parameter in found.network().parameters())
    said = f"`{RUNS[key][0]} --small`, {parameters:,} parameters: test accuracy {accuracy:.1f} % after {steps:,} steps"
    return Network(found.network(), found.data(), said, command(key))


def one_per_class(data: ImageData) -> tuple[Tensor, Tensor]:
    """Return the first test image of each class, and the labels."""
    data.setup("test")
    part: Any = data.part("test")
    found: dict[int, Tensor] = {}
    for index in range(200):
        image, label = part[index][:2]
        found.setdefault(int(label), image)
    labels = sorted(found)
    return data.center(torch.stack([found[label] for label in labels])), torch.tensor(labels)


def credits_of(of: Network) -> Figure:
    return explain.credit_figure(
        of.network, *one_per_class(of.data), [name.partition(" ")[0] for name in of.data.names]
    )


def overlaps(of: Network) -> Figure:
    """Draw images of two digits above what the capsules of the two highest-scoring classes draw (Sabour et al. 2017,
    Figure 5)."""
    of.data.setup("test")
    images, labels, *_ = next(iter(of.data.test_dataloader()))
    pairs = labels[:8].nonzero()[:, 1].view(8, 2).tolist()
    rows = [Row(list(images[:8]), [f"{a} and {b}" for a, b in pairs], label="input")]
    apart = [taken_apart(of.network, image) for image in images[:8]]
    for place, label in enumerate(("drawn from\none capsule", "drawn from\nthe other")):
        at = [int(found.classes.argsort()[place]) for found in apart]  # the lower class above
        classes = [int(found.classes[index]) for found, index in zip(apart, at, strict=True)]
        wrong = [class_ not in pair for class_, pair in zip(classes, pairs, strict=True)]
        titles = [f"seen: {class_}{', wrong' * error}" for class_, error in zip(classes, wrong, strict=True)]
        styles = [{"color": VERMILLION} if error else {} for error in wrong]
        rows.append(Row([found.drawn[index] for found, index in zip(apart, at, strict=True)], titles, styles, label))
    return panels_figure(rows, "Two digits over each other, and what the two likeliest class capsules draw")


def dynamics(of: Network, paths: list[Path]) -> Figure:
    of.data.setup("test")
    part = of.data.part("test")
    images = of.data.center(torch.stack([part[index][0] for index in range(128)]))
    layers = explain.capsule_layers(of.network)
    rows: dict[str, list[Any]] = {name: [] for name in layers}
    for epoch, path in enumerate(paths, 1):
        network = Run.find(path).network()
        for name in layers:
            rows[name].append((f"after epoch {epoch}", explain.routing_dynamics(network, name, [images])))
    return explain.routing_dynamics_figure(list(rows.values()), layers)


@in_style
def review(of: Network) -> Figure:
    """Draw what the two likeliest classes take from each word of the first test text with 10 to 16 words."""
    texts, _ = of.data.read("test")
    text = next(text for text in texts if 10 <= len(text.split()) <= 16)
    encoder = LoadedEncoder.of(of.data)
    words = words_of(encoder, text)
    states, mask = encoder.embed([text]).padded([0])
    found = explain.credit(of.network, (states.float(), mask))
    shares = word_shares(words, found.layers[0].shares, states.shape[2])[0]
    figure = Figure(figsize=(6.5, 0.3 * len(words) + 1.2))
    axis = figure.subplots()
    styles: tuple[dict[str, Any], ...] = ({"color": BLUE}, {"facecolor": "w", "edgecolor": ORANGE, "hatch": "////"})
    two = found.prediction.evidence[0].topk(2).indices.tolist()
    for offset, class_, style in zip((-0.2, 0.2), two, styles, strict=True):
        places = [place + offset for place in range(len(words))]
        axis.barh(places, (100 * shares[class_]).tolist(), height=0.36, label=of.data.names[class_], **style)
    axis.set_yticks(range(len(words)), [word.text for word in words])
    axis.invert_yaxis()
    axis.set(xlabel="share in the class, %")
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")
    figure.legend(title="What the two classes take from each word", loc="outside upper center", ncols=2)
    return figure


def pictures(runs: Path) -> Iterator[tuple[str, Network, Callable[[], Figure]]]:
    """Yield the name of each picture, its network, and a function that draws it."""
    digits = packaged("capsnet_small", "mnist", MNIST())
    images, labels = one_per_class(digits.data)
    yield "sabour-reconstructions", digits, lambda: explain.reconstructions_figure(digits.network, images, labels)
    yield "sabour-pose", digits, lambda: explain.perturbations_figure(digits.network, images[5], 5)
    two = trained(runs, "overlaps")
    yield "sabour-overlaps", two, lambda: overlaps(two)

    photos = packaged("pooling_resnet_small", "cifar10", CIFAR10(check_hashes=False))
    shown, _ = one_per_class(photos.data)
    yield "zhao-pool", photos, lambda: explain.heatmaps_figure(photos.network, shown, photos.data.names)
    affine = packaged("resnet_capsnet_small", "affine-mnist", AffineMNIST())
    yield "zhao-credit", affine, lambda: credits_of(affine)

    li = trained(runs, "li")
    yield "li-dynamics", li, lambda: dynamics(li, checkpoints(runs, "li", "epoch=*.ckpt"))
    yield "li-credit", li, lambda: credits_of(li)

    tsai = trained(runs, "tsai")
    yield "tsai-credit", tsai, lambda: credits_of(tsai)

    toys = trained(runs, "toys")
    angles: tuple[Literal["elevation", "azimuth"], ...] = ("elevation", "azimuth")
    paths = [explain.pose_trajectories(toys.network, toys.data, angle) for angle in angles]
    yield "heinsen-trajectories", toys, lambda: explain.pose_trajectories_figure(paths, toys.data.names)
    yield "heinsen-elevation", toys, lambda: explain.relative_changes_figure(paths[0], toys.data.names)
    words = trained(runs, "words")
    yield "heinsen-words", words, lambda: review(words)


@in_style
def write_small(figure: Figure, path: Path) -> None:
    """Write a figure in 256 colors, which makes its file small."""
    written = io.BytesIO()
    figure.savefig(written, dpi=85)
    with Image.open(written) as image:
        full = image.convert("RGB")
    colors = full.quantize(method=Image.Quantize.FASTOCTREE)
    few = full.quantize(palette=colors, dither=Image.Dither.FLOYDSTEINBERG)
    write_whole(path, lambda unfinished: few.save(unfinished, optimize=True))


def main() -> None:
    """Draw all figures and write what their networks are into the page, or print the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--commands", action="store_true", help="print the commands that train the runs")
    options = parser.parse_args()
    if options.commands:
        print(*map(command, RUNS), sep="\n")
        return
    said: dict[str, str] = {}  # by the first picture of each network
    commands: set[str] = set()
    for name, of, draw in pictures(options.runs):
        path = DOCS / "figures" / "gallery" / f"{name}.png"
        write_small(draw(), path)
        print(f"figure: {path}, {path.stat().st_size // 1000} kB", flush=True)
        if of.command not in commands:
            said[name] = f"{of.facts}:\n\n    {of.command}\n\n"
        commands.add(of.command)
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    found = BLOCK.findall(page)
    if {name for _, name, _ in found} != set(said):
        raise SystemExit(f"docs/gallery.md describes other networks than those of {', '.join(said)}")
    write_text_whole(DOCS / "gallery.md", BLOCK.sub(lambda block: block[1] + said[block[2]] + block[3], page))


if __name__ == "__main__":
    main()
