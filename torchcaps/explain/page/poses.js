"use strict";
// Pose dimensions: what each draws when it is moved, and how they follow an input that turns, grows or moves.

const MOST_LINES = 5; // with names, in a chart

function slidersSection(view) {
  const { values, pose, sprite, capsule } = view.example.sliders;
  const start = nearest(values, 0);
  const words = (index) => `${values[index] > 0 ? "+" : ""}${number(values[index])}`;
  const cells = pose.map((value, dimension) => {
    const drawn = tile(sprite, `What the network draws with dimension ${dimension + 1} changed`, dimension, start);
    const moved = slider({ label: `Change of dimension ${dimension + 1}, which is ${number(value)}`, hideLabel: true,
      count: values.length, start, words, key: `pose-${dimension}`, changed: (index) => drawn.show(dimension, index) });
    const name = make("p", { class: "cell-name" }, `dim. ${dimension + 1}`);
    return { element: make("div", { class: "cell" }, drawn.element, name, moved.element), set: moved.set };
  });
  const all = slider({ label: "Change every dimension, each in its own picture, by", count: values.length, start, words,
    key: "pose-all", changed: (index) => cells.forEach((cell) => cell.set(index)) });
  const reset = make("button", { type: "button", class: "plain", "data-key": "pose-reset",
    click: () => all.set(start) }, "Reset");
  const lead = `The vector that stands for ${quoted(view, capsule)} is ${pose.length} numbers long. Nobody told the `
    + "network what each of them should mean. Move one and watch what the network draws: one may make the "
    + "object larger, another may turn it, and some may do nothing that one can name.";
  return { lead, parts: [make("div", { class: "tools" }, all.element, reset),
    make("div", { class: "cells" }, cells.map((cell) => cell.element)),
    make("p", { class: "small" },
      "In each picture one number is changed. All others stay as the network set them for this input.")] };
}

function transformedSection(view) {
  const { transformed } = view.example;
  const word = scoreName(view);
  const lead = `Here the input is ${listed(transformed.map((change) => change.name))} on purpose, and the network `
    + "looks at it again each time. If a vector described how a thing lies, its numbers would change smoothly while "
    + `its ${word} stays high. Where all numbers shrink together, only the ${word} does.`
    + (word === "probability" ? ""
      : ` Where the ${word} of the true class falls below another, the network no longer recognizes it.`);
  return { lead, parts: transformed.map((change) => transformedBlock(view, change)) };
}

function transformedBlock(view, change) {
  const { name, values, unit, inputs, reconstructions } = change;
  const start = restOf(change);
  const sentence = make("p", { class: "verdict", "aria-live": "polite" }, answerAt(view, change, start));
  const input = tile(inputs, `The input, ${name}`, 0, start);
  const drawn = reconstructions ? tile(reconstructions, `What the network draws of the ${name} input`, 0, start) : null;
  const charts = [scoresChart(view, change), posesChart(change)];
  const markAll = (index) => charts.forEach((chart) => chart.mark(values[index]));
  const moved = slider({ label: `How far it is ${name}`, count: values.length, start, key: `change-${name}`,
    words: (index) => `${number(values[index])} ${unit}`,
    changed: (index) => {
      sentence.textContent = answerAt(view, change, index);
      [input, drawn].forEach((part) => part?.show(0, index));
      markAll(index);
    } });
  markAll(start);
  const pictures = make("div", { class: drawn ? "input-pair" : "input-pair alone" }, figure(input.element, "The input"),
    drawn ? figure(drawn.element, "Drawn back from its vector") : null);
  return make("div", { class: "block" }, make("h3", {}, capitalized(name)), moved.element,
    make("div", { class: "change" }, sentence, pictures, charts.map((chart) => chart.element)));
}

/** What the network says at a place of the slider. */
function answerAt(view, change, index) {
  const value = number(change.values[index]);
  const far = change.unit === "times" ? `to ${value} times its size` : `by ${value} ${change.unit}`;
  const how = index === restOf(change) ? "as it was" : `${change.name} ${far}`;
  const [said] = largest(change.scores[index], 1);
  const word = scoreName(view);
  const says = word === "probability" ? "the likeliest label is" : "the network says";
  return `With the input ${how} ${says} ${quoted(view, said)}, with ${word === "activation" ? "an" : "a"} ${word} of `
    + `${number(change.scores[index][said])}.`;
}

function nearest(values, value) {
  const distances = values.map((other) => Math.abs(other - value));
  return distances.indexOf(Math.min(...distances));
}

/** The place of the input as it was. */
function restOf(change) {
  return nearest(change.values, change.unit === "times" ? 1 : 0);
}

/** Scores or activations over the change; the true class and those that are ever ahead have names. */
function scoresChart(view, { values, unit, scores }) {
  const { label, predicted, named } = view.example;
  const ahead = scores.map((classes) => largest(classes, 1)[0]);
  const shown = [...new Set([...(named ?? [label ?? predicted]), predicted, ...ahead])].slice(0, MOST_LINES);
  const changes = ahead.filter((index, place) => place && index !== ahead[place - 1]).length;
  const word = scoreName(view);
  return lineChart({ name: `The ${word} of each ${termOf(view)}`, x: unit, y: word,
    lines: linesOf(scores, values, shown, (index) => view.report.classes[index]),
    description: changes ? `The answer changes ${plural(changes, "time")} along the way.`
      : "The answer stays the same." });
}

function posesChart({ values, unit, poses }) {
  const spread = poses[0].map((_, dimension) => {
    const numbers = poses.map((pose) => pose[dimension]);
    return Math.max(...numbers) - Math.min(...numbers);
  });
  const shown = largest(spread, MOST_LINES);
  return lineChart({ name: "The numbers of the vector", x: unit, y: "value",
    lines: linesOf(poses, values, shown, (dimension) => `dim. ${dimension + 1}`),
    description: `Dimension ${shown[0] + 1} changes most. The ${shown.length} that change most have names; the others `
      + "are pale." });
}

/** A line for each column of a table; those that are not shown are faint. */
function linesOf(rows, x, shown, name) {
  return rows[0].map((_, index) => ({ name: name(index), faint: !shown.includes(index), x,
    y: rows.map((values) => values[index]) }));
}
