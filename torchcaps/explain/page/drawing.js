"use strict";
// The field of the live page: draw, drop or choose a picture, or take a test image. `element`, `props` and `trigger` are
// Gradio's. What is given is their value, not the data of an event: Gradio runs an event that waited for another one
// again with the other one's data.

const BRUSH = 22; // pixels: MNIST's lines are as thick if a digit fills most of the field
const SIDE = 280; // pixels of the field

function give(value) {
  props.value = value;
  trigger("input");
}

/** A black field for light lines; "clean" empties it. */
function drawingBoard() {
  const board = make("canvas", { width: SIDE, height: SIDE, role: "img", class: "board",
    "aria-label": "field to draw in, with the mouse or a finger" });
  const context = board.getContext("2d");
  const clean = () => context.fillRect(0, 0, SIDE, SIDE);
  clean();
  Object.assign(context, { strokeStyle: "#fff", lineWidth: BRUSH, lineCap: "round", lineJoin: "round" });
  let waiting = null;
  const send = () => {
    waiting ??= setTimeout(() => {
      waiting = null;
      give({ drawing: board.toDataURL("image/png") });
    }, 100);
  };
  let last = null;
  const line = (event) => {
    const box = board.getBoundingClientRect();
    const next = [((event.clientX - box.left) * SIDE) / box.width, ((event.clientY - box.top) * SIDE) / box.height];
    context.beginPath();
    context.moveTo(...(last ?? next));
    context.lineTo(...next);
    context.stroke();
    last = next;
    send();
  };
  board.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    board.setPointerCapture(event.pointerId);
    line(event);
  });
  board.addEventListener("pointermove", (event) => { if (last) line(event); });
  for (const end of ["pointerup", "pointercancel"]) board.addEventListener(end, () => { last = null; });
  const clear = make("button", { type: "button", class: "plain clear", click: () => { clean(); send(); } }, "Clear");
  return { board, clean, clear };
}

function readFile(file, clean) {
  if (!file) return;
  if (file.size > props.megabytes * 1e6) {
    alert(`This picture is larger than ${props.megabytes} MB.`);
    return;
  }
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    clean();
    give({ file: reader.result, name: file.name });
  });
  reader.readAsDataURL(file);
}

function inputField() {
  const { board, clean, clear } = props.draws ? drawingBoard() : { clean: () => {} };
  const target = board ?? (props.drops ? make("p", { class: "target" }, "Drop a picture here") : null);
  const chooser = make("input", { type: "file", accept: "image/*", change: () => {
    readFile(chooser.files[0], clean);
    chooser.value = "";
  } });
  const choose = props.drops ? make("label", { class: "plain" }, "Choose a picture", chooser) : null;
  const images = props.images.map(([source, title], index) => make("button", { type: "button", class: "thumb", title,
    click: () => { clean(); give({ test: index }); } }, picture(source, title)));
  const field = make("div", {}, target, make("div", { class: "row" }, clear, choose),
    images.length ? make("p", {}, "Or take a test image, which the network has not been trained on:") : null,
    make("div", { class: "thumbs" }, images));
  if (props.drops) {
    field.addEventListener("dragover", (event) => event.preventDefault());
    field.addEventListener("drop", (event) => {
      event.preventDefault();
      readFile(event.dataTransfer.files[0], clean);
    });
  }
  return field;
}

/** Keep the field in sight beside a long answer. A field higher than the window stays with its lower end. */
function stayInSight(column) {
  const isBeside = column.offsetWidth < column.parentElement.offsetWidth / 2;
  Object.assign(column.style, { alignSelf: "flex-start", position: isBeside ? "sticky" : "static",
    top: `min(1rem, calc(100vh - ${column.offsetHeight}px - 1rem))` });
}

element.append(inputField());
element.closest(".gradio-container").style.overflow = "clip"; // inside of "hidden", which it was, nothing sticks
new ResizeObserver(([{ target }]) => stayInSight(target)).observe(element.closest(".column"));
