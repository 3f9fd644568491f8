"""The page of a network of texts: type one, see its scores and which words a class used."""

import gradio as gr

from torchcaps.data import DataError
from torchcaps.explain.live.images import LATEST, class_choice, output
from torchcaps.explain.live.looking import Reading
from torchcaps.explain.live.markup import note
from torchcaps.utils.arguments import checked

FIRST = "A slow start, but in the end a warm and funny film."


@checked
def text_page(reading: Reading, blocks: gr.Blocks) -> None:
    """Add the page of a network of texts to blocks, which are open."""
    with gr.Row():
        with gr.Column(min_width=300):
            gr.Markdown("### Write a text")
            text = gr.Textbox(FIRST, lines=3, label="Text", elem_id="text")
            chosen = class_choice(reading.trained.names, "Class to look at")
        with gr.Column(min_width=300):
            gr.Markdown("### What the network says")
            scores = output("scores")
    gr.Markdown("### Which words the class used")
    words = output("words")

    def look(given: str, label: int) -> tuple[str, str]:
        if not given.strip():
            return note("Nothing yet."), ""
        try:
            return reading.text(given, label)
        except DataError as error:
            raise gr.Error(str(error), print_exception=False) from None

    gr.on([text.input, chosen.change, blocks.load], look, [text, chosen], [scores, words], **LATEST)
