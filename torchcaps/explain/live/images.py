"""The page of a network of images: draw or drop one, see its scores, shares and reconstruction."""

from collections.abc import Sequence
from typing import Any

import gradio as gr
from torch import Tensor

from torchcaps.data import DataError, ImageData
from torchcaps.explain.live.components import choice_of_images, drawing_field, pose_sliders
from torchcaps.explain.live.drawings import has_digits, read_drawing, read_upload
from torchcaps.explain.live.looking import Looking
from torchcaps.explain.live.markup import CSS, figures, note, picture
from torchcaps.utils.arguments import checked

LIKELIEST = -1
# The latest event counts: an answer to a line that has grown since is of no use.
LATEST: dict[str, Any] = {"trigger_mode": "always_last", "show_progress": "hidden", "api_visibility": "private"}


@checked
def output(name: str, value: str = "") -> gr.HTML:
    """Return a part of the page for what the network shows."""
    return gr.HTML(value, elem_id=name, css_template=CSS, js_on_load=None, apply_default_css=False)


@checked
def class_choice(names: Sequence[str], label: str) -> gr.Dropdown:
    """Return a choice of a class, or of the likeliest one."""
    choices = [("the likeliest", LIKELIEST), *((name, index) for index, name in enumerate(names))]
    return gr.Dropdown(choices, value=LIKELIEST, label=label, elem_id="class", filterable=len(names) > 20)


@checked
def image_page(looking: Looking, data: ImageData, examples: list[tuple[Tensor, str]]) -> None:
    """Add the page of a network of images to the blocks that are open, with some test images and their classes."""
    draws, drops = data.shape[0] == 1, data.shape[0] in (1, 3)
    image = gr.State(None)
    with gr.Row():
        with gr.Column(min_width=300):
            gr.Markdown(f"### {'Draw' if draws else 'Give'} an image\n{_said(data, draws, drops)}")
            field = drawing_field(draws, drops) if drops else None
            if examples:
                gr.Markdown("Or take a test image, which the network has not been trained on:")
                choice = choice_of_images([(picture(one[0]), f"test image: {name}") for one, name in examples])
        with gr.Column(min_width=300):
            gr.Markdown("### What the network says")
            scores = output("scores", note("Nothing yet."))
            gr.Markdown("### What it sees")
            seen = output("seen")
    with gr.Row():
        with gr.Column(min_width=300):
            gr.Markdown("### Where a class takes its input from")
            chosen = class_choice(looking.trained.names, "Class to look at")
            maps = output("maps")
        features = looking.pose_features
        with gr.Column(min_width=300, visible=features > 0):
            gr.Markdown(
                "### What its capsule knows\nDrawn from the pose of the class's capsule alone. Change one of the "
                f"{features} numbers of the pose, and the picture shows what it stands for."
            )
            drawn = output("drawn")
            sliders = pose_sliders(max(1, features))
    outputs = [image, seen, scores, maps, drawn]

    def look(given: Tensor | None, label: int, changes: list[float] | None) -> tuple[Any, ...]:
        if given is None:
            return None, "", note("Nothing yet."), "", ""
        shown = figures([(picture(given[0]), "the image as the network sees it", _size(given))])
        return given, shown, *looking.image(given, label, changes or [])

    def take(drawing: dict[str, str], label: int, changes: list[float] | None) -> tuple[Any, ...]:
        try:
            if url := drawing.get("file"):
                return look(read_upload(data, url, drawing.get("name", "")), label, changes)
            return look(read_drawing(data, drawing["drawing"]), label, changes)
        except DataError as error:
            raise gr.Error(str(error), print_exception=False) from None

    def pick(index: int, label: int, changes: list[float] | None) -> tuple[Any, ...]:
        return look(examples[index][0], label, changes)

    def change(given: Tensor | None, label: int, changes: list[float]) -> str:
        return "" if given is None else looking.drawn(given, label, changes)

    if field is not None:
        field.input(take, [field, chosen, sliders], outputs, **LATEST)
    if examples:
        choice.select(pick, [choice, chosen, sliders], outputs, **LATEST)
    chosen.change(look, [image, chosen, sliders], outputs, **LATEST)
    sliders.input(change, [image, chosen, sliders], drawn, **LATEST)


def _said(data: ImageData, draws: bool, drops: bool) -> str:
    height, width = data.shape[1:]
    if not drops:
        return f"The network takes images of {data.shape[0]} channels, {height}x{width} pixels."
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


def _size(image: Tensor) -> str:
    channels, height, width = image.shape[1:]
    kind = {1: "gray", 2: "a stereo pair, here its left image", 3: "in color"}.get(channels, f"{channels} channels")
    return f"{height}x{width} pixels, {kind}"
