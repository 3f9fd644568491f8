"""What the page shows, as HTML: pictures with descriptions, bars of scores, shaded words."""

import base64
import html
import io
from collections.abc import Sequence

import matplotlib
import torch
from PIL import Image
from torch import Tensor

from torchcaps.explain.axes import HEAT, SMALL
from torchcaps.explain.words import Word
from torchcaps.utils.arguments import Count, FloatTensor, checked

LARGE = 224  # pixels; smaller pictures are enlarged to this, so that a person sees strokes and not squares
MOST = 12  # classes of which bars are shown
DARKEST = 3.0  # share of the darkest words, as a multiple of an even one

CSS = """
margin: -8px -12px;  /* Gradio's own padding, without which all parts begin at the same line */
figure { margin: 0; color: var(--body-text-color); width: 10.5rem; max-width: 46%; }
figure img { width: 100%; display: block; border-radius: 4px; background: #000; }
figcaption, .note { font-size: 0.85rem; line-height: 1.3; opacity: 0.8; margin: 0.3rem 0; }
.figures { display: flex; flex-wrap: wrap; gap: 0.9rem; }
.bars { width: 100%; border-collapse: collapse; }
.bars caption { text-align: left; padding-bottom: 0.3rem; }
.bars th { text-align: left; font-weight: normal; padding: 2px 0.6rem 2px 0; white-space: nowrap; }
.bars td { padding: 2px 0; }
.bars td.bar { width: 100%; }
.bars td.number { padding-left: 0.6rem; text-align: right; font-variant-numeric: tabular-nums; }
.bars .fill { height: 0.9rem; min-width: 1px; border-radius: 2px; background: #0072b2; }
.bars tr.likeliest th, .bars tr.likeliest td.number { font-weight: 700; }
.words { font-size: 1.15rem; line-height: 2.1; white-space: pre-wrap; overflow-wrap: anywhere; }
.words mark { color: inherit; background: rgba(230, 159, 0, var(--share)); border-radius: 3px; padding: 0.15rem 0; }
"""


# Gradio fills a template in by Handlebars and then evaluates it as a template literal of JavaScript.
ENTITIES = {ord(sign): f"&#{ord(sign)};" for sign in "{}$`\\@"}


@checked
def escaped(text: str) -> str:
    """Return text as HTML that Gradio's templates leave as it is."""
    return html.escape(text).translate(ENTITIES)


@checked
def note(text: str) -> str:
    """Return a sentence as HTML."""
    return f'<p class="note">{escaped(text)}</p>'


@checked
def figures(pictures: Sequence[tuple[str, str, str]]) -> str:
    """Return pictures in a row as HTML; each is a data URL, a description for who cannot see it, and a caption."""
    found = (
        f'<figure><img src="{url}" alt="{escaped(alt)}"><figcaption>{escaped(caption)}</figcaption></figure>'
        for url, alt, caption in pictures
    )
    return f'<div class="figures">{"".join(found)}</div>'


@checked
def picture(image: FloatTensor) -> str:
    """Return an image `(channels, height, width)` in [0, 1] as a data URL; of a stereo pair the left one is drawn."""
    image = image[:1] if len(image) == 2 else image
    pixels = (image.detach().clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).cpu().numpy()
    drawn = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    if max(drawn.size) < SMALL:
        scale = LARGE / max(drawn.size)
        drawn = drawn.resize((round(drawn.width * scale), round(drawn.height * scale)), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    drawn.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@checked
def heated(image: FloatTensor, heat: FloatTensor, peak: float) -> Tensor:
    """Return an image `(channels, height, width)` under a map of shares `(height, width)`, in color.

    The map's color is black at 0 and light at `peak`; the image shines through in gray.
    """
    gray = image[:1] if len(image) == 2 else image.mean(0, keepdim=True)
    colors = torch.from_numpy(matplotlib.colormaps[HEAT]((heat / max(peak, 1e-12)).clamp(0, 1).cpu().numpy())[..., :3])
    return 0.75 * colors.movedim(-1, 0).float() + 0.25 * gray.cpu().float()


@checked
def bars(names: Sequence[str], values: FloatTensor, caption: str, likeliest: Count = 1) -> str:
    """Return bars of values in [0, 1] with their names as HTML: all in their order, or the highest if they are many."""
    order = values.argsort(descending=True).tolist()
    rows = []
    for index in range(len(names)) if len(names) <= MOST else order[:MOST]:
        value = float(values[index])
        kind = ' class="likeliest"' if index in order[:likeliest] else ""
        rows.append(
            f'<tr{kind}><th scope="row">{escaped(names[index])}</th><td class="bar"><div class="fill" '
            f'style="width: {100 * min(max(value, 0), 1):.1f}%"></div></td><td class="number">{value:.2f}</td></tr>'
        )
    return f'<table class="bars"><caption>{escaped(caption)}</caption>{"".join(rows)}</table>'


@checked
def shaded(text: str, words: Sequence[Word], times: FloatTensor) -> str:
    """Return a text as HTML whose words are shaded by their shares as multiples of even ones, `(words,)`; the darkest
    have DARKEST or more."""
    parts, end = [], 0
    for word, ratio in zip(words, times.tolist(), strict=True):
        parts.append(escaped(text[end : word.start]))
        end = word.start + len(word.text)
        parts.append(
            f'<mark style="--share: {0.85 * min(1.0, ratio / DARKEST):.3f}" title="{ratio:.1f} times an even share">'
            f"{escaped(word.text)}</mark>"
        )
    return f'<p class="words">{"".join(parts)}{escaped(text[end:])}</p>'
