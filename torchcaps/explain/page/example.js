"use strict";
// The section on one example: the choice among examples, the scores, the reconstruction and the maps.
// A view is { report, snapshot, example, chosen, image }: the chosen class, and the loaded input, null for texts.

const MOST_BARS = 10;

function quoted(view, index) {
  return `\u201c${view.report.classes[index]}\u201d`;
}

/** What is predicted: a class, a label or a number. */
function termOf({ report }) {
  return report.terms[0];
}

function labelsOf(view, indices) {
  return indices.length ? listed(indices.map((index) => quoted(view, index))) : "no label";
}

/** A number in the units of the user, with four digits. */
function inUnits(value) {
  return String(Number(value.toPrecision(4))).replace("-", "\u2212");
}

/** What the network said about an example, in a sentence. */
function verdict(view) {
  const { predicted, label, labels, named, scores } = view.example;
  if (view.report.target === "numbers") {
    const truth = (index) => (view.example.true ? ` (true: ${inUnits(view.example.true[index])})` : "");
    const all = scores.map((value, index) => `${view.report.classes[index]} ${inUnits(value)}${truth(index)}`);
    return `The network says ${listed(all.slice(0, MOST_BARS))}.`;
  }
  if (named) {
    const { word } = judged(view.example);
    const said = `The network says ${labelsOf(view, named)}`;
    if (word === "unknown") return `${said}. Its true labels are not known.`;
    return word === "right" ? `${said}, which is right.` : `${said}, which is wrong: it has ${labelsOf(view, labels)}.`;
  }
  const said = `The network says ${quoted(view, predicted)}`;
  if (labels) return `${said} first. The input shows ${listed(labels.map((index) => quoted(view, index)))}.`;
  if (label === null) return `${said}. Its true class is not known.`;
  return label === predicted ? `${said}, which is right.`
    : `${said}, which is wrong: it is ${quoted(view, label)}.`;
}

function judged({ label, labels, predicted, named }) {
  if (!labels && label === null) return { sign: "?", word: "unknown" };
  const right = named ? named.join() === labels.join() : (labels ?? [label]).includes(predicted);
  return right ? { sign: "\u2713", word: "right" } : { sign: "\u2717", word: "wrong" };
}

/** Buttons with the examples; the arrow keys move among them. */
function thumbnails(view, choose) {
  const { examples } = view.snapshot;
  const start = examples.indexOf(view.example);
  const buttons = examples.map((example, index) => {
    const { sign, word } = judged(example);
    const how = word === "unknown" ? "named" : `${word}ly named`;
    const hasNumbers = view.report.target === "numbers";
    const said = hasNumbers ? "" : `, ${how} ${labelsOf(view, example.named ?? [example.predicted])}`;
    const name = `Example ${index + 1}: ${example.title}${said}`;
    const inside = example.image ? picture(example.image, "") : make("span", { class: "title" }, example.title);
    const mark = hasNumbers ? null : make("span", { class: `sign ${word}`, "aria-hidden": "true" }, sign);
    return make("button", { type: "button", class: "thumb", "aria-pressed": String(index === start), "aria-label": name,
      title: name, "data-key": `example-${index}`, click: () => choose(index) }, inside, mark);
  });
  arrowKeys(buttons, start, choose);
  const name = "Examples; the arrow keys move among them";
  return make("div", { class: view.image ? "thumbs" : "thumbs texts", role: "group", "aria-label": name }, buttons);
}

function exampleSection(view, choose, chooseClass) {
  const { image, example } = view;
  const term = termOf(view);
  const hasNumbers = view.report.target === "numbers";
  const [has, source] = hasNumbers ? ["which numbers it gives", "each of them"]
    : [`how strongly it believes in each ${term}`, "that belief"];
  const where = example.maps?.length ? `, and where in it ${source} comes from` : "";
  const what = image
    ? `what the network was given${where ? "," : " and"} ${has}${where}`
    : `how strongly the network believes in each ${term}, and which words that belief comes from`;
  const lead = `Pick ${image ? "an input" : "a text"}. Below is ${what}.`
    + (hasNumbers ? "" : " Signs mark what the network got right (\u2713) and wrong (\u2717).");
  return { lead, parts: [thumbnails(view, choose), exampleParts(view, chooseClass)] };
}

/** What the network says about an example, and where that comes from. */
function exampleParts(view, chooseClass) {
  const { example, image } = view;
  const bars = scoreBars(view, chooseClass);
  return [make("p", { class: "verdict", "aria-live": "polite" }, verdict(view)),
    image ? make("div", { class: "beside" }, inputAndDrawing(view), bars) : bars,
    image && example.maps?.length ? mapsOf(view) : null,
    example.words && example.word_shares ? wordsOf(view) : null];
}

/** Whether an example has maps or a tree of a class; of many classes only the likeliest have them. */
function isShown(example, index) {
  const [map, tree] = [example?.maps?.[0], example?.trees?.[index]];
  return map ? Boolean(map.maps[index]) : !tree || "parts" in tree;
}

function inputAndDrawing(view) {
  const { example } = view;
  const input = figure(picture(example.image, `The input: ${example.title}`), "The input: ",
    make("strong", {}, example.title));
  if (!example.reconstruction) return make("div", { class: "input-pair alone" }, input);
  const name = quoted(view, example.predicted);
  const drawn = figure(picture(example.reconstruction, `What the network draws from the vector of ${name}`),
    `Drawn back from nothing but the vector of ${name}`);
  return make("div", { class: "input-pair" }, input, drawn);
}

/** What stands beside each class: probabilities that the run has calibrated, or else activations, or logits' softmax. */
function beliefs({ report, example }) {
  if (report.target === "numbers") {
    return { values: example.scores, write: inUnits, what: "The numbers, in the units of the training." };
  }
  if (report.target === "labels") {
    const which = report.thresholds ? "its threshold, which was chosen on validation data" : "50\u00a0%";
    return { values: example.scores, write: percent,
      what: `Probabilities of the labels, each by itself. The network says the labels with one above ${which}.` };
  }
  if (report.temperature !== null) {
    const how = `calibrated on validation data with a temperature of ${number(report.temperature)}`;
    return { values: example.probabilities, write: percent, what: `Probabilities of the classes, ${how}.` };
  }
  if (report.scores === "activations") {
    return { values: example.scores, write: (value) => value.toFixed(3),
      what: "Activations of the class capsules, from 0 to 1: how present each class is. They are no probabilities." };
  }
  return { values: example.probabilities, write: percent,
    what: "Probabilities of the classes, which are not calibrated: the network may be surer than it is right." };
}

/** What the network's scores are called: logits are scores, and what is from 0 to 1 is an activation. */
function scoreName({ report }) {
  return { activations: "activation", probabilities: "probability" }[report.scores] ?? "score";
}

/** A bar for each class; a press chooses the class whose maps and parts are shown. */
function scoreBars(view, chooseClass) {
  const { example, chosen, report } = view;
  const { values, write, what } = beliefs(view);
  const hasNumbers = report.target === "numbers";
  const [answers, truth] = [example.named ?? [example.predicted], example.labels ?? [example.label]];
  const shown = shownClasses(values, [chosen, ...answers, ...truth]);
  const notesOf = (index) => (hasNumbers ? [example.true ? `true: ${inUnits(example.true[index])}` : ""]
    : [answers.includes(index) ? "\u25c0 answer" : "", truth.includes(index) ? "\u2605 true" : ""]);
  const bars = shown.map((index) => {
    const pressed = String(index === chosen);
    return make("button", { type: "button", class: "score", "aria-pressed": pressed, "data-key": `class-${index}`,
      click: () => chooseClass(index) }, make("span", { class: "name" }, report.classes[index]),
    hasNumbers ? make("span") : bar(values[index]),
    make("span", { class: "value" }, write(values[index])),
    make("span", { class: "note" }, notesOf(index).filter(Boolean).join(" ")));
  });
  const hidden = values.length - shown.length;
  const group = make("div", { class: "scores", role: "group", "aria-label": `The ${report.terms[1]}` },
    make("h3", {}, hasNumbers ? "What it says" : "How sure it is"),
    make("p", { class: "small" }, `${what} Press a ${termOf(view)} to look into it.`), bars,
    hidden ? make("p", { class: "small" }, `${number(hidden)} more have smaller values.`) : null);
  const longest = Math.max(...shown.map((index) => report.classes[index].length));
  group.style.setProperty("--names", `${Math.min(longest + 1, 14)}ch`);
  return group;
}

/** All classes if they are few, else the largest and those that must be there. */
function shownClasses(values, needed) {
  if (values.length <= MOST_BARS) return values.map((_, index) => index);
  return [...new Set([...largest(values, MOST_BARS), ...needed.filter((index) => index !== null)])];
}

function mapsOf(view) {
  const { example, chosen, image, report } = view;
  const name = quoted(view, chosen);
  const covering = make("input", { type: "checkbox", "data-key": "covering" });
  const text = make("div", { class: "maps-text" }, make("h3", {}, `Where ${name} comes from`),
    make("p", {},
      `Bright places gave much to ${name}, dark places little. The numbers under the colors are times an even share: 1 `
        + "is what a place would give if all capsules gave alike. ",
    make("strong", {}, `Half of ${name} comes from ${percent(example.maps[0].half[chosen])} of the places; `
      + `${percent(example.maps[0].even[chosen])} would be even.`)),
    make("label", { class: "check" }, covering, " Colors only, without the input under them"));
  text.style.setProperty("--span", 3 - (example.maps.length % 3)); // of three columns: no row has a gap
  const grid = make("div", { class: "block maps" });
  const show = () => grid.replaceChildren(text, ...example.maps.map((map) => {
    const layer = report.layers.find((other) => other.name === map.layer);
    const drawn = mapCanvas(map, chosen, image, `Layer ${map.layer}: where ${name} comes from`, covering.checked);
    const caption = [make("strong", {}, map.layer), layer ? `: ${layer.children}` : ""];
    return figure(drawn.element, legend(readMap(map, chosen).peak), ...caption);
  }));
  covering.addEventListener("change", show);
  show();
  return grid;
}

