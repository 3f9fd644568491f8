"""Parts of the page that Gradio does not have: a field to draw in, test images to choose from, sliders of a pose.

Gradio's own sketchpad needs WebGL, keeps every stroke as a file, and wants a tool to be chosen before one can draw.
What these parts tell is their value, not the data of an event: Gradio runs an event that waited for another one again
with the other one's data.
"""

from collections.abc import Sequence

import gradio as gr

from torchcaps.explain.live.drawings import LARGEST
from torchcaps.explain.live.markup import escaped
from torchcaps.utils.arguments import Count, checked

SIDE = 280  # pixels of the field
BRUSH = 22  # pixels: MNIST's lines are as thick if a digit fills most of the field
REACH = 0.25  # largest change of a pose's entry, as in Sabour et al. 2017, Figure 4
STEP = 0.05

BUTTON = """
margin: -8px -12px;
button, label.button { cursor: pointer; padding: 0.35rem 0.8rem; font: inherit; line-height: 1.4;
  border: 1px solid var(--border-color-primary); border-radius: 6px;
  background: var(--button-secondary-background-fill); color: var(--button-secondary-text-color); }
button:focus-visible, label.button:focus-within { outline: 2px solid #0072b2; outline-offset: 2px; }
"""


@checked
def drawing_field(draws: bool, drops: bool) -> gr.HTML:
    """Return a field to draw in (if `draws`), on which a picture can be dropped (if `drops`).

    Its value at the event `input` has `drawing`, a PNG as data URL; or `file`, a dropped picture as data URL, and its
    `name`.
    """
    canvas = (
        f'<canvas width="{SIDE}" height="{SIDE}" role="img" aria-label="field to draw in, with the mouse or a finger">'
        "</canvas>"
        if draws
        else '<p class="target">Drop a picture here</p>'
    )
    clear = '<button type="button" class="clear">Clear</button>' if draws else ""
    choose = '<label class="button">Choose a picture<input type="file" accept="image/*"></label>' if drops else ""
    return gr.HTML(
        html_template=f'<div class="field">{canvas}<div class="row">{clear}{choose}</div></div>',
        css_template=BUTTON
        + """
        canvas { width: 280px; max-width: 100%; height: auto; aspect-ratio: 1; touch-action: none; cursor: crosshair;
          background: #000; border-radius: 6px; border: 1px solid var(--border-color-primary); display: block; }
        .target { width: 280px; max-width: 100%; padding: 3rem 1rem; text-align: center; border-radius: 6px;
          border: 2px dashed var(--border-color-primary); margin: 0; }
        .row { display: flex; gap: 0.5rem; align-items: center; margin-top: 0.6rem; }
        label.button input { position: absolute; width: 1px; height: 1px; opacity: 0; }
        """,
        js_on_load=DRAWING.replace("BRUSH", str(BRUSH)).replace("LARGEST", str(LARGEST)),
        apply_default_css=False,
        elem_id="drawing",
    )


@checked
def choice_of_images(images: Sequence[tuple[str, str]]) -> gr.HTML:
    """Return buttons with images, each a data URL and its description; its value at the event `select` is the index."""
    # Texts are no properties for Handlebars: what it fills in is evaluated as JavaScript.
    buttons = (
        f'<button type="button" data-index="{index}">'
        f'<img src="{escaped(url)}" alt="{escaped(alt)}" title="{escaped(alt)}"></button>'
        for index, (url, alt) in enumerate(images)
    )
    return gr.HTML(
        html_template=f'<div class="images">{"".join(buttons)}</div>',
        css_template=BUTTON
        + """
        .images { display: flex; flex-wrap: wrap; gap: 4px; max-width: 290px; }
        button { padding: 2px; line-height: 0; }
        img { width: 46px; height: 46px; object-fit: cover; border-radius: 4px; }
        """,
        js_on_load="""
        element.addEventListener('click', event => {
          const button = event.target.closest('button');
          if (!button) return;
          props.value = Number(button.dataset.index);
          trigger('select');
        });
        """,
        apply_default_css=False,
        elem_id="images",
    )


@checked
def pose_sliders(features: Count) -> gr.HTML:
    """Return a slider for each entry of a pose; its value at the event `input` is a list of numbers."""
    return gr.HTML(
        dimensions=list(range(1, features + 1)),
        html_template='<div class="pose">{{#each dimensions}}<label><span>{{this}}</span><input type="range" '
        f'min="-{REACH}" max="{REACH}" step="{STEP}" value="0" aria-label="pose dimension '
        '{{this}}"><output>0</output></label>{{/each}}</div>'
        '<button type="button">Back to the capsule\'s own pose</button>',
        css_template=BUTTON
        + """
        .pose { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 0.15rem 1.2rem;
          margin-bottom: 0.6rem; }
        label { display: flex; align-items: center; gap: 0.5rem; min-height: 1.9rem; }
        label span { width: 1.4rem; text-align: right; }
        input { flex: 1; min-width: 0; accent-color: #0072b2; }
        output { width: 2.6rem; font-variant-numeric: tabular-nums; }
        """,
        js_on_load="""
        const sliders = [...element.querySelectorAll('input')];
        function tell() {
          for (const slider of sliders)
            slider.nextElementSibling.textContent = (slider.value > 0 ? '+' : '') + Number(slider.value);
          props.value = sliders.map(slider => Number(slider.value));
          trigger('input');
        }
        sliders.forEach(slider => slider.addEventListener('input', tell));
        element.querySelector('button').addEventListener('click', () => {
          for (const slider of sliders) slider.value = 0;
          tell();
        });
        """,
        apply_default_css=False,
        elem_id="pose",
    )


DRAWING = """
const field = element.querySelector('.field'), canvas = field.querySelector('canvas');
function clean() {}
if (canvas) {
  const context = canvas.getContext('2d');
  let waiting = null;
  const tell = () => {
    if (waiting === null) waiting = setTimeout(() => {
      waiting = null;
      props.value = {drawing: canvas.toDataURL('image/png')};
      trigger('input');
    }, 100);
  };
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) * canvas.width / box.width,
            (event.clientY - box.top) * canvas.height / box.height];
  };
  clean = () => {
    context.fillStyle = '#000';
    context.fillRect(0, 0, canvas.width, canvas.height);
  };
  clean();
  Object.assign(context, {strokeStyle: '#fff', lineWidth: BRUSH, lineCap: 'round', lineJoin: 'round'});
  let last = null;
  const line = event => {
    const next = place(event);
    context.beginPath();
    context.moveTo(...(last ?? next));
    context.lineTo(...next);
    context.stroke();
    last = next;
    tell();
  };
  canvas.addEventListener('pointerdown', event => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    last = null;
    line(event);
  });
  canvas.addEventListener('pointermove', event => { if (last !== null) line(event); });
  for (const end of ['pointerup', 'pointercancel']) canvas.addEventListener(end, () => { last = null; });
  field.querySelector('.clear').addEventListener('click', () => { clean(); tell(); });
}
function read(file) {
  if (!file) return;
  if (file.size > LARGEST * 1e6) { alert('This picture is larger than LARGEST MB.'); return; }
  const reader = new FileReader();
  reader.onload = () => {
    clean();
    props.value = {file: reader.result, name: file.name};
    trigger('input');
  };
  reader.readAsDataURL(file);
}
const chooser = field.querySelector('input');
if (chooser) {
  chooser.addEventListener('change', () => { read(chooser.files[0]); chooser.value = ''; });
  field.addEventListener('dragover', event => event.preventDefault());
  field.addEventListener('drop', event => { event.preventDefault(); read(event.dataTransfer.files[0]); });
}
"""
