"use strict";
// The section on results: accuracy, facts, layers, confusion matrix, curves.

const MOST_CLASSES = 25; // in the confusion matrix

function hasResults(report, snapshot) {
  const { curves, facts, layers, confusion } = report;
  return snapshot.accuracy !== null || confusion || report.table || Object.keys(curves).length || facts.length
    || layers.length;
}

function resultsSection(report, snapshot) {
  const charts = [...curveCharts(report), ...snapshotCharts(report)];
  const right = report.target === "labels" ? "exactly the right labels"
    : `the right ${report.confusion ? "class" : "classes"}`;
  const measures = report.target === "masks" ? "How well each class is found, how" : "How large the errors are, how";
  const lead = snapshot.accuracy === null
    ? `${report.table ? measures : "How"} the training went, and what this network is made of.`
    : `The network was tested on ${plural(snapshot.tested, "input")} that it had not seen in training, and named `
      + `${right} for ${percent(snapshot.accuracy)} of them.`
      + balancedOf(snapshot)
      + (report.confusion ? ` An answer drawn from a hat would be right one time in ${report.classes.length}.` : "");
  return { lead, parts: [
    chartsUnder(report.table ? tableOf(report) : null, charts),
    report.confusion ? confusionOf(report) : null,
    report.facts.length ? detailsOf("The facts: recipe, data, network", factsOf(report)) : null,
    report.layers.length ? detailsOf("The capsule layers, from the input to the classes", layersOf(report)) : null] };
}

/** How well each label or number is predicted. */
function tableOf(report) {
  const [head, ...rows] = report.table;
  return table(`How well each ${termOf({ report })} is predicted`, head, rows, "numbers");
}

/** The balanced accuracy as words, where it is another one than the accuracy: classes are then of unequal size. */
function balancedOf({ accuracy, balanced }) {
  const differs = (balanced ?? null) !== null && percent(balanced) !== percent(accuracy);
  return differs ? ` Classes count equally in the balanced accuracy, which is ${percent(balanced)}.` : "";
}

function detailsOf(summary, content) {
  return make("details", {}, make("summary", {}, summary), content);
}

function factsOf(report) {
  return make("dl", { class: "facts" },
    report.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function layersOf(report) {
  const rows = report.layers.map(({ name, kind, children, parents, routing }) => (
    [name, kind, children, parents, routing || "none"]));
  return table("Capsule layers", ["layer", "kind", "children (parts)", "parents (wholes)", "routing"], rows);
}

function curveCharts(report) {
  return Object.entries(report.curves).filter(([, lines]) => lines.length).map(([quantity, lines]) => {
    const last = lines.map((line) => `${line.name} ends at ${number(line.y.at(-1))}`);
    return lineChart({ name: `${capitalized(quantity)} during training`, x: "epoch", y: quantity, lines, whole: true,
      description: `${listed(last)}.` }).element;
  });
}

/** Charts of what changes from checkpoint to checkpoint. */
function snapshotCharts({ snapshots }) {
  if (snapshots.length < 2) return [];
  const { places, ...axis } = stepsOf(snapshots);
  const charts = [];
  if (snapshots.every((snapshot) => snapshot.accuracy !== null)) {
    const y = snapshots.map((snapshot) => 100 * snapshot.accuracy);
    charts.push(lineChart({ ...axis, name: "Accuracy, checkpoint by checkpoint", y: "% right",
      lines: [{ name: "accuracy", x: places, y }],
      description: `From ${number(y[0])} to ${number(y.at(-1))} %.` }).element);
  }
  const lines = snapshots[0].sharpening.map(({ layer }) => {
    const sharp = snapshots.map((snapshot) => snapshot.sharpening.find((other) => other.layer === layer));
    return { name: layer, x: places, y: sharp.map((one) => (one ? (100 * one.effective.at(-1)) / one.uniform : NaN)) };
  }).filter((line) => line.y.every(Number.isFinite)).slice(0, STYLES);
  if (lines.length) {
    const changes = lines.map((line) => `${line.name}: from ${number(line.y[0])} to ${number(line.y.at(-1))} %.`);
    charts.push(lineChart({ ...axis, name: "How widely coefficients are spread after routing",
      y: "% of an even spread", lines, yRange: [0, 100], description: changes.join(" ") }).element);
  }
  return charts;
}

/** The x axis of checkpoints: their epochs or steps if all labels end in one, else their labels. */
function stepsOf(snapshots) {
  const labels = snapshots.map((snapshot) => snapshot.label);
  const matches = labels.map((label) => /^(.*?)([\d,]+)$/.exec(label));
  if (matches.every((match) => match && match[1] === matches[0][1])) {
    const unit = matches[0][1].trim().split(" ").at(-1) || "checkpoint";
    return { x: unit, places: matches.map((match) => Number(match[2].replaceAll(",", ""))), whole: true };
  }
  return { x: "checkpoint", places: labels.map((_, place) => place), words: labels };
}

function confusionOf({ confusion, classes, snapshots }) {
  const mistakes = confusion.flatMap((row, truth) => row.map((count, said) => ({ truth, said, count })))
    .filter(({ truth, said, count }) => truth !== said && count).sort((a, b) => b.count - a.count);
  const most = mistakes.slice(0, 3).map(({ truth, said, count }) => (
    `\u201c${classes[truth]}\u201d taken for \u201c${classes[said]}\u201d (${plural(count, "time")})`));
  const note = most.length ? `Most often mixed up: ${listed(most)}.` : "No test input was given a wrong class.";
  const shown = classes.length <= MOST_CLASSES;
  const how = "Each row is a true class, each column what the network said. Right answers lie on the framed diagonal; "
    + "all other numbers are mistakes. ";
  const when = snapshots.length < 2 ? "" : ` ${snapshots.at(-1).label}`;
  return make("div", { class: "block side" }, make("div", {}, make("h3", {}, `Which classes are mixed up${when}`),
    make("p", {}, shown ? how : "", note)), shown ? confusionTable(confusion, classes) : null);
}

function confusionTable(confusion, classes) {
  const rows = confusion.map((counts, truth) => {
    const total = counts.reduce((sum, count) => sum + count, 0) || 1;
    const cells = counts.map((count, said) => {
      const cell = make("td", { class: truth === said ? "right" : null }, count ? number(count) : "\u00b7");
      if (count) cell.style.setProperty("--shade", `${Math.round(10 + 90 * (count / total))}%`);
      return cell;
    });
    return [classes[truth], ...cells];
  });
  const caption = "Number of test inputs; the stronger the shade, the larger the part of the row";
  return table(caption, ["true \\ said", ...classes], rows, "confusion");
}
