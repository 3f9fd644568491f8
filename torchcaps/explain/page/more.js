"use strict";
// Sections on overlapping inputs, on the iterations of routing, on controls and limits, and on figures in files.

function overlapsSection(view) {
  const lead = "Two inputs are laid over each other. If capsules keep wholes apart, the network names both, and each "
    + "class\u2019s vector draws its own input without the other.";
  const { overlaps } = view.snapshot;
  const both = overlaps.filter(({ labels, predicted }) => labels.every((label) => predicted.includes(label))).length;
  const trained = overlaps.some(({ inputs }) => inputs) ? " In its training it saw one input at a time." : "";
  const said = `The network names both in ${both} of ${plural(overlaps.length, "pair")}.${trained}`;
  return { lead, parts: [make("p", {}, make("strong", {}, said)),
    ...overlaps.map((overlap) => overlapCard(view, overlap))] };
}

function overlapCard(view, { image, labels, inputs, predicted, drawn }) {
  const names = labels.map((label) => quoted(view, label));
  const said = predicted.map((index) => quoted(view, index));
  const right = [...names].sort().join() === [...said].sort().join();
  const verdict = right ? `\u2713 The network says ${listed(said)}: both right.`
    : `\u2717 The network says ${listed(said)}, but they are ${listed(names)}.`;
  const group = (heading, ...pictures) => make("div", { class: "group" }, make("h3", {}, heading),
    make("div", { class: "pair" }, pictures));
  const seen = figure(picture(image, `${listed(names)} over each other`), listed(names));
  const apart = drawn.map((source, place) => figure(picture(source, `Drawn from the vector of ${said[place]}`),
    `from ${said[place]}`));
  const groups = [group("What the network sees", seen), group("Drawn from its two likeliest classes", apart)];
  if (inputs) {
    const sources = inputs.map((source, place) => figure(picture(source, `An input: ${names[place]}`), names[place]));
    groups.push(group("What was laid over each other", sources));
  }
  return make("div", { class: "card overlap" }, groups, make("p", {}, verdict));
}

/** What a layer's coefficients are like after the last iteration, in a sentence. */
function sharpened({ layer, effective, over, size, uniform }) {
  const whose = over === "parents" ? "a child\u2019s coefficients are" : "a parent\u2019s coefficients are";
  const spread = number(Number(effective.at(-1).toFixed(1)));
  return `${layer}: after ${plural(effective.length, "iteration")} ${whose} spread over ${spread} of ${number(size)} `
    + `${over}; with uniform coefficients, over ${number(Number(uniform.toFixed(1)))}.`
    + (effective.at(-1) > 0.95 * uniform ? " Here routing decides next to nothing." : "");
}

function sharpeningSection(view) {
  const { sharpening } = view.snapshot;
  const lead = "Routing is how parts (children) choose the wholes (parents) that they belong to. It goes round a few "
    + "times, and each time the coefficients, which say how much of a child goes where, fit a little better. The lower "
    + "a line falls, the more clearly the layer chooses.";
  const charts = sharpening.filter((layer) => layer.effective.length > 1).map(sharpeningChart);
  const sentences = make("ul", { class: "sentences" }, sharpening.map((layer) => make("li", {}, sharpened(layer))));
  return { lead, parts: chartsUnder(sentences, charts) };
}

function sharpeningChart(layer) {
  const x = layer.effective.map((_, index) => index + 1);
  return lineChart({ name: layer.layer, x: "iteration", y: `${layer.over} that a coefficient is spread over`, whole: true,
    yRange: [0], level: { value: layer.uniform, name: "uniform" }, lines: [{ name: "routing", x, y: layer.effective }],
    description: sharpened(layer) }).element;
}

function honestSection(view) {
  const compared = " Here is what they look like, and what the numbers are, when there should be nothing to see. "
    + "Compare before you trust them.";
  const lead = `Pictures like these are easily believed.${view.snapshot.controls.length ? compared : ""}`;
  const cards = view.snapshot.controls.map(({ name, value, meaning, pictures }) => {
    const text = [make("h3", {}, capitalized(name)), make("p", { class: "value" }, value), make("p", {}, meaning)];
    if (!pictures) return make("div", { class: "card" }, text);
    const drawn = pictures.map(([source, of]) => figure(picture(source, of), of));
    return make("div", { class: "card wide side" }, make("div", {}, text), make("div", { class: "pictures" }, drawn));
  });
  const { limits } = view.report;
  const list = make("div", { class: "block" }, make("h3", {}, "What this page can and cannot show"),
    make("ul", { class: "sentences" }, limits.map((limit) => make("li", {}, limit))));
  return { lead, parts: [cards.length ? make("div", { class: "cards" }, cards) : null, limits.length ? list : null] };
}

function figuresSection(report) {
  const items = report.figures.map(([file, text]) => {
    const address = file.split("/").map(encodeURIComponent).join("/");
    return make("li", {}, make("a", { href: address }, file), `: ${text}`);
  });
  return { lead: "Pictures for papers and slides lie beside this page, as PNG files.",
    parts: [make("ul", { class: "sentences" }, items)] };
}
