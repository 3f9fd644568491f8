"""The page of a trained network as Gradio blocks, for `torchcaps show` and for a Hugging Face Space.

What the network does with an input is drawn by the scripts of :mod:`torchcaps.explain.page`, as on its page.
"""

import re
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

import gradio as gr
import numpy as np
import torch
import torch.nn.functional as F

from torchcaps.data import DataError, ImageData, MaskFolder, TextData
from torchcaps.data.labeled import TERMS
from torchcaps.data.notes import hear
from torchcaps.data.pictures import as_tensor
from torchcaps.deploy.predict import predict_masks
from torchcaps.explain.page import Samples, samples_of
from torchcaps.explain.page.examples import example
from torchcaps.explain.page.masks import about_masks, mask_example
from torchcaps.explain.page.pictures import picture
from torchcaps.explain.page.reports import about
from torchcaps.explain.page.writing import EXAMPLE_SCRIPTS, as_plain, read
from torchcaps.explain.pixels import Places, places
from torchcaps.explain.samples import picture_samples
from torchcaps.explain.segmentation import overlay
from torchcaps.explain.words import LoadedEncoder, words_of
from torchcaps.live.drawings import LARGEST, has_digits, read_drawing, uploaded
from torchcaps.live.examples import test_images
from torchcaps.runs import Run
from torchcaps.utils.arguments import CountOrZero, checked
from torchcaps.utils.checks import counted

FIRST = "A slow start, but in the end a warm and funny film."
LONGEST = 10_000  # characters of a text
THUMBNAIL = 58  # pixels of a test image to choose
MOST_PIXELS = 2**22  # in all tiles of a picture
SHOWN = 512  # pixels of the longer side of what is shown of such a picture
# The latest event counts: an answer to a line that has grown since is of no use.
LATEST: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", "api_visibility": "private"}
# The style of the page, inside of one part of Gradio's page, which says by a class whether it is dark.
DARK = (
    "margin: -8px -12px; font-size: 1rem; color: var(--text); --ground: var(--body-background-fill);\n"
    ".dark & { color-scheme: dark; }\n"
)


@checked
def app(run: Run) -> gr.Blocks:
    """Build a page on which a person draws a digit, drops a picture or types a sentence, and sees what a network does.

        app(Run.find("best.ckpt")).launch()

    It shows what the page of `torchcaps explain` shows of an example: probabilities or activations and, for networks
    of capsules, where each class takes its input from, its parse tree, and what its pose stands for. For a network
    that segments it shows the class of each pixel.

    Args:
        run: run of a network of images or of texts.

    Raises:
        TypeError: the network was trained on something else.
        DataError: there is no way to give the network an image, or the encoder of a network of texts cannot be found.
    """
    data = run.data()
    if not isinstance(data, (ImageData, TextData)):
        raise TypeError(f"there are pages for networks of images and of texts, and {type(data).__name__} has neither")
    looking = Looking(run)
    images = test_images(data) if isinstance(data, ImageData) else None
    if isinstance(data, ImageData) and data.shape[0] not in (1, 3) and images is None:
        raise DataError(
            f"the network takes images of {data.shape[0]} channels, which nobody can draw, and there are no test "
            f"images of {type(data).__name__} on this machine: test the network first"
        )
    network = run.network_name
    parameters = sum(parameter.numel() for parameter in run.network().parameters())
    with gr.Blocks(title=f"{network} on {data.title}", analytics_enabled=False) as blocks:
        gr.Markdown(
            f"# Inside {_as_markdown(network)}\nTrained on {_as_markdown(data.title)}: {parameters:,} parameters, "
            f"{counted(len(run.names), *TERMS[run.target])}."
        )
        if isinstance(data, ImageData):
            _image_page(looking, data, images, blocks)
        else:
            _text_page(looking, data, blocks)
    return blocks


def _as_markdown(text: str) -> str:
    """Return Markdown that shows a text as it is, such as the name of a folder, which may look like code."""
    return re.sub(r"[!-/:-@\[-`{-~]", r"\\\g<0>", " ".join(text.split()))


class Looking:
    """A trained network that is looked into, by one thread at a time: Gradio handles events in several threads.

    Args:
        run: the run of the network.
    """

    @checked
    def __init__(self, run: Run) -> None:
        self.run = run
        self.lock = RLock()

    @cached_property
    def seen(self) -> dict[str, Places]:
        """Which pixels the capsules see, by layers that have them on a grid."""
        data = self.run.data()
        return places(self.run.network(), data.shape) if isinstance(data, ImageData) else {}

    @checked
    def answer(self, samples: Samples, index: CountOrZero = 0) -> Any:
        """Return what the page shows of one sample, as values of JSON."""
        network, temperature = self.run.network(), self.run.temperature
        thresholds = self.run.thresholds if self.run.target == "labels" else None
        with self.lock:
            if samples.target == "masks":
                return _of_masks(samples.names, mask_example(network, samples, index))
            return as_plain(
                {
                    "report": about(network, samples, temperature, thresholds),
                    "example": example(network, samples, index, self.seen, temperature, thresholds),
                }
            )

    @checked
    def answer_file(self, url: str, name: str) -> Any:
        """Return what the page shows of a picture file from a data URL, with what is to be said of the file.

        Raises:
            DataError: the picture cannot be read, or has many tiles.
        """
        data: Any = self.run.data()
        with hear() as notes, uploaded(url, name) as path:
            if isinstance(data, MaskFolder) and data.tiled:
                answer = self._of_tiles(data, path, name)
            else:
                answer = self.answer(replace(picture_samples(data, [path]), titles=[name]))
        answer["report"]["limits"] += notes
        return answer

    def _of_tiles(self, data: MaskFolder, path: Path, name: str) -> Any:
        most = max(1, MOST_PIXELS // data.shape[1] ** 2)
        if len([*islice(data.tiles(path), most + 1)]) > most:
            raise DataError(f"{name} has more than {most:,} tiles: use torchcaps predict")
        with self.lock:
            ((_, mask),) = predict_masks(self.run, [path])
        upright = data.upright(path)
        upright.thumbnail((SHOWN, SHOWN))
        drawn = [("image", upright), ("prediction", overlay(upright, _shrunk(mask, upright.size)))]
        pictures = [(picture(as_tensor(image) / 255, SHOWN), of) for of, image in drawn]
        return _of_masks(data.names, {"title": name, "dice": None, "pictures": pictures})


def _shrunk(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return a mask of another width and height: a pixel has the class that is most of its place, among those with a
    color, so that small things stay in sight."""
    classes, (width, height) = torch.from_numpy(mask), size
    small, most = torch.zeros(height, width, dtype=torch.uint8), torch.zeros(height, width)
    for k in classes[classes > 0].unique().tolist():
        share = F.adaptive_avg_pool2d((classes == k).float()[None], (height, width))[0]
        small[share > most] = k
        most = most.maximum(share)
    return small.numpy()


def _of_masks(names: list[str], of_sample: dict[str, Any]) -> Any:
    return as_plain({"report": about_masks(names, [of_sample]), "example": of_sample})


def _part(name: str, script: str, **properties: Any) -> gr.HTML:
    """Return a part of the page that scripts draw, in the style of the page."""
    # Gradio runs what it fills into a template as JavaScript. Texts are passed as properties; scripts make
    # text nodes of them.
    return gr.HTML(
        html_template="",
        css_template=read("parts.css").replace(":root", "&", 1) + DARK,
        js_on_load=script,
        apply_default_css=False,
        elem_id=name,
        **properties,
    )


def _answer(*ways: str) -> gr.HTML:
    """Return the part with what the network does; without an input it says in which ways to give one."""
    script = "\n".join(read(f"{name}.js") for name in (*EXAMPLE_SCRIPTS, "masks", "live"))
    return _part("answer", script, value=None, ways=ways)


def _image_page(looking: Looking, data: ImageData, images: Samples | None, blocks: gr.Blocks) -> None:
    """Add the page of a network of images to blocks, which are open. It begins with the first of some test images."""
    draws, drops = data.shape[0] == 1, data.shape[0] in (1, 3)
    ways = {"draw an image": draws, "choose a picture": drops, "take a test image": images is not None}
    shown = [] if images is None else zip(images.inputs, images.titles, strict=True)
    with gr.Row():
        with gr.Column(min_width=300, scale=1):
            gr.Markdown(f"### {'Draw' if draws else 'Give'} an image\n{_how_to_give(data, draws, drops)}")
            field = _part(
                "field",
                read("base.js") + read("drawing.js"),
                draws=draws,
                drops=drops,
                megabytes=LARGEST,
                value=None if images is None else {"test": 0},
                images=[(picture(image[0], THUMBNAIL), title) for image, title in shown],
            )
        with gr.Column(min_width=300, scale=3):
            gr.Markdown("### What the network does with it")
            answer = _answer(*(way for way, there_is in ways.items() if there_is))

    def look(given: dict[str, Any]) -> Any:
        try:
            if "test" in given:
                if images is None or not 0 <= given["test"] < len(images):
                    raise DataError(f"there is no test image {given['test']}: reload the page")
                return looking.answer(images, given["test"])
            name = given.get("name") or "your drawing"
            if "file" in given:
                return looking.answer_file(given["file"], name)
            image = read_drawing(data, given["drawing"])
            return None if image is None else looking.answer(samples_of(image, None, data.names, [name], data.target))
        except DataError as error:
            raise gr.Error(str(error), print_exception=False) from None

    gr.on([field.input] if images is None else [field.input, blocks.load], look, field, answer, **LATEST)


def _how_to_give(data: ImageData, draws: bool, drops: bool) -> str:
    height, width = data.shape[1:]
    if not drops:
        return f"The network takes images of {data.shape[0]} channels, {height}x{width} pixels."
    if isinstance(data, MaskFolder) and data.tiled:
        return f"The network sees pictures in tiles of {height}x{width} pixels, as in `torchcaps predict`."
    if not draws:
        return f"Pictures are made {height}x{width} pixels large, as by `torchcaps predict`."
    if not has_digits(data):
        return f"Draw with the mouse or a finger, or drop a picture. Both are made {height}x{width} pixels large."
    how = "scaled into 20x20 pixels and centered by its mass, as in MNIST"
    if height < 28:
        how = "scaled to fill them, which is not how these data were made: expect mistakes"
    return (
        f"Draw with the mouse or a finger. The network sees {height}x{width} pixels: the digit is {how}. A picture "
        "that you drop is only made as small; it should be a light digit on black."
    )


def _text_page(looking: Looking, data: TextData, blocks: gr.Blocks) -> None:
    """Add the page of a network of texts to blocks, which are open."""
    encoder = LoadedEncoder.of(data)
    text = gr.Textbox(FIRST, lines=3, max_length=LONGEST, label="Write a text", elem_id="text")
    answer = _answer("write a text")

    def look(given: str) -> Any:
        if not given.strip():
            return None
        try:
            if len(given) > LONGEST:
                raise DataError(f"the text has more than {LONGEST:,} characters: give a shorter one")
            with looking.lock:
                states, mask = encoder.states(given)
                words = [words_of(encoder, given)]
                samples = Samples([(states.float(), mask)], None, data.names, [given], words, target=data.target)
            return looking.answer(samples)
        except DataError as error:
            raise gr.Error(str(error), print_exception=False) from None

    gr.on([text.input, blocks.load], look, text, answer, **LATEST)
