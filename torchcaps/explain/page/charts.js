"use strict";
// Line charts. Lines are told apart by markers and dashes as well as colors, and carry their names at their ends.

const CHART = { width: 370, height: 236, top: 30, bottom: 40, row: 15, letter: 7.4 };
const STYLES = 6; // as many are in page.css
// Circle, square, triangle, diamond, cross, ring.
const CIRCLE = "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0";
const MARKERS = [CIRCLE, "M-3-3h6v6h-6z", "M0-4l4 7h-8z", "M0-4l4 4l-4 4l-4-4z", "M-3-3l6 6m0-6l-6 6", CIRCLE];

/** Numbers of the kind 1, 2, 5 times a power of ten that divide a range into about `count` parts. */
function ticks(low, high, count, whole) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999), whole ? 1 : 0);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const from = Math.ceil(low / step - 1e-9);
  const places = Array.from({ length: Math.floor(high / step + 1e-9) - from + 1 }, (_, place) => (from + place) * step);
  const write = (value) => `${value.toFixed(digits) < 0 ? "\u2212" : ""}${Math.abs(value).toFixed(digits)}`;
  return { step, places, write };
}

/** A name without its middle if it would leave no room for the lines. */
function shortened(text) {
  return text.length > 18 ? `${text.slice(0, 8)}\u2026${text.slice(-9)}` : text;
}

/** The smallest and the largest number, apart from each other; below 0 only if a number is. */
function ends(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return high - low < 1e-9 ? [low < 0 ? low - 0.5 : Math.max(0, low - 0.5), high + 0.5] : [low, high];
}

/**
 * Draw lines over two axes.
 *
 * lines: { name, x, y, faint }; faint lines have no name. words: names for the places of the x axis, or nothing.
 * level: { value, name }, a line across. yRange: what the y axis shows at least.
 * Returns the element, and mark(x), which moves an upright line.
 */
function lineChart({ name, description, x, y, lines, yRange = [], whole, level, words }) {
  const named = lines.filter((line) => !line.faint).map((line) => ({ ...line, name: shortened(line.name) }));
  const names = [...named.map((line) => line.name), level?.name ?? ""];
  const plot = axes({ lines, yRange, level, whole, words, names });
  const svg = makeSvg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", class: "chart",
    "aria-label": `${name}. ${description}` }, makeSvg("title", {}, name), makeSvg("desc", {}, description));
  drawAxes(svg, plot, x, y);
  if (level) svg.append(across(plot, plot.atY(level.value), "level"));
  const cursor = makeSvg("line", { y1: plot.top, y2: plot.bottom, class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  drawLines(svg, lines, plot);
  const last = named.map((line, place) => ({ from: plot.atY(line.y.at(-1)), name: line.name, style: place % STYLES }));
  if (level) last.push({ from: plot.atY(level.value), name: level.name, style: null });
  nameEnds(svg, last, plot);
  const mark = (value) => {
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, plot.atX(value));
    cursor.setAttribute("visibility", "visible");
  };
  return { element: figure(svg, name), mark };
}

/** Charts in two columns, under what belongs to them; or beside it, where one chart would stand alone. */
function chartsUnder(content, charts) {
  const odd = charts.length % 2;
  return [odd ? null : content, charts.length ? make("div", { class: "charts" }, odd ? content : null, charts) : null];
}

/** Where things lie in a chart: its sides, its ticks, and the places of numbers. */
function axes({ lines, yRange, level, whole, words, names }) {
  let [low, high] = ends([...lines.flatMap((line) => line.y), ...yRange, ...(level ? [level.value] : [])]);
  const yStep = ticks(low, high, 4, false).step;
  [low, high] = [Math.floor(low / yStep + 1e-9) * yStep, Math.ceil(high / yStep - 1e-9) * yStep];
  const yTicks = ticks(low, high, (high - low) / yStep, false);
  const widest = Math.max(...yTicks.places.map((value) => yTicks.write(value).length));
  const left = 12 + CHART.letter * widest;
  const right = CHART.width - 22 - CHART.letter * Math.max(...names.map((name) => name.length));
  const [top, bottom] = [CHART.top, CHART.height - CHART.bottom];
  const [first, farthest] = ends(lines.flatMap((line) => line.x));
  const xTicks = ticks(first, farthest, right - left > 220 ? 5 : 4, whole || words);
  if (words) xTicks.write = (value) => words[value] ?? "";
  return { left, right, top, bottom, xTicks, yTicks,
    atX: (value) => left + ((value - first) / (farthest - first)) * (right - left),
    atY: (value) => bottom - ((value - low) / (high - low)) * (bottom - top) };
}

function across({ left, right }, height, name) {
  return makeSvg("line", { x1: left, x2: right, y1: height, y2: height, class: name });
}

function drawAxes(svg, plot, xTitle, yTitle) {
  const text = (x, y, anchor, written, name) => makeSvg("text", { x, y, "text-anchor": anchor, class: name }, written);
  for (const value of plot.yTicks.places) {
    const height = plot.atY(value);
    svg.append(across(plot, height, "grid"), text(plot.left - 7, height + 4, "end", plot.yTicks.write(value)));
  }
  for (const value of plot.xTicks.places) {
    const place = plot.atX(value);
    svg.append(makeSvg("line", { x1: place, x2: place, y1: plot.bottom, y2: plot.bottom + 4, class: "base" }),
      text(place, plot.bottom + 17, "middle", plot.xTicks.write(value)));
  }
  svg.append(across(plot, plot.bottom, "base"), text(0, 11, "start", yTitle, "axis"),
    text((plot.left + plot.right) / 2, CHART.height - 5, "middle", xTitle, "axis"));
}

function drawLines(svg, lines, { atX, atY }) {
  const written = (points) => points.map((point) => point.map((place) => place.toFixed(1)).join(",")).join(" ");
  let style = 0;
  for (const line of [...lines].sort((a, b) => Boolean(b.faint) - Boolean(a.faint))) {
    const points = line.x.map((value, place) => [atX(value), atY(line.y[place])]);
    const name = line.faint ? "faint" : `line line-${style % STYLES}`;
    svg.append(makeSvg("polyline", { points: written(points), fill: "none", class: name }));
    if (line.faint) continue;
    const every = Math.ceil(points.length / 12);
    points.filter((_, place) => place % every === 0 || place === points.length - 1).forEach(([x, y]) => {
      svg.append(makeSvg("path", { d: MARKERS[style % STYLES], class: `marker marker-${style % STYLES}`,
        transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }));
    });
    style += 1;
  }
}

/** Write names at the ends of lines; where they would cover each other they move apart, and thin lines lead to them. */
function nameEnds(svg, ends, { right, bottom }) {
  const sorted = ends.map((end) => ({ ...end, y: end.from })).sort((a, b) => a.y - b.y);
  sorted.forEach((end, place) => { if (place) end.y = Math.max(end.y, sorted[place - 1].y + CHART.row); });
  let below = bottom + 4 + CHART.row;
  for (const end of sorted.reverse()) {
    end.y = Math.min(end.y, below - CHART.row);
    below = end.y;
    if (end.style !== null) {
      const lead = `M${right + 5} ${end.from}L${right + 15} ${end.y}`;
      svg.append(makeSvg("path", { d: lead, class: `lead-${end.style}` }));
    }
    const kind = end.style === null ? "axis" : `name-${end.style}`;
    svg.append(makeSvg("text", { x: right + 18, y: end.y + 4, class: kind }, end.name));
  }
}
