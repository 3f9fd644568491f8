"use strict";
// Elements, numbers and keys: what all other scripts use. Texts of the report become text nodes, never HTML.

const SVG = "http://www.w3.org/2000/svg"; // a name, not an address: nothing is loaded from it

/** Make an element. Attributes that are functions listen to events; children are elements, texts, or nothing. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined);
}

/** Show a number with about three digits, as people write it. */
function number(value) {
  const size = Math.abs(value);
  if (size < 1e-6) return "0";
  if (size < 0.0005) return "0.000";
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return Number(value.toFixed(digits)).toLocaleString("en", { maximumFractionDigits: 3 }).replace("-", "\u2212");
}

/** Show a share such as 0.1234 as "12.3 %". */
function percent(value) {
  const points = 100 * value;
  if (points > 0 && points < 0.05) return "<\u00a00.1\u00a0%";
  return `${points.toFixed(points === 100 || points === 0 ? 0 : 1)}\u00a0%`;
}

function capitalized(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** Places of the largest values, in falling order. */
function largest(values, count) {
  const order = values.map((_, index) => index);
  return order.sort((a, b) => values[b] - values[a]).slice(0, count);
}

/** "a", "a and b", "a, b and c"; or with another word before the last */
function listed(words, last = "and") {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} ${last} ${words.at(-1)}`;
}

/** Replace what an element holds; whoever had the focus in it gets it back by its data-key. */
function replaceContent(element, ...children) {
  const active = document.activeElement;
  const key = element.contains(active) ? active.dataset.key : undefined;
  element.replaceChildren(...present(children));
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

/** Let the arrow keys move the focus among buttons; one of them is in the tab order; "chosen" gets its index. */
function arrowKeys(buttons, start, chosen) {
  buttons.forEach((button, index) => {
    button.tabIndex = index === start ? 0 : -1;
    button.addEventListener("keydown", (event) => {
      const last = buttons.length - 1;
      const next = { ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1,
        Home: 0, End: last }[event.key];
      if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const to = (next + buttons.length) % buttons.length;
      buttons.forEach((other, place) => { other.tabIndex = place === to ? 0 : -1; });
      buttons[to].focus();
      chosen(to);
    });
  });
}

/** A slider with its label and its value in words; set(index) moves it. */
function slider({ label, count, start, words, changed, key, hideLabel }) {
  const value = make("output", {}, words(start));
  const input = make("input", { type: "range", min: 0, max: count - 1, step: 1, value: start, "data-key": key,
    id: `slider-${key}`, "aria-label": hideLabel ? label : null, "aria-valuetext": words(start) });
  const set = (index) => {
    input.value = index;
    show();
  };
  const show = () => {
    const index = Number(input.value);
    value.textContent = words(index);
    input.setAttribute("aria-valuetext", words(index));
    changed(index);
  };
  input.addEventListener("input", show);
  const text = hideLabel ? null : make("label", { for: input.id }, label);
  const head = make("span", { class: "slider-head" }, text, value);
  return { element: make("div", { class: "slider" }, head, input), set };
}

/** A table, in a frame that scrolls by itself, so that the page never does. A cell is a text, or a td element. */
function table(caption, head, rows, className) {
  const headRow = make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...others]) => make("tr", {}, make("th", { scope: "row" }, first),
    others.map((cell) => (cell instanceof Element ? cell : make("td", {}, cell)))));
  const frame = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    make("table", { class: className }, make("thead", {}, headRow), make("tbody", {}, body)));
  scrolls.observe(frame);
  return make("div", { class: "table" }, make("p", { class: "small caption" }, caption),
    make("p", { class: "small hint", hidden: true }, "There are more columns: scroll sideways \u25b8"), frame);
}

/** Says above a frame that it scrolls, while it does. */
const scrolls = new ResizeObserver((frames) => frames.forEach(({ target }) => {
  target.previousSibling.hidden = target.scrollWidth <= target.clientWidth;
}));

function picture(source, description) {
  return make("img", { src: source, alt: description });
}

function figure(content, ...caption) {
  return make("figure", {}, content, make("figcaption", {}, ...caption));
}

/** A bar that is filled to a part, from 0 to 1. */
function bar(part) {
  const filled = make("span", { class: "bar-fill" });
  filled.style.width = `${100 * Math.min(Math.max(part, 0), 1)}%`;
  return make("span", { class: "bar-line" }, filled);
}

/** A canvas with a name; "draw" gets its context and its sides in pixels, and is called again by "redraw". */
function canvas(name, width, height, draw, className) {
  const element = make("canvas", { width: Math.round(width), height: Math.round(height), role: "img",
    "aria-label": name, class: className });
  const context = element.getContext("2d");
  context.imageSmoothingQuality = "high";
  const redraw = () => draw(context, element.width, element.height);
  redraw();
  return { element, redraw };
}

const loaded = new Map();

/** The image of a data URI, once it is there. */
function whenLoaded(source) {
  if (!loaded.has(source)) {
    loaded.set(source, new Promise((resolve) => {
      const image = new Image();
      image.addEventListener("load", () => resolve(image));
      image.src = source;
    }));
  }
  return loaded.get(source);
}
