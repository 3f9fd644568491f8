"use strict";
// Colors of the maps, the maps themselves, and boxes over an input.

// From dark to light: a map says the same in grey.
const RAMP = [[10, 10, 30], [43, 22, 86], [92, 30, 112], [145, 44, 112], [195, 64, 94], [231, 104, 72], [247, 163, 86],
  [254, 228, 165]];
const DIMMED = 0.4; // of the input under a map

/** The color of a value from 0 to 1. */
function rampColor(value) {
  const place = Math.min(Math.max(value, 0), 1) * (RAMP.length - 1);
  const index = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[index].map((from, channel) => Math.round(from + (RAMP[index + 1][channel] - from) * (place - index)));
}

/** The bytes of a class's map, and the largest share in it, times an even share. */
function readMap(map, chosen) {
  const bytes = Uint8Array.from(atob(map.maps[chosen]), (letter) => letter.charCodeAt(0));
  // The scale reaches twice an even share at least, so that nearly even maps look even.
  const most = Math.max(1, (255 * 2) / map.peak, bytes.reduce((a, b) => Math.max(a, b), 0));
  return { bytes, most, peak: (map.peak * most) / 255 };
}

/** A class's map as a small canvas; where little comes from, the input shines through. */
function mapPixels(map, chosen, covering) {
  const { bytes, most } = readMap(map, chosen);
  const [rows, columns] = map.size;
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  const context = small.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  bytes.forEach((byte, place) => {
    const value = byte / most;
    const opacity = covering ? 1 : Math.min(1, 0.12 + 1.6 * value);
    pixels.data.set([...rampColor(value), Math.round(255 * opacity)], 4 * place);
  });
  context.putImageData(pixels, 0, 0);
  return small;
}

/** A canvas for a drawing over an input, whose longer side it has in pixels. */
function canvasOver(image, side, name, draw, className) {
  const scale = side / Math.max(image.naturalWidth, image.naturalHeight);
  return canvas(name, image.naturalWidth * scale, image.naturalHeight * scale, draw, className);
}

/** The map of a class in a layer over the input, which is grey and dimmed. */
function mapCanvas(map, chosen, image, name, covering) {
  return canvasOver(image, 320, name, (context, width, height) => {
    context.fillStyle = "#000";
    context.fillRect(0, 0, width, height);
    context.save();
    context.globalAlpha = DIMMED;
    context.filter = "grayscale(1)";
    context.drawImage(image, 0, 0, width, height);
    context.restore();
    context.drawImage(mapPixels(map, chosen, covering), 0, 0, width, height);
  }, "map");
}

/** The scale of a map's colors, with its numbers. */
function legend(peak) {
  const colors = RAMP.map((color, place) => `rgb(${color.join(" ")}) ${(100 * place) / (RAMP.length - 1)}%`);
  const strip = make("span", { class: "strip" });
  strip.style.background = `linear-gradient(to right, ${colors.join(", ")})`;
  const scale = make("span", { class: "scale" }, tickAt(0, "0"));
  const even = 1 / peak;
  if (even > 0.08 && even < 0.8) scale.append(tickAt(even, "1"));
  scale.append(tickAt(1, `${number(peak)}\u00d7`));
  return make("span", { class: "legend" }, strip, scale);
}

function tickAt(place, text) {
  const tick = make("span", { class: place === 1 ? "tick last" : place === 0 ? "tick first" : "tick" }, text);
  tick.style.left = `${100 * place}%`;
  return tick;
}

/** The input with an outline around a part; outline(box) moves it, and without a box there is none. */
function outlinedCanvas(image, name) {
  let box = null;
  const drawn = canvasOver(image, 360, name, (context, width, height) => {
    context.drawImage(image, 0, 0, width, height);
    if (!box) return;
    context.fillStyle = "rgb(0 0 0 / 0.5)";
    context.fillRect(0, 0, width, height);
    drawBox(context, image, box, width, height);
  }, "outlined");
  const outline = (other) => {
    box = other;
    drawn.redraw();
  };
  return { element: drawn.element, outline };
}

/** The input inside of a box, in a light line between dark ones, so that it is seen on every ground. */
function drawBox(context, image, box, width, height) {
  const [left, top, right, bottom] = [box[0] * width, box[1] * height, box[2] * width, box[3] * height];
  const sides = [Math.max(left, 2), Math.max(top, 2)];
  sides.push(Math.min(right, width - 2) - sides[0], Math.min(bottom, height - 2) - sides[1]);
  const source = [box[0] * image.naturalWidth, box[1] * image.naturalHeight, (box[2] - box[0]) * image.naturalWidth,
    (box[3] - box[1]) * image.naturalHeight];
  context.drawImage(image, ...source, left, top, right - left, bottom - top);
  for (const [color, line] of [["rgb(0 0 0 / 0.75)", 7], ["#ffd24a", 3]]) {
    context.strokeStyle = color;
    context.lineWidth = line;
    context.strokeRect(...sides);
  }
}

/** A small picture of the part of an input inside a box. */
function cropCanvas(image, box, name) {
  const [left, top] = [box[0] * image.naturalWidth, box[1] * image.naturalHeight];
  const [width, height] = [(box[2] - box[0]) * image.naturalWidth, (box[3] - box[1]) * image.naturalHeight];
  const scale = 64 / Math.max(width, height, 1);
  return canvas(name, Math.max(width * scale, 8), Math.max(height * scale, 8), (context, across, down) => {
    context.drawImage(image, left, top, Math.max(width, 1), Math.max(height, 1), 0, 0, across, down);
  }, "crop").element;
}

/** A tile of a sprite as a picture; show(row, column) changes it. */
function tile(sprite, name, row, column) {
  const place = { row, column };
  const element = canvas(name, 128, 128, () => {}, "tile").element;
  const draw = (image) => {
    const [width, height] = [image.naturalWidth / sprite.columns, image.naturalHeight / sprite.rows];
    if (element.dataset.drawn === undefined) {
      const scale = 160 / Math.max(width, height);
      [element.width, element.height] = [Math.round(width * scale), Math.round(height * scale)];
    }
    const context = element.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, place.column * width, place.row * height, width, height, 0, 0, element.width,
      element.height);
    element.dataset.drawn = `${place.row},${place.column}`;
  };
  const show = (toRow, toColumn) => {
    [place.row, place.column] = [toRow, toColumn];
    whenLoaded(sprite.image).then(draw);
  };
  show(row, column);
  return { element, show };
}
