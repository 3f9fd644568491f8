"""The page of a trained network as Gradio blocks, for `torchcaps show` and for a Hugging Face Space."""

import gradio as gr

from torchcaps.data import ImageData, TextData
from torchcaps.deploy import Trained
from torchcaps.explain.live.examples import check_ways, test_images
from torchcaps.explain.live.images import image_page
from torchcaps.explain.live.looking import Looking, Reading
from torchcaps.explain.live.texts import text_page
from torchcaps.utils.arguments import checked


@checked
def app(trained: Trained) -> gr.Blocks:
    """Build a page on which a person draws a digit, drops a picture or types a sentence, and sees what a network does.

        app(Trained.load("best.ckpt")).launch()

    It shows the scores and, for networks of capsules, where each class takes its input from. Networks with a decoder
    draw what they have seen, while sliders change the capsule's pose.

    Args:
        trained: network of images or of texts.

    Raises:
        TypeError: the network was trained on something else.
        DataError: there is no way to give the network an image, or the encoder of a network of texts cannot be found.
    """
    data = trained.data
    if not isinstance(data, (ImageData, TextData)):
        raise TypeError(f"there are pages for networks of images and of texts, and {type(data).__name__} has neither")
    examples = test_images(data) if isinstance(data, ImageData) else []
    if isinstance(data, ImageData):
        check_ways(data, examples)
    network = type(trained.network).__name__
    parameters = sum(parameter.numel() for parameter in trained.network.parameters())
    with gr.Blocks(title=f"{network} on {type(data).__name__}", analytics_enabled=False) as blocks:
        gr.Markdown(
            f"# Inside {network}\nTrained on {type(data).__name__}: {parameters:,} parameters, "
            f"{len(trained.names)} classes."
        )
        if isinstance(data, ImageData):
            image_page(Looking(trained), data, examples)
        else:
            text_page(Reading(trained), blocks)
    return blocks
